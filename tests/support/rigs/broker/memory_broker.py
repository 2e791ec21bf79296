"""A ``PopBroker`` in a few dictionaries: what the contract says and nothing more. For unit and protocol tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from broker_adapter.contracts.adapter import GroupSettings, Subscription, TopicRoute
from broker_adapter.contracts.errors import Refused, Rule, topic_unknown
from broker_adapter.contracts.limits import RETRY_STEPS_MS
from broker_adapter.contracts.message import DeadLetterFacts, Delivery, Envelope, RecallReceipt, SendReceipt, pack_id
from broker_adapter.contracts.topics import dead_letter_topic
from broker_adapter.runtime.clock import Clock
from dmq.broker.filters.filters import filter_of
from dmq.config.units import format_time
from dmq.store.schema.messages.record import QueuedMessage
from retry.failure_reason import FailureReason
from retry.policy import MAX_ATTEMPTS_DEFAULT, Reason

DEFAULT_SETTINGS = GroupSettings(is_fifo=False, max_attempts=MAX_ATTEMPTS_DEFAULT, delays_ms=RETRY_STEPS_MS)


@dataclass(slots=True)
class _Stored:
    envelope: Envelope
    receipt: SendReceipt
    stored_at_ms: int
    facts: DeadLetterFacts | None = None  # of a dead letter
    recalled_at_ms: int = 0


@dataclass(slots=True)
class _Lease:
    """Where a group is with one message."""

    visible_at_ms: int = 0
    turn: int = 0  # of hand-outs; a handle of another turn is refused
    attempt: int = 0
    is_done: bool = False
    is_out: bool = False  # handed out, and neither finished nor failed
    is_push: bool = False
    is_suspended: bool = False
    is_changed: bool = False  # since this hand-out, by its consumer
    first_failed_at_ms: int = 0


@dataclass(slots=True)
class MemoryBroker:
    """Keeps every message of a topic in one list; queue 0, offset = position. ``fail_next`` is raised by one call."""

    clock: Clock
    queues: int = 8
    fail_next: Exception | None = None
    policies: dict[str, GroupSettings] = field(default_factory=dict)
    groups: set[str] = field(default_factory=set)
    seen: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    calls: list[tuple[object, ...]] = field(default_factory=list)
    failure_reasons: dict[tuple[str, str], FailureReason] = field(default_factory=dict)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    send_gate: asyncio.Event | None = None  # when set, sends wait for it
    on_cancel: Callable[[], None] = lambda: None  # called when a waiting receive is cancelled
    sending: asyncio.Event = field(default_factory=asyncio.Event)
    _topics: dict[str, list[_Stored]] = field(default_factory=dict)
    _leases: dict[tuple[str, str, int], _Lease] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    receives_waiting: int = 0

    def stored(self, topic: str) -> list[Envelope]:
        """Everything a topic holds, due or not."""
        return [stored.envelope for stored in self._topics.get(topic, [])]

    def poke(self) -> None:
        """Make waiting receives look again, after a manual clock moved."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _fail(self) -> None:
        error, self.fail_next = self.fail_next, None
        if error is not None:
            raise error

    async def route(self, topic: str) -> TopicRoute:
        self._fail()
        self._topics.setdefault(topic, [])
        return TopicRoute(topic, self.queues)

    async def ensure_group(self, group: str) -> None:
        self._fail()
        self.groups.add(group)

    def group_settings(self, group: str, topics: Collection[str] = ()) -> GroupSettings:
        found = self.policies.get(group)
        if found is not None:
            return found
        contents = [self.stored(topic) for topic in topics]
        is_fifo = bool(contents) and all(each and all(one.message_group for one in each) for each in contents)
        return DEFAULT_SETTINGS._replace(is_fifo=is_fifo)

    async def send(self, envelopes: Sequence[Envelope]) -> Sequence[SendReceipt]:
        self._fail()
        self.sending.set()
        if self.send_gate is not None:
            await self.send_gate.wait()
        receipts = [self._store(envelope) for envelope in envelopes]
        self.poke()
        return receipts

    def _store(self, envelope: Envelope) -> SendReceipt:
        log = self._topics.setdefault(envelope.topic, [])
        for known in log:
            if known.envelope.message_id == envelope.message_id:
                if known.recalled_at_ms:
                    return SendReceipt(envelope.message_id, -1, -1, True, recalled_at_ms=known.recalled_at_ms)
                return known.receipt._replace(repeated=True)
        waits = envelope.deliver_at_ms > self.clock.now_ms()
        position = -1 if waits else len(log)
        handle = f"{envelope.topic}/{envelope.message_id}" if waits else ""
        receipt = SendReceipt(envelope.message_id, -1 if waits else 0, position, recall_handle=handle)
        log.append(_Stored(envelope, receipt, self.clock.now_ms()))
        return receipt

    async def recall(self, topic: str, recall_handle: str) -> RecallReceipt:
        self._fail()
        if topic not in self._topics:
            raise topic_unknown(topic)
        if not recall_handle.startswith(f"{topic}/"):
            raise Refused(Rule.REQUEST, "the recall handle is not one of this topic", value=recall_handle)
        now_ms = self.clock.now_ms()
        for stored in self._topics[topic]:
            if stored.receipt.recall_handle == recall_handle:
                envelope, repeated = stored.envelope, bool(stored.recalled_at_ms)
                if not repeated and envelope.deliver_at_ms <= now_ms:
                    raise Refused(Rule.NOT_FOUND, f"the message was delivered at {format_time(envelope.deliver_at_ms)}")
                stored.recalled_at_ms = stored.recalled_at_ms or now_ms
                return RecallReceipt(envelope.message_id, stored.recalled_at_ms, repeated)
        raise Refused(Rule.NOT_FOUND, "the message is unknown", value=recall_handle)

    async def receive(
        self,
        group: str,
        subscription: Subscription,
        *,
        batch_max: int,
        invisible_ms: int,
        wait_ms: int,
        renew_for: str = "",
    ) -> Sequence[Delivery]:
        self._fail()
        self.calls.append(("receive", group, subscription, batch_max, invisible_ms, wait_ms, renew_for))
        try:
            async with asyncio.timeout(wait_ms / 1000):
                while True:
                    changed = self._changed
                    if found := self._take(group, subscription, batch_max, invisible_ms, is_push=bool(renew_for)):
                        return found
                    if not wait_ms:
                        return ()
                    self.waiting.set()
                    self.receives_waiting += 1
                    try:
                        await changed.wait()
                    finally:
                        self.receives_waiting -= 1
        except TimeoutError:
            return ()
        except asyncio.CancelledError:
            self.on_cancel()
            raise

    def _take(
        self, group: str, subscription: Subscription, batch_max: int, invisible_ms: int, *, is_push: bool
    ) -> list[Delivery]:
        if subscription.queue_id >= self.queues:
            raise Refused(Rule.NOT_FOUND, "the topic has no such queue", value=subscription.queue_id)
        self._end_leases()
        passes = filter_of(subscription)
        now_ms, found, blocked = self.clock.now_ms(), list[Delivery](), set[str]()
        for position, stored in enumerate(self._topics.get(subscription.topic, [])):
            envelope, message_group = stored.envelope, stored.envelope.message_group
            lease = self._leases.setdefault((group, subscription.topic, position), _Lease())
            if lease.is_done or stored.recalled_at_ms or envelope.deliver_at_ms > now_ms or message_group in blocked:
                continue
            wanted, is_free = subscription.queue_id in {-1, 0}, lease.visible_at_ms <= now_ms
            if wanted and is_free and passes is not None and not passes(_queued(envelope)):
                lease.is_done = True
                continue
            if message_group and (not is_free or (wanted and is_push)):
                blocked.add(message_group)
            if not is_free or not wanted:
                continue
            lease.turn += 1
            lease.attempt += not lease.is_suspended
            lease.is_out, lease.is_push, lease.is_suspended, lease.is_changed = True, is_push, False, False
            lease.visible_at_ms = now_ms + invisible_ms
            handle = f"{group}/{subscription.topic}/{position}/{lease.turn}"
            found.append(_delivery(stored, position, handle, lease.attempt, invisible_ms))
            if len(found) == batch_max:
                break
        return found

    def _end_leases(self) -> None:
        """Look what became of leases that are over by now."""
        now_ms = self.clock.now_ms()
        for (group, topic, position), lease in list(self._leases.items()):
            if lease.is_out and not lease.is_done and lease.visible_at_ms <= now_ms:
                lease.is_out = False
                if not lease.is_suspended:
                    self._fail_attempt(group, topic, position, lease)

    def _fail_attempt(self, group: str, topic: str, position: int, lease: _Lease) -> bool:
        """Count a failure; say whether the message is dead now."""
        lease.first_failed_at_ms = lease.first_failed_at_ms or self.clock.now_ms()
        if lease.attempt < self.group_settings(group).max_attempts:
            return False
        self._bury(group, topic, position, lease, Reason.EXHAUSTED)
        return True

    def _bury(self, group: str, topic: str, position: int, lease: _Lease, reason: Reason) -> None:
        now_ms, envelope = self.clock.now_ms(), self._topics[topic][position].envelope
        lease.is_done = True
        lease.turn += 1
        facts = DeadLetterFacts(
            topic,
            envelope.message_id,
            lease.attempt,
            reason.name.lower(),
            lease.first_failed_at_ms or now_ms,
            now_ms,
        )
        home = dead_letter_topic(group)
        log = self._topics.setdefault(home, [])
        receipt = SendReceipt(envelope.message_id, 0, len(log))
        log.append(_Stored(envelope._replace(topic=home, deliver_at_ms=0), receipt, now_ms, facts))
        self.poke()

    def _lease(self, group: str, topic: str, handle: str) -> tuple[int, _Lease]:
        """Return the position and the state of what a handle is good for, which may be finished."""
        position, _, turn = handle.removeprefix(f"{group}/{topic}/").partition("/")
        lease = self._leases.get((group, topic, int(position))) if position.isdigit() else None
        if lease is None or turn != str(lease.turn):
            raise Refused(Rule.RECEIPT_HANDLE, "the handle is unknown or stale", value=handle)
        return int(position), lease

    def _unfinished(self, group: str, topic: str, handle: str) -> tuple[int, _Lease]:
        position, lease = self._lease(group, topic, handle)
        if lease.is_done:
            raise Refused(Rule.RECEIPT_HANDLE, "the message is finished", value=handle)
        return position, lease

    async def ack(self, group: str, topic: str, receipt_handles: Sequence[str]) -> Sequence[Exception | None]:
        self._fail()
        results: list[Exception | None] = []
        for handle in receipt_handles:
            try:
                self._lease(group, topic, handle)[1].is_done = True
                results.append(None)
            except Refused as error:
                results.append(error)
        self.poke()  # the next one of a message group may go out now
        return results

    async def change_invisible(
        self, group: str, topic: str, receipt_handle: str, invisible_ms: int, *, suspend: bool = False
    ) -> str:
        self._fail()
        self.calls.append(("change", group, topic, receipt_handle, invisible_ms, suspend))
        position, lease = self._unfinished(group, topic, receipt_handle)
        if lease.is_push and not suspend:
            self._nack(group, topic, position, lease, invisible_ms)
            return receipt_handle
        lease.is_out, lease.is_suspended, lease.is_changed = True, suspend, True
        lease.visible_at_ms = self.clock.now_ms() + invisible_ms
        self.poke()
        return receipt_handle

    def _nack(self, group: str, topic: str, position: int, lease: _Lease, not_before_ms: int) -> None:
        if self._fail_attempt(group, topic, position, lease):
            return
        delays_ms = self.group_settings(group).delays_ms
        lease.visible_at_ms = self.clock.now_ms() + max(
            not_before_ms, delays_ms[min(lease.attempt, len(delays_ms)) - 1]
        )
        lease.is_out = False
        lease.turn += 1
        self.poke()

    def note_failure(self, group: str, receipt_handle: str, reason: FailureReason) -> bool:
        self.failure_reasons[group, receipt_handle] = reason
        return True

    async def not_taken(self, group: str, leased: Sequence[tuple[str, str]]) -> None:
        self.calls.append(("not_taken", group, *(receipt_handle for _, receipt_handle in leased)))
        for topic, receipt_handle in leased:
            with suppress(Refused):
                position, lease = self._unfinished(group, topic, receipt_handle)
                if not lease.is_changed and not self._fail_attempt(group, topic, position, lease):
                    lease.is_out, lease.visible_at_ms = False, 0
                    lease.turn += 1
        self.poke()

    async def dead_letter(self, group: str, topic: str, receipt_handle: str, *, attempts: int) -> None:
        self._fail()
        self.calls.append(("dead_letter", group, topic, receipt_handle, attempts))
        position, lease = self._unfinished(group, topic, receipt_handle)
        if lease.is_push and attempts < self.group_settings(group).max_attempts:
            self._nack(group, topic, position, lease, 0)
        else:
            self._bury(group, topic, position, lease, Reason.FORWARDED)

    def client_seen(self, client_id: str) -> None:
        self.seen.append(client_id)

    def client_gone(self, client_id: str) -> None:
        self.gone.append(client_id)


def _queued(envelope: Envelope) -> QueuedMessage:
    """What a filter looks at."""
    packed = pack_id(envelope.message_id)
    return QueuedMessage(0, 0, 0, packed, envelope.tag, envelope.message_group, envelope.payload, None)


def _delivery(stored: _Stored, position: int, handle: str, attempt: int, invisible_ms: int) -> Delivery:
    envelope = stored.envelope
    return Delivery(
        envelope.topic,
        envelope.message_id,
        envelope.payload,
        0,
        position,
        handle,
        attempt,
        invisible_ms,
        stored.stored_at_ms,
        envelope.deliver_at_ms,
        stored.facts,
    )
