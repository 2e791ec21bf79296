"""Reverse check: entries in the store that the trail does not contain."""

from __future__ import annotations

from spark_audit.engines import Relation, gathered
from spark_audit.engines import functions as F  # noqa: N812 - the name that Spark code goes by
from spark_audit.rules.entries import has_gap, with_life
from spark_audit.rules.rows import floor_to, kind_in
from spark_audit.schema import DEAD, ENDS_OF_ENTRY, IN_LANE

_BEGINS = ("SCHEDULED", "REQUEUED", "NACKED")
_ENDS = (*ENDS_OF_ENTRY, *IN_LANE, *DEAD)
_OF_SPOOL = ("SCHEDULED", "REQUEUED", "SEND_FAILED", "SENT", "SEND_DEAD", "DROPPED")
_WAITS = ("SCHEDULED", "REQUEUED", "SEND_FAILED")


def held_orphans(rows: Relation, held: Relation, cells: Relation, *, window_ms: int) -> Relation:
    """Return findings for snapshot entries that are not pending in the trail at the sequence of the snapshot.

    The dead set of a spool is left out, because its entries may come from the adopted directory of another process.
    Schedules are left out, because they are not messages.
    """
    heads = F.broadcast(cells.select("cell", "role", "snapshot", "is_retired", "entry_min", "gaps"))
    own = rows.where(kind_in(*_BEGINS, *_ENDS, *_OF_SPOOL) & ~F.col("is_letter"))
    until = with_life(gathered(own.join(heads, on="cell", how="inner")))
    until = until.where(F.col("life").is_not_null() & (F.col("sequence") <= F.col("snapshot")))
    known = until.group_by("cell", "life", "message_id").agg(
        F.count_if(kind_in(*_BEGINS)).alias("begins"),
        F.count_if(kind_in(*_ENDS)).alias("ends"),
        F.max_by("kind", "sequence").alias("last_kind"),
    )
    # the death of a message that failed in a queue names the entry it was delivered from, which had already ended
    waiting = held.where(~kind_in("DEAD", "TRANSACTION", "RECURRING")).renamed("kind", "held_as")
    joined = with_life(waiting.join(heads, on="cell")).join(known, on=["cell", "life", "message_id"], how="left")
    waits = F.coalesce(F.col("last_kind").isin(*_WAITS), F.lit(False))
    is_known = F.when(F.col("role") == "spool", waits).otherwise(
        (F.coalesce("begins", F.lit(0)) > 0) & (F.coalesce("ends", F.lit(0)) == 0)
    )
    is_excused = F.col("is_retired") & (F.col("entry") < F.coalesce("entry_min", F.lit(2**62)))
    unclear = has_gap(F.lit(0), F.col("snapshot"))
    found = joined.where(~is_known & ~is_excused)
    return found.select(
        F.when(unclear, "INCONCLUSIVE").otherwise("ORPHAN").alias("kind"),
        F.when(unclear, "gap").otherwise("in the snapshot, not waiting by the trail").alias("rule"),
        F.concat(F.lit("waits in the store as "), F.col("held_as")).alias("detail"),
        "cell",
        "topic",
        "group",
        "message_id",
        "entry",
        "due_ms",
        floor_to(F.col("due_ms"), window_ms).alias("window_start_ms"),
    )


def waiting_copies(held: Relation) -> Relation:
    """Return the number of pending copies of each message for each group in the snapshot."""
    copies = held.where((F.col("kind") == "RETRY") & ~F.coalesce("is_stranded", F.lit(False)))
    return copies.group_by("cell", "topic", "group", "message_id").agg(F.count_rows().alias("waiting_there"))
