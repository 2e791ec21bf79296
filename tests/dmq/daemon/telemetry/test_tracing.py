"""Traces of a real daemon at a real collector, and a daemon without one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from support.clients.official.scenarios import dead_letters, set_group
from support.clients.wire.client import Received, WireClient, a_message, a_receive, received_of
from support.models.runs.span_tree import TreeSpan, tree_of
from support.rigs.daemon.process import Daemon, free_port
from support.rigs.services.collectors import PATIENCE_S, Collector, collector_in

from broker_adapter.wire import rocketmq_v2 as wire
from dmq.admin import admin_v1
from dmq.admin.client import AdminClient
from dmq.config.settings import ConfigError, load
from retry.policy import Fixed

pytestmark = pytest.mark.integration

TOPIC, GROUP = "orders", "billing"
PAGE = Path(__file__).resolve().parents[4] / "docs" / "how-to" / "tracing.md"
TREE = """\
send orders
├── send orders
├── delay orders
├── deliver orders (billing, attempt 1)  ERROR nacked
│   └── nack orders (billing, attempt 1)
├── delay orders (billing, attempt 1)  -> deliver orders (billing, attempt 1)
├── deliver orders (billing, attempt 2)  ERROR nacked  -> deliver orders (billing, attempt 1)
│   └── nack orders (billing, attempt 2)
├── dead_letter %DLQ%billing (billing, attempt 2)  ERROR exhausted  -> deliver orders (billing, attempt 2)
├── redrive orders (billing)  -> dead_letter %DLQ%billing (billing, attempt 2)
└── deliver orders (billing, attempt 1)  -> redrive orders (billing)
    └── ack orders (billing, attempt 1)"""


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    """A running collector for the tests of this module."""
    with collector_in(tmp_path_factory.mktemp("collector")) as running:
        yield running


def test_the_trace_of_an_order_is_the_tree_that_a_person_expects(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delay, two failures, a dead letter, a kill and a redrive; the producer uses the OpenTelemetry SDK."""
    monkeypatch.setenv("DMQ_OTEL_ENDPOINT", collector.endpoint)
    with Daemon(tmp_path / "data") as daemon, WireClient(daemon.address) as client:
        set_group(daemon.address, GROUP, Fixed(300), max_attempts=2)
        send_traced(client, collector.endpoint)
        for _ in range(2):
            (delivery,) = push(client)
            assert client.change_invisible(TOPIC, GROUP, delivery, 0).status.code == wire.OK
        collector.wait(lambda spans: has(spans, "dead_letter %DLQ%billing"))  # so that the kill loses no span
        daemon.kill()
        daemon.restart()
        (letter,) = dead_letters(daemon.address, GROUP)
        assert letter.origin_topic == TOPIC
        with AdminClient(daemon.address, timeout_s=20) as admin:
            admin.start_job(admin_v1.StartJobRequest(kind=admin_v1.REDRIVE, group=GROUP))
        assert client.ack(TOPIC, GROUP, push(client)).status.code == wire.OK
        daemon.stop()  # exports the rest
    spans = collector.wait(lambda spans: has(spans, "ack orders"))
    assert tree_of(spans) == TREE


def test_the_page_shows_that_tree() -> None:
    """The tree in the documentation is the one that was received."""
    assert f"\n{TREE}\n" in PAGE.read_text(encoding="utf-8")


def test_a_daemon_without_its_collector_serves_and_ends_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans are dropped and counted; the only other sign is one line in the log."""
    monkeypatch.setenv("DMQ_OTEL_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with Daemon(tmp_path / "data") as daemon, WireClient(daemon.address) as client:
        client.send(a_message(TOPIC, "m-1", properties={"traceparent": f"00-{1:032x}-{1:016x}-01"}))
        assert client.ack(TOPIC, GROUP, push(client)).status.code == wire.OK
        assert daemon.wait_for("spans_dropped", timeout_s=PATIENCE_S)["level"] == "warning"
        daemon.stop()
        assert len(daemon.events("spans_dropped")) == 1
        assert daemon.events("library_logged") == []


@pytest.mark.parametrize(
    "url", ["collector:4318", "ftp://collector:4318", "http://", "http://me:secret@collector:4318", "http://c:4318?x=1"]
)
def test_an_endpoint_is_a_url_without_credentials(url: str) -> None:
    """The error does not repeat the value, which may hold a password."""
    with pytest.raises(ConfigError, match="otel_endpoint: the URL of a collector") as failed:
        load({"otel_endpoint": url})
    assert "secret" not in str(failed.value)


def test_the_standard_variable_stands_for_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting wins; ``none`` turns the variable off."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318/")
    assert load().otel_endpoint == "http://collector:4318"
    assert load({"otel_endpoint": "https://other"}).otel_endpoint == "https://other"
    monkeypatch.setenv("DMQ_OTEL_ENDPOINT", "none")
    assert load().otel_endpoint is None


def send_traced(client: WireClient, endpoint: str) -> None:
    """Send a delayed message as an application with the OpenTelemetry SDK does."""
    provider = TracerProvider(resource=Resource.create({"service.name": "shop"}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces")))
    with provider.get_tracer("shop").start_as_current_span(f"send {TOPIC}", kind=SpanKind.PRODUCER):
        properties: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(properties)
        deliver_at_ms = int(time.time() * 1000) + 300
        answer = client.send(a_message(TOPIC, "m-1", properties=properties, deliver_at_ms=deliver_at_ms))
        assert answer.status.code == wire.OK
    provider.shutdown()


def push(client: WireClient) -> list[Received]:
    """Receive one message as a push consumer does, whose client the daemon renews leases for."""
    request = a_receive(TOPIC, GROUP, batch=1, wait_s=20)
    request.auto_renew, request.message_queue.id = True, -1  # of any queue
    return received_of(client.frames("ReceiveMessage", request, deadline_s=25))


def has(spans: Sequence[TreeSpan], name: str) -> bool:
    """Return True if a span of the daemon with this name is there."""
    return any(span.name == name for span in spans)
