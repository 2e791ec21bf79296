"""Columns that all questions share: the key of a message, windows, bars of lateness, what an event does to a ledger.

A message's *key* is a 63-bit hash of topic and id. It only ever selects: whatever is said about a message is found
with its full id. ``bits`` makes it shorter, so that tests can let messages collide.
"""

from __future__ import annotations

from collections.abc import Sequence

from spark_audit.engines import functions as F  # noqa: N812 - the name that Spark code goes by
from spark_audit.engines.columns import Column
from spark_audit.engines.table import Table, gathered
from spark_audit.schema import BARS_MS, DEAD, EXITS, FIRED, FOR_GROUP, IN_LANE, LETTER_KINDS, LETTERS

BITS = 63
_BUCKETS = 64
_EXACT_MS = 1_000


def key_of(topic: Column, message_id: Column, bits: int = BITS) -> Column:
    """Return the key of a message."""
    key = F.hash64(topic, message_id)
    return key if bits >= BITS else F.bit_and(key, (1 << bits) - 1)


def kind_in(*kinds: str) -> Column:
    """Say whether a row is of one of these kinds."""
    return F.col("kind").isin(*kinds)


def floor_to(at_ms: Column, window_ms: int) -> Column:
    """Return the beginning of the window that a time lies in."""
    return at_ms - F.pmod(at_ms, F.lit(window_ms))


def id_window(message_id: Column, key: Column) -> Column:
    """Return a window that is the same for all events of a message, from its id alone.

    Of official ids that is when they were made, but for the last byte of the second: some four minutes. Other ids are
    spread over a few negative numbers.
    """
    is_official = (F.octet_length(message_id) == 17) & (message_id >= b"\x01") & (message_id < b"\x02")
    made = F.hash64(F.bytes_of(message_id, 10, 3))
    return F.when(is_official, made).otherwise(-1 - F.pmod(key, F.lit(_BUCKETS)))


def lateness_bar(lateness_ms: Column) -> Column:
    """Round a lateness up to three digits: exact up to a second, as almost all are, 1 % beyond. Never early is 0."""
    late = F.greatest(lateness_ms, F.lit(0))
    steps = F.lit(1).cast("bigint")
    for power in range(1, 8):
        steps = F.when(late > 10 ** (power + 2), F.lit(10**power).cast("bigint")).otherwise(steps)
    rounded = (late + steps - 1) - F.pmod(late + steps - 1, steps)
    return F.when(late <= _EXACT_MS, late).otherwise(rounded)


def bar_of(lateness_ms: int) -> int:
    """Return the upper bound of the histogram's bar; -1 for what is beyond the last."""
    return next((bound for bound in BARS_MS if lateness_ms <= bound), -1)


def with_letters(events: Table, deaths: Table | None = None) -> Table:
    """Add a row for each dead letter as what it is in its own topic: fired there. ``is_letter`` marks those.

    ``deaths`` are the events that letters come of, where they are known already: it saves a look at all the others.
    """
    changed = {
        "topic": F.concat(F.lit(LETTERS), F.col("group")),
        "group": F.lit(None).cast("string"),
        "queue_id": F.lit(0),
        "queue_offset": F.col("detail"),
        "entry": F.lit(None).cast("bigint"),
        "due_ms": F.lit(None).cast("bigint"),
    }
    source = events if deaths is None else deaths
    letters = source.where(kind_in(*LETTER_KINDS) & F.col("detail").is_not_null())
    own = events.with_column("is_letter", F.lit(False))
    columns = (changed.get(name, F.col(name)).alias(name) for name in events.columns)
    return own.union(letters.select(*columns, F.lit(True).alias("is_letter")))


def is_fired() -> Column:
    """Say whether a row puts a message into a queue of its topic."""
    return F.col("is_letter") | kind_in(*FIRED)


