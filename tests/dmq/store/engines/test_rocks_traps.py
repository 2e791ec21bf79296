"""The traps of rocksdict (docs/decisions/store.md): a naive variant steps into each, so it is there; ours does not.

When a naive half fails after an upgrade of rocksdict, the trap is gone: read its notes, then take both halves out.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rocksdict import BlockBasedOptions, Cache, Options, Rdict, ReadOptions
from support.rigs.faults.disk_shim import Shim
from support.rigs.store.driver import batch_of, row, row_key, run_driver
from support.rigs.store.rows import END, all_rows

from broker_adapter.runtime.clock import SystemClock
from dmq.errors import StoreCorrupt, StoreError, StoreLocked
from dmq.store.engines.engine import Batch, Engine
from dmq.store.engines.rocks import RocksEngine
from dmq.store.schema.keys import Family, pack_timeline_key, timeline_key
from dmq.store.store import Store

pytestmark = pytest.mark.integration
ROWS = 20_000


def rows_there(directory: Path) -> int:
    engine = RocksEngine(directory)
    try:
        return len(all_rows(engine, Family.TIMELINE))
    finally:
        engine.close()


# -- a corrupt block looks like the end --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocksEngine]:
    """A store with 4 KiB of one table overwritten in the middle."""
    directory = tmp_path_factory.mktemp("damaged") / "db"
    engine = RocksEngine(directory)
    batch = Batch()
    batch.puts += [(Family.TIMELINE, row_key(number), row(number)) for number in range(ROWS)]
    engine.write(batch)
    engine.close()
    table = max(directory.glob("*.sst"), key=lambda path: path.stat().st_size)
    with table.open("r+b") as file:
        file.seek(table.stat().st_size // 2)
        file.write(os.urandom(4096))
    engine = RocksEngine(directory)
    yield engine
    engine.close()


def test_the_dicts_interface_ends_silently_at_a_corrupt_block(damaged: RocksEngine) -> None:
    """The trap: fewer rows than there are, and no exception."""
    timeline = damaged._dicts[Family.TIMELINE]
    assert 0 < sum(1 for _ in timeline.items()) < ROWS
    assert sum(1 for _ in timeline.keys()) > 0  # noqa: SIM118 < ROWS
    assert 0 < sum(1 for _ in timeline.values()) < ROWS


@pytest.mark.parametrize(
    "read",
    [
        lambda engine: engine.scan(Family.TIMELINE, b"", END, limit=ROWS),
        lambda engine: engine.get_many(Family.TIMELINE, [row_key(number) for number in range(ROWS)]),
        lambda engine: [
            engine.last(Family.TIMELINE, row_key(number), row_key(number + 1)) for number in range(0, ROWS, 20)
        ],
        lambda engine: [engine.scan(Family.TIMELINE, row_key(number), END, limit=1) for number in range(0, ROWS, 20)],
    ],
    ids=["scan", "get_many", "last", "scan of one row"],
)
def test_a_corrupt_block_is_an_error_for_every_read(damaged: RocksEngine, read: Callable[[Engine], object]) -> None:
    """Ours: no read returns fewer rows than there are."""
    with pytest.raises(StoreCorrupt, match="checksum"):
        read(damaged)


def test_rows_before_the_corrupt_block_can_be_read(damaged: RocksEngine) -> None:
    """What is whole stays readable, so that a store can be salvaged."""
    assert damaged.scan(Family.TIMELINE, b"", END, limit=100).rows == [(row_key(n), row(n)) for n in range(100)]


# -- iterator bounds ---------------------------------------------------------------------------------------------------


def test_the_setter_of_the_lower_bound_sets_the_upper_one(tmp_path: Path) -> None:
    """The trap: a scan from 3 on with lower bound 3 is empty. Ours keeps both ends without bounds."""
    engine = RocksEngine(tmp_path / "db")
    for number in range(10):
        engine.write(batch_of(number))
    bounded = ReadOptions()
    bounded.set_iterate_lower_bound(row_key(3))
    timeline = engine._dicts[Family.TIMELINE]
    found = timeline.iter(bounded)
    found.seek(row_key(3))
    assert not found.valid(), "the lower bound was taken for the upper one"
    found.seek_to_first()
    seen = []
    while found.valid():
        seen.append(found.key())
        found.next()
    assert seen == [row_key(0), row_key(1), row_key(2)]
    del found, timeline

    rows = engine.scan(Family.TIMELINE, row_key(3), row_key(7), limit=100).rows
    assert [key for key, _ in rows] == [row_key(number) for number in range(3, 7)]
    engine.close()


def test_bounds_are_freed_memory_once_unreferenced(tmp_path: Path) -> None:
    """The trap: neither options nor iterator keep the bytes of a bound alive. In a process of its own: it may crash."""
    ran = run_driver("dangle", tmp_path / "db")
    assert ran.returncode < 0 or int(ran.stdout) > 0


def test_a_scan_keeps_its_ends_when_the_bytes_change(tmp_path: Path) -> None:
    """Ours compares keys and gives RocksDB no bound: keys made for one call alone, and much made in their place."""
    engine = RocksEngine(tmp_path / "db")
    batch = Batch()
    batch.puts += [(Family.TIMELINE, row_key(number), b"") for number in range(1000)]
    engine.write(batch)
    for _ in range(200):
        rows = engine.scan(Family.TIMELINE, bytes(bytearray(row_key(0))), bytes(bytearray(row_key(500))), limit=600)
        assert len(rows.rows) == 500
        assert rows.is_complete
    engine.close()


# -- the lock ----------------------------------------------------------------------------------------------------------


def test_column_families_keep_the_lock(tmp_path: Path) -> None:
    """The trap: closing the database while a column family object lives does not release the directory."""
    directory = str(tmp_path / "naive")
    db = Rdict(directory, Options(raw_mode=True))
    db.create_column_family("other", Options(raw_mode=True))
    other = db.get_column_family_handle("other")
    db.close()
    with pytest.raises(Exception, match="lock hold by current process"):
        Rdict(directory, Options(raw_mode=True), column_families={"other": Options(raw_mode=True)})
    del other
    Rdict(directory, Options(raw_mode=True), column_families={"other": Options(raw_mode=True)}).close()


def test_a_closed_engine_can_be_reopened_at_once(tmp_path: Path) -> None:
    """Ours: everything that knows the database is let go, even after reads, figures and errors."""
    for opening in range(3):
        engine = RocksEngine(tmp_path / "db")
        engine.write(batch_of(opening))
        assert len(all_rows(engine, Family.TIMELINE)) == opening + 1
        assert engine.get_many(Family.TIMELINE, [row_key(opening)]) == [row(opening)]
        assert engine.last(Family.TIMELINE, b"", END) == (row_key(opening), row(opening))
        engine.stats()
        engine.close()


def test_two_engines_on_one_database_are_refused(tmp_path: Path) -> None:
    """The second one hears that it is locked, as an error of ours, and the first goes on."""
    engine = RocksEngine(tmp_path / "db")
    with pytest.raises(StoreLocked):
        RocksEngine(tmp_path / "db")
    engine.write(batch_of(1))
    engine.close()
    assert rows_there(tmp_path / "db") == 1


# -- fork --------------------------------------------------------------------------------------------------------------


def test_writes_of_a_forked_child_are_lost(tmp_path: Path) -> None:
    """The trap: the child's writes succeed, and are gone."""
    ran = run_driver("fork_naive", tmp_path / "db", "write")
    assert ran.stdout.splitlines() == ["child wrote 100", "child ended with 0"], ran.stderr
    try:
        left = rows_there(tmp_path / "db")
    except StoreCorrupt:
        return  # or worse: parent and child wrote over each other's records
    assert left < 102


