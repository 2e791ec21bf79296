"""Reading around damage: an unreadable block costs only its own rows, not the rows after it.

An iterator ends at such a block, and reports it when checked (``dmq.store.engines.rocks``). Rows before the block are
read with a smaller limit, rows after it from a later start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from dmq.errors import StoreCorrupt
from dmq.store import Store
from dmq.store.engines.engine import Scannable
from dmq.store.schema.keys import Family

_PROBES = 256  # per range in which a good block may be between damaged ones
_MARK_BYTES = 16


class Readable(Scannable, Protocol):
    """Methods of a store or an engine that reading needs."""

    def get_many(self, family: Family, wanted: Sequence[bytes], /) -> list[bytes | None]:
        """Do the same as ``Engine.get_many``."""
        ...


class Hole(NamedTuple):
    """Unreadable range of a family: the keys of a damaged block, and none after it."""

    family: Family
    first: bytes
    end: bytes
    error: str

    def __str__(self) -> str:
        first, end = (key.rstrip(b"\0").hex() for key in (self.first, self.end))
        return f"{self.family.name.lower()} {first or 'from its beginning'} up to {end}"


class Found(NamedTuple):
    """Rows in their order, and the key from which there may be more (``None``: no more rows)."""

    rows: list[tuple[bytes, bytes]]
    next: bytes | None
    hole: Hole | None


def read_around(
    source: Readable, family: Family, start: bytes, stop: bytes, *, limit: int, bytes_max: int, key_bytes: int
) -> Found:
    """Return up to ``limit`` rows of ``[start, stop)``, and the unreadable range that was skipped.

    ``key_bytes`` is the length of the key prefixes that are tried as starts after the damage.
    """
    try:
        rows, is_complete = source.scan(family, start, stop, limit=limit, bytes_max=bytes_max)
    except StoreCorrupt as error:
        rows, is_complete = _rows_before(source, family, start, stop, limit, bytes_max), False
        if not rows:
            end = _first_readable(source, family, start, stop, key_bytes)
            return Found([], end if end < stop else None, Hole(family, start, end, str(error)))
    return Found(rows, None if is_complete else rows[-1][0] + b"\0", None)


def read_timeline(store: Store, start: bytes, stop: bytes, *, limit: int, bytes_max: int) -> Found:
    """Do the same as ``read_around`` for the timeline of a spool, where every key is a mark."""
    return read_around(store, Family.TIMELINE, start, stop, limit=limit, bytes_max=bytes_max, key_bytes=_MARK_BYTES)


def mark_from(key: bytes) -> int:
    """Return the least mark that is not below ``key``."""
    return int.from_bytes(key[:_MARK_BYTES], "big") + (len(key) > _MARK_BYTES)


def _rows_before(
    source: Readable, family: Family, start: bytes, stop: bytes, limit: int, bytes_max: int
) -> list[tuple[bytes, bytes]]:
    """Return the readable rows before the damage."""
    rows: list[tuple[bytes, bytes]] = []
    good, bad = 0, limit
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            rows = source.scan(family, start, stop, limit=middle, bytes_max=bytes_max).rows
            good = middle
        except StoreCorrupt:
            bad = middle
    return rows


def _first_readable(source: Readable, family: Family, start: bytes, stop: bytes, key_bytes: int) -> bytes:
    """Return the least key from which rows can be read; ``stop`` if there is none."""
    first, last = (int.from_bytes(key[:key_bytes].ljust(key_bytes, b"\0"), "big") for key in (start, stop))

    def is_readable(at: int) -> bool:
        try:
            source.scan(family, at.to_bytes(key_bytes, "big"), stop, limit=1)
        except StoreCorrupt:
            return False
        return True

    good = earliest(first, last, is_readable)
    return stop if good >= last else good.to_bytes(key_bytes, "big")


def earliest(first: int, last: int, is_readable: Callable[[int], bool]) -> int:
    """Return the least number above ``first`` from which rows can be read; ``last`` if there is none.

    The ends of blocks are unknown. Increasing steps from ``first`` find some readable position. Then the range before
    it is probed at many positions, so that a short good block between two damaged ones is not missed.
    """
    step = 1
    while first + step < last and not is_readable(first + step):
        step *= 2
    good, bad = min(first + step, last), first
    while width := (good - bad) // _PROBES:
        nearer = next((each for each in range(bad + width, good, width) if is_readable(each)), None)
        if nearer is None:
            break
        good = nearer
    while good - bad > 1:
        middle = (good + bad) // 2
        if is_readable(middle):
            good = middle
        else:
            bad = middle
    return good
