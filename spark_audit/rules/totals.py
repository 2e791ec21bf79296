"""Additive totals of a trail: the totals of two parts add up to the totals of the whole.

``count_rows`` has one row per kind, topic, group, attempt, window and lateness bar; the columns of the ledgers are sums
of it. ``fingerprints`` shows in which windows of messages arrivals and exits balance.
"""

from __future__ import annotations

from spark_audit.engines import Column, Relation, RowWindow, gathered
from spark_audit.engines import functions as F  # noqa: N812 - the name that Spark code goes by
from spark_audit.rules.rows import (
    bar_of,
    floor_to,
    group_side,
    id_window,
    is_exit,
    is_fired_to_group,
    key_of,
    kind_in,
    lateness_bar,
    place_key,
    placed,
    signed_sums,
)
from spark_audit.schema import CANCELLED, DEAD, ENDS_OF_ENTRY, FINISHED, NUMBERED

_COUNT_KEYS = ("cell", "kind", "topic", "group", "attempt", "is_letter", "has_queue", "window_start_ms", "bar_ms")
_SUMS = tuple(f"{side}_{part}" for side in ("visible", "copies", "placed") for part in ("count", "high", "low", "xor"))
_SUM_KEYS = ("cell", "topic", "group", "id_window")


def count_rows(rows: Relation, *, window_ms: int, late_after_ms: int) -> Relation:
    """Count events by the dimensions of the ledgers. ``rows`` are the result of ``with_letters``."""
    kind = F.col("kind")
    due_ms = F.coalesce("due_ms", "at_ms")
    # spool entries have no window, but SCHEDULED does not show whether it is of a spool; the ledgers filter them
    window = F.when(F.col("is_letter"), None).when(kind_in("SCHEDULED", *ENDS_OF_ENTRY), floor_to(due_ms, window_ms))
    window = window.when(kind == "QUEUED", floor_to(F.col("at_ms"), window_ms))
    lateness = F.when(kind == "DELIVERED", F.col("at_ms") - due_ms)
    per_row = rows.select(
        "cell",
        "kind",
        "topic",
        "group",
        F.when(F.col("group").is_not_null(), F.col("attempt")).alias("attempt"),
        "is_letter",
        F.col("queue_id").is_not_null().alias("has_queue"),
        window.alias("window_start_ms"),
        F.when(lateness.is_not_null(), lateness_bar(lateness)).alias("bar_ms"),
        lateness.alias("lateness_ms"),
        F.when(kind_in(*NUMBERED), F.col("entry")).alias("accepted_entry"),
    )
    return per_row.group_by(*_COUNT_KEYS).agg(
        F.count_rows().alias("count"),
        F.count_if(F.col("lateness_ms") > late_after_ms).alias("late"),
        F.count_if(F.col("lateness_ms") < 0).alias("early"),
        F.max_of("lateness_ms").alias("lateness_max_ms"),
        F.min_of("accepted_entry").alias("entry_min"),
    )


def merge_counts(first: Relation, second: Relation) -> Relation:
    """Add two tables of ``count_rows``."""
    return (
        first.union(second)
        .group_by(*_COUNT_KEYS)
        .agg(
            *(F.sum_of(name).alias(name) for name in ("count", "late", "early")),
            F.max_of("lateness_max_ms").alias("lateness_max_ms"),
            F.min_of("entry_min").alias("entry_min"),
        )
    )


def failed_keys(rows: Relation, bits: int) -> Relation:
    """Return the keys of messages that a group failed, or that returned to it as copies.

    ``is_unnamed`` marks messages that a group left without naming the place: their events do not show the places left.
    """
    is_unnamed = is_exit() & F.col("queue_offset").is_null()
    is_copy = kind_in("RETRIED") & ~F.col("is_letter")
    own = rows.where((is_unnamed | is_copy) & F.col("group").is_not_null())
    key = key_of(F.col("topic"), F.col("message_id"), bits)
    return own.group_by(key.alias("key")).agg((F.count_if(is_unnamed) > 0).alias("is_unnamed"))


def fingerprints(rows: Relation, subscriptions: Relation, failed: Relation, *, bits: int) -> Relation:
    """Sum the hashes of arrivals at each group and of its exits, by windows of message ids.

    The sums of places leave out messages that are unnamed in ``failed`` (``failed_keys``).
    """
    side = group_side(rows, subscriptions).with_column("key", key_of(F.col("topic"), F.col("message_id"), bits))
    side = side.with_column("id_window", id_window(F.col("message_id"), F.col("key")))
    flagged = F.broadcast(failed.where(F.col("is_unnamed")))
    side = gathered(side.join(flagged, on="key", how="left"))
    places = F.when(F.col("is_unnamed").is_null(), placed()).otherwise(0)
    return side.group_by(*_SUM_KEYS).agg(
        F.count_if(is_fired_to_group()).alias("fired"),
        *signed_sums(F.col("key"), F.col("visible"), "visible"),
        *signed_sums(F.col("key"), F.col("copies"), "copies"),
        *signed_sums(place_key(), places, "placed"),
    )


