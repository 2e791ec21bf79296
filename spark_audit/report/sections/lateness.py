"""Lateness section: percentiles over time, and the histogram. Both are logarithmic."""

from __future__ import annotations

from collections import Counter
from typing import Any

from spark_audit.report import chart, text
from spark_audit.report.look import MarkStyle
from spark_audit.report.table import ReportTable
from spark_audit.report.windows import Grid, Row, whole

_LINES = {
    "lateness_p50_ms": MarkStyle("l50", "p50, the median", dash=()),
    "lateness_p99_ms": MarkStyle("l99", "p99", dash=(6, 3)),
    "lateness_p999_ms": MarkStyle("l999", "p99.9", dash=(2, 3)),
    "lateness_max_ms": MarkStyle("lmax", "latest", dash=()),
}
_IN_TIME = MarkStyle("clean", "up to this lateness")


def lateness(report: Row, grid: Grid) -> dict[str, Any]:
    """Return both charts with their tables; a chart without data is None."""
    late_after_ms = whole(report.get("options") or {}, "late_after_ms")
    late = MarkStyle("late", f"late: more than {text.duration(late_after_ms)}", is_hatched=True)
    buckets = _buckets(report)
    whole_sum = sum(total for _, _, total in buckets)
    below = 0
    rows = []
    for lower, upper, total in buckets:
        below += total
        rows.append([_bound(lower, upper), total, text.share(total, whole_sum), text.share(below, whole_sum)])
    is_fired = any(tally.worst_ms for tally in grid.columns.values())
    return {
        "lines": _lines(grid, late_after_ms, late) if is_fired or buckets else None,
        "lines_legend": _LINES.values(),
        "percentiles": _percentiles(grid),
        "histogram": _histogram(buckets, whole_sum, late_after_ms, late) if buckets else None,
        "histogram_legend": [_IN_TIME, late],
        "figures": ReportTable("Messages by lateness", ["lateness", "messages", "share", "share so far"], rows),
    }


def _lines(grid: Grid, late_after_ms: int, late: MarkStyle) -> chart.Chart:
    axis = grid.axis
    found = {column: tally.worst_ms for column, tally in sorted(grid.columns.items()) if tally.worst_ms}
    top = max((value for worst_ms in found.values() for value in worst_ms.values()), default=1)
    hits: chart.Marks = [axis.place(column) | {"words": _words(grid, column)} for column in found]
    layers = []
    if 0 < late_after_ms < top:
        limit: chart.Marks = [{"y": late_after_ms, "label": late.words}]
        across, at_left = {"x": {"value": 0}, "x2": {"value": "width"}}, {"x": {"value": 6}}
        layers += [
            chart.rule(limit, across, stroke="var(--limit)", strokeDash=[7, 4], strokeWidth=1.5),
            chart.texts(limit, at_left, align="left", dy=-7),
        ]
    for key, look in _LINES.items():
        points: chart.Marks = [
            {"x": axis.start_of(column) + axis.column_ms // 2, "y": found.get(column, {}).get(key)}
            for column in range(axis.columns)
        ]
        point = {"fill": look.halo, "size": 14, "aria": False} if axis.columns <= 60 else False
        layers.append(chart.line(points, look.colour, strokeDash=look.dash, point=point))
    return chart.drawn(
        "lateness-lines",
        "Lateness percentiles over time, UTC",
        f"The latest message was {text.duration(top)} late. The table below has the figures.",
        x=chart.over_time(axis, has_grid=True),
        y=chart.durations(top, "lateness"),
        layers=[*layers, chart.fields(hits)],
        height=230,
    )


def _words(grid: Grid, column: int) -> str:
    tally = grid.columns[column]
    said = (f"{_LINES[key].words}: {text.duration(tally.worst_ms[key])}" for key in _LINES if key in tally.worst_ms)
    counts = f"{text.count(tally['fired'])} fired, {text.count(tally['late'])} late"
    return "\n".join([grid.axis.words(column), *said, counts])


def _percentiles(grid: Grid) -> ReportTable:
    rows = [
        [
            text.minute(grid.axis.start_of(column)),
            *(text.duration(tally.worst_ms.get(key)) for key in _LINES),
            tally["late"],
            tally["early"],
        ]
        for column, tally in sorted(grid.columns.items())
        if tally.worst_ms
    ]
    name = f"Lateness per {text.duration(grid.axis.column_ms)}, the worst of its parts"
    return ReportTable(name, ["from (UTC)", "p50", "p99", "p99.9", "latest", "late", "early"], rows)


def _buckets(report: Row) -> list[tuple[int, int, int]]:
    """Return lower bound, upper bound (ms; -1 if open) and count over all topics. Empty inner buckets are kept."""
    sums: Counter[int] = Counter()
    for row in report.get("lateness") or []:
        sums[int(row.get("upper_ms", -1))] += whole(row, "count")
    bounds = sorted(sums, key=lambda upper: (upper < 0, upper))
    while bounds and not sums[bounds[-1]]:
        bounds.pop()
    return [(lower, upper, sums[upper]) for lower, upper in zip([0, *bounds], bounds, strict=False)]


def _histogram(buckets: list[tuple[int, int, int]], whole_sum: int, late_after_ms: int, late: MarkStyle) -> chart.Chart:
    bars: chart.Marks = []
    for place, (lower, upper, total) in enumerate(buckets):
        is_late = upper < 0 or (late_after_ms > 0 and upper > late_after_ms)
        words = f"{_bound(lower, upper)}\n{text.plural(total, 'message')}, {text.share(total, whole_sum)}"
        short = "more" if upper < 0 else f"{upper} ms" if upper < 1000 else f"{text.count(upper // 1000)} s"
        bar = {"x": place, "y": 0.5, "y2": max(total, 0.5), "count": total, "label": short, "words": words}
        bars.append(bar | {"fill": (late if is_late else _IN_TIME).fill})
    filled = [bar for bar in bars if bar["count"]]
    domain = list(range(max(len(buckets), 8)))
    said = {"expr": "format(datum.count, datum.count < 10000 ? ',' : '.3~s')"}
    counted = {"y": {"field": "y2"}, "text": {"value": said}}
    return chart.drawn(
        "lateness-histogram",
        "Messages by lateness",
        f"{text.count(whole_sum)} messages by lateness; the table below has the figures.",
        x={"field": "x", "type": "ordinal", "axis": None, "scale": {"domain": domain, "paddingInner": 0.1}},
        y=chart.decades("y", max(total for *_, total in buckets), "messages, logarithmic"),
        layers=[
            chart.boxes(filled, x2={}),
            chart.texts(filled, counted, dy=-7),
            chart.texts(bars, {"y": {"value": "height"}}, dy=14),
        ],
        height=190,
        padding=(26, 16, 24, 64),
    )


def _bound(lower: int, upper: int) -> str:
    if upper < 0:
        return f"more than {text.duration(lower)}"
    return "in time, to the millisecond" if upper == 0 else f"up to {text.duration(upper)}"
