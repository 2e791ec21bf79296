"""Throughput section: messages due and messages fired in each window, stacked by topic."""

from __future__ import annotations

from typing import Any

from spark_audit.report import chart, text
from spark_audit.report.look import MarkStyle
from spark_audit.report.table import ReportTable
from spark_audit.report.windows import Grid, Row, WindowTally, whole

TOPICS_MAX = 7
LABEL_MAX = 48
_LETTERS = "ABCDEFG"
_NOT_FIRED = (
    (MarkStyle("gone", "cancelled or expired"), ("cancelled", "expired")),
    (MarkStyle("wait", "not due yet, pending", is_hatched=True), ("pending",)),
    (MarkStyle("bad", "overdue, lost or inconclusive", is_hatched=True), ("overdue", "lost", "inconclusive")),
)
_HEIGHT = 250
_KEYS = (
    "accepted_at_once", "scheduled", "fired", "cancelled", "expired", "pending", "overdue", "lost", "inconclusive",
)  # fmt: skip


def throughput(report: Row, grid: Grid) -> dict[str, Any]:
    """Return bars of fired messages by topic, with the unfired due messages on top, and an outline of all due
    messages.
    """
    looks = {
        topic: MarkStyle(f"t{place}", text.shortened(topic, LABEL_MAX), _LETTERS[place])
        for place, topic in enumerate(grid.largest(TOPICS_MAX))
    }
    others = sorted(set(grid.topics) - set(looks))
    rest = MarkStyle("rest", text.plural(len(others), "other topic"))
    legend = [look for topic, look in looks.items() if grid.topics[topic]["fired"]]
    legend += [rest] if others else []
    legend += [look for look, keys in _NOT_FIRED if any(grid.total[key] for key in keys)]
    rows = [
        [text.minute(grid.axis.start_of(column)), *(tally[key] for key in _KEYS)]
        for column, tally in sorted(grid.columns.items())
    ]
    headings = ["from (UTC)", *(key.replace("_", " ") for key in _KEYS)]
    return {
        "bars": _bars(report, grid, looks, others, rest) if grid.total["scheduled"] else None,
        "legend": [*legend, MarkStyle("due", "all that was due", dash=())],
        "at_once": _at_once(grid) if grid.total["accepted_at_once"] else None,
        "figures": ReportTable(f"Messages per {text.duration(grid.axis.column_ms)}", headings, rows),
    }


def _bars(report: Row, grid: Grid, looks: dict[str, MarkStyle], others: list[str], rest: MarkStyle) -> chart.Chart:
    axis = grid.axis
    bars: chart.Marks = []
    due: chart.Marks = []
    hits: chart.Marks = []
    tallest: dict[str, dict[str, Any]] = {}
    for column in range(axis.columns):
        tally = grid.columns.get(column, WindowTally())
        place = axis.place(column)
        layers = [
            *((look, grid.merged([topic], column)["fired"]) for topic, look in looks.items()),
            (rest, grid.merged(others, column)["fired"]),
            *((look, sum(tally[key] for key in keys)) for look, keys in _NOT_FIRED),
        ]
        base = 0
        for look, height in layers:
            if height:
                bars.append(place | {"y": base, "y2": base + height, "fill": look.fill})
                if look.letter and height > tallest.get(look.letter, {"height": 0})["height"]:
                    middle = {"x": (place["x"] + place["x2"]) // 2, "y": base + height / 2}
                    tallest[look.letter] = middle | {"look": look, "height": height}
            base += height
        due.append({"x": place["x"], "y": tally["scheduled"]})
        if tally["scheduled"] or tally["accepted_at_once"]:
            hits.append(place | {"words": _words(grid, column, tally, looks)})
    due.append({"x": axis.to_ms, "y": due[-1]["y"]})
    top = max(*(bar["y2"] for bar in bars), *(point["y"] for point in due))
    return chart.drawn(
        "throughput-bars",
        "Messages due and fired over time, UTC",
        f"{text.count(grid.total['scheduled'])} messages due, {text.count(grid.total['fired'])} fired. "
        "The table below has the figures.",
        x=chart.over_time(axis),
        y=chart.amount(top, "messages"),
        layers=[
            chart.boxes(bars),
            chart.letters([each for each in tallest.values() if each["height"] * _HEIGHT > 15 * top]),
            chart.line(due, "due", interpolate="step-after", strokeWidth=1.6),
            *chart.watermark(axis, whole(report.get("range") or {}, "watermark_ms")),
            chart.fields(hits),
        ],
        height=_HEIGHT,
    )


def _words(grid: Grid, column: int, tally: WindowTally, looks: dict[str, MarkStyle]) -> str:
    due = f"due {text.count(tally['scheduled'])}, fired {text.count(tally['fired'])}"
    lines = [grid.axis.words(column), due]
    lines += [
        f"{look.words}: {text.count(total)}" for look, keys in _NOT_FIRED if (total := sum(tally[key] for key in keys))
    ]
    lines += [
        f"{look.words}: {text.count(part['fired'])} of {text.count(part['scheduled'])}"
        for topic, look in looks.items()
        if (part := grid.fields.get((topic, column))) is not None and part["scheduled"]
    ]
    if tally["accepted_at_once"]:
        lines.append(f"accepted at once: {text.count(tally['accepted_at_once'])}")
    return "\n".join(lines)


def _at_once(grid: Grid) -> chart.Chart:
    axis = grid.axis
    bars: chart.Marks = []
    for column, tally in sorted(grid.columns.items()):
        if accepted := tally["accepted_at_once"]:
            words = f"{axis.words(column)}\naccepted at once: {text.count(accepted)}"
            bars.append(axis.place(column) | {"y": 0, "y2": accepted, "fill": "var(--t0)", "words": words})
    return chart.drawn(
        "at-once-bars",
        "Messages accepted at once over time, UTC",
        f"{text.count(grid.total['accepted_at_once'])} messages had no delivery time and went to their queue at once.",
        x=chart.over_time(axis),
        y=chart.amount(max((bar["y2"] for bar in bars), default=0), "messages", steps=1),
        layers=[chart.boxes(bars), chart.fields(bars)],
        height=64,
    )
