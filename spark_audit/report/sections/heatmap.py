"""Heat map of topics by window, coloured by the worst state in each."""

from __future__ import annotations

from typing import Any

from spark_audit.report import chart, text
from spark_audit.report.table import ReportTable
from spark_audit.report.windows import Axis, Grid, Row, WindowState, WindowTally, whole

TOPICS_MAX = 24
BAD_ROWS_MAX = 200
_LABEL_MAX = 30
_ROW = 19
_SHOWN = (
    "scheduled", "fired", "cancelled", "expired", "pending", "overdue", "lost", "inconclusive", "late", "early",
    "duplicated",
)  # fmt: skip
_BAD = (WindowState.LOST, WindowState.INCONCLUSIVE, WindowState.LATE, WindowState.FEW_LATE)
_BAD_KEYS = ("lost", "inconclusive", "overdue", "late", "early", "duplicated", "scheduled")


def heat_map(report: Row, grid: Grid) -> dict[str, Any]:
    """Return the worst topics on top, the rest in one row, and a table of all fields that are not clean."""
    topics = grid.worst(TOPICS_MAX)
    if len(grid.topics) == TOPICS_MAX + 1:  # a single other topic gets its own row
        topics = grid.worst(TOPICS_MAX + 1)
    others = sorted(set(grid.topics) - set(topics))
    rows: list[tuple[str, list[str]]] = [(topic, [topic]) for topic in topics]
    if others:
        rows.append((f"{text.count(len(others))} other topics", others))
    tallies = {
        (place, column): grid.merged(members, column)
        for place, (_, members) in enumerate(rows)
        for column in range(grid.axis.columns)
    }
    states = {tally.state for tally in tallies.values()}
    return {
        "fields": _map(report, grid, [label for label, _ in rows], tallies) if rows else None,
        "legend": [state.look for state in WindowState if state in states],
        "bad": _bad(grid),
    }


def _map(report: Row, grid: Grid, labels: list[str], tallies: dict[tuple[int, int], WindowTally]) -> chart.Chart:
    axis = grid.axis
    names: chart.Marks = [
        {"y": place, "label": text.shortened(label, _LABEL_MAX)} for place, label in enumerate(labels)
    ]
    ground: chart.Marks = [{"y": place, "fill": WindowState.EMPTY.look.fill} for place in range(len(labels))]
    marks: chart.Marks = []
    signs: chart.Marks = []
    for (place, column), tally in tallies.items():
        if tally.state is WindowState.EMPTY:
            continue
        at = axis.place(column) | {"y": place}
        words = _words(text.visible(labels[place]), axis, column, tally)
        marks.append(at | {"fill": tally.state.look.fill, "words": words})
        if tally.state.look.letter:
            signs.append({"x": (at["x"] + at["x2"]) // 2, "y": place, "look": tally.state.look})
    return chart.drawn(
        "heatmap-fields",
        "Verdict by topic and time, UTC",
        f"{text.plural(len(grid.topics), 'topic')} in {text.plural(axis.columns, 'column')} of "
        f"{text.duration(axis.column_ms)}; {text.plural(len(signs), 'field')} not clean. The table below names them.",
        x=chart.over_time(axis),
        y=chart.places(len(labels), gap=0),
        layers=[
            chart.boxes(ground, x={"value": 0}, x2={"value": "width"}),
            chart.texts(names, {"x": {"value": -8}}, align="right", fill="var(--ink)"),
            chart.boxes(marks),
            chart.letters(signs),
            *chart.watermark(axis, whole(report.get("range") or {}, "watermark_ms")),
        ],
        height=_ROW * len(labels),
        padding=(16, 16, 38, 210),
    )


def _words(label: str, axis: Axis, column: int, tally: WindowTally) -> str:
    """Return the tooltip of a field: topic, range, verdict, every count that is not 0, the worst lateness."""
    counts = [f"{key} {text.count(tally[key])}" for key in _SHOWN if tally[key]]
    if tally["accepted_at_once"]:
        counts.append(f"accepted at once {text.count(tally['accepted_at_once'])}")
    lines = [label, axis.words(column), tally.state.look.words, ", ".join(counts)]
    if "lateness_max_ms" in tally.worst_ms:
        lines.append(f"latest by {text.duration(tally.worst_ms['lateness_max_ms'])}")
    return "\n".join(lines)


def _bad(grid: Grid) -> ReportTable:
    fields = sorted(
        (_BAD.index(tally.state), column, topic)
        for (topic, column), tally in grid.fields.items()
        if tally.state in _BAD
    )
    rows = [
        [
            topic,
            text.minute(grid.axis.start_of(column)),
            _BAD[weight].look.words,
            *(grid.fields[topic, column][key] for key in _BAD_KEYS),
        ]
        for weight, column, topic in fields
    ]
    headings = ["topic", "from (UTC)", "verdict", *_BAD_KEYS]
    return ReportTable("Topics and times that are not clean", headings, rows, words=3, rows_max=BAD_ROWS_MAX)
