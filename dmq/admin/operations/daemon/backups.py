"""On-demand backups of a running daemon, and the RPC that makes them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from broker_adapter.contracts.errors import BrokerUnavailable, Refused, Rule
from dmq.admin import admin_v1 as wire
from dmq.admin.requests.mapping import filled
from dmq.broker.io import look_at
from dmq.errors import StoreError, StoreLocked, StoreReadOnly
from dmq.recovery import Snapshots
from dmq.store import Store, TargetTaken, back_up, sweep

log = structlog.get_logger("dmq.daemon")

_PATH_CHARS_MAX = 4_096


class Backups:
    """Backups, one at a time, copied in another thread. Owned by the event loop."""

    def __init__(self, store: Store, data: Path) -> None:
        """``data`` is the directory of the cell. Remove the remains of a backup of a killed run there."""
        self._store = store
        self._data = data.absolute()
        self._one_at_a_time = asyncio.Lock()
        self._under_way: set[asyncio.Task[wire.BackUpStoreResponse]] = set()
        self._is_closing = False
        sweep(self._data)

    async def back_up(self, folder: Path) -> wire.BackUpStoreResponse:
        """Copy the store to an absolute path, durable on return. A started copy continues if the caller disconnects.

        Raise ``Refused(REQUEST)`` if the path is not usable for a backup.
        """
        work = asyncio.get_running_loop().create_task(self._back_up(folder), name="dmq-backup")
        self._under_way.add(work)
        work.add_done_callback(self._under_way.discard)
        work.add_done_callback(look_at)
        return await asyncio.shield(work)

    async def close(self) -> None:
        """Abort the running backup and the waiting ones; after that the store may be closed."""
        self._is_closing = True
        for work in self._under_way:
            work.cancel()
        async with self._one_at_a_time:
            return

    async def _back_up(self, folder: Path) -> wire.BackUpStoreResponse:
        loop = asyncio.get_running_loop()
        async with self._one_at_a_time:
            # Not cancelled with this task: a thread cannot be cancelled, and two copies must not run at once.
            copy = loop.run_in_executor(None, self._copy, folder)
            try:
                taken = await asyncio.shield(copy)
            except asyncio.CancelledError:
                await asyncio.wait([copy])
                raise
        log.info("backup_created", folder=str(folder), size_bytes=taken.size_bytes, took_ms=round(taken.took_ms, 1))
        return taken

    def _copy(self, folder: Path) -> wire.BackUpStoreResponse:
        clock = self._store.clock
        started_s = clock.monotonic_s()
        sequence = self._store.outbox_state.next_sequence - 1
        try:
            copied = back_up(self._store, self._data, folder, is_wanted=lambda: not self._is_closing)
        except (TargetTaken, StoreReadOnly) as error:
            raise Refused(Rule.REQUEST, str(error)) from error
        except StoreLocked as error:
            raise BrokerUnavailable(f"another backup is being written there: {error}") from error
        except StoreError as error:
            raise BrokerUnavailable(f"the backup failed: {error}") from error
        took_ms = (clock.monotonic_s() - started_s) * 1000
        return filled(wire.BackUpStoreResponse, copied, folder=str(folder), sequence=sequence, took_ms=took_ms)


class BackupCalls:
    """RPCs of backups and snapshots. Raise ``Refused`` for invalid input; exceptions of the copy pass through."""

    def __init__(self, backups: Backups | None, snapshots: Snapshots | None) -> None:
        self._backups = backups
        self._snapshots = snapshots

    async def back_up_store(self, request: wire.BackUpStoreRequest) -> wire.BackUpStoreResponse:
        """Back up the store."""
        folder = request.folder
        if self._backups is None:
            raise Refused(Rule.REQUEST, "this daemon has no store on disk to back up")
        if not Path(folder).is_absolute() or "\0" in folder or len(folder) > _PATH_CHARS_MAX:
            raise Refused(Rule.REQUEST, "the folder must be an absolute path on the daemon's host", value=folder)
        return await self._backups.back_up(Path(folder))

    async def take_snapshot(self, _request: wire.TakeSnapshotRequest) -> wire.TakeSnapshotResponse:
        """Write a snapshot of the store into the audit trail."""
        if self._snapshots is None:
            raise Refused(Rule.REQUEST, "this daemon has no audit trail for a snapshot")
        taken = await self._snapshots.snapshot()
        return filled(wire.TakeSnapshotResponse, taken, path=str(taken.path), taken_at_ms=taken.taken_ms)
