"""Local retries of messages that the cluster delivers: a failed delivery of the group is taken over.

A delivery of the cluster to such a group is remembered until it is finished. If it fails, a copy with the group's retry
policy first becomes durable here. Then the original is acknowledged at the cluster. After a crash in between, both have
it. When the cluster delivers it again, the pending or dead copy here is found by its id, and the acknowledgement is
repeated.

A delivery that is not remembered, after a restart or for lack of room, fails under the cluster's own policy. So does a
message with a message group: with a copy here, later messages of the group would overtake it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import structlog

from broker_adapter.contracts.adapter import PopBroker, Subscription
from broker_adapter.contracts.errors import BrokerError, Refused, Rule
from broker_adapter.contracts.limits import AUTO_RENEW_INVISIBLE_MS, AUTO_RENEW_MS_MAX, INVISIBLE_MS_MAX
from broker_adapter.contracts.message import Delivery, pack_id
from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.lease_timers import LeaseTimers
from dmq.broker import EmbeddedBroker
from dmq.broker.topics import Group
from dmq.errors import StoreError
from retry.failure_reason import FailureReason
from retry.flow import Failure, GivenUp, LeaseExpired, Nacked
from retry.policy import MAX_ATTEMPTS_LIMIT

log = structlog.get_logger("dmq.cluster")

LONGER_MS = 5_000  # margin of the invisible duration at the cluster, so that it expires here first
HELD_MAX = 10_000  # remembered deliveries
HELD_BYTES_MAX = 64 * 1024 * 1024  # bytes of their payloads
_MOVED_KEPT = 4_096
_GONE_MS = 1_000  # after its client announced its termination
_ACK_PAUSES_S = (0.5, 1.0)


class ReceiveParameters(NamedTuple):
    """The parameters of a receive."""

    group: str
    subscription: Subscription
    batch_max: int
    invisible_ms: int
    renew_for: str


@dataclass(slots=True)
class _Held:
    """An unfinished delivery of the cluster."""

    group_id: int
    delivery: Delivery
    renew_for: str
    ends_ms: int  # by the boot clock
    renew_until_ms: int


class RetriesHere:
    """The deliveries with local retries. The event loop owns the object; call ``close`` once.

    Unfinished deliveries are then left to the cluster.
    """

    def __init__(
        self, local: EmbeddedBroker, cluster: PopBroker, clock: Clock, *, default: Literal["here", "cluster"]
    ) -> None:
        self.taken_over_total = 0
        self.held_bytes = 0
        self._local = local
        self._cluster = cluster
        self._clock = clock
        self._default = default
        self._held: dict[str, _Held] = {}  # by receipt handle
        self._renewed: dict[str, set[str]] = {}  # handles with renewed leases, by client
        self._moved: dict[str, None] = {}  # handles of deliveries that were taken over, oldest first
        self._timers = LeaseTimers[str](
            *(clock, local.lease_ends.clients, self._counts),
            renewed_ms=AUTO_RENEW_INVISIBLE_MS,
            tidy_at_min=2 * HELD_MAX,
        )
        self._is_full = False
        self._ending: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Stop taking over; wait briefly for acknowledgements of deliveries that were taken over."""
        if self._ending is not None:
            self._ending.cancel()
            await asyncio.gather(self._ending, return_exceptions=True)
        if self._tasks:
            _, left = await asyncio.wait(self._tasks, timeout=_ACK_PAUSES_S[0])
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._held)

    def keeps(self, group: str) -> bool:
        """Return True if failed messages of a group are retried here. The cluster keeps the order of a FIFO group."""
        found = self._local.names.groups.get(group)
        retries = found.retries if found is not None and found.retries is not None else self._default
        return retries == "here" and not self._cluster.group_settings(group).is_fifo

    # -- receiving ----------------------------------------------------------------------------------------------------

    @staticmethod
    def hidden_ms(asked: ReceiveParameters) -> int:
        """Return the invisible duration to request from the cluster."""
        return min(asked.invisible_ms + LONGER_MS, INVISIBLE_MS_MAX)

    async def sift(self, asked: ReceiveParameters, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Return the deliveries to hand out; those with a copy here, or beyond the maximum of attempts, are omitted."""
        group = await self._local.catalog.group(asked.group)
        max_attempts = self._local.catalog.policy(group.group_id).max_attempts
        passed: list[Delivery] = []
        for each in deliveries:
            if not each.message_group and each.delivery_attempt > 1:
                if await self._is_here(group, each):
                    log.info("duplicate_retry", group=asked.group, topic=each.topic, message_id=each.message_id)
                    self._finish_there(asked.group, each)
                    continue
                if each.delivery_attempt > max_attempts:
                    last = each._replace(delivery_attempt=each.delivery_attempt - 1)
                    if await self._take_over(group.group_id, last, LeaseExpired()):
                        continue
            passed.append(each if asked.renew_for else each._replace(invisible_ms=self._left_ms(asked, each)))
        return passed

    @staticmethod
    def _left_ms(asked: ReceiveParameters, delivery: Delivery) -> int:
        """Return the consumer's time for a delivery: the time left at the cluster, minus the margin that we added."""
        return max(1, min(asked.invisible_ms, delivery.invisible_ms - LONGER_MS))

    async def _is_here(self, group: Group, delivery: Delivery) -> bool:
        """Return True if a failed message of a group has a pending or dead copy here."""
        topic = self._local.names.topics.get(delivery.topic)
        return topic is not None and await self._local.failures.is_known(group, topic, pack_id(delivery.message_id))

    def hold(self, asked: ReceiveParameters, deliveries: Sequence[Delivery]) -> None:
        """Remember deliveries that are handed out, as far as there is room."""
        group = self._local.names.groups.get(asked.group)
        if group is None:
            return
        now_ms = self._clock.boot_ms()
        if asked.renew_for and deliveries:
            self._local.client_seen(asked.renew_for)
        for each in deliveries:
            if each.message_group:
                continue
            if len(self._held) >= HELD_MAX or self.held_bytes + len(each.payload) > HELD_BYTES_MAX:
                if not self._is_full:
                    log.warning("retries_left_to_cluster", group=asked.group, held=len(self._held))
                self._is_full = True
                return
            lasts_ms = AUTO_RENEW_INVISIBLE_MS if asked.renew_for else each.invisible_ms
            until_ms = now_ms + AUTO_RENEW_MS_MAX - AUTO_RENEW_INVISIBLE_MS if asked.renew_for else 0
            self._remember(
                each.receipt_handle, _Held(group.group_id, each, asked.renew_for, now_ms + lasts_ms, until_ms)
            )
        self._is_full = False

    def _remember(self, handle: str, held: _Held) -> None:
        self._held[handle] = held
        if held.renew_for:
            self._renewed.setdefault(held.renew_for, set()).add(handle)
        self.held_bytes += len(held.delivery.payload)
        self._watch(handle, held)

    def _watch(self, handle: str, held: _Held) -> None:
        self._timers.start(held.ends_ms, handle)
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end(), name="dmq-retries-here")

    def _counts(self, ends_ms: int, handle: str) -> bool:
        held = self._held.get(handle)
        return held is not None and held.ends_ms == ends_ms

    def _taken(self, group: str, topic: str, handle: str) -> _Held | None:
        """Remove and return the delivery of a handle; ``None`` if there is none, or it is of another group or topic."""
        held, known = self._held.get(handle), self._local.names.groups.get(group)
        if held is None or known is None or (known.group_id, topic) != (held.group_id, held.delivery.topic):
            return None
        self._forget(handle, held)
        return held

    def _forget(self, handle: str, held: _Held) -> None:
        del self._held[handle]
        if held.renew_for:
            own = self._renewed[held.renew_for]
            own.discard(handle)
            if not own:
                del self._renewed[held.renew_for]
        self.held_bytes -= len(held.delivery.payload)

    # -- finishing ----------------------------------------------------------------------------------------------------

    async def ack(self, group: str, topic: str, handles: Sequence[str]) -> Sequence[Exception | None]:
        """Acknowledge handles of the cluster, as ``PopBroker.ack``."""
        results: dict[str, Exception | None] = {each: _given_back(each) for each in handles if each in self._moved}
        asked = [each for each in handles if each not in results]
        held = {each: found for each in asked if (found := self._taken(group, topic, each)) is not None}
        try:
            if asked:
                results |= zip(asked, await self._cluster.ack(group, topic, asked), strict=True)
        finally:  # a delivery without a definite answer is held again
            for each, found in held.items():
                if each not in results or not isinstance(results[each], Refused | None):
                    self._remember(each, found)
        return [results[each] for each in handles]

    def note_failure(self, group: str, handle: str, reason: FailureReason) -> bool:
        """Store a reason as ``ServedBroker.note_failure``; return False if the cluster keeps the retries."""
        held, known = self._held.get(handle), self._local.names.groups.get(group)
        if held is None or known is None or known.group_id != held.group_id:
            return False
        self._local.failures.reasons.keep(group, handle, reason)
        return self._local.failures.reasons.is_on

    async def change_invisible(
        self, group: str, topic: str, handle: str, invisible_ms: int, *, suspend: bool = False
    ) -> str:
        """Change an invisible duration as ``PopBroker.change_invisible``, for a handle of the cluster."""
        if handle in self._moved:
            raise _given_back(handle)
        held = self._taken(group, topic, handle)
        if held is not None and not suspend and (held.renew_for or invisible_ms <= 0):
            failure = Nacked(self._clock.now_ms() + invisible_ms) if held.renew_for else LeaseExpired()
            if await self._take_over(held.group_id, held.delivery, failure):
                return handle
        longer_ms = LONGER_MS if held is not None and not held.renew_for and invisible_ms > 0 else 0
        hidden_ms = min(invisible_ms + longer_ms, INVISIBLE_MS_MAX)
        try:
            new = await self._cluster.change_invisible(group, topic, handle, hidden_ms, suspend=suspend)
        except BrokerError as error:
            if held is not None and not isinstance(error, Refused):
                self._remember(handle, held)
            raise
        if held is not None and longer_ms:
            held.delivery = held.delivery._replace(receipt_handle=new)
            held.ends_ms = self._clock.boot_ms() + invisible_ms
            self._remember(new, held)
        return new

    async def dead_letter(self, group: str, topic: str, handle: str, *, attempts: int) -> None:
        """Give up a delivery as ``PopBroker.dead_letter``, for a handle of the cluster."""
        if handle in self._moved:
            raise _given_back(handle)
        held = self._taken(group, topic, handle)
        if held is not None:
            policy = self._local.catalog.policy(held.group_id)
            is_final = not held.renew_for or attempts > MAX_ATTEMPTS_LIMIT  # see ``dmq.broker.deliveries.deliveries``
            failure: Failure = GivenUp() if is_final else Nacked()
            told = attempts if not is_final and attempts >= policy.max_attempts else 0
            if await self._take_over(held.group_id, held.delivery, failure, attempts_told=told):
                return
        await self._cluster.dead_letter(group, topic, handle, attempts=attempts)

    def client_gone(self, client_id: str) -> None:
        """Shorten the leases of a push consumer that disconnects."""
        soon_ms = self._clock.boot_ms() + _GONE_MS
        for handle in self._renewed.get(client_id, ()):
            held = self._held[handle]
            if held.renew_until_ms:  # 0 if it announced it before
                held.renew_until_ms, held.ends_ms = 0, min(held.ends_ms, soon_ms)
                self._watch(handle, held)

    # -- taking over --------------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Take over deliveries whose lease expires."""
        while True:
            await self._timers.wait()
            self._local.lease_ends.clients.look()
            now_ms = self._clock.boot_ms()
            while (expired := self._timers.pop(now_ms)) is not None:
                _, handle = expired
                held = self._held.get(handle)
                if held is None or held.ends_ms > now_ms:
                    continue  # finished, or extended and watched under its new time
                if self._timers.renew(held, now_ms):
                    self._watch(handle, held)
                else:
                    self._spawn(self._expire(handle))

    async def _expire(self, handle: str) -> None:
        held = self._held.get(handle)
        if held is None or held.ends_ms > self._clock.boot_ms():
            return  # finished or extended since its expiry was detected
        self._forget(handle, held)
        await self._take_over(held.group_id, held.delivery, LeaseExpired())

    async def _take_over(self, group_id: int, delivery: Delivery, failure: Failure, *, attempts_told: int = 0) -> bool:
        """Make a failure durable here and acknowledge it at the cluster; ``False`` if it remains with the cluster."""
        names = self._local.names
        group = names.groups_by_id[group_id]
        if group.name not in names.groups or names.groups[group.name].group_id != group_id:
            return False  # it was removed meanwhile
        handle = delivery.receipt_handle
        self._moved[handle] = None  # set first: a concurrent acknowledgement must not be OK
        if len(self._moved) > _MOVED_KEPT:
            del self._moved[next(iter(self._moved))]
        try:
            topic = await self._local.catalog.topic(delivery.topic)
            if self._local.store.is_disk_low():
                self._moved.pop(handle, None)
                return False
            await self._local.failures.take_over(group, topic, delivery, failure, attempts_told=attempts_told)
        except (BrokerError, StoreError) as error:  # a copy may exist: it is found at the next delivery
            log.warning("retry_takeover_failed", group=group.name, topic=delivery.topic, why=str(error))
            self._moved.pop(handle, None)
            return False
        self.taken_over_total += 1
        self._finish_there(group.name, delivery)
        return True

    def _finish_there(self, group: str, delivery: Delivery) -> None:
        self._spawn(self._told(group, delivery))

    async def _told(self, group: str, delivery: Delivery) -> None:
        """Acknowledge a durable copy at the cluster; after an error it is redelivered, and acknowledged then."""
        error: Exception | None = None
        for pause_s in (0.0, *_ACK_PAUSES_S):
            await asyncio.sleep(pause_s)
            try:
                (error,) = await self._cluster.ack(group, delivery.topic, [delivery.receipt_handle])
            except BrokerError as failure:
                error = failure
            if error is None or isinstance(error, Refused):
                break
        if error is not None:
            log.info("cluster_ack_failed", group=group, message_id=delivery.message_id, why=str(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("retry_takeover_failed", exc_info=error)


def _given_back(handle: str) -> Refused:
    return Refused(Rule.RECEIPT_HANDLE, "the message was returned and will be delivered again", value=handle)
