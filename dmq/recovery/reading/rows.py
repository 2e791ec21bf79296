"""Decoding of the rows of a daemon's store, one by one; raises ``StoreCorrupt`` for rows that cannot be decoded."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from dmq.errors import StoreCorrupt
from dmq.store.schema import keys
from dmq.store.schema.accounting.counts import unpack_hour
from dmq.store.schema.accounting.ledger import decode_head, decode_ledger
from dmq.store.schema.accounting.outbox import decode_state
from dmq.store.schema.cell.border import decode_border
from dmq.store.schema.cell.clock import decode_clock, decode_moves
from dmq.store.schema.cell.identity import decode_identity
from dmq.store.schema.cell.position import decode_position
from dmq.store.schema.messages.index import Receipt, decode_index, failed_topic_id, ids_of
from dmq.store.schema.messages.own_keys import decode_key_holder
from dmq.store.schema.messages.record import EntryKind, WaitingEntry, decode_waiting
from dmq.store.schema.messages.recurring import decode_message, decode_progress, decode_schedule
from dmq.store.schema.operators.activity import decode_activity
from dmq.store.schema.operators.message_jobs import decode_job_message, decode_message_job
from dmq.store.schema.operators.orders import decode_job, decode_procedure
from dmq.store.schema.topics.group import (
    CHUNK_BYTES,
    CHUNK_OFFSETS,
    GroupKind,
    decode_exception,
    decode_outcome,
    unpack_group_key,
)
from dmq.store.schema.topics.notified import decode_overdue

_FIGURES = {keys.META_FORMAT: 8, keys.META_BOOT: 8, keys.META_SEQUENCE: 8, keys.META_CLOSED: 8} | {
    keys.META_DONE: 16,
    keys.META_GENERATION: 16,
}


class TimelineRow(NamedTuple):
    """Row of the timeline."""

    mark: int
    entry: WaitingEntry
    message_id: bytes  # packed
    index_id: bytes  # its id in the index
    body_at: int  # position of its body in the value

    @property
    def kind(self) -> str:
        """Name of its kind, in lower case."""
        return EntryKind(self.entry.kind).name.lower()


class Indexed(NamedTuple):
    """Row of the index."""

    generation: int
    scope: int
    index_id: bytes
    receipt: Receipt

    @property
    def is_waiting(self) -> bool:
        """Whether it belongs to an entry of the timeline."""
        return self.generation == keys.WAITING_GENERATION

    @property
    def failed_topic_id(self) -> int:
        """Topic of the original message, for a copy that a group failed."""
        return failed_topic_id(self.index_id)


class ProgressRow(NamedTuple):
    """Row of the group family."""

    group_id: int  # 0: no group, the row is about a dead-letter queue or a pulled queue
    topic_id: int
    queue_id: int
    kind: GroupKind
    number: int
    value: bytes

    @property
    def end(self) -> int:
        """The offset after the last one in the row: the queue ends there or later."""
        match self.kind:
            case GroupKind.FLOOR | GroupKind.COMMITTED:
                return keys.unpack_u64(self.value)
            case GroupKind.CHUNK:
                bits = int.from_bytes(self.value, "little").bit_length()
                return self.number * CHUNK_OFFSETS + bits if bits else 0
            case _:
                return self.number + 1

    @property
    def place(self) -> tuple[int, int]:
        """Topic and queue of the offsets in the row; outcomes refer to queue 0, the only one of their topic."""
        return self.topic_id, 0 if self.kind is GroupKind.OUTCOME else self.queue_id


def read_waiting(key: bytes, value: bytes) -> TimelineRow:
    """Decode a row of the timeline."""
    entry = decode_waiting(value)
    if len(key) != keys.TIMELINE_KEY_BYTES or entry.kind not in set(EntryKind) - {EntryKind.SPOOLED}:
        raise StoreCorrupt(f"an entry of kind {entry.kind} under a key of {len(key)} bytes")
    return TimelineRow(int.from_bytes(key, "big"), entry, *ids_of(entry, value))


def mark_of(row: bytes | None) -> int:
    """Return the timeline key in an index row as a number; -1 if there is none, or it cannot be decoded."""
    try:
        return decode_index(row).mark if row else -1
    except StoreCorrupt:
        return -1


def read_index(key: bytes, value: bytes) -> Indexed:
    """Decode a row of the index."""
    if len(key) <= keys.INDEX_PREFIX_BYTES:
        raise StoreCorrupt(f"an index key of {len(key)} bytes")
    generation, scope = keys.index_place(key)
    return Indexed(generation, scope, key[keys.INDEX_PREFIX_BYTES :], decode_index(value))


def read_begin(key: bytes, value: bytes) -> tuple[tuple[int, int], int]:
    """Return a queue and its first offset, from a row of the meta family."""
    return keys.queue_of_begin(key), keys.unpack_u64(value)


def read_progress(key: bytes, value: bytes) -> ProgressRow:
    """Decode a row of the group family."""
    group_id, topic_id, queue_id, number_of_kind, number = unpack_group_key(key)
    try:
        kind = GroupKind(number_of_kind)
        match kind:
            case GroupKind.FLOOR | GroupKind.COMMITTED:
                keys.unpack_u64(value)
            case GroupKind.CHUNK if len(value) != CHUNK_BYTES:
                raise ValueError(f"a bitmap of {len(value)} bytes")
            case GroupKind.EXCEPTION:
                decode_exception(value)
            case GroupKind.OUTCOME:
                decode_outcome(value)
    except (ValueError, struct.error) as error:
        raise StoreCorrupt(f"a group row of kind {number_of_kind} cannot be read: {error}") from error
    return ProgressRow(group_id, topic_id, queue_id, kind, number, value)


def epoch_of(row: ProgressRow) -> int:
    """Return the epoch of the last hand-out in an exception row."""
    return decode_exception(row.value).epoch


# Decoder and kind of the rows of the meta family, by the first byte of their key.
_META_ROWS: Mapping[bytes, tuple[Callable[[bytes], object], str]] = {
    keys.META_IDENTITY: (decode_identity, "identity"),
    keys.META_CLOCK: (decode_clock, "figure"),
    keys.META_POSITION: (decode_position, "figure"),
    keys.META_BORDER: (decode_border, "figure"),
    keys.META_LEDGER_HEAD: (decode_head, "figure"),
    keys.META_LEDGER: (decode_ledger, "ledger"),
    keys.META_MOVES: (decode_moves, "figure"),
    keys.META_HOUR: (unpack_hour, "count"),
    keys.META_OUTBOX: (decode_state, "figure"),
    keys.META_TOTAL: (keys.unpack_u64, "count"),
    keys.META_HELD: (keys.unpack_u64, "count"),
    keys.META_OWN_KEY: (decode_key_holder, "own key"),
    keys.META_BYTES: (keys.unpack_u64, "count"),
    keys.META_BYTES_HEAD: (keys.unpack_pair, "figure"),
    keys.META_BEGIN: (keys.unpack_u64, "begin"),
    keys.META_BOUND: (keys.unpack_u64, "figure"),
    keys.META_NOTIFIED: (keys.unpack_u64, "figure"),
    keys.META_OVERDUE: (decode_overdue, "notification"),
    keys.META_JOB: (decode_job, "job"),
    keys.META_MESSAGE_JOB: (decode_message_job, "message job"),
    keys.META_JOB_MESSAGE: (decode_job_message, "message job"),
    keys.META_ACTIVITY: (partial(decode_activity, 0), "activity"),
    keys.META_RESET: (keys.unpack_u64, "reset"),
    keys.META_SCHEDULE: (decode_schedule, "schedule"),
    keys.META_PROGRESS: (decode_progress, "progress of a schedule"),
    keys.META_RECURRING: (decode_message, "message of a schedule"),
    keys.META_PROCEDURE: (partial(decode_procedure, bytes(9)), "procedure"),
}


def read_figure(key: bytes, value: bytes) -> str:
    """Check a row of the meta family other than a name; return its kind.

    A row of unknown kind comes from a later version and is not checked.
    """
    try:
        if key in _FIGURES:
            if len(value) != _FIGURES[key]:
                raise ValueError(f"{len(value)} bytes instead of {_FIGURES[key]}")
            return "figure"
        known = _META_ROWS.get(key[:1])
        if known is not None:
            decode, kind = known
            decode(value)
            return kind
    except ValueError as error:
        raise StoreCorrupt(f"a figure cannot be read: {error}") from error
    return "other"
