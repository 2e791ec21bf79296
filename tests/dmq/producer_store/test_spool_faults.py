"""Storage that fails under a spool, for real: a full disk, a sync that fails, flipped bits; and a fork."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from support.rigs.faults.disk_shim import Shim
from support.rigs.faults.mounts import small_disk
from support.rigs.producer.spool import PATIENCE_S, QUIET, an_entry
from support.rigs.producer.spool_driver import entry, lines, run, take_all
from support.rigs.store.rows import all_rows

from dmq.errors import StoreCorrupt, StoreFailed
from dmq.producer_store.entries.clock import ForwardClock
from dmq.producer_store.entries.reader import DueReader
from dmq.producer_store.spool import Spool
from dmq.store.engines.engine import Batch, Engine
from dmq.store.engines.rocks import RocksEngine
from dmq.store.schema.keys import Family
from retry.sink import Held, SinkUnavailable

pytestmark = pytest.mark.fault
_MIB = 1024 * 1024
MANY = 3_000
_T = TypeVar("_T")


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.mkdir()
    return path


def test_short_of_disk_space_only_puts_are_refused(disk: Path) -> None:
    """Refused with the name of the bound, before the disk is full; what is there is finished even when it is."""
    ran = run("disk_full", disk, before=small_disk(disk, 96 * _MIB))
    assert lines(ran.stdout) == [
        ["refused", "free_bytes_min", 1, True],
        ["finished", True],
        ["taken", True, 0, 0],
    ], ran.stderr


def test_a_disk_that_runs_out_is_overcome_once_there_is_room(disk: Path) -> None:
    """ENOSPC under a put: it is in doubt, all before it are there, and the spool opens its directory by itself."""
    ran = run("disk_runs_out", disk, before=small_disk(disk, 64 * _MIB))
    assert lines(ran.stdout) == [["mended", 0, 0, True], ["goes on", True]], ran.stdout + ran.stderr


def test_one_sync_that_fails_is_overcome(tmp_path: Path) -> None:
    """Puts under way are in doubt and there at most once, none that was acknowledged is missing; held stays held."""
    shim = Shim(tmp_path)
    ran = run("sync_fails", tmp_path / "root", str(tmp_path / "fail"), environment=shim.environment)
    assert lines(ran.stdout) == [["mended", 1, 0, 0, True, False]], ran.stdout + ran.stderr
    assert shim.syncs().count("f") == 1


@pytest.mark.parametrize("how", ["plain", "locked"])
def test_a_forked_child_is_refused_at_once(tmp_path: Path, how: str) -> None:
    """Every method, also while another thread held the lock at the fork; the parent goes on."""
    ran = run("fork", tmp_path / "root", how)
    (child, parent) = lines(ran.stdout)
    assert set(child[1].values()) == {"SinkClosed"}, child
    assert child[2], "at once"
    assert parent == ["parent", 7, [3]], ran.stdout + ran.stderr


def test_a_child_that_outlives_its_parent_does_not_keep_the_directory(tmp_path: Path) -> None:
    """Locks are inherited by forks; the child lets go of its copies, so the directory is free when the parent ends."""
    ran = run("fork", tmp_path / "root", "outlives")
    assert lines(ran.stdout)[-1] == ["parent", True, [1]], ran.stdout + ran.stderr


# -- flipped bits ------------------------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    """Flip the bits of one byte."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0xFF]))


