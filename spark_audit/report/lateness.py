"""How late messages were fired: percentiles over time, and the histogram. Both logarithmic."""

from __future__ import annotations

from collections import Counter

from spark_audit.report import chart, text
from spark_audit.report.chart import Log, Plot
from spark_audit.report.markup import Child, Markup, el, joined, number
from spark_audit.report.windows import Grid, Row, whole

_LINES = (
    ("lateness_p50_ms", "p50", "p50, the median"),
    ("lateness_p99_ms", "p99", "p99"),
    ("lateness_p999_ms", "p999", "p99.9"),
    ("lateness_max_ms", "max", "latest"),
)
_PLOT = Plot(height=230, width=968)
_BARS = Plot(height=190)


def lateness(report: Row, grid: Grid) -> Markup:
    """Return the section with both pictures and their tables."""
    name, heading = "lateness", "Lateness: fired after the delivery time"
    late_after_ms = whole(report.get("options") or {}, "late_after_ms")
    buckets = _buckets(report)
    if not any(tally.worst_ms for tally in grid.columns.values()) and not buckets:
        return chart.figure(name, heading, "", chart.nothing("Nothing was fired, so nothing was late."))
    worst = "the worst topic"
    if grid.axis.windows_each > 1:
        worst += " of the worst window"
    lead = (
        f"Percentiles per {text.duration(grid.axis.column_ms)} of delivery time, of {worst} in it: percentiles of "
        "parts cannot be added up. 1 ms and less lie on the bottom line."
    )
    return chart.figure(
        name,
        heading,
        lead,
        _lines(grid, late_after_ms),
        chart.legend((f"l-{css}", "", words) for _, css, words in _LINES),
        chart.folded("The percentiles as a table", _table(grid)),
        *_histogram(buckets, late_after_ms),
    )


def _lines(grid: Grid, late_after_ms: int) -> Markup:
    axis, plot = grid.axis, _PLOT
    top = max((value for tally in grid.columns.values() for value in tally.worst_ms.values()), default=1)
    scale = Log.to(max(top, 10))
    width = plot.width / axis.columns
    parts: list[Child] = [chart.value_axis(plot, scale, unit="lateness", is_duration=True)]
    if late_after_ms and scale.part(late_after_ms) < 1:
        y = plot.y_of(scale.part(late_after_ms))
        parts.append(el("line", x1=plot.left, y1=y, x2=plot.right, y2=y, class_="limit"))
        words = f"late: more than {text.duration(late_after_ms)}"
        parts.append(el("text", words, x=plot.left + 6, y=y - 4, class_="tick", text_anchor="start"))
    ends: list[tuple[float, str, str]] = []
    for key, css, words in _LINES:
        steps, dots = [], []
        before, last_y = -2, 0.0
        for column, tally in sorted(grid.columns.items()):
            if (value := tally.worst_ms.get(key)) is None:
                continue
            x, y = plot.x_of(column + 0.5, axis), plot.y_of(scale.part(value))
            steps.append(f"{'L' if column == before + 1 else 'M'}{number(x)} {number(y)}")
            if axis.columns <= 60:
                dots.append(el("circle", cx=x, cy=y, r=2, class_=f"l-{css}"))
            before = column
            last_y = y
        if steps:
            parts += [el("path", d="".join(steps), class_=f"l-{css}"), *dots]
            ends.append((last_y, css, words.partition(",")[0]))
    parts += [*_end_labels(ends, plot), chart.time_axis(plot, axis)]
    hits = [
        chart.hover(plot.x_of(column, axis), plot.top, width, plot.height, _words(grid, column))
        for column, tally in sorted(grid.columns.items())
        if tally.worst_ms
    ]
    parts.append(el("g", *hits, class_="hits"))
    described = f"The latest message was {text.duration(top)} late. The table below has the figures."
    return chart.svg(
        "lateness-lines", "Lateness percentiles over time, UTC", described, plot.bottom + 38, joined(parts)
    )


def _end_labels(ends: list[tuple[float, str, str]], plot: Plot) -> list[Markup]:
    labels = []
    lowest = plot.bottom + 14
    for end, css, words in sorted(ends, reverse=True):  # from the bottom up, so that none covers another
        lowest = min(end + 4, lowest - 13)
        labels.append(el("text", words, x=plot.right + 5, y=lowest, class_=f"end end-{css}", text_anchor="start"))
    return labels