def test_a_forked_child_cannot_open_a_store_of_its_own(tmp_path: Path) -> None:
    """The trap: another store opens and takes a write, then hangs: the threads that flush were not forked."""
    ran = run_driver("fork_naive", tmp_path / "db", "open")
    assert ran.stdout.splitlines() == ["child opened", f"child ended with {-signal.SIGALRM}"], ran.stderr


def test_an_orderly_end_of_a_forked_child_crashes_or_hangs(tmp_path: Path) -> None:
    """The trap: destructors in the child wait for threads that were not forked."""
    ran = run_driver("fork_naive", tmp_path / "db", "normal exit")
    assert ran.stdout.splitlines() in (
        [f"child ended with {-signal.SIGALRM}"],
        [f"child ended with {-signal.SIGSEGV}"],
        [f"child ended with {-signal.SIGABRT}"],
    ), ran.stderr


@pytest.mark.parametrize("how", ["_exit", "normal exit"])
def test_a_forked_child_is_refused_without_harm(tmp_path: Path, how: str) -> None:
    """Ours: every use in the child is refused, and the parent's store goes on, however the child ends."""
    ran = run_driver("fork", tmp_path / "cell", how)
    assert ran.stdout.splitlines() == [
        "child: " + " ".join(["StoreForked"] * 5 + ["nothing"]),
        "child ended with 7; parent has 600 rows",
    ], ran.stderr
    store = Store.open(tmp_path / "cell", SystemClock())
    assert store.recovery.was_closed
    assert len(all_rows(store, Family.GROUP)) == 600
    store.close()


