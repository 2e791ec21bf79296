"""Verdict on each entry: a delayed message of a daemon, or a spooled message of a producer.

Exact, by cell and entry with the full message id. ``cells`` has one row per cell, with the facts that verdicts need
(``CELLS``). A verdict is reported only if the trail proves it.
"""

from __future__ import annotations

from spark_audit.engines import Column, Relation, RowWindow, gathered
from spark_audit.engines import functions as F  # noqa: N812 - the name that Spark code goes by
from spark_audit.rules.rows import floor_to, kind_in
from spark_audit.schema import CANCELLED, ENDS_OF_ENTRY, OF_SPOOL, RESCHEDULED, Fields

CELLS: Fields = (
    ("cell", "string"),
    ("role", "string"),
    ("is_retired", "boolean"),
    ("entry_min", "bigint"),
    ("snapshot", "bigint"),
    ("snapshot_ms", "bigint"),
    ("is_silent", "boolean"),
    ("gaps", "array<struct<first: bigint, last: bigint>>"),
    ("steps_back", "array<bigint>"),
    ("pauses", "array<struct<topic: string, from_ms: bigint, to_ms: bigint, why: string>>"),
    ("kept_back", "array<struct<topic: string, from_ms: bigint, to_ms: bigint>>"),
    ("stops", "array<struct<from_ms: bigint, to_ms: bigint, words: string>>"),
)
# Removals of topics: the topic existed up to this event of its cell.
REMOVALS: Fields = (
    ("r_cell", "string"),
    ("r_topic", "string"),
    ("r_after_sequence", "bigint"),
    ("r_to_sequence", "bigint"),
    ("r_to_ms", "bigint"),
)
_OPEN = ("SCHEDULED", RESCHEDULED, "REQUEUED", "SEND_FAILED")
_PLACE = ("cell", "topic", "group", "message_id", "entry", "due_ms", "window_start_ms")


def entry_facts(rows: Relation, cells: Relation, held: Relation) -> Relation:
    """Aggregate the events of each entry, joined with its row in the newest snapshot of its cell (``held``)."""
    sequence = F.col("sequence")
    roles = F.broadcast(cells.select("cell", "role"))
    own = rows.where(kind_in("SCHEDULED", RESCHEDULED, *ENDS_OF_ENTRY, *OF_SPOOL) & ~F.col("is_letter"))
    own = gathered(with_life(own.join(roles, on="cell")))

    def count(*kinds: str) -> Column:
        return F.count_if(kind_in(*kinds))

    def first(name: str, *kinds: str) -> Column:
        return F.min_of(F.when(kind_in(*kinds), F.col(name)))

    facts = own.group_by("cell", "life", "topic", "message_id").agg(
        F.max_by("entry", F.when(F.col("entry").is_not_null(), sequence)).alias("entry"),
        count("SCHEDULED").alias("scheduled"),
        count("DELIVERED").alias("delivered"),
        count(*CANCELLED).alias("recalled"),
        count("SENT").alias("sent"),
        count("DROPPED").alias("dropped"),
        # a spool that adopted a dead entry first records its requeueing; a full spool drops new entries
        first("sequence", "SCHEDULED", "REQUEUED", "DROPPED").alias("from_sequence"),
        first("at_ms", "SCHEDULED", "REQUEUED", "DROPPED").alias("accepted_at_ms"),
        first("sequence", *ENDS_OF_ENTRY, "SENT", "DROPPED").alias("end_sequence"),
        first("at_ms", "DELIVERED").alias("fired_at_ms"),
        first("due_ms", *ENDS_OF_ENTRY).alias("ended_due_ms"),
        F.max_of(F.when(kind_in(RESCHEDULED), sequence)).alias("moved_sequence"),
        F.min_of("sequence").alias("first_sequence"),
        F.coalesce(
            F.max_by(F.when(kind_in(*_OPEN), F.col("due_ms")), F.when(kind_in(*_OPEN), sequence)),
            F.min_of("due_ms"),
            F.min_of("at_ms"),
        ).alias("set_due_ms"),
        F.max_by("kind", sequence).alias("last_kind"),
    )
    there = with_life(held.join(roles, on="cell")).select(
        "cell",
        "life",
        "message_id",
        F.col("kind").alias("held_as"),
        "is_stranded",
        F.col("due_ms").alias("held_until_ms"),
    )
    joined = facts.join(there, on=["cell", "life", "message_id"], how="left")
    joined = joined.join(F.broadcast(cells), on="cell", how="inner")
    # The event that set another time may be in a gap; older daemons shifted delays by clock steps without an event.
    was_stepped = F.exists("steps_back", lambda step: (F.col("from_sequence") < step) & (F.col("end_sequence") > step))
    is_untold = has_gap(F.col("from_sequence"), F.col("end_sequence")) | (
        F.coalesce(was_stepped, F.lit(False)) & (F.col("ended_due_ms") < F.col("set_due_ms"))
    )
    due_ms = F.when(is_untold, F.coalesce("ended_due_ms", "set_due_ms")).otherwise(F.col("set_due_ms"))
    return gathered(joined.with_column("due_ms", due_ms))


