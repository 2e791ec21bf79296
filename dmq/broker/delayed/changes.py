"""Delayed messages that wait, in the hands of who looks after them: cancelled, delivered at another time, or now.

The writer decides between a change and the hand-over, and between two changes; here is only found out what to ask it
for, and what the answer means. Whatever is answered is durable and stays true: an entry that was delivered or cancelled
waits no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from enum import IntEnum
from typing import NamedTuple

from broker_adapter.contracts.errors import BrokerUnavailable, Overloaded, Refused, Rule
from dmq.broker.io.commits import Commits
from dmq.broker.io.reader import Reader
from dmq.broker.topics.catalog import Catalog
from dmq.store.schema.index import EntryState, Receipt
from dmq.store.schema.keys import Family, held_key
from dmq.store.schema.own_keys import decode_key_holder, own_key_row, own_key_scope, row_of
from dmq.store.schema.record import (
    DELAYED_KINDS,
    WAITING_HEADER_BYTES,
    EntryKind,
    body_not_after_ms,
    decode_waiting,
    encode_waiting,
)
from dmq.store.store import Store
from dmq.store.writer.operations import IfKnown, Reschedule, Withdraw
from dmq.trail.events import NO_QUEUE, EventKind, encode_event

ENTRIES_PER_UNIT_MAX = 128
BYTES_PER_UNIT_MAX = 4 * 1024 * 1024  # a single message may be larger
_TRIES_MAX = 16  # an entry that moves on between two looks at it is looked for again


class Outcome(IntEnum):
    """What became of a message that was to be changed; numbered as in ``rockdmq.admin.v1``."""

    DONE = 1
    TOO_LATE = 2  # it had been delivered
    CANCELLED = 3  # it had been cancelled
    UNKNOWN = 4  # it ended longer ago than ends are remembered, or was never accepted
    REPLACED = 5  # a later message with its own key had taken its place
    EXPIRES = 6  # unchanged: it expires (``DMQ_NOT_AFTER_MS``) before it could be delivered at the new time


class HeldBy(IntEnum):
    """Why a message that is due is not in its queue yet; numbered as in ``rockdmq.admin.v1``."""

    NOTHING = 0
    PAUSE = 1  # of its topic
    RATE = 2  # of its topic, or the slow start of deliveries after a pause


class Changed(NamedTuple):
    """The answer for one message.

    ``at_ms`` of one that is done: since when it is cancelled, or its delivery time; else when it was delivered,
    cancelled or replaced, or when it expires, 0 if it is unknown.
    """

    outcome: Outcome
    at_ms: int


class Meant(NamedTuple):
    """Which message is meant: its id, and the sequence of its entry if no later message with this id is; else 0."""

    message_id: bytes  # packed
    sequence: int = 0


class _Found(NamedTuple):
    """What is known of a message; ``value`` is ``None`` unless it waits."""

    receipt: Receipt | None
    value: bytes | None


_UNKNOWN = Changed(Outcome.UNKNOWN, 0)
_ENDED = {
    EntryState.WITHDRAWN: Outcome.CANCELLED,
    EntryState.DELIVERED: Outcome.TOO_LATE,
    EntryState.QUEUED: Outcome.TOO_LATE,
    EntryState.REPLACED: Outcome.REPLACED,
    EntryState.ABSORBED: Outcome.UNKNOWN,
}
_Change = Callable[[bytes, Receipt, bytes], Withdraw | Reschedule | Changed]


class DelayedMessages:
    """Changes what waits in topics. Belongs to the event loop; what it answers is durable.

    ``Refused`` for a topic that does not exist. A call that fails may have changed some of the messages; repeated, it
    says so of each. One op decides about each message, and no other one depends on it.
    """

    def __init__(self, catalog: Catalog, commits: Commits, reader: Reader, *, delay_max_ms: int | None = None) -> None:
        """``delay_max_ms`` is the longest delay that is accepted."""
        self._catalog = catalog
        self._commits = commits
        self._reader = reader
        self._store = commits.store
        self._delay_max_ms = delay_max_ms
        # A few bytes of a request have messages of megabytes written anew: one unit at a time, whoever asks.
        self._moving = asyncio.Lock()
        self.cancelled_total = 0
        self.rescheduled_total = 0

    async def cancel(self, topic: str, meant: Sequence[Meant]) -> list[Changed]:
        """Cancel messages: none of them is delivered from then on."""
        changed = await self._change(topic, meant, _cancelled, nullcontext())
        self.cancelled_total += sum(each.outcome is Outcome.DONE for each in changed)
        return changed

    async def reschedule(self, topic: str, meant: Sequence[Meant], deliver_at_ms: int) -> list[Changed]:
        """Give messages another delivery time; one that is over means now.

        A message that expires by then keeps its time, since no consumer would receive it at the new one.
        ``Refused(DELIVERY_TIME)`` for a time beyond the longest delay, ``Overloaded`` while the disk is almost full.
        """
        now_ms = self._store.clock.now_ms
        delay_ms, delay_max_ms = deliver_at_ms - now_ms(), self._delay_max_ms
        if delay_max_ms is not None and delay_ms > delay_max_ms:
            why = f"the delivery time lies {delay_ms} ms ahead"
            raise Refused(Rule.DELIVERY_TIME, why, value=deliver_at_ms, limit=f"{delay_max_ms} ms")

        def change(message_id: bytes, receipt: Receipt, value: bytes) -> Reschedule | Changed:
            if self._store.is_disk_low():
                raise Overloaded("the disk is almost full", limit="disk_low_water_bytes")
            not_after_ms = body_not_after_ms(value[WAITING_HEADER_BYTES:])
            if 0 < not_after_ms <= max(deliver_at_ms, now_ms()):  # as a send with these times
                return Changed(Outcome.EXPIRES, not_after_ms)
            return rescheduled(message_id, receipt, value, deliver_at_ms, now_ms())

        changed = await self._change(topic, meant, change, self._moving)
        self.rescheduled_total += sum(each.outcome is Outcome.DONE for each in changed)
        return changed

    async def fire(self, topic: str, meant: Sequence[Meant]) -> list[Changed]:
        """Deliver messages now: as ``reschedule`` to now."""
        return await self.reschedule(topic, meant, 0)

    async def held_by(self, topic_name: str, changed: Sequence[Changed]) -> Sequence[HeldBy]:
        """Return for each rescheduled message whether its topic keeps it from its queue although it is due."""
        topic, now_ms = self._catalog.known_topic(topic_name), self._store.clock.now_ms()
        by = HeldBy.NOTHING
        if topic.paused_since_ms is not None:
            by = HeldBy.PAUSE
        elif topic.deliver_rate is not None or any(await self._reader.values(Family.META, [held_key(topic.topic_id)])):
            by = HeldBy.RATE
        return [by if each.outcome is Outcome.DONE and each.at_ms <= now_ms else HeldBy.NOTHING for each in changed]

    async def by_key(
        self,
        topic: str,
        own_keys: Sequence[str],
        change: Callable[[Sequence[Meant]], Awaitable[Sequence[Changed]]],
    ) -> list[tuple[bytes, Changed]]:
        """Change the messages that wait under own keys; return the packed id of each and its answer.

        If a later message replaces one before the change, the change applies to the later one. A key that is free
        is answered with the end of its last holder; the id is empty if none is remembered.
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
            left = [at for at in left if at in held and answers[at][1].outcome is Outcome.REPLACED]
            if not left:
                break
        return answers

    async def under(self, topic: str, own_keys: Sequence[str]) -> list[Meant | None]:
        """Return which message of a topic waits under each own key; ``None`` for a key that is free, durably so."""
        topic_id = self._catalog.known_topic(topic).topic_id
        self._check_disk()
        rows = [own_key_row(topic_id, each.encode()) for each in own_keys]
        holders = [decode_key_holder(each) if each else None for each in await self._reader.values(Family.META, rows)]
        await self._commits.flush()  # what was read may not have been durable
        return [Meant(each.message_id, each.sequence) if each is not None else None for each in holders]

    async def _last_holders(self, topic: str, own_keys: Sequence[str]) -> list[Meant | None]:
        """Return the message that held each free own key last; ``None`` if none is remembered."""
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
        # What was read may not be durable yet; nor is it final: the entry may have been on its way from one row to
        # another. Behind a unit it is both, so what does not wait is looked at twice.
        is_seen = [False] * len(meant)
        tries = [0] * len(meant)
        while left := [at for at, each in enumerate(changed) if each is None]:
            found = await self._reader.run(lambda store: _look(store, scope, [meant[at] for at in left]))
            ops: list[Withdraw | Reschedule] = []
            asked: list[int] = []
            for at, (receipt, value) in zip(left, found, strict=False):
                tries[at] += 1
                if tries[at] > _TRIES_MAX:
                    raise BrokerUnavailable("the message moves all the time")
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
                    changed[at] = Changed(Outcome.DONE, told.at_ms)
                elif told.state is EntryState.WAITING:
                    changed[at] = Changed(Outcome.DONE, op.deliver_at_ms)
        return [each for each in changed if each is not None]


def rescheduled(message_id: bytes, receipt: Receipt, value: bytes, wanted_ms: int, now_ms: int) -> Reschedule:
    """Return the op that gives a waiting message another delivery time.

    A time that is over means now, and one that is due already is on its way: it stays where it is. It is a time that
    somebody gave, so no step of the clock moves it.
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
    """Return what is known of messages: of the first ones, as many as their bodies let be held at a time."""
    found: list[_Found] = []
    size = 0
    for message_id, sequence in meant:
        receipt = store.find(scope, message_id, with_withdrawn=True)
        if receipt is not None and sequence not in {0, receipt.sequence}:
            receipt = None  # of a later message with the same id: the one that is meant is forgotten
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
