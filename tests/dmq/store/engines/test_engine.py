"""What an engine promises: one suite for the real one and for the one in memory."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.rigs.store.rows import END, all_rows, put_batch

from dmq.errors import StoreClosed
from dmq.store.engines.engine import Batch, Engine
from dmq.store.engines.memory import MemoryEngine
from dmq.store.engines.rocks import RocksEngine
from dmq.store.schema.keys import Family

pytestmark = pytest.mark.contract

T, G = Family.TIMELINE, Family.GROUP


class Opened(NamedTuple):
    """An engine, and how to open it again after ``close``."""

    engine: Engine
    reopen: Callable[[], Engine]


@pytest.fixture(params=["rocks", "memory"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opened]:
    if request.param == "memory":
        memory = MemoryEngine()
        yield Opened(memory, memory.reopened)
        memory.close()
        return
    engines = [RocksEngine(tmp_path / "db")]

    def reopen() -> Engine:
        engines.append(RocksEngine(tmp_path / "db"))
        return engines[-1]

    yield Opened(engines[0], reopen)
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(opened: Opened) -> Engine:
    return opened.engine


def fill(engine: Engine, count: int = 10, family: Family = T) -> None:
    engine.write(put_batch(*((family, b"%03d" % number, b"value %d" % number) for number in range(count))))


def keys_of(rows: list[tuple[bytes, bytes]]) -> list[int]:
    return [int(key) for key, _ in rows]


def test_rows_are_readable_when_write_returns(engine: Engine) -> None:
    """No sync is needed to read what was written."""
    fill(engine)
    assert engine.get_many(T, [b"003", b"000"]) == [b"value 3", b"value 0"]
    assert keys_of(all_rows(engine, T)) == list(range(10))


def test_get_many_answers_by_position(engine: Engine) -> None:
    """One answer per key, in order, ``None`` for what is not there, twice for what is asked twice."""
    fill(engine)
    engine.write(put_batch((T, b"empty", b"")))
    assert engine.get_many(T, [b"9", b"001", b"empty", b"", b"001"]) == [None, b"value 1", b"", None, b"value 1"]
    assert engine.get_many(T, []) == []


def test_families_are_apart(engine: Engine) -> None:
    """The same key in two families is two rows; a scan, a range and a deletion touch one of them."""
    for family in Family:
        engine.write(put_batch((family, b"key", family.name.encode())))
    for family in Family:
        assert engine.get_many(family, [b"key"]) == [family.name.encode()]
        assert all_rows(engine, family) == [(b"key", family.name.encode())]
    batch = Batch()
    batch.deletes.append((T, b"key"))
    batch.ranges.append((G, b"", END))
    engine.write(batch)
    assert [family for family in Family if all_rows(engine, family)] == [
        family for family in Family if family not in {T, G}
    ]


@pytest.mark.parametrize(
    ("start", "stop", "limit", "expected", "is_complete"),
    [
        (b"", END, 100, list(range(10)), True),
        (b"002", b"005", 100, [2, 3, 4], True),
        (b"002", b"005", 3, [2, 3, 4], True),
        (b"002", b"005", 2, [2, 3], False),
        (b"002", b"0021", 100, [2], True),
        (b"0021", b"004", 100, [3], True),
        (b"", END, 10, list(range(10)), True),
        (b"", END, 9, list(range(9)), False),
        (b"", END, 0, [], False),
        (b"a", END, 0, [], True),
        (b"005", b"005", 100, [], True),
        (b"006", b"005", 100, [], True),
        (b"a", END, 100, [], True),
    ],
)
def test_a_scan_ends_at_its_limit(
    engine: Engine, start: bytes, stop: bytes, limit: int, expected: list[int], is_complete: bool
) -> None:
    """``stop`` is outside; a scan that used up its limit says whether that was all."""
    fill(engine)
    found = engine.scan(T, start, stop, limit=limit)
    assert keys_of(found.rows) == expected
    assert found.is_complete is is_complete


@pytest.mark.parametrize(
    ("bytes_max", "count", "is_complete"), [(0, 0, False), (1, 1, False), (7, 1, False), (8, 2, False), (70, 10, True)]
)
def test_scan_stops_once_it_has_enough_bytes(engine: Engine, bytes_max: int, count: int, is_complete: bool) -> None:
    """Values count (7 bytes each here); the row that reaches the bound is still returned."""
    fill(engine)
    found = engine.scan(T, b"", END, limit=100, bytes_max=bytes_max)
    assert keys_of(found.rows) == list(range(count))
    assert found.is_complete is is_complete


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (b"", END, 9),
        (b"", b"005", 4),
        (b"", b"0051", 5),
        (b"004", b"005", 4),
        (b"0041", b"005", None),
        (b"a", END, None),
        (b"", b"000", None),
        (b"005", b"005", None),
    ],
)
def test_last_is_the_last_of_the_range(engine: Engine, start: bytes, stop: bytes, expected: int | None) -> None:
    """``stop`` is outside, a row before ``start`` is no answer."""
    fill(engine)
    row = None if expected is None else (b"%03d" % expected, b"value %d" % expected)
    assert engine.last(T, start, stop) == row


def test_last_passes_over_deleted_rows(engine: Engine) -> None:
    """Deleted by key or by range: the last row is the last one that is there."""
    fill(engine)
    batch = Batch()
    batch.deletes.append((T, b"009"))
    batch.ranges.append((T, b"005", b"009"))
    engine.write(batch)
    assert engine.last(T, b"", END) == (b"004", b"value 4")
    assert engine.last(G, b"", END) is None


def test_a_batch_deletes_ranges_then_rows_then_puts(engine: Engine) -> None:
    """The order of a batch is by kind, whatever order it was filled in: what is put stays."""
    fill(engine)
    batch = Batch()
    batch.puts += [(T, b"003", b"new 3"), (T, b"005", b"new 5"), (T, b"003", b"newer 3")]
    batch.deletes += [(T, b"005"), (T, b"008"), (T, b"there is none")]
    batch.ranges.append((T, b"002", b"005"))
    engine.write(batch)
    assert keys_of(all_rows(engine, T)) == [0, 1, 3, 5, 6, 7, 9]
    assert engine.get_many(T, [b"003", b"005"]) == [b"newer 3", b"new 5"]


def test_an_empty_batch_is_nothing(engine: Engine) -> None:
    """Writing nothing, and syncing nothing, are allowed."""
    engine.write(Batch())
    engine.sync()
    assert all_rows(engine, T) == []


def test_rows_survive_a_clean_close(opened: Opened) -> None:
    """Also those that nobody synced: ``close`` does."""
    fill(opened.engine)
    opened.engine.sync()
    opened.engine.write(put_batch((G, b"not synced", b"value")))
    opened.engine.close()
    again = opened.reopen()
    assert keys_of(all_rows(again, T)) == list(range(10))
    assert all_rows(again, G) == [(b"not synced", b"value")]


@pytest.mark.parametrize(
    "use",
    [
        lambda engine: engine.write(Batch()),
        lambda engine: engine.sync(),
        lambda engine: engine.get_many(T, [b"1"]),
        lambda engine: engine.scan(T, b"", END, limit=1),
        lambda engine: engine.last(T, b"", END),
        lambda engine: engine.stats(),
    ],
    ids=["write", "sync", "get_many", "scan", "last", "stats"],
)
def test_a_closed_engine_raises(engine: Engine, use: Callable[[Engine], object]) -> None:
    """Every method but ``close``, which may be called again."""
    engine.close()
    engine.close()
    with pytest.raises(StoreClosed):
        use(engine)


def test_later_changes_of_a_batch_by_its_caller_have_no_effect(opened: Opened) -> None:
    """A batch is taken when it is written."""
    batch = put_batch((T, b"001", b"as written"))
    opened.engine.write(batch)
    batch.puts.append((T, b"002", b"later"))
    opened.engine.close()
    assert all_rows(opened.reopen(), T) == [(b"001", b"as written")]


def test_readers_in_other_threads_see_whole_batches(engine: Engine) -> None:
    """While batches move 200 rows to and fro, a scan finds them all at one place."""
    places = [[b"%c%03d" % (side, number) for number in range(200)] for side in b"AB"]
    engine.write(put_batch(*((T, key, b"row") for key in places[0])))
    is_over = threading.Event()
    seen: set[tuple[int, int]] = set()

    def look() -> None:
        while not is_over.is_set():
            keys = [key[:1] for key, _ in engine.scan(T, b"", END, limit=1_000).rows]
            seen.add((keys.count(b"A"), keys.count(b"B")))

    reader = threading.Thread(target=look)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        reader.start()
        for step in range(300):
            batch = put_batch(*((T, key, b"row") for key in places[(step + 1) % 2]))
            batch.deletes += [(T, key) for key in places[step % 2]]
            engine.write(batch)
    finally:
        is_over.set()
        reader.join()
        sys.setswitchinterval(interval)
    assert seen <= {(200, 0), (0, 200)}


def test_figures_are_there(engine: Engine) -> None:
    """Figures may be estimates, never negative; rows show in them."""
    fill(engine, 1000)
    figures = engine.stats()
    assert min(figures) >= 0
    assert figures.keys_estimate == 1000


_KEY = st.binary(min_size=1, max_size=2)
_FAMILY = st.sampled_from([T, G])
_STEP = st.one_of(
    st.tuples(st.just("put"), _FAMILY, _KEY, st.binary(max_size=3)),
    st.tuples(st.just("delete"), _FAMILY, _KEY, st.just(b"")),
    st.tuples(st.just("range"), _FAMILY, _KEY, _KEY),
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocksEngine]:
    """One real engine for many examples; each begins by emptying it."""
    engine = RocksEngine(tmp_path_factory.mktemp("shared") / "db")
    yield engine
    engine.close()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batches=st.lists(st.lists(_STEP, max_size=8), max_size=6),
    start=st.binary(max_size=2),
    stop=st.binary(max_size=2),
    limit=st.integers(0, 6),
    bytes_max=st.integers(0, 8),
)
def test_both_engines_agree(
    shared: RocksEngine,
    batches: list[list[tuple[str, Family, bytes, bytes]]],
    start: bytes,
    stop: bytes,
    limit: int,
    bytes_max: int,
) -> None:
    """Any history of batches, any read: the engine in memory is the model of the real one."""
    memory = MemoryEngine()
    emptied = Batch()
    emptied.ranges += [(T, b"", END), (G, b"", END)]
    shared.write(emptied)
    for steps in batches:
        batch = Batch()
        for kind, family, first, second in steps:
            if kind == "put":
                batch.puts.append((family, first, second))
            elif kind == "delete":
                batch.deletes.append((family, first))
            else:
                batch.ranges.append((family, min(first, second), max(first, second)))
        for each in (shared, memory):
            each.write(batch)
    for family in (T, G):
        assert all_rows(shared, family) == all_rows(memory, family)
        scans = [e.scan(family, start, stop, limit=limit, bytes_max=bytes_max) for e in (shared, memory)]
        assert scans[0] == scans[1]
        assert shared.last(family, start, stop) == memory.last(family, start, stop)
        assert shared.get_many(family, [start, stop]) == memory.get_many(family, [start, stop])