# -- tombstones --------------------------------------------------------------------------------------------------------


def test_the_head_is_found_from_the_mark_without_walking_tombstones(tmp_path: Path) -> None:
    """After 100 000 hand-overs a read from zero steps over every one of them, a read from the mark over none.

    RocksDB can count instead of being timed: told to give up after 1000 skipped rows, a read says whether it skipped
    more. From zero it gives up, from the mark it finds the head.
    """
    engine = RocksEngine(tmp_path / "db")
    for first in range(0, 100_000, 10_000):
        batch = Batch()
        batch.puts += [(Family.TIMELINE, pack_timeline_key(n, n), b"") for n in range(first, first + 10_000)]
        engine.write(batch)
        batch = Batch()
        batch.deletes += [(Family.TIMELINE, pack_timeline_key(n, n)) for n in range(first, first + 10_000)]
        engine.write(batch)
    batch = Batch()
    head = pack_timeline_key(100_000, 100_000)
    batch.puts.append((Family.TIMELINE, head, b"head"))
    engine.write(batch)

    def seek(start: bytes) -> bytes | None:
        impatient = ReadOptions()
        impatient.set_max_skippable_internal_keys(1000)
        cursor = engine._dicts[Family.TIMELINE].iter(impatient)
        cursor.seek(start)
        found: bytes | None = cursor.key() if cursor.valid() else None
        return found

    assert seek(timeline_key(0)) is None, "the trap: a hundred thousand tombstones lie in front of the head"
    mark = pack_timeline_key(99_999, 99_999 + 1)  # where the reader's cursor stands
    assert seek(mark) == head
    assert engine.scan(Family.TIMELINE, mark, END, limit=1).rows == [(head, b"head")]
    engine.close()


# -- the interpreter's lock --------------------------------------------------------------------------------------------


def test_a_slow_sync_stops_no_other_thread(tmp_path: Path) -> None:
    """The trap: a write with sync keeps the interpreter for the whole sync. Ours: other threads run on."""
    shim = Shim(tmp_path)

    def beats(how: str, syncs_by_write: int) -> Iterator[int]:
        for number in range(3):  # a process that stood still for a moment says little: one of three did not
            done = run_driver("keep_the_gil", tmp_path / f"{how}-{number}", how, environment=shim.environment)
            counted, synced_by_write = map(int, done.stdout.split())
            assert synced_by_write == syncs_by_write
            yield counted

    assert any(each <= 2 for each in beats("naive", 1))
    assert any(each >= 10 for each in beats("ours", 0))
    assert "s" in shim.syncs(), "the shim saw the syncs"


def test_a_write_stall_stops_no_other_thread(tmp_path: Path) -> None:
    """RocksDB would wait for a compaction within ``write``; ours waits outside of it, and writes once it is over."""
    engine = RocksEngine(tmp_path / "db")
    rows = engine._dicts[Family.TIMELINE]
    rows.set_options({"level0_stop_writes_trigger": "1", "level0_slowdown_writes_trigger": "1"})
    engine.write(batch_of(1))
    rows.flush(True)
    assert rows.property_int_value("rocksdb.is-write-stopped")
    writer = threading.Thread(target=engine.write, args=(batch_of(2),))
    writer.start()
    writer.join(0.1)
    assert writer.is_alive(), "the test needs a write that waits, and this thread runs"
    rows.set_options({"level0_stop_writes_trigger": "100", "level0_slowdown_writes_trigger": "100"})
    writer.join()
    assert engine.get_many(Family.TIMELINE, [row_key(2)]) == [row(2)]
    engine.close()


