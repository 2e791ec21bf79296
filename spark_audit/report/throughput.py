"""What was due in each window against what was fired in it, stacked by topic."""

from __future__ import annotations

from spark_audit.report import chart, text
from spark_audit.report.chart import Linear, Plot
from spark_audit.report.markup import Child, Markup, el, joined, number, shortened
from spark_audit.report.windows import Grid, Row, Tally, whole

TOPICS_MAX = 7
LABEL_MAX = 48
_LETTERS = "ABCDEFG"
_REST = (
    ("gone", ("cancelled", "expired"), "cancelled or expired"),
    ("wait", ("pending",), "not due yet, still waits"),
    ("bad", ("overdue", "lost", "inconclusive"), "overdue, lost or inconclusive"),
)
_PLOT = Plot(height=250)
_AT_ONCE = Plot(height=64)


def throughput(report: Row, grid: Grid) -> Markup:
    """Return the section: bars of what was fired, by topic; on top what was due and was not; an outline of all due."""
    name, heading = "throughput", "Throughput: due against fired"
    axis = grid.axis
    lead = (
        f"One bar per {text.duration(axis.column_ms)} of delivery time{_merged(grid)}. The line is what was due; the "
        "bar is what was fired, by topic, and above it what was not. Where the bar reaches the line the window adds up."
    )
    if not (grid.total["scheduled"] or grid.total["accepted_at_once"]):
        return chart.figure(name, heading, "", chart.nothing("No messages in this range."))
    topics = grid.largest(TOPICS_MAX)
    others = sorted(set(grid.topics) - set(topics))
    parts: list[Child] = []
    if grid.total["scheduled"]:
        parts += [_bars(report, grid, topics, others), _legend(grid, topics, others)]
    else:
        parts.append(chart.nothing("No message waited for a delivery time."))
    if grid.total["accepted_at_once"]:
        parts.append(_at_once(grid))
    if grid.outside["scheduled"]:
        parts.append(
            el("p", f"{text.count(grid.outside['scheduled'])} more are due outside this picture.", class_="note")
        )
    parts.append(chart.folded("The figures as a table", _table(grid)))
    return chart.figure(name, heading, lead, *parts)


def _merged(grid: Grid) -> str:
    return f" ({grid.axis.windows_each} windows)" if grid.axis.windows_each > 1 else ""


def _bars(report: Row, grid: Grid, topics: list[str], others: list[str]) -> Markup:
    axis, plot = grid.axis, _PLOT
    top = max((tally["scheduled"] for tally in grid.columns.values()), default=0)
    fired = max((_stacked(tally) for tally in grid.columns.values()), default=0)
    scale = Linear.to(max(top, fired))
    paths: dict[str, list[str]] = {}
    letters: dict[str, tuple[float, float, float]] = {}
    outline: list[str] = []
    hits: list[Child] = []
    width = plot.width / axis.columns
    inset = min(1.5, width * 0.12)
    for column in range(axis.columns):
        tally = grid.columns.get(column, Tally())
        x = plot.x_of(column, axis)
        layers = [
            *((f"t{place}", grid.merged([topic], column)["fired"]) for place, topic in enumerate(topics)),
            ("t-rest", grid.merged(others, column)["fired"]),
            *((css, sum(tally[key] for key in keys)) for css, keys, _ in _REST),
        ]
        base = 0
        for css, height in layers:
            if not height:
                continue
            y, bottom = plot.y_of(scale.part(base + height)), plot.y_of(scale.part(base))
            shape = f"M{number(x + inset)} {number(bottom)}V{number(y)}H{number(x + width - inset)}V{number(bottom)}Z"
            paths.setdefault(css, []).append(shape)
            if bottom - y > letters.get(css, (0, 0, 0.0))[2]:
                letters[css] = (x + width / 2, (y + bottom) / 2 + 4, bottom - y)
            base += height
        due_y = number(plot.y_of(scale.part(tally["scheduled"])))
        outline.append(f"{'M' if not outline else 'L'}{number(x)} {due_y}H{number(x + width)}")
        if tally["scheduled"] or tally["accepted_at_once"]:
            hits.append(chart.hover(x, plot.top, width, plot.height, _words(grid, column, tally, topics)))
    content = [
        chart.value_axis(plot, scale, unit="messages"),
        *(el("path", d="".join(shapes), class_=css) for css, shapes in sorted(paths.items())),
        *(
            el("text", _LETTERS[place], x=x, y=y, class_="letter on-topic", text_anchor="middle")
            for place in range(len(topics))
            for x, y, height in [letters.get(f"t{place}", (0.0, 0.0, 0.0))]
            if height > 13 and width > 9
        ),
        el("path", d="".join(outline), class_="due"),
        chart.time_axis(plot, axis, has_grid=False),
        chart.watermark(plot, axis, whole(report.get("range") or {}, "watermark_ms")),
        el("g", *hits, class_="hits"),
    ]
    described = (
        f"{text.count(grid.total['scheduled'])} messages due, {text.count(grid.total['fired'])} fired. "
        "The table below has the figures."
    )
    return chart.svg(
        "throughput-bars", "Messages due and fired over time, UTC", described, plot.bottom + 38, joined(content)
    )


