"""Life cycle of a daemon: open, serve until stopped or until storage fails, close in order."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import structlog

from broker_adapter.runtime.clock import Clock
from dmq.admin import admin_v1 as wire
from dmq.admin.api import AdminService
from dmq.admin.operations.daemon import RunningDaemon
from dmq.admin.operations.objects import QuotaCalls, ScheduleCalls
from dmq.admin.operations.trail import ActivityLog
from dmq.broker import EmbeddedBroker
from dmq.config.settings import DaemonConfig
from dmq.config.units import Address
from dmq.daemon.opening import (
    backups_of,
    keep_quotas,
    open_all,
    open_broker,
    quotas_of,
    start_notifications,
    start_periodic,
    watch_disk,
)
from dmq.daemon.replica import StandbyPort
from dmq.daemon.server import ServerOptions, WatchedFiles, descriptors_of, require_web, start_web, transport_of
from dmq.daemon.telemetry import gauges, require_tracing, start_tracing
from dmq.errors import DmqError, ReplicaFenced, StoreError, with_advice
from dmq.http2 import is_compiled
from dmq.metrics.registry import Metrics
from dmq.recovery import AuditRuns, LedgerVerifier, Snapshots
from dmq.rocketmq_server.codec.validate import check_recurring
from dmq.scheduler import Scheduler
from dmq.store import Store
from dmq.version import version_here

if TYPE_CHECKING:
    from dmq.cluster import ClusterBroker

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_FENCED = 8
_HTTP2 = "compiled" if is_compiled else "python"

log = structlog.get_logger("dmq.daemon")


class _Ending:
    """Reason for the end of a daemon: the first one reported, or None for a requested stop. Create it on its loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.reason: asyncio.Future[DmqError | None] = self._loop.create_future()
        self.abort: Callable[[], None] = lambda: None  # ends all calls at once

    def end(self, reason: DmqError | None) -> None:
        if not self.reason.done():
            self.reason.set_result(reason)
            if reason is not None and _is_fenced(reason):
                self.abort()  # before the answers of failed writes: clients repeat them at the new primary

    def storage_failed(self, error: StoreError) -> None:
        """Record the failure and stop; safe from any thread."""
        if _is_fenced(error):
            log.critical("fenced", error=with_advice(error))
        else:
            log.critical("storage_failed", error=with_advice(error))
        self._loop.call_soon_threadsafe(self.end, error)

    def serving_failed(self, error: DmqError) -> None:
        """Record that no client can be served any more, and stop."""
        log.critical("serving_failed", error=with_advice(error))
        self.end(error)


async def serve(config: DaemonConfig, clock: Clock, sources: Mapping[str, str]) -> int:
    """Serve until SIGTERM, SIGINT or a storage failure; return the exit code. ``sources`` are those of the settings."""
    loop = asyncio.get_running_loop()
    ending = _Ending()
    require_web(config)
    require_tracing(config)
    descriptors = descriptors_of(config)
    async with AsyncExitStack() as stack:  # closed in reverse order
        fail = ending.storage_failed
        standby = StandbyPort(config, clock, descriptors.connections)
        stack.push_async_callback(standby.close)
        with _stoppable(config, standby):
            opened = await open_all(config, clock, stack, fail, descriptors.tables, standby.start)
        store, exporter, _ = opened
        _warn_of_low_disk(store)
        snapshots = Snapshots(store, exporter, config.data) if exporter is not None else None
        if snapshots is not None:
            stack.push_async_callback(snapshots.close, config.shutdown_grace_s)
        backups, periodic = await backups_of(config, store, stack)
        verifier = await stack.enter_async_context(LedgerVerifier(store, config.data))
        metrics = _metrics(store)
        broker = await open_broker(config, opened, stack, start_tracing(config, store.cell_id, metrics, stack))
        scheduler = _scheduler(store, broker, metrics, fail, stack)
        cell = RunningDaemon(config, store, broker, metrics, version_here(), store.clock.now_ms(), exporter=exporter)
        cell.periodic, cell.replica, cell.sources = periodic, opened.replica_status, sources
        gauges.follow(metrics, store, broker, exporter, periodic, opened.replica_status)
        front = await _front(config, cell, broker, metrics, stack)
        quotas = quotas_of(config, broker, front or broker.catalog)
        admin = AdminService(
            *(cell, snapshots, backups),
            quotas=QuotaCalls(quotas, partial(keep_quotas, store)),
            schedules=ScheduleCalls(broker, check_recurring, front.add_schedule if front is not None else None),
            verifier=verifier,
            activity=await _activity(store, stack),
            audits=_audits(config, store, snapshots, stack),
        )
        own = store.clock, broker, metrics, admin, quotas
        files = _files(config, cell, stack)
        sockets = await standby.release()
        about = ServerOptions(descriptors.connections, version_here(), ending.serving_failed, sockets)
        server = transport_of(config, *own, files=files, front=front, options=about)
        stack.push_async_callback(server.stop, config.shutdown_grace_s)
        ending.abort = server.abort
        cell.processes = server.processes
        metrics.processes.follow(server.processes)
        _serve_metrics(config, metrics, cell, stack)
        scheduler.start()
        port = await server.start()
        stack.callback(loop.create_task(watch_disk(store, server), name="dmq-disk").cancel)
        cell.listen = str(Address(config.listen.host, port))
        cell.state = wire.SERVING
        start_periodic(broker, snapshots, periodic)
        start_notifications(cell, metrics, stack)
        cell.web = await start_web(config, port, clock, stack)
        metrics.set_state("serving")
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _on_signal, number, ending.end)
        log.info("serving", listen=cell.listen, metrics=cell.metrics_listen or "off", cell=store.cell_id, http2=_HTTP2)
        failure = await ending.reason
        cell.state = wire.STOPPING if failure is None else wire.NOT_SERVING
        metrics.set_state("stopping" if failure is None else "not_serving")
        if failure is not None:
            await server.stop(0)
    code = EXIT_OK if failure is None else exit_code_of(failure)
    log.info("stopped", code=code)
    return code


