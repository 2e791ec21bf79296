"""Which messages must be looked at one by one: all that are not finished, and all that may be wrong.

One shuffle of narrow rows. It may name too many, never too few: what is not named has one beginning and one end in
the right order, is not late, waited until the time it was accepted for, and left every place that it was visible at.
"""

from __future__ import annotations

from collections.abc import Sequence

from spark_audit.frames import functions as F  # noqa: N812 - the name that Spark code goes by
from spark_audit.frames.columns import Column
from spark_audit.frames.table import Table, gathered
from spark_audit.schema import COMMITTED, ENDS_OF_ENTRY, ENDS_OF_TRANSACTION, HALF, RESCHEDULED
from spark_audit.transforms.copies import copy_facts, is_odd_copy
from spark_audit.transforms.rows import group_side, id_window, key_of, kind_in, place_key, placed
from spark_audit.transforms.totals import is_equal

_BEGINS = ("SCHEDULED", "REQUEUED")
_ENDS = (*ENDS_OF_ENTRY, "SENT", "SEND_DEAD", "DROPPED")
_LAST = (*ENDS_OF_ENTRY, "SENT", "DROPPED")
_ORDERED = ("SCHEDULED", "QUEUED", *_ENDS)  # the end of a message is behind its beginning


def find_candidates(
    rows: Table,
    subscriptions: Table,
    sums: Table | None,
    unnamed: Table,
    *,
    late_after_ms: int,
    bits: int,
    spools: Sequence[str],
) -> Table:
    """Return the keys (one column, ``key``) of messages to look at; ``spools`` are the cells that are one's.

    ``sums`` are fingerprints; group events are only looked at in windows where those differ, not at all without.
    """
    side = _entry_side(rows, late_after_ms, bits, spools)
    facts = side.group_by("key").agg(
        # Counts, and no sums: there is a group for each message, and DuckDB keeps 16 bytes of a sum.
        F.count_if(F.col("accepts") == 1).alias("accepts"),
        F.count_if(F.col("lasts") == 1).alias("lasts"),
        F.count_if(F.col("commits") == 1).alias("commits"),
        F.min_of(F.when(F.col("accepts") == 1, F.col("sequence"))).alias("first_accept"),
        F.min_of(F.when(F.col("accepts") == 0, F.col("sequence"))).alias("first_end"),
        F.bit_xor("entry_mark").alias("entry_marks"),
        F.count_if(F.col("entry_sign") > 0).alias("begins"),
        F.count_if(F.col("entry_sign") < 0).alias("ends"),
        F.count_if(F.col("half_sign") > 0).alias("halves"),
        F.count_if(F.col("half_sign") < 0).alias("half_ends"),
        F.count_if("is_odd").alias("odd"),
    )
    is_wrong = (
        (F.col("accepts") > 1)
        | (F.col("lasts") > F.col("accepts"))
        | (F.col("commits") > F.col("accepts"))
        | (F.col("first_end") < F.col("first_accept"))
        | (F.col("begins") != F.col("ends"))
        | (F.col("entry_marks") != 0)
        | (F.col("halves") != F.col("half_ends"))
        | (F.col("odd") > 0)
    )
    found = facts.where(is_wrong).select("key")
    for others in (
        copy_facts(rows).where(is_odd_copy()).select(_key(bits)),
        _strays(rows, subscriptions, unnamed, bits),
    ):
        found = found.union(others)
    if sums is None:
        return found
    open_sums = (F.sum_of(name).alias(name) for name in ("visible", "copies", "placed"))
    sides = _group_side(rows, subscriptions, sums, bits).group_by("key").agg(*open_sums)
    is_open = (F.col("visible") != 0) | (F.col("copies") != 0) | (F.col("placed") != 0)
    return found.union(sides.where(is_open).select("key"))


def _weight(*columns: str | Column) -> Column:
    """Return some 40 bits of a hash, so that a sum of millions of them stays a long."""
    return F.shift_right(F.hash64(*columns), 24)


def _entry_side(rows: Table, late_after_ms: int, bits: int, spools: Sequence[str]) -> Table:
    """Beginnings and ends of entries, of daemons and spools, and of half messages; what is accepted with these.

    One pass for all of them: Spark reads the trail anew for each.
    """
    told = (*_BEGINS, *_ENDS, "QUEUED", RESCHEDULED, HALF, *ENDS_OF_TRANSACTION)
    own = rows.where(kind_in(*dict.fromkeys(told)) & ~F.col("is_letter"))
    sign = F.when(kind_in(*_BEGINS), 1).when(kind_in(*_ENDS), -1).otherwise(0)
    half_sign = F.when(kind_in(HALF), 1).when(kind_in(*ENDS_OF_TRANSACTION), -1).otherwise(0)
    # A daemon says of an end which time was set last; a spool says when it is due next, and its entry has another
    # number whenever it waits again.
    is_of_spool = F.col("cell").isin(*spools, "")
    mark = F.when(is_of_spool, F.hash64("cell")).otherwise(F.hash64("cell", "entry", "due_ms"))
    lateness = F.col("at_ms") - F.col("due_ms")
    is_odd = kind_in(RESCHEDULED) | (kind_in("DELIVERED") & ((lateness > late_after_ms) | (lateness < 0)))
    return own.select(
        _key(bits),
        F.when(kind_in("SCHEDULED", "QUEUED"), 1).otherwise(0).alias("accepts"),
        F.when(kind_in(*_LAST), 1).otherwise(0).alias("lasts"),
        F.when(kind_in(COMMITTED), 1).otherwise(0).alias("commits"),
        F.when(kind_in(*_ORDERED), F.col("sequence")).alias("sequence"),
        F.when(sign == 0, 0).otherwise(mark).alias("entry_mark"),
        sign.alias("entry_sign"),
        half_sign.alias("half_sign"),
        is_odd.alias("is_odd"),  # late or early, or waits until another time than at first
    )


def _key(bits: int) -> Column:
    return key_of(F.col("topic"), F.col("message_id"), bits).alias("key")


def _group_side(rows: Table, subscriptions: Table, sums: Table, bits: int) -> Table:
    """Slots, exits and copies in windows that are not equal."""
    side = group_side(rows, subscriptions).with_column("key", key_of(F.col("topic"), F.col("message_id"), bits))
    side = side.with_column("id_window", id_window(F.col("message_id"), F.col("key")))
    unequal = F.broadcast(sums.where(~is_equal()).select("cell", "topic", "group", "id_window"))
    side = side.join(unequal, on=["cell", "topic", "group", "id_window"], how="left_semi")
    return side.select(
        "key",
        (F.col("visible") * _weight("cell", "topic", "group")).alias("visible"),
        (F.col("copies") * _weight("cell", "topic", "group")).alias("copies"),
        (placed() * F.shift_right(place_key(), 24)).alias("placed"),
    )


def _strays(rows: Table, subscriptions: Table, unnamed: Table, bits: int) -> Table:
    """Return messages that a group left at a place they were not at, of those whose places are in no fingerprint."""
    few = rows.with_column("key", key_of(F.col("topic"), F.col("message_id"), bits))
    few = gathered(few.join(F.broadcast(unnamed), on="key", how="left_semi"))
    side = group_side(few, subscriptions).where(F.col("queue_offset").is_not_null())
    places = side.group_by("key", "cell", "topic", "group", "message_id", "queue_id", "queue_offset").agg(
        F.count_if(F.col("visible") > 0).alias("came"), F.count_if(F.col("visible") < 0).alias("left")
    )
    return places.where((F.col("left") > 0) & (F.col("came") == 0)).select("key")
