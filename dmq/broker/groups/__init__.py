"""Consumer groups: progress on each queue, subscriptions, message order, lease timers.

Imports: handles, io, topics and below. Interface: group queues, subscriptions, pull offsets.
"""

from __future__ import annotations

from dmq.broker.groups.group_queue import ATTEMPT_MAX, DeliveryLease, GroupQueue
from dmq.broker.groups.lease_timers import IN_HAND_SHARE, Ended, LeaseEnds
from dmq.broker.groups.pull_offsets import NOBODY, PullOffsets
from dmq.broker.groups.queue_front import (
    Edges,
    QueueFront,
    edges,
    finished,
    finished_by_all,
    front,
    progress,
    readers_from,
    size_of,
    sizes,
    step_end,
)
from dmq.broker.groups.settled_letters import Settled
from dmq.broker.groups.subscription import GroupSubscription, SubscribedQueue, due_of
from dmq.broker.groups.subscriptions import Subscriptions

__all__ = [
    "ATTEMPT_MAX",
    "IN_HAND_SHARE",
    "NOBODY",
    "DeliveryLease",
    "Edges",
    "Ended",
    "GroupQueue",
    "GroupSubscription",
    "LeaseEnds",
    "PullOffsets",
    "QueueFront",
    "Settled",
    "SubscribedQueue",
    "Subscriptions",
    "due_of",
    "edges",
    "finished",
    "finished_by_all",
    "front",
    "progress",
    "readers_from",
    "size_of",
    "sizes",
    "step_end",
]
