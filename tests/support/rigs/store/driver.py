"""A process with a store of its own, for tests that kill it, trace it, fork it or take its disk away.

    python store_driver.py <what> <directory> [argument]

Started as a file, by ``run_driver`` or under a tracer. Each function below is a ``what``; it writes to standard output
with one ``write`` per line, so that a trace shows when the line left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from rocksdict import RdictIter, ReadOptions, WriteBatch, WriteOptions

from broker_adapter.runtime.clock import SystemClock
from dmq.errors import StoreError, StoreForked
from dmq.store.engines import rocks
from dmq.store.engines.engine import Batch
from dmq.store.engines.rocks import RocksEngine, RocksOptions
from dmq.store.schema.keys import Family
from dmq.store.store import Store, StoreOptions
from dmq.store.writer.operations import Delete, Put, Schedule

ROW_BYTES = 200
_MIB = 1024 * 1024
FAR_MS = 4_000_000_000_000


def row_key(number: int) -> bytes:
    """The key of row ``number``."""
    return b"%08d" % number


def row(number: int) -> bytes:
    """What row ``number`` holds: no two are alike."""
    return (b"value %d " % number).ljust(ROW_BYTES, b"*")


def batch_of(number: int, family: Family = Family.TIMELINE) -> Batch:
    """A batch with row ``number``."""
    batch = Batch()
    batch.puts.append((family, row_key(number), row(number)))
    return batch


def say(line: str) -> None:
    """Write a line at once, in one call."""
    os.write(1, line.encode() + b"\n")


def die() -> NoReturn:
    """End as SIGKILL ends a process: nothing is closed, nothing flushed."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def fill(directory: Path, count: str) -> None:
    """Write rows, a batch and a sync each, and die."""
    engine = RocksEngine(directory)
    for number in range(int(count)):
        engine.write(batch_of(number))
        engine.sync()
    die()


def fill_two_logs(directory: Path, count: str) -> None:
    """Write rows into a log, make RocksDB begin another one while the first is still needed, write as many, die."""
    engine = RocksEngine(directory)
    for number in range(int(count)):
        engine.write(batch_of(number))
        engine.sync()
    audit = engine._dicts[Family.AUDIT]
    audit.put(b"of another family", b"so that there is something to flush")
    audit.flush(True)
    for number in range(int(count), 2 * int(count)):
        engine.write(batch_of(number))
        engine.sync()
    die()


def table_before_log(directory: Path, count: str) -> None:
    """Write rows of two families without a flush of the log, have one family written into a table, and die."""
    engine = RocksEngine(directory)
    for number in range(int(count)):
        batch = batch_of(number)
        batch.puts += batch_of(number, Family.META).puts
        engine.write(batch)
    engine._dicts[Family.META].flush(True)
    die()


def commit(directory: Path, argument: str) -> None:
    """Commit messages one by one; say ``OK <token>`` after each. Argument: durability, count."""
    durability, count = argument.split(",")
    assert durability in {"disk", "process"}
    options = StoreOptions(durability="disk" if durability == "disk" else "process", ballast_bytes=0)
    store = Store.open(directory, SystemClock(), options)
    say("ready")
    for number in range(int(count)):
        token = f"token-{number:06d}-{os.urandom(6).hex()}"
        store.commit([Schedule(1, token.encode(), FAR_MS + number, b"\1" + bytes(27) + b"wire message", b"event")])
        say(f"OK {token}")
    store.close()


def fail_syncs(directory: Path, count: str) -> None:
    """Commit, then let every sync fail (under the shim); say what the store and each caller said, as JSON."""
    heard: list[StoreError] = []
    store = Store.open(directory, SystemClock(), StoreOptions(ballast_bytes=0, low_water_bytes=0))
    store.on_failure = heard.append
    for number in range(int(count)):
        store.commit([Put(Family.GROUP, row_key(number), row(number))])
    (Path(os.environ["SHIM_DIR"]) / "fail").touch()
    raised: list[str] = []
    for _ in range(3):
        try:
            store.commit([Put(Family.GROUP, b"in doubt", b"")])
        except StoreError as error:
            raised.append(type(error).__name__)
    store.close()
    say(json.dumps({"raised": raised, "heard": [type(error).__name__ for error in heard]}))


def keep_the_gil(directory: Path, how: str) -> None:
    """Make one slow sync, ``ours`` or by a ``naive`` write; say how often a thread ran, how often the write synced."""
    engine = RocksEngine(directory)
    engine.write(batch_of(1))
    engine.sync()
    beats = 0
    is_over = threading.Event()

    def beat() -> None:
        nonlocal beats
        while not is_over.is_set():
            beats += 1
            time.sleep(0.005)

    thread = threading.Thread(target=beat)
    thread.start()
    writes = WriteBatch(raw_mode=True)
    writes.put(row_key(2), row(2), engine._handles[Family.TIMELINE])
    synced = WriteOptions()
    synced.sync = True
    db = engine._open_db()
    slow = Path(os.environ["SHIM_DIR"]) / "slow"
    slow.write_text("400", encoding="ascii")
    before, syncs = beats, Path(os.environ["SHIM_DIR"]) / "syncs"
    synced_before = syncs.stat().st_size
    if how == "naive":
        db.write(writes, synced)
        synced_by_write = syncs.stat().st_size - synced_before
    else:
        engine.write(batch_of(2))
        synced_by_write = syncs.stat().st_size - synced_before
        engine.sync()
    after = beats
    slow.unlink()
    is_over.set()
    thread.join()
    engine.close()
    say(f"{after - before} {synced_by_write}")


