"""Trail health: every cell's numbers from first to last, its gaps, runs, kills and snapshots."""

from __future__ import annotations

from spark_audit.report import chart, text
from spark_audit.report.chart import Plot
from spark_audit.report.markup import Child, Markup, el, joined, shortened
from spark_audit.report.windows import Row, whole

CELLS_DRAWN_MAX = 24
ROWS_MAX = 200
_ROW = 26.0


def health(report: Row) -> Markup:
    """Return the section: a strip per cell with its gaps to scale, a table of the cells, a table of the gaps."""
    name, heading = "health", "Trail health"
    cells = sorted(report.get("cells") or [], key=_weight)
    if not cells:
        return chart.figure(name, heading, "", chart.nothing("There is no cell in this trail."))
    gaps = [(cell, gap) for cell in cells for gap in cell.get("gaps") or []]
    missing = sum(_length(gap) for _, gap in gaps)
    lead = (
        "Each cell numbers its events 1, 2, 3, ... A whole strip is a whole trail; nothing can be said of what "
        f"happened in a gap. {text.plural(len(gaps), 'gap')}, {text.plural(missing, 'event')} missing."
    )
    entries = [
        ("h-run", "", "events there"),
        ("bad", "", "gap (at least a hair's breadth)"),
        ("h-snap", "", "newest snapshot"),
    ]
    parts: list[Child] = [_strips(cells[:CELLS_DRAWN_MAX]), chart.legend(entries)]
    if len(cells) > CELLS_DRAWN_MAX:
        parts.append(
            el("p", f"{text.plural(len(cells) - CELLS_DRAWN_MAX, 'more cell')} in the table only.", class_="note")
        )
    if gaps:
        rows = [
            [
                shortened(str(cell.get("cell")), 60),
                text.count(whole(gap, "first")),
                text.count(whole(gap, "last")),
                text.count(_length(gap)),
                shortened(str(gap.get("why")), 200),
            ]
            for cell, gap in gaps
        ]
        headings = ["cell", "first missing", "last missing", "events", "why"]
        caption = f"Gaps{_cut(len(rows))}"
        parts.append(chart.table(headings, rows[:ROWS_MAX], caption=caption, css="gaps"))
    parts.append(chart.folded("The cells as a table", _table(cells)))
    return chart.figure(name, heading, lead, *parts)


def _weight(cell: Row) -> tuple[int, int, str]:
    return (-sum(_length(gap) for gap in cell.get("gaps") or []), -whole(cell, "kills"), str(cell.get("cell")))


def _length(gap: Row) -> int:
    return max(0, whole(gap, "last") - whole(gap, "first") + 1)


def _strips(cells: list[Row]) -> Markup:
    plot = Plot(left=210, top=18, width=560, height=_ROW * len(cells))
    columns = (
        (plot.right + 90, "events"),
        (plot.right + 150, "files"),
        (plot.right + 200, "runs"),
        (plot.right + 250, "kills"),
    )
    parts: list[Child] = [el("text", words, x=x, y=11, class_="tick", text_anchor="end") for x, words in columns]
    parts.append(el("text", "end", x=plot.right + 262, y=11, class_="tick", text_anchor="start"))
    for place, cell in enumerate(cells):
        y = plot.top + place * _ROW
        first, last = whole(cell, "first_sequence"), whole(cell, "last_sequence")
        length = max(1, last - first + 1)
        label = f"{cell.get('cell')} ({cell.get('role')})"
        parts.append(el("text", shortened(label, 30), x=plot.left - 8, y=y + 14, class_="row-label", text_anchor="end"))
        covered = text.span(whole(cell, "first_at_ms"), whole(cell, "last_at_ms"))
        words = f"{shortened(label, 80)}\n{text.count(first)} to {text.count(last)}\n{covered}"
        strip: list[Child] = [chart.hover(plot.left, y + 3, plot.width, 15, words, "h-run")]
        # a thousand gaps in a strip are one picture of gaps; the table has the first of them
        for gap in (cell.get("gaps") or [])[:300]:
            x = plot.left + plot.width * min(1.0, max(0.0, (whole(gap, "first") - first) / length))
            width = max(2.5, min(plot.right - x, plot.width * _length(gap) / length))
            numbers = f"{text.count(whole(gap, 'first'))} to {text.count(whole(gap, 'last'))}"
            said = f"gap {numbers}\n{shortened(str(gap.get('why')), 200)}"
            strip.append(chart.hover(min(x, plot.right - width), y + 1, width, 19, said, "bad edge"))
        if cell.get("snapshot_sequence") is not None:
            x = plot.left + plot.width * min(1.0, max(0.0, (whole(cell, "snapshot_sequence") - first + 1) / length))
            said = f"snapshot at {text.count(whole(cell, 'snapshot_sequence'))}\n{text.utc(cell.get('snapshot_at_ms'))}"
            strip.append(chart.hover(x - 2, y, 4, 21, said, "h-snap"))
        parts.append(el("g", *strip))
        figures = (whole(cell, "events"), whole(cell, "files"), whole(cell, "runs"), whole(cell, "kills"))
        for (x, head), value in zip(columns, figures, strict=True):
            words = text.count(value) if value < 10_000_000 else text.brief(value)
            css = "tick strong" if head == "kills" and value else "tick"
            parts.append(el("text", words, x=x, y=y + 14, class_=css, text_anchor="end"))
        end = "closed" if cell.get("is_closed") else "open"
        parts.append(el("text", end, x=plot.right + 262, y=y + 14, class_="tick", text_anchor="start"))
    described = (
        f"{text.plural(len(cells), 'cell')}, each from its first to its last event. The tables below have the figures."
    )
    content = el("g", joined(parts), class_="hits")
    return chart.svg("health-strips", "Cells of the trail and their gaps", described, plot.bottom + 6, content)


def _table(cells: list[Row]) -> Markup:
    rows: list[list[Child]] = [
        [
            shortened(str(cell.get("cell")), 80),
            str(cell.get("role")),
            text.utc(cell.get("first_at_ms")),
            text.utc(cell.get("last_at_ms")),
            "yes" if cell.get("is_closed") else "no",
            "none"
            if cell.get("snapshot_sequence") is None
            else f"{text.count(whole(cell, 'snapshot_sequence'))} at {text.utc(cell.get('snapshot_at_ms'))}",
            text.count(whole(cell, "first_sequence")),
            text.count(whole(cell, "last_sequence")),
            *(text.count(whole(cell, key)) for key in ("events", "files", "runs", "kills")),
            text.count(len(cell.get("gaps") or [])),
        ]
        for cell in cells
    ]
    headings = [
        "cell", "role", "first event", "last event", "closed in order", "newest snapshot", "first", "last", "events",
        "files", "runs", "kills", "gaps",
    ]  # fmt: skip
    return chart.table(headings, rows[:ROWS_MAX], caption=f"Cells{_cut(len(rows))}", words=6)


def _cut(rows: int) -> str:
    return "" if rows <= ROWS_MAX else f", the first {ROWS_MAX} of {text.count(rows)} (all are in report.json)"
