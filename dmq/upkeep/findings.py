"""What a look through a store found, bounded however much is wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

SHOWN_MAX = 10  # findings of a kind that are told in words


class Total(NamedTuple):
    """Rows of one kind, and the bytes of their keys and values."""

    rows: int = 0
    size_bytes: int = 0


@dataclass(slots=True)
class Findings:
    """What is wrong: how often by kind, and the first few in words."""

    count: Counter[str] = field(default_factory=Counter)
    first: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, text: str) -> None:
        """Take one in."""
        self.count[kind] += 1
        shown = self.first.setdefault(kind, [])
        if len(shown) < SHOWN_MAX:
            shown.append(text)


class Checked(NamedTuple):
    """What a store was found to be."""

    path: Path
    totals: dict[str, Total]
    findings: Findings

    def as_json(self) -> dict[str, object]:
        """Return it as JSON values."""
        found = self.findings
        return {
            "path": str(self.path),
            "is_whole": not found.count,
            "rows": [{"kind": kind, **total._asdict()} for kind, total in self.totals.items()],
            "findings": [
                {"kind": kind, "count": found.count[kind], "first": found.first[kind]} for kind in found.count
            ],
        }
