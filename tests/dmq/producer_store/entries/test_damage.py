"""Reading around blocks of the timeline that cannot be read: what is in front of them, behind them and between."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker_adapter.runtime.clock import ManualClock
from dmq.errors import StoreCorrupt
from dmq.producer_store.entries.damage import Found, Hole, earliest, mark_from, read_timeline
from dmq.store.engines.engine import Rows
from dmq.store.engines.memory import MemoryEngine
from dmq.store.schema.keys import TIMELINE_END, Family, timeline_key
from dmq.store.store import Store, StoreOptions
from dmq.store.writer.operations import Put

STOP = 10_000
MARKS = range(100, 300, 10)


class Damaged(MemoryEngine):
    """An engine whose scans of the timeline fail when they come to a bad block."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: list[range] = []

    def scan(self, family: Family, start: bytes, stop: bytes, *, limit: int, bytes_max: int = 2**62) -> Rows:
        found = super().scan(family, start, stop, limit=limit, bytes_max=bytes_max)
        if family is Family.TIMELINE:
            first = mark_from(start)
            behind = int.from_bytes(stop if found.is_complete else found.rows[-1][0], "big")
            if any(each.start < behind and first < each.stop for each in self.bad):
                raise StoreCorrupt("a bad block")
        return found


@pytest.fixture
def engine() -> Damaged:
    return Damaged()


@pytest.fixture
def store(engine: Damaged) -> Iterator[Store]:
    made = Store(engine, ManualClock(), StoreOptions())
    made.commit([Put(Family.TIMELINE, timeline_key(mark), b"value") for mark in MARKS])
    yield made
    made.close()


def read(store: Store, start: int, limit: int = 100, bytes_max: int = 10**6) -> Found:
    return read_timeline(store, timeline_key(start), timeline_key(STOP), limit=limit, bytes_max=bytes_max)


def behind(mark: int) -> bytes:
    return timeline_key(mark) + b"\0"


def hole(first: bytes, end: bytes) -> Hole:
    return Hole(Family.TIMELINE, first, end, "a bad block")


def rows(first: int, last: int) -> list[tuple[bytes, bytes]]:
    return [(timeline_key(mark), b"value") for mark in range(first, last + 1, 10)]


def test_without_damage_it_is_a_scan(store: Store) -> None:
    """In parts, as many rows and bytes as are asked for."""
    assert read(store, 0) == Found(rows(100, 290), None, None)
    assert read(store, 0, limit=3) == Found(rows(100, 120), behind(120), None)
    assert read(store, 121, limit=3) == Found(rows(130, 150), behind(150), None)
    assert read(store, 0, bytes_max=1) == Found(rows(100, 100), behind(100), None)


@pytest.mark.parametrize("limit", [100, 20, 6, 5, 4])
def test_rows_before_and_after_a_bad_block_are_read(store: Store, engine: Damaged, limit: int) -> None:
    """All of them; what is passed over is said, from the first row on that cannot be read."""
    engine.bad = [range(145, 165)]
    left: int | None = 0
    found: list[tuple[bytes, bytes]] = []
    holes: list[Hole | None] = []
    while left is not None:
        part = read(store, left, limit)
        found += part.rows
        holes.append(part.hole)
        assert bool(part.rows) != bool(part.hole)
        left = None if part.next is None else mark_from(part.next)
    assert found == rows(100, 140) + rows(170, 290)
    assert [each for each in holes if each is not None] == [hole(timeline_key(141), timeline_key(165))]


def test_damage_up_to_the_end_leaves_nothing_to_read(store: Store, engine: Damaged) -> None:
    """And says so."""
    engine.bad = [range(145, STOP)]
    assert read(store, 0) == Found(rows(100, 140), behind(140), None)
    to_the_end = hole(timeline_key(141), timeline_key(STOP))
    assert read(store, 141) == Found([], None, to_the_end)
    assert str(to_the_end) == f"timeline {141:032x} up to {STOP:032x}"


def test_damage_up_to_the_end_of_the_timeline_ends_with_it(store: Store, engine: Damaged) -> None:
    """That end is no key: it is longer than one."""
    engine.bad = [range(145, 2**200)]
    found = read_timeline(store, timeline_key(141), TIMELINE_END, limit=9, bytes_max=10**6)
    assert found == Found([], None, hole(timeline_key(141), TIMELINE_END))


def test_a_short_good_block_between_bad_ones_is_found(store: Store, engine: Damaged) -> None:
    """What lies in it is read."""
    engine.bad = [range(95, 195), range(205, 2_000)]
    assert read(store, 0) == Found([], timeline_key(195), hole(timeline_key(0), timeline_key(195)))
    assert read(store, 195) == Found(rows(200, 200), behind(200), None)
    assert read(store, 201) == Found([], timeline_key(2_000), hole(timeline_key(201), timeline_key(2_000)))
    assert read(store, 2_000) == Found([], None, None)


@given(st.integers(0, 2**80), st.integers(1, 2**80), st.integers(0, 2**80))
@example(0, 1, 0)
@example(5, 1, 5)
def test_the_end_of_damage_is_found_to_the_number(first: int, length: int, behind: int) -> None:
    """However long it is, and the end of everything where nothing behind it can be read."""
    end, last = first + length, first + length + behind
    asked: list[int] = []

    def is_readable(mark: int) -> bool:
        asked.append(mark)
        return mark >= end

    assert earliest(first, last, is_readable) == end
    assert all(first < each < last for each in asked)
    assert len(asked) < 2_000
