"""Findings section: a selection of at most 500, each with its collapsed history."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from spark_audit.report import text
from spark_audit.report.table import ReportTable
from spark_audit.report.windows import Row, whole

SHOWN_MAX = 500
EACH_KIND_MIN = 20  # a thousand losses must not hide a single altered file
HISTORY_ROWS_MAX = 6000  # of all histories together, to limit the size of the page
# Sorted by severity. CSS class of the badge, and the meaning of the kind.
KINDS = {
    "LOST": ("s-lost", "accepted, no end, and in no store"),
    "FILE_ALTERED": ("s-lost", "a file differs from its manifest"),
    "LEDGER": ("s-lost", "a ledger does not add up"),
    "ILLEGAL": ("s-lost", "an order of events that cannot be"),
    "RECORD_REPEATED": ("s-lost", "one number of a cell was used twice"),
    "ORPHAN": ("s-lost", "an event or a snapshot's row without a beginning"),
    "FILE_MISSING": ("s-unsure", "a manifest names a file that is not there"),
    "TRAIL_GAP": ("s-unsure", "numbers of a cell are missing"),
    "UNPROVEN": ("s-unsure", "manifests or a snapshot do not prove the files"),
    "INCONCLUSIVE": ("s-unsure", "no end, and the trail has a gap there or its store was restored"),
    "OVERDUE": ("s-late", "its time has passed and it is still pending"),
    "DUPLICATE_DELIVERY": ("s-late", "put into its queue more than once"),
    "DUPLICATE_ACCEPT": ("s-late", "accepted more than once"),
    "DUPLICATE_EXIT": ("s-late", "a group left the same place twice"),
    "EARLY": ("s-late", "fired before its delivery time"),
    "LATE": ("s-late", "fired too long after its delivery time"),
    "RETIRED_CELL": ("s-wait", "the store of a cell is gone, by declaration of an operator"),
    "PUT_BACK": ("s-wait", "the store went back to an earlier state, as of a backup"),
    "UNCHAINED": ("s-wait", "manifests of a build that did not chain them"),
    "UNKNOWN_KIND": ("s-wait", "an event of a kind the audit does not know"),
}
UNKNOWN_KIND = ("s-wait", "a kind this page does not know")
_ORDER = {kind: place for place, kind in enumerate(KINDS)}


def chosen(findings: Sequence[Row]) -> list[Row]:
    """Return at most 500 findings: some of every kind, then the most severe; sorted by severity, then in input
    order.
    """
    by_kind: defaultdict[str, list[Row]] = defaultdict(list)
    for finding in findings:
        by_kind[_kind(finding)].append(finding)
    order = sorted(by_kind, key=weight)
    share = max(1, min(EACH_KIND_MIN, SHOWN_MAX // max(1, len(order))))
    room = SHOWN_MAX - sum(min(share, len(by_kind[kind])) for kind in order)
    taken: list[Row] = []
    for kind in order[:SHOWN_MAX]:
        more = max(0, min(room, len(by_kind[kind]) - share))
        room -= more
        taken += by_kind[kind][: share + more]
    return taken[:SHOWN_MAX]


def listed(report: Row, findings: Sequence[Row]) -> dict[str, Any]:
    """Return the selected findings, the number of each kind, and the number that is not shown."""
    summary = report.get("findings") or {}
    shown = chosen(findings)
    counted = summary.get("by_kind") or {}
    history_max = max(12, min(200, HISTORY_ROWS_MAX // max(1, len(shown))))
    return {
        "total": max(whole(summary, "total"), len(findings)),
        "listed": len(findings),
        "by_kind": [(kind, *KINDS.get(kind, UNKNOWN_KIND), counted[kind]) for kind in sorted(counted, key=weight)],
        "kinds": sorted({_kind(finding) for finding in shown}, key=weight),
        "shown": [_finding(finding, history_max) for finding in shown],
    }


def _kind(finding: Row) -> str:
    return str(finding.get("kind"))


def weight(kind: str) -> tuple[int, str]:
    """Return the place of a kind, the most severe first."""
    return (_ORDER.get(kind, len(_ORDER)), kind)


def _finding(finding: Row, history_max: int) -> dict[str, Any]:
    kind = _kind(finding)
    css, meaning = KINDS.get(kind, UNKNOWN_KIND)
    return {
        "kind": kind,
        "css": css,
        "place": " / ".join(str(finding[key]) for key in ("cell", "topic", "group") if finding.get(key)),
        "message_id": str(finding.get("message_id") or ""),
        "facts": {
            "What": meaning,
            "Rule": finding.get("rule"),
            "Detail": finding.get("detail"),
            "Message": finding.get("message_id"),
            "Entry": finding.get("entry"),
            "Due": _due(finding),
            "Cell": finding.get("cell"),
        },
        "history": _history(finding["history"], history_max) if finding.get("history") else None,
    }


def _history(history: Sequence[Row], history_max: int) -> ReportTable:
    half = history_max // 2
    left_out = max(0, len(history) - history_max)
    events = [*history[:half], *history[-(history_max - half) :]] if left_out else history
    rows = [
        [
            text.utc(event.get("at_ms")),
            event.get("kind"),
            _place(event),
            event.get("attempt"),
            _due(event),
            event.get("sequence"),
            event.get("boot"),
        ]
        for event in events
    ]
    if left_out:
        rows.insert(half, [f"... {text.count(left_out)} more in findings.jsonl", *[None] * 6])
    headings = ["at (UTC)", "event", "queue: offset", "attempt", "due (UTC)", "sequence", "run"]
    return ReportTable("Its history, in the order of the trail", headings, rows, words=3)


def _due(row: Row) -> str | None:
    return None if row.get("due_ms") is None else text.utc(row["due_ms"])


def _place(event: Row) -> str | None:
    queue, offset = event.get("queue_id"), event.get("queue_offset")
    if queue is None:
        return None
    name = "lane" if queue == -1 else str(queue)
    return name if offset is None else f"{name}: {text.count(int(offset))}"
