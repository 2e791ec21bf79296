"""Result of the check of a store."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from dmq.producer_store.directories.findings import Findings


class RowTotal(NamedTuple):
    """Rows of one kind, and the bytes of their keys and values."""

    rows: int = 0
    size_bytes: int = 0


class Checked(NamedTuple):
    """Row counts and findings of a checked store."""

    path: Path
    totals: dict[str, RowTotal]
    findings: Findings

    def as_json(self) -> dict[str, object]:
        """Return the result as JSON values."""
        found = self.findings
        return {
            "path": str(self.path),
            "is_whole": not found.count,
            "rows": [{"kind": kind, **total._asdict()} for kind, total in self.totals.items()],
            "findings": [
                {"kind": kind, "count": found.count[kind], "first": found.first[kind]} for kind in found.count
            ],
        }