def merge_fingerprints(first: Relation, second: Relation) -> Relation:
    """Add two tables of ``fingerprints``."""
    sums = [
        F.bit_xor(name).alias(name) if name.endswith("_xor") else F.sum_of(name).alias(name)
        for name in ("fired", *_SUMS)
    ]
    return first.union(second).group_by(*_SUM_KEYS).agg(*sums)


def is_equal() -> Column:
    """Return True for rows of ``fingerprints`` that balance: nothing open and nothing surplus."""
    same = F.lit(True)
    for name in _SUMS:
        same &= F.col(name) == 0
    return same


# --- tables of the report ---------------------------------------------------------------------------------------------


def scheduled_totals(counts: Relation, spools: list[str]) -> Relation:
    """Return accepted messages and delivery lateness with percentiles, per window and topic."""
    own = counts.where(~F.col("is_letter") & F.col("window_start_ms").is_not_null() & ~F.col("cell").isin(*spools, ""))
    keys = ("window_start_ms", "topic")
    sums = own.group_by(*keys).agg(
        F.sum_of(F.when(F.col("kind") == "QUEUED", F.col("count")).otherwise(0)).alias("accepted_at_once"),
        F.sum_of(F.when(F.col("kind") == "SCHEDULED", F.col("count")).otherwise(0)).alias("scheduled"),
        F.sum_of(F.when(F.col("kind") == "DELIVERED", F.col("count")).otherwise(0)).alias("fired"),
        F.sum_of(F.when(kind_in(*CANCELLED), F.col("count")).otherwise(0)).alias("cancelled"),
        F.sum_of("late").alias("late"),
        F.sum_of("early").alias("early"),
        F.max_of("lateness_max_ms").alias("lateness_max_ms"),
    )
    bars = own.where(F.col("kind") == "DELIVERED").group_by(*keys, "bar_ms").agg(F.sum_of("count").alias("count"))
    upwards = RowWindow.of(*keys).in_order("bar_ms").up_to()
    ranked = bars.with_column("rank", F.sum_of("count").over(upwards)).with_column(
        "total", F.sum_of("count").over(RowWindow.of(*keys))
    )
    quantiles = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
    at = [
        F.min_of(F.when(F.col("rank") >= F.ceil(F.col("total") * share), F.col("bar_ms"))).alias(f"lateness_{name}_ms")
        for name, share in quantiles.items()
    ]
    capped = [
        F.least(F.col(f"lateness_{name}_ms"), F.greatest(F.col("lateness_max_ms"), F.lit(0))).alias(
            f"lateness_{name}_ms"
        )
        for name in quantiles
    ]
    joined = sums.join(ranked.group_by(*keys).agg(*at), on=list(keys), how="left")
    return joined.select(*sums.columns, *capped)


def entry_totals(rows: Relation, window_ms: int) -> Relation:
    """Return the counts of ``scheduled_totals`` for some rows per window and topic, without lateness."""
    kind = F.col("kind")
    own = rows.where(kind_in("SCHEDULED", *ENDS_OF_ENTRY) & ~F.col("is_letter"))
    window = floor_to(F.coalesce("due_ms", "at_ms"), window_ms)
    return own.group_by(window.alias("window_start_ms"), "topic", "cell").agg(
        F.count_if(kind == "SCHEDULED").alias("scheduled"),
        F.count_if(kind == "DELIVERED").alias("fired"),
        F.count_if(kind_in(*CANCELLED)).alias("cancelled"),
    )


def group_totals(counts: Relation, spools: list[str]) -> Relation:
    """Return the numbers of acknowledged, dead and filtered messages per topic and group."""
    own = counts.where(~F.col("is_letter") & F.col("group").is_not_null() & ~F.col("cell").isin(*spools, ""))
    kind, count = F.col("kind"), F.col("count")
    own = own.where(kind_in(*FINISHED, "FILTERED", *DEAD))
    return own.group_by("topic", "group").agg(
        F.sum_of(F.when(kind_in(*FINISHED), count).otherwise(0)).alias("acked"),
        F.sum_of(F.when(kind == "FILTERED", count).otherwise(0)).alias("filtered"),
        F.sum_of(F.when(kind_in(*DEAD), count).otherwise(0)).alias("dead"),
    )


def histogram(bars: list[tuple[str, int, int]]) -> list[dict[str, object]]:
    """Return the rows of the histogram from (topic, lateness, count)."""
    found: dict[tuple[str, int], int] = {}
    for topic, late_ms, count in bars:
        key = (topic, bar_of(late_ms))
        found[key] = found.get(key, 0) + count
    order = sorted(found, key=lambda key: (key[0], key[1] < 0, key[1]))
    return [{"topic": topic, "upper_ms": upper, "count": found[topic, upper]} for topic, upper in order]
