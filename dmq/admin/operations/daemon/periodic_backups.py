"""Periodic backups of a daemon: at an interval, or at the times of a cron expression.

The time of the next backup follows from the time of the newest complete one in the folder and the clock of the store.
So a restart, a failure or a clock step only moves that time. One backup replaces all that were missed while the daemon
was down. After a clock step back the wait is at most one interval of the rule.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import structlog

from broker_adapter.contracts.errors import BrokerError, Refused
from dmq.admin import admin_v1 as wire
from dmq.admin.operations.daemon.backups import Backups
from dmq.broker.schedules import RuleError, next_time, read_cron, zone_of
from dmq.config.settings import DaemonConfig
from dmq.config.units import format_duration
from dmq.errors import DmqError, StoreCorrupt, StoreFull
from dmq.recovery import BackupFolder, size_of
from dmq.store import Store
from dmq.store.schema.messages.recurring import RecurrenceRule

log = structlog.get_logger("dmq.daemon")

AGAIN_MS = 600_000  # at most, after a failure
_NAP_S_MAX = 60.0  # the clock may be stepped


class BackupRule(NamedTuple):
    """Times of backups: every ``every_ms``, or by ``cron`` in a time zone."""

    every_ms: int
    cron: str = ""
    zone: str = ""

    def __str__(self) -> str:
        return f"{self.cron} {self.zone or 'UTC'}" if self.cron else f"every {format_duration(self.every_ms)}"


def due_ms(rule: BackupRule, last_ms: int, now_ms: int) -> int | None:
    """Return the time of the next backup if the last was taken at ``last_ms``, at most now; 0: there is none.

    Without a last backup the next is due now. Return None if there is no time within nine years.
    """
    if not last_ms:
        return now_ms
    if rule.every_ms:
        return last_ms + rule.every_ms
    return next_time(RecurrenceRule(0, cron=rule.cron, zone=rule.zone), last_ms)


def rule_of(config: DaemonConfig) -> BackupRule | None:
    """Return the configured rule, if any. Raise ``DmqError`` for an invalid cron expression."""
    if config.backup_every is not None:
        return BackupRule(config.backup_every_ms)
    if config.backup_at is None:
        return None
    try:
        read_cron(config.backup_at)
        zone_of(config.backup_zone)
    except RuleError as error:
        raise DmqError(f"backup_at = {config.backup_at!r}, backup_zone = {config.backup_zone!r}: {error}") from error
    return BackupRule(0, config.backup_at, config.backup_zone)


class PeriodicBackups:
    """Owned by the event loop. Call ``open``, then ``start``, and ``close`` before the store is closed."""

    def __init__(self, store: Store, backups: Backups, rule: BackupRule, folder: BackupFolder, count: int) -> None:
        """``count`` is the number of backups to keep."""
        self._store = store
        self._clock = store.clock
        self._backups = backups
        self._rule = rule
        self._folder = folder
        self._count = count
        self._task: asyncio.Task[None] | None = None
        self._last_ms = 0
        self._last: Path | None = None
        self._last_bytes = 0
        self._again_s = 0.0  # monotonic time of the next attempt after a failure
        self._failed_at_ms = 0
        self.error = ""  # reason of the last failure; empty after a success

    async def open(self) -> None:
        """Read the backups of earlier runs from the folder, and remove surplus and incomplete ones."""
        now_ms = self._clock.now_ms()
        due_ms(self._rule, now_ms, now_ms)  # computing times loads slow modules, so they are loaded now
        await asyncio.to_thread(self._folder.sweep)
        with suppress(OSError):  # a killed run may have left surplus ones; the next backup reports the error
            await asyncio.to_thread(self._folder.trim, self._count)
        if kept := await asyncio.to_thread(self._folder.kept):
            newest = kept[-1]
            self._last_ms, self._last = newest.taken_ms, newest.path
            self._last_bytes = await asyncio.to_thread(size_of, newest.path)
        if self._last_ms > now_ms:  # the clock was set back, and it is unknown when
            self._last_ms = 0

    def start(self) -> None:
        """Start to make backups at their times."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="dmq-backups")

    async def close(self) -> None:
        """Abort the running backup; the next run makes it again."""
        if self._task is not None:
            self._folder.cancel()
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def look(self) -> float:
        """Make a backup if one is due; return the seconds until the next check."""
        now_ms, now_s = self._clock.now_ms(), self._clock.monotonic_s()
        self._last_ms = min(self._last_ms, now_ms)  # adapt to a clock that was set back
        due = due_ms(self._rule, self._last_ms, now_ms)
        if due is None:
            return _NAP_S_MAX
        wait_s = max((due - now_ms) / 1000, self._again_s - now_s)
        if wait_s > 0:
            return min(wait_s, _NAP_S_MAX)
        try:
            await self._make(now_ms)
        except (BrokerError, DmqError, OSError) as error:
            self._failed(error)
        else:
            self.error, self._failed_at_ms = "", 0
        return 0.0

    def status(self) -> wire.PeriodicBackups:
        """Return the status, and the time of the next backup."""
        now_ms = self._clock.now_ms()
        due = due_ms(self._rule, min(self._last_ms, now_ms), now_ms)
        if due is not None:
            due = max(due, now_ms + round((self._again_s - self._clock.monotonic_s()) * 1000))
        return wire.PeriodicBackups(
            folder=str(self._folder.path),
            rule=str(self._rule),
            kept_max=self._count,
            last_at_ms=self._last_ms if self._last is not None else 0,
            last_folder=str(self._last or ""),
            last_bytes=self._last_bytes,
            next_at_ms=due or 0,
            failed_at_ms=self._failed_at_ms,
            error=self.error,
        )

    @property
    def last_ms(self) -> int:
        """Time of the newest complete backup; 0 if there is none."""
        return self._last_ms

    async def _run(self) -> None:
        while True:
            try:
                wait_s = await self.look()
            except Exception as error:
                log.exception("backup_failed", folder=str(self._folder.path))
                self._failed(error, is_logged=True)
                wait_s = 1.0
            await asyncio.sleep(max(wait_s, 0.001))

    async def _make(self, now_ms: int) -> None:
        target = await asyncio.to_thread(self._folder.target, now_ms)
        taken = await self._backups.back_up(target)
        path = await asyncio.to_thread(self._folder.accept, target)
        try:
            await asyncio.to_thread(self._folder.sweep)
            removed = await asyncio.to_thread(self._folder.trim, self._count)
        finally:  # when this backup is reported, no surplus ones are left
            self._last_ms, self._last, self._last_bytes = now_ms, path, taken.size_bytes
        log.info(
            "backup_created",
            folder=str(path),
            size_bytes=taken.size_bytes,
            sequence=taken.sequence,
            removed=[each.name for each in removed],
        )

    def _failed(self, error: Exception, *, is_logged: bool = False) -> None:
        again_ms = min(AGAIN_MS, self._rule.every_ms or AGAIN_MS)
        self._again_s = self._clock.monotonic_s() + again_ms / 1000
        why = error.why if isinstance(error, Refused) else str(error)
        self._failed_at_ms, self.error = self._clock.now_ms(), why
        if not is_logged:
            do, folder = _what_to_do(error, self._folder.path), str(self._folder.path)
            log.error("backup_failed", folder=folder, why=why, do=do, again_in=format_duration(again_ms))


def _what_to_do(error: Exception, folder: Path) -> str:
    if isinstance(error, StoreFull) or isinstance(error.__cause__, StoreFull):
        return f"make room on the disk of {folder}, or keep fewer (backups_kept); older backups stay until then"
    if isinstance(error, StoreCorrupt):
        return "the store itself may be damaged: have 'dmq store check' look at it, or at a copy, as soon as you can"
    if not folder.is_dir():
        return f"mount the disk of {folder}; the daemon tries again until it is mounted"
    return f"check that {folder} exists and is writable and intact; earlier backups are untouched"
