"""Options, figures and error of the exporter."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from dmq.errors import DmqError
from dmq.trail.manifest import Role


class TrailUnavailable(DmqError):
    """The trail cannot be written now. The events stay in the outbox."""

    retriable = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of the export. ``rows_max`` is the maximum number of events in memory and in one file."""

    role: Role = "daemon"
    every_s: float = 60.0
    keep: timedelta = timedelta(days=14)
    rows_max: int = 250_000


class ExportFigures(NamedTuple):
    """Figures of the export. ``error`` is empty while it works."""

    exported_sequence: int
    waiting: int  # events
    oldest_waiting_ms: int  # age of the oldest of them
    exported_total: int  # events, in this run
    failures_total: int
    error: str
