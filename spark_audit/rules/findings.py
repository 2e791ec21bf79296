"""Findings in their output order, each with the history of its message."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from spark_audit.engines import Column, Relation, gathered
from spark_audit.engines import functions as F  # noqa: N812 - the name that Spark code goes by
from spark_audit.rules.rows import key_of
from spark_audit.schema import SEVERITY

ORDER = ("kind", "cell", "topic", "group", "message_id", "entry")
COLUMNS = (
    "kind",
    "severity",
    "rule",
    "cell",
    "topic",
    "group",
    "message_id",
    "entry",
    "due_ms",
    "window_start_ms",
    "detail",
)
HISTORY = ("sequence", "at_ms", "kind", "queue_id", "queue_offset", "attempt", "due_ms", "boot")


def join_findings(parts: Sequence[Relation]) -> Relation:
    """Combine findings and add their severity. ``packed_id`` is the id as stored in the trail."""
    names = [name for name in COLUMNS if name != "severity"]
    united = reduce(lambda one, other: one.union(other), [part.select(*names) for part in parts])
    severity = F.Case(())
    for name in sorted(set(SEVERITY.values())):
        severity = severity.when(F.col("kind").isin(*(kind for kind, value in SEVERITY.items() if value == name)), name)
    return united.select(
        "*",
        severity.alias("severity"),
        F.col("message_id").alias("packed_id"),
    ).with_column("message_id", id_text(F.col("message_id")))


def id_text(message_id: Column) -> Column:
    """Return a packed id in readable form: its hex digits, or the text."""
    digits = F.hex_of(message_id)
    return F.when(digits.startswith("00"), F.coalesce(F.text_of(message_id, 2), digits)).otherwise(digits)


def first_findings(findings: Relation, count: int) -> Relation:
    """Return the first ``count`` findings in output order."""
    order = [F.coalesce(F.col(name).cast("string"), F.lit("")) for name in ORDER[:-1]]
    rest = [F.coalesce("entry", F.lit(-1)), F.col("rule"), F.col("detail")]
    return findings.order_by(*order, *rest, limit=count)


def with_history(findings: Relation, rows: Relation, bits: int) -> Relation:
    """Add ``history``: the events of the finding's message, limited to its group if the finding is about a group.

    ``rows`` hold all events of these messages. Events are sorted by cell and sequence.
    """
    numbered = findings.with_column("number", F.row_id())
    wanted = numbered.where(F.col("packed_id").is_not_null()).select(
        "number",
        F.col("topic").alias("f_topic"),
        F.col("group").alias("f_group"),
        F.col("packed_id").alias("f_id"),
        key_of(F.col("topic"), F.col("packed_id"), bits).alias("key"),
    )
    event = F.struct("cell", *HISTORY)
    renamed = {"topic": "e_topic", "group": "e_group", "message_id": "e_id"}
    events = rows.select("key", *(F.col(name).alias(new) for name, new in renamed.items()), event.alias("event"))
    matches = (F.col("e_topic") == F.col("f_topic")) & (F.col("e_id") == F.col("f_id"))
    of_group = F.col("f_group").is_null() | F.col("e_group").is_null() | (F.col("e_group") == F.col("f_group"))
    found = gathered(F.broadcast(wanted).join(events, on="key", how="inner")).where(matches & of_group)
    histories = found.group_by("number").agg(F.collect_sorted("event").alias("history"))
    return numbered.join(histories, on="number", how="left").drop("number", "packed_id")
