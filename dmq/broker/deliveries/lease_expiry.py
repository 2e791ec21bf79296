"""Lease expiry: returns the message for redelivery, or applies the failure rules (``dmq.broker.failures.failures``)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import structlog

from broker_adapter.contracts.errors import BrokerError
from dmq.broker.failures import Failures, come_back
from dmq.broker.groups import DeliveryLease, Ended, LeaseEnds, SubscribedQueue
from dmq.broker.message_spans import MessageSpans
from dmq.errors import StoreError
from dmq.store import Store
from dmq.store.schema.messages.index import Receipt as Stored
from dmq.store.writer.operations import Op
from dmq.trail.events import EventKind
from retry.flow import ComeBack, LeaseExpired

log = structlog.get_logger("dmq.broker")

_EXPIRED_PER_COMMIT_MAX = 1024
_FAULT_PAUSE_S = 1.0


class Leases:
    """Expiry of all leases of the broker, in a task of its own. It belongs to the event loop."""

    def __init__(self, store: Store, ends: LeaseEnds, failures: Failures, spans: MessageSpans | None = None) -> None:
        self._store = store
        self._spans = spans
        self._clock = store.clock
        self._ends = ends
        self._failures = failures
        self.expired_total = 0
        self._task = asyncio.get_running_loop().create_task(self._run(), name="dmq-leases")

    async def close(self) -> None:
        """Stop the task. Leases in memory end with it; renewed leases are rows."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def give_back(self, queue: SubscribedQueue, offset: int, lease: DeliveryLease) -> asyncio.Future[Any]:
        """End a lease now; its message must have been read. The future is done when the outcome is durable."""
        if isinstance(self._failures.outcome(queue, lease, LeaseExpired()), ComeBack):
            return self._return([Ended(queue, offset, lease)], EventKind.GIVEN_BACK)
        return self._failures.fail(queue, offset, lease, LeaseExpired())

    async def expire(self) -> int:
        """End up to ``_EXPIRED_PER_COMMIT_MAX`` expired leases, durable on return; return their number.

        A message that cannot be read is retried later. The error is raised if the store has failed permanently.
        """
        expired = self._ends.pop(_EXPIRED_PER_COMMIT_MAX)
        if not expired:
            return 0
        back: list[Ended] = []
        others: list[Ended] = []
        for each in expired:
            # For a lease from before a restart, the outcome is unknown until its message is read. With a stored reason,
            # the row must be read, because the row of the returned message keeps it.
            is_known = bool(each.lease.message_id) and not each.lease.has_reason
            comes_back = is_known and self._comes_back(each)
            (back if comes_back else others).append(each)
        failed = [self._failures.fail(*each, LeaseExpired()) for each in others]
        if back:
            await self._return(back, EventKind.LEASE_EXPIRED)
        for each, result in zip(others, await asyncio.gather(*failed, return_exceptions=True), strict=True):
            if isinstance(result, Exception):
                if self._store.failure is not None:
                    raise result
                queue, offset, _ = each
                place = {"topic": queue.topic_id, "queue": queue.queue_id, "offset": offset}
                log.error("lease_expiry_failed", **place, error=str(result))
        self.expired_total += len(expired)
        return len(expired)

    def _comes_back(self, ended: Ended) -> bool:
        try:
            return isinstance(self._failures.outcome(ended.queue, ended.lease, LeaseExpired()), ComeBack)
        except Exception:  # noqa: BLE001 - the separate failure call meets and reports the error again
            return False

    async def _run(self) -> None:
        while True:
            try:
                if not await self.expire():
                    await self._ends.wait()
            except (BrokerError, StoreError):
                return  # the store has failed permanently; the daemon stops
            except Exception:  # without this task, no lease would expire
                log.exception("lease_expiry_failed")
                await asyncio.sleep(_FAULT_PAUSE_S)

    def _return(self, leases: Sequence[Ended], kind: EventKind) -> asyncio.Future[Any]:
        ops: list[Op] = []
        planned: list[tuple[Ended, int]] = []
        for each in leases:
            more, attempt = come_back(*each, self._clock.now_ms(), kind)
            ops += more
            planned.append((each, attempt))
        done = self._store.commit_async(ops, is_urgent=True)
        done.add_done_callback(lambda future: _come_back(planned, future))
        if self._spans is not None:
            self._spans.ended_after(done, self._spans.returned(leases, is_expired=kind is EventKind.LEASE_EXPIRED))
        return done


def _come_back(planned: Sequence[tuple[Ended, int]], done: asyncio.Future[list[Stored]]) -> None:
    if done.cancelled() or done.exception() is not None:
        return
    for (queue, offset, lease), attempt in planned:
        if queue.come_back(offset, lease, attempt):
            queue.subscription.wake(queue.queue_id)
