"""Traces of messages: the trace context that a producer sends, and the export of spans by OpenTelemetry.

Imports: ``retry`` and ``broker_adapter``; OpenTelemetry in ``export`` only. Interface: the context of a message, the
span, and its export.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_adapter.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from dmq.tracing.context import TracedDelivery, TracedMessage, is_traceparent, may_be_traced, traced
    from dmq.tracing.export import SpanExport
    from dmq.tracing.span import EmitSpan, MessageSpan, SpanKind, span_id_of

__all__ = [
    "EmitSpan",
    "MessageSpan",
    "SpanExport",
    "SpanKind",
    "TracedDelivery",
    "TracedMessage",
    "is_traceparent",
    "may_be_traced",
    "span_id_of",
    "traced",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "dmq.tracing.context": "TracedDelivery TracedMessage is_traceparent may_be_traced traced",
        "dmq.tracing.export": "SpanExport",
        "dmq.tracing.span": "EmitSpan MessageSpan SpanKind span_id_of",
    },
)
