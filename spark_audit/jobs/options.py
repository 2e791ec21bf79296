"""Options of an audit: thresholds, windows, and the way it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from spark_audit.rules.rows import BITS


def _silent(line: str) -> None:
    """Discard the progress line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of one audit. Those above the blank line are part of the report; those below do not affect it."""

    from_ms: int | None = None
    to_ms: int | None = None
    window_ms: int = 600_000
    late_after_ms: int = 60_000
    late_max: int = 0
    duplicates_max: int = 0
    grace_ms: int = 120_000
    writer_timeout_ms: int = 600_000
    findings_max: int = 100_000
    verify: bool = True

    exact: bool = False
    key_bits: int = BITS
    say: Callable[[str], None] = field(default=_silent, compare=False)

    def reported(self) -> dict[str, int]:
        """Return the options that report.json contains."""
        return {
            "late_after_ms": self.late_after_ms,
            "late_max": self.late_max,
            "duplicates_max": self.duplicates_max,
            "grace_ms": self.grace_ms,
            "writer_timeout_ms": self.writer_timeout_ms,
        }
