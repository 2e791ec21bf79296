"""Status of the whole daemon for operators, from figures that its parts already maintain. No scans."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from dmq.admin import admin_v1 as wire
from dmq.admin.operations.daemon.clock import clock_of
from dmq.admin.operations.daemon.overdue import OverdueCount
from dmq.admin.operations.daemon.periodic_backups import PeriodicBackups
from dmq.admin.operations.objects import fullest, refusals
from dmq.broker import EmbeddedBroker
from dmq.broker.topics import Names
from dmq.cluster import InnerTopic
from dmq.config.settings import DaemonConfig
from dmq.errors import with_advice
from dmq.metrics.registry import Metrics
from dmq.metrics.usage import ProcessStatus
from dmq.store import Store
from dmq.trail.export import Exporter


@dataclass
class RunningDaemon:
    """Running daemon. ``state`` and the addresses are set while it starts and stops."""

    config: DaemonConfig
    store: Store
    broker: EmbeddedBroker
    metrics: Metrics
    version: str
    started_at_ms: int
    state: wire.CellState = wire.STARTING
    listen: str = ""
    metrics_listen: str = ""
    exporter: Exporter | None = None
    cluster: Callable[[], wire.Cluster] | None = None
    processes: Callable[[], Sequence[ProcessStatus]] = tuple  # from any thread
    say_cluster: Callable[[], str] = str
    say_files: Callable[[], str] = str  # errors in files that are reloaded during operation
    say_notifications: Callable[[], str] = str  # why they are not delivered; from any thread
    inner: InnerTopic | None = None
    periodic: PeriodicBackups | None = None
    replica: Callable[[], wire.Replica | None] = lambda: None  # from any thread
    web: Mapping[str, str] = field(default_factory=dict)  # URLs of the HTTP API and the console, by setting
    sources: Mapping[str, str] = field(default_factory=dict)  # of the settings, by key

    def __post_init__(self) -> None:
        self.overdue = OverdueCount(self.store)

    async def get_status(self, _request: wire.GetStatusRequest) -> wire.GetStatusResponse:
        """Return the current status of the daemon."""
        status = await asyncio.to_thread(self._status)
        if self.cluster is not None:
            status.cluster.CopyFrom(self.cluster())
        if self.periodic is not None:
            status.backups.CopyFrom(self.periodic.status())
        return status

    async def get_access(self, _request: wire.GetAccessRequest) -> wire.GetAccessResponse:
        """Return all calls, which a caller without an access key may make."""
        return wire.GetAccessResponse(rpcs=wire.METHODS)

    async def list_settings(self, _request: wire.ListSettingsRequest) -> wire.ListSettingsResponse:
        """Return the settings with their sources."""
        return wire.ListSettingsResponse(
            settings=[
                wire.Setting(key=key, value=str(value), source=self.sources.get(key, "default"))
                for key, value in self.config.shown().items()
            ]
        )

    def _status(self) -> wire.GetStatusResponse:
        store, metrics = self.store, self.metrics
        failure = store.failure
        next_due_ms = store.next_due_ms() or 0
        now_ms = store.clock.now_ms()
        pending = store.pending()
        disk = store.disk()
        stats = store.commit_stats
        return wire.GetStatusResponse(
            version=self.version,
            cell_id=store.cell_id,
            broker_name=self.config.broker_name,
            pid=os.getpid(),
            state=self.state if failure is None and not self._is_held() else wire.NOT_SERVING,
            state_reason=with_advice(failure) if failure is not None else self._problem(),
            started_at_ms=self.started_at_ms,
            now_ms=now_ms,
            listen=self.listen,
            metrics_listen=self.metrics_listen,
            http_api=self.web.get("http_api", ""),
            console=self.web.get("console", ""),
            data=str(self.config.data.absolute()),
            durability=self.config.durability,
            timeline=wire.Timeline(
                pending=sum(pending.values()),
                overdue=self.overdue(),
                next_due_at_ms=next_due_ms,
                held=sum(store.held().values()),
                paused_topics=paused_topics(self.broker.names),
                paused_groups=len(self.broker.names.paused),
            ),
            lateness=wire.Lateness(
                count=metrics.lateness.count,
                p50_ms=metrics.lateness.quantile(0.5) * 1000,
                p99_ms=metrics.lateness.quantile(0.99) * 1000,
                max_ms=metrics.lateness.max * 1000,
            ),
            totals=wire.Totals(
                accepted=self.broker.sends.accepted_total,
                delivered=self.broker.deliveries.handed_out_total,
                acked=self.broker.deliveries.acked_total,
                expired=self.broker.leases.expired_total,
            ),
            commits=wire.Commits(
                batches=stats.batches,
                ops=stats.ops,
                written_bytes=stats.bytes,
                commit_p99_ms=metrics.commit_seconds.quantile(0.99) * 1000,
                sync_p50_ms=metrics.sync_seconds.quantile(0.5) * 1000,
                sync_p99_ms=metrics.sync_seconds.quantile(0.99) * 1000,
            ),
            disk=wire.Disk(free_bytes=disk.free_bytes, low_water_bytes=disk.low_water_bytes, refuses_sends=disk.is_low)
            if disk is not None
            else wire.Disk(),
            outbox=self._outbox(),
            recovery=wire.Recovery(
                was_clean=store.recovery.was_closed,
                cut_bytes=store.recovery.cut_bytes,
                open_ms=store.recovery.took_s * 1000,
                is_new=store.recovery.is_new,
            ),
            clock=clock_of(store),
            topic_quotas=fullest(store, self.broker, pending),
            quota_refusals=refusals(self.broker),
            processes=[wire.Process(**asdict(each)) for each in self.processes()],
            replica=self.replica(),
        )

    def _outbox(self) -> wire.Outbox:
        state = self.store.outbox_state
        outbox = wire.Outbox(
            rows=state.next_sequence - state.first_sequence,
            held_bytes=state.stored_bytes,
            held_bytes_max=self.config.audit_outbox_bytes_max,
            lost_rows=state.lost,
        )
        if self.exporter is not None:
            figures = self.exporter.figures
            outbox.trail = str(self.exporter.trail.absolute())
            outbox.exported_sequence = figures.exported_sequence
            outbox.lag_ms = figures.oldest_waiting_ms
            outbox.export_error = figures.error
        return outbox

    def is_ready(self) -> bool:
        """Return True if clients are served, and the disk and the replica accept writes."""
        return self.state == wire.SERVING and not self._is_held()

    def _is_held(self) -> bool:
        return bool(self.store.stalled_s or self.store.replica_obstacle())

    def _problem(self) -> str:
        indexes = self.broker.index_builds.problem()
        return self.store.write_obstacle() or self.say_files() or self.say_notifications() or indexes

    def remark(self) -> str:
        """Return warnings in addition to the health status, one per line; empty if there are none."""
        clock = self.store.clock.status()
        said = [self.store.write_obstacle(), self.say_files(), self.say_notifications(), self.say_cluster()]
        said.append(self.broker.index_builds.problem())
        if self.periodic is not None and self.periodic.error:
            said.append("backups: the last attempt failed; see dmq status")
        replica = self.replica()
        if replica is not None and replica.state != "following":
            said.append(f"replica: {replica.lag_batches:,} batches are not in the second copy; see dmq replica status")
        if replica is not None and replica.link in ("down", "sealed"):
            reason = f" ({replica.link_error})" if replica.link_error else ""
            said.append(f"replica: the direct link is {replica.link}{reason}: writes wait for the object store")
        if clock.is_held:
            said.append("clock: stepped forward by too much, not followed yet; see dmq clock")
        elif not clock.is_steady:
            said.append("clock: stepped, nothing is removed by age for now; see dmq clock")
        return "\n".join(filter(None, said))


def paused_topics(names: Names) -> int:
    """Count the topics that are paused."""
    return sum(topic.paused_since_ms is not None for topic in names.slowed.copy().values())
