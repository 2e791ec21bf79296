"""Metrics of a running daemon, for Prometheus and for ``dmq status``.

Each daemon has one ``Metrics`` object with its own registry, so that two daemons in one process (as in tests) share no
number. Events per message or per call are counted by ``Distribution`` and ``CallsMetric``, which use the counters of
``dmq.metrics.counting``.
"""

from __future__ import annotations

import errno
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Gauge,
    Info,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from broker_adapter.runtime.clock import SystemClock
from dmq.config.units import Address
from dmq.errors import AddressInUse, DmqError
from dmq.metrics.counting import CallCounts, Spread
from dmq.metrics.notifications import NotificationCounts
from dmq.metrics.topics import TopicFigures
from dmq.metrics.usage import ProcessStatus

# 0.5 ms to 1 h. Below 50 ms the steps are fine, because these buckets measure the objective (p99 <= 5 ms).
LATENESS_BOUNDS_S = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0),
)
COMMIT_BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.5, 1.0, 5.0)
_CONNECTIONS_MAX = 16  # of scrapers and probes together
_NO_DESCRIPTOR_S = 0.1
_REAL = SystemClock()
_REST: Final = 4  # multiple of the generation time that passes before the next one
_REST_S_MAX: Final = 1.0
LAG_PAIRS_MAX = 1_000  # of topic and group: five series each
COMMIT_OPS_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000)
COMMIT_BYTES_BOUNDS = tuple(4.0**power for power in range(4, 14))  # 256 B to 64 MiB

# Prometheus has no text samples: one series per state, the current one is 1.
STORE_STATES = ("starting", "serving", "not_serving", "stopping")


class Total(Collector):
    """Number that only grows, safe in any thread. Unlike the library's counter it can be read."""

    def __init__(self, name: str, documentation: str) -> None:
        self._name = name
        self._documentation = documentation
        self._value = 0
        self._read: Callable[[], int] | None = None
        self._lock = threading.Lock()

    def follow(self, read: Callable[[], int]) -> None:
        """Export the counter of another part instead of an own one; ``read`` is called from any thread."""
        self._read = read

    def inc(self, amount: int = 1) -> None:
        """Add ``amount``, which is not negative."""
        assert amount >= 0
        with self._lock:
            self._value += amount

    @property
    def value(self) -> int:
        """Current sum."""
        return self._value if self._read is None else self._read()

    def collect(self) -> Iterator[Metric]:
        """Yield the number for a registry."""
        yield CounterMetricFamily(self._name, self._documentation, value=self.value)


class Distribution(Spread, Collector):
    """Distribution of values over fixed upper bounds, safe in any thread."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        super().__init__(bounds)
        self._name = name
        self._documentation = documentation

    def collect(self) -> Iterator[Metric]:
        """Yield the distribution for a registry."""
        family = HistogramMetricFamily(self._name, self._documentation)
        family.add_metric((), *self.buckets())
        yield family


class CallsMetric(CallCounts, Collector):
    """Calls by RPC and answer code, and their durations; the observer of the RocketMQ server."""

    def collect(self) -> Iterator[Metric]:
        """Yield the counts for a registry."""
        counts, spreads = self.counted()
        calls = CounterMetricFamily("dmq_calls", "Finished calls by RPC and answer code.", labels=("rpc", "code"))
        for (rpc, code), count in counts:
            calls.add_metric((rpc, str(code)), count)
        yield calls
        seconds = HistogramMetricFamily("dmq_call_seconds", "How long calls took, waits included.", labels=("rpc",))
        for rpc, spread in spreads:
            seconds.add_metric((rpc,), *spread.buckets())
        yield seconds


class Refusals(Collector):
    """Messages refused by quotas of topics, by quota."""

    def __init__(self) -> None:
        self._read: Callable[[], Mapping[str, int]] = dict

    def follow(self, read: Callable[[], Mapping[str, int]]) -> None:
        """Export these counts; ``read`` is called from any thread."""
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Yield the counts for a registry."""
        text = "Messages refused by a quota of their topic, a part of dmq_messages_refused."
        family = CounterMetricFamily("dmq_messages_over_quota", text, labels=("quota",))
        for quota, count in self._read().items():
            family.add_metric((quota,), count)
        yield family


