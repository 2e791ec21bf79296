"""A disk that stalls, on a file system that is really frozen: the hook, its process, and what was acknowledged."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.effort import EFFORT
from support.frozen_disk import FrozenDisk, Pauses, mounted
from support.hook_rig import AWAY
from support.spool_driver import command, lines, take_all
from support.spool_rig import QUIET

from dmq.spool.spool import Spool
from dmq.store.ops import Batch
from dmq.store.rocks import RocksEngine, RocksOptions
from dmq.store.schema.keys import Family
from retry import Redelivery, Rejected, Spooled

FREEZE_S = 30.0 if EFFORT > 1 else 5.0
KEEP_S = 1.0
_MIB = 1024 * 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FrozenDisk]:
    with mounted(tmp_path) as made:
        yield made


def unreachable(payload: bytes) -> None:
    raise AWAY


def test_sends_return_in_time_and_no_thread_stops(disk: FrozenDisk) -> None:
    """Each ``send`` returns by ``keep_timeout_s``, in doubt, while threads run on; all that was kept is there later."""
    pauses = Pauses()
    hook = Redelivery(Spool(disk.path / "spool"), keep_timeout_s=KEEP_S, autostart=False)
    hook.add_handler("t", unreachable)
    kept = sum(isinstance(hook.send("t", b"before"), Spooled) for _ in range(20))
    in_doubt = 0
    with disk.frozen(FREEZE_S), pauses.watched():
        end_s = time.monotonic() + FREEZE_S - KEEP_S - 1.0
        while time.monotonic() < end_s:
            began_s = time.monotonic()
            outcome = hook.send("t", b"during")
            took_s = time.monotonic() - began_s
            assert isinstance(outcome, Rejected)
            assert outcome.is_uncertain
            assert took_s <= KEEP_S + 0.5 + 2 * pauses.longest_s
            in_doubt += 1
        assert hook.health().status == "degraded"
    pauses.check()
    hook.close()
    with Spool(disk.path / "spool", options=QUIET) as spool:
        assert kept == 20
        assert spool.stats().waiting == kept + in_doubt  # all were written once the disk answered


@pytest.mark.parametrize("bound", ["memtable", "log"])
def test_a_write_that_needs_a_new_log_stops_no_thread(disk: FrozenDisk, bound: str) -> None:
    """A full memtable or log is switched in a call that releases the GIL, so only the writer waits for the disk."""
    family = Family.META if bound == "memtable" else Family.QUEUE  # of 2 MiB, and of more than the log
    engine = RocksEngine(disk.path / "db", RocksOptions(wal_bytes_max=4 * _MIB if bound == "log" else 32 * _MIB))
    logs = {each.name for each in (disk.path / "db").glob("*.log")}
    pauses = Pauses()
    returned: list[float] = []

    def write() -> None:
        for number in range(12):  # of less than the log's buffer
            batch = Batch()
            batch.puts.append((family, b"%08d" % number, bytes(_MIB)))
            engine.write(batch)
        returned.append(time.monotonic())

    writer = threading.Thread(target=write)
    with disk.frozen(FREEZE_S), pauses.watched():
        frozen_s = time.monotonic()
        writer.start()
        writer.join(FREEZE_S - 1.0)
        assert writer.is_alive(), "the test needs a write that waits for a new log"
        assert len(engine.get_many(family, [b"%08d" % 0])) == 1
    writer.join()
    pauses.check()
    assert returned[0] - frozen_s > FREEZE_S - 1.0
    assert {each.name for each in (disk.path / "db").glob("*.log")} != logs
    engine.close()


def test_a_kill_during_a_freeze_loses_nothing_acknowledged(disk: FrozenDisk) -> None:
    """A process that is killed while its writer waits for the disk has all that was answered ``Spooled``, after it."""
    started = command("put_until_killed", disk.path / "spool")
    with subprocess.Popen(started, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        heard = [process.stdout.readline() for _ in range(100)]
        with disk.frozen(FREEZE_S):
            process.kill()
        heard += process.stdout.readlines()
    answered = {number for _, number in lines("".join(heard))}
    with Spool(disk.path / "spool", options=QUIET) as spool:
        there = set(take_all(spool, idle_s=0.1))
    assert answered <= there
    assert len(answered) >= 100
