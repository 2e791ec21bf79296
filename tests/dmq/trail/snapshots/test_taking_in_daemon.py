"""Snapshots of a real daemon, against the trail that it wrote; and what a kill in the middle of one leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from support.clients.load.crash import Load
from support.models.trail.snapshot_check import Event, check_snapshot
from support.rigs.broker.rig import an_envelope
from support.rigs.daemon.process import Daemon

from broker_adapter.runtime.clock import SystemClock
from dmq.admin.client import AdminClient, CallRefused, DaemonUnavailable
from dmq.broker.broker import EmbeddedBroker
from dmq.store.store import Store

pytestmark = pytest.mark.integration
HOUR_MS = 3_600_000
PATIENCE_S = 20.0


def trail_events(trail: Path) -> list[Event]:
    """Every event of the only cell of a trail, in order."""
    paths = sorted(trail.glob("events/cell=*/date=*/hour=*/*.parquet"), key=lambda path: path.name)
    return [row for path in paths for row in pq.read_table(path, partitioning=None).to_pylist()]


def snapshots(trail: Path) -> list[Path]:
    """The snapshots of the only cell of a trail."""
    return sorted(path for path in trail.glob("snapshots/cell=*/*") if not path.name.startswith("."))


def remains(data: Path) -> list[Path]:
    """What no snapshot may leave behind."""
    return [*data.glob(".*"), *(data / "trail").glob("snapshots/cell=*/.*")]


@contextmanager
def load_on(daemon: Daemon, seed: int) -> Iterator[None]:
    """Senders and receivers at work."""
    load = Load(daemon.address, seed)
    try:
        yield
        load.end_sending()
    finally:
        load.close()


def test_snapshots_of_a_daemon_match_its_trail(data: Path) -> None:
    """Under load through the public protocol, over a SIGKILL, and the one at the orderly end."""
    with Daemon(data) as daemon, AdminClient(daemon.address) as admin:
        with load_on(daemon, 1):
            _snapshots(admin, 3)
            daemon.kill()
            daemon.start()
            _snapshots(admin, 3)
        daemon.stop()
    events = trail_events(data / "trail")
    found = snapshots(data / "trail")
    assert len(found) == 7
    replayed = [check_snapshot(each, events) for each in found]
    assert replayed[-1].finished
    assert {"NACKED", "RETRIED", "ACKED", "SUBSCRIBED"} <= {event["kind"] for event in events}
    assert remains(data) == []


def test_a_kill_in_the_middle_leaves_nothing(data: Path) -> None:
    """No half snapshot at any time; what is left of it ends by itself, and is gone after the next start."""
    asyncio.run(_fill(data, 40_000))
    with Daemon(data) as daemon:
        child = _stop_half_way(daemon)
        daemon.kill()
        assert snapshots(data / "trail") == []
        assert remains(data)
        child.send_signal(signal.SIGCONT)
        _wait_until_dead(child)
        assert not [path for each in remains(data) for path in each.glob("manifest.json")], "it went on for nobody"
        daemon.start()
        assert remains(data) == []
        with AdminClient(daemon.address) as admin:
            assert admin.take_snapshot().entries == 40_000
        (found,) = snapshots(data / "trail")
        check_snapshot(found, trail_events(data / "trail"))


def test_a_stop_in_the_middle_ends_the_snapshot(data: Path) -> None:
    """The daemon ends in order and in time; the snapshot that it takes last is whole."""
    asyncio.run(_fill(data, 40_000))
    with Daemon(data, "--shutdown-grace", "2s") as daemon:
        _stop_half_way(daemon)
        daemon.stop()
    assert remains(data) == []
    assert snapshots(data / "trail") == []  # the last one waited for the one under way, for as long as it may


def test_without_a_trail_there_are_no_snapshots(data: Path) -> None:
    """The call says so, and nothing is made."""
    with Daemon(data, env={**os.environ, "DMQ_TRAIL": "off"}) as daemon, AdminClient(daemon.address) as admin:
        with pytest.raises(CallRefused, match="no audit trail for a snapshot"):
            admin.take_snapshot()
        daemon.stop()
    assert not (data / "trail").exists()


def test_a_trail_that_cannot_be_written_refuses_snapshots(data: Path, tmp_path: Path) -> None:
    """With its reason; the daemon goes on, and ends in order."""
    (tmp_path / "trail").write_text("a file", encoding="utf-8")
    with (
        Daemon(data, env={**os.environ, "DMQ_TRAIL": str(tmp_path / "trail")}) as daemon,
        AdminClient(daemon.address) as admin,
    ):
        with pytest.raises(DaemonUnavailable, match=r"Not a directory|File exists"):
            admin.take_snapshot()
        assert admin.status().state
        daemon.stop()


def _snapshots(admin: AdminClient, count: int) -> None:
    for _ in range(count):
        time.sleep(0.3)  # so that something happens; nothing is waited for
        taken = admin.take_snapshot()
        assert taken.is_new
        assert Path(taken.path).is_dir()


async def _fill(data: Path, entries: int) -> None:
    store = Store.open(data, SystemClock())
    broker = EmbeddedBroker(store, queues_per_topic=8, group_start="earliest")
    due_ms = store.clock.now_ms() + HOUR_MS
    for start in range(0, entries, 1_000):
        numbers = range(start, start + 1_000)
        await broker.send([an_envelope(f"m-{number}", deliver_at_ms=due_ms) for number in numbers])
    await broker.close()
    store.close()


def _wait_until_dead(process: psutil.Process) -> None:
    """It is nobody's child any more: whether it is reaped, and when, is not up to this test."""
    until_s = time.monotonic() + PATIENCE_S
    with suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until_s, "it goes on for nobody"
            time.sleep(0.01)


def _stop_half_way(daemon: Daemon) -> psutil.Process:
    """Ask for a snapshot and freeze the process that writes it."""

    def ask() -> None:
        with suppress(DaemonUnavailable), AdminClient(daemon.address) as admin:
            admin.take_snapshot()

    threading.Thread(target=ask, daemon=True).start()
    until_s = time.monotonic() + PATIENCE_S
    hidden = daemon.data / "trail" / "snapshots"
    while not list(hidden.glob("cell=*/.new-*/entries.parquet")):
        assert time.monotonic() < until_s, daemon.log()
        time.sleep(0.001)
    (child,) = {*psutil.Process(daemon.pid).children()} - {*daemon.fronts}
    os.kill(child.pid, signal.SIGSTOP)
    assert list(hidden.glob("cell=*/.new-*")), "it was too quick"
    return child