def fork(directory: Path, how: str) -> None:
    """Fork a child that tries to use the store and ends by ``how``; go on; say what the child met, and the rows."""
    store = Store.open(directory, SystemClock(), StoreOptions(rocks=RocksOptions(wal_bytes_max=65_536)))
    for number in range(300):
        store.commit([Put(Family.GROUP, row_key(number), row(number))])
    pid = os.fork()
    if pid == 0:
        met = []
        for action in (
            lambda: store.commit([Put(Family.GROUP, b"child", b"")]),
            lambda: store.scan(Family.GROUP, b"", b"\xff", limit=1),
            lambda: store.get_many(Family.GROUP, [row_key(1)]),
            store.engine_stats,
            lambda: RocksEngine(directory.with_name("another")),
            store.close,
        ):
            try:
                action()
                met.append("nothing")
            except StoreForked:
                met.append("StoreForked")
        say(f"child: {' '.join(met)}")
        if how == "_exit":
            os._exit(7)
        sys.exit(7)
    _, status = os.waitpid(pid, 0)
    for number in range(300, 600):
        store.commit([Put(Family.GROUP, row_key(number), row(number))])
    rows = len(store.scan(Family.GROUP, b"", b"\xff", limit=10_000).rows)
    store.close()
    say(f"child ended with {os.waitstatus_to_exitcode(status)}; parent has {rows} rows")


def fork_naive(directory: Path, how: str) -> None:
    """What happens without the guards: the child of a fork writes, opens another store, or ends in order."""
    engine = RocksEngine(directory)
    engine.write(batch_of(1))
    engine.sync()
    engine._dicts[Family.TIMELINE].flush(True)  # starts RocksDB's threads
    rocks._process.has_threads = False  # as if nobody had looked
    pid = os.fork()
    if pid == 0:
        signal.alarm(2)  # if it hangs
        engine._pid = os.getpid()
        if how == "write":
            for number in range(100, 200):
                engine.write(batch_of(number))
            say("child wrote 100")
            os._exit(0)
        if how == "open":
            other = RocksEngine(directory.with_name("another"))
            other.write(batch_of(1))
            say("child opened")
            other.close()
            say("child closed")
            os._exit(0)
        sys.exit(0)
    _, status = os.waitpid(pid, 0)
    say(f"child ended with {os.waitstatus_to_exitcode(status)}")
    engine.write(batch_of(2))
    engine.close()


def dangle(directory: Path, argument: str) -> None:
    """Scan 200 times up to a bound whose bytes nobody keeps; say how often the result was wrong."""
    engine = RocksEngine(directory)
    batch = Batch()
    batch.puts += [(Family.TIMELINE, row_key(number), b"") for number in range(1000)]
    engine.write(batch)
    wrong = 0
    for _ in range(200):
        cursor = _bounded(engine, 500)
        made_in_its_place = [row_key(number) for number in range(900, 950)]
        cursor.seek_to_first()
        rows = 0
        while cursor.valid():
            rows += 1
            cursor.next()
        wrong += rows != 500
        made_in_its_place.clear()
    say(str(wrong))


def _bounded(engine: RocksEngine, stop: int) -> RdictIter:
    options = ReadOptions()
    options.set_iterate_upper_bound(row_key(stop))
    return engine._dicts[Family.TIMELINE].iter(options)


def hold(directory: Path, _: str) -> None:
    """Open a store, say so, and keep it until standard input ends."""
    store = Store.open(directory, SystemClock(), StoreOptions(ballast_bytes=0))
    say("ready")
    sys.stdin.read()
    store.close()


def fill_disk(directory: Path, leave_bytes: int) -> Path:
    """Take the free space of a file system but for ``leave_bytes``; return the file to remove to make room."""
    filler = directory / "filler"
    found = os.statvfs(directory)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(found.f_bavail * found.f_frsize - leave_bytes, 1))
    return filler


def run_low(disk: Path, _: str) -> None:
    """Take the disk away in steps; say what the guard says, and that acks, hand-overs and deletes go on."""
    options = StoreOptions(low_water_bytes=8 * _MIB, ballast_bytes=2 * _MIB)
    store = Store.open(disk / "cell", SystemClock(), options)

    def look(step: str) -> None:
        store.commit([Put(Family.GROUP, step.encode(), bytes(1000)), Delete(Family.GROUP, b"none")])
        state = store.disk()
        assert state is not None
        has_file = (disk / "cell" / "BALLAST").exists()
        say(json.dumps([step, store.is_disk_low(), state.has_ballast, has_file]))

    look("plenty")
    filler = fill_disk(disk, 6 * _MIB)
    look("low")
    filler.unlink()
    filler = fill_disk(disk, 1 * _MIB)
    look("nearly full")
    found = os.statvfs(disk)
    say(json.dumps(["room was given back", found.f_bavail * found.f_frsize > 2 * _MIB]))
    filler.unlink()
    look("room again")
    store.close()


