"""Snapshots of a running daemon: hourly, on request, and at the end of an orderly run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from dmq.broker.groups import Subscriptions
from dmq.broker.io import look_at
from dmq.errors import StoreError
from dmq.store import Store
from dmq.trail.snapshots import SnapshotExporter, SnapshotResult, Taker, list_snapshots

log = structlog.get_logger("dmq.daemon")

EVERY_MS = 3_600_000
FIRST_AFTER_MS = 60_000  # minimum: a snapshot must not slow down the start of the daemon
_NAP_S_MAX = 60.0  # the wall clock may step
LAST_ENTRIES_MAX = 1_000_000  # with more pending entries the end of a run takes no snapshot


class Snapshots:
    """Snapshots of one store. Belongs to the event loop; the work runs in another thread, mostly in another process."""

    def __init__(self, store: Store, exporter: SnapshotExporter, data: Path) -> None:
        """Remove the unfinished snapshots of a killed run; ``data`` is the directory of the cell."""
        self._store = store
        self._clock = store.clock
        self._taker = Taker(store, exporter, data.absolute())
        self._one_at_a_time = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._subscriptions: Subscriptions | None = None
        known = list_snapshots(exporter.trail, store.cell_id)
        self._last_ms = int(known[-1][1]["taken_ms"]) if known else 0

    def start(self, subscriptions: Subscriptions) -> None:
        """Start the hourly snapshots; the first one is early if the last one is older than an hour.

        ``subscriptions`` supply state that exists only in memory: the offset up to which each queue was handed out.
        """
        self._subscriptions = subscriptions
        self._task = asyncio.get_running_loop().create_task(self._run(), name="dmq-snapshots")

    async def snapshot(self) -> SnapshotResult:
        """Take a snapshot now, durable on return; concurrent calls run one after the other.

        Raise ``SnapshotFailed`` and the errors of the store. A started snapshot continues if the caller is cancelled.
        """
        return await self._take(is_alone=False)

    async def close(self, grace_s: float) -> None:
        """Stop the hourly snapshots; then take a last one, if the store has not failed, within ``grace_s`` seconds.

        Call it when the store no longer changes.
        """
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._store.failure is not None or grace_s <= 0:
            self._taker.cancel()
            async with self._one_at_a_time:
                return
        try:
            loop = asyncio.get_running_loop()
            if sum((await loop.run_in_executor(None, self._store.pending)).values()) > LAST_ENTRIES_MAX:
                log.info("last_snapshot_skipped", reason="too many entries")
                return
            late = loop.call_later(grace_s, self._taker.cancel)
            try:
                await self._take(is_alone=True)
            finally:
                late.cancel()
        except Exception as error:  # noqa: BLE001 - the run ends in any case, and its data is in the store
            log.warning("last_snapshot_failed", error=str(error))

    async def _run(self) -> None:
        due_ms = max(self._clock.now_ms() + FIRST_AFTER_MS, self._last_ms + EVERY_MS)
        while True:
            wait_ms = due_ms - self._clock.now_ms()
            if wait_ms > EVERY_MS:  # the clock was set back
                due_ms = self._clock.now_ms() + EVERY_MS
            if wait_ms > 0:
                await asyncio.sleep(min(wait_ms / 1000, _NAP_S_MAX))
                continue
            try:
                await self._take(is_alone=False)
            except Exception as error:  # the next snapshot may succeed
                log.error("snapshot_failed", error=str(error), exc_info=not _is_known(error))  # noqa: TRY400
            due_ms = self._clock.now_ms() + EVERY_MS

    async def _take(self, *, is_alone: bool) -> SnapshotResult:
        work = asyncio.get_running_loop().create_task(self._take_alone(is_alone=is_alone), name="dmq-snapshot")
        work.add_done_callback(look_at)  # it continues if the caller is cancelled
        return await asyncio.shield(work)

    async def _take_alone(self, *, is_alone: bool) -> SnapshotResult:
        async with self._one_at_a_time:
            cursors = cursors_of(self._subscriptions) if self._subscriptions is not None else {}
            loop = asyncio.get_running_loop()
            result = await loop.run_in_executor(None, lambda: self._taker.take(cursors, is_alone=is_alone))
        log.info(
            "snapshot_taken",
            sequence=result.sequence,
            entries=result.entries,
            path=str(result.path),
            took_ms=round(result.took_ms, 1),
        )
        return result


def cursors_of(subscriptions: Subscriptions) -> dict[tuple[int, int, int], int]:
    """Return the offset up to which each queue of the loaded subscriptions was handed out in this run."""
    return {
        (queue.group_id, queue.topic_id, queue.queue_id): queue.cursor
        for found in subscriptions.all()
        if found.is_loaded.is_set()
        for queue in found.all_queues
    }


def _is_known(error: Exception) -> bool:
    return isinstance(error, StoreError | OSError) or getattr(error, "retriable", False)
