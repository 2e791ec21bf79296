"""Health section: the sequence range of every cell, with its gaps, runs, kills and snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spark_audit.report import chart, text
from spark_audit.report.look import MarkStyle
from spark_audit.report.table import ReportTable
from spark_audit.report.windows import Row, whole

CELLS_DRAWN_MAX = 24
GAPS_DRAWN_MAX = 300  # more are indistinguishable in a strip; the table lists the first ones
ROWS_MAX = 200
_RUN = MarkStyle("clean", "events there")
_GAP = MarkStyle("bad", "gap (at least a hair's breadth)", is_hatched=True)
_SNAPSHOT = MarkStyle("ink", "newest snapshot")
_WIDTH = 560
_HAIR = 4 / _WIDTH  # of a strip
_FIGURES = {"events": 90, "files": 150, "runs": 200, "kills": 250}


def health(report: Row) -> dict[str, Any]:
    """Return a strip per cell with its gaps to scale, a table of the cells, and a table of the gaps."""
    cells = sorted(report.get("cells") or [], key=_weight)
    gaps = [(cell, gap) for cell in cells for gap in cell.get("gaps") or []]
    rows = [
        [cell.get("cell"), whole(gap, "first"), whole(gap, "last"), _length(gap), gap.get("why")] for cell, gap in gaps
    ]
    return {
        "strips": _strips(cells[:CELLS_DRAWN_MAX]) if cells else None,
        "legend": [_RUN, _GAP, _SNAPSHOT],
        "left_out": max(0, len(cells) - CELLS_DRAWN_MAX),
        "missing": sum(_length(gap) for _, gap in gaps),
        "gaps": ReportTable(
            "Gaps", ["cell", "first missing", "last missing", "events", "why"], rows, rows_max=ROWS_MAX
        ),
        "cells": _table(cells),
    }


def _weight(cell: Row) -> tuple[int, int, str]:
    return (-sum(_length(gap) for gap in cell.get("gaps") or []), -whole(cell, "kills"), str(cell.get("cell")))


def _length(gap: Row) -> int:
    return max(0, whole(gap, "last") - whole(gap, "first") + 1)


def _strips(cells: Sequence[Row]) -> chart.Chart:
    marks: chart.Marks = []
    labels: chart.Marks = []
    for place, cell in enumerate(cells):
        marks += [mark | {"y": place} for mark in _strip(cell)]
        labels.append({"y": place, "px": -8, "label": text.shortened(_name(cell), 30)})
        labels += [
            {"y": place, "px": _WIDTH + right, "label": text.count(whole(cell, key))} for key, right in _FIGURES.items()
        ]
        labels.append({"y": place, "px": _WIDTH + 300, "label": "closed" if cell.get("is_closed") else "open"})
    heads: chart.Marks = [{"px": _WIDTH + right, "label": key} for key, right in {**_FIGURES, "end": 300}.items()]
    at = {"x": {"field": "px", "type": "quantitative", "scale": None}}
    return chart.drawn(
        "health-strips",
        "Cells of the trail and their gaps",
        f"{text.plural(len(cells), 'cell')}, each from its first to its last event. The tables below have the figures.",
        x={"field": "x", "type": "quantitative", "axis": None, "scale": {"domain": [0, 1]}},
        y=chart.places(len(cells), gap=0.3),
        layers=[
            chart.boxes(marks),
            chart.texts(labels, at, align="right"),
            chart.texts(heads, at | {"y": {"value": -8}}, align="right"),
        ],
        height=26 * len(cells),
        padding=(18, chart.WIDTH - 210 - _WIDTH, 6, 210),
    )


def _strip(cell: Row) -> chart.Marks:
    first, last = whole(cell, "first_sequence"), whole(cell, "last_sequence")
    length = max(1, last - first + 1)

    def mark(look: MarkStyle, sequence: int, share: float, words: str) -> dict[str, Any]:
        start = min(max(0.0, (sequence - first) / length), 1 - share)
        return {"x": start, "x2": start + share, "fill": look.fill, "words": words}

    covered = text.span(whole(cell, "first_at_ms"), whole(cell, "last_at_ms"))
    marks = [mark(_RUN, first, 1.0, f"{_name(cell)}\n{text.count(first)} to {text.count(last)}\n{covered}")]
    for gap in (cell.get("gaps") or [])[:GAPS_DRAWN_MAX]:
        numbers = f"{text.count(whole(gap, 'first'))} to {text.count(whole(gap, 'last'))}"
        words = f"gap {numbers}\n{text.shortened(gap.get('why'), 200)}"
        marks.append(mark(_GAP, whole(gap, "first"), min(1.0, max(_HAIR, _length(gap) / length)), words))
    if cell.get("snapshot_sequence") is not None:
        sequence = whole(cell, "snapshot_sequence")
        words = f"snapshot at {text.count(sequence)}\n{text.utc(cell.get('snapshot_at_ms'))}"
        marks.append(mark(_SNAPSHOT, sequence + 1, _HAIR, words))
    return marks


def _name(cell: Row) -> str:
    return text.shortened(f"{cell.get('cell')} ({cell.get('role')})", 80)


def _table(cells: Sequence[Row]) -> ReportTable:
    rows = [
        [
            cell.get("cell"),
            cell.get("role"),
            text.utc(cell.get("first_at_ms")),
            text.utc(cell.get("last_at_ms")),
            "yes" if cell.get("is_closed") else "no",
            "none"
            if cell.get("snapshot_sequence") is None
            else f"{text.count(whole(cell, 'snapshot_sequence'))} at {text.utc(cell.get('snapshot_at_ms'))}",
            *(whole(cell, key) for key in ("first_sequence", "last_sequence", *_FIGURES)),
            len(cell.get("gaps") or []),
        ]
        for cell in cells
    ]
    headings = [
        "cell", "role", "first event", "last event", "closed in order", "newest snapshot", "first", "last", *_FIGURES,
        "gaps",
    ]  # fmt: skip
    return ReportTable("Cells", headings, rows, words=6, rows_max=ROWS_MAX)
