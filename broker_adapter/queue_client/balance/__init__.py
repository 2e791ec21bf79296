"""Decisions of classic producers and consumers: values and functions of state, ``now_ms`` and a random source.

    consumers                                           producers
    allocation    queues of each member                 queue_choice  the queue of the next message
    environments  separate queues of an environment     faults        pauses of slow or failed brokers
    rebalance     changes of a member's queues
    window        unconsumed messages of one queue, and
                  the offset that may be committed
    queue_locks   one consumer at a time in a queue

No module here reads a clock, waits, or performs I/O. ``now_ms`` is monotonic with an arbitrary origin. Mutable state
belongs to one event loop or thread.
"""
