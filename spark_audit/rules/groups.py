"""Verdict on each message for each group that must finish it, place by place.

A place is (queue, offset), in the topic's queues or the group's retry lane. Nacks and deaths name a queue and no
offset. If a message is in one queue more than once, they leave the place that became visible first.
"""

from __future__ import annotations

from collections.abc import Mapping

from spark_audit.engines import Column, Relation, RowWindow, gathered
from spark_audit.engines import functions as F  # noqa: N812 - the name that Spark code goes by
from spark_audit.rules.entries import has_gap
from spark_audit.rules.rows import group_side, is_fired_to_group, kind_in, place_key, placed
from spark_audit.schema import DEAD, FINISHED, IN_LANE, LANE

KEY = ("cell", "topic", "group", "message_id")
STATES = (
    "acked",
    "dead",
    "expired",
    "purged",
    "filtered",
    "unread",
    "in_flight",
    "in_retry",
    "lost",
    "inconclusive",
)


def unbalanced(side: Relation) -> Relation:
    """Return the messages (``KEY``) that a group did not finish exactly once, at each place by name and in order.

    ``side`` is the result of ``group_side``. Messages that a group left without naming the place are included.
    """
    came, left = (
        F.min_of(F.when(condition, F.col("sequence"))) for condition in (F.col("visible") > 0, F.col("visible") < 0)
    )
    places = side.group_by(*KEY, "queue_id", "queue_offset").agg(
        F.sum_of("visible").alias("visible"),
        F.sum_of("copies").alias("copies"),
        F.sum_of(placed() * F.shift_right(place_key(), 24)).alias("placed"),
        F.coalesce(left < came, F.lit(False)).alias("is_early"),
    )
    sums = places.group_by(*KEY).agg(
        *(F.sum_of(name).alias(f"{name}_sum") for name in ("visible", "copies", "placed")),
        F.count_if("is_early").alias("early"),
    )
    is_open = F.col("visible_sum") != 0
    for name in ("copies_sum", "placed_sum", "early"):
        is_open |= F.col(name) != 0
    return sums.where(is_open).select(*KEY)


def open_side(rows: Relation, subscriptions: Relation) -> Relation:
    """Return the rows of ``group_side`` of messages that were not finished exactly once."""
    side = group_side(rows, subscriptions)
    return side.join(unbalanced(side), on=list(KEY), how="left_semi")