class Oldest(Collector):
    """Storage time of the oldest message of each topic, as of the last run of retention."""

    def __init__(self) -> None:
        self._read: Callable[[], Mapping[str, int]] = dict

    def follow(self, read: Callable[[], Mapping[str, int]]) -> None:
        """Export these times, epoch ms by topic; ``read`` is called from any thread."""
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Yield the times for a registry."""
        name, text = "dmq_topic_oldest_timestamp_seconds", "When the oldest message of a topic was stored."
        family = GaugeMetricFamily(name, text, labels=("topic",))
        for topic, at_ms in sorted(self._read().items()):
            family.add_metric((topic,), at_ms / 1000)
        yield family


class Processes(Collector):
    """Activity and resource usage of each process of the daemon, by its name. The names are few and fixed."""

    def __init__(self) -> None:
        self._read: Callable[[], Sequence[ProcessStatus]] = tuple

    def follow(self, read: Callable[[], Sequence[ProcessStatus]]) -> None:
        """Export these processes; ``read`` is called from any thread."""
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Yield the figures for a registry. A figure that a process does not report, or not yet, is absent."""
        found = self._read()
        for name, text, family_of, value_of in _PROCESS_FAMILIES:
            family = family_of(f"dmq_process_{name}", text, labels=("process",))
            for each in found:
                value = value_of(each)
                if value is not None:
                    family.add_metric((each.name,), value)
            yield family


_PROCESS_FAMILIES: Sequence[
    tuple[str, str, type[CounterMetricFamily | GaugeMetricFamily], Callable[[ProcessStatus], float | None]]
] = (
    ("cpu_seconds", "Seconds of a processor since the process began.", CounterMetricFamily, lambda one: one.cpu_s),
    (
        *("resident_memory_bytes", "Memory of the process.", GaugeMetricFamily),
        lambda one: one.memory_bytes or None,
    ),
    ("connections", "Connections of clients that the process serves.", GaugeMetricFamily, lambda one: one.connections),
    ("streams", "Calls that are open on these connections.", GaugeMetricFamily, lambda one: one.streams),
    (
        *("starts", "How often the process was started; more than once: it ended.", CounterMetricFamily),
        lambda one: one.starts,
    ),
)


