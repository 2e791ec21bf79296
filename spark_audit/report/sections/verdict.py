"""Verdict section at the top: the audited range and its result. Its explanation is in the template."""

from __future__ import annotations

from typing import Any

from spark_audit.report import text
from spark_audit.report.windows import Grid, Row, whole

# Kinds with one sentence each in the band, by severity.
_TOLD = (
    ("LOST", "message lost", "messages lost"),
    ("INCONCLUSIVE", "inconclusive", "inconclusive"),
    ("OVERDUE", "overdue", "overdue"),
    ("LATE", "late", "late"),
    ("EARLY", "early", "early"),
    ("DUPLICATE_DELIVERY", "delivered twice", "delivered twice"),
    ("DUPLICATE_ACCEPT", "accepted twice", "accepted twice"),
    ("DUPLICATE_EXIT", "left its place twice", "left their place twice"),
    ("TRAIL_GAP", "gap in the trail", "gaps in the trail"),
    ("FILE_MISSING", "file missing", "files missing"),
    ("UNPROVEN", "unproven", "unproven"),
    ("FILE_ALTERED", "file altered", "files altered"),
    ("RECORD_REPEATED", "number used twice", "numbers used twice"),
    ("ILLEGAL", "impossible order", "impossible orders"),
    ("ORPHAN", "without a beginning", "without a beginning"),
    ("LEDGER", "ledger that does not add up", "ledgers that do not add up"),
    ("RETIRED_CELL", "retired cell", "retired cells"),
    ("PUT_BACK", "restore of a store", "restores of stores"),
)


def band(report: Row, grid: Grid) -> dict[str, Any]:
    """Return the verdict, the findings, and the audited scope."""
    verdict = str(report.get("verdict"))
    kinds = (report.get("findings") or {}).get("by_kind") or {}
    spooled = sum(whole(row, "spooled") for row in report.get("spooled") or [])
    messages = grid.total["scheduled"] + grid.total["accepted_at_once"] + spooled
    return {
        "verdict": verdict,
        "exit_code": whole(report, "exit_code"),
        "is_empty": verdict == "clean" and not messages,
        "found": [text.plural(found, *words) for kind, *words in _TOLD if (found := whole(kinds, kind))],
        "facts": _facts(report, grid, spooled),
    }


def _facts(report: Row, grid: Grid, spooled: int) -> dict[str, str]:
    times, cells = report.get("range") or {}, report.get("cells") or []
    options = report.get("options") or {}
    daemons, spools = (sum(1 for cell in cells if cell.get("role") == role) for role in ("daemon", "spool"))
    events = sum(whole(cell, "events") for cell in cells)
    gaps = sum(len(cell.get("gaps") or []) for cell in cells)
    return {
        "Range": text.span(whole(times, "from_ms"), whole(times, "to_ms")),
        "Judged up to": f"{text.utc(whole(times, 'watermark_ms'))} (watermark)",
        "Cells": f"{text.count(len(cells))}: {text.plural(daemons, 'daemon')}, {text.plural(spools, 'spool')}",
        "Trail": f"{text.plural(events, 'event')}, {text.plural(gaps, 'gap')}",
        "Messages": f"{text.count(grid.total['scheduled'])} scheduled, "
        f"{text.count(grid.total['accepted_at_once'])} accepted at once, {text.count(spooled)} spooled; "
        f"{text.plural(len(grid.topics), 'topic')}",
        "Windows": f"{text.duration(whole(report, 'window_ms'))} each",
        "Late means": f"more than {text.duration(whole(options, 'late_after_ms'))} after the delivery time; allowed: "
        f"{text.count(whole(options, 'late_max'))} late, {text.count(whole(options, 'duplicates_max'))} duplicates",
        "Grace": f"{text.duration(whole(options, 'grace_ms'))} before a message counts as overdue or lost",
    }
