"""Which messages must be looked at one by one: all that are not finished, and all that may be wrong.

One shuffle of narrow rows. It may name too many, never too few: what is not named has one beginning and one end in
the right order, is not late, waited until the time it was accepted for, and left every place that it was visible at.
"""

from __future__ import annotations

import pyspark.sql.functions as F  # noqa: N812 - the name that Spark code goes by
from pyspark.sql import Column, DataFrame

from spark_audit.schema import ENDS_OF_ENTRY, RESCHEDULED
from spark_audit.transforms.rows import group_side, id_window, key_of, kind_in
from spark_audit.transforms.totals import is_equal

_BEGINS = ("SCHEDULED", "REQUEUED")
_ENDS = (*ENDS_OF_ENTRY, "SENT", "SEND_DEAD", "DROPPED")
_LAST = (*ENDS_OF_ENTRY, "SENT", "DROPPED")


def find_candidates(
    rows: DataFrame,
    subscriptions: DataFrame,
    sums: DataFrame | None,
    *,
    window_ms: int,
    late_after_ms: int,
    bits: int,
) -> DataFrame:
    """Return the keys (one column, ``key``) of messages to look at.

    ``sums`` are fingerprints; group events are only looked at in windows where those differ, not at all without.
    """
    narrow = _entry_side(rows, late_after_ms, bits)
    if sums is not None:
        narrow = narrow.unionByName(_group_side(rows, subscriptions, sums, window_ms, bits))
    facts = narrow.groupBy("key").agg(
        F.sum("accepts").alias("accepts"),
        F.sum("lasts").alias("lasts"),
        F.min(F.when(F.col("accepts") == 1, F.col("sequence"))).alias("first_accept"),
        F.min(F.when(F.col("accepts") == 0, F.col("sequence"))).alias("first_end"),
        F.sum("entry_sign").alias("entry_sum"),
        F.sum("visible_sign").alias("visible_sum"),
        F.sum("copies_sign").alias("copies_sum"),
        F.max("is_odd").alias("is_odd"),
        F.max(F.when(F.col("accepts") == 1, F.col("due_ms"))).alias("accepted_due_ms"),
        F.max(F.when(F.col("accepts") == 0, F.col("due_ms"))).alias("ended_due_ms"),
    )
    is_wrong = (
        (F.col("accepts") > 1)
        | (F.col("lasts") > F.col("accepts"))
        | (F.col("first_end") < F.col("first_accept"))
        | (F.col("entry_sum") != 0)
        | (F.col("visible_sum") != 0)
        | (F.col("copies_sum") != 0)
        | F.col("is_odd")
        | F.coalesce(F.col("accepted_due_ms") != F.col("ended_due_ms"), F.lit(False))
    )
    return facts.where(is_wrong).select("key")


def _weight(*columns: str) -> Column:
    """Return some 40 bits of a hash, so that a sum of millions of them stays a long."""
    return F.shiftright(F.xxhash64(*columns), 24)


def _entry_side(rows: DataFrame, late_after_ms: int, bits: int) -> DataFrame:
    """Beginnings and ends of entries, of daemons and spools."""
    kind = F.col("kind")
    lateness = F.col("at_ms") - F.col("due_ms")
    own = rows.where(kind_in(*_BEGINS, *_ENDS, "QUEUED", RESCHEDULED) & ~F.col("is_letter"))
    sign = F.when(kind_in(*_BEGINS), 1).when(kind_in(*_ENDS), -1).otherwise(0)
    zero = F.lit(0).cast("long")
    return own.select(
        key_of(F.col("topic"), F.col("message_id"), bits).alias("key"),
        F.when(kind_in("SCHEDULED", "QUEUED"), 1).otherwise(0).alias("accepts"),
        F.when(kind_in(*_LAST), 1).otherwise(0).alias("lasts"),
        F.when(~kind_in("REQUEUED", RESCHEDULED), F.col("sequence")).alias("sequence"),
        (sign * _weight("cell", "entry")).alias("entry_sign"),
        zero.alias("visible_sign"),
        zero.alias("copies_sign"),
        F.coalesce(
            (kind == RESCHEDULED) | (kind == "DELIVERED") & ((lateness > late_after_ms) | (lateness < 0)), F.lit(False)
        ).alias("is_odd"),
        # A daemon says of an end which time was set last; a spool says when it is due next.
        F.when(kind_in("SCHEDULED", *ENDS_OF_ENTRY), F.col("due_ms")).alias("due_ms"),
    )


def _group_side(rows: DataFrame, subscriptions: DataFrame, sums: DataFrame, window_ms: int, bits: int) -> DataFrame:
    """Slots, exits and copies in windows that are not equal."""
    side = group_side(rows, subscriptions).withColumn("key", key_of(F.col("topic"), F.col("message_id"), bits))
    side = side.withColumn("id_window", id_window(F.col("message_id"), F.col("key"), window_ms))
    unequal = F.broadcast(sums.where(~is_equal()).select("cell", "topic", "group", "id_window"))
    side = side.join(unequal, on=["cell", "topic", "group", "id_window"], how="left_semi")
    return side.select(
        "key",
        F.lit(0).alias("accepts"),
        F.lit(0).alias("lasts"),
        F.lit(None).cast("long").alias("sequence"),
        F.lit(0).cast("long").alias("entry_sign"),
        (F.col("visible") * _weight("cell", "topic", "group")).alias("visible_sign"),
        (F.col("copies") * _weight("cell", "topic", "group")).alias("copies_sign"),
        F.lit(False).alias("is_odd"),
        F.lit(None).cast("long").alias("due_ms"),
    )
