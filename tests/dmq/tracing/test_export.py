"""Export of spans to a receiver in another process: complete, bounded, and without cost while the receiver is away."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.rigs.daemon.process import free_port
from support.rigs.services.collectors import PATIENCE_S, Collector, attributes_of, kind_of

from dmq.tracing import MessageSpan, SpanExport, SpanKind
from dmq.tracing.export import CLOSE_S_MAX, QUEUE_SPANS_MAX

pytestmark = pytest.mark.integration

SPAN = MessageSpan(
    "deliver orders",
    SpanKind.SERVER,
    trace_id=2**127 + 1,
    span_id=2**63 + 2,
    parent_span_id=3,
    start_ms=1_700_000_000_000,
    end_ms=1_700_000_000_070,
    attributes={"messaging.system": "rocketmq", "rockdmq.delivery.attempt": 2},
    links=(4,),
    error="card declined",
)


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    """A running receiver for the tests of this module."""
    with Collector(tmp_path_factory.mktemp("collector")) as running:
        yield running


def export_to(endpoint: str) -> SpanExport:
    """Return a running export."""
    export = SpanExport(endpoint, version="1.2.3", cell_id="cell-1")
    export.start()
    return export


def test_a_span_arrives_with_all_its_facts(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids, parent, link, times, kind, attributes, status and resource, in the JSON of OTLP."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=tests")
    export = export_to(collector.endpoint + "/")
    export.emit(SPAN)
    export.close()
    (raw,) = [each for each in collector.raw_spans() if int(each["traceId"], 16) == SPAN.trace_id]
    assert (int(raw["spanId"], 16), int(raw["parentSpanId"], 16)) == (SPAN.span_id, SPAN.parent_span_id)
    assert [int(each["spanId"], 16) for each in raw["links"]] == [4]
    times = int(raw["startTimeUnixNano"]), int(raw["endTimeUnixNano"])
    assert times == (SPAN.start_ms * 1_000_000, SPAN.end_ms * 1_000_000)
    assert (raw["name"], kind_of(raw), attributes_of(raw)) == (SPAN.name, "SPAN_KIND_SERVER", SPAN.attributes)
    assert (raw["status"]["code"], raw["status"]["message"]) in {("STATUS_CODE_ERROR", SPAN.error), (2, SPAN.error)}
    about = attributes_of(collector.requests()[-1]["resourceSpans"][0]["resource"])
    assert about["service.name"] == "rock-dmq"
    assert (about["service.version"], about["service.instance.id"]) == ("1.2.3", "cell-1")
    assert about["deployment.environment.name"] == "tests"
    assert (export.exported_total, export.dropped_total) == (1, 0)


def test_spans_of_an_outage_are_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is bounded and ``emit`` never waits. Spans after the outage arrive."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    away = Collector(tmp_path)
    export = SpanExport(away.endpoint, version="1.2.3", cell_id="cell-1")
    count = QUEUE_SPANS_MAX + 2_000
    for number in range(count):
        export.emit(SPAN._replace(span_id=number + 1))
    assert export.dropped_total == 2_000
    export.start()
    wait_until(lambda: export.dropped_total > 2_000)
    with away:
        wait_until(lambda: export.exported_total + export.dropped_total == count)
        export.emit(SPAN._replace(span_id=2**62))
        away.wait(lambda spans: any(span.span_id == 2**62 for span in spans))
        export.close()
    assert 0 < export.exported_total <= len({each["spanId"] for each in away.raw_spans()})  # a late answer is none


def test_the_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that does not answer delays the end of a daemon by a few seconds; its spans count as dropped."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    export = export_to(f"http://127.0.0.1:{free_port()}")
    for number in range(5_000):
        export.emit(SPAN._replace(span_id=number + 1))
    began_s = time.monotonic()
    export.close(0.2)
    assert time.monotonic() - began_s < CLOSE_S_MAX
    export.emit(SPAN)
    assert export.dropped_total > 4_000


def wait_until(is_so: Callable[[], bool]) -> None:
    """Return once it is so."""
    until_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.05)
