"""What classic producers and consumers decide, as values and functions of state, ``now_ms`` and a random source.

    consumers                                           producers
    allocation    which queues are a member's           queue_choice  the queue of the next message
    environments  queues of one environment alone       faults        which brokers to leave alone, and for how long
    rebalance     what that changes for it
    window        one queue: what is unconsumed, and
                  the offset that may be committed
    queue_locks   one consumer at a time in a queue

Nothing here reads a clock, waits, or speaks to anybody. ``now_ms`` is monotonic, with any start. What is mutable
belongs to one event loop or thread.
"""
