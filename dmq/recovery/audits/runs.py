"""Audits that operators start: one at a time, each in a process of its own with a folder of its own.

The folder ``run-<time>`` has the report and ``run.log``, the output. A folder without a report is of an audit that
failed, or that ended with the daemon. A new audit removes all these folders but the one with the newest report.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from broker_adapter.contracts.errors import BrokerUnavailable, Refused, Rule
from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.extras import ExtraMissing, require
from dmq.broker.io import look_at
from dmq.config.units import format_time
from dmq.errors import DmqError
from dmq.recovery.audits.reports import SUMMARY
from dmq.recovery.backups import Snapshots
from dmq.runtime.background import background
from dmq.store.files.durable import make_directory

log = structlog.get_logger("dmq.daemon")

LOG: Final = "run.log"
VERDICTS: Final = frozenset({0, 10, 20, 30, 40})  # exit codes of an audit with a report
FINDINGS_MAX: Final = 10_000  # listed; all are counted
_PREFIX: Final = "run-"
_EXIT_CODE: Final = "exit_code"  # file of an audit without a report
_TAIL_BYTES: Final = 2_048
_LINE_CHARS_MAX: Final = 200


@dataclass(slots=True, kw_only=True)
class AuditRun:
    """One audit. ``state`` is RUNNING, DONE with a report, FAILED without one, or INTERRUPTED by the daemon's end."""

    folder: Path
    started_at_ms: int
    state: str = "RUNNING"
    ended_at_ms: int = 0
    exit_code: int = 0

    def last_line(self) -> str:
        """Return the last line of the output; empty if there is none."""
        try:
            with (self.folder / LOG).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = file.read(_TAIL_BYTES).decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return "".join(each for each in lines[-1] if each.isprintable())[:_LINE_CHARS_MAX] if lines else ""


class AuditRuns:
    """The audits of one daemon. Belongs to the event loop; another thread waits for the process."""

    def __init__(
        self,
        folder: Path,
        trail: Path | None,
        snapshots: Snapshots | None,
        clock: Clock,
        is_disk_low: Callable[[], bool] = lambda: False,
    ) -> None:
        """``trail`` and ``snapshots`` are None if the trail is off. Each audit begins with a snapshot.

        While ``is_disk_low`` returns True none is started: a report would take space that sends need.
        """
        self.folder = folder.absolute()
        self._trail = trail.absolute() if trail is not None else None
        self._clock = clock
        self._snapshots = snapshots
        self._is_disk_low = is_disk_low
        self.last = _last_of(self.folder)
        self._task: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closing = False

    async def start(self) -> AuditRun:
        """Start an audit. Raise ``Refused`` if one is running, if the trail is off, or if DuckDB is not installed."""
        if self._trail is None or self._snapshots is None:
            raise Refused(Rule.REQUEST, "an audit needs the trail, and the trail is off")
        try:
            require("an audit", "audit-local", "duckdb", "jinja2")
        except ExtraMissing as error:
            raise Refused(Rule.REQUEST, str(error)) from error
        if self.last is not None and self.last.state == "RUNNING":
            since = format_time(self.last.started_at_ms)
            raise Refused(Rule.REQUEST, f"an audit is running since {since}: its report will be the next one")
        if self._is_disk_low():
            raise BrokerUnavailable("no audit is started while the disk is almost full: free some space")
        now_ms = self._clock.now_ms()
        before, run = self.last, AuditRun(folder=self.folder / f"{_PREFIX}{now_ms}", started_at_ms=now_ms)
        self.last = run
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(None, self._prepare, run)
        except OSError as error:
            self.last = before
            raise BrokerUnavailable(f"{error.filename or self.folder}: {error.strerror or error}") from error
        self._task = loop.create_task(self._run(run, self._trail, self._snapshots), name="dmq-audit")
        self._task.add_done_callback(look_at)
        return run

    async def close(self) -> None:
        """Kill the process of a running audit, and wait for its end."""
        self._is_closing = True
        if self._process is not None:
            self._process.kill()
        elif self._task is not None:  # during the snapshot
            self._task.cancel()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def _prepare(self, run: AuditRun) -> None:
        """Create the folder of an audit, and remove those of earlier ones."""
        make_directory(self.folder, 0o700)
        complete = [each for each in _runs_in(self.folder) if (each / SUMMARY).exists()]
        for each in _runs_in(self.folder):
            if each not in complete[-1:]:
                shutil.rmtree(each, ignore_errors=True)
        run.folder.mkdir(0o700)

    async def _run(self, run: AuditRun, trail: Path, snapshots: Snapshots) -> None:
        log.info("audit_started", folder=str(run.folder))
        try:
            await snapshots.snapshot()
        except (DmqError, OSError) as error:
            log.warning("audit_without_snapshot", reason=str(error))
        waiting = asyncio.get_running_loop().run_in_executor(None, self._judge, run, trail)
        await asyncio.shield(waiting)
        log.info("audit_ended", folder=str(run.folder), state=run.state.lower(), exit_code=run.exit_code)

    def _judge(self, run: AuditRun, trail: Path) -> None:
        """Run the process and note its end. The system kills it when this thread ends."""
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
        limits = ("--threads", threads, "--findings-max", FINDINGS_MAX)
        options = ("--engine", "duckdb", *limits, "--trail", trail, "--out", run.folder)
        command = background("dmq.recovery.audits.process", os.getpid(), "run", *options)
        code = 1
        with suppress(OSError), (run.folder / LOG).open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, close_fds=True
            )
            if self._is_closing:
                self._process.kill()
            code = self._process.wait()
        is_complete = code in VERDICTS and (run.folder / SUMMARY).is_file()
        if not is_complete and not self._is_closing:
            with suppress(OSError):
                (run.folder / _EXIT_CODE).write_text(str(code), encoding="ascii")
        run.exit_code, run.ended_at_ms = code, max(1, self._clock.now_ms())
        run.state = "DONE" if is_complete else "INTERRUPTED" if self._is_closing else "FAILED"


def _last_of(folder: Path) -> AuditRun | None:
    """Return the last audit of earlier runs of the daemon if it has no report."""
    runs = _runs_in(folder)
    if not runs or (runs[-1] / SUMMARY).exists():
        return None
    run = AuditRun(folder=runs[-1], started_at_ms=_started_ms(runs[-1]), state="INTERRUPTED")
    with suppress(OSError, ValueError):
        run.exit_code, run.state = int((run.folder / _EXIT_CODE).read_text(encoding="ascii")), "FAILED"
    return run


def _runs_in(folder: Path) -> list[Path]:
    """Return the folders of audits by their start."""
    with suppress(OSError):
        return sorted((each for each in folder.glob(f"{_PREFIX}*") if _started_ms(each)), key=_started_ms)
    return []


def _started_ms(run: Path) -> int:
    digits = run.name.removeprefix(_PREFIX)
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 14 else 0
