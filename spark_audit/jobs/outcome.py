"""Outcome of an audit: report, findings and exit code, and the files that they are written to."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from spark_audit.engines import Row
from spark_audit.jobs.health import CellState, Finding
from spark_audit.jobs.options import Options
from spark_audit.rules.findings import COLUMNS, HISTORY
from spark_audit.schema import EXIT_CODES, FORMAT

_DUPLICATES = ("DUPLICATE_ACCEPT", "DUPLICATE_DELIVERY", "DUPLICATE_EXIT")


@dataclass(frozen=True, slots=True)
class AuditOutcome:
    """Result of an audit. ``figures`` describe the run and differ between runs."""

    report: dict[str, Any]
    findings: list[Finding]
    figures: dict[str, Any]

    @property
    def exit_code(self) -> int:
        """0 clean, 10 late, 20 lost, 30 inconclusive, 40 inconsistent."""
        code: int = self.report["exit_code"]
        return code


def make_outcome(  # noqa: PLR0917 - the parts of a report, each once
    options: Options,
    cells: Sequence[CellState],
    watermark_ms: int,
    tables: Mapping[str, list[dict[str, Any]]],
    own: Sequence[Finding],
    listed: Sequence[Row],
    by_kind: Mapping[tuple[str, str], int],
    figures: dict[str, Any],
) -> AuditOutcome:
    """Assemble the report. ``own`` are findings about cells; ``listed`` and ``by_kind`` are about messages."""
    counted = Counter(by_kind)
    counted.update((each["kind"], each["severity"]) for each in own)
    findings = sorted([*own, *(_plain(row) for row in listed)], key=_order)[: options.findings_max]
    verdict = _verdict(counted, options)
    kinds: Counter[str] = Counter()
    for (kind, _), count in counted.items():
        kinds[kind] += count
    report = {
        "format": FORMAT,
        "range": {
            "from_ms": options.from_ms
            if options.from_ms is not None
            else min((c.first_at_ms for c in cells), default=0),
            "to_ms": options.to_ms if options.to_ms is not None else watermark_ms,
            "watermark_ms": watermark_ms,
        },
        "window_ms": options.window_ms,
        "options": options.reported(),
        "verdict": verdict,
        "exit_code": EXIT_CODES[verdict],
        "cells": [_cell(cell) for cell in cells],
        **tables,
        "findings": {"total": counted.total(), "listed": len(findings), "by_kind": dict(kinds)},
    }
    return AuditOutcome(report, findings, figures)


def write_outcome(outcome: AuditOutcome, out: Path) -> None:
    """Write report.json, findings.csv, findings.jsonl, run.json, report.html and summary.json into a local directory.

    The summary is the last one: if it is there, the others are complete. During the run there is none.
    """
    from spark_audit.report import html, summary

    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.json").unlink(missing_ok=True)
    (out / "report.json").write_text(_json(outcome.report), encoding="utf-8")
    with (out / "findings.jsonl").open("w", encoding="utf-8", newline="\n") as lines:
        for each in outcome.findings:
            ordered = {name: each[name] for name in (*COLUMNS, "history")}
            lines.write(json.dumps(ordered, ensure_ascii=False) + "\n")
    with (out / "findings.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow((*COLUMNS, "history"))
        for each in outcome.findings:
            events = "; ".join(f"{one['kind']}@{one['sequence']}/{one['at_ms']}" for one in each["history"])
            table.writerow(["" if each[name] is None else each[name] for name in COLUMNS] + [events])
    (out / "run.json").write_text(_json(outcome.figures), encoding="utf-8")
    html.write_html(outcome.report, outcome.findings, out / "report.html")
    part = out / "summary.json.part"
    part.write_text(json.dumps(summary.summary(outcome.report, outcome.findings), ensure_ascii=False), encoding="utf-8")
    part.replace(out / "summary.json")


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _plain(row: Row) -> Finding:
    made = {name: row[name] for name in COLUMNS}
    made["history"] = [{name: event[name] for name in HISTORY} for event in row["history"] or []]
    return made


def _order(found: Finding) -> tuple[Any, ...]:
    names = ("kind", "cell", "topic", "group", "message_id")
    numbers = (-1 if found[name] is None else found[name] for name in ("entry", "window_start_ms"))
    return (*(found[name] or "" for name in names), *numbers, found["rule"], found["detail"])


def _verdict(counted: Mapping[tuple[str, str], int], options: Options) -> str:
    """Return the verdict: the worst severity, else the worst kind of finding above its limit."""
    severities = {severity for (_, severity), count in counted.items() if count}
    for worst in ("inconsistent", "lost", "inconclusive"):
        if worst in severities:
            return worst
    kinds: Counter[str] = Counter()
    for (kind, _), count in counted.items():
        kinds[kind] += count
    duplicates = sum(kinds[kind] for kind in _DUPLICATES)
    is_late = kinds["LATE"] > options.late_max or kinds["EARLY"] or kinds["OVERDUE"]
    return "late" if is_late or duplicates > options.duplicates_max else "clean"


def _cell(cell: CellState) -> dict[str, Any]:
    return {
        "cell": cell.cell,
        "role": cell.role,
        "first_sequence": cell.first,
        "last_sequence": cell.last,
        "events": cell.events,
        "files": cell.files,
        "runs": cell.runs,
        "kills": cell.kills,
        "first_at_ms": cell.first_at_ms,
        "last_at_ms": cell.last_at_ms,
        "is_closed": cell.is_closed,
        "snapshot_sequence": cell.snapshot.sequence if cell.snapshot else None,
        "snapshot_at_ms": cell.snapshot.taken_ms if cell.snapshot else None,
        "gaps": [
            {"first": gap.first, "last": gap.last, "why": gap.why, "after_ms": after_ms, "before_ms": before_ms}
            for gap, (after_ms, before_ms) in zip(cell.gaps, chain(cell.gap_times, repeat((None, None))), strict=False)
        ],
    }
