"""Conversion of outbox rows to the columns of docs/reference/trail.md, with numpy. Pure, except for name lookups.

It runs alongside the hot path and shares its GIL. Official clients generate ids that pack into 17 bytes. Rows with only
such ids are converted without Python code per event. Other rows are first brought into that shape, one event at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dmq.errors import StoreCorrupt
from dmq.store.schema.accounting.outbox import BLOCK_HEAD_BYTES, NOT_APPLICABLE, RECORD_HEAD_BYTES, unpack_record_head
from dmq.store.schema.keys import unpack_u64
from dmq.trail.events import FAILURES, LANE, NO_QUEUE, EventKind, has_reason, split_reason
from dmq.trail.events import USUAL_ID_BYTES as _ID_BYTES
from dmq.trail.outbox_rows import Row

TRAIL_VERSION = "1"
_EVENT_BYTES = 21  # without its id
_RECORD = np.dtype(
    [
        *(("length", ">u2"), ("entry", ">u8"), ("offset", ">u8")),
        *(("kind", "u1"), ("topic", ">u4"), ("group", ">u4"), ("queue", ">u2"), ("attempt", ">u2"), ("time", ">u8")),
        ("id", f"V{_ID_BYTES}"),
    ]
)
_USUAL_LENGTH = _EVENT_BYTES + _ID_BYTES

_TEXT = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("boot", pa.int32(), nullable=False),
        pa.field("kind", _TEXT, nullable=False),
        pa.field("at_ms", pa.int64(), nullable=False),
        pa.field("topic", _TEXT),
        pa.field("group", _TEXT),
        pa.field("queue_id", pa.int32()),
        pa.field("queue_offset", pa.int64()),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("due_ms", pa.int64()),
        pa.field("detail", pa.int64()),
        pa.field("entry", pa.int64()),
        pa.field("message_id", pa.binary()),
        pa.field("error", pa.string()),
        pa.field("client", pa.string()),
    ]
)

COLUMNS_MIN = len(SCHEMA) - 2  # of files by builds without failure reasons

_Ints = npt.NDArray[Any]


def _flags(*kinds: EventKind) -> npt.NDArray[np.bool_]:
    made = np.zeros(256, bool)
    made[list(kinds)] = True
    return made


_DEAD = (
    *(EventKind.DEAD_EXHAUSTED, EventKind.DEAD_TOO_OLD, EventKind.DEAD_FORWARDED),
    *(EventKind.DEAD_SENT_BACK, EventKind.DEAD_BY_OPERATOR, EventKind.TX_GIVEN_UP),
    *(EventKind.TX_TOO_OLD, EventKind.FORWARD_REFUSED, EventKind.DEAD_TOO_LATE),
)
_COUNTED = (EventKind.GAP, EventKind.TAIL_LOST)
_KNOWN = _flags(*EventKind)
# Meaning of an event's time: a due time, an optional due time, or a detail. The time of an unknown kind is stored as a
# due time.
_IS_DUE = ~_KNOWN | _flags(
    *(EventKind.SCHEDULED, EventKind.DELIVERED, EventKind.RECALLED, EventKind.NACKED, EventKind.RETRIED),
    *(EventKind.RESCHEDULED, EventKind.REPLACED, EventKind.ABSORBED),
    *(EventKind.RETRY_MOVED, EventKind.POSTPONED, EventKind.INVISIBLE_CHANGED),
    *(EventKind.SENT, EventKind.SEND_FAILED, EventKind.REQUEUED, EventKind.HALF, EventKind.TX_CHECKED),
)
_MAY_BE_DUE = _flags(EventKind.QUEUED, EventKind.EXPIRED, EventKind.COMMITTED, EventKind.SCHEDULE_CHANGED)
_IS_DETAIL = _flags(
    *(EventKind.SEND_DEAD, EventKind.DROPPED, EventKind.REDRIVEN, EventKind.PURGED, EventKind.RESET),
    *(EventKind.QUEUED_FOR_GROUP, *_COUNTED),
    *(EventKind.CLOCK_CHANGED, EventKind.CLOCK_ACCEPTED, EventKind.OPERATED),
    *(EventKind.FORWARDED, EventKind.FETCHED, EventKind.TAKEN_OVER, EventKind.OCCURRED),
)
# For these kinds the record's offset is one in the dead-letter queue, or the event has it already.
_IS_LETTER = _flags(*_DEAD)
_HAS_NO_PLACE = _flags(*_DEAD, EventKind.REDRIVEN, EventKind.PURGED)
KIND_NAMES = tuple(EventKind(kind).name if _KNOWN[kind] else f"KIND_{kind}" for kind in range(256))


def to_columns(rows: Sequence[Row], name_of: Callable[[int], str]) -> pa.RecordBatch:
    """Return the events of ``rows`` as one batch of ``SCHEMA``; raise ``StoreCorrupt`` if a row is invalid."""
    packed, odd = _packed(rows)
    counts = np.fromiter((row.events for row in rows), np.int64, len(rows))

    def spread(values: Sequence[int], dtype: type[np.signedinteger[Any]]) -> _Ints:
        return np.repeat(np.array(values, dtype), counts)

    ends = np.cumsum(counts)
    total = int(ends[-1])
    sequence = (
        np.arange(total) + spread([row.first_sequence for row in rows], np.int64) - np.repeat(ends - counts, counts)
    )
    kind, reasons = packed["kind"], {}
    for place in [each for each, tail in odd.items() if has_reason(tail) and kind[each] in FAILURES]:
        odd[place], *reasons[place] = _split(odd[place])
    queue = packed["queue"].astype(np.int32)
    time_ms = packed["time"].astype(np.int64)
    offset, has_no_offset = packed["offset"].astype(np.int64), packed["offset"] == NOT_APPLICABLE
    entry, has_no_entry = packed["entry"].astype(np.int64), packed["entry"] == NOT_APPLICABLE
    has_due = _IS_DUE[kind] | (_MAY_BE_DUE[kind] & (time_ms != 0))
    is_letter, is_detail = _IS_LETTER[kind], _IS_DETAIL[kind]
    due_ms = time_ms
    counted = [(place, unpack_u64(each)) for place, each in odd.items() if kind[place] in _COUNTED and len(each) == 8]
    if counted:
        due_ms = time_ms.copy()
        for place, count in counted:
            due_ms[place], has_due[place], odd[place] = count, True, b""
    return pa.RecordBatch.from_arrays(
        [
            pa.array(sequence, pa.int64()),
            pa.array(spread([row.boot for row in rows], np.int32), pa.int32()),
            _kinds(kind),
            pa.array(spread([row.at_ms for row in rows], np.int64), pa.int64()),
            _names(packed["topic"], name_of),
            _names(packed["group"], name_of),
            pa.array(np.where(queue == LANE, -1, queue), pa.int32(), mask=queue == NO_QUEUE),
            pa.array(offset, pa.int64(), mask=has_no_offset | _HAS_NO_PLACE[kind]),
            pa.array(packed["attempt"].astype(np.int32), pa.int32()),
            pa.array(due_ms, pa.int64(), mask=~has_due),
            pa.array(
                np.where(is_letter, offset, time_ms), pa.int64(), mask=~(is_detail | (is_letter & ~has_no_offset))
            ),
            pa.array(entry, pa.int64(), mask=has_no_entry),
            _message_ids(packed["id"], odd),
            *_reasons(len(packed), reasons),
        ],
        schema=SCHEMA,
    )


def _split(tail: bytes) -> tuple[bytes, str, str]:
    try:
        return split_reason(tail)
    except (struct.error, ValueError) as error:
        raise StoreCorrupt(f"the reason of a failure in an outbox row cannot be read: {error}") from error


def _reasons(count: int, reasons: dict[int, list[str]]) -> tuple[pa.Array[Any], pa.Array[Any]]:
    """Return the error and client columns of failures; an empty text is null."""
    if not reasons:
        return pa.nulls(count, pa.string()), pa.nulls(count, pa.string())
    columns: tuple[list[str | None], list[str | None]] = ([None] * count, [None] * count)
    for place, texts in reasons.items():
        for column, text in zip(columns, texts, strict=True):
            column[place] = text or None
    return pa.array(columns[0], pa.string()), pa.array(columns[1], pa.string())


def _packed(rows: Sequence[Row]) -> tuple[_Ints, dict[int, bytes]]:
    """Return all records in the usual shape, and the ids that do not fit into it by the position of their record."""
    parts = [row.value[BLOCK_HEAD_BYTES:] for row in rows]
    if all(len(part) == row.events * _RECORD.itemsize for part, row in zip(parts, rows, strict=True)):
        packed = np.frombuffer(b"".join(parts), _RECORD)
        if (packed["length"] == _USUAL_LENGTH).all():
            return packed, {}
    odd: dict[int, bytes] = {}
    place = 0
    for number, row in enumerate(rows):
        part = parts[number]
        is_usual = len(part) == row.events * _RECORD.itemsize
        if not (is_usual and (np.frombuffer(part, _RECORD)["length"] == _USUAL_LENGTH).all()):
            parts[number] = _reshaped(row, place, odd)
        place += row.events
    return np.frombuffer(b"".join(parts), _RECORD), odd


def _reshaped(row: Row, place: int, odd: dict[int, bytes]) -> bytes:
    """Bring the records of a row into the usual shape one by one.

    Add ids that do not fit to ``odd``, by position, counted from ``place``.
    """
    value, at = row.value, BLOCK_HEAD_BYTES
    made: list[bytes] = []
    for number in range(row.events):
        end = at + RECORD_HEAD_BYTES
        length = unpack_record_head(value, at)[0] if end <= len(value) else len(value)
        if end + length > len(value) or length < _EVENT_BYTES:
            raise StoreCorrupt(f"outbox row {row.first_sequence} cannot be read from its event {number} on")
        record = value[at : end + length]
        if length != _USUAL_LENGTH:
            odd[place + number] = record[RECORD_HEAD_BYTES + _EVENT_BYTES :]
            record = record[: RECORD_HEAD_BYTES + _EVENT_BYTES].ljust(_RECORD.itemsize, b"\0")
        made.append(record)
        at = end + length
    if at != len(value):
        raise StoreCorrupt(f"outbox row {row.first_sequence} is {len(value)} bytes, its records say {at}")
    return b"".join(made)


def _kinds(kind: _Ints) -> pa.Array[Any]:
    used = np.flatnonzero(np.bincount(kind, minlength=256))
    places = np.zeros(256, np.int32)
    places[used] = np.arange(len(used))
    names = pa.array([KIND_NAMES[each] for each in used], pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(places[kind], pa.int32()), names)


def _names(ids: _Ints, name_of: Callable[[int], str]) -> pa.Array[Any]:
    """Return the column of names for ids; id 0 is null."""
    used, places = np.unique(ids, return_inverse=True)
    names = pa.array([name_of(int(each)) if each else "" for each in used], pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(places.astype(np.int32), pa.int32(), mask=ids == 0), names)


def _message_ids(ids: _Ints, odd: dict[int, bytes]) -> pa.Array[Any]:
    """Return the column of packed ids; an empty id is null."""
    joined = np.ascontiguousarray(ids).tobytes()
    if not odd:
        offsets = np.arange(0, len(joined) + 1, _ID_BYTES, dtype=np.int32)
        return pa.Array.from_buffers(
            pa.binary(), len(ids), [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(joined)]
        )
    made: list[bytes | None] = [joined[at : at + _ID_BYTES] for at in range(0, len(joined), _ID_BYTES)]
    for place, each in odd.items():
        made[place] = each or None
    return pa.array(made, pa.binary())