def _stacked(tally: Tally) -> int:
    return tally["fired"] + sum(tally[key] for _, keys, _ in _REST for key in keys)


def _words(grid: Grid, column: int, tally: Tally, topics: list[str]) -> str:
    axis = grid.axis
    lines = [
        text.span(axis.start_of(column), axis.start_of(column + 1)),
        f"due {text.count(tally['scheduled'])}, fired {text.count(tally['fired'])}",
    ]
    lines += [f"{words}: {text.count(total)}" for _, keys, words in _REST if (total := sum(tally[key] for key in keys))]
    lines += [
        f"{shortened(topic, LABEL_MAX)}: {text.count(part['fired'])} of {text.count(part['scheduled'])}"
        for topic in topics
        if (part := grid.fields.get((topic, column))) is not None and part["scheduled"]
    ]
    if tally["accepted_at_once"]:
        lines.append(f"accepted at once: {text.count(tally['accepted_at_once'])}")
    return "\n".join(lines)


def _legend(grid: Grid, topics: list[str], others: list[str]) -> Markup:
    entries = [
        (f"t{place}", _LETTERS[place], shortened(topic, LABEL_MAX))
        for place, topic in enumerate(topics)
        if grid.topics[topic]["fired"]
    ]
    if others:
        entries.append(("t-rest", "", f"{text.plural(len(others), 'other topic')}"))
    entries += [(css, "", words) for css, keys, words in _REST if any(grid.total[key] for key in keys)]
    return chart.legend([*entries, ("due", "", "all that was due")])


def _at_once(grid: Grid) -> Markup:
    axis, plot = grid.axis, _AT_ONCE
    scale = Linear.to(max(tally["accepted_at_once"] for tally in grid.columns.values()) if grid.columns else 0)
    shapes, hits = [], []
    width = plot.width / axis.columns
    for column, tally in sorted(grid.columns.items()):
        if not (accepted := tally["accepted_at_once"]):
            continue
        x, y = plot.x_of(column, axis), plot.y_of(scale.part(accepted))
        shapes.append(
            f"M{number(x + 0.5)} {number(plot.bottom)}V{number(y)}H{number(x + width - 0.5)}V{number(plot.bottom)}Z"
        )
        words = (
            f"{text.span(axis.start_of(column), axis.start_of(column + 1))}\naccepted at once: {text.count(accepted)}"
        )
        hits.append(chart.hover(x, plot.top, width, plot.height, words))
    content = [
        chart.value_axis(plot, Linear(scale.top, scale.top), unit="messages"),
        el("path", d="".join(shapes), class_="t-once"),
        chart.time_axis(plot, axis, has_grid=False),
        el("g", *hits, class_="hits"),
    ]
    described = (
        f"{text.count(grid.total['accepted_at_once'])} messages had no delivery time and went to their queue at once."
    )
    heading = el("h3", "Accepted at once")
    note = el("p", f"{described} By the time they were accepted.", class_="note")
    drawing = chart.svg(
        "at-once-bars", "Messages accepted at once over time, UTC", described, plot.bottom + 38, joined(content)
    )
    return joined([heading, note, drawing])


def _table(grid: Grid) -> Markup:
    keys = (
        "accepted_at_once",
        "scheduled",
        "fired",
        "cancelled",
        "expired",
        "pending",
        "overdue",
        "lost",
        "inconclusive",
    )
    rows = [
        [text.minute(grid.axis.start_of(column)), *(text.count(tally[key]) for key in keys)]
        for column, tally in sorted(grid.columns.items())
    ]
    headings = ["from (UTC)", *(key.replace("_", " ") for key in keys)]
    return chart.table(headings, rows, caption=f"Messages per {text.duration(grid.axis.column_ms)}")
