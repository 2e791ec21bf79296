"""Trace context of the running code, if its application uses OpenTelemetry, which is never imported here."""

from __future__ import annotations

import sys
from typing import Final

TRACEPARENT: Final = "traceparent"  # user property of a message, and header of an HTTP request


def current_traceparent() -> str:
    """Return the W3C trace context of the current span; empty without one."""
    current_span = getattr(sys.modules.get("opentelemetry.trace"), "get_current_span", None)
    if current_span is None:  # also while another thread imports the module
        return ""
    span = current_span().get_span_context()
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}" if span.is_valid else ""
