"""Metrics: names as Prometheus wants them, figures that add up, and an HTTP port that serves nothing else."""

from __future__ import annotations

import http.client
import math
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from support.rigs.producer.hook import until

from broker_adapter.runtime.clock import ManualClock
from dmq.config.units import Address
from dmq.errors import AddressInUse, DmqError
from dmq.metrics.registry import (
    LATENESS_BOUNDS_S,
    Distribution,
    Exposition,
    GroupLags,
    Metrics,
    MetricsServer,
    start_http,
)
from dmq.metrics.usage import ProcessStatus


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample that has no label but a bucket's, as the exposition has it."""
    text = generate_latest(metrics.registry).decode()
    return {
        sample.name + (f"<={sample.labels['le']}" if "le" in sample.labels else ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_names_and_units_follow_prometheus() -> None:
    """Snake case with our prefix, base units, and counters end in _total; nothing else is exposed."""
    metrics = Metrics(version="1", cell_id="c", process=False)
    metrics.calls.call_done("SendMessage", 20000, 0.001)
    text = generate_latest(metrics.registry).decode()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        assert re.fullmatch(r"dmq(_[a-z]+)+", name)
        assert (kind == "counter") == name.endswith("_total")
        assert not re.search(r"_(ms|millis|milliseconds|kb|mb)(_|$)", name)
    assert "_created" not in text


def test_process_figures_are_there() -> None:
    """Memory and CPU of the process come along."""
    assert samples(Metrics())["process_resident_memory_bytes"] > 0


def test_each_process_of_the_daemon_has_figures() -> None:
    """By its name; what one does not tell, or not yet, is absent and not 0."""
    metrics = Metrics(process=False)
    metrics.processes.follow(
        lambda: [
            ProcessStatus(name="store", pid=7, cpu_s=1.5, memory_bytes=4096, connections=None, streams=None),
            ProcessStatus(name="front-0", connections=3, streams=5, starts=2),
        ]
    )
    told = {
        (sample.name.removeprefix("dmq_process_"), sample.labels["process"]): sample.value
        for family in text_string_to_metric_families(generate_latest(metrics.registry).decode())
        for sample in family.samples
        if sample.name.startswith("dmq_process_")
    }
    assert told == {
        ("cpu_seconds_total", "store"): 1.5,
        ("cpu_seconds_total", "front-0"): 0.0,
        ("resident_memory_bytes", "store"): 4096,
        ("connections", "front-0"): 3,
        ("streams", "front-0"): 5,
        ("starts_total", "store"): 1,
        ("starts_total", "front-0"): 2,
    }


def test_two_daemons_in_one_process_share_nothing() -> None:
    """There is no global registry."""
    one, other = Metrics(process=False), Metrics(process=False)
    one.accepted.inc(3)
    assert (samples(one)["dmq_messages_accepted_total"], samples(other)["dmq_messages_accepted_total"]) == (3, 0)


def test_calls_are_counted_by_rpc_and_code() -> None:
    """The observer of the sidecar feeds a counter and a latency histogram."""
    metrics = Metrics(process=False)
    for code in (20000, 20000, 42900):
        metrics.calls.call_done("SendMessage", code, 0.003)
    text = generate_latest(metrics.registry).decode()
    assert 'dmq_calls_total{code="20000",rpc="SendMessage"} 2.0' in text
    assert 'dmq_calls_total{code="42900",rpc="SendMessage"} 1.0' in text
    assert 'dmq_call_seconds_bucket{le="0.005",rpc="SendMessage"} 3.0' in text
    assert 'dmq_call_seconds_bucket{le="0.002",rpc="SendMessage"} 0.0' in text


def test_a_batch_of_lateness_counts_each_message() -> None:
    """Milliseconds become seconds; a bucket takes its own upper bound."""
    metrics = Metrics(process=False)
    metrics.became_visible([0, 1, 1, 5, 4_000_000], ["orders"] * 5)
    found = samples(metrics)
    assert found["dmq_lateness_seconds_bucket<=0.0005"] == 1
    assert found["dmq_lateness_seconds_bucket<=0.001"] == 3
    assert found["dmq_lateness_seconds_bucket<=0.005"] == 4
    assert found["dmq_lateness_seconds_bucket<=3600.0"] == 4
    assert found["dmq_lateness_seconds_bucket<=+Inf"] == 5
    assert found["dmq_lateness_seconds_count"] == found["dmq_messages_dispatched_total"] == 5
    assert found["dmq_lateness_seconds_sum"] == pytest.approx(4000.007)
    assert metrics.lateness.max == 4000


def test_a_commit_feeds_four_histograms() -> None:
    """Operations, bytes, seconds and seconds of the sync."""
    metrics = Metrics(process=False)
    metrics.committed(ops=100, batch_bytes=30_000, seconds=0.003, sync_seconds=0.002)
    found = samples(metrics)
    assert [found[f"dmq_commit_{name}_sum"] for name in ("ops", "bytes", "seconds", "sync_seconds")] == [
        *(100, 30_000, 0.003, 0.002)
    ]


def test_a_total_can_follow_the_count_of_another_part() -> None:
    """Nothing is counted twice for the metrics' sake."""
    metrics = Metrics(process=False)
    metrics.acked.follow(lambda: 42)
    assert samples(metrics)["dmq_messages_acked_total"] == metrics.acked.value == 42


def test_the_store_is_in_one_state() -> None:
    """Exactly one series is 1."""
    metrics = Metrics(process=False)
    metrics.set_state("serving")
    text = generate_latest(metrics.registry).decode()
    assert re.findall(r'dmq_store_state{state="(\w+)"} 1.0', text) == ["serving"]


def test_no_quantile_before_the_first_value() -> None:
    """An idle daemon shows zeros, it does not fail."""
    empty = Distribution("x", "x", (1.0, 2.0))
    assert (empty.count, empty.max, empty.quantile(0.5), empty.quantile(1.0)) == (0, 0.0, 0.0, 0.0)


@given(st.lists(st.floats(0, 5000), min_size=1, max_size=200), st.floats(0, 1))
def test_a_quantile_is_off_by_less_than_its_bucket(values: list[float], q: float) -> None:
    """The estimate lies in the bucket of the true value, and never above the maximum."""
    spread = Distribution("x", "x", LATENESS_BOUNDS_S)
    spread.observe_batch(values[1:])
    spread.observe(values[0])
    ordered = sorted(values)
    true = ordered[max(0, math.ceil(q * len(values)) - 1)]
    low = max((bound for bound in LATENESS_BOUNDS_S if bound < true), default=0.0)
    high = min((bound for bound in LATENESS_BOUNDS_S if bound >= true), default=math.inf)
    rounding = 1 + 1e-9
    assert low <= spread.quantile(q) * rounding
    assert spread.quantile(q) <= min(high, max(values)) * rounding


def test_counts_from_many_threads_add_up() -> None:
    """No increment is lost between the writer, the event loop and a scrape."""
    metrics = Metrics(process=False)

    def work() -> None:
        for _ in range(500):
            metrics.accepted.inc()
            metrics.became_visible([1, 2], ["orders"] * 2)
            metrics.calls.call_done("AckMessage", 20000, 0.1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (metrics.accepted.value, metrics.lateness.count) == (2000, 4000)
    assert 'dmq_calls_total{code="20000",rpc="AckMessage"} 2000.0' in generate_latest(metrics.registry).decode()


class Behind(NamedTuple):
    """A group that is behind."""

    topic: str
    group: str
    unread: int | None = 0
    oldest_unread_age_ms: int | None = 0
    in_flight: int = 0
    in_retry: int = 0
    dead: int = 0


def told(collector: GroupLags, *lags: Behind) -> dict[tuple[str, str], dict[str, float]]:
    """What is told of each topic and group, by figure, as a scraper reads it."""
    collector.follow(lambda: lags)
    registry = CollectorRegistry()
    registry.register(collector)
    found: dict[tuple[str, str], dict[str, float]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            figures = found.setdefault(
                (sample.labels["messaging_destination_name"], sample.labels["messaging_consumer_group_name"]), {}
            )
            figures[family.name.removeprefix("dmq_group_")] = sample.value
    return found


OTHERS = ("(others)", "(others)")


def test_too_many_groups_are_summed() -> None:
    """Those with the most to do are told one by one; of the others sums, the greatest age, and only what is known."""
    lags = [Behind("t", f"g-{number}", number, number * 1_000, 1, 0, 2) for number in range(5)]
    found = told(GroupLags(3), *lags, Behind("t", "retries", 0, 0, 0, 50), Behind("cluster", "g", None, None, 1, 0, 1))
    assert found.keys() == {("t", "g-3"), ("t", "g-4"), ("t", "retries"), OTHERS}
    assert found["t", "g-4"] == {
        "unread_messages": 4,
        "oldest_unread_age_seconds": 4,
        "in_flight_messages": 1,
        "in_retry_messages": 0,
        "dead_messages": 2,
    }
    assert found[OTHERS] == {
        "unread_messages": 3,
        "oldest_unread_age_seconds": 2,
        "in_flight_messages": 4,
        "in_retry_messages": 0,
        "dead_messages": 7,
    }
    assert OTHERS not in told(GroupLags(3), *lags[:3])


def test_a_listed_member_stays() -> None:
    """Until somebody has twice as much to do; equals are chosen by name, and always the same."""
    collector = GroupLags(1)
    assert told(collector, Behind("t", "b", 10), Behind("t", "a", 10)).keys() == {("t", "a"), OTHERS}
    assert told(collector, Behind("t", "b", 19), Behind("t", "a", 10)).keys() == {("t", "a"), OTHERS}
    assert told(collector, Behind("t", "b", 21), Behind("t", "a", 10)).keys() == {("t", "b"), OTHERS}
    assert told(collector, Behind("t", "b", 11), Behind("t", "a", 20)).keys() == {("t", "b"), OTHERS}


def test_an_unknown_figure_is_absent() -> None:
    """Not 0, which would be a claim."""
    found = told(GroupLags(), Behind("t", "g", None, None, 1), Behind("t", "new", 3, None))
    assert "unread_messages" not in found["t", "g"]
    assert "oldest_unread_age_seconds" not in found["t", "g"] | found["t", "new"]
    assert told(GroupLags()) == {}


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=20), min_size=1, max_size=5, unique=True))
def test_no_name_breaks_the_format(names: list[str]) -> None:
    """Whatever a name is, it is read as it was, and no other line of the page is."""
    found = told(GroupLags(), *(Behind(name, name, 7) for name in names))
    assert {pair: figures["unread_messages"] for pair, figures in found.items()} == dict.fromkeys(
        [(name, name) for name in names], 7
    )


class Port:
    """A served registry and the answers of its port."""

    def __init__(self) -> None:
        self.ready = True
        self.metrics = Metrics(process=False)
        self.server: MetricsServer = start_http(self.metrics, Address("127.0.0.1", 0), lambda: self.ready)

    def ask(self, path: str, method: str = "GET") -> tuple[int, str]:
        connection = http.client.HTTPConnection(*self.server.address, timeout=10)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def raw(self, request: bytes) -> bytes:
        """Everything until the server hangs up."""
        with socket.create_connection(self.server.address, timeout=10) as connection:
            connection.sendall(request)
            return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.fixture
def port() -> Iterator[Port]:
    """A port that is closed again."""
    port = Port()
    yield port
    port.server.stop()


def test_the_port_serves_metrics(port: Port) -> None:
    """Prometheus' text format, at a port the system chose."""
    port.metrics.accepted.inc(7)
    status, text = port.ask("/metrics?x=1")
    assert status == 200
    assert "dmq_messages_accepted_total 7.0" in text
    assert port.server.address.port > 0


def test_scrapers_share_a_page_and_get_none_older() -> None:
    """While one makes the figures, all others wait for the next ones, which are made once for all of them."""

    class Slow(Collector):
        made = 0

        def collect(self) -> Iterator[Metric]:
            self.made += 1
            is_making.set()
            assert go_on.wait(20)
            yield GaugeMetricFamily("made", "How often.", value=self.made)

    is_making, go_on = threading.Event(), threading.Event()
    registry, slow = CollectorRegistry(), Slow()
    registry._collector_to_names[slow] = []  # as ``register`` does, which would collect
    exposition = Exposition(registry)
    with ThreadPoolExecutor(12) as pool:
        first = pool.submit(exposition.text)
        assert is_making.wait(20)
        others = [pool.submit(exposition.text) for _ in range(11)]
        until(lambda: len(exposition._changed._waiters) == len(others))  # type: ignore[attr-defined]
        go_on.set()
        assert b"made 1.0" in first.result(20)
        assert all(b"made 2.0" in each.result(20) for each in others)
    assert slow.made == 2


def test_making_the_figures_takes_a_fifth_of_the_time() -> None:
    """Whoever asks at once waits until it rested four times as long as it worked, a second at most."""
    clock, made = ManualClock(), 0

    class Long(Collector):
        def collect(self) -> Iterator[Metric]:
            nonlocal made
            made += 1
            clock.advance(100)
            yield GaugeMetricFamily("made", "How often.", value=made)

    registry = CollectorRegistry(auto_describe=False)
    registry._collector_to_names[Long()] = []
    with patch("dmq.metrics.registry._REAL", clock):
        exposition = Exposition(registry)
        assert b"made 1.0" in exposition.text()
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(exposition.text)
            until(lambda: len(exposition._changed._waiters) == 1)  # type: ignore[attr-defined]
            clock.advance(399)
            assert not second.done()
            clock.advance(1)
            assert b"made 2.0" in second.result(20)


def test_an_error_of_a_collector_is_for_one_scraper() -> None:
    """The next one makes the figures itself."""

    class Fails(Collector):
        errors = [RuntimeError("no")]  # noqa: RUF012 - one test, one list

        def collect(self) -> Iterator[Metric]:
            if self.errors:
                raise self.errors.pop()
            yield GaugeMetricFamily("made", "How often.", value=1)

    registry = CollectorRegistry()
    registry._collector_to_names[Fails()] = []
    exposition = Exposition(registry)
    with pytest.raises(RuntimeError):
        exposition.text()
    assert b"made 1.0" in exposition.text()


def test_health_follows_the_daemon(port: Port) -> None:
    """200 while it is ready, 503 while not."""
    assert port.ask("/healthz") == (200, "ready\n")
    port.ready = False
    assert port.ask("/healthz") == (503, "not ready\n")


@pytest.mark.parametrize("path", ["/", "/metrics/", "/metricsx", "/../etc/passwd"])
def test_other_paths_are_not_found(port: Port, path: str) -> None:
    """The port has two pages."""
    assert port.ask(path)[0] == 404


def test_only_reading_is_allowed(port: Port) -> None:
    """HEAD answers without a body; what would change something is not implemented."""
    head = port.raw(b"HEAD /metrics HTTP/1.1\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200")
    assert head.endswith(b"\r\n\r\n")
    assert port.ask("/metrics", "POST")[0] == 501
    assert port.ask("/metrics", "DELETE")[0] == 501


def test_nonsense_and_hang_ups_are_survived_in_silence(port: Port, capfd: pytest.CaptureFixture[str]) -> None:
    """A client that talks no HTTP or leaves without reading costs nothing, not even a line on stderr."""
    for bytes_sent in (b"\x00\xff\n\n", b"GET /metrics HTTP/1.1\r\n\r\n", b""):
        with socket.create_connection(port.server.address, timeout=10) as connection:
            connection.sendall(bytes_sent)
    assert port.ask("/healthz")[0] == 200
    assert capfd.readouterr().err == ""


def test_a_stopped_port_is_free_again_and_stopping_twice_is_fine() -> None:
    """The address can be bound at once."""
    port = Port()
    assert port.raw(b"GET /healthz HTTP/1.1\r\n\r\n").endswith(
        b"ready\n"
    )  # the server closes first: TIME_WAIT is its own
    port.server.stop()
    port.server.stop()
    start_http(port.metrics, port.server.address, lambda: True).stop()


def test_a_taken_port_is_an_error_that_names_it(port: Port) -> None:
    """The daemon decides what to do about it; an address of another host is another error."""
    with pytest.raises(AddressInUse, match=re.escape(str(port.server.address))):
        start_http(port.metrics, port.server.address, lambda: True)
    with pytest.raises(DmqError, match=r"cannot listen on 192\.0\.2\.1:1"):
        start_http(port.metrics, Address("192.0.2.1", 1), lambda: True)
