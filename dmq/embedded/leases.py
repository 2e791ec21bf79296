"""When leases end: renewed while their client lives, else what follows on a failure (``dmq.embedded.failures``).

All of it goes by the boot clock: a step of the wall clock makes no lease longer or shorter.
"""

from __future__ import annotations

import asyncio
from heapq import heapify, heappop, heappush
from typing import Any

import structlog

from broker_adapter.errors import BrokerError
from broker_adapter.limits import AUTO_RENEW_INVISIBLE_MS, AUTO_RENEW_MS_MAX
from dmq.audit.events import EventKind
from dmq.embedded.failures import POSTPONED_MS, Failures
from dmq.embedded.group_queue import ATTEMPT_MAX, GroupQueue, Lease
from dmq.embedded.registry import Registry
from dmq.errors import StoreError
from dmq.store.ops import Emit, Op
from dmq.store.ops import Receipt as Stored
from retry.flow import ComeBack, LeaseExpired

log = structlog.get_logger("dmq.embedded")

CLIENT_ALIVE_S = 60.0  # clients send a heartbeat every 10 s
CLIENTS_MAX = 100_000  # remembered; the longest unseen give way, and their leases end as those of the dead do
CLIENT_GONE_INVISIBLE_MS = 1_000
_NAP_S_MAX = 0.2  # the loop's own timers do not count a suspended machine
_EXPIRED_PER_COMMIT_MAX = 1024
_TIDY_AT_MIN = 8192

_Ended = tuple[GroupQueue, int, Lease]
_Watched = tuple[int, int, GroupQueue, int, int]  # ends_ms, turn, queue, offset, epoch


