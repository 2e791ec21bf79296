"""Metrics and spans of a daemon: the figures of its parts, the port of the metrics, the export of spans.

Imports: ``dmq.admin``, ``dmq.broker``, ``dmq.trail``, ``dmq.metrics``, ``dmq.tracing`` and below. Interface: the names
below; ``gauges`` is a namespace.
"""

from __future__ import annotations

from dmq.daemon.telemetry import gauges
from dmq.daemon.telemetry.tracing import require_tracing, start_tracing

__all__ = ["gauges", "require_tracing", "start_tracing"]