def place_facts(side: Relation) -> Relation:
    """Return each place, and each exit without a place, with its numbers of exits, surplus exits and open passes.

    A reset group passes a place again and must leave it once in each pass. An exit before the arrival of the message
    (``early``) belongs to no pass.
    """
    place = (*KEY, "queue_id", "queue_offset")
    kind = F.col("kind")
    is_named = kind_in(*FINISHED, "FILTERED")
    is_visible = F.col("visible") > 0
    visible_sequence = F.min_of(F.when(is_visible, F.col("sequence")))
    is_early = F.coalesce(F.col("sequence") < F.col("visible_sequence"), F.lit(False))
    named = (
        side.where(is_visible | is_named)
        .with_column("visible_sequence", visible_sequence.over(RowWindow.of(*place)))
        .group_by(*place)
        .agg(
            F.count_if(is_visible).alias("visible"),
            F.count_if(kind_in(*FINISHED) & ~is_early).alias("acks"),
            F.count_if((kind == "FILTERED") & ~is_early).alias("filters"),
            F.count_if(is_early).alias("early"),
            F.count_distinct(F.when(is_visible, F.col("pass_number"))).alias("passes"),
            F.min_of(F.when(is_visible, F.col("sequence"))).alias("from_sequence"),
            F.max_of(is_fired_to_group().cast("int")).alias("is_original"),
            F.max_by("kind", "sequence").alias("last_kind"),
            F.min_of("sequence").alias("first_sequence"),
        )
    )
    both = gathered(named.join(_unnamed_exits(side), on=[*KEY, "queue_id"], how="full"))
    both = both.filled(0, ["visible", "acks", "filters", "early", "passes", "unnamed", "unnamed_early", "nacks"])
    exits = F.col("acks") + F.col("filters")
    both = both.with_column("named", F.least(exits, F.col("passes")))  # exits by name, one per pass
    both = both.with_column("free", F.col("passes") - F.col("named"))
    queue = RowWindow.of(*KEY, "queue_id")
    # a place without a recorded start has no pass and must not use up an exit of one that has
    turn = queue.in_order(F.nulls_last("from_sequence"), "queue_offset")
    before = turn.before()
    both = both.with_column("turn", F.row_number().over(turn))
    both = both.with_column("free_before", F.coalesce(F.sum_of("free").over(before), F.lit(0)))
    both = both.with_column("free_in_queue", F.sum_of("free").over(queue))
    both = both.with_column("places", F.sum_of("visible").over(queue))
    is_first = F.col("turn") == 1
    taken = F.least(F.greatest(F.col("unnamed") - F.col("free_before"), F.lit(0)), F.col("free"))
    # among surplus exits by name, the last one is the outcome
    by_filter = F.least("filters", "named")
    by_ack = F.least("acks", "named")
    is_acked_last = F.col("last_kind") != "FILTERED"
    return both.select(
        *place,
        (F.col("free") - taken).alias("open"),
        F.when(F.col("is_original") == 1, F.col("passes")).otherwise(0).alias("fired"),
        F.when(is_acked_last, by_ack).otherwise(F.col("named") - by_filter).alias("acked"),
        F.when(is_acked_last, F.col("named") - by_ack).otherwise(by_filter).alias("filtered"),
        F.when(F.col("visible") > 0, exits - F.col("named")).otherwise(0).alias("named_surplus"),
        F.when(F.col("visible") == 0, exits).otherwise(F.col("early")).alias("named_orphans"),
        F.when(is_first, F.greatest(F.col("unnamed") - F.col("free_in_queue"), F.lit(0)) + F.col("unnamed_early"))
        .otherwise(0)
        .alias("unnamed_surplus"),
        F.when(is_first, F.col("unnamed_early")).otherwise(0).alias("unnamed_early"),
        (F.col("places") > 0).alias("is_known_queue"),
        F.when(is_first, F.col("nacks")).otherwise(0).alias("nacks"),
        F.coalesce("from_sequence", "first_sequence", "unnamed_sequence").alias("from_sequence"),
    )


def _unnamed_exits(side: Relation) -> Relation:
    """Return the exits of each queue that name no offset, before the message was in the queue and after."""
    is_visible = F.col("visible") > 0
    since = F.min_of(F.when(is_visible, F.col("sequence"))).over(RowWindow.of(*KEY, "queue_id"))
    is_early = F.coalesce(F.col("sequence") < F.col("visible_sequence"), F.lit(False))
    return (
        side.with_column("visible_sequence", since)
        .where((F.col("visible") < 0) & ~kind_in(*FINISHED, "FILTERED"))
        .group_by(*KEY, "queue_id")
        .agg(
            F.count_if(~is_early).alias("unnamed"),
            F.count_if(is_early).alias("unnamed_early"),
            F.count_if(F.col("kind") == "NACKED").alias("nacks"),
            F.min_of("sequence").alias("unnamed_sequence"),
        )
    )


def judge_places(places: Relation, cells: Relation, queues: Relation, progress: Relation, ends: Relation) -> Relation:
    """Add ``state`` and ``rule`` to open places; null for the others.

    ``queues`` and ``progress`` are from the newest snapshot. ``ends`` are removals by retention and operators (cell,
    topic, queue, offset, message, ``ended``).
    """
    offset = F.col("queue_offset")
    in_lane = F.col("queue_id") == LANE
    of_topic = queues.select(
        *(F.col(name).alias(f"q_{name}") for name in ("cell", "topic", "queue_id", "group")),
        "first_offset",
        "end_offset",
    )
    joined = gathered(places.join(F.broadcast(cells), on="cell", how="inner"))
    joined = joined.join(
        F.broadcast(of_topic),
        on=(F.col("cell") == F.col("q_cell"))
        & (F.col("topic") == F.col("q_topic"))
        & (F.col("queue_id") == F.col("q_queue_id"))
        & (~in_lane | (F.col("group") == F.col("q_group"))),
        how="left",
    )
    joined = joined.join(F.broadcast(progress), on=["cell", "topic", "group", "queue_id"], how="left")
    joined = joined.join(ends, on=["cell", "topic", "queue_id", "queue_offset", "message_id"], how="left")
    seen = F.coalesce(F.col("snapshot") >= F.col("from_sequence"), F.lit(False))
    finished = F.coalesce((F.col("floor") > offset) | F.array_contains("done", offset), F.lit(False))
    gone = F.coalesce((F.col("end_offset") <= offset) | (F.col("first_offset") > offset), F.lit(True))
    handed = F.coalesce(F.array_contains("hidden", offset) | (F.col("cursor") > offset), F.lit(False))
    is_lost = seen & (finished | gone)
    verdict = (
        F.when(F.col("ended").is_not_null() & ~in_lane, _say(F.col("ended"), F.lit("")))
        .when(is_lost & has_gap(F.col("from_sequence"), F.col("snapshot")), _text("inconclusive", "gap"))
        .when(is_lost & finished, _text("lost", "finished by the snapshot, without an exit"))
        .when(is_lost, _text("lost", "not in its queue by the snapshot"))
        .when(seen & handed, _text("in_flight", ""))
        .otherwise(_text("unread", ""))
    )
    judged = joined.with_column("verdict", F.when(F.col("open") > 0, verdict))
    fields = (F.col("verdict")[name].alias(name) for name in ("state", "rule"))
    return judged.select(*places.columns, "is_retired", "gaps", "snapshot", *fields)