def with_life(table: Relation) -> Relation:
    """Add ``life``, the number of one life of a message in its cell; ``table`` has the ``role`` of the cell.

    A daemon's entry keeps its number from acceptance to end. A spool's entry gets another number at each wait. It has
    none while it waits behind another entry of its key, and none at its end. So all events of a spooled message are one
    life.
    """
    return table.with_column("life", F.when(F.col("role") == "spool", -1).otherwise(F.col("entry")))


def judge_entries(facts: Relation, *, watermark_ms: int, grace_ms: int, window_ms: int) -> Relation:
    """Add ``state`` (a column of the ledgers, or ``moved``, ``unknown``) and its reason, ``rule``."""
    is_spool = F.col("role") == "spool"
    seen = F.col("snapshot") >= F.col("from_sequence")
    is_late = F.lit(watermark_ms) > F.col("due_ms") + grace_ms
    # by the snapshot it was postponed or given up: the event of that may be in a gap
    has_gone_on = (F.col("held_until_ms") > F.col("due_ms")) | (F.col("held_as") == "DEAD")
    is_excused = has_gone_on & has_gap(F.col("from_sequence"), F.col("snapshot"))
    # due after the snapshot, which could not contain HELD yet, and kept back by its topic since then
    is_kept_back = (F.col("snapshot_ms") < F.col("due_ms") + grace_ms) & F.exists(
        "kept_back",
        lambda each: (
            (each["topic"] == F.col("topic"))
            & (each["from_ms"] <= F.col("due_ms") + grace_ms)
            & (each["to_ms"] >= watermark_ms - grace_ms)
        ),
    )
    is_overdue = ~F.col("held_as").isin("PARKED", "HELD") & ~F.coalesce(is_kept_back, F.lit(False))
    is_held, is_stranded = F.col("held_as").is_not_null(), F.coalesce("is_stranded", F.lit(False))
    # a directory that another spool adopted: its entries continue there
    newer = RowWindow.of("topic", "message_id", "role")
    accepts = F.max_of(F.struct(F.coalesce("accepted_at_ms", F.lit(-1)).alias("at_ms"), "cell")).over(newer)
    is_moved = is_spool & (accepts["cell"] != F.col("cell"))
    opened = (
        F.when(is_moved & ~is_held, F.struct(F.lit("moved").alias("state"), F.lit("taken over").alias("rule")))
        .when(seen & ~is_held & has_gap(F.col("from_sequence"), F.col("snapshot")), _say("inconclusive", "gap"))
        .when(seen & ~is_held, _say("lost", "not in the snapshot"))
        .when(seen & is_stranded, _say("lost", "stranded in the store"))
        .when(F.col("is_silent"), _say("inconclusive", "silent cell"))
        .when(seen & is_late & is_excused, _say("inconclusive", "gap"))
        .when(seen & is_late & is_overdue, _say("overdue", "in the snapshot after its time"))
        .when(~F.coalesce(seen, F.lit(False)) & is_late, _say("inconclusive", "no snapshot"))
        .otherwise(_say("pending", ""))
    )
    last = F.col("last_kind")
    of_spool = (
        F.when(last == "SENT", _say("sent", ""))
        .when(last == "SEND_DEAD", _say("dead", ""))
        .when(last == "DROPPED", _say("dropped", ""))
        .otherwise(opened)
    )
    of_daemon = (
        F.when(F.col("delivered") > 0, _say("fired", ""))
        .when(F.col("recalled") > 0, _say("cancelled", ""))
        .otherwise(opened)
    )
    verdict = (
        F.when(F.col("from_sequence").is_null(), _say("unknown", "")).when(is_spool, of_spool).otherwise(of_daemon)
    )
    return (
        facts.with_column("verdict", verdict)
        .select(*facts.columns, *_fields("verdict", "state", "rule"))
        .with_column("window_start_ms", floor_to(F.col("due_ms"), window_ms))
    )