def _words(grid: Grid, column: int) -> str:
    tally, axis = grid.columns[column], grid.axis
    lines = [text.span(axis.start_of(column), axis.start_of(column + 1))]
    lines += [f"{words}: {text.duration(tally.worst_ms[key])}" for key, _, words in _LINES if key in tally.worst_ms]
    return "\n".join([*lines, f"{text.count(tally['fired'])} fired, {text.count(tally['late'])} late"])


def _table(grid: Grid) -> Markup:
    rows = [
        [
            text.minute(grid.axis.start_of(column)),
            *(text.duration(tally.worst_ms.get(key)) for key, _, _ in _LINES),
            text.count(tally["late"]),
            text.count(tally["early"]),
        ]
        for column, tally in sorted(grid.columns.items())
        if tally.worst_ms
    ]
    headings = ["from (UTC)", "p50", "p99", "p99.9", "latest", "late", "early"]
    return chart.table(
        headings, rows, caption=f"Lateness per {text.duration(grid.axis.column_ms)}, the worst of its parts"
    )


def _buckets(report: Row) -> list[tuple[int, int]]:
    """Upper bounds in ms with their counts over all topics, -1 (no bound) last; empty ones between others stay."""
    sums: Counter[int] = Counter()
    for row in report.get("lateness") or []:
        sums[int(row.get("upper_ms", -1))] += whole(row, "count")
    bounds = sorted(sums, key=lambda upper: (upper < 0, upper))
    while bounds and not sums[bounds[-1]]:
        bounds.pop()
    return [(upper, sums[upper]) for upper in bounds]


def _histogram(buckets: list[tuple[int, int]], late_after_ms: int) -> list[Child]:
    if not buckets:
        return []
    plot = _BARS
    scale = Log.to(max(total for _, total in buckets) * 1.0, bottom=0.1)  # one message is a bar too
    whole_sum = sum(total for _, total in buckets)
    width = plot.width / max(len(buckets), 8)
    parts: list[Child] = [chart.value_axis(plot, scale, unit="messages, logarithmic")]
    rows: list[list[Child]] = []
    below = 0
    lower = 0
    for place, (upper, total) in enumerate(buckets):
        words = _bound(upper, lower)
        x = plot.left + place * width
        is_late = upper < 0 or (late_after_ms > 0 and upper > late_after_ms)
        if total:
            y = plot.y_of(scale.part(total))
            words_of = f"{words}\n{text.plural(total, 'message')}, {text.share(total, whole_sum)}"
            css = "late-bar" if is_late else "bar"
            parts.append(chart.hover(x + 2, y, width - 4, plot.bottom - y, words_of, css))
            label = text.count(total) if total < 10_000 and width > 36 else text.brief(total)
            parts.append(el("text", label, x=x + width / 2, y=y - 4, class_="tick", text_anchor="middle"))
        short = "more" if upper < 0 else f"{upper} ms" if upper < 1000 else f"{text.count(upper // 1000)} s"
        label = el("text", short, x=x + width / 2, y=plot.bottom + 16, class_="tick", text_anchor="middle")
        parts.append(label if width > 40 or place % 2 == 0 else None)
        below += total
        rows.append([words, text.count(total), text.share(total, whole_sum), text.share(below, whole_sum)])
        lower = upper
    axis = el("line", x1=plot.left, y1=plot.bottom, x2=plot.right, y2=plot.bottom, class_="axis")
    described = f"{text.count(whole_sum)} messages by lateness; the table below has the figures."
    content = el("g", joined([*parts, axis]), class_="hits")
    drawing = chart.svg("lateness-histogram", "Messages by lateness", described, plot.bottom + 24, content)
    entries = [("bar", "", "up to this lateness"), ("late-bar", "", f"late: more than {text.duration(late_after_ms)}")]
    headings = ["lateness", "messages", "share", "share so far"]
    figures = chart.table(headings, rows, caption="Messages by lateness")
    return [
        el("h3", "All messages fired, by lateness"),
        drawing,
        chart.legend(entries),
        chart.folded("The histogram as a table", figures),
    ]


def _bound(upper: int, lower: int) -> str:
    if upper < 0:
        return f"more than {text.duration(lower)}"
    return "in time, to the millisecond" if upper == 0 else f"up to {text.duration(upper)}"