def message_facts(side: Relation, judged: Relation, copies: Relation, cells: Relation) -> Relation:
    """Return the ledger numbers per message and group (``fired`` and ``STATES``), and the surplus.

    ``copies`` are the pending copies of the newest snapshot (``KEY``, ``waiting_there``). The numbers add up: surplus
    exits are not counted, and neither are the results of copies without a nack.
    """
    kind = F.col("kind")

    def open_as(state: str) -> Column:
        return F.sum_of(F.when(F.col("state") == state, F.col("open")).otherwise(0))

    events = side.group_by(*KEY).agg(
        F.count_if(kind == "NACKED").alias("nacked"),
        F.count_if(kind_in(*IN_LANE)).alias("retried"),
        F.count_if(kind_in(*DEAD) & F.col("queue_id").is_null() & (F.col("copies") < 0)).alias("dead_copies"),
        F.count_if(kind_in(*DEAD) & (F.col("visible") < 0)).alias("dead_places"),
        F.max_of(F.when(kind == "NACKED", F.col("sequence"))).alias("nacked_sequence"),
        F.max_of("sequence").alias("last_sequence"),
    )
    unnamed_orphans = F.when(F.col("is_known_queue"), F.col("unnamed_early")).otherwise(F.col("unnamed_surplus"))
    on_places = judged.group_by(*KEY).agg(
        *(F.sum_of(name).alias(name) for name in ("fired", "acked", "filtered")),
        F.sum_of(F.least("unnamed_surplus", "nacks")).alias("nack_surplus"),
        F.sum_of(F.col("unnamed_surplus") - F.least("unnamed_surplus", "nacks")).alias("dead_surplus"),
        F.sum_of("named_surplus").alias("named_surplus"),
        F.sum_of(F.col("unnamed_surplus") - unnamed_orphans).alias("implied_surplus"),
        F.sum_of(unnamed_orphans + F.col("named_orphans")).alias("orphan_exits"),
        *(open_as(state).alias(state) for state in STATES if state not in _COUNTED),
        open_as("lost").alias("lost_places"),
        F.min_of(F.when(F.col("state") == "lost", F.col("rule"))).alias("lost_rule"),
        open_as("inconclusive").alias("inconclusive_places"),
    )
    joined = events.join(on_places, on=list(KEY), how="left").join(copies, on=list(KEY), how="left")
    # a message known only from the death of a copy was at no place
    counts = [name for name in joined.columns if name not in {*KEY, "lost_rule", "nacked_sequence", "last_sequence"}]
    joined = joined.filled(0, counts)
    joined = gathered(joined.join(F.broadcast(cells), on="cell", how="inner"))
    # An exit without its own place, of a message that was there before, is surplus; unless the trail has a
    # gap, in which the message may have come back, or retention removed its beginning.
    is_excused = has_gap(F.lit(0), F.col("last_sequence")) | (F.col("is_retired") & (F.col("fired") == 0))
    implied = F.col("implied_surplus")
    joined = joined.with_columns(
        {
            "surplus": F.col("named_surplus") + F.when(is_excused, 0).otherwise(implied),
            "orphan_exits": F.col("orphan_exits") + F.when(is_excused, implied).otherwise(0),
        }
    )
    return _with_copies(joined)


