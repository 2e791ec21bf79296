"""The trail under kills, a full disk, and a store that lost its end: every event in it once, and none twice."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.clients.load.crash import Load
from support.clients.wire.client import WireClient, a_message
from support.effort import EFFORT, SEED, at_length
from support.models.trail.read import lines, read_trail
from support.rigs.commands import forked
from support.rigs.daemon.process import Daemon
from support.rigs.faults.mounts import small_disk

from broker_adapter.contracts.message import pack_id
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.store.files.cell import Cell
from dmq.trail.export.exporter import export_all

pytestmark = pytest.mark.fault
PATIENCE_S = 20.0
KILLS = 3 * EFFORT

# A run of a cell: some events, then an export that dies at the ``at``-th time something is done that could be its last.
CHILD = """
import os, signal, sys
from pathlib import Path
from broker_adapter.runtime.clock import SystemClock
from dmq.trail import files, manifest
from dmq.trail.events import encode_event, gap_event
from dmq.trail.export.exporter import Exporter, ExportOptions
from dmq.store.writer.operations import Emit
from dmq.store.store import Store, StoreOptions

data, trail, at, is_torn = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "torn"
store = Store.open(data, SystemClock(), StoreOptions(gap_event=gap_event, ballast_bytes=0, low_water_bytes=0))
exporter = Exporter(store, trail, ExportOptions(rows_max=7))
left = at