class GroupLag(Protocol):
    """Lag of a group in a topic; None is unknown."""

    @property
    def topic(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def unread(self) -> int | None: ...
    @property
    def oldest_unread_age_ms(self) -> int | None: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def in_retry(self) -> int: ...
    @property
    def dead(self) -> int: ...


class _Rest(NamedTuple):
    """Sum of the pairs that are not exported one by one. The name is invalid for topics and groups."""

    topic: str = "(others)"
    group: str = "(others)"
    unread: int | None = None
    oldest_unread_age_ms: int | None = None
    in_flight: int = 0
    in_retry: int = 0
    dead: int = 0

    def plus(self, other: GroupLag) -> _Rest:
        return self._replace(
            unread=_known(sum, self.unread, other.unread),
            oldest_unread_age_ms=_known(max, self.oldest_unread_age_ms, other.oldest_unread_age_ms),
            in_flight=self.in_flight + other.in_flight,
            in_retry=self.in_retry + other.in_retry,
            dead=self.dead + other.dead,
        )


def _known(combine: Callable[[list[int]], int], *values: int | None) -> int | None:
    known = [each for each in values if each is not None]
    return combine(known) if known else None


class GroupLags(Collector):
    """Lag of groups. If there are too many pairs of topic and group, those with the most unfinished messages are
    exported.

    An exported pair is replaced only by one with more than twice as many, so that series do not appear and disappear.
    """

    def __init__(self, pairs_max: int = LAG_PAIRS_MAX) -> None:
        self._pairs_max = pairs_max
        self._shown: set[tuple[str, str]] = set()
        self._read: Callable[[], Sequence[GroupLag]] = tuple

    def follow(self, read: Callable[[], Sequence[GroupLag]]) -> None:
        """Export the result of ``read``, each pair once; it is called from any thread."""
        self._read = read

    def _to_show(self) -> list[GroupLag]:
        found = list(self._read())
        if len(found) > self._pairs_max:
            found.sort(key=self._rank)
            rest = _Rest()
            for each in found[self._pairs_max :]:
                rest = rest.plus(each)
            self._shown = {(each.topic, each.group) for each in found[: self._pairs_max]}
            return [*sorted(found[: self._pairs_max], key=_by_name), rest]
        self._shown = {(each.topic, each.group) for each in found}
        return sorted(found, key=_by_name)

    def _rank(self, lag: GroupLag) -> tuple[int, int, str, str]:
        is_new = (lag.topic, lag.group) not in self._shown
        to_do = (lag.unread or 0) + lag.in_retry
        return -to_do if is_new else -2 * to_do, is_new, lag.topic, lag.group

    def collect(self) -> Iterator[Metric]:
        """Yield the figures for a registry."""
        found = self._to_show()
        for field, (name, scale, text) in _LAG_FAMILIES.items():
            family = GaugeMetricFamily(f"dmq_group_{name}", text, labels=_LAG_LABELS)
            for each in found:
                value = getattr(each, field)
                if value is not None:
                    family.add_metric((each.topic, each.group), value * scale)
            yield family


# The attributes messaging.destination.name and messaging.consumer.group.name of OpenTelemetry's semantic conventions.
_LAG_LABELS = ("messaging_destination_name", "messaging_consumer_group_name")
_LAG_FAMILIES: Mapping[str, tuple[str, float, str]] = MappingProxyType(
    {
        "unread": ("unread_messages", 1, "Messages of the topic that the group has not finished."),
        "oldest_unread_age_ms": (
            *("oldest_unread_age_seconds", 0.001),
            "How long the oldest of these has been in its queue; 0 if there is none.",
        ),
        "in_flight": ("in_flight_messages", 1, "Of these, in the hands of consumers."),
        "in_retry": ("in_retry_messages", 1, "Messages that the group failed and that wait for their next attempt."),
        "dead": ("dead_messages", 1, "Messages that came to the group's dead-letter queue since the ledger began."),
    }
)


def _by_name(lag: GroupLag) -> tuple[str, str]:
    return lag.topic, lag.group


def _gauge(registry: CollectorRegistry, name: str, documentation: str) -> Gauge:
    return Gauge(f"dmq_{name}", documentation, registry=registry)


def _registry(*, process: bool) -> CollectorRegistry:
    registry = CollectorRegistry()
    if process:
        ProcessCollector(registry=registry)
    return registry


def _trail_totals() -> tuple[Total, Total]:
    return (
        Total("dmq_audit_events_exported", "Audit events written to the trail."),
        Total("dmq_audit_export_failures", "Failed attempts to write the trail."),
    )


def _span_totals() -> tuple[Total, Total]:
    return (
        Total("dmq_spans_exported", "Spans that the collector accepted."),
        Total("dmq_spans_dropped", "Spans dropped: the queue was full, or the collector did not accept them."),
    )


def _disk_gauges(registry: CollectorRegistry) -> tuple[Gauge, Gauge, Gauge]:
    return (
        _gauge(registry, "disk_free_bytes", "Free space of the file system with the store."),
        _gauge(registry, "disk_low_water_bytes", "Free space below which sends are refused."),
        _gauge(registry, "disk_stalled_seconds", "How long the batch at the disk has taken; 0 below 3 s."),
    )


def _states(registry: CollectorRegistry) -> dict[str, Gauge]:
    state = Gauge("dmq_store_state", "1 for the state the store is in.", ("state",), registry=registry)
    return {name: state.labels(name) for name in STORE_STATES}


class ReplicaMetrics:
    """Metrics of the second copy of the store; all are 0 if it is off."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.segments = Total("dmq_replica_segments", "Segments written to the second copy.")
        self.bytes = Total("dmq_replica_bytes", "Bytes of these segments.")
        self.link_batches = Total("dmq_replica_link_batches", "Batches that a standby acknowledged by the direct link.")
        for total in (self.segments, self.bytes, self.link_batches):
            registry.register(total)
        gauge = partial(_gauge, registry)
        role = Gauge("dmq_replica_role", "1 for the role of this daemon.", ("role",), registry=registry)
        self.roles = {name: role.labels(name) for name in ("primary", "standby")}
        self.lag = gauge("replica_lag_seconds", "Age of the oldest batch that the second copy or this standby lacks.")
        self.lag_batches = gauge("replica_lag_batches", "Batches that the second copy lacks.")
        self.unreachable = gauge("replica_unreachable", "1 while the object store of the second copy does not answer.")
        self.local_only = gauge("replica_local_only", "1 while batches are not sent to the second copy.")
        self.link_in_sync = gauge("replica_link_in_sync", "1 while the direct link of the primary and standby is up.")
        self.last_base = gauge("replica_last_base_timestamp_seconds", "When the newest base was made; 0: none.")
        self.last_verified = gauge(
            "replica_last_verified_timestamp_seconds", "When the newest base was verified; 0: never."
        )


_COLLECTORS = (
    *(CallsMetric, GroupLags, NotificationCounts, Oldest, Processes, Refusals, TopicFigures),
    *(Total, Distribution),
)


class Metrics:
    """All metrics of one daemon. Counters only grow; gauges are set, or read at scrape time with ``set_function``."""

    def __init__(self, *, version: str = "", cell_id: str = "", process: bool = True) -> None:
        registry = self.registry = _registry(process=process)
        self._info = Info("dmq", "Which daemon this is.", registry=registry)
        self.identify(version=version, cell_id=cell_id)

        self.calls = CallsMetric()
        self.accepted = Total("dmq_messages_accepted", "Messages answered OK, durable.")
        self.repeated = Total("dmq_messages_repeated", "Sends repeated with a known message id.")
        self.refused = Total("dmq_messages_refused", "Sends refused because a bound is reached.")
        self.over_quota = Refusals()
        self.delivered = Total("dmq_messages_delivered", "Hand-outs to consumers, repetitions included.")
        self.pulled = Total("dmq_messages_pulled", "Messages read by offset, repetitions included.")
        self.acked = Total("dmq_messages_acked", "Deliveries finished by a consumer.")
        self.expired = Total("dmq_leases_expired", "Deliveries whose invisible duration ran out.")
        self.retried = Total("dmq_messages_retried", "Failed deliveries that wait to be tried again.")
        self.dead = Total("dmq_messages_dead", "Messages that a group's dead-letter queue got.")
        self.redriven = Total("dmq_dead_letters_redriven", "Dead letters that were sent again.")
        self.purged = Total("dmq_dead_letters_purged", "Dead letters that were given up.")
        self.clock_steps = Total("dmq_clock_steps", "Steps of the wall clock that were noticed.")
        self.removed = Total("dmq_messages_removed", "Messages that retention removed.")
        self.removed_unread = Total("dmq_messages_expired", "Messages removed before everybody, or anybody, read them.")
        self.removed_bytes = Total("dmq_removed_bytes", "Size of what retention removed, retries included.")
        self.oldest = Oldest()
        self.lag, self.topics = GroupLags(), TopicFigures()
        self.processes, self.notifications = Processes(), NotificationCounts()
        self.exported, self.export_failures = _trail_totals()
        self.spans_exported, self.spans_dropped = _span_totals()
        self.dispatched = Total("dmq_messages_dispatched", "Delayed messages moved to their queue when due.")

        self.forwarded = Total("dmq_messages_forwarded", "Messages that went from here to the cluster.")
        self.forward_refused = Total("dmq_messages_forward_refused", "Messages that the cluster refuses for good.")
        self.forward_in_doubt = Total("dmq_messages_forward_in_doubt", "Messages sent without an answer, and again.")
        self.kept = Total("dmq_messages_kept", "Sends kept here because the cluster did not take them.")

        self.forward_lateness = Distribution(
            "dmq_forward_lateness_seconds", "From the delivery timestamp until the cluster's OK.", LATENESS_BOUNDS_S
        )
        self.lateness = Distribution(
            "dmq_lateness_seconds", "From the delivery timestamp until visible.", LATENESS_BOUNDS_S
        )
        self.commit_seconds = Distribution("dmq_commit_seconds", "Write and sync of one batch.", COMMIT_BOUNDS_S)
        self.sync_seconds = Distribution("dmq_commit_sync_seconds", "Sync of the WAL.", COMMIT_BOUNDS_S)
        self.commit_ops = Distribution("dmq_commit_ops", "Operations in one batch.", COMMIT_OPS_BOUNDS)
        self.commit_bytes = Distribution("dmq_commit_bytes", "Size of one batch.", COMMIT_BYTES_BOUNDS)
        for collector in vars(self).values():
            if isinstance(collector, _COLLECTORS):
                registry.register(collector)

        gauge = partial(_gauge, registry)
        self.pending = gauge("pending_messages", "Messages waiting on the timeline.")
        self.held = gauge("held_messages", "Of these, kept back by a pause or a rate of their topic.")
        self.overdue = gauge("overdue_messages", "Messages on the timeline that are due already.")
        self.next_due = gauge("next_due_timestamp_seconds", "When the next message is due; 0 if none waits.")
        self.commit_queue = gauge("commit_queue_ops", "Operations waiting for the writer.")
        self.leases = gauge("leases", "Messages handed out and neither acknowledged nor expired.")
        self.to_forward = gauge("messages_to_forward", "Messages here that are due and not at the cluster.")
        self.cluster_away = gauge("cluster_away", "1 while no proxy of the cluster answers.")
        self.clock_steady = gauge("clock_steady", "1 while the clock is believed enough to destroy by age.")
        self.clock_offset = gauge("clock_held_seconds", "By how much a step forward of the clock is not followed yet.")
        self.held_queues = gauge("held_queues", "Queues that hold what is too old, because a group has not read it.")
        self.outbox_bytes = gauge("audit_outbox_bytes", "Audit events waiting for their export.")
        self.export_lag = gauge("audit_export_lag_seconds", "Age of the oldest audit event that waits for its export.")
        self.export_stopped = gauge("audit_export_stopped", "1 while the trail cannot be written.")
        self.last_backup = gauge("last_backup_timestamp_seconds", "When the last periodic backup was taken; 0: none.")
        self.replica = ReplicaMetrics(registry)
        self.disk_free_bytes, self.disk_low_water_bytes, self.disk_stalled = _disk_gauges(registry)
        self.recovery_cut_bytes = gauge("recovery_cut_bytes", "Torn WAL tail dropped when the store was opened.")
        self.open_seconds = gauge("store_open_seconds", "How long opening the store took.")
        self._states = _states(registry)
        self.set_state("starting")

    def identify(self, *, version: str, cell_id: str) -> None:
        """Set the version and the cell id of the daemon."""
        self._info.info({"version": version, "cell_id": cell_id})

    def committed(self, *, ops: int, batch_bytes: int, seconds: float, sync_seconds: float) -> None:
        """Record one committed batch; ``seconds`` includes the sync."""
        self.commit_ops.observe(ops)
        self.commit_bytes.observe(batch_bytes)
        self.commit_seconds.observe(seconds)
        self.sync_seconds.observe(sync_seconds)

    def became_visible(self, lateness_ms: Sequence[int], topics: Sequence[str]) -> None:
        """Record the lateness of a batch of delayed messages that became visible, in ms, and their topics."""
        self.dispatched.inc(len(lateness_ms))
        self.topics.became_visible(lateness_ms, topics)
        self.lateness.observe_batch(lateness_ms, 0.001)

    def was_forwarded(self, lateness_ms: Sequence[int]) -> None:
        """Record the lateness of delayed messages that the cluster accepted, in ms."""
        self.forward_lateness.observe_batch(lateness_ms, 0.001)

    def set_state(self, state: str) -> None:
        """Set the current state, one of ``STORE_STATES``."""
        assert state in self._states
        for name, child in self._states.items():
            child.set(1 if name == state else 0)


class Exposition:
    """Text of all metrics, generated by one thread at a time. Concurrent scrapes share the next text, never an older
    one.

    After each text it pauses for four times the time of generation, at most a second. So many scrapers need at most a
    fifth of a processor, and do not slow down clients that send.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._changed = threading.Condition()
        self._begun = self._ended = 0
        self._is_making = False
        self._rests_until_s = 0.0
        self._text = b""

    def text(self) -> bytes:
        """Return the metrics as of some time after the call."""
        with self._changed:
            wanted = self._begun + 1
            while self._ended < wanted:
                rest_s = self._rests_until_s - _REAL.monotonic_s()
                if self._is_making or rest_s > 0:
                    self._changed.wait(None if self._is_making else rest_s)
                    continue
                self._begun += 1
                self._is_making = True
                self._changed.release()
                try:
                    began_s = _REAL.monotonic_s()
                    made = generate_latest(self._registry)
                finally:
                    self._changed.acquire()
                    self._is_making = False
                    self._changed.notify_all()
                ended_s = _REAL.monotonic_s()
                self._rests_until_s = ended_s + min(_REST_S_MAX, _REST * (ended_s - began_s))
                self._text, self._ended = made, self._begun
            return self._text


class MetricsServer:
    """HTTP port with ``/metrics`` and ``/healthz``, served by daemon threads until ``stop``."""

    def __init__(self, server: socketserver.TCPServer) -> None:
        self._server = server
        host, port = server.server_address[:2]
        self.address = Address(str(host), int(port))
        self._thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="dmq-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the port; running answers may be cut off. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def start_http(
    metrics: Metrics, address: Address, is_ready: Callable[[], bool], say: Callable[[], str] = str
) -> MetricsServer:
    """Serve ``/metrics``, and ``/healthz`` (200 while ``is_ready()``, else 503), at ``address``; port 0: any free one.

    The text of ``say()``, if any, is appended to the answer of ``/healthz``.

    Raise ``AddressInUse`` if the port is in use, ``DmqError`` if the address is not usable.
    """

    class BoundHandler(_Handler):
        exposition = Exposition(metrics.registry)
        ready = staticmethod(is_ready)
        remark = staticmethod(say)

    class Server(_Server):
        address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET

    try:
        return MetricsServer(Server((address.host, address.port), BoundHandler))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"{address} is in use by another process (metrics)") from error
        raise DmqError(f"cannot listen on {address} (metrics): {error.strerror or error}") from error


