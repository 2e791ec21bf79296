"""Queue locks: validity of a broker's lock for ordered consumption, with one consumer at a time in a queue.

A broker leases a queue to one client for 60 s. The client renews the lease every 20 s and relies on an answer for 30 s.
So it stops before the broker leases the queue to another client. A batch that starts within these 30 s and ends within
another 30 s never overlaps with a batch of another consumer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from broker_adapter.contracts.message_queue import MessageQueue

BROKER_LEASE_MS = 60_000  # RocketMQ 5.5 default (rocketmq.broker.rebalance.lockMaxLiveTime)
BELIEVED_MS = 30_000  # RocketMQ 5.5 default (rocketmq.client.rebalance.lockMaxLiveTime)
RENEW_MS = 20_000  # RocketMQ 5.5 default (rocketmq.client.rebalance.lockInterval)


class LockQuestion(NamedTuple):
    """Lock request of a consumer; its answer may be late."""

    asked_at_ms: int
    forgotten: Mapping[MessageQueue, int]  # number of releases of each queue at the request


class QueueLocks:
    """Queue locks of one consumer in its group."""

    def __init__(self) -> None:
        self._asked_at_ms: dict[MessageQueue, int] = {}
        self._forgotten: Counter[MessageQueue] = Counter()

    def ask(self, queues: Iterable[MessageQueue], now_ms: int) -> LockQuestion:
        """Return the state of a lock request, to renew or acquire the locks of queues."""
        return LockQuestion(now_ms, {queue: self._forgotten[queue] for queue in queues})

    def answered(self, question: LockQuestion, given: Collection[MessageQueue]) -> None:
        """Record the locks that the broker granted. A lock dates from its request: the lease began later.

        A lock released since the request is ignored: the broker may have leased the queue to another client.
        """
        for queue, forgotten in question.forgotten.items():
            if queue not in given:
                self._asked_at_ms.pop(queue, None)
            elif forgotten == self._forgotten[queue]:
                known_ms = self._asked_at_ms.get(queue, question.asked_at_ms)
                self._asked_at_ms[queue] = max(question.asked_at_ms, known_ms)

    def forget(self, queue: MessageQueue) -> None:
        """Invalidate a lock before it is released."""
        self._forgotten[queue] += 1
        self._asked_at_ms.pop(queue, None)

    def may_consume(self, queue: MessageQueue, now_ms: int) -> bool:
        """Return True if a batch of a queue may start now."""
        asked_at_ms = self._asked_at_ms.get(queue)
        return asked_at_ms is not None and now_ms - asked_at_ms <= BELIEVED_MS
