"""Windows for drawing: at most a few hundred columns of one or more windows each, with the counts of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from spark_audit.report import text
from spark_audit.report.look import MarkStyle

COLUMNS_MAX = 96
# One outlier, due in forty years, must not push all others into one column.
_SPAN_MAX_MS = 10 * 366 * 86_400_000
_MINUTE = 60_000
_NICE_MS = [
    *(minutes * _MINUTE for minutes in (1, 2, 5, 10, 15, 20, 30, 60, 120, 180, 240, 360, 480, 720)),
    *(days * 86_400_000 for days in (1, 2, 4, 7, 14, 28, 91, 182, 364)),
]
COUNTS = (
    "accepted_at_once", "scheduled", "fired", "cancelled", "expired", "pending", "overdue", "lost", "inconclusive",
    "late", "early", "duplicated",
)  # fmt: skip
PERCENTILES = ("lateness_p50_ms", "lateness_p99_ms", "lateness_p999_ms", "lateness_max_ms")
Row = Mapping[str, Any]


class WindowState(Enum):
    """State of a heat map field, from empty to the worst."""

    EMPTY = MarkStyle("field", "nothing")
    WAITING = MarkStyle("wait", "not due yet", is_hatched=True)
    CLEAN = MarkStyle("clean", "clean")
    FEW_LATE = MarkStyle("few", "late, early, overdue or twice: less than 1 %", "t")
    LATE = MarkStyle("late", "the same: 1 % and more", "T")
    INCONCLUSIVE = MarkStyle("unsure", "inconclusive", "?", is_hatched=True)
    LOST = MarkStyle("lost", "lost", "L")

    @property
    def look(self) -> MarkStyle:
        """Appearance of the field."""
        return self.value


def whole(row: Row, key: str) -> int:
    """Return a count of a row; a missing one is 0."""
    return int(row.get(key) or 0)


@dataclass(slots=True)
class WindowTally:
    """Sums of rows of ``scheduled``. Percentiles of several windows cannot be merged, so the worst is kept."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    worst_ms: dict[str, int] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Add the counts of one row."""
        for key in COUNTS:
            self.counts[key] += whole(row, key)
        for key in PERCENTILES:
            if (value := row.get(key)) is not None:
                self.worst_ms[key] = max(self.worst_ms.get(key, int(value)), int(value))

    def merge(self, part: WindowTally) -> None:
        """Add the counts of another tally."""
        self.add({**part.counts, **part.worst_ms})

    def __getitem__(self, key: str) -> int:
        return self.counts[key]

    @property
    def state(self) -> WindowState:
        """Worst state of any message counted here."""
        counts = self.counts
        if counts["lost"]:
            return WindowState.LOST
        if counts["inconclusive"]:
            return WindowState.INCONCLUSIVE
        if late := counts["late"] + counts["early"] + counts["duplicated"] + counts["overdue"]:
            return WindowState.LATE if late * 100 >= counts["scheduled"] else WindowState.FEW_LATE
        if counts["pending"] and 2 * counts["pending"] >= counts["scheduled"]:
            return WindowState.WAITING
        return WindowState.CLEAN if counts["scheduled"] or counts["accepted_at_once"] else WindowState.EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Columns of equal duration over the audited range."""

    from_ms: int
    column_ms: int
    columns: int
    window_ms: int

    @property
    def to_ms(self) -> int:
        """End of the last column."""
        return self.from_ms + self.columns * self.column_ms

    @property
    def windows_each(self) -> int:
        """Number of windows per column."""
        return max(1, self.column_ms // self.window_ms)

    def start_of(self, column: int) -> int:
        """Return the start of a column."""
        return self.from_ms + column * self.column_ms

    def place(self, column: int) -> dict[str, Any]:
        """Return the start and the end of a column as chart fields."""
        return {"x": self.start_of(column), "x2": self.start_of(column + 1)}

    def words(self, column: int) -> str:
        """Return the time range of a column as text."""
        return text.span(self.start_of(column), self.start_of(column + 1))

    def column_of(self, at_ms: int) -> int | None:
        """Return the column of a time; None outside the axis."""
        column = (at_ms - self.from_ms) // self.column_ms
        return column if 0 <= column < self.columns else None

    @classmethod
    def of(cls, report: Row) -> Axis:
        """Choose at most ``COLUMNS_MAX`` columns that cover the range, limited to the part that is sensible to draw."""
        window_ms = max(1, int(report.get("window_ms") or 600_000))
        times = report.get("range") or {}
        rows = sorted(whole(row, "window_start_ms") for row in report.get("scheduled") or [])
        watermark_ms = whole(times, "watermark_ms")
        from_ms, to_ms = whole(times, "from_ms"), whole(times, "to_ms")
        if from_ms <= 0 and rows:
            from_ms = rows[0]
        if from_ms <= 0:
            from_ms = max(0, min(watermark_ms, to_ms) - window_ms)
        past_ms = max(watermark_ms - from_ms, window_ms)
        if to_ms - from_ms > _SPAN_MAX_MS or to_ms <= from_ms:
            to_ms = min(from_ms + past_ms, from_ms + _SPAN_MAX_MS)
        if watermark_ms > from_ms and to_ms - watermark_ms > 2 * past_ms:  # mostly the future
            to_ms = watermark_ms + past_ms // 4
        column_ms = next(
            (nice for nice in [window_ms, *_NICE_MS] if _fits(nice, window_ms, from_ms, to_ms)),
            -(-(to_ms - from_ms) // (COLUMNS_MAX - 1) // window_ms) * window_ms,
        )
        start_ms = from_ms // column_ms * column_ms
        columns = max(1, -(-(to_ms - start_ms) // column_ms))
        return cls(from_ms=start_ms, column_ms=column_ms, columns=columns, window_ms=window_ms)


def _fits(column_ms: int, window_ms: int, from_ms: int, to_ms: int) -> bool:
    is_multiple = column_ms >= window_ms and column_ms % window_ms == 0
    return is_multiple and -(-to_ms // column_ms) - from_ms // column_ms <= COLUMNS_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Counts of scheduled messages by topic and column. ``outside`` counts messages due before or after the axis."""

    axis: Axis
    fields: Mapping[tuple[str, int], WindowTally]
    columns: Mapping[int, WindowTally]
    topics: Mapping[str, WindowTally]
    outside: WindowTally
    total: WindowTally

    @classmethod
    def of(cls, axis: Axis, rows: Iterable[Row]) -> Grid:
        """Add every row to its field, its column, its topic and the total."""
        counted: defaultdict[tuple[str, int | None], WindowTally] = defaultdict(WindowTally)
        for row in rows:
            counted[str(row.get("topic")), axis.column_of(whole(row, "window_start_ms"))].add(row)
        fields: dict[tuple[str, int], WindowTally] = {}
        columns: defaultdict[int, WindowTally] = defaultdict(WindowTally)
        topics: defaultdict[str, WindowTally] = defaultdict(WindowTally)
        outside, total = WindowTally(), WindowTally()
        for (topic, column), tally in counted.items():
            total.merge(tally)
            topics[topic].merge(tally)
            if column is None:
                outside.merge(tally)
            else:
                fields[topic, column] = tally
                columns[column].merge(tally)
        return cls(axis=axis, fields=fields, columns=dict(columns), topics=dict(topics), outside=outside, total=total)

    def largest(self, count: int) -> list[str]:
        """Return the topics with the most messages, at most ``count``."""
        return sorted(self.topics, key=lambda topic: (-self._size(topic), topic))[:count]

    def worst(self, count: int) -> list[str]:
        """Return at most ``count`` topics: those with the worst states first, then the largest."""

        def rank(topic: str) -> tuple[int, int, int, int, str]:
            tally = self.topics[topic]
            late = tally["late"] + tally["early"] + tally["duplicated"] + tally["overdue"]
            return (-tally["lost"], -tally["inconclusive"], -late, -self._size(topic), topic)

        return sorted(self.topics, key=rank)[:count]

    def merged(self, topics: Iterable[str], column: int) -> WindowTally:
        """Return the sum of several topics in one column."""
        tally = WindowTally()
        for topic in topics:
            if (part := self.fields.get((topic, column))) is not None:
                tally.merge(part)
        return tally

    def _size(self, topic: str) -> int:
        return self.topics[topic]["scheduled"] + self.topics[topic]["accepted_at_once"]
