"""The second copy of a daemon's store: its replication log, its bases, and their figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Event

import structlog

from broker_adapter.runtime.clock import Clock
from dmq.admin import admin_v1 as wire
from dmq.config.settings import DaemonConfig
from dmq.daemon.replica.link import LinkPort, dial_standby, public_address, server_context
from dmq.errors import ReplicaFenced
from dmq.recovery.replica import BaseKeeper, KeeperOptions, Worker, make_base, sweep
from dmq.replication.link import LinkSender
from dmq.replication.log import LogOptions, ReplicationLog
from dmq.replication.objects import ObjectStore, ReplicaUnavailable, open_objects, probe
from dmq.replication.role import Primacy, StandbyFigures
from dmq.replication.standby import published_cell
from dmq.store import Store
from dmq.store.writer.batch_log import LogStart
from dmq.trail.export import TrailUploads
from dmq.trail.manifest import Layout

log = structlog.get_logger("dmq.daemon")

_AGAIN_S = 1.0
_SEGMENT_S_MAX = 10.0  # time limit of a put of at most some megabytes
_CALLS_PER_TERM = 4  # that time out, before the lease ends
_CALL_S_MIN = 0.5


class Replica:
    """Second copy of a store. ``batch_log`` is passed to the store; ``start`` follows once the store is open."""

    def __init__(self, config: DaemonConfig, clock: Clock) -> None:
        """Open the object store and probe it; wait while it is unreachable. Raise ``ReplicaRefused``."""
        assert config.replica_url is not None
        self._config = config
        self.url = url = config.replica_url
        self.objects = _open(url)
        self._worker = worker = Worker()
        self._keeper: BaseKeeper | None = None
        self._is_standby_only = config.standby
        options = LogOptions(
            is_sync=config.replica == "sync",
            every_s=config.replica_every.total_seconds(),
            when_unreachable=config.replica_when_unreachable,
            lag_bytes_max=config.replica_lag_bytes_max,
            grace_s=config.shutdown_grace_s,
        )
        self.batch_log: ReplicationLog = ReplicationLog(
            open_objects(url, timeout_s=_SEGMENT_S_MAX),
            clock,
            options,
            lambda start: make_base(worker, url, clock, start),
        )

        term_s = config.replica_lease.total_seconds()
        self._registers = open_objects(url, timeout_s=max(term_s / _CALLS_PER_TERM, _CALL_S_MIN))
        self._sender: LinkSender | None = None
        link = config.replica_link
        self._primacy = Primacy(
            self.objects,
            self._registers,
            clock,
            Path(config.data),
            address=public_address(config.listen),
            term_ms=round(term_s * 1000),
            on_lost=lambda reason: self.batch_log.refuse(ReplicaFenced(reason)),
            on_follow=self._fetch_trail,
            listener=LinkPort(link, server_context(config, clock)) if link is not None else None,
        )
        self.is_promoted = False  # this run took over as standby
        self._fetch_at_s = 0.0
        self._clock = clock

    def wait(self, on_standby: Callable[[], None]) -> None:
        """Return once this process may open the store; ``on_standby`` is called if it is a standby until then."""
        self.is_promoted = self._primacy.wait(may_begin=not self._is_standby_only, on_standby=on_standby)

    def leave(self) -> None:
        """Remove the registration as standby, because the process ends; from any thread."""
        self._primacy.leave()

    @property
    def primary(self) -> str:
        """Address of the primary, as in the lease; empty if it is unknown."""
        record = self._primacy.lease()
        return record.address if record is not None else ""

    def start(self, store: Store) -> None:
        """Keep the bases of the open store, and the lease, from here on."""
        config = self._config
        sweep(Path(config.data))
        options = KeeperOptions(
            base_every_ms=round(config.replica_base_every.total_seconds() * 1000),
            keep_ms=round(config.replica_keep.total_seconds() * 1000),
            verify_every_ms=round(each.total_seconds() * 1000) if (each := config.replica_verify_every) else 0,
        )
        start = LogStart(store.identity.number, store.boot, Path(config.data).absolute(), store.checkpoint)
        self._keeper = BaseKeeper(
            store,
            self.objects,
            self.url,
            options,
            worker=self._worker,
            log_status=self.batch_log.status,
            start=start,
        )
        self._keeper.start()
        if config.replica_link is not None:
            self._sender = self._start_link(store)
        self._primacy.lead(store.boot, store.cell_id, self.batch_log.bind, lambda: store.stalled_s, self._offer)

    def _offer(self, addresses: Sequence[str]) -> None:
        if self._sender is not None:
            self._sender.offer(addresses)

    def _start_link(self, store: Store) -> LinkSender:
        sender = LinkSender(
            self.batch_log,
            self._registers,
            self._clock,
            partial(dial_standby, self._config),
            store=store.identity.number,
            epoch=store.boot,
            patience_s=self._config.replica_lease.total_seconds(),
        )
        sender.start()
        return sender

    def _fetch_trail(self) -> None:
        """Fetch the trail of the primary, so that a takeover waits for its last files only."""
        trail, now_s = self._config.trail_path, self._clock.monotonic_s()
        if trail is None or now_s < self._fetch_at_s:
            return
        self._fetch_at_s = now_s + self._config.trail_every.total_seconds()
        try:
            if cell := published_cell(self.objects):
                TrailUploads(self.objects).fetch(Layout(trail.absolute(), cell))
        except (ReplicaUnavailable, OSError, ValueError) as error:
            log.warning("trail_fetch_failed", trail=str(trail), error=str(error))

    def status(self) -> wire.Replica:
        """Return the current figures; from any thread."""
        if (standby := self._primacy.standby) is not None:
            return wire.Replica(
                mode=self._config.replica,
                url=self.url,
                state="following",
                epoch=standby.position.epoch,
                segment=standby.position.number,
                sent_at_ms=standby.written_ms,
                lag_ms=round((self._clock.monotonic_s() - standby.complete_s) * 1000),
                error=standby.error,
                role="standby",
                primary=self.primary,
                link=self._link_of_standby(standby),
                link_address=standby.reserved_for,
            )
        found = self.batch_log.status()
        base = self._keeper.status if self._keeper is not None else None
        link = self._sender.status() if self._sender is not None else None
        return wire.Replica(
            mode=self._config.replica,
            url=found.url,
            state=found.state.value,
            epoch=found.epoch,
            segment=found.number,
            segments=found.segments,
            sent_bytes=found.segment_bytes,
            sent_at_ms=found.sent_at_ms,
            lag_batches=found.lag_batches,
            lag_bytes=found.lag_bytes,
            lag_ms=round(found.lag_s * 1000),
            error=found.error,
            base_at_ms=base.base_at_ms if base is not None else 0,
            base_bytes=base.base_bytes if base is not None else 0,
            verified_at_ms=base.verified_at_ms if base is not None else 0,
            base_error=base.error if base is not None else "",
            role="primary",
            primary=self.primary,
            link=link.state.value if link is not None else "",
            link_address=link.address if link is not None else "",
            link_batches=link.batches if link is not None else 0,
            link_error=link.error if link is not None else "",
        )

    def _link_of_standby(self, standby: StandbyFigures) -> str:
        if standby.reserved_for:
            return "reserved"
        if self._config.replica_link is None:
            return ""
        return "connected" if standby.is_linked else "waiting"

    def close(self) -> None:
        """Stop making bases, and end the direct link; the log is closed by the store."""
        if self._sender is not None:
            self._sender.close()
        if self._keeper is not None:
            self._keeper.close()

    def release(self) -> None:
        """Release the lease, once the store is closed."""
        status = self.batch_log.status()
        is_complete = not status.lag_batches and not status.lag_bytes
        if self._sender is not None and is_complete:
            self._sender.leave()
        self._primacy.close(is_complete=is_complete)


def _open(url: str) -> ObjectStore:
    objects = open_objects(url)
    is_reported = False
    while True:
        try:
            probe(objects)
        except ReplicaUnavailable as error:
            if not is_reported:
                log.warning("replica_unreachable", url=objects.url, error=error.reason)
                is_reported = True
            Event().wait(_AGAIN_S)
        else:
            return objects
