"""Topics against windows, coloured by the worst that happened there."""

from __future__ import annotations

from spark_audit.report import chart, text
from spark_audit.report.markup import Child, Markup, el, joined, shortened
from spark_audit.report.windows import Axis, Grid, Row, State, Tally, whole

TOPICS_MAX = 24
BAD_ROWS_MAX = 200
_LABEL_MAX = 30
_ROW = 19.0
_LEFT = 210.0
_SHOWN = (
    "scheduled",
    "fired",
    "cancelled",
    "expired",
    "pending",
    "overdue",
    "lost",
    "inconclusive",
    "late",
    "early",
    "duplicated",
)


def heat_map(report: Row, grid: Grid) -> Markup:
    """Return the section: the worst topics on top, the rest in one row, and all that is not clean as a table."""
    name, heading = "heatmap", "Where and when: topics by windows"
    if not grid.topics:
        return chart.figure(name, heading, "", chart.nothing("No topics in this range."))
    topics = grid.worst(TOPICS_MAX)
    if len(grid.topics) == TOPICS_MAX + 1:  # a row for one other topic is the topic's own row
        topics = grid.worst(TOPICS_MAX + 1)
    others = sorted(set(grid.topics) - set(topics))
    rows: list[tuple[str, list[str]]] = [(topic, [topic]) for topic in topics]
    if others:
        rows.append((f"{text.count(len(others))} other topics", others))
    lead = (
        f"Each field is one topic in {text.duration(grid.axis.column_ms)} and shows the worst in it; the topics in "
        "which most went wrong stand on top. Point at a field, or go there with Tab and the arrow keys."
    )
    used = {grid.merged(members, column).state for _, members in rows for column in range(grid.axis.columns)}
    entries = [(f"s-{state.css}", state.letter, state.word) for state in State if state in used]
    return chart.figure(
        name,
        heading,
        lead,
        _map(report, grid, rows),
        chart.legend(entries),
        chart.folded("What is not clean, as a table", _bad(grid)),
    )


def _map(report: Row, grid: Grid, rows: list[tuple[str, list[str]]]) -> Markup:
    axis = grid.axis
    plot = chart.Plot(left=_LEFT, top=16, width=chart.WIDTH - _LEFT - 16, height=_ROW * len(rows))
    width = plot.width / axis.columns
    gap = 1.0 if width > 5 else 0.4
    parts: list[Child] = []
    letters: list[Child] = []
    bad = 0
    for place, (label, members) in enumerate(rows):
        y = plot.top + place * _ROW
        short = shortened(label, _LABEL_MAX)
        title = el("title", label) if short != label else None
        parts.append(el("text", title, short, x=plot.left - 8, y=y + 13, class_="row-label", text_anchor="end"))
        fields: list[Child] = []
        for column in range(axis.columns):
            tally = grid.merged(members, column)
            state = tally.state
            if state is State.EMPTY:
                continue
            x = plot.x_of(column, axis)
            words = words_of(shortened(label, 80), axis, column, tally)
            fields.append(chart.hover(x, y, max(width - gap, 0.8), _ROW - 1.5, words, f"s-{state.css}"))
            if state.letter:
                bad += 1
            if state.letter and width > 6:
                centre = x + (width - gap) / 2
                letters.append(
                    el(
                        "text",
                        state.letter,
                        x=centre,
                        y=y + 13,
                        class_=f"letter in-s-{state.css}",
                        text_anchor="middle",
                    )
                )
        parts.append(el("g", *fields))
    described = (
        f"{text.plural(len(grid.topics), 'topic')} in {text.plural(axis.columns, 'column')} of "
        f"{text.duration(axis.column_ms)}; {text.plural(bad, 'field')} not clean. The table below names them."
    )
    content = [
        el("rect", x=plot.left, y=plot.top, width=plot.width, height=plot.height, class_="s-none"),
        el("g", *parts, class_="hits grid-keys"),
        el("g", *letters, class_="letters"),
        chart.time_axis(plot, axis, has_grid=False),
        chart.watermark(plot, axis, whole(report.get("range") or {}, "watermark_ms")),
    ]
    return chart.svg("heatmap-fields", "Verdict by topic and time, UTC", described, plot.bottom + 38, joined(content))


def words_of(label: str, axis: Axis, column: int, tally: Tally) -> str:
    """Return what a field says: topic, range, verdict, every count that is not 0, the worst lateness."""
    counts = [f"{key} {text.count(tally[key])}" for key in _SHOWN if tally[key]]
    if tally["accepted_at_once"]:
        counts.append(f"accepted at once {text.count(tally['accepted_at_once'])}")
    lines = [label, text.span(axis.start_of(column), axis.start_of(column + 1)), tally.state.word, ", ".join(counts)]
    if "lateness_max_ms" in tally.worst_ms:
        lines.append(f"latest by {text.duration(tally.worst_ms['lateness_max_ms'])}")
    return "\n".join(lines)


def _bad(grid: Grid) -> Markup:
    order = {State.LOST: 0, State.INCONCLUSIVE: 1, State.LATE: 2, State.FEW_LATE: 3}
    fields = sorted(
        (
            (order[tally.state], column, topic, tally)
            for (topic, column), tally in grid.fields.items()
            if tally.state in order
        ),
        key=lambda each: each[:3],
    )
    keys = ("lost", "inconclusive", "overdue", "late", "early", "duplicated", "scheduled")
    rows = [
        [
            shortened(topic, 80),
            text.minute(grid.axis.start_of(column)),
            tally.state.word,
            *(text.count(tally[key]) for key in keys),
        ]
        for _, column, topic, tally in fields[:BAD_ROWS_MAX]
    ]
    if not rows:
        return chart.nothing("Every window of every topic is clean.")
    kept = "" if len(fields) <= BAD_ROWS_MAX else f", the first {BAD_ROWS_MAX} of {text.count(len(fields))}"
    caption = f"Topics and times that are not clean{kept}"
    return chart.table(["topic", "from (UTC)", "verdict", *keys], rows, caption=caption, words=3)
