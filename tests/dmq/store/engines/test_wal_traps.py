"""The traps of opening again: what RocksDB forgives without a word, and logs that are never let go."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path

import pytest
from rocksdict import AccessType, DBRecoveryMode, Options, Rdict
from support.rigs.store import driver as store_driver
from support.rigs.store.driver import batch_of, row_key, run_driver
from support.rigs.store.rows import all_rows

from dmq.errors import StoreCorrupt
from dmq.store.engines.engine import Batch
from dmq.store.engines.rocks import RocksEngine, RocksOptions
from dmq.store.engines.wal import BLOCK_BYTES, check_logs, torn_bytes
from dmq.store.schema.keys import Family

pytestmark = pytest.mark.integration
LOGGED = 100


def logs_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.log"))


def naive_open(directory: Path) -> Rdict:
    """As a first program with rocksdict would: default options, which means the default recovery mode."""
    families = {family.name.lower(): Options(raw_mode=True) for family in Family}
    return Rdict(str(directory), Options(raw_mode=True), column_families=families, access_type=AccessType.read_write())


def rows_there(directory: Path) -> int:
    engine = RocksEngine(directory)
    try:
        return len(all_rows(engine, Family.TIMELINE))
    finally:
        engine.close()


# -- recovery ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A database whose process was killed after 100 synced batches, all of them in one log."""
    directory = tmp_path / "db"
    run_driver("fill", directory, str(LOGGED))
    (log,) = logs_of(directory)
    assert log.stat().st_size > LOGGED * store_driver.ROW_BYTES
    return directory


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0xFF]))


def test_the_default_recovery_loses_half_silently(killed: Path) -> None:
    """The trap: one bad byte in the middle of the log, and what follows is gone without a word."""
    (log,) = logs_of(killed)
    flip(log, log.stat().st_size // 2)
    db = naive_open(killed)
    timeline = db.get_column_family("timeline")
    assert sum(1 for _ in timeline.items()) < 0.6 * LOGGED
    timeline.close()
    db.close()


@pytest.mark.parametrize("place", [0.01, 0.25, 0.5, 0.75, 0.98])
def test_damage_in_the_log_refuses_to_open(killed: Path, place: float) -> None:
    """Ours: a whole record with a wrong checksum is damage, wherever it is."""
    (log,) = logs_of(killed)
    flip(log, int(log.stat().st_size * place))
    with pytest.raises(StoreCorrupt):
        RocksEngine(killed)


@pytest.mark.parametrize("missing", [1, 3, 100, 230])
def test_a_record_cut_short_at_the_end_is_cut_and_counted(killed: Path, missing: int) -> None:
    """Ours: what was under way when the process died was never acknowledged; opening says how many bytes went."""
    (log,) = logs_of(killed)
    size = log.stat().st_size
    record = size // LOGGED
    os.truncate(log, size - missing)
    engine = RocksEngine(killed)
    assert engine.recovered_cut_bytes == record - missing
    assert len(all_rows(engine, Family.TIMELINE)) == LOGGED - 1
    engine.close()
    engine = RocksEngine(killed)
    assert engine.recovered_cut_bytes == 0, "counted once"
    engine.close()


def test_an_untouched_log_counts_nothing(killed: Path) -> None:
    """Zero after an ordinary kill, or the figure would mean nothing; and all rows are there."""
    engine = RocksEngine(killed)
    assert engine.recovered_cut_bytes == 0
    assert len(all_rows(engine, Family.TIMELINE)) == LOGGED
    engine.close()


def test_a_tear_in_an_older_log_is_damage(tmp_path: Path) -> None:
    """The trap: the mode that forgives a torn end forgives it in *every* log, and goes on with the next one."""
    directory = tmp_path / "db"
    run_driver("fill_two_logs", directory, str(LOGGED))
    older, newer = logs_of(directory)
    os.truncate(older, older.stat().st_size - 300)
    with pytest.raises(StoreCorrupt, match=re.escape(newer.name)):
        RocksEngine(directory)
    families = {family.name.lower(): Options(raw_mode=True) for family in Family}
    tolerant = Options(raw_mode=True)
    tolerant.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
    naive = Rdict(str(directory), tolerant, column_families=families, access_type=AccessType.read_write())
    timeline = naive.get_column_family("timeline")
    assert LOGGED < sum(1 for _ in timeline.items()) < 2 * LOGGED, "rows are missing in the middle"
    timeline.close()
    naive.close()


def test_a_tear_may_be_followed_by_logs_without_records(killed: Path) -> None:
    """A kill during recovery leaves the torn log and an empty new one: that opens."""
    (log,) = logs_of(killed)
    os.truncate(log, log.stat().st_size - 1)
    (killed / "000999.log").touch()
    assert check_logs(killed) > 0
    assert rows_there(killed) == LOGGED - 1


def test_tears_are_found_in_records_of_many_blocks(tmp_path: Path) -> None:
    """A big batch spans many blocks of the log; wherever it is cut, all of it counts and nothing of its neighbour."""
    engine = RocksEngine(tmp_path / "db")
    engine.write(batch_of(1))
    engine.flush()
    first = logs_of(tmp_path / "db")[0].stat().st_size
    batch = Batch()
    batch.puts.append((Family.TIMELINE, b"big", os.urandom(3 * BLOCK_BYTES)))
    engine.write(batch)
    engine.flush()
    whole = logs_of(tmp_path / "db")[0].read_bytes()
    engine.close()
    log = tmp_path / "000001.log"
    for size in (*range(first, first + 20), *range(first + 20, len(whole), 997), len(whole) - 1):
        log.write_bytes(whole[:size])
        assert torn_bytes(log) == size - first
    log.write_bytes(whole + bytes(5000))
    assert torn_bytes(log) == 0, "zero bytes are room, not a record"
    log.write_bytes(whole)
    assert torn_bytes(log) == 0


# -- a quiet family ----------------------------------------------------------------------------------------------------


def test_a_quiet_family_does_not_keep_the_logs(tmp_path: Path) -> None:
    """One row in a quiet family keeps every later log alive: the naive variant's grow, ours are let go."""
    value = os.urandom(4096)
    count, bound = 800, 256 * 1024

    def kept(directory: Path) -> int:
        sizes = 0
        for path in logs_of(directory):
            with suppress(FileNotFoundError):  # it was let go just now
                sizes += path.stat().st_size
        return sizes

    families = {"busy": _small_buffers(bound), "quiet": _small_buffers(bound)}
    made = _small_buffers(bound)
    made.create_missing_column_families(True)
    naive = Rdict(str(tmp_path / "naive"), made, column_families=families)
    busy, quiet = naive.get_column_family("busy"), naive.get_column_family("quiet")
    quiet[b"1"] = b"1"
    for number in range(count):
        busy[row_key(number)] = value
    busy.flush(True)
    assert kept(tmp_path / "naive") > count * len(value), "the trap: nothing was let go, and all was flushed"
    busy.close()
    quiet.close()
    naive.close()

    engine = RocksEngine(tmp_path / "ours", RocksOptions(wal_bytes_max=bound))
    engine.write(batch_of(1, Family.GROUP))
    for number in range(count):
        batch = Batch()
        batch.puts.append((Family.TIMELINE, row_key(number), value))
        engine.write(batch)
    until_s = time.monotonic() + 60
    while kept(tmp_path / "ours") > 2 * bound:  # flushing goes on behind: a little more traffic, and the logs go
        assert time.monotonic() < until_s, "they are not let go"
        time.sleep(0.01)
        engine.write(batch_of(count))
    engine.close()


def _small_buffers(size_bytes: int) -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_write_buffer_size(size_bytes)
    return options
