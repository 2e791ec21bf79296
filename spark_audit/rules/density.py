"""Density of queue offsets: each is the place of one message, so an offset without an event is a missing message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from spark_audit.engines import Relation, Row, RowWindow
from spark_audit.engines import functions as F  # noqa: N812 - the name that Spark code goes by
from spark_audit.rules.integrity import xor_to
from spark_audit.rules.rows import is_fired, kind_in
from spark_audit.schema import FINISHED, Fields

QueueKey: TypeAlias = tuple[str, str, int]  # cell, topic, queue
_LIFE: Fields = (("cell", "string"), ("topic", "string"), ("queue_id", "int"), ("life", "bigint"))
_KEY = tuple(name for name, _ in _LIFE)
_CURRENT = 2**62  # life of a topic that was not removed since


class Top(NamedTuple):
    """Greatest offset of a queue that an event names, and the sequence of that event."""

    offset: int
    sequence: int


class OffsetGap(NamedTuple):
    """Offsets of a queue without an event, between the events of two sequences."""

    cell: str
    topic: str
    queue_id: int
    first: int
    last: int
    after_sequence: int
    before_sequence: int


def queue_holes(
    rows: Relation, removals: Relation, before: Mapping[QueueKey, Top], retired: Iterable[str]
) -> tuple[list[OffsetGap], dict[QueueKey, Top]]:
    """Return the holes in the offsets of ``rows``, and the tops of all queues.

    ``before`` holds the tops of earlier rows. A queue starts at offset 0, and again after the removal of its topic. Its
    start is unknown only if its cell is ``retired`` and the topic was not removed since.
    """
    fired = rows.where(is_fired()).select("cell", "topic", "queue_id", "queue_offset", "sequence")
    is_before = (F.col("sequence") > F.col("r_after_sequence")) & (F.col("sequence") < F.col("r_to_sequence"))
    is_its = (F.col("cell") == F.col("r_cell")) & (F.col("topic") == F.col("r_topic")) & is_before
    removed = F.broadcast(removals.drop("r_to_ms"))
    lived = fired.join(removed, on=is_its, how="left")
    lived = lived.with_column("life", F.coalesce("r_to_sequence", F.lit(_CURRENT)))
    offset = F.col("queue_offset")
    queues = (
        lived.group_by(*_KEY)
        .agg(
            F.count_rows().alias("count"),
            F.min_of(offset).alias("first"),
            F.max_of(offset).alias("last"),
            F.sum_of(offset).alias("total"),
            F.bit_xor(offset).alias("xor"),
            F.min_by("sequence", offset).alias("first_sequence"),
            F.max_by("sequence", offset).alias("last_sequence"),
        )
        .order_by(*_KEY)
        .collect()
    )
    removal_ends: dict[tuple[str, str], list[int]] = {}
    for row in removals.collect():
        removal_ends.setdefault((row["r_cell"], row["r_topic"]), []).append(row["r_to_sequence"])
    unknown, tops = set(retired), dict(before)
    holes = _inner_holes(lived, [row for row in queues if not _is_dense(row)])
    for row in queues:
        key = row["cell"], row["topic"], row["queue_id"]
        begun = max((each for each in removal_ends.get(key[:2], ()) if each < row["life"]), default=0)
        known = before.get(key) if row["life"] == _CURRENT else None
        begin = row["first"] if not begun and row["cell"] in unknown else 0
        if known is not None:
            begin, begun = known.offset + 1, known.sequence
        if begin < row["first"]:
            holes.append(OffsetGap(*key, begin, row["first"] - 1, begun, row["first_sequence"]))
        if row["life"] == _CURRENT and (known is None or row["last"] > known.offset):
            tops[key] = Top(row["last"], row["last_sequence"])
    return sorted(holes), tops


def _is_dense(row: Row) -> bool:
    """Return True if the offsets are complete from first to last, judged by count, sum and exclusive or."""
    first, last, count = row["first"], row["last"], row["last"] - row["first"] + 1
    expected = (count, (first + last) * count // 2, xor_to(last) ^ (xor_to(first - 1) if first else 0))
    return (row["count"], row["total"], row["xor"]) == expected


def _inner_holes(lived: Relation, queues: Sequence[Row]) -> list[OffsetGap]:
    """Return the exact holes between the offsets of some queues."""
    if not queues:
        return []
    odd = lived.engine.local_table([tuple(row[name] for name in _KEY) for row in queues], _LIFE)
    places = lived.join(F.broadcast(odd), on=list(_KEY), how="left_semi")
    places = places.group_by(*_KEY, "queue_offset").agg(F.min_of("sequence").alias("sequence"))
    order = RowWindow.of(*_KEY).in_order("queue_offset")
    places = places.with_columns(
        {"next": F.lead("queue_offset").over(order), "next_sequence": F.lead("sequence").over(order)}
    )
    return [
        OffsetGap(
            row["cell"],
            row["topic"],
            row["queue_id"],
            row["queue_offset"] + 1,
            row["next"] - 1,
            min(row["sequence"], row["next_sequence"]),
            max(row["sequence"], row["next_sequence"]),
        )
        for row in places.where(F.col("next") > F.col("queue_offset") + 1).collect()
    ]


# --- reads of groups --------------------------------------------------------------------------------------------------

ReadKey: TypeAlias = tuple[str, str, str, int]  # cell, topic, group, queue
_READ_KEY = ("cell", "topic", "group", "queue_id")
READS_FROM: Fields = (
    ("s_cell", "string"),
    ("s_topic", "string"),
    ("s_group", "string"),
    ("s_queue", "int"),
    ("s_offset", "bigint"),
    ("s_sequence", "bigint"),
    ("s_to_sequence", "bigint"),
)
LEFT: Fields = (
    *(("cell", "string"), ("topic", "string"), ("group", "string"), ("queue_id", "int")),
    *(("top", "bigint"), ("sequence", "bigint"), ("begun", "bigint")),
)


def begins_beyond(rows: Relation, reads: Relation) -> list[ReadKey]:
    """Return reads of groups that started at an offset that the queue had not reached yet.

    ``reads`` (``READS_FROM``) are the events that allow a group to read a queue, each valid until its topic is removed.
    """
    fired = rows.where(is_fired()).select("cell", "topic", "queue_id", "queue_offset", "sequence")
    is_later = (F.col("sequence") > F.col("s_sequence")) & (F.col("sequence") < F.col("s_to_sequence"))
    is_its = (F.col("cell") == F.col("s_cell")) & (F.col("topic") == F.col("s_topic"))
    is_its &= (F.col("queue_id") == F.col("s_queue")) & is_later & (F.col("queue_offset") < F.col("s_offset"))
    found = fired.join(F.broadcast(reads), on=is_its, how="inner").select(
        "cell", "topic", F.col("s_group").alias("group"), "queue_id"
    )
    return [(row["cell"], row["topic"], row["group"], row["queue_id"]) for row in found.distinct().collect()]


def last_exits(rows: Relation, before: Mapping[ReadKey, Top]) -> dict[ReadKey, Top]:
    """Return the greatest offset that each group left in each queue, from ``rows`` and the earlier exits ``before``."""
    named = rows.where(kind_in(*FINISHED, "FILTERED") & ~F.col("is_letter") & (F.col("queue_id") >= 0))
    offset = F.col("queue_offset")
    found = named.group_by(*_READ_KEY).agg(F.max_of(offset).alias("top"), F.max_by("sequence", offset).alias("last"))
    tops = dict(before)
    for row in found.collect():
        key = row["cell"], row["topic"], row["group"], row["queue_id"]
        top = Top(row["top"], row["last"])
        tops[key] = max(tops.get(key, top), top)
    return tops


def unfinished_exits(left: Relation, progress: Relation, cells: Relation) -> list[ReadKey]:
    """Return reads in which a group left an offset before the snapshot, which contains the offset as unfinished.

    ``left`` (``LEFT``) are the exits of ``last_exits``. ``begun`` is the sequence after which the group started to
    read.
    """
    known = progress.select(*_READ_KEY, "floor", "done").join(F.broadcast(left), on=list(_READ_KEY))
    known = known.join(F.broadcast(cells.select("cell", "snapshot")), on="cell")
    is_its = (F.col("sequence") > F.col("begun")) & (F.col("sequence") <= F.col("snapshot"))
    is_open = (F.col("top") >= F.col("floor")) & ~F.coalesce(F.array_contains("done", F.col("top")), F.lit(False))
    found = known.where(is_its & is_open).select(*_READ_KEY).collect()
    return [(row["cell"], row["topic"], row["group"], row["queue_id"]) for row in found]


class QueueFacts(NamedTuple):
    """Facts about queues and their groups."""

    tops: Mapping[QueueKey, Top] = {}
    holes: Sequence[OffsetGap] = ()
    beyond: Sequence[ReadKey] = ()
    exits: Mapping[ReadKey, Top] = {}
