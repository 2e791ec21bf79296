"""Comparison of the trail with messages read back from a cluster, message by message.

A message is *there* if its id is at any offset of its topic. It is only reported as missing if every queue rules it
out. A queue rules it out in one of three cases: the offset that the cluster named holds another message, the queue
never reached that offset, or all messages stored since the send were read. Otherwise it counts as *not read back*.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from spark_audit.engines import Column, Relation
from spark_audit.engines import functions as F  # noqa: N812 - the name that Spark code goes by
from spark_audit.rules.rows import floor_to, kind_in
from spark_audit.schema import CLOCKS_MS, FIRED, IN_DOUBT, QUEUED_FOR_GROUP

_FORWARDED = "FORWARDED"
_BEFORE = (*FIRED, QUEUED_FOR_GROUP)  # a message goes to the cluster after these
KEY = ("topic", "message_id")
STATES = ("there", "not_there", "not_read_back", "lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    """Tables read back from a cluster, in the format of docs/reference/trail.md."""

    messages: Relation
    queues: Relation
    cells: Relation


def compare(rows: Relation, read: ReadBack, broken: Collection[str], *, window_ms: int) -> Relation:
    """Return each message sent to the cluster, or possibly sent, with its ``state`` and its copies.

    Events after the time of the reading explain copies, but do not require any. ``broken`` are cells whose trail has
    gaps, which may hide the explanation of a copy.
    """
    sent = _sent(rows, read.cells)
    copies = (
        read.messages.where(F.col("message_id").is_not_null())
        .group_by(*KEY)
        .agg(
            F.count_distinct("broker", "queue_id", "queue_offset").alias("copies"),
            F.collect_set("queue_offset").alias("offsets"),
        )
    )
    found = sent.join(copies, on=list(KEY), how="left").filled(0, ["copies"])
    missing = found.where(F.col("copies") == 0).select(*KEY, "said_offset", "first_at_ms")
    judged = found.join(_ruled_out(missing, read), on=list(KEY), how="left")
    is_forwarded, is_there = F.col("forwarded") > 0, F.col("copies") > 0
    state = (
        F.when(is_there, "there")
        .when(~F.coalesce("is_ruled_out", F.lit(False)), "not_read_back")
        .when(is_forwarded, "lost")
        .otherwise("not_there")
    )
    has_gap = F.exists("cells", lambda cell: cell.isin(*broken)) if broken else F.lit(False)
    surplus = F.when(has_gap, F.lit(0)).otherwise(F.greatest(F.col("copies") - F.col("explained"), F.lit(0)))
    is_elsewhere = is_there & F.col("said_offset").is_not_null() & ~F.array_contains("offsets", F.col("said_offset"))
    return judged.select(
        *KEY,
        F.array_min("cells").alias("cell"),
        state.alias("state"),
        "copies",
        "explained",
        "in_doubt",
        surplus.alias("surplus"),
        F.coalesce(is_elsewhere, F.lit(False)).alias("is_elsewhere"),
        "said_offset",
        floor_to(F.col("first_at_ms"), window_ms).alias("window_start_ms"),
    )


def border_totals(compared: Relation) -> Relation:
    """Return the ledger of messages sent to the cluster, by topic."""
    return compared.group_by("topic").agg(
        F.count_rows().alias("sent"),
        *(F.count_if(F.col("state") == state).alias(state) for state in STATES),
        F.count_if(F.col("in_doubt") > 0).alias("in_doubt"),
        F.count_if("is_elsewhere").alias("elsewhere"),
        F.sum_of(F.greatest(F.col("copies") - 1, F.lit(0)) - F.col("surplus")).alias("copies"),
        F.sum_of("surplus").alias("duplicated"),
    )


def border_findings(compared: Relation) -> Relation:
    """Return lost messages, and messages with more copies than the trail explains."""
    at = F.coalesce(F.concat(F.lit("offset "), F.col("said_offset").cast("string")), F.lit("an unknown offset"))
    lost = compared.where(F.col("state") == "lost").select(
        "*",
        F.lit("LOST").alias("kind"),
        F.lit("the cluster answered OK and does not have it").alias("rule"),
        F.concat(F.lit("forwarded to "), at, F.lit("; every queue of the topic rules it out")).alias("detail"),
    )
    twice = compared.where(F.col("surplus") > 0).select(
        "*",
        F.lit("DUPLICATE_DELIVERY").alias("kind"),
        F.lit("the cluster has more copies than the trail explains").alias("rule"),
        F.concat(
            F.col("copies").cast("string"), F.lit(" copies, "), F.col("explained").cast("string"), F.lit(" explained")
        ).alias("detail"),
    )
    none = {"group": "string", "entry": "bigint", "due_ms": "bigint"}
    return lost.union(twice).select("*", *(F.lit(None).cast(kind).alias(name) for name, kind in none.items()))


def _sent(rows: Relation, cells: Relation) -> Relation:
    kind = F.col("kind")
    own = rows.where(~F.col("is_letter") & kind_in(_FORWARDED, IN_DOUBT, *_BEFORE) & F.col("message_id").is_not_null())
    upto = F.broadcast(cells.select("cell", F.col("sequence").alias("upto")))
    is_before = F.col("sequence") <= F.coalesce("upto", F.lit(0))
    is_said = (kind == _FORWARDED) & is_before & (F.col("detail") >= 0)
    return (
        own.join(upto, on="cell", how="left")
        .group_by(*KEY)
        .agg(
            F.collect_set("cell").alias("cells"),
            F.min_of("at_ms").alias("first_at_ms"),
            F.count_if((kind == _FORWARDED) & is_before).alias("forwarded"),
            F.count_if((kind == IN_DOUBT) & is_before).alias("in_doubt"),
            F.count_if(kind_in(_FORWARDED, IN_DOUBT)).alias("explained"),
            F.max_of(F.when(is_said, F.col("detail"))).alias("said_offset"),
        )
        .where(F.col("forwarded") + F.col("in_doubt") > 0)
    )


def _ruled_out(missing: Relation, read: ReadBack) -> Relation:
    """Add to messages whose id was not found whether every unread part of the queues is ruled out as their place."""
    queues = F.broadcast(read.queues)
    unreadable = F.broadcast(
        read.messages.where(F.col("message_id").is_null())
        .group_by("topic")
        .agg(F.collect_set("queue_offset").alias("unreadable"))
    )
    ruled_out = (
        missing.join(queues, on="topic", how="left")
        .group_by(*KEY, "said_offset")
        .agg(F.bool_and(F.coalesce(_is_ruled_out_by_queue(), F.lit(False))).alias("by_queues"))
        .join(unreadable, on="topic", how="left")
    )
    is_maybe = F.when(F.col("said_offset").is_null(), F.col("unreadable").is_not_null()).otherwise(
        F.coalesce(F.array_contains("unreadable", F.col("said_offset")), F.lit(False))
    )
    return ruled_out.select(*KEY, (F.col("by_queues") & ~is_maybe).alias("is_ruled_out"))


def _is_ruled_out_by_queue() -> Column:
    said, begin, reached, end = (F.col(name) for name in ("said_offset", "from_offset", "to_offset", "end_offset"))
    is_later = F.col("since_ms") <= F.col("first_at_ms") - CLOCKS_MS  # than all unread messages at the front
    return (
        F.when(said.is_null(), is_later & (reached >= end)).otherwise(
            ((said >= begin) & (said < reached)) | ((said >= reached) & (said >= end)) | ((said < begin) & is_later)
        )
        & F.col("broker").is_not_null()
    )