def entry_findings(judged: Relation, *, late_after_ms: int) -> Relation:
    """Return findings about entries, one row per finding."""
    late_ms = F.col("fired_at_ms") - F.col("due_ms")
    is_unknown = F.col("state") == "unknown"
    ends = F.col("delivered") + F.col("recalled") + F.col("sent") + F.col("dropped")
    is_older = F.coalesce("entry", F.lit(-1)) < F.coalesce("entry_min", F.lit(2**62))
    # each failed attempt gives a spool's entry another number, so the number does not date its acceptance
    is_excused = F.col("is_retired") & ((F.col("role") == "spool") | is_older)
    found = F.array(
        _finding(F.col("state") == "lost", "LOST", F.col("rule"), _since(F.col("from_sequence"))),
        _finding(F.col("state") == "overdue", "OVERDUE", F.col("rule"), F.lit("")),
        _finding(F.col("state") == "inconclusive", "INCONCLUSIVE", F.col("rule"), F.lit("")),
        _finding(
            (F.col("delivered") > 1) | (F.col("sent") > 1),
            "DUPLICATE_DELIVERY",
            F.lit("ended more than once"),
            F.concat(ends.cast("string"), F.lit(" times")),
        ),
        _finding(
            (F.col("delivered") > 0) & (F.col("recalled") > 0), "ILLEGAL", F.lit("delivered and recalled"), F.lit("")
        ),
        _finding(
            F.col("ended_due_ms") != F.col("due_ms"),
            "ILLEGAL",
            F.lit("ended with another delivery time than was set last"),
            F.concat(F.lit("by "), _ms(F.col("ended_due_ms") - F.col("due_ms"))),
        ),
        _finding(
            F.col("moved_sequence") > F.col("end_sequence"), "ILLEGAL", F.lit("rescheduled after its end"), F.lit("")
        ),
        _finding(F.col("recalled") > 1, "ILLEGAL", F.lit("recalled more than once"), F.lit("")),
        _finding(F.col("end_sequence") < F.col("from_sequence"), "ILLEGAL", F.lit("ended before it began"), F.lit("")),
        _finding(
            is_unknown & has_gap(F.lit(0), F.col("first_sequence")),
            "INCONCLUSIVE",
            F.lit("gap"),
            F.lit("its beginning may be in a gap"),
        ),
        _finding(
            is_unknown & ~is_excused & ~has_gap(F.lit(0), F.col("first_sequence")),
            "ORPHAN",
            F.lit("ended without a beginning"),
            F.col("last_kind"),
        ),
        _finding(late_ms > late_after_ms, "LATE", _why_late(), F.concat(_ms(late_ms), _stop("; "))),
        _finding(late_ms < 0, "EARLY", F.lit("fired early"), _ms(-late_ms)),
    )
    return _spread(judged, found)


