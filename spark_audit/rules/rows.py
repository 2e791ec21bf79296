"""Shared columns: the key of a message, windows, lateness bars, the effect of an event on a ledger.

The *key* of a message is a 63-bit hash of topic and id. It only selects rows; every finding compares the full id.
``bits`` shortens the key, so that tests can provoke collisions.
"""

from __future__ import annotations

from collections.abc import Sequence

from spark_audit.engines import Column, Relation, gathered
from spark_audit.engines import functions as F  # noqa: N812 - the name that Spark code goes by
from spark_audit.schema import BARS_MS, DEAD, EXITS, FIRED, FOR_GROUP, IN_LANE, LETTER_KINDS, LETTERS

BITS = 63
_BUCKETS = 64
_EXACT_MS = 1_000


def key_of(topic: Column, message_id: Column, bits: int = BITS) -> Column:
    """Return the key of a message."""
    key = F.hash64(topic, message_id)
    return key if bits >= BITS else F.bit_and(key, (1 << bits) - 1)


def kind_in(*kinds: str) -> Column:
    """Return True for rows of one of these kinds."""
    return F.col("kind").isin(*kinds)


def floor_to(at_ms: Column, window_ms: int) -> Column:
    """Return the start of the window that contains a time."""
    return at_ms - F.pmod(at_ms, F.lit(window_ms))


def id_window(message_id: Column, key: Column) -> Column:
    """Return a window that is equal for all events of a message, computed from its id alone.

    For official ids it is their creation time without the low byte of the seconds: about four minutes. Other ids are
    spread over a few negative numbers.
    """
    is_official = (F.octet_length(message_id) == 17) & (message_id >= b"\x01") & (message_id < b"\x02")
    made = F.hash64(F.bytes_of(message_id, 10, 3))
    return F.when(is_official, made).otherwise(-1 - F.pmod(key, F.lit(_BUCKETS)))


def lateness_bar(lateness_ms: Column) -> Column:
    """Round a lateness up to three digits: exact up to one second, which is the usual case, and to 1 % above. Minimum
    0.
    """
    late = F.greatest(lateness_ms, F.lit(0))
    steps = F.lit(1).cast("bigint")
    for power in range(1, 8):
        steps = F.when(late > 10 ** (power + 2), F.lit(10**power).cast("bigint")).otherwise(steps)
    rounded = (late + steps - 1) - F.pmod(late + steps - 1, steps)
    return F.when(late <= _EXACT_MS, late).otherwise(rounded)


def bar_of(lateness_ms: int) -> int:
    """Return the upper bound of the histogram bar; -1 beyond the last."""
    return next((bound for bound in BARS_MS if lateness_ms <= bound), -1)


def with_letters(events: Relation, deaths: Relation | None = None) -> Relation:
    """Add a row for each dead letter as a message fired into its own topic, marked by ``is_letter``.

    ``deaths`` are the events that create dead letters, if already selected: this saves a pass over all other events.
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
    """Return True for rows that put a message into a queue of its topic."""
    return F.col("is_letter") | kind_in(*FIRED)


def is_fired_to_group() -> Column:
    """Return True for rows of ``group_side`` that make a message visible to its group for the first time, not as a
    retry.
    """
    return (F.col("visible") > 0) & ~kind_in(*IN_LANE)


def is_exit() -> Column:
    """Return True for rows in which a group leaves a place."""
    return ~F.col("is_letter") & (kind_in(*EXITS) | (kind_in(*DEAD) & F.col("queue_id").is_not_null()))


def is_dead_copy() -> Column:
    """Return True for rows in which a pending copy becomes a dead letter."""
    return ~F.col("is_letter") & kind_in(*DEAD) & F.col("queue_id").is_null()


def for_groups(fired: Relation, subscriptions: Relation) -> Relation:
    """Return the rows of ``fired`` once for each group that reads their queue, and for each of its passes.

    ``pass_number`` distinguishes passes.
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


def group_side(rows: Relation, subscriptions: Relation) -> Relation:
    """Return the events of groups. ``visible`` is 1 for an arrival at a place, -1 for an exit.

    ``copies`` is 1 for a nack, -1 for the end of its copy.
    """
    fired = for_groups(rows.where(is_fired()), subscriptions).with_column("visible", F.lit(1))
    # A place in a lane belongs to one group: if it occurs twice, a group of that name was created again.
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
    """Return the effect of a row of ``group_side`` on places: 1 for an arrival, -1 for an exit that names the place."""
    return F.when(F.col("queue_offset").is_not_null(), F.col("visible")).when(F.col("visible") > 0, 1).otherwise(0)


def place_key() -> Column:
    """Return a hash of a message and its place. It does not balance if a group leaves the place of another message."""
    return F.hash64("topic", "message_id", "queue_id", "queue_offset")


def signed_sums(key: Column, sign: Column, name: str) -> Sequence[Column]:
    """Return aggregates that are all zero if arrivals and exits balance. They can be added across runs.

    They are the count, the sum of the hash (in two halves, to avoid overflow) and its exclusive or.
    """
    high, low = F.shift_right(key, 32), F.bit_and(key, 0xFFFFFFFF)
    return (
        F.sum_of(sign).alias(f"{name}_count"),
        F.sum_of(sign * high).alias(f"{name}_high"),
        F.sum_of(sign * low).alias(f"{name}_low"),
        F.bit_xor(F.when(sign != 0, key).otherwise(0)).alias(f"{name}_xor"),
    )
