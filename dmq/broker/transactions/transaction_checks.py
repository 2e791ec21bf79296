"""Checks of undecided half messages in the scheduler's thread, and their end as dead letters.

A half message has a timeline entry at the time of its next check, in a scope of its own per topic. When the entry is
due, it is not handed over. It is rescheduled with one more check counted, and once that is durable a producer is asked.
Without a live producer no check is counted, and the pause doubles each time, up to ``PAUSE_MS_MAX``. After its last
check, or a total wait of ``max_age_ms``, it becomes a dead letter of the group ``unresolved-transactions``. Operators
find it there, and can redrive or purge it.

A check writes a small row. The body has a row of its own, written once and deleted in the batch that ends the half
message. Rows of a store of format 2 contain their body; their next check moves it to a row of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from broker_adapter.contracts.message import unpack_id
from broker_adapter.contracts.topics import dead_letter_topic
from broker_adapter.contracts.transactions import Check
from dmq.broker.handles import EntryHandle, EntryHandles, HandleKind
from dmq.broker.topics import Names
from dmq.errors import StoreCorrupt
from dmq.store.schema.keys import Family, half_body_key
from dmq.store.schema.messages.index import EntryState, Receipt
from dmq.store.schema.messages.record import (
    EntryKind,
    HalfRow,
    History,
    body_payload,
    decode_half,
    decode_half_body,
    encode_half,
    encode_half_body,
    encode_history,
    encode_queued,
)
from dmq.store.writer.operations import HandOver, Reschedule
from dmq.trail.events import NO_QUEUE, EventKind, encode_event
from retry.policy import Reason

GIVEN_UP_GROUP = "unresolved-transactions"
UNDER_WAY_MAX = 1024  # planned checks not yet sent to a producer
UNDER_WAY_BYTES_MAX = 32 * 1024 * 1024
GIVEN_UP_BYTES_MAX = 8 * 1024 * 1024  # in a turn of the scheduler
PAUSE_MS_MAX = 600_000  # unless the interval itself is longer
BUSY_MS = 1_000  # delay of a check that exceeds the limits
_GetMany = Callable[[Family, Sequence[bytes]], Sequence[bytes | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """Times and number of checks, with RocketMQ's defaults."""

    first_after_ms: int = 6_000
    every_ms: int = 30_000
    checks_max: int = 15
    max_age_ms: int = 72 * 3_600_000