def test_a_checkpoint_has_whole_batches_though_the_log_is_flushed_later(tmp_path: Path) -> None:
    """Batches of two families that are written during checkpoints, and not flushed, are in each one whole or not."""
    engine = RocksEngine(tmp_path / "db")
    is_over = threading.Event()

    def write() -> None:
        for number in itertools.count():
            batch = Batch()
            batch.puts += [(family, row_key(number), row(number)) for family in (Family.META, Family.TIMELINE)]
            engine.write(batch)
            if is_over.is_set():
                return

    writer = threading.Thread(target=write)
    writer.start()
    copies = [tmp_path / f"copy-{number}" for number in range(10)]
    try:
        for copy in copies:
            engine.checkpoint(copy)
    finally:
        is_over.set()
        writer.join()
        engine.close()
    for copy in copies:
        copied = RocksEngine(copy)
        assert all_rows(copied, Family.META) == all_rows(copied, Family.TIMELINE)
        copied.close()


def test_a_killed_process_leaves_whole_batches_though_one_family_was_in_a_table(tmp_path: Path) -> None:
    """A table is written after its log: the rows of a batch in the other family are recovered from that."""
    run_driver("table_before_log", tmp_path / "db", "100")
    engine = RocksEngine(tmp_path / "db")
    assert all_rows(engine, Family.META) == all_rows(engine, Family.TIMELINE)
    assert len(all_rows(engine, Family.META)) == 100
    engine.close()


# -- errors are text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("IO error: lock hold by current process, acquire time 1 acquiring thread 2: /x/LOCK", "StoreLocked"),
        ("IO error: While lock file: /x/LOCK: Resource temporarily unavailable", "StoreLocked"),
        ("IO error: While open a file for appending: /x/000009.log: Read-only file system", "StoreReadOnly"),
        ("IO error: While mkdir if missing: /x: Permission denied", "StoreReadOnly"),
        ("Corruption: block checksum mismatch: stored = 1, computed = 2, type = 4", "StoreCorrupt"),
        ("IO error: No such file or directory: While open a file for random read: /x/000009.sst", "StoreCorrupt"),
        ("IO error: No space left on device: While appending to file: /x/000009.log", "StoreFull"),
        ("IO error: While open a file: /x/9.sst: Disk quota exceeded", "StoreFull"),
        ("IO error: While open a file for random read: /x/9.sst: Too many open files", "StoreNoDescriptors"),
        ("IO error: While open: /x/9.sst: Operation not permitted", "StoreReadOnly"),
        ("IO error: Input/output error: While fdatasync: /x/000009.log", "StoreBroken"),
        ("anything new", "StoreFailed"),
    ],
)
def test_every_text_of_rocksdb_has_an_error_of_ours(text: str, expected: str) -> None:
    """The one place that reads RocksDB's text knows these."""
    from dmq.store.engines.rocks import _translated

    error = _translated(Exception(text))
    assert isinstance(error, StoreError)
    assert type(error).__name__ == expected
    assert str(error) == (f"{text} ({error.advice})" if error.advice else text), "and what to do, where we know it"


# -- a block larger than a part of the cache is read again for each seek -----------------------------------------------

LARGE = 4 * 1024 * 1024


def test_the_usual_cache_keeps_no_large_block(tmp_path: Path) -> None:
    """It has as many parts as half megabytes, and a block is in one of them."""
    cache, table = Cache(16 * 1024 * 1024), BlockBasedOptions()
    table.set_block_cache(cache)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(table)
    with Rdict(str(tmp_path / "db"), options) as db:
        db[b"k"] = bytes(LARGE)
        db.flush()
        assert db[b"k"] == bytes(LARGE)
        assert cache.get_usage() < LARGE


def test_ours_keeps_a_block_with_a_large_message(tmp_path: Path) -> None:
    """Danger: the snapshot at a stop took 7 s of a thousand queues, for ten messages of 4 MiB."""
    directory = tmp_path / "db"
    for is_new in (True, False):
        engine = RocksEngine(directory)
        if is_new:
            batch = Batch()
            batch.puts.append((Family.QUEUE, b"k", bytes(LARGE)))
            engine.write(batch)
        else:
            assert engine.last(Family.QUEUE, b"l", END) is None
            assert engine._cache.get_usage() > LARGE
        engine.close()