def test_a_flipped_bit_in_the_log_leaves_the_directory_alone(tmp_path: Path) -> None:
    """It is refused and named, its files stay as they are, and the process goes on with another directory."""
    run("fill", tmp_path, "20")
    (path,) = tmp_path.glob("spool-*")
    (log,) = (path / "rocksdb").glob("*.log")
    flip(log, log.stat().st_size // 2)
    before = files_of(path)
    with Spool(tmp_path, options=QUIET) as spool:
        assert spool.path != path
        assert [each.path for each in spool.damaged_directories] == [path]
        assert str(path) in spool.damaged[0]
        spool.put(an_entry()).result(PATIENCE_S)
        assert len(spool.take("orders", 9, PATIENCE_S)) == 1
        assert spool._adopter.adopt() == 0
    assert files_of(path) == before


def files_of(path: Path) -> dict[Path, bytes]:
    """All but the locks, and what RocksDB tells of itself."""
    return {each: each.read_bytes() for each in path.rglob("*") if each.is_file() and not each.name.startswith("LO")}


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A directory with all its entries in one table of the timeline."""
    root = tmp_path / "root"
    rng = random.Random(1)
    with Spool(root, options=QUIET) as spool:
        answers = [spool.put(entry(number, payload=rng.randbytes(200))) for number in range(MANY)]
        for each in answers:
            each.result(PATIENCE_S)
        return spool.path


def table_of(path: Path, family: Family) -> Path:
    """The one table of a family, by what it says of itself; the database stays as it is."""
    says = b"name" + family.name.lower().encode()  # the property is called "rocksdb.column.family.name"
    (found,) = [each for each in (path / "rocksdb").glob("*.sst") if says in each.read_bytes()]
    return found


@pytest.mark.parametrize("places", [(0.5,), (0.001,), (0.3, 0.6), (0.4, 0.401, 0.44)], ids=str)
def test_a_flipped_bit_in_a_table_costs_its_block_alone(tables: Path, places: Sequence[float]) -> None:
    """All entries outside the damaged blocks are delivered, in order; the damage is named, now and in the next run."""
    table = table_of(tables, Family.TIMELINE)
    for place in places:
        flip(table, int(table.stat().st_size * place))
    root = tables.parent
    blocks = -(-MANY * 300 // (16 * 1024))
    for is_finished in (False, True):
        with Spool(root, options=QUIET) as spool:
            assert spool.path == tables
            found = take_all(spool, is_finished=is_finished)
            assert found == sorted(found)
            missing = sorted(set(range(MANY)) - set(found))
            runs = [number for number in missing if number - 1 not in missing]
            assert 1 <= len(runs) <= len(places)
            assert len(missing) <= len(places) * 2 * MANY // blocks
            assert len(spool.damaged) == len(runs)
            assert all(str(tables) in each and "checksum" in each for each in spool.damaged)
            assert not spool.damaged_directories


def test_the_last_row_in_front_of_a_damaged_block_is_delivered(tables: Path, tmp_path: Path) -> None:
    """A damaged block costs its own rows: neither the one before it nor the one behind it."""
    shutil.copytree(tables / "rocksdb", tmp_path / "copy")  # opened by hand, it would no more be as it was closed
    keys = [key for key, _ in with_engine(tmp_path / "copy", lambda engine: all_rows(engine, Family.TIMELINE))]
    assert len(keys) == MANY
    flip(table_of(tables, Family.TIMELINE), table_of(tables, Family.TIMELINE).stat().st_size // 2)
    shutil.copytree(tables / "rocksdb", tmp_path / "damaged")
    readable = with_engine(tmp_path / "damaged", lambda engine: sum(can_read(engine, key) for key in keys))
    with Spool(tables.parent, options=QUIET) as spool:
        found = take_all(spool)
    assert readable < MANY
    assert len(found) == readable


def with_engine(path: Path, look: Callable[[Engine], _T]) -> _T:
    """Look into a database."""
    engine = RocksEngine(path)
    try:
        return look(engine)
    finally:
        engine.close()


def can_read(engine: Engine, key: bytes) -> bool:
    """Whether a row of the timeline can be read by its key."""
    try:
        return engine.get_many(Family.TIMELINE, [key])[0] is not None
    except StoreCorrupt:
        return False


def test_entries_outside_a_damaged_block_of_an_orphan_are_taken_over(tables: Path, tmp_path: Path) -> None:
    """The rest of it stays, and is named; it is not looked at again."""
    flip(table_of(tables, Family.TIMELINE), table_of(tables, Family.TIMELINE).stat().st_size // 2)
    with Spool(tmp_path / "other", options=QUIET) as other:
        empty = other.path
    root = tables.parent
    empty.rename(root / "spool-0")
    with Spool(root, options=QUIET) as spool:
        assert spool.path.name == "spool-0"
        adopted = spool._adopter.adopt()
        assert MANY * 0.9 < adopted < MANY
        assert [each.path for each in spool.damaged_directories] == [tables]
        assert len(take_all(spool)) == adopted
        assert spool._adopter.adopt() == 0
    with Spool(root, options=QUIET) as spool:
        assert spool.path.name == "spool-0"
        assert spool._adopter.adopt() == 0, "what was taken over does not come again"
        assert [each.path for each in spool.damaged_directories] == [tables]


def test_damage_that_the_opening_of_an_orphan_meets_is_named(
    tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening writes the clock on; a compaction may have found the damage first, and fails that write with it."""
    write, written = RocksEngine.write, []

    def fail_second(engine: RocksEngine, batch: Batch) -> None:
        written.append(engine.path)
        if written.count(tables / "rocksdb") == 2:
            raise StoreCorrupt("block checksum mismatch")
        write(engine, batch)

    with Spool(tmp_path / "other", options=QUIET) as other:
        empty = other.path
    empty = empty.rename(tables.with_name("spool-0"))
    monkeypatch.setattr(RocksEngine, "write", fail_second)
    monkeypatch.setattr(ForwardClock, "go_on_from", lambda *_: True)
    with Spool(tables.parent, options=QUIET) as spool:
        assert spool.path == empty
        assert spool._adopter.adopt() == 0
        assert [each.path for each in spool.damaged_directories] == [tables]


def test_damage_that_writes_meet_is_left_behind(tables: Path) -> None:
    """Where finishing entries meets damage twice, the process goes on with another directory, and adopts the rest."""
    flip(table_of(tables, Family.INDEX), table_of(tables, Family.INDEX).stat().st_size // 2)
    root = tables.parent
    finished: set[int] = set()
    pending: dict[int, Held] = {}
    with Spool(root, options=QUIET) as spool:
        while finished != set(range(MANY)):
            path = spool.path
            pending |= {int.from_bytes(held.entry.uid, "big"): held for held in spool.take("orders", 50, 0.2)}
            for number, held in list(pending.items()):
                try:
                    spool.finish(held).result(PATIENCE_S)
                except SinkUnavailable:
                    continue  # in doubt, or the spool is down for a moment
                finished.add(number)
                del pending[number]
            if spool.path != path:
                pending.clear()  # they come again from there
            if spool.path != tables:
                spool._adopter.adopt()
        assert spool.path != tables
        spool.put(an_entry(10**6)).result(PATIENCE_S)


def test_a_late_report_of_a_failure_does_not_end_the_successor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader notices the failure as well, after the store said it: it is opened again once, not twice."""
    monkeypatch.setattr("dmq.producer_store.directories.running.REOPEN_S", (0.0,))
    closed: list[DueReader] = []
    again = threading.Event()
    close = DueReader.close

    def close_and_complain(reader: DueReader) -> None:
        close(reader)
        reader._on_failure(StoreFailed("late"))
        closed.append(reader)
        if len(closed) > 1:
            again.set()

    monkeypatch.setattr(DueReader, "close", close_and_complain)
    with Spool(tmp_path, options=QUIET) as spool:
        spool._running.reader._on_failure(StoreFailed("in time"))
        while not spool.reopened_total:
            spool.take("orders", 1, 0.01)
        assert not again.wait(0.3)
        spool.put(an_entry()).result(PATIENCE_S)
        assert spool.reopened_total == 1


def test_a_reader_that_meets_the_unexpected_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends the thread that looks for what is due: the directory is opened again, and nothing is stuck."""
    monkeypatch.setattr("dmq.producer_store.directories.running.REOPEN_S", (0.0,))
    has_failed: list[bool] = []
    turn = DueReader.turn

    def fail_once(reader: DueReader) -> int:
        if reader._wanted and not has_failed:
            has_failed.append(True)
            raise KeyError("something nobody thought of")
        return turn(reader)

    monkeypatch.setattr(DueReader, "turn", fail_once)
    with Spool(tmp_path, options=QUIET) as spool:
        spool.put(an_entry()).result(PATIENCE_S)
        assert len(spool.take("orders", 1, PATIENCE_S)) == 1
        assert spool.reopened_total == 1
