"""Audits that operators start: a real daemon, its trail, and the process of the audit."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from support.rigs.broker.audits import await_process, is_running, process_of, until
from support.rigs.daemon.consoles import fill
from support.rigs.daemon.process import Daemon

from broker_adapter.contracts.errors import BrokerUnavailable, Refused
from broker_adapter.runtime import extras
from broker_adapter.runtime.clock import SystemClock
from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient, CallRefused
from dmq.recovery.audits.runs import LOG, AuditRuns
from dmq.recovery.backups.snapshots import Snapshots


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with messages."""
    with Daemon(tmp_path / "data", processes=1) as daemon:
        fill(daemon.address, dead=1, delayed=2)
        yield daemon


def run_of(client: AdminClient) -> wire.AuditRun:
    return client.audit().run


def held_audit(client: AdminClient) -> int:
    """Start an audit and stop its process before its end; return its pid."""
    while True:
        client.start_audit()
        if pid := await_process(client):
            os.kill(pid, signal.SIGSTOP)
            if is_running(client):
                return pid
        until(lambda: not is_running(client))  # it was too fast: another one


@pytest.mark.integration
def test_an_audit_runs_beside_the_daemon_and_ends_with_it(daemon: Daemon) -> None:
    """One at a time; a kill of the daemon ends it, and its outcome is then unknown; a new one
    has a report, and an earlier report stays until there is another.
    """
    with AdminClient(daemon.address) as client:
        assert not client.audit().HasField("report")
        pid = held_audit(client)
        with pytest.raises(CallRefused, match="an audit is running since"):
            client.start_audit()
        before = run_of(client)
    daemon.kill()
    until(lambda: not Path(f"/proc/{pid}").exists())
    daemon.restart()
    with AdminClient(daemon.address) as client:
        after = run_of(client)
        assert (after.state, after.started_at_ms, after.folder) == (
            wire.AuditRun.INTERRUPTED,
            before.started_at_ms,
            before.folder,
        )
        client.start_audit()
        await_process(client)
        until(lambda: not is_running(client))
        done = client.audit()
        assert (done.run.state, done.run.exit_code, done.report.verdict) == (wire.AuditRun.DONE, 0, "clean"), done
        assert (done.report.folder, done.report.has_page) == (done.run.folder, True)
        assert not Path(before.folder).exists()
        assert sum(hour.accepted_at_once + hour.scheduled for hour in done.report.hours) > 0
        assert b"</html>" in client.read_audit_page()
        held_audit(client)
        assert client.audit().report.folder == done.run.folder
        daemon.stop()  # an orderly end kills it as well, although it is stopped
    assert not process_of(str(daemon.data / "audits"))


@pytest.mark.integration
def test_an_audit_that_fails_is_named(daemon: Daemon) -> None:
    """With its exit code and its last line, also after a restart."""
    with AdminClient(daemon.address) as client:
        os.kill(held_audit(client), signal.SIGKILL)
        until(lambda: not is_running(client))
        failed = run_of(client)
    assert (failed.state, failed.exit_code) == (wire.AuditRun.FAILED, -signal.SIGKILL)
    daemon.kill()
    (Path(failed.folder) / LOG).write_text("first\nMemoryError: \x1b[31mout\n")
    daemon.restart()
    with AdminClient(daemon.address) as client:
        found = run_of(client)
    assert (found.state, found.exit_code, found.progress) == (wire.AuditRun.FAILED, -9, "MemoryError: [31mout")


@pytest.mark.unit
def test_no_audit_is_started_on_a_full_disk(tmp_path: Path) -> None:
    """Its report would take space that sends need."""
    snapshots = cast("Snapshots", object())
    runs = AuditRuns(tmp_path / "audits", tmp_path, snapshots, SystemClock(), is_disk_low=lambda: True)
    with pytest.raises(BrokerUnavailable, match="disk is almost full"):
        asyncio.run(runs.start())
    assert not (tmp_path / "audits").exists()


@pytest.mark.unit
def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it; nothing is started."""
    monkeypatch.setattr(extras, "is_installed", lambda module: module != "duckdb")
    runs = AuditRuns(tmp_path / "audits", tmp_path, cast("Snapshots", object()), SystemClock())
    with pytest.raises(
        Refused, match=r"an audit needs duckdb, which is missing: pip install 'rock-dmq\[audit-local\]'"
    ):
        asyncio.run(runs.start())
    assert (runs.last, (tmp_path / "audits").exists()) == (None, False)
