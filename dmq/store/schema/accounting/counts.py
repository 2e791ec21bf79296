"""Counts of pending entries by scope and minute of delivery: absolute figures, rows of the meta family.

    hour       the counts of its sixty minutes, all of the same width: 1, 2, 4 or 8 bytes, as the largest requires
    total      count 8
    minute     count 8       in format 1, in place of the hours

A row per minute would be simpler. But a batch of messages with delivery times all over a day would then write nearly
one count row per message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dmq.errors import StoreCorrupt
from dmq.store.schema.keys import hour_of

BUCKET_MS = 60_000
HOUR_MS = 3_600_000
_HOURS = {struct.calcsize(width): struct.Struct(width) for width in (">60B", ">60H", ">60I", ">60Q")}


def end_of_minute(at_ms: int) -> int:
    """Return the end, in epoch ms, of the minute that contains ``at_ms``."""
    return (at_ms // BUCKET_MS + 1) * BUCKET_MS


class DueCount(NamedTuple):
    """Number of entries of a scope that are due within the minute that ends at ``until_ms``."""

    until_ms: int
    count: int  # type: ignore[assignment]  # hides an unused method of tuples


def pack_hour(minutes: Sequence[int]) -> bytes:
    """Return the value of an hour's row from the counts of its sixty minutes."""
    most = max(minutes)
    if most < 1 << 8:
        return bytes(minutes)
    return _HOURS[120 if most < 1 << 16 else 240 if most < 1 << 32 else 480].pack(*minutes)


def unpack_hour(value: bytes) -> tuple[int, ...]:
    """Return the counts of an hour's sixty minutes; raise ``StoreCorrupt`` if the length is invalid."""
    packed = _HOURS.get(len(value))
    if packed is None:
        raise StoreCorrupt(f"the counts of an hour in {len(value)} bytes")
    return packed.unpack(value)


def due_in(key: bytes, value: bytes) -> Iterator[DueCount]:
    """Yield the nonzero counts in the row of an hour, in order of time."""
    at_ms = hour_of(key) * HOUR_MS
    for count in unpack_hour(value):
        at_ms += BUCKET_MS
        if count:
            yield DueCount(at_ms, count)
