"""Ledgers of the report: totals of all messages, corrected by the exact results of judged messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from spark_audit.engines import Relation
from spark_audit.engines import functions as F  # noqa: N812 - the name that Spark code goes by
from spark_audit.jobs.health import CellState, Finding, finding
from spark_audit.jobs.options import Options
from spark_audit.jobs.pipeline import Judged, letters_of
from spark_audit.rules.groups import STATES
from spark_audit.rules.rows import is_fired_to_group, kind_in
from spark_audit.rules.totals import entry_totals, group_totals, histogram, scheduled_totals
from spark_audit.schema import DEAD, FAILED, FINISHED, IN_LANE, KNOWN

Ledger: TypeAlias = list[dict[str, Any]]
_ENTRY_STATES = ("fired", "cancelled", "expired", "pending", "overdue", "lost", "inconclusive")
_SPOOL_STATES = ("sent", "dead", "dropped", "pending", "overdue", "lost", "inconclusive")
_PERCENTILES = tuple(f"lateness_{name}_ms" for name in ("p50", "p90", "p99", "p999", "max"))
_ENTRY_COUNTS = ("accepted_at_once", "scheduled", *_ENTRY_STATES, "late", "early", "duplicated")
_GROUP_COUNTS = ("fired", *STATES, "duplicated")
_OF_SPOOL = {
    "SCHEDULED": ("spooled", 1),
    "SENT": ("sent", 1),
    "DROPPED": ("dropped", 1),
    "SEND_DEAD": ("dead", 1),
    "REQUEUED": ("dead", -1),
}


def totals_of(
    counts: Relation, sums: Relation, rare: Relation, cells: Sequence[CellState], options: Options
) -> dict[str, Ledger]:
    """Fetch the totals that the report needs."""
    spools = _spools(cells)
    kind, count = F.col("kind"), F.sum_of("count").alias("count")
    own = counts.where(~F.col("is_letter"))
    bars = own.where((kind == "DELIVERED") & _is_chosen(options))
    failed = kind_in(*FAILED) | (kind.startswith("DEAD_") & F.col("has_queue"))
    tried = own.where(F.col("group").is_not_null() & (failed | kind_in(*FINISHED, *IN_LANE)))
    ladder = tried.group_by("topic", "group", "attempt").agg(
        F.sum_of(F.when(failed, F.col("count")).otherwise(0)).alias("failed"),
        F.sum_of(F.when(kind_in(*IN_LANE), F.col("count")).otherwise(0)).alias("retried"),
        F.sum_of(F.when(kind_in(*FINISHED), F.col("count")).otherwise(0)).alias("acked"),
    )
    of_spools = own.where(F.col("cell").isin(*spools, "") & kind_in(*_OF_SPOOL))
    return counts.engine.collect_all(
        {
            "scheduled": scheduled_totals(counts, spools),
            "fired": sums.group_by("topic", "group").agg(F.sum_of("fired").alias("fired")),
            "exits": group_totals(counts, spools),
            "spooled": of_spools.group_by("cell", "topic", "kind").agg(count),
            "bars": bars.group_by("topic", "bar_ms").agg(count),
            "retries": ladder,
            "dead": letters_of(rare),
            "unknown": own.where(~kind_in(*KNOWN)).group_by("cell", "kind").agg(count),
        }
    )


def judged_of(judged: Judged, rows: Relation, cells: Sequence[CellState], options: Options) -> dict[str, Ledger]:
    """Fetch the ledger rows of judged messages: their share of the totals, and the exact values that replace it."""
    spools = _spools(cells)
    kind = F.col("kind")
    of_daemons = entry_totals(rows, options.window_ms).where(~F.col("cell").isin(*spools, ""))
    of_spools = rows.where(F.col("cell").isin(*spools, "") & kind_in(*_OF_SPOOL) & ~F.col("is_letter"))
    extra = F.sum_of(F.greatest(F.col("delivered") - 1, F.lit(0))).alias("duplicated")
    entries = judged.entries.where(F.col("from_sequence").is_not_null())
    side = judged.side.group_by("topic", "group").agg(
        F.count_if(is_fired_to_group()).alias("fired"),
        F.count_if(kind_in(*FINISHED)).alias("acked"),
        F.count_if(kind == "FILTERED").alias("filtered"),
        F.count_if(kind_in(*DEAD) & ((F.col("visible") < 0) | (F.col("copies") < 0))).alias("dead"),
    )
    exact = judged.groups.group_by("topic", "group").agg(
        *(F.sum_of(name).alias(name) for name in ("fired", *STATES)), F.sum_of("surplus").alias("duplicated")
    )
    return rows.engine.collect_all(
        {
            "scheduled": of_daemons,
            "entries": entries.group_by("cell", "window_start_ms", "topic", "state").agg(
                F.count_rows().alias("count"), extra
            ),
            "accepts": judged.accepts.group_by("window_start_ms", "topic").agg(F.sum_of("extra").alias("extra")),
            "side": side,
            "groups": exact,
            "spooled": of_spools.group_by("cell", "topic", "kind").agg(F.count_rows().alias("count")),
        }
    )


def scheduled_table(
    totals: Mapping[str, Ledger], judged: Mapping[str, Ledger], cells: Sequence[CellState], options: Options
) -> Ledger:
    """Return the ledger of scheduled messages, by window and topic."""
    spools = set(_spools(cells))
    table: dict[tuple[Any, ...], dict[str, Any]] = {}

    def at(row: Mapping[str, Any]) -> dict[str, Any]:
        empty = dict.fromkeys(_ENTRY_COUNTS, 0) | dict.fromkeys(_PERCENTILES)
        return _at(table, row, ("window_start_ms", "topic"), empty)

    for row in totals["scheduled"]:
        made = at(row)
        made |= row
    for row in judged.get("scheduled", []):
        _add(at(row), row, ("scheduled", "fired", "cancelled"), -1)
    for row in judged.get("entries", []):
        if row["cell"] not in spools:
            made = at(row)
            made["scheduled"] += row["count"]
            made[row["state"]] += row["count"]
            made["duplicated"] += row["duplicated"]
    for row in judged.get("accepts", []):
        at(row)["duplicated"] += row["extra"]
    low = -(2**63) if options.from_ms is None else options.from_ms - options.window_ms + 1
    high = 2**63 if options.to_ms is None else options.to_ms
    chosen = [made for key, made in sorted(table.items()) if low <= key[0] < high]
    return [made for made in chosen if made["scheduled"] or made["accepted_at_once"] or made["duplicated"]]


def fired_table(totals: Mapping[str, Ledger], judged: Mapping[str, Ledger]) -> Ledger:
    """Return the ledger of messages that became visible to groups."""
    table: dict[tuple[Any, ...], dict[str, Any]] = {}

    def at(row: Mapping[str, Any]) -> dict[str, Any]:
        return _at(table, row, ("topic", "group"), dict.fromkeys(_GROUP_COUNTS, 0))

    for row in totals["fired"]:
        _add(at(row), row, ("fired",), 1)
    for row in totals["exits"]:
        _add(at(row), row, ("acked", "filtered", "dead"), 1)
    for row in judged.get("side", []):
        _add(at(row), row, ("fired", "acked", "filtered", "dead"), -1)
    for row in judged.get("groups", []):
        _add(at(row), row, _GROUP_COUNTS, 1)
    return [made for _, made in sorted(table.items()) if any(made[name] for name in _GROUP_COUNTS)]


def spooled_table(totals: Mapping[str, Ledger], judged: Mapping[str, Ledger], cells: Sequence[CellState]) -> Ledger:
    """Return the ledger of spools. An entry that another spool adopted counts for that spool."""
    spools = set(_spools(cells))
    names = ("spooled", *_SPOOL_STATES)
    table: dict[tuple[Any, ...], dict[str, Any]] = {}

    def at(row: Mapping[str, Any]) -> dict[str, Any]:
        return _at(table, {**row, "type": row["topic"]}, ("cell", "type"), dict.fromkeys(names, 0))

    for rows, factor in ((totals["spooled"], 1), (judged.get("spooled", []), -1)):
        for row in rows:
            name, sign = _OF_SPOOL[row["kind"]]
            at(row)[name] += sign * factor * row["count"]
    for row in judged.get("entries", []):
        if row["cell"] in spools and row["state"] != "moved":
            at(row)["spooled"] += row["count"]
            at(row)[row["state"]] += row["count"]
    return [made for _, made in sorted(table.items()) if any(made[name] for name in names)]


def other_tables(totals: Mapping[str, Ledger]) -> dict[str, Ledger]:
    """Return the lateness histogram, the ladder of attempts, and the dead letters."""
    bars = [(row["topic"], row["bar_ms"], row["count"]) for row in totals["bars"]]
    return {
        "lateness": histogram(bars),
        "retries": sorted(totals["retries"], key=lambda row: (row["topic"], row["group"], row["attempt"] or 0)),
        "dead": sorted(totals["dead"], key=lambda row: (row["topic"], row["group"], row["reason"])),
    }


def unknown_kinds(totals: Mapping[str, Ledger]) -> list[Finding]:
    """Return a finding for each unknown kind of event."""
    rows = sorted(totals["unknown"], key=lambda row: (row["cell"], row["kind"]))
    return [finding("UNKNOWN_KIND", row["kind"], row["cell"], f"{row['count']} events") for row in rows]


def check_ledgers(scheduled: Ledger, fired: Ledger, spooled: Ledger) -> list[Finding]:
    """Return a finding for each ledger row that does not add up or has a negative count."""
    return [
        *_check("scheduled", scheduled, _ENTRY_STATES),
        *_check("fired", fired, STATES),
        *_check("spooled", spooled, _SPOOL_STATES),
    ]


def _check(total: str, table: Ledger, parts: Iterable[str]) -> list[Finding]:
    names = tuple(parts)
    found = []
    for row in table:
        summed = sum(row[name] for name in names)
        if row[total] == summed and min(row[total], *(row[name] for name in names)) >= 0:
            continue
        sums = ", ".join(f"{name} {row[name]}" for name in names if row[name])
        detail = f"{total} {row[total]}, the rest {summed}: {sums}"
        rule = f"the ledger of what was {total} does not add up"
        place = {"topic": row.get("topic", row.get("type")), "group": row.get("group")}
        place["window_start_ms"] = row.get("window_start_ms")
        found.append(finding("LEDGER", rule, str(row.get("cell") or ""), detail, **place))
    return found


def _spools(cells: Sequence[CellState]) -> list[str]:
    return [cell.cell for cell in cells if cell.role == "spool"]


def _is_chosen(options: Options) -> Any:  # noqa: ANN401 - a column, or always
    chosen = F.lit(True)
    if options.from_ms is not None:
        chosen &= F.col("window_start_ms") + options.window_ms > options.from_ms
    if options.to_ms is not None:
        chosen &= F.col("window_start_ms") < options.to_ms
    return chosen


def _at(
    table: dict[tuple[Any, ...], dict[str, Any]],
    row: Mapping[str, Any],
    keys: tuple[str, ...],
    empty: dict[str, Any],
) -> dict[str, Any]:
    key = tuple(row[name] for name in keys)
    return table.setdefault(key, dict(zip(keys, key, strict=True)) | empty)


def _add(made: dict[str, Any], row: Mapping[str, Any], names: Iterable[str], sign: int) -> None:
    for name in names:
        made[name] += sign * (row[name] or 0)
