"""Export of spans by OTLP over HTTP, in a thread of its own.

Spans wait in a bounded queue. A span is dropped, and counted, if the queue is full or the collector does not accept it
within the exporter's timeout. Headers, certificates, compression, timeout and resource attributes are those of the
standard environment variables (``OTEL_EXPORTER_OTLP_HEADERS`` and others), which the OpenTelemetry SDK reads.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_SERVICE_NAME
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags
from opentelemetry.trace import SpanKind as SdkKind

from broker_adapter.runtime.log import LibraryLog
from dmq.tracing.span import MessageSpan, SpanKind

QUEUE_SPANS_MAX: Final = 8192
BATCH_SPANS_MAX: Final = 512
EVERY_S: Final = 1.0
CLOSE_S_MAX: Final = 5.0
_NS_PER_MS: Final = 1_000_000
_KINDS: Final = {SpanKind.SERVER: SdkKind.SERVER, SpanKind.INTERNAL: SdkKind.INTERNAL}
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)

log = LibraryLog("dmq.tracing")


class SpanExport:
    """Queue of finished spans, and the thread that exports them."""

    def __init__(self, endpoint: str, *, version: str, cell_id: str, exporter: SpanExporter | None = None) -> None:
        """``endpoint`` is the URL of a collector without the path ``/v1/traces``; ``exporter`` replaces its client."""
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it would log each failed batch
        self._exporter = exporter or OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        about = {"service.version": version, "service.instance.id": cell_id}
        if not os.environ.get(OTEL_SERVICE_NAME):
            about["service.name"] = "rock-dmq"
        self._resource = Resource.create(about)
        self._scope = InstrumentationScope("rock-dmq", version)
        self._queue: deque[MessageSpan] = deque()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._is_closing = False
        self._is_failing = False
        self.exported_total = 0
        self.dropped_total = 0
        self._thread = threading.Thread(target=self._run, name="dmq-spans", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def emit(self, span: MessageSpan) -> None:
        """Queue a finished span, or drop it if the queue is full. Safe in any thread; never waits for the network."""
        queue = self._queue
        if self._is_closing or len(queue) >= QUEUE_SPANS_MAX:
            with self._lock:
                self.dropped_total += 1
            return
        queue.append(span)
        if len(queue) >= BATCH_SPANS_MAX:
            self._wake.set()

    def close(self, grace_s: float = CLOSE_S_MAX) -> None:
        """Export the remaining spans for at most ``grace_s``; the others are dropped."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(min(grace_s, CLOSE_S_MAX))
        self._exporter.shutdown()  # an export that waits for a repetition ends
        left = len(self._queue)
        self._queue.clear()
        if left:
            self._drop(left, "the daemon stops")

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait(EVERY_S)
            self._wake.clear()
            self._export_all()
        self._export_all()

    def _export_all(self) -> None:
        while batch := self._next_batch():
            self._export(batch)

    def _next_batch(self) -> list[MessageSpan]:
        batch: list[MessageSpan] = []
        with suppress(IndexError):  # empty
            while len(batch) < BATCH_SPANS_MAX:
                batch.append(self._queue.popleft())
        return batch

    def _export(self, batch: Sequence[MessageSpan]) -> None:
        try:
            is_accepted = self._exporter.export([self._encoded(each) for each in batch]) is SpanExportResult.SUCCESS
        except Exception as error:  # noqa: BLE001 - a fault of the export must not end its thread
            self._drop(len(batch), str(error))
            return
        if not is_accepted:
            self._drop(len(batch), "the collector does not accept them")
            return
        with self._lock:
            self.exported_total += len(batch)
        if self._is_failing:
            self._is_failing = False
            log.info("span_export_recovered", dropped_total=self.dropped_total)

    def _drop(self, count: int, why: str) -> None:
        with self._lock:
            self.dropped_total += count
        if not self._is_failing:
            self._is_failing = True
            log.warning("spans_dropped", spans=count, error=why)

    def _encoded(self, span: MessageSpan) -> ReadableSpan:
        return ReadableSpan(
            span.name,
            context=_context(span.trace_id, span.span_id),
            parent=_context(span.trace_id, span.parent_span_id, is_remote=True),
            resource=self._resource,
            attributes=span.attributes,
            links=[Link(_context(span.trace_id, each)) for each in span.links],
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=span.start_ms * _NS_PER_MS,
            end_time=span.end_ms * _NS_PER_MS,
            instrumentation_scope=self._scope,
        )


def _context(trace_id: int, span_id: int, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote, _SAMPLED)
