"""Changes to pending delayed messages: cancel, reschedule, deliver now.

The writer decides between a change and the hand-over, and between two changes; this module finds the entry, submits the
op and interprets the answer. Every answer is durable and final: a delivered or cancelled entry is never pending again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from enum import IntEnum
from typing import NamedTuple

from broker_adapter.contracts.errors import BrokerUnavailable, Overloaded, Refused, Rule
from dmq.broker.topics import BrokerPart, SharedParts
from dmq.store import Store
from dmq.store.schema.keys import Family, held_key
from dmq.store.schema.messages.index import EntryState, Receipt
from dmq.store.schema.messages.own_keys import decode_key_holder, own_key_row, own_key_scope, row_of
from dmq.store.schema.messages.record import (
    DELAYED_KINDS,
    WAITING_HEADER_BYTES,
    EntryKind,
    body_not_after_ms,
    decode_waiting,
    encode_waiting,
)
from dmq.store.writer.operations import IfKnown, Put, Reschedule, Withdraw
from dmq.trail.events import NO_QUEUE, EventKind, encode_event

ENTRIES_PER_UNIT_MAX = 128
BYTES_PER_UNIT_MAX = 4 * 1024 * 1024  # a single message may be larger
_TRIES_MAX = 16  # reads of an entry that moves between two of them


class ChangeOutcome(IntEnum):
    """Result of a change of one message; numbered as in ``rockdmq.admin.v1``."""

    DONE = 1
    TOO_LATE = 2  # already delivered
    CANCELLED = 3  # already cancelled
    UNKNOWN = 4  # its end is no longer remembered, or it was never accepted
    REPLACED = 5  # already replaced by a later message with its own key
    EXPIRES = 6  # unchanged: it expires (``DMQ_NOT_AFTER_MS``) before it could be delivered at the new time
    TOO_FAR = 7  # unchanged: the new time is beyond the longest delay


class HeldBy(IntEnum):
    """Reason for which a due message is not in its queue yet; numbered as in ``rockdmq.admin.v1``."""

    NOTHING = 0
    PAUSE = 1  # of its topic
    RATE = 2  # of its topic, or the slow start of deliveries after a pause


class Changed(NamedTuple):
    """Answer for one message.

    ``at_ms`` for DONE: the time of the cancellation, or the new delivery time. Otherwise: the time of delivery,
    cancellation, replacement or expiry, 0 if unknown.
    """

    outcome: ChangeOutcome
    at_ms: int


class Meant(NamedTuple):
    """Reference to a message: its id, and the sequence of its entry to exclude later messages with this id, else 0."""

    message_id: bytes  # packed
    sequence: int = 0


class _Found(NamedTuple):
    """Stored state of a message; ``value`` is ``None`` unless it is pending."""

    receipt: Receipt | None
    value: bytes | None


_UNKNOWN = Changed(ChangeOutcome.UNKNOWN, 0)
_ENDED = {
    EntryState.WITHDRAWN: ChangeOutcome.CANCELLED,
    EntryState.DELIVERED: ChangeOutcome.TOO_LATE,
    EntryState.QUEUED: ChangeOutcome.TOO_LATE,
    EntryState.REPLACED: ChangeOutcome.REPLACED,
    EntryState.ABSORBED: ChangeOutcome.UNKNOWN,
}
_Change = Callable[[bytes, Receipt, bytes], Withdraw | Reschedule | Changed]
# Row that is written in the batch that changes a message, from its id and its answer.
Note = Callable[[bytes, Changed], Put]


class DelayedMessages(BrokerPart):
    """Changes of pending messages. It belongs to the event loop; its answers are durable.

    Calls raise ``Refused`` for a topic that does not exist. A failed call may have changed some of the messages; a
    repeated call reports that for each. Each message is decided by its own op, independent of the others.
    """

    def __init__(self, shared: SharedParts, *, delay_max_ms: int | None = None) -> None:
        """Create it; ``delay_max_ms`` is the longest allowed delay."""
        super().__init__(shared)
        self._delay_max_ms = delay_max_ms
        # A request of a few bytes rewrites messages of megabytes, so all callers share one unit at a time.
        self._moving = asyncio.Lock()
        self.cancelled_total = 0

    async def cancel(self, topic: str, meant: Sequence[Meant], note: Note | None = None) -> list[Changed]:
        """Cancel messages; none with outcome DONE is delivered afterwards."""

        def change(message_id: bytes, receipt: Receipt, value: bytes) -> Withdraw:
            op = _cancelled(message_id, receipt, value)
            if note is None:
                return op
            return op._replace(instead=(note(message_id, Changed(ChangeOutcome.DONE, self._clock.now_ms())),))

        changed = await self._change(topic, meant, change, nullcontext())
        self.cancelled_total += sum(each.outcome is ChangeOutcome.DONE for each in changed)
        return changed

    async def reschedule(self, topic: str, meant: Sequence[Meant], deliver_at_ms: int) -> list[Changed]:
        """Change the delivery time of messages; a past time means now.

        Raise ``Refused(DELIVERY_TIME)`` for a time beyond the longest delay. Otherwise as ``move``.
        """
        self.check_time(deliver_at_ms)
        return await self.move(topic, meant, lambda _: deliver_at_ms)

    def check_time(self, deliver_at_ms: int) -> None:
        """Raise ``Refused(DELIVERY_TIME)`` for a time beyond the longest delay."""
        delay_ms = deliver_at_ms - self._clock.now_ms()
        if self._is_too_far(deliver_at_ms):
            why = f"the delivery time is {delay_ms} ms ahead"
            raise Refused(Rule.DELIVERY_TIME, why, value=deliver_at_ms, limit=f"{self._delay_max_ms} ms")

    def _is_too_far(self, deliver_at_ms: int) -> bool:
        delay_ms = deliver_at_ms - self._clock.now_ms()
        return self._delay_max_ms is not None and delay_ms > self._delay_max_ms

    async def move(
        self, topic: str, meant: Sequence[Meant], new_time: Callable[[int], int], note: Note | None = None
    ) -> list[Changed]:
        """Change the delivery time of each message to ``new_time`` of its current one; a past time means now.

        A message that expires by then keeps its time, because no consumer would receive it at the new one. Raise
        ``Overloaded`` while the disk is almost full.
        """

        def change(message_id: bytes, receipt: Receipt, value: bytes) -> Reschedule | Changed:
            if self._store.is_disk_low():
                raise Overloaded("the disk is almost full", limit="disk_low_water_bytes")
            now_ms, deliver_at_ms = self._clock.now_ms(), new_time(decode_waiting(value).deliver_at_ms)
            if self._is_too_far(deliver_at_ms):
                return Changed(ChangeOutcome.TOO_FAR, 0)
            not_after_ms = body_not_after_ms(value[WAITING_HEADER_BYTES:])
            if 0 < not_after_ms <= max(deliver_at_ms, now_ms):  # as a send with these times
                return Changed(ChangeOutcome.EXPIRES, not_after_ms)
            op = rescheduled(message_id, receipt, value, deliver_at_ms, now_ms)
            if note is None:
                return op
            return op._replace(also=note(message_id, Changed(ChangeOutcome.DONE, op.deliver_at_ms)))

        return await self._change(topic, meant, change, self._moving)

    async def fire(self, topic: str, meant: Sequence[Meant]) -> list[Changed]:
        """Deliver messages now: reschedule them to now."""
        return await self.reschedule(topic, meant, 0)

    async def held_by(self, topic_name: str, changed: Sequence[Changed]) -> Sequence[HeldBy]:
        """Return for each rescheduled message whether its topic holds it although it is due."""
        topic, now_ms = self._catalog.known_topic(topic_name), self._store.clock.now_ms()
        by = HeldBy.NOTHING
        if topic.paused_since_ms is not None:
            by = HeldBy.PAUSE
        elif topic.deliver_rate is not None or any(await self._reader.values(Family.META, [held_key(topic.topic_id)])):
            by = HeldBy.RATE
        return [
            by if each.outcome is ChangeOutcome.DONE and each.at_ms <= now_ms else HeldBy.NOTHING for each in changed
        ]

    async def by_key(
        self,
        topic: str,
        own_keys: Sequence[str],
        change: Callable[[Sequence[Meant]], Awaitable[Sequence[Changed]]],
    ) -> list[tuple[bytes, Changed]]:
        """Change the pending messages under own keys; return the packed id of each and its answer.

        If a later message replaces one before the change, the change applies to the later one. The answer for a free
        key is the end of its last holder; the id is empty if none is remembered.
        """
        answers = [(b"", _UNKNOWN)] * len(own_keys)
        left = list(range(len(own_keys)))
        for _ in range(_TRIES_MAX):
            found = await self.under(topic, [own_keys[at] for at in left])
            held = {at for at, each in zip(left, found, strict=True) if each is not None}
            last = iter(await self._last_holders(topic, [own_keys[at] for at in left if at not in held]))
            meant = [(at, each or next(last)) for at, each in zip(left, found, strict=True)]
            there = [(at, each) for at, each in meant if each is not None]
            if there:
                told = await change([each for _, each in there])
                for (at, each), changed in zip(there, told, strict=True):
                    answers[at] = (each.message_id, changed)
            left = [at for at in left if at in held and answers[at][1].outcome is ChangeOutcome.REPLACED]
            if not left:
                break
        return answers

    async def under(self, topic: str, own_keys: Sequence[str]) -> list[Meant | None]:
        """Return the pending message under each own key of a topic, or None for a key that is durably free."""
        topic_id = self._catalog.known_topic(topic).topic_id
        self._check_disk()
        rows = [own_key_row(topic_id, each.encode()) for each in own_keys]
        holders = [decode_key_holder(each) if each else None for each in await self._reader.values(Family.META, rows)]
        await self._commits.flush()  # the reads may not have been durable
        return [Meant(each.message_id, each.sequence) if each is not None else None for each in holders]

    async def _last_holders(self, topic: str, own_keys: Sequence[str]) -> list[Meant | None]:
        """Return the last holder of each free own key, or None if none is remembered."""
        if not own_keys:
            return []
        scope = own_key_scope(self._catalog.known_topic(topic).topic_id)
        wanted = [each.encode() for each in own_keys]
        found = await self._reader.run(lambda store: [store.find(scope, each, with_withdrawn=True) for each in wanted])
        return [Meant(each.instead, each.sequence) if each is not None else None for each in found]

    def _check_disk(self) -> None:
        if obstacle := self._store.write_obstacle():
            raise Overloaded(obstacle, limit="disk")

    async def _change(
        self, topic: str, meant: Sequence[Meant], change: _Change, turn: AbstractAsyncContextManager[object]
    ) -> list[Changed]:
        scope = self._catalog.known_topic(topic).topic_id
        self._check_disk()
        changed: list[Changed] = []
        for start in range(0, len(meant), ENTRIES_PER_UNIT_MAX):
            async with turn:
                changed += await self._change_some(scope, meant[start : start + ENTRIES_PER_UNIT_MAX], change)
        return changed

    async def _change_some(self, scope: int, meant: Sequence[Meant], change: _Change) -> list[Changed]:
        changed: list[Changed | None] = [None] * len(meant)
        # A read may be neither durable nor final, because the entry may have been moving between two rows. After a
        # unit it is both, so an entry that is not pending is read twice.
        is_seen = [False] * len(meant)
        tries = [0] * len(meant)
        while left := [at for at, each in enumerate(changed) if each is None]:
            found = await self._reader.run(lambda store: _look(store, scope, [meant[at] for at in left]))
            ops: list[Withdraw | Reschedule] = []
            asked: list[int] = []
            for at, (receipt, value) in zip(left, found, strict=False):
                tries[at] += 1
                if tries[at] > _TRIES_MAX:
                    raise BrokerUnavailable("the message changes too often; repeat the call")
                if receipt is not None and value is not None:
                    op = change(meant[at].message_id, receipt, value)
                    if isinstance(op, Changed):
                        changed[at] = op
                        continue
                    ops.append(op)
                    asked.append(at)
                elif receipt is None or receipt.state is not EntryState.WAITING:
                    changed[at] = _answer(receipt) if is_seen[at] else None
                    is_seen[at] = True
            for at, op, told in zip(asked, ops, await self._commits.commit(ops), strict=True):
                if told.state is EntryState.WITHDRAWN:
                    changed[at] = Changed(ChangeOutcome.DONE, told.at_ms)
                elif told.state is EntryState.WAITING:
                    changed[at] = Changed(ChangeOutcome.DONE, op.deliver_at_ms)
        return [each for each in changed if each is not None]


def rescheduled(message_id: bytes, receipt: Receipt, value: bytes, wanted_ms: int, now_ms: int) -> Reschedule:
    """Return the op that changes the delivery time of a pending message.

    A past time means now. A message that is already due keeps its time. The result is an absolute time, so a step of
    the clock does not move it.
    """
    entry, rest = decode_waiting(value), value[WAITING_HEADER_BYTES:]
    assert entry.kind in DELAYED_KINDS, "the scope of a topic has no other entries"
    at_ms = wanted_ms if wanted_ms > now_ms else min(entry.deliver_at_ms, now_ms)
    fields = entry.retry_count, entry.topic_id, entry.scope, at_ms, entry.accepted_at_ms
    return Reschedule(
        receipt.key,
        entry.scope,
        message_id,
        entry.deliver_at_ms,
        at_ms,
        encode_waiting(EntryKind.DELAYED, *fields, rest),
        encode_event(EventKind.RESCHEDULED, entry.topic_id, 0, NO_QUEUE, 0, at_ms, message_id),
        if_gone=IfKnown.ANSWER,
        by_reader=False,
        own_key=row_of(value),
    )


def _cancelled(message_id: bytes, receipt: Receipt, value: bytes) -> Withdraw:
    entry = decode_waiting(value)
    assert entry.kind in DELAYED_KINDS, "the scope of a topic has no other entries"
    due_ms = entry.deliver_at_ms
    event = encode_event(EventKind.RECALLED, entry.topic_id, 0, NO_QUEUE, 0, due_ms, message_id)
    return Withdraw(
        *(receipt.key, entry.scope, message_id, due_ms, len(value)),
        event=event,
        is_remembered=True,
        if_gone=IfKnown.ANSWER,
        own_key=row_of(value),
    )


def _look(store: Store, scope: int, meant: Sequence[Meant]) -> list[_Found]:
    """Return the stored state of the first messages, as many as their bodies fit into ``BYTES_PER_UNIT_MAX``."""
    found: list[_Found] = []
    size = 0
    for message_id, sequence in meant:
        receipt = store.find(scope, message_id, with_withdrawn=True)
        if receipt is not None and sequence not in {0, receipt.sequence}:
            receipt = None  # a later message with the same id; the requested one is forgotten
        value = None
        if receipt is not None and receipt.state is EntryState.WAITING:
            (value,) = store.get_many(Family.TIMELINE, [receipt.key])
            size += len(value or b"")
        found.append(_Found(receipt, value))
        if size >= BYTES_PER_UNIT_MAX:
            break
    return found


def _answer(receipt: Receipt | None) -> Changed:
    if receipt is None or receipt.state is None:
        return _UNKNOWN
    return Changed(_ENDED[receipt.state], receipt.at_ms)
