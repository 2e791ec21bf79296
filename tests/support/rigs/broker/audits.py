"""Processes that a daemon runs at the lowest priority: audits, and verifications of the ledger."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.rigs.broker.rig import PATIENCE_S

from broker_adapter.runtime.clock import SystemClock
from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient

_CLOCK = SystemClock()


def until(holds: Callable[[], Any], patience_s: float = 6 * PATIENCE_S) -> Any:  # noqa: ANN401 - what it returns
    """Return the first true answer."""
    until_s = _CLOCK.monotonic_s() + patience_s
    while not (found := holds()):
        assert _CLOCK.monotonic_s() < until_s
        threading.Event().wait(0.05)
    return found


def is_running(client: AdminClient) -> bool:
    """Return True if the last audit has not ended."""
    return bool(client.audit().run.state == wire.AuditRun.RUNNING)


def process_of(folder: str) -> int:
    """Return the pid of the process that audits into a folder, 0 if there is none."""
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if folder.encode() in each.read_bytes().split(b"\0"):
                return int(each.parent.name)
    return 0


def await_process(client: AdminClient) -> int:
    """Return the pid of the process of the audit that was started, once it is bound to the daemon; 0 if it has ended.

    It gets the priority of a test: at its own it would make no progress on a busy machine.
    """
    folder = client.audit().run.folder
    until(lambda: _is_idle(process_of(folder)) or not is_running(client))
    pid = process_of(folder)
    _hasten(pid)
    until(lambda: _is_bound(pid) or not is_running(client))
    return pid if _is_bound(pid) else 0


def hasten_verification(client: AdminClient, number: int, data: Path) -> None:
    """Give the process of a verification of the ledger the priority of a test, and wait for its end."""
    database = str(data.absolute() / "rocksdb")

    def has_ended() -> bool:
        if _is_idle(pid := process_of(database)):
            _hasten(pid)
        return client.verify_ledger(number).ended_at_ms > 0

    until(has_ended)


def _hasten(pid: int) -> None:
    with suppress(OSError):  # it ended, or this user may not
        os.sched_setscheduler(pid or -1, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, pid, 0)


def _is_idle(pid: int) -> bool:
    with suppress(OSError):
        return pid > 0 and (os.sched_getscheduler(pid) == os.SCHED_IDLE or _is_bound(pid))
    return False


def _is_bound(pid: int) -> bool:
    with suppress(OSError):
        return pid > 0 and Path(f"/proc/{pid}/oom_score_adj").read_text(encoding="ascii").strip() == "1000"
    return False
