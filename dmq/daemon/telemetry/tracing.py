"""Spans of a daemon: the thread that exports them, if a collector is configured."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Final

import structlog

from broker_adapter.runtime.extras import require
from dmq.config.settings import DaemonConfig
from dmq.metrics.registry import Metrics
from dmq.tracing import EmitSpan
from dmq.version import version_here

_MODULES: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")

log = structlog.get_logger("dmq.daemon")


def require_tracing(config: DaemonConfig) -> None:
    """Raise ``ExtraMissing`` if a collector is configured and OpenTelemetry is not installed."""
    if config.otel_endpoint is not None:
        require("otel_endpoint", "otel", *_MODULES)


def start_tracing(config: DaemonConfig, cell_id: str, metrics: Metrics, stack: AsyncExitStack) -> EmitSpan | None:
    """Start the export of spans, and return its entry; None without a collector. ``stack`` ends the export."""
    if config.otel_endpoint is None:
        return None
    from dmq.tracing import SpanExport  # loads the SDK

    export = SpanExport(config.otel_endpoint, version=version_here(), cell_id=cell_id)
    metrics.spans_exported.follow(lambda: export.exported_total)
    metrics.spans_dropped.follow(lambda: export.dropped_total)
    export.start()
    stack.callback(export.close, config.shutdown_grace_s)
    log.info("tracing_started", endpoint=config.otel_endpoint)
    return export.emit
