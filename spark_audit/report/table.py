"""Tables of the page as data: name, headings, cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spark_audit.report import text


@dataclass(frozen=True, slots=True)
class ReportTable:
    """Table whose first ``words`` columns are text and whose others are numbers; at most ``rows_max`` rows are
    shown.
    """

    name: str
    headings: Sequence[str]
    cells: Sequence[Sequence[object]]
    words: int = 1
    rows_max: int = 300

    @property
    def rows(self) -> Sequence[Sequence[object]]:
        """Rows that are shown."""
        return self.cells[: self.rows_max]

    @property
    def caption(self) -> str:
        """Name of the table, and the number of rows that are not shown."""
        if len(self.cells) <= self.rows_max:
            return self.name
        left_out = f"the first {self.rows_max} of {text.count(len(self.cells))} rows (all are in report.json)"
        return f"{self.name}, {left_out}"
