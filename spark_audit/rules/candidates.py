"""Selection of messages to judge: all unfinished ones, and all suspicious ones.

One shuffle of narrow rows. It may select too many messages, never too few. A message that is not selected has one
beginning and one end in the right order. It is not late, waited until its accepted time, and left every place at which
it was visible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

from spark_audit.engines import Column, Relation, gathered, keep
from spark_audit.engines import functions as F  # noqa: N812 - the name that Spark code goes by
from spark_audit.rules.copies import copy_facts, is_odd_copy
from spark_audit.rules.rows import group_side, id_window, is_exit, is_fired, key_of, kind_in, place_key, placed
from spark_audit.rules.totals import is_equal
from spark_audit.schema import COMMITTED, ENDS_OF_ENTRY, ENDS_OF_TRANSACTION, FOR_GROUP, HALF, RESCHEDULED

_ACCEPTS = ("SCHEDULED", "QUEUED")
_BEGINS = ("SCHEDULED", "REQUEUED")
_ENDS = (*ENDS_OF_ENTRY, "SENT", "SEND_DEAD", "DROPPED")
_COUNTED: Mapping[str, Sequence[str]] = {
    "odd": (RESCHEDULED,),  # and late or early deliveries
    "accepts": _ACCEPTS,
    "lasts": (*ENDS_OF_ENTRY, "SENT", "DROPPED"),
    "commits": (COMMITTED,),
    "begins": _BEGINS,
    "ends": _ENDS,
    "halves": (HALF,),
    "half_ends": ENDS_OF_TRANSACTION,
}
_IS_END = 0  # of a place; a beginning has 1
_TOLD = tuple(dict.fromkeys(kind for kinds in _COUNTED.values() for kind in kinds))
# All counts of a message are packed into one sum: a message is a group, and each aggregate needs memory per group.
# A message with more rows than a count can hold is always selected, so the number of rows is the highest field.
_COUNT_BITS = 4
_ROWS_MAX = 2**_COUNT_BITS - 1
_SHIFTS = {name: number * _COUNT_BITS for number, name in enumerate((*_COUNTED, "rows"))}


def find_candidates(
    rows: Relation,
    subscriptions: Relation,
    sums: Relation | None,
    failed: Relation,
    *,
    late_after_ms: int,
    bits: int,
    spools: Sequence[str],
) -> Relation:
    """Return the keys (one column, ``key``) of messages to judge. ``spools`` are the cells that are spools.

    ``sums`` are fingerprints. Group events are examined only in windows that do not balance, and not at all without
    sums.
    """
    side = _entry_side(rows, late_after_ms, bits, spools)
    facts = side.group_by("key").agg(
        F.sum_of("counted").alias("counted"),
        F.min_of("place").alias("first_place"),
        F.bit_xor("entry_mark").alias("entry_marks"),
        F.min_of("fired").alias("first_fired"),
        F.min_of("left").alias("first_left"),
    )
    is_wrong = (
        (F.shift_right(F.col("counted"), _SHIFTS["rows"]) > _ROWS_MAX)
        | (_count("accepts") > 1)
        | (_count("lasts") > _count("accepts"))
        | (_count("commits") > _count("accepts"))
        | ((F.bit_and(F.col("first_place"), 1) == _IS_END) & (_count("accepts") > 0))
        | (_count("begins") != _count("ends"))
        | (F.col("entry_marks") != 0)
        | (_count("halves") != _count("half_ends"))
        | (_count("odd") > 0)
        | F.coalesce(F.col("first_left") < F.col("first_fired"), F.lit(False))
    )
    found = facts.where(is_wrong).select("key")
    of_failed = keep(_of_failed(rows, failed, bits))
    for others in (copy_facts(of_failed).where(is_odd_copy()).select(_key(bits)), _strays(of_failed, subscriptions)):
        found = found.union(others)
    if sums is None:
        return found
    open_sums = (F.sum_of(name).alias(name) for name in ("visible", "copies", "placed"))
    sides = _group_side(rows, subscriptions, sums, bits).group_by("key").agg(*open_sums)
    is_open = (F.col("visible") != 0) | (F.col("copies") != 0) | (F.col("placed") != 0)
    return found.union(sides.where(is_open).select("key"))


def _weight(*columns: str | Column) -> Column:
    """Return a hash of about 40 bits, so that a sum of millions fits a 64-bit integer."""
    return F.shift_right(F.hash64(*columns), 24)


def _count(name: str) -> Column:
    """Extract one count from a sum of ``_worth``."""
    return F.bit_and(F.shift_right(F.col("counted"), _SHIFTS[name]), _ROWS_MAX)


def _worth() -> Column:
    """Return the increment of a row to the packed counts of its message, by its kind."""
    kinds: dict[int, list[str]] = {}
    for kind in _TOLD:
        worth = sum(1 << _SHIFTS[name] for name, counted in _COUNTED.items() if kind in counted)
        kinds.setdefault(worth, []).append(kind)
    return reduce(lambda told, each: told.when(kind_in(*each[1]), each[0]), kinds.items(), F.Case(())).otherwise(0)


def _entry_side(rows: Relation, late_after_ms: int, bits: int, spools: Sequence[str]) -> Relation:
    """Select by starts and ends of entries, of daemons and spools, and of half messages with their acceptance.

    Also by the order of arrival and exit of queued messages, which sums do not reveal. All in one pass, because Spark
    reads the trail again for each.
    """
    is_told = kind_in(*_TOLD) & ~F.col("is_letter")
    is_arrival = is_fired() | kind_in(*FOR_GROUP)
    own = rows.where(is_told | is_arrival | is_exit())
    # The end event of a daemon carries the last due time that was set. The one of a spool carries the next due time,
    # and its entry gets another number whenever it waits again.
    is_of_spool = F.col("cell").isin(*spools, "")
    mark = F.when(is_of_spool, F.hash64("cell")).otherwise(F.hash64("cell", "entry", "due_ms"))
    lateness = F.col("at_ms") - F.col("due_ms")
    is_odd = kind_in("DELIVERED") & ((lateness > late_after_ms) | (lateness < 0))
    return own.select(
        _key(bits),
        F.when(is_told, _worth() + F.when(is_odd, 1 << _SHIFTS["odd"]).otherwise(0) + (1 << _SHIFTS["rows"]))
        .otherwise(0)
        .alias("counted"),
        F.when(is_told & kind_in(*_ACCEPTS), F.col("sequence") * 2 + 1)
        .when(is_told & kind_in(*_ENDS), F.col("sequence") * 2 + _IS_END)
        .alias("place"),  # in the trail
        F.when(is_told & kind_in(*_BEGINS, *_ENDS), mark).otherwise(0).alias("entry_mark"),
        F.when(is_arrival, F.col("sequence")).alias("fired"),
        F.when(is_exit(), F.col("sequence")).alias("left"),
    )


def _key(bits: int) -> Column:
    return key_of(F.col("topic"), F.col("message_id"), bits).alias("key")


def _group_side(rows: Relation, subscriptions: Relation, sums: Relation, bits: int) -> Relation:
    """Return places, exits and copies in windows that do not balance."""
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


def _of_failed(rows: Relation, failed: Relation, bits: int) -> Relation:
    """Return the rows of failed messages (``failed_keys``)."""
    own = rows.with_column("key", _key(bits)).drop("boot", "detail")
    return gathered(own.join(F.broadcast(failed.select("key")), on="key", how="left_semi"))


def _strays(failed: Relation, subscriptions: Relation) -> Relation:
    """Return messages that a group left at a place where they never were, or before they arrived there.

    Only messages whose places no fingerprint contains are examined.
    """
    side = group_side(failed, subscriptions).where(F.col("queue_offset").is_not_null())
    places = side.group_by("key", "cell", "topic", "group", "message_id", "queue_id", "queue_offset").agg(
        F.min_of(F.when(F.col("visible") > 0, F.col("sequence"))).alias("came"),
        F.min_of(F.when(F.col("visible") < 0, F.col("sequence"))).alias("left"),
    )
    return places.where(F.coalesce(F.col("left") < F.col("came"), F.col("left").is_not_null())).select("key")
