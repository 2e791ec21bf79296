"""Clock state that survives a restart: the last clock reading, and backward steps with delays still to be shifted.

    clock      wall_ms 8 | boot_ms 8 | believed offset 8 | unsteady from 8 | flags 1 | trusted offset 8, if flagged
               | boot id
    moves      by_ms 8 | mark 16, of each step; no row if there is none

Flags: 1 steady, 2 held, 4 there is a trusted offset. Both are rows of the meta family, without a version.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from dmq.errors import StoreCorrupt
from dmq.store.schema.keys import timeline_key

_ROW = struct.Struct(">QQqQB")
_TRUSTED = struct.Struct(">q")
_STEADY, _HELD, _HAS_TRUSTED = 1, 2, 4
_MOVE = struct.Struct(">Q16s")


class ClockRow(NamedTuple):
    """Stored clock state: one reading of the wall clock and the boot clock, and the believed time at that reading."""

    wall_ms: int
    boot_ms: int
    believed_offset_ms: int  # believed time minus boot time
    unsteady_from_ms: int  # boot time
    is_steady: bool
    is_held: bool
    boot_id: str
    trusted_offset_ms: int | None = None  # wall minus boot time when the clock was last steady; ``None``: it is steady


class Move(NamedTuple):
    """Unfinished correction of delays after a backward clock step of ``by_ms``. The timeline below ``mark`` is done."""

    by_ms: int
    mark: int


def encode_clock(row: ClockRow) -> bytes:
    """Return the value of the clock row."""
    flags = _STEADY * row.is_steady | _HELD * row.is_held | _HAS_TRUSTED * (row.trusted_offset_ms is not None)
    head = _ROW.pack(row.wall_ms, row.boot_ms, row.believed_offset_ms, row.unsteady_from_ms, flags)
    trusted = _TRUSTED.pack(row.trusted_offset_ms) if row.trusted_offset_ms is not None else b""
    return head + trusted + row.boot_id.encode()


def decode_clock(value: bytes) -> ClockRow:
    """Decode the value of the clock row; raise ``StoreCorrupt`` if it is invalid."""
    try:
        wall_ms, boot_ms, offset_ms, unsteady_ms, flags = _ROW.unpack_from(value)
        at, trusted_ms = _ROW.size, None
        if flags & _HAS_TRUSTED:
            (trusted_ms,) = _TRUSTED.unpack_from(value, at)
            at += _TRUSTED.size
        boot_id = value[at:].decode("ascii")
    except (struct.error, UnicodeDecodeError) as error:
        raise StoreCorrupt(f"the row of the clocks, of {len(value)} bytes, cannot be read: {error}") from error
    is_steady, is_held = bool(flags & _STEADY), bool(flags & _HELD)
    return ClockRow(wall_ms, boot_ms, offset_ms, unsteady_ms, is_steady, is_held, boot_id, trusted_ms)


def encode_moves(moves: Iterable[Move]) -> bytes:
    """Return the value of the row of unfinished clock step corrections."""
    return b"".join(_MOVE.pack(each.by_ms, timeline_key(each.mark)) for each in moves)


def decode_moves(value: bytes) -> list[Move]:
    """Decode the row of unfinished clock step corrections; raise ``StoreCorrupt`` if it is invalid."""
    if len(value) % _MOVE.size:
        raise StoreCorrupt(f"the row of steps of the clock has {len(value)} bytes")
    return [Move(by_ms, int.from_bytes(mark, "big")) for by_ms, mark in _MOVE.iter_unpack(value)]
