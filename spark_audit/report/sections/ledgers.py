"""Ledgers section: every row shows its sum, and whether it balances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spark_audit.report import text
from spark_audit.report.windows import Grid, Row, whole

ROWS_MAX = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerTable:
    """Ledger: a sum and its parts. ``aside`` is shown too and is not part of the sum."""

    title: str
    note: str
    words: tuple[str, ...]
    sum_of: str
    parts: tuple[str, ...]
    aside: tuple[str, ...]


_ENDS = ("lost", "inconclusive")
SCHEDULED = LedgerTable(
    title="Scheduled: messages accepted for a delivery time",
    note="Late, early and duplicated messages are counted in addition; they are not part of the sum.",
    words=("topic",),
    sum_of="scheduled",
    parts=("fired", "cancelled", "expired", "pending", "overdue", *_ENDS),
    aside=("late", "early", "duplicated", "accepted_at_once"),
)
FIRED = LedgerTable(
    title="Fired: messages for each group",
    note="Per topic and group; every message that became visible to the group, from the place on where it subscribed.",
    words=("topic", "group"),
    sum_of="fired",
    parts=("acked", "dead", "expired", "purged", "filtered", "unread", "in_flight", "in_retry", *_ENDS),
    aside=("duplicated",),
)
SPOOLED = LedgerTable(
    title="Spooled: messages that producers stored because a send failed",
    note="Per spool and type of entry.",
    words=("cell", "type"),
    sum_of="spooled",
    parts=("sent", "dead", "dropped", "pending", "overdue", *_ENDS),
    aside=(),
)
CLUSTER = LedgerTable(
    title="In the cluster: messages forwarded, or possibly forwarded",
    note="Found by its id when the topics were read back. Not there: was in doubt only. Not read back: removed by the "
    "cluster's retention, or not reached in time. Copies are those that a send in doubt explains.",
    words=("topic",),
    sum_of="sent",
    parts=("there", "not_there", "not_read_back", "lost"),
    aside=("in_doubt", "elsewhere", "copies", "duplicated"),
)


def ledgers(report: Row, grid: Grid) -> list[dict[str, Any]]:
    """Return all ledgers with rows; the first two are always included."""
    scheduled: list[Row] = [{"topic": topic, **tally.counts} for topic, tally in grid.topics.items()]
    tables = [_ledger(SCHEDULED, scheduled), _ledger(FIRED, report.get("fired") or [])]
    if report.get("spooled"):
        tables.append(_ledger(SPOOLED, report["spooled"]))
    if report.get("cluster"):
        tables.append(_ledger(CLUSTER, report["cluster"]))
    return tables


def residue(ledger: LedgerTable, row: Row) -> int:
    """Return the difference between a row's total and the sum of its parts; 0 if it balances."""
    return whole(row, ledger.sum_of) - sum(whole(row, part) for part in ledger.parts)


def _ledger(ledger: LedgerTable, rows: Sequence[Row]) -> dict[str, Any]:
    def names(row: Row) -> tuple[str, ...]:
        return tuple(str(row.get(word)) for word in ledger.words)

    def weight(row: Row) -> tuple[int, int, tuple[str, ...]]:
        is_bad = residue(ledger, row) != 0 or any(whole(row, end) for end in _ENDS)
        return (0 if is_bad else 1, -whole(row, ledger.sum_of), names(row))

    def line(names: Sequence[str], row: Row) -> dict[str, Any]:
        return {"names": names, "off": residue(ledger, row)} | {key: whole(row, key) for key in keys}

    order = sorted(rows, key=weight)
    shown, others = order[:ROWS_MAX], order[ROWS_MAX:]
    keys = (ledger.sum_of, *ledger.parts, *ledger.aside)
    blanks = [""] * (len(ledger.words) - 1)
    total = line(["Total", *blanks], _sum(keys, order))
    body = [line([text.shortened(name, 60) for name in names(row)], row) for row in shown]
    if others:
        body.append(line([f"{text.count(len(others))} others", *blanks], _sum(keys, others)))
    # a part that is 0 everywhere would only waste space
    parts = [key for key in ledger.parts if total[key] or key in _ENDS]
    left_out = [key.replace("_", " ") for key in ledger.parts if key not in parts]
    return {
        "title": ledger.title,
        "note": ledger.note + (f" 0 everywhere: {', '.join(left_out)}." if left_out else ""),
        "words": ledger.words,
        "sum_of": ledger.sum_of,
        "parts": parts,
        "aside": [key for key in ledger.aside if total[key]],
        "rows": body,
        "total": total,
    }


def _sum(keys: Sequence[str], rows: Sequence[Row]) -> dict[str, int]:
    return {key: sum(whole(row, key) for row in rows) for key in keys}