_COUNTED = ("acked", "dead", "filtered", "in_retry")


def _with_copies(facts: Relation) -> Relation:
    """Add pending copies, and whether the snapshot contains them."""
    balance = F.col("nacked") - F.col("nack_surplus") - F.col("retried") - F.col("dead_copies")
    facts = facts.with_column("balance", balance).with_column("waiting", F.greatest(F.col("balance"), F.lit(0)))
    seen = F.coalesce(F.col("snapshot") >= F.col("nacked_sequence"), F.lit(False))
    missing = F.when(seen, F.greatest(F.col("waiting") - F.col("waiting_there"), F.lit(0))).otherwise(0)
    facts = facts.with_column("missing_copies", missing)
    is_gap = has_gap(F.col("nacked_sequence"), F.col("snapshot"))
    facts = facts.with_column("copies_lost", F.when(is_gap, 0).otherwise(F.col("missing_copies")))
    facts = facts.with_column("copies_unclear", F.col("missing_copies") - F.col("copies_lost"))
    orphans = F.greatest(-F.col("balance"), F.lit(0))
    facts = facts.with_column("orphan_copies", orphans)
    counted = {
        "inconclusive": F.col("inconclusive") + F.col("copies_unclear"),
        "acked": F.col("acked"),
        "dead": F.greatest(F.col("dead_places") - F.col("dead_surplus"), F.lit(0)) + F.col("dead_copies"),
        "filtered": F.col("filtered"),
        "unread": F.col("unread"),
        "in_flight": F.col("in_flight"),
        "lost": F.col("lost") + F.col("copies_lost"),
    }
    in_retry = F.col("waiting") - F.col("missing_copies")
    return facts.with_columns({"in_retry": in_retry, **_without_orphans(counted)})


def _without_orphans(counted: Mapping[str, Column]) -> dict[str, Column]:
    """Subtract the results of copies without a nack from the counts, because they are not outcomes of a message.

    Open places are reduced first: the missing record is the one of their exit.
    """
    made = {}
    left = F.col("orphan_copies")
    for state, count in counted.items():
        made[state] = F.greatest(count - F.greatest(left, F.lit(0)), F.lit(0))
        left -= count
    return made


def group_findings(facts: Relation) -> Relation:
    """Return findings about messages of groups, one row per finding."""
    unclear = has_gap(F.lit(0), F.col("last_sequence"))
    orphans = F.col("orphan_exits") + F.col("orphan_copies")
    found = F.array(
        _finding(F.col("lost_places") > 0, "LOST", F.col("lost_rule"), F.lit("")),
        _finding(F.col("copies_lost") > 0, "LOST", F.lit("a copy is not in the snapshot"), F.lit("")),
        _finding(F.col("inconclusive") > 0, "INCONCLUSIVE", F.lit("gap"), F.lit("")),
        _finding(
            F.col("surplus") > 0,
            "DUPLICATE_EXIT",
            F.lit("a place was left more than once"),
            F.concat(F.col("surplus").cast("string"), F.lit(" too much")),
        ),
        _finding((orphans > 0) & unclear & (F.col("inconclusive") == 0), "INCONCLUSIVE", F.lit("gap"), F.lit("")),
        _finding(
            (orphans > 0) & ~unclear & ~F.col("is_retired"),
            "ORPHAN",
            F.when(F.col("orphan_exits") > 0, F.lit("left a place it was not at")).otherwise(
                F.lit("a copy without a failure")
            ),
            F.lit(""),
        ),
    )
    listed = facts.select(*KEY, F.explode(found).alias("found"))
    nothing = {"entry": "bigint", "due_ms": "bigint", "window_start_ms": "bigint"}
    return listed.select(
        *(F.col("found")[name].alias(name) for name in ("kind", "rule", "detail")),
        "cell",
        "topic",
        "group",
        "message_id",
        *(F.lit(None).cast(kind).alias(name) for name, kind in nothing.items()),
    )


def _say(state: Column, rule: Column) -> Column:
    return F.struct(state.alias("state"), rule.alias("rule"))


def _text(state: str, rule: str) -> Column:
    return _say(F.lit(state), F.lit(rule))


def _finding(when: Column, kind: str, rule: Column, detail: Column) -> Column:
    return F.when(when, F.struct(F.lit(kind).alias("kind"), rule.alias("rule"), detail.alias("detail")))
