"""Copies of failed messages, from the failure to the retry: each must return unchanged."""

from __future__ import annotations

from spark_audit.engines import Column, Relation
from spark_audit.engines import functions as F  # noqa: N812 - the name that Spark code goes by
from spark_audit.rules.rows import kind_in

_COPY = ("cell", "topic", "group", "message_id", "entry")


def copy_facts(rows: Relation) -> Relation:
    """Return each copy that returned at its due time, with ``is_early``, ``is_other_time`` and ``is_other_attempt``.

    A copy whose failure is not in the trail is left out. ``window_start_ms`` and similar columns do not apply to copies
    and are null.
    """
    own = rows.where(kind_in("NACKED", "RETRIED") & ~F.col("is_letter") & F.col("entry").is_not_null())

    def of(kind: str, name: str) -> Column:
        return F.max_of(F.when(kind_in(kind), F.col(name)))

    facts = own.group_by(*_COPY).agg(
        of("NACKED", "sequence").alias("from_sequence"),
        of("NACKED", "due_ms").alias("set_due_ms"),
        of("NACKED", "attempt").alias("failed"),
        of("RETRIED", "sequence").alias("back_sequence"),
        of("RETRIED", "due_ms").alias("due_ms"),
        of("RETRIED", "attempt").alias("attempt"),
        of("RETRIED", "at_ms").alias("back_at_ms"),
    )
    facts = facts.where(F.col("back_sequence").is_not_null())
    return facts.with_columns(
        {
            "is_early": F.coalesce(F.col("back_at_ms") < F.col("due_ms"), F.lit(False)),
            "is_other_time": F.coalesce(F.col("due_ms") != F.col("set_due_ms"), F.lit(False)),
            "is_other_attempt": F.coalesce(F.col("attempt") != F.col("failed") + 1, F.lit(False)),
        }
    )


def is_odd_copy() -> Column:
    """Return True for copies that differ from their failure event."""
    return F.col("is_early") | F.col("is_other_time") | F.col("is_other_attempt")


def copy_findings(rows: Relation, cells: Relation) -> Relation:
    """Return findings about copies. A clock step back may have moved a copy without an event."""
    facts = copy_facts(rows).where(is_odd_copy()).join(F.broadcast(cells), on="cell")
    was_stepped = F.exists("steps_back", lambda step: (F.col("from_sequence") < step) & (F.col("back_sequence") > step))
    is_other = F.col("is_other_time") & ~F.coalesce(was_stepped, F.lit(False))
    early_ms = F.concat((F.col("due_ms") - F.col("back_at_ms")).cast("string"), F.lit(" ms"))
    found = F.array(
        _finding(F.col("is_early"), "EARLY", "retried early", early_ms),
        _finding(is_other, "ILLEGAL", "retried with another time than was set", F.lit("")),
        _finding(F.col("is_other_attempt"), "ILLEGAL", "retried with another attempt than follows", F.lit("")),
    )
    listed = facts.select(*_COPY, "due_ms", F.explode(found).alias("found"))
    return listed.select(
        *(F.col("found")[name].alias(name) for name in ("kind", "rule", "detail")),
        *_COPY,
        "due_ms",
        F.lit(None).cast("bigint").alias("window_start_ms"),
    )


def _finding(when: Column, kind: str, rule: str, detail: Column) -> Column:
    return F.when(when, F.struct(F.lit(kind).alias("kind"), F.lit(rule).alias("rule"), detail.alias("detail")))