def run_acks(disk: Path, _: str) -> None:
    """Take all of the disk at once and only acknowledge; say how that goes on, waits, and goes on with room again."""
    options = StoreOptions(low_water_bytes=8 * _MIB, ballast_bytes=4 * _MIB, full_bytes=_MIB)
    store = Store.open(disk / "cell", SystemClock(), options)
    heard: list[StoreError] = []
    store.on_failure = heard.append
    store.commit([Put(Family.GROUP, b"first", b"")])
    filler = fill_disk(disk, 16_384)
    done = 0
    is_waiting = threading.Event()

    def watch() -> None:
        seen = -1
        while not (store.is_disk_full() and seen == done):
            seen = done
            time.sleep(0.5)
        is_waiting.set()
        filler.unlink()

    watcher = threading.Thread(target=watch)
    watcher.start()
    while not is_waiting.is_set() and done < 100_000:
        store.commit([Put(Family.GROUP, row_key(done), os.urandom(ROW_BYTES))])
        done += 1
    watcher.join()
    store.commit([Put(Family.GROUP, b"last", b"")])
    rows = store.get_many(Family.GROUP, [row_key(number) for number in range(done)])
    store.close()
    say(
        json.dumps({"many": done > 2_000, "waited": is_waiting.is_set(), "heard": len(heard), "lost": rows.count(None)})
    )


def run_start(disk: Path, ballast: str) -> None:
    """Die with a log that is not in tables, take all of the disk, and open again; say how that went."""
    options = StoreOptions(low_water_bytes=4 * _MIB, ballast_bytes=int(ballast))
    pid = os.fork()
    if pid == 0:
        store = Store.open(disk / "cell", SystemClock(), options)
        for number in range(40):
            store.commit([Put(Family.GROUP, row_key(number), os.urandom(100_000))])
        die()
    os.waitpid(pid, 0)
    fill_disk(disk, 0)
    try:
        store = Store.open(disk / "cell", SystemClock(), options)
    except StoreError as error:
        say(json.dumps([type(error).__name__, str(error)]))
        return
    rows = store.get_many(Family.GROUP, [row_key(number) for number in range(40)])
    store.commit([Put(Family.GROUP, b"an acknowledgement", b"")])
    store.close()
    say(json.dumps(["opened", rows.count(None), (disk / "cell" / "BALLAST").exists()]))


def run_full(disk: Path, value_bytes: str) -> None:
    """Commit until the disk is full, make room, open again in this process; say what became of it all."""
    options = StoreOptions(low_water_bytes=0, ballast_bytes=0)
    store = Store.open(disk / "cell", SystemClock(), options)
    heard: list[StoreError] = []
    store.on_failure = heard.append
    store.commit([Put(Family.GROUP, b"first", b"")])
    filler = fill_disk(disk, 2 * _MIB)
    acknowledged, error = 0, ""
    try:
        for number in range(100_000):
            store.commit([Put(Family.GROUP, row_key(number), os.urandom(int(value_bytes)))])
            acknowledged = number + 1
    except StoreError as raised:
        error = type(raised).__name__
    later = ""
    try:
        store.commit([Put(Family.GROUP, b"later", b"")])
    except StoreError as raised:
        later = type(raised).__name__
    store.close()
    filler.unlink()
    again = Store.open(disk / "cell", SystemClock(), options)
    rows = again.get_many(Family.GROUP, [row_key(number) for number in range(acknowledged)])
    lost = sum(value is None or len(value) != int(value_bytes) for value in rows)
    again.commit([Put(Family.GROUP, b"goes on", b"")])
    again.close()
    said = {"acknowledged": acknowledged > 0, "error": error, "later": later, "heard": len(heard), "lost": lost}
    say(json.dumps({**said, "was_closed": again.recovery.was_closed}))


def command(what: str, directory: Path, argument: str = "") -> list[str]:
    """The command line that runs this file."""
    return [sys.executable, __file__, what, str(directory), argument]


def run_driver(
    what: str,
    directory: Path,
    argument: str = "",
    *,
    before: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 50,
) -> subprocess.CompletedProcess[str]:
    """Run it to its end, whatever that is; ``before`` is a tracer's command line."""
    return subprocess.run(
        [*before, *command(what, directory, argument)],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **(environment or {})},
    )


_ALL = {
    each.__name__: each
    for each in (
        fill,
        fill_two_logs,
        table_before_log,
        commit,
        fail_syncs,
        keep_the_gil,
        fork,
        fork_naive,
        dangle,
        run_low,
        run_acks,
        run_start,
        run_full,
        hold,
    )
}

if __name__ == "__main__":
    _ALL[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