def deadly(call):
    def made(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    return made

os.fsync, os.replace, os.truncate = deadly(os.fsync), deadly(os.replace), deadly(os.truncate)
Path.replace, Path.unlink, Path.mkdir = deadly(Path.replace), deadly(Path.unlink), deadly(Path.mkdir)
store.commit = deadly(store.commit)
if is_torn:
    whole = manifest.encode_line
    manifest.encode_line = lambda listed: whole(listed)[: -9 if left == 1 else None]  # it dies in the sync of it
exporter.recover()
for batch in range(4):
    Store.commit(store, [Emit(encode_event(2, 0, 0, 1, 0, 0, b"\\1" * 17), batch) for _ in range(3)])
print(store.outbox_synced - 1, flush=True)
exporter.flush()
print("done", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def cell_of(data: Path) -> str:
    """The id of a directory that nobody uses."""
    cell = Cell(data)
    cell.close()
    return cell.cell_id


def check_whole(trail: Path, cell: str) -> list[str]:
    """Fail unless every event from the first on is in the trail, once; return their kinds."""
    events = read_trail(trail, cell)
    assert [event["sequence"] for event in events] == list(range(1, len(events) + 1))
    return [str(event["kind"]) for event in events]


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    """Look until it is so."""
    until_s = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < until_s, f"not within {PATIENCE_S} s: {what}"
        threading.Event().wait(0.02)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["either", *(pytest.param(how, marks=at_length) for how in ("whole", "torn"))])
def test_a_kill_at_any_step_leaves_no_gap_and_nothing_twice(tmp_path: Path, how: str) -> None:
    """Killed at its first step, its second, and so on, each run going on with what the one before left.

    What it was writing is whole or torn: by turns, or in a long run always the one and always the other.
    """
    data, trail = tmp_path / "data", tmp_path / "trail"
    committed = at = 0
    by_turns = random.Random(SEED).sample(("whole", "torn"), 2)
    is_done = False
    while not is_done:
        at += 1
        told = by_turns[at % 2] if how == "either" else how
        ran = forked.run_code(CHILD, str(data), str(trail), str(at), told, cwd=tmp_path, timeout_s=60)
        assert ran.returncode == -9, ran.stderr
        said = ran.stdout.split()
        committed = max(committed, int(said[0]) if said else 0)
        is_done = said[1:] == ["done"]
        assert at < 120
    assert at > 20, "too few steps to mean anything"
    assert export_all(data, trail) == committed
    kinds = check_whole(trail, cell_of(data))
    assert len(kinds) == committed
    assert set(kinds) == {"QUEUED"}
    assert not list(trail.rglob("_unexpected*"))
    assert not list(trail.rglob("*.tmp"))


@pytest.mark.timeout(180 + 12 * KILLS)
def test_a_daemon_killed_again_and_again_leaves_a_whole_trail(tmp_path: Path) -> None:
    """Under load, now and then while it exports: all from 1 to the end, all acknowledged, and how often it died."""
    print(f"DMQ_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    data = tmp_path / "data"
    trail = data / "trail"
    with Daemon(data, env={**os.environ, "DMQ_TRAIL_EVERY": "1s"}) as daemon:
        cell = str(daemon.event("serving")["cell"])
        load = Load(daemon.address, SEED)
        try:
            for _ in range(KILLS):
                known = len(lines_safely(trail, cell))
                wait_until(lambda known=known: len(lines_safely(trail, cell)) > known, "a file")  # type: ignore[misc]
                threading.Event().wait(rng.uniform(0.7, 1.1))  # about when the next one is written
                daemon.kill()
                daemon.restart()
            load.end_sending()
            load.drain(60.0)
        finally:
            load.close()
        daemon.stop()
    kinds = check_whole(trail, cell)
    assert (kinds.count("OPENED"), kinds.count("CLOSED"), kinds[-1]) == (KILLS + 1, 1, "CLOSED")
    assert "TAIL_LOST" not in kinds
    accepted = {event["message_id"] for event in read_trail(trail, cell) if event["kind"] in {"QUEUED", "SCHEDULED"}}
    sent = {pack_id(message_id) for message_id, sent in load.ledger.sent.items() if sent.accepted}
    assert sent <= accepted
    assert len(sent) > 20 * KILLS, "too little load to mean anything"
    assert export_all(data, trail) == len(kinds), "a clean end leaves nothing in the outbox"
    assert not list(trail.rglob("_unexpected*"))


def lines_safely(trail: Path, cell: str) -> list[dict[str, object]]:
    """As ``lines``, while they are written."""
    try:
        return lines(trail, cell)
    except ValueError:
        return []


def test_a_full_disk_under_the_trail_stops_no_message(tmp_path: Path) -> None:
    """The export stops, and says so once; sends go on, the end is in order, and the next run exports what waited."""
    data, disk = tmp_path / "data", tmp_path / "disk"
    disk.mkdir()
    env = {**os.environ, "DMQ_TRAIL": str(disk), "DMQ_TRAIL_EVERY": "1s"}
    with Daemon(data, env=env, prefix=small_disk(disk, 32 * 1024)) as daemon, WireClient(daemon.address) as client:
        sent = 0
        while not daemon.events("trail_stopped"):
            assert client.send(a_message("full", f"full-{sent:06}")).status.code == wire.OK
            sent += 1
            threading.Event().wait(0.02)
            assert sent < 2_000
        assert "No space left" in daemon.event("trail_stopped")["error"]
        for number in range(sent, sent + 50):
            assert client.send(a_message("full", f"full-{number:06}")).status.code == wire.OK
        cell = str(daemon.event("serving")["cell"])
        daemon.stop()
        assert len(daemon.events("trail_stopped")) <= 1 + len(daemon.events("trail_resumed"))
    # The small file system went with the process, and what was in it; what had to wait is in the outbox.
    last = export_all(data, tmp_path / "rest")
    events = read_trail(tmp_path / "rest", cell)
    numbers = [event["sequence"] for event in events]
    assert numbers == list(range(numbers[0], last + 1))
    told = {event["message_id"] for event in events if event["kind"] == "QUEUED"}
    assert {pack_id(f"full-{number:06}") for number in range(sent, sent + 50)} <= told
    assert events[-1]["kind"] == "CLOSED"


def test_an_older_restored_store_is_reported(tmp_path: Path) -> None:
    """Numbers go on behind the trail, what is missing is named before the run's first event, and the log is loud."""
    data, trail = tmp_path / "data", tmp_path / "trail"
    env = {**os.environ, "DMQ_TRAIL": str(trail)}
    with Daemon(data, env=env) as daemon:
        cell = str(daemon.event("serving")["cell"])
        daemon.stop()
        shutil.copytree(data, tmp_path / "older")
        older = len(check_whole(trail, cell))
        daemon.restart()
        with WireClient(daemon.address) as client:
            for number in range(10):
                assert client.send(a_message("tail", f"tail-{number}")).status.code == wire.OK
        daemon.stop()
        newer = len(check_whole(trail, cell))
        shutil.rmtree(data)
        (tmp_path / "older").rename(data)
        daemon.restart()
        lost = daemon.event("trail_tail_lost")
        assert (lost["level"], lost["first"], lost["count"]) == ("critical", older + 1, newer - older)
        daemon.stop()
    events = read_trail(trail, cell)
    kinds = check_whole(trail, cell)
    assert kinds[newer : newer + 2] == ["TAIL_LOST", "OPENED"]
    assert (events[newer]["detail"], events[newer]["due_ms"]) == (older + 1, newer - older)
    assert kinds[-1] == "CLOSED"
