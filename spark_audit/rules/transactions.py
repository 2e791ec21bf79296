"""Verdict on transactions: a half message has one end; a committed one is accepted in the same batch.

It may also be absorbed in that batch by a pending message with the same own key.
"""

from __future__ import annotations

from spark_audit.engines import Column, Relation, gathered
from spark_audit.engines import functions as F  # noqa: N812 - the name that Spark code goes by
from spark_audit.rules.entries import has_gap
from spark_audit.rules.rows import kind_in
from spark_audit.schema import ABSORBED, ACCEPTS, COMMITTED, ENDS_OF_TRANSACTION, HALF

_KEY = ("cell", "topic", "message_id")


def transaction_findings(rows: Relation, held: Relation, cells: Relation) -> Relation:
    """Return findings about transactions, one row per finding. ``held`` are the rows of the newest snapshots.

    Two ends are a contradiction. A half message without an end is lost if a later snapshot does not contain it. A
    committed one that was never accepted is lost too.
    """
    own = rows.where(kind_in(HALF, *ENDS_OF_TRANSACTION, *ACCEPTS, ABSORBED) & ~F.col("is_letter"))
    facts = own.group_by(*_KEY).agg(
        F.count_if(kind_in(HALF)).alias("halves"),
        F.count_if(kind_in(*ENDS_OF_TRANSACTION)).alias("ends"),
        F.count_if(kind_in(COMMITTED)).alias("commits"),
        F.count_if(kind_in(*ACCEPTS)).alias("accepts"),
        F.count_if(kind_in(ABSORBED)).alias("absorbed"),
        F.max_by("entry", F.when(kind_in(HALF), F.col("sequence"))).alias("entry"),
        F.max_of(F.when(kind_in(HALF), F.col("sequence"))).alias("half_sequence"),
        F.min_of("sequence").alias("first_sequence"),
        F.max_of("sequence").alias("last_sequence"),
    )
    facts = facts.where(F.col("halves") + F.col("ends") > 0)
    waiting = held.where(kind_in("TRANSACTION")).group_by(*_KEY).agg(F.count_rows().alias("waiting"))
    joined = gathered(facts.join(waiting, on=list(_KEY), how="left").join(F.broadcast(cells), on="cell"))
    joined = joined.filled(0, ["waiting"])
    is_open = F.col("halves") > F.col("ends")
    is_gone = is_open & (F.col("waiting") == 0) & (F.col("snapshot") >= F.col("half_sequence"))
    is_unclear = has_gap(F.col("first_sequence"), F.greatest("last_sequence", F.coalesce("snapshot", F.lit(0))))
    has_no_half = (F.col("ends") > 0) & (F.col("halves") == 0)
    is_untold = has_no_half & has_gap(F.lit(0), F.col("first_sequence"))
    is_lost = is_gone & (F.col("accepts") == 0)
    is_uncommitted = is_gone & (F.col("accepts") > 0)
    is_unaccepted = F.col("commits") > F.col("accepts") + F.col("absorbed")
    wrong = is_lost | is_uncommitted | is_unaccepted
    found = F.array(
        _finding((F.col("ends") > F.col("halves")) & ~has_no_half, "ILLEGAL", "a transaction ended more than once"),
        _finding(is_lost & ~is_unclear, "LOST", "a half message is not in the snapshot, and has no end"),
        _finding(is_uncommitted & ~is_unclear, "ILLEGAL", "accepted, and its transaction was not committed"),
        _finding(is_unaccepted & ~is_unclear, "LOST", "committed, and never accepted"),
        _finding(wrong & is_unclear | is_untold, "INCONCLUSIVE", "gap"),
        _finding(has_no_half & ~is_untold & ~F.col("is_retired"), "ORPHAN", "a transaction ended without a beginning"),
    )
    listed = joined.select(*_KEY, "entry", F.explode(found).alias("found"))
    return listed.select(
        *(F.col("found")[name].alias(name) for name in ("kind", "rule")),
        F.lit("").alias("detail"),
        *_KEY,
        "entry",
        F.lit(None).cast("string").alias("group"),
        *(F.lit(None).cast("bigint").alias(name) for name in ("due_ms", "window_start_ms")),
    )


def _finding(when: Column, kind: str, rule: str) -> Column:
    return F.when(when, F.struct(F.lit(kind).alias("kind"), F.lit(rule).alias("rule")))