class _Server(socketserver.ThreadingTCPServer):
    # Not http.server's: it resolves the host's full name before it serves, which can take seconds.
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    _open: dict[socket.socket, None]  # the oldest first

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        """Serve in a thread. If there are too many connections the oldest is closed, so that the newest is always
        served.
        """
        self._open = {each: None for each in getattr(self, "_open", {}) if each.fileno() >= 0}
        while len(self._open) >= _CONNECTIONS_MAX:
            oldest = next(iter(self._open))
            del self._open[oldest]
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread then wakes up and closes it
        self._open[request] = None
        super().process_request(request, client_address)

    def get_request(self) -> tuple[socket.socket, object]:
        """Accept a connection. Without a free descriptor wait a little, because the pending connection would be retried
        at once.
        """
        try:
            return super().get_request()
        except OSError:
            threading.Event().wait(_NO_DESCRIPTOR_S)
            raise

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the error: a scraper that disconnects is no event, and the default writes a traceback to stderr."""


class _Handler(BaseHTTPRequestHandler):
    exposition: Exposition
    ready: Callable[[], bool]
    remark: Callable[[], str]
    timeout = 10.0  # ends an idle connection, to release its thread
    server_version = "dmq"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer one request."""
        match self.path.partition("?")[0]:
            case "/metrics":
                self._answer(200, self.exposition.text(), CONTENT_TYPE_PLAIN_0_0_4)
            case "/healthz" if self.ready():
                remark = self.remark()
                self._answer(200, f"ready\n{remark}\n".encode() if remark else b"ready\n")
            case "/healthz":
                remark = self.remark()
                self._answer(503, f"not ready\n{remark}\n".encode() if remark else b"not ready\n")
            case _:
                self._answer(404, b"not found: /metrics and /healthz are here\n")

    do_HEAD = do_GET  # noqa: N815 - the library finds it by this name

    def _answer(self, status: int, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's signature
        """Keep scrapes out of the log."""