def is_fired_to_group() -> Column:
    """Say whether a row of ``group_side`` is the first that a group sees of a message, and no retry of it."""
    return (F.col("visible") > 0) & ~kind_in(*IN_LANE)


def is_exit() -> Column:
    """Say whether a row is an exit of a group from a place."""
    return ~F.col("is_letter") & (kind_in(*EXITS) | (kind_in(*DEAD) & F.col("queue_id").is_not_null()))


def is_dead_copy() -> Column:
    """Say whether a row buries a copy that waited."""
    return ~F.col("is_letter") & kind_in(*DEAD) & F.col("queue_id").is_null()


def for_groups(fired: Table, subscriptions: Table) -> Table:
    """Return the rows of ``fired`` once for each group that reads their queue, and for each of its passes over them.

    ``pass_number`` tells passes apart.
    """
    names = [name for name in fired.columns if name != "group"]
    reads = F.broadcast(
        subscriptions.select(
            F.col("cell").alias("s_cell"),
            F.col("topic").alias("s_topic"),
            F.col("queue_id").alias("s_queue"),
            F.col("group"),
            *(F.col(name) for name in ("from_offset", "to_offset", "after_sequence", "to_sequence", "pass_number")),
        )
    )
    matches = (
        (F.col("cell") == F.col("s_cell"))
        & (F.col("topic") == F.col("s_topic"))
        & (F.col("queue_id") == F.col("s_queue"))
        & (F.col("queue_offset") >= F.col("from_offset"))
        & (F.col("queue_offset") < F.col("to_offset"))
        & (F.col("sequence") > F.col("after_sequence"))
        & (F.col("sequence") < F.col("to_sequence"))
    )
    read = fired.drop("group").join(reads, on=matches, how="inner").select(*names, "group", "pass_number")
    return gathered(read)


def group_side(rows: Table, subscriptions: Table) -> Table:
    """Return what groups did: ``visible`` is 1 for a place, -1 for an exit; ``copies`` 1 for a nack, -1 for its end."""
    fired = for_groups(rows.where(is_fired()), subscriptions).with_column("visible", F.lit(1))
    # A lane's places are those of one group: where one is named twice, a group of that name was made anew.
    others = rows.where(~is_fired() & F.col("group").is_not_null()).with_column("pass_number", F.col("sequence"))
    visible = F.when(kind_in(*IN_LANE, *FOR_GROUP), 1).when(is_exit(), -1).otherwise(0)
    others = others.with_column("visible", visible)
    copies = (
        F.when(F.col("is_letter"), 0)
        .when(F.col("kind") == "NACKED", 1)
        .when(kind_in(*IN_LANE) | is_dead_copy(), -1)
        .otherwise(0)
    )
    both = fired.union(others).with_column("copies", copies)
    return both.where((F.col("visible") != 0) | (F.col("copies") != 0))


def placed() -> Column:
    """Return what a row of ``group_side`` does to the places of its message: 1 came there, -1 left it by name."""
    return F.when(F.col("queue_offset").is_not_null(), F.col("visible")).when(F.col("visible") > 0, 1).otherwise(0)


def place_key() -> Column:
    """Return a hash of a message at a place. It differs where one left a place that is another one's."""
    return F.hash64("topic", "message_id", "queue_id", "queue_offset")


def signed_sums(key: Column, sign: Column, name: str) -> Sequence[Column]:
    """Return aggregates that are all zero when what came and what went are the same, and can be added up later.

    Count, sum of the hash (in two halves, so that nothing overflows) and the exclusive or of it.
    """
    high, low = F.shift_right(key, 32), F.bit_and(key, 0xFFFFFFFF)
    return (
        F.sum_of(sign).alias(f"{name}_count"),
        F.sum_of(sign * high).alias(f"{name}_high"),
        F.sum_of(sign * low).alias(f"{name}_low"),
        F.bit_xor(F.when(sign != 0, key).otherwise(0)).alias(f"{name}_xor"),
    )