def accept_findings(rows: Relation, cells: Relation, removals: Relation, *, window_ms: int) -> Relation:
    """Return messages that daemons accepted more than once; ``extra`` is the number of surplus acceptances.

    A second acceptance counts as surplus while the topic of an earlier one exists. A topic created again is another
    topic.
    """
    place = ["topic", "message_id"]
    daemons = F.broadcast(cells.where(F.col("role") == "daemon").select("cell"))
    accepts = rows.where(kind_in("SCHEDULED", "QUEUED") & ~F.col("is_letter"))
    accepts = accepts.join(daemons, on="cell", how="left_semi")
    again = accepts.group_by(*place).agg(F.count_rows().alias("count")).where(F.col("count") > 1)
    accepts = gathered(accepts.join(again.drop("count"), on=place, how="left_semi"))
    is_before = (F.col("sequence") < F.col("r_to_sequence")) & (F.col("sequence") > F.col("r_after_sequence"))
    is_its = (F.col("cell") == F.col("r_cell")) & (F.col("topic") == F.col("r_topic")) & is_before
    order = F.struct("at_ms", "cell", "sequence")
    window_of = F.when(F.col("kind") == "SCHEDULED", F.col("due_ms")).otherwise(F.col("at_ms"))
    lives = (
        accepts.join(F.broadcast(removals), on=is_its, how="left")
        .group_by(*place, "cell", "r_to_sequence")
        .agg(
            F.count_rows().alias("count"),
            F.min_of("at_ms").alias("from_ms"),
            F.coalesce(F.max_of("r_to_ms"), F.lit(2**62)).alias("to_ms"),
            F.max_of(order).alias("last"),
            F.max_by("entry", order).alias("entry"),
            F.max_by("due_ms", order).alias("due_ms"),
            F.min_of(order).alias("first"),
            F.min_by(window_of, order).alias("basis_ms"),
        )
    )
    all_lives = lives.group_by(*place).agg(F.collect_set(F.struct("cell", "from_ms", "to_ms")).alias("lives"))

    def is_beside(other: Column) -> Column:
        is_same_time = (other["from_ms"] == F.col("from_ms")) & (other["cell"] < F.col("cell"))
        is_earlier = (other["from_ms"] < F.col("from_ms")) | is_same_time
        return (other["cell"] != F.col("cell")) & is_earlier & (other["to_ms"] > F.col("from_ms"))

    facts = (
        lives.join(all_lives, on=place)
        .with_column("elsewhere", F.exists("lives", is_beside).cast("int"))
        .group_by(*place)
        .agg(
            F.sum_of(F.col("count") - 1 + F.col("elsewhere")).alias("extra"),
            F.sum_of("elsewhere").alias("elsewhere"),
            F.max_by("cell", "last").alias("cell"),
            F.max_by("entry", "last").alias("entry"),
            F.max_by("due_ms", "last").alias("due_ms"),
            F.min_by("basis_ms", "first").alias("basis_ms"),
        )
    )
    counts = [(F.col(name) + 1).cast("string") for name in ("extra", "elsewhere")]
    return facts.where(F.col("extra") > 0).select(
        F.lit("DUPLICATE_ACCEPT").alias("kind"),
        F.when(F.col("elsewhere") > 0, F.lit("in more than one cell")).otherwise(F.lit("in one cell")).alias("rule"),
        F.concat(counts[0], F.lit(" times, in cells: "), counts[1]).alias("detail"),
        "cell",
        "topic",
        F.lit(None).cast("string").alias("group"),
        "message_id",
        "entry",
        "due_ms",
        floor_to(F.col("basis_ms"), window_ms).alias("window_start_ms"),
        "extra",
    )


def _why_late() -> Column:
    """Return the reason for a late delivery, if known: a pause or a rate of its topic, or a stop of the daemon."""

    def was(why: str) -> Column:
        def is_reason(pause: Column) -> Column:
            lasted = (pause["from_ms"] <= F.col("fired_at_ms")) & (pause["to_ms"] >= F.col("due_ms"))
            return (pause["topic"] == F.col("topic")) & lasted & (pause["why"] == why)

        return F.coalesce(F.exists("pauses", is_reason), F.lit(False))

    return (
        F.when(was("paused"), F.lit("fired late: its topic was paused"))
        .when(was("slowed"), F.lit("fired late: its topic has a delivery rate"))
        .when(_stop("") != "", F.lit("fired late: its daemon was down"))
        .otherwise(F.lit("fired late"))
    )


def _stop(before: str) -> Column:
    """Return the first stop of the daemon between due time and delivery as text after ``before``; empty if there is
    none.
    """
    first = F.first_of(
        "stops", lambda stop: (stop["from_ms"] <= F.col("fired_at_ms")) & (stop["to_ms"] >= F.col("due_ms"))
    )
    return F.coalesce(F.concat(F.lit(before), first["words"]), F.lit(""))


def has_gap(low: Column, high: Column) -> Column:
    """Return True if the trail of the cell has a gap between two sequences."""
    return F.coalesce(F.exists("gaps", lambda gap: (gap["last"] >= low) & (gap["first"] <= high)), F.lit(False))


def _fields(name: str, *fields: str) -> list[Column]:
    """Return fields of a struct as columns."""
    return [F.col(name)[field].alias(field) for field in fields]


def _say(state: str, rule: str) -> Column:
    return F.struct(F.lit(state).alias("state"), F.lit(rule).alias("rule"))


def _finding(when: Column, kind: str, rule: Column, detail: Column) -> Column:
    return F.when(when, F.struct(F.lit(kind).alias("kind"), rule.alias("rule"), detail.alias("detail")))


def _spread(facts: Relation, found: Column) -> Relation:
    with_found = facts.select(
        *_PLACE[:2],
        F.lit(None).cast("string").alias("group"),
        *_PLACE[3:],
        F.explode(found).alias("found"),
    )
    return with_found.select(*_fields("found", "kind", "rule", "detail"), *_PLACE)


def _since(sequence: Column) -> Column:
    return F.concat(F.lit("accepted at sequence "), sequence.cast("string"))


def _ms(value: Column) -> Column:
    return F.concat(value.cast("string"), F.lit(" ms"))
