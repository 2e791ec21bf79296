"""Undone events of rolled-back stores, and the messages that were lost with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from spark_audit.engines import Column, Relation, gathered
from spark_audit.engines import functions as F  # noqa: N812 - the name that Spark code goes by
from spark_audit.rules.groups import unbalanced
from spark_audit.rules.rows import group_side, kind_in
from spark_audit.schema import ACCEPTS, ENDS_OF_ENTRY
from spark_audit.undone import Undone

_PLACE = ("cell", "topic", "message_id")
_ENDS = (*ENDS_OF_ENTRY, "SENT", "SEND_DEAD", "DROPPED")


def is_undone(undone: Sequence[Undone]) -> Column:
    """Return True for rows of undone events; ``undone`` must not be empty."""
    conditions = [
        (F.col("cell") == each.cell) & (F.col("sequence") >= each.first) & (F.col("sequence") <= each.last)
        for each in undone
    ]
    return reduce(lambda one, other: one | other, conditions)


def undone_findings(
    forgotten: Relation, standing: Relation, subscriptions: Relation, retired: Sequence[str]
) -> Relation:
    """Return messages whose acceptance was undone and that were not accepted again.

    ``retired`` are the cells whose stores are gone.

    Messages that had already reached their end are left out, for their topic and for all groups that read it.
    """
    is_accept = kind_in(*ACCEPTS) & ~F.col("is_letter")
    again = standing.where(is_accept).select(*_PLACE[1:]).distinct()
    accepted = forgotten.where(is_accept).select(*_PLACE).distinct()
    gone = gathered(accepted.join(again, on=list(_PLACE[1:]), how="left_anti"))
    waits = (
        forgotten.where(kind_in("SCHEDULED", *_ENDS) & ~F.col("is_letter"))
        .group_by(*_PLACE)
        .agg(F.sum_of(F.when(F.col("kind") == "SCHEDULED", 1).otherwise(-1)).alias("open"))
        .where(F.col("open") > 0)
        .select(*_PLACE)
    )
    removed = forgotten.where(F.col("kind") == "EXPIRED").select(*_PLACE).distinct()
    unread = unbalanced(group_side(forgotten, subscriptions)).select(*_PLACE)
    unread = unread.join(removed, on=list(_PLACE), how="left_anti")
    found = gone.join(gathered(waits.union(unread).distinct()), on=list(_PLACE), how="left_semi")
    nothing = {"group": "string", "entry": "bigint", "due_ms": "bigint", "window_start_ms": "bigint"}
    return found.select(
        F.lit("INCONCLUSIVE").alias("kind"),
        F.when(F.col("cell").isin(*retired, ""), "open when its cell was retired, and not accepted again")
        .otherwise(F.lit("accepted, and its store was restored to an earlier state"))
        .alias("rule"),
        F.lit("").alias("detail"),
        *_PLACE,
        *(F.lit(None).cast(kind).alias(name) for name, kind in nothing.items()),
    )
