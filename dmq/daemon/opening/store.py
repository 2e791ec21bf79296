"""Opening, watching and closing the store of a daemon or an embedded broker, with its trail."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import structlog

from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.extras import require
from dmq.admin import admin_v1 as wire
from dmq.config.settings import DaemonConfig
from dmq.errors import StoreError
from dmq.replication.objects import ObjectStore
from dmq.store import Store, StoreOptions
from dmq.store.engines.rocks import RocksOptions
from dmq.store.files.cell import tighten
from dmq.store.files.durable import make_directory
from dmq.store.files.steady_clock import ClockOptions
from dmq.store.writer.batch_log import BatchLog
from dmq.store.writer.operations import Emit
from dmq.trail.events import EventKind, cell_event, gap_event
from dmq.trail.export import Exporter, ExportOptions, TrailUploads
from dmq.trail.ledger import LEDGER_KINDS

if TYPE_CHECKING:
    from dmq.daemon.replica import Replica
    from dmq.daemon.server import Transport

FULL_BYTES = 2**20  # free space reserved for RocksDB: with less, writes wait

_DISK_LOOK_S = 0.5

log = structlog.get_logger("dmq.daemon")


class OpenStore(NamedTuple):
    """Open store of a process, with its trail and its second copy."""

    store: Store
    exporter: Exporter | None
    replica: Replica | None

    def events(self) -> list[EventKind]:
        """Return the events of the start of this run."""
        is_promoted = self.replica is not None and self.replica.is_promoted
        return [EventKind.OPENED, *([EventKind.PROMOTED] if is_promoted else [])]

    def replica_status(self) -> wire.Replica | None:
        """Return the status of the second copy; None if there is none."""
        return self.replica.status() if self.replica is not None else None


async def open_all(
    config: DaemonConfig,
    clock: Clock,
    stack: AsyncExitStack,
    on_failure: Callable[[StoreError], None],
    open_files_max: int = RocksOptions().open_files_max,
    on_standby: Callable[[Replica], Coroutine[Any, Any, None]] | None = None,
) -> OpenStore:
    """Open the store with its trail and its second copy; ``stack`` closes them in order.

    ``on_standby`` is awaited first if this process has to wait for its turn as the primary.
    """
    replica = replica_of(config, clock)
    if replica is not None:
        stack.callback(replica.release)
        loop, waiting = asyncio.get_running_loop(), replica

        def is_standby() -> None:
            if on_standby is not None:
                asyncio.run_coroutine_threadsafe(on_standby(waiting), loop).result()

        await loop.run_in_executor(None, replica.wait, is_standby)
    store = open_store(config, clock, open_files_max, replica.batch_log if replica is not None else None)
    store.on_failure = on_failure
    exporter = exporter_of(config, store, replica.objects if replica is not None else None)
    stack.callback(close_store, store, exporter, config.shutdown_grace_s)
    if replica is not None:
        stack.callback(replica.close)
        replica.start(store)
    if exporter is not None:
        # May renumber events: before the first event of this run.
        await asyncio.get_running_loop().run_in_executor(None, exporter.recover)
        exporter.start()
    return OpenStore(store, exporter, replica)


def open_store(
    config: DaemonConfig,
    clock: Clock,
    open_files_max: int = RocksOptions().open_files_max,
    batch_log: BatchLog | None = None,
) -> Store:
    """Open the cell with the configured options and log the result of recovery."""
    store = Store.open(
        Path(config.data),
        clock,
        StoreOptions(
            durability=config.durability,
            idempotency_window_ms=config.idempotency_window_ms,
            outbox_bytes_max=config.audit_outbox_bytes_max,
            pending_ops_max=config.pending_sends_max,
            pending_bytes_max=config.pending_bytes_max,
            low_water_bytes=config.disk_low_water_bytes,
            ballast_bytes=config.ballast_bytes,
            full_bytes=FULL_BYTES,
            directory_mode=0o710 if config.trail_mode == "group" else 0o700,
            clock=ClockOptions(steady_after_ms=config.clock_steady_after_ms, jump_max_ms=config.clock_jump_max_ms),
            rocks=RocksOptions(
                wal_bytes_max=config.wal_bytes_max,
                memtable_bytes_max=config.memtable_bytes_max,
                open_files_max=open_files_max,
            ),
            gap_event=gap_event,
            ledger_kinds=LEDGER_KINDS,
        ),
        batch_log,
    )
    recovery = store.recovery
    log.info(
        "store_opened",
        is_new=recovery.is_new,
        was_closed=recovery.was_closed,
        sequence=recovery.sequence,
        took_ms=round(recovery.took_s * 1000, 1),
    )
    if recovery.is_new:
        log.warning("store_created", path=str(config.data.absolute()))
    if recovery.cut_bytes:
        log.warning("wal_tail_cut", cut_bytes=recovery.cut_bytes)
    return store


def require_trail() -> None:
    """Raise ``ExtraMissing`` if the packages for the trail are not installed, because the trail must not be off
    silently.
    """
    require("the audit trail (trail = 'off' does without)", "server", "pyarrow", "numpy")


def replica_of(config: DaemonConfig, clock: Clock) -> Replica | None:
    """Return the second copy of the store, or None if it is off."""
    if config.replica == "off":
        return None
    require_replica(config)
    from dmq.daemon.replica import Replica

    return Replica(config, clock)


def require_replica(config: DaemonConfig) -> None:
    """Raise ``ExtraMissing`` if the packages of the second copy are not installed."""
    of_service = () if (config.replica_url or "").startswith("file:") else ("obstore",)
    require(f"replica = {config.replica}", "replica", "zstandard", *of_service)


def exporter_of(config: DaemonConfig, store: Store, objects: ObjectStore | None = None) -> Exporter | None:
    """Return the exporter of the trail, or None if it is off. With ``objects`` it uploads the trail."""
    trail = config.trail_path
    if trail is None:
        return None
    require_trail()
    mode = 0o750 if config.trail_mode == "group" else 0o700
    with suppress(OSError):  # the export reports faults of the folder repeatedly
        make_directory(trail, mode)
    if trail.is_dir() and tighten(trail, mode):
        log.warning("directory_mode_restricted", path=str(trail), mode=f"{mode:o}")
    options = ExportOptions(every_s=config.trail_every.total_seconds(), keep=config.trail_keep)
    uploads = TrailUploads(objects) if objects is not None else None
    return Exporter(store, trail.absolute(), options, uploads)


def close_store(store: Store, exporter: Exporter | None, grace_s: float) -> None:
    """Close the store at the end of a run; the export of the remaining events has ``grace_s``."""
    try:
        if store.failure is None:
            store.commit([Emit(cell_event(EventKind.CLOSED))])
        if exporter is not None:
            exporter.close(grace_s)
        store.close()
    except StoreError as error:
        log.critical("store_close_failed", error=str(error))
        sys.stderr.flush()


async def watch_disk(store: Store, transport: Transport) -> NoReturn:
    """Log the start and the end of each disk stall.

    The health service does not serve during a stall, nor while writes wait for the second copy.
    """
    longest_s, is_serving = 0.0, True
    while True:
        await asyncio.sleep(_DISK_LOOK_S)
        stalled_s = store.stalled_s
        if stalled_s and not longest_s:
            log.error("disk_stalled", seconds=round(stalled_s, 1), queued_ops=store.writer.pending_ops)
        elif longest_s and stalled_s < longest_s:
            log.warning("disk_recovered", seconds=round(longest_s, 1))
        longest_s = stalled_s
        is_held = bool(stalled_s or store.replica_obstacle())
        if is_held is is_serving:
            is_serving = not is_held
            await transport.set_serving(is_serving=is_serving)