class Checks:
    """Planner of checks in the scheduler's thread; ``settled`` and the totals are safe on any thread."""

    def __init__(self, names: Names, options: CheckOptions, handles: EntryHandles) -> None:
        self._names = names
        self.options = options
        self._handles = handles
        self._is_live: Callable[[str], bool] = lambda _: False
        self._ask: Callable[[list[Check]], None] | None = None
        self._lock = threading.Lock()
        self._under_way = 0
        self._under_way_bytes = 0
        self._asked: dict[bytes, Check] = {}  # planned checks of this turn, by timeline key
        self.counted_total = 0

    def attach(self, *, is_live: Callable[[str], bool], ask: Callable[[list[Check]], None]) -> None:
        """Register the callbacks: ``is_live`` returns whether a topic has a producer, ``ask`` sends durable checks.

        Both are called in the scheduler's thread and must return at once.
        """
        self._ask, self._is_live = ask, is_live

    def plan(self, rows: Sequence[tuple[bytes, bytes]], now_ms: int, get_many: _GetMany) -> list[HandOver | Reschedule]:
        """Return the ops for due half messages, in the order of ``rows``.

        Rows decided since they were read may be left out.
        """
        self._asked.clear()
        bodies = _Bodies(get_many)
        planned = (self._plan(key, decode_half(value), now_ms, bodies) for key, value in rows)
        return [op for op in planned if op is not None]

    def planned(self, ops: Sequence[HandOver | Reschedule], receipts: Sequence[Receipt]) -> None:
        """Send the checks of durable ops, except for half messages decided in the meantime."""
        checks: list[Check] = []
        for op, receipt in zip(ops, receipts, strict=True):
            if isinstance(op, Reschedule) and (check := self._asked.pop(op.key, None)) is not None:
                if receipt.state is EntryState.WAITING:
                    checks.append(check)
                else:
                    self.settled(check)
        if checks and self._ask is not None:
            self.counted_total += len(checks)
            self._ask(checks)

    def settled(self, check: Check) -> None:
        """Release the room of a check that was sent or dropped."""
        self._make_room(len(check.payload))

    def _plan(self, key: bytes, half: HalfRow, now_ms: int, bodies: _Bodies) -> HandOver | Reschedule | None:
        entry, vigil, options = half.entry, half.vigil, self.options
        topic = self._names.topics_by_id.get(entry.topic_id)
        if topic is None:
            raise StoreCorrupt(f"half message of the unknown topic {entry.topic_id}")
        is_counted_out = entry.retry_count >= options.checks_max
        number, unasked, event, pause_ms = entry.retry_count, vigil.unasked, b"", options.every_ms
        if is_counted_out or vigil.waited_ms >= options.max_age_ms:
            if bodies.has_room():
                body = bodies.read(key, half)
                return None if body is None else self._give_up(key, half, body, now_ms, is_counted_out=is_counted_out)
            pause_ms = BUSY_MS
        elif not self._is_live(topic.name):
            unasked += 1
            left_ms = max(options.max_age_ms - vigil.waited_ms, 1)
            pause_ms = min(pause_of(options.every_ms, unasked, _sequence_of(key)), left_ms)
        elif self._has_room(vigil.payload_bytes):
            body = bodies.read(key, half)
            if body is None:
                self._make_room(vigil.payload_bytes)
                return None
            number, unasked = number + 1, 0
            event = encode_event(
                EventKind.TX_CHECKED, entry.topic_id, 0, NO_QUEUE, number, now_ms + pause_ms, half.message_id
            )
            transaction = EntryHandle(_sequence_of(key), topic.name, half.message_id)
            handle = self._handles.encode(HandleKind.TRANSACTION, transaction)
            self._asked[key] = Check(topic.name, unpack_id(half.message_id), handle, body_payload(body), number)
        else:
            pause_ms = min(BUSY_MS, options.every_ms)
        next_ms = now_ms + pause_ms
        again = entry._replace(kind=EntryKind.TRANSACTION, retry_count=number, deliver_at_ms=next_ms)
        record = encode_half(
            again, vigil._replace(waited_ms=vigil.waited_ms + pause_ms, unasked=unasked), half.message_id
        )
        moved = encode_half_body(half.body) if half.body is not None else b""
        return Reschedule(key, entry.scope, half.message_id, entry.deliver_at_ms, next_ms, record, event, moved)

    def _give_up(self, key: bytes, half: HalfRow, body: bytes, now_ms: int, *, is_counted_out: bool) -> HandOver:
        letters = self._names.topics.get(dead_letter_topic(GIVEN_UP_GROUP))
        group = self._names.groups.get(GIVEN_UP_GROUP)
        if letters is None or group is None:
            raise StoreCorrupt("the dead-letter queue of unresolved transactions is missing")
        entry, message_id = half.entry, half.message_id
        accepted_ms, checks = entry.accepted_at_ms, entry.retry_count
        kind, reason = EventKind.TX_GIVEN_UP, Reason.EXHAUSTED
        if not is_counted_out:
            kind, reason = EventKind.TX_TOO_OLD, Reason.TOO_OLD
        history = History(entry.topic_id, NO_QUEUE, 0, accepted_ms, accepted_ms, now_ms, reason)
        record = encode_queued(checks, now_ms, 0, encode_history(history) + body, has_history=True)
        event = encode_event(kind, entry.topic_id, group.group_id, NO_QUEUE, checks, accepted_ms, message_id)
        place = letters.topic_id, 0
        return HandOver(
            key, entry.scope, message_id, entry.deliver_at_ms, *place, record, event, half.size, is_half=True
        )

    def _has_room(self, payload_bytes: int) -> bool:
        with self._lock:
            is_full = self._under_way >= UNDER_WAY_MAX or self._under_way_bytes >= UNDER_WAY_BYTES_MAX
            if not is_full:
                self._under_way += 1
                self._under_way_bytes += payload_bytes
            return not is_full

    def _make_room(self, payload_bytes: int) -> None:
        with self._lock:
            self._under_way -= 1
            self._under_way_bytes -= payload_bytes


class _Bodies:
    """Reader of half-message bodies, limited to the size of one batch of the scheduler."""

    def __init__(self, get_many: _GetMany) -> None:
        self._get_many = get_many
        self._read_bytes = 0

    def has_room(self) -> bool:
        return self._read_bytes < GIVEN_UP_BYTES_MAX

    def read(self, key: bytes, half: HalfRow) -> bytes | None:
        """Return the body, or None if the half message was decided since its row was read."""
        self._read_bytes += half.vigil.payload_bytes
        if half.body is not None:
            return half.body
        (value,) = self._get_many(Family.TIMELINE, [_body_key(key)])
        if value is not None:
            return decode_half_body(value)
        if self._get_many(Family.TIMELINE, [key])[0] is not None:  # the row and its body are deleted together
            raise StoreCorrupt(f"the half message {unpack_id(half.message_id)} has no body")
        return None


def pause_of(every_ms: int, unasked: int, sequence: int) -> int:
    """Return the pause in ms after ``unasked`` consecutive checks without a live producer.

    It doubles each time. It is up to a quarter shorter depending on the sequence, so that half messages sent together
    spread out.
    """
    if unasked <= 1:
        return every_ms
    pause_ms = min(every_ms << min(unasked - 1, 40), max(every_ms, PAUSE_MS_MAX))
    return pause_ms - pause_ms * (sequence * 0x9E37_79B1 & 0xFFFF) // 0x4_0000


def _sequence_of(key: bytes) -> int:
    return int.from_bytes(key[8:], "big")


def _body_key(key: bytes) -> bytes:
    return half_body_key(_sequence_of(key))
