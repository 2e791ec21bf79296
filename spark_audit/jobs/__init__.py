"""Audit runs: of a whole trail, or incremental."""

from __future__ import annotations

from spark_audit.jobs.audit import run_audit
from spark_audit.jobs.options import Options
from spark_audit.jobs.outcome import write_outcome

__all__ = ["Options", "run_audit", "write_outcome"]
