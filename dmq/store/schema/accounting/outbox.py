"""The audit outbox: each batch writes the events of its changes as one row.

    block      version 1 | boot 4 | at_ms 8 | count 4 | records
    record     length 2 (of the event) | entry sequence 8 | queue offset 8 | event

The row's key is the sequence of its first event. Sequences have no gaps, and a row covers ``[key, key + count)``. The
block has the facts that only the writer can add: entry sequence, queue offset, commit time and run of the daemon. The
event is opaque here; ``dmq.trail`` encodes and decodes it. All-ones means "not applicable".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from dmq.errors import StoreCorrupt

VERSION = 1
NOT_APPLICABLE = 2**64 - 1

_BLOCK = struct.Struct(">BIQI")
_RECORD = struct.Struct(">HQQ")
_STATE = struct.Struct(">QQQ")
_STATE_WITH_LOST = struct.Struct(">QQQQ")

BLOCK_HEAD_BYTES = _BLOCK.size
RECORD_HEAD_BYTES = _RECORD.size

pack_record_head = _RECORD.pack  # (event length, entry sequence, queue offset)
unpack_record_head = _RECORD.unpack_from


class OutboxState(NamedTuple):
    """Absolute figures of the outbox, stored in the meta family."""

    first_sequence: int  # of the oldest stored row
    next_sequence: int
    stored_bytes: int  # values only
    lost: int = 0  # total events cut before they were exported


class BlockHead(NamedTuple):
    """Head of an outbox row: the facts common to its events, and their number."""

    boot: int
    committed_at_ms: int
    events: int


class OutboxRecord(NamedTuple):
    """One event of the outbox."""

    sequence: int
    boot: int
    committed_at_ms: int
    entry_sequence: int  # NOT_APPLICABLE: none
    queue_offset: int  # NOT_APPLICABLE: none
    event: bytes


def encode_block(boot: int, at_ms: int, count: int, records: list[bytes]) -> bytes:
    """Return the value of one row; ``records`` alternates record heads and events."""
    return _BLOCK.pack(VERSION, boot, at_ms, count) + b"".join(records)


def block_count(value: bytes) -> int:
    """Return the number of events in a row; raise ``StoreCorrupt`` if its head is invalid."""
    return _block_head(value)[3]


def block_head(value: bytes) -> BlockHead:
    """Return the head of a row; raise ``StoreCorrupt`` if it is invalid."""
    return BlockHead(*_block_head(value)[1:])


def _block_head(value: bytes) -> tuple[int, int, int, int]:
    if len(value) < _BLOCK.size:
        raise StoreCorrupt(f"an outbox row of {len(value)} bytes has no head")
    version, boot, at_ms, count = _BLOCK.unpack_from(value)
    if version != VERSION:
        raise StoreCorrupt(f"an outbox row has format version {version}")
    return version, boot, at_ms, count


def decode_block(key: bytes, value: bytes) -> Iterator[OutboxRecord]:
    """Yield the records of a row; raise ``StoreCorrupt`` if the lengths do not add up."""
    _, boot, at_ms, count = _block_head(value)
    first = int.from_bytes(key, "big")
    at = _BLOCK.size
    for number in range(count):
        end = at + _RECORD.size
        length, entry_sequence, queue_offset = _RECORD.unpack_from(value, at) if end <= len(value) else (0, 0, 0)
        if end + length > len(value):
            raise StoreCorrupt(f"outbox row {first} ends inside record {number} of {count}")
        at = end
        yield OutboxRecord(first + number, boot, at_ms, entry_sequence, queue_offset, value[at : at + length])
        at += length
    if at != len(value):
        raise StoreCorrupt(f"outbox row {first} is {len(value)} bytes, its records say {at}")


def encode_state(state: OutboxState) -> bytes:
    """Return the value of the figures. ``lost`` is left out while it is 0."""
    return _STATE_WITH_LOST.pack(*state) if state.lost else _STATE.pack(*state[:3])


def decode_state(value: bytes | None) -> OutboxState:
    """Decode the figures; ``None`` is an empty outbox. Raise ``StoreCorrupt`` for another length."""
    if value is None:
        return OutboxState(1, 1, 0)
    for layout in (_STATE, _STATE_WITH_LOST):
        if len(value) == layout.size:
            return OutboxState(*layout.unpack(value))
    raise StoreCorrupt(f"the figures of the outbox have {len(value)} bytes instead of {_STATE.size}")
