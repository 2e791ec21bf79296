"""Summary of a report of bounded size, for programs that show the newest audit: consoles and monitors.

Keys are those of docs/reference/trail.md; it depends only on the report and its findings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from spark_audit.report import text
from spark_audit.report.sections.findings import KINDS, UNKNOWN_KIND, chosen, weight
from spark_audit.report.windows import COUNTS, Row, WindowTally, whole
from spark_audit.schema import FORMAT

HOURS_MAX = 14 * 24
FINDINGS_MAX = 100
GAPS_MAX = 100
_KINDS_MAX = 50
_NAME_CHARS_MAX = 300  # of cells, topics, groups and ids: as long as they may be
_TEXT_CHARS_MAX = 200
_HOUR_MS = 3_600_000


def summary(report: Row, findings: Sequence[Row]) -> dict[str, Any]:
    """Return the verdict, the hours up to the watermark, the findings by kind, the worst findings, and the gaps."""
    times, counted = report.get("range") or {}, report.get("findings") or {}
    gaps = [
        {"cell": _name(cell.get("cell"))}
        | {key: gap.get(key) for key in ("first", "last", "after_ms", "before_ms")}
        | {"why": text.shortened(gap.get("why"), _TEXT_CHARS_MAX)}
        for cell in report.get("cells") or []
        for gap in cell.get("gaps") or []
    ]
    by_kind = counted.get("by_kind") or {}
    return {
        "format": FORMAT,
        "verdict": str(report.get("verdict")),
        "exit_code": whole(report, "exit_code"),
        "range": {key: whole(times, key) for key in ("from_ms", "to_ms", "watermark_ms")},
        "events": sum(whole(cell, "events") for cell in report.get("cells") or []),
        "cells": len(report.get("cells") or []),
        "hours": _hours(report),
        "kinds": [_kind(kind, by_kind[kind]) for kind in sorted(by_kind, key=weight)[:_KINDS_MAX]],
        "findings_total": whole(counted, "total"),
        "findings": [_finding(each) for each in chosen(findings)[:FINDINGS_MAX]],
        "gaps_total": len(gaps),
        "gaps": gaps[:GAPS_MAX],
    }


def _hours(report: Row) -> list[dict[str, Any]]:
    """Return the hours with messages, by due time, up to the hour of the watermark."""
    tallies: defaultdict[int, WindowTally] = defaultdict(WindowTally)
    for row in report.get("scheduled") or []:
        tallies[whole(row, "window_start_ms") // _HOUR_MS].add(row)
    last = whole(report.get("range") or {}, "watermark_ms") // _HOUR_MS
    return [
        {"start_ms": hour * _HOUR_MS, "state": tallies[hour].state.name.lower()}
        | {key: tallies[hour][key] for key in COUNTS}
        | {"lateness_max_ms": tallies[hour].worst_ms.get("lateness_max_ms", 0)}
        for hour in sorted(tallies)
        if last - HOURS_MAX < hour <= last
    ]


def _kind(kind: str, number: int) -> dict[str, Any]:
    css, meaning = KINDS.get(kind, UNKNOWN_KIND)
    name = text.shortened(kind, _TEXT_CHARS_MAX)
    return {"kind": name, "level": css.removeprefix("s-"), "meaning": meaning, "count": number}


def _finding(finding: Row) -> dict[str, Any]:
    css, _ = KINDS.get(str(finding.get("kind")), UNKNOWN_KIND)
    return {
        "kind": text.shortened(finding.get("kind"), _TEXT_CHARS_MAX),
        "level": css.removeprefix("s-"),
        **{key: _name(finding.get(key)) for key in ("cell", "topic", "group", "message_id")},
        "due_ms": finding.get("due_ms"),
        "detail": text.shortened(finding.get("detail") or "", _TEXT_CHARS_MAX),
    }


def _name(value: object) -> str:
    return str(value or "")[:_NAME_CHARS_MAX]