class Leases:
    """Watches every lease of the broker; belongs to the event loop."""

    def __init__(self, registry: Registry, failures: Failures) -> None:
        self._registry = registry
        self._failures = failures
        self._clock = registry.clock
        registry.watch = self.watch
        self._heap: list[_Watched] = []
        self._turn = 0
        self._tidy_at = _TIDY_AT_MIN
        self._wake = asyncio.Event()
        self._seen_s: dict[str, float] = {}  # the longest unseen first
        self.expired_total = 0
        self._task = asyncio.get_running_loop().create_task(self._run(), name="dmq-leases")

    async def close(self) -> None:
        """Stop watching; leases are in memory and end with it, renewed ones are rows."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def watch(self, queue: GroupQueue, offset: int, lease: Lease) -> None:
        """Bring the message back when ``lease`` ends."""
        if lease.renew_for and not lease.renew_until_ms:
            lease.renew_until_ms = self._clock.boot_ms() + AUTO_RENEW_MS_MAX
            if lease.renew_for not in self._seen_s:
                self.client_seen(lease.renew_for)
        self._turn += 1
        if not self._heap or lease.ends_ms < self._heap[0][0]:
            self._wake.set()
        heappush(self._heap, (lease.ends_ms, self._turn, queue, offset, lease.epoch))
        if len(self._heap) >= self._tidy_at:
            self._tidy()

    def _tidy(self) -> None:
        """Drop what was finished long before its time; each time at least half is dropped or as much may come."""
        self._heap = [
            watched
            for watched in self._heap
            if (lease := watched[2].leases.get(watched[3])) is not None and lease.epoch == watched[4]
        ]
        heapify(self._heap)
        self._tidy_at = max(_TIDY_AT_MIN, 2 * len(self._heap))

    def client_seen(self, client_id: str) -> None:
        """Note a sign of life, and forget who gave none for long."""
        now_s = self._clock.monotonic_s()
        seen_s = self._seen_s
        seen_s.pop(client_id, None)
        seen_s[client_id] = now_s
        oldest = next(iter(seen_s))
        while len(seen_s) > CLIENTS_MAX or now_s - seen_s[oldest] >= CLIENT_ALIVE_S:
            del seen_s[oldest]
            oldest = next(iter(seen_s))

    def client_gone(self, client_id: str) -> None:
        """Let the client's renewed leases end soon."""
        if self._seen_s.pop(client_id, None) is None:
            return
        soon_ms = self._clock.boot_ms() + CLIENT_GONE_INVISIBLE_MS
        for _, _, queue, offset, epoch in list(self._heap):
            lease = queue.leases.get(offset)
            if lease is not None and lease.epoch == epoch and lease.renew_for == client_id:
                lease.renew_for = ""
                lease.ends_ms = min(lease.ends_ms, soon_ms)
                self.watch(queue, offset, lease)

    def give_back(self, queue: GroupQueue, offset: int, lease: Lease) -> asyncio.Future[Any]:
        """End a lease now, whose message was read; the future is done when what follows is durable."""
        if isinstance(self._failures.outcome(queue, lease, LeaseExpired()), ComeBack):
            return self._return([(queue, offset, lease)], EventKind.GIVEN_BACK)
        return self._failures.fail(queue, offset, lease, LeaseExpired())

    async def expire(self) -> int:
        """End what expired by now, durable on return; say how many leases that were.

        A message that cannot be read is tried again later; the error is raised if the store has failed for good.
        """
        expired = self._pop_expired()
        if not expired:
            return 0
        back: list[_Ended] = []
        others: list[_Ended] = []
        for each in expired:
            queue, _, lease = each
            # Of a lease from before a restart nothing is known until its message was read.
            is_known = bool(lease.message_id)
            comes_back = is_known and isinstance(self._failures.outcome(queue, lease, LeaseExpired()), ComeBack)
            (back if comes_back else others).append(each)
        failed = [self._failures.fail(*each, LeaseExpired()) for each in others]
        if back:
            await self._return(back, EventKind.LEASE_EXPIRED)
        for each, result in zip(others, await asyncio.gather(*failed, return_exceptions=True), strict=True):
            if isinstance(result, Exception):
                if self._registry.store.failure is not None:
                    raise result
                self._postpone(*each, result)
        self.expired_total += len(expired)
        return len(expired)

    def _postpone(self, queue: GroupQueue, offset: int, lease: Lease, error: Exception) -> None:
        log.error("expiry_failed", topic=queue.topic_id, queue=queue.queue_id, offset=offset, error=str(error))
        if queue.leases.get(offset) is lease:
            lease.ends_ms = self._clock.boot_ms() + POSTPONED_MS
            self.watch(queue, offset, lease)

    async def _run(self) -> None:
        while True:
            try:
                if await self.expire():
                    continue
            except (BrokerError, StoreError):
                return  # the store has failed for good; the daemon is ending
            self._wake.clear()
            nap_s = None
            if self._heap:
                nap_s = min(max((self._heap[0][0] - self._clock.boot_ms()) / 1000, 0.001), _NAP_S_MAX)
            try:
                async with asyncio.timeout(nap_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _pop_expired(self) -> list[_Ended]:
        now_ms = self._clock.boot_ms()
        expired: list[_Ended] = []
        while self._heap and self._heap[0][0] <= now_ms and len(expired) < _EXPIRED_PER_COMMIT_MAX:
            _, _, queue, offset, epoch = heappop(self._heap)
            lease = queue.leases.get(offset)
            if lease is None or lease.epoch != epoch or lease.is_returning:
                continue  # finished, handed out again, or on its way back
            if lease.ends_ms > now_ms:
                continue  # hidden anew, and watched anew
            if self._is_renewed(lease, now_ms):
                lease.ends_ms = min(now_ms + AUTO_RENEW_INVISIBLE_MS, lease.renew_until_ms)
                self.watch(queue, offset, lease)
            else:
                lease.is_returning = True  # it may be in the heap more than once
                expired.append((queue, offset, lease))
        return expired

    def _is_renewed(self, lease: Lease, now_ms: int) -> bool:
        if not lease.renew_for or now_ms >= lease.renew_until_ms:
            return False
        seen_s = self._seen_s.get(lease.renew_for)
        return seen_s is not None and self._clock.monotonic_s() - seen_s < CLIENT_ALIVE_S

    def _return(self, leases: list[_Ended], kind: EventKind) -> asyncio.Future[Any]:
        ops: list[Op] = []
        planned: list[tuple[GroupQueue, int, Lease, int]] = []
        for queue, offset, lease in leases:
            attempt, rows = queue.plan_return(offset, lease, self._clock.now_ms())
            found = self._registry.subscription_of(queue)
            total = min(lease.attempts_before + attempt, ATTEMPT_MAX)
            ops += [*rows, Emit(found.event(kind, queue, total, offset, lease.message_id), offset)]
            planned.append((queue, offset, lease, attempt))
        done = self._registry.store.commit_async(ops, is_urgent=True)
        done.add_done_callback(lambda future: self._come_back(planned, future))
        return done

    def _come_back(self, planned: list[tuple[GroupQueue, int, Lease, int]], done: asyncio.Future[list[Stored]]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        for queue, offset, lease, attempt in planned:
            if queue.come_back(offset, lease, attempt):
                found = self._registry.subscription_of(queue)
                found.wake(queue.queue_id)
