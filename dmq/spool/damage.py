"""Reading the timeline around damage: a block that cannot be read costs what is in it, and nothing behind it.

An iterator ends at such a block, and says so when asked (``dmq.store.rocks``). Rows before it are found by asking for
fewer, rows behind it by asking from later on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dmq.errors import StoreCorrupt
from dmq.store.keys import timeline_key
from dmq.store.ops import Family
from dmq.store.store import Store

_PROBES = 256  # of a stretch in which a good block may lie between damaged ones


class Damage(NamedTuple):
    """A range of the timeline that cannot be read."""

    first: int
    end: int
    error: str

    def __str__(self) -> str:
        return f"timeline {self.first:032x} up to {self.end:032x}"


class Found(NamedTuple):
    """Rows in their order, and from which mark on there may be more (``None``: there are none)."""

    rows: list[tuple[bytes, bytes]]
    next: int | None
    damage: Damage | None


def read_around(store: Store, start: bytes, stop: bytes, *, limit: int, bytes_max: int) -> Found:
    """Return up to ``limit`` rows of ``[start, stop)``, and what of it had to be passed over."""
    try:
        found = store.scan(Family.TIMELINE, start, stop, limit=limit, bytes_max=bytes_max)
    except StoreCorrupt as error:
        rows = _rows_before(store, start, stop, limit, bytes_max)
        if rows:
            return Found(rows, _behind(rows), None)
        first, last = int.from_bytes(start, "big"), int.from_bytes(stop[:16], "big")
        end = earliest(first, last, lambda mark: _is_readable(store, mark, stop))
        return Found([], end if end < last else None, Damage(first, end, str(error)))
    return Found(found.rows, None if found.is_complete else _behind(found.rows), None)


def _behind(rows: list[tuple[bytes, bytes]]) -> int:
    return int.from_bytes(rows[-1][0], "big") + 1


def _rows_before(store: Store, start: bytes, stop: bytes, limit: int, bytes_max: int) -> list[tuple[bytes, bytes]]:
    """Return as many rows as can be read."""
    rows: list[tuple[bytes, bytes]] = []
    good, bad = 0, limit
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            rows = store.scan(Family.TIMELINE, start, stop, limit=middle, bytes_max=bytes_max).rows
            good = middle
        except StoreCorrupt:
            bad = middle
    return rows


def earliest(first: int, last: int, is_readable: Callable[[int], bool]) -> int:
    """Return the least number above ``first`` from which on rows can be read; ``last`` if there is none.

    Blocks have ends that nobody tells. From ``first`` on, ever longer steps find some readable place; then the stretch
    in front of it is tried in many places, so that a short good block between two damaged ones is not missed.
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


def _is_readable(store: Store, mark: int, stop: bytes) -> bool:
    try:
        store.scan(Family.TIMELINE, timeline_key(mark), stop, limit=1)
    except StoreCorrupt:
        return False
    return True
