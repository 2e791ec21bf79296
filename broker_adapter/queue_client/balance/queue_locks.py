"""One consumer at a time in a queue: for how long orderly consumption may believe a lock of the broker.

A broker leases a queue to one client for 60 s. The client asks again every 20 s and believes an answer for 30 s, so
that it stops before the broker gives the queue to another one, also when a batch takes a while to be consumed: one that
begins within the 30 s and takes less than the other 30 is never in the queue together with another consumer's.
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
    """What a consumer asked a broker for; its answer may come late."""

    asked_at_ms: int
    forgotten: Mapping[MessageQueue, int]  # how often each queue had been given back by then


class QueueLocks:
    """The locks of one consumer in its group."""

    def __init__(self) -> None:
        self._asked_at_ms: dict[MessageQueue, int] = {}
        self._forgotten: Counter[MessageQueue] = Counter()

    def ask(self, queues: Iterable[MessageQueue], now_ms: int) -> LockQuestion:
        """Note that a broker is being asked for queues, to renew their locks or to get them."""
        return LockQuestion(now_ms, {queue: self._forgotten[queue] for queue in queues})

    def answered(self, question: LockQuestion, given: Collection[MessageQueue]) -> None:
        """Note which queues the broker gave. A lock is as old as the question: the lease began after it.

        What was given back since the question is not believed: the broker may have given it to somebody else.
        """
        for queue, forgotten in question.forgotten.items():
            if queue not in given:
                self._asked_at_ms.pop(queue, None)
            elif forgotten == self._forgotten[queue]:
                known_ms = self._asked_at_ms.get(queue, question.asked_at_ms)
                self._asked_at_ms[queue] = max(question.asked_at_ms, known_ms)

    def forget(self, queue: MessageQueue) -> None:
        """Stop believing in a lock, before it is given back."""
        self._forgotten[queue] += 1
        self._asked_at_ms.pop(queue, None)

    def may_consume(self, queue: MessageQueue, now_ms: int) -> bool:
        """Say whether a batch of a queue may begin now."""
        asked_at_ms = self._asked_at_ms.get(queue)
        return asked_at_ms is not None and now_ms - asked_at_ms <= BELIEVED_MS
