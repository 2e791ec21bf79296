"""Prometheus figures of the daemon, each read from the part that counts it at scrape time, and their port."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import structlog

from dmq.admin import admin_v1 as wire
from dmq.admin.operations.daemon import OverdueCount, PeriodicBackups
from dmq.broker import EmbeddedBroker
from dmq.broker.topics import Names
from dmq.config.settings import DaemonConfig
from dmq.config.units import Address
from dmq.errors import AddressInUse
from dmq.metrics.counting import OTHERS
from dmq.metrics.registry import Metrics, MetricsServer, ReplicaMetrics, start_http
from dmq.store import Store
from dmq.trail.export import Exporter

log = structlog.get_logger("dmq.daemon")


def follow(
    metrics: Metrics,
    store: Store,
    broker: EmbeddedBroker,
    exporter: Exporter | None,
    periodic: PeriodicBackups | None = None,
    replica: Callable[[], wire.Replica | None] = lambda: None,
) -> None:
    """Connect the metrics to the counters of the parts."""
    metrics.accepted.follow(lambda: broker.sends.accepted_total)
    metrics.repeated.follow(lambda: broker.sends.repeated_total)
    metrics.refused.follow(lambda: broker.sends.refused_total)
    metrics.over_quota.follow(lambda: broker.quotas.refused)
    metrics.topics.follow(
        accepted=broker.sends.accepted.read,
        delivered=broker.deliveries.handed_out.read,
        dead=broker.outcomes.dead.read,
    )
    metrics.delivered.follow(lambda: broker.deliveries.handed_out_total)
    metrics.pulled.follow(lambda: broker.pulls.pulled_total)
    metrics.acked.follow(lambda: broker.deliveries.acked_total)
    metrics.expired.follow(lambda: broker.leases.expired_total)
    metrics.removed.follow(lambda: broker.retention.total.messages)
    metrics.removed_unread.follow(lambda: broker.retention.total.unread)
    metrics.removed_bytes.follow(lambda: broker.retention.total.size_bytes)
    metrics.oldest.follow(lambda: broker.retention.oldest_ms)
    metrics.lag.follow(broker.lags.recent)
    metrics.held_queues.set_function(lambda: broker.retention.held_queues)
    metrics.retried.follow(lambda: broker.outcomes.retried_total)
    metrics.dead.follow(lambda: broker.outcomes.dead_total)
    metrics.redriven.follow(lambda: broker.dead_letters.redriven_total)
    metrics.purged.follow(lambda: broker.dead_letters.purged_total)
    metrics.pending.set_function(lambda: sum(store.pending().values()))
    metrics.next_due.set_function(lambda: (store.next_due_ms() or 0) / 1000)
    metrics.overdue.set_function(OverdueCount(store))
    metrics.held.set_function(lambda: sum(store.held().values()))
    metrics.clock_steps.follow(lambda: store.clock.status().steps)
    metrics.clock_steady.set_function(store.clock.is_steady)
    metrics.clock_offset.set_function(lambda: _held_ms(store) / 1000)
    metrics.commit_queue.set_function(lambda: store.writer.pending_ops)
    metrics.leases.set_function(lambda: broker.lease_count)
    metrics.outbox_bytes.set_function(lambda: store.outbox_state.stored_bytes)
    if exporter is not None:
        metrics.exported.follow(lambda: exporter.exported_total)
        metrics.export_failures.follow(lambda: exporter.failures_total)
        metrics.export_lag.set_function(lambda: exporter.lag_ms() / 1000)
        metrics.export_stopped.set_function(lambda: bool(exporter.figures.error))
    if periodic is not None:
        metrics.last_backup.set_function(lambda: periodic.last_ms / 1000)
    if replica() is not None:
        follow_replica(metrics.replica, replica)
    metrics.recovery_cut_bytes.set(store.recovery.cut_bytes)
    metrics.open_seconds.set(store.recovery.took_s)

    metrics.disk_stalled.set_function(lambda: store.stalled_s)

    def free_bytes() -> float:
        disk = store.disk()
        return disk.free_bytes if disk is not None else 0

    metrics.disk_free_bytes.set_function(free_bytes)
    metrics.disk_low_water_bytes.set_function(lambda: disk.low_water_bytes if (disk := store.disk()) else 0)


def observer(metrics: Metrics, names: Names) -> Callable[[Sequence[int], Sequence[int]], None]:
    """Return the observer of a scheduler: it gets the lateness of messages in ms, and the ids of their topics."""
    topics = names.topics_by_id

    def observe(lateness_ms: Sequence[int], topic_ids: Sequence[int]) -> None:
        known = (topics.get(each) for each in topic_ids)  # a lane may have been removed meanwhile
        metrics.became_visible(lateness_ms, [each.name if each is not None else OTHERS for each in known])

    return observe


def follow_replica(metrics: ReplicaMetrics, replica: Callable[[], wire.Replica | None]) -> None:
    """Connect the metrics of the second copy to its status."""

    def figure(read: Callable[[wire.Replica], float]) -> Callable[[], float]:
        return lambda: read(status) if (status := replica()) is not None else 0.0

    metrics.segments.follow(lambda: status.segments if (status := replica()) is not None else 0)
    metrics.bytes.follow(lambda: status.sent_bytes if (status := replica()) is not None else 0)
    metrics.link_batches.follow(lambda: status.link_batches if (status := replica()) is not None else 0)
    for role, gauge in metrics.roles.items():
        gauge.set_function(partial(_has_role, replica, role))
    metrics.lag.set_function(figure(lambda each: each.lag_ms / 1000))
    metrics.lag_batches.set_function(figure(lambda each: each.lag_batches))
    metrics.unreachable.set_function(figure(lambda each: bool(each.error)))
    metrics.local_only.set_function(figure(lambda each: each.state != "following"))
    metrics.link_in_sync.set_function(figure(lambda each: each.link in ("in_sync", "connected")))
    metrics.last_base.set_function(figure(lambda each: each.base_at_ms / 1000))
    metrics.last_verified.set_function(figure(lambda each: each.verified_at_ms / 1000))


def _has_role(replica: Callable[[], wire.Replica | None], role: str) -> float:
    status = replica()
    return float(status is not None and status.role == role)


def _held_ms(store: Store) -> int:
    """Return the lag of the believed time behind the host's clock, in ms."""
    clock = store.clock.status()
    return clock.wall_ms - clock.believed_ms


def start_metrics(
    config: DaemonConfig, metrics: Metrics, is_ready: Callable[[], bool], remark: Callable[[], str]
) -> MetricsServer | None:
    """Serve the metrics at the configured address; None if they are off. Raise ``AddressInUse`` and ``DmqError``."""
    if config.metrics_listen is None:
        return None
    try:
        return start_http(metrics, config.metrics_listen, is_ready, remark)
    except AddressInUse as error:
        if config.metrics_listen_is_explicit:
            raise
        # The default port is not required: a second daemon on the host must not fail because of it.
        server = start_http(metrics, Address(config.metrics_listen.host, 0), is_ready, remark)
        log.warning("metrics_port_in_use", reason=str(error), instead=str(server.address))
        return server