@contextmanager
def _stoppable(config: DaemonConfig, standby: StandbyPort) -> Iterator[None]:
    """End the process with 0 at SIGTERM or SIGINT while it waits to be the primary.

    The first process of a container ignores a signal without a handler, and the wait is in a thread that has no end.
    The store survives that like any kill.
    """

    def stop(*_: object) -> None:
        standby.leave()
        os._exit(EXIT_OK)

    numbers = (signal.SIGTERM, signal.SIGINT) if config.replica != "off" else ()
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def exit_code_of(failure: BaseException) -> int:
    """Return the exit code for the reason of an end."""
    return EXIT_FENCED if _is_fenced(failure) else EXIT_FAILED


def _is_fenced(failure: BaseException) -> bool:
    """Return True for a fence, and for a write that is in doubt because of it."""
    return isinstance(failure, ReplicaFenced) or isinstance(failure.__cause__, ReplicaFenced)


def _warn_of_low_disk(store: Store) -> None:
    if (disk := store.disk()) is not None and disk.is_low:
        log.warning("disk_low_sends_refused", free_bytes=disk.free_bytes, low_water_bytes=disk.low_water_bytes)


def _metrics(store: Store) -> Metrics:
    """Return the metrics, which observe each committed batch."""
    metrics = Metrics(version=version_here(), cell_id=store.cell_id)
    store.writer.observe = lambda ops, size, seconds, sync_s: metrics.committed(
        ops=ops, batch_bytes=size, seconds=seconds, sync_seconds=sync_s
    )
    return metrics


def _scheduler(
    store: Store,
    broker: EmbeddedBroker,
    metrics: Metrics,
    on_failure: Callable[[StoreError], None],
    stack: AsyncExitStack,
) -> Scheduler:
    """Return the scheduler, which is not started; ``stack`` closes it."""
    observe = gauges.observer(metrics, broker.names)
    own = store, broker.placement, broker.checks
    scheduler = Scheduler(*own, on_failure=on_failure, observe=observe, spans=broker.spans)
    stack.callback(scheduler.close)
    return scheduler


async def _front(
    config: DaemonConfig, cell: RunningDaemon, broker: EmbeddedBroker, metrics: Metrics, stack: AsyncExitStack
) -> ClusterBroker | None:
    """Start and return the broker that clients use in front of a cluster; None without one. Only it loads gRPC's
    client.
    """
    if config.broker == "embedded":
        return None
    from dmq.daemon.cluster import ClusterSide

    cluster = ClusterSide(config, cell.store.clock, broker, metrics)
    stack.push_async_callback(cluster.close)
    await cluster.start()
    cell.cluster, cell.say_cluster, cell.inner = cluster.status, cluster.remark, cluster.inner
    return cluster.front


def _files(config: DaemonConfig, cell: RunningDaemon, stack: AsyncExitStack) -> WatchedFiles:
    files = WatchedFiles.of(config, cell.store.clock)
    cell.say_files = files.problems
    watching = asyncio.get_running_loop().create_task(files.watch(), name="dmq-files")
    stack.callback(watching.cancel)
    return files


async def _activity(store: Store, stack: AsyncExitStack) -> ActivityLog:
    """Return the activity log, with open activities of earlier runs settled."""
    activity = ActivityLog(store)
    await activity.settle()
    stack.push_async_callback(activity.close)
    return activity


def _audits(config: DaemonConfig, store: Store, snapshots: Snapshots | None, stack: AsyncExitStack) -> AuditRuns | None:
    """Return the audits that operators start, or None if they are off."""
    if config.audit_reports_path is None:
        return None

    def is_disk_low() -> bool:
        return (disk := store.disk()) is not None and disk.is_low

    audits = AuditRuns(config.audit_reports_path, config.trail_path, snapshots, store.clock, is_disk_low)
    stack.push_async_callback(audits.close)
    return audits


def _on_signal(number: signal.Signals, end: Callable[[None], None]) -> None:
    """Stop in order. A second signal ends the process at once, which the store survives like any kill."""
    asyncio.get_running_loop().remove_signal_handler(number)
    log.info("stopping", signal=number.name)
    end(None)


def _serve_metrics(config: DaemonConfig, metrics: Metrics, cell: RunningDaemon, stack: AsyncExitStack) -> None:
    server = gauges.start_metrics(config, metrics, cell.is_ready, cell.remark)
    if server is not None:
        stack.callback(server.stop)
        cell.metrics_listen = str(server.address)
