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

from __future__ import annotations

from broker_adapter.queue_client.balance.allocation import Averagely, Strategy
from broker_adapter.queue_client.balance.environments import Environments, OwnEnvironment
from broker_adapter.queue_client.balance.faults import RULES_4, RULES_5, FaultTable, RoundRobin
from broker_adapter.queue_client.balance.queue_choice import avoiding_faults, avoiding_faults_4, by_hash, in_turn
from broker_adapter.queue_client.balance.queue_locks import RENEW_MS, QueueLocks
from broker_adapter.queue_client.balance.rebalance import IDLE_MS_MAX, changes
from broker_adapter.queue_client.balance.window import CONSUME_MS_MAX, Window, WindowBounds, pause

__all__ = [
    "CONSUME_MS_MAX",
    "IDLE_MS_MAX",
    "RENEW_MS",
    "RULES_4",
    "RULES_5",
    "Averagely",
    "Environments",
    "FaultTable",
    "OwnEnvironment",
    "QueueLocks",
    "RoundRobin",
    "Strategy",
    "Window",
    "WindowBounds",
    "avoiding_faults",
    "avoiding_faults_4",
    "by_hash",
    "changes",
    "in_turn",
    "pause",
]
