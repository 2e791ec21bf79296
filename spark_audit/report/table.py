"""A table of the page as data: what it is called, its headings, its cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spark_audit.report import text


@dataclass(frozen=True, slots=True)
class Table:
    """Rows whose first ``words`` columns are words and whose others are numbers; at most ``rows_max`` are shown."""

    name: str
    headings: Sequence[str]
    cells: Sequence[Sequence[object]]
    words: int = 1
    rows_max: int = 300

    @property
    def rows(self) -> Sequence[Sequence[object]]:
        """The rows that are shown."""
        return self.cells[: self.rows_max]

    @property
    def caption(self) -> str:
        """Its name, and what of it is not here."""
        if len(self.cells) <= self.rows_max:
            return self.name
        left_out = f"the first {self.rows_max} of {text.count(len(self.cells))} rows (all are in report.json)"
        return f"{self.name}, {left_out}"
