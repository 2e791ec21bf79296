"""Stages of an audit: from new rows and the saved state of older ones to findings and ledgers.

Totals and keys over all messages select suspicious messages. These are judged exactly, from their raw events. So a
batch run, an incremental run and a run with ``--exact`` have the same outcome. They differ only in the number of
correct messages that are also judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spark_audit.engines import Relation, Row, TableEngine, keep
from spark_audit.engines import functions as F  # noqa: N812 - the name that Spark code goes by
from spark_audit.jobs.health import CellState, Finding, finding, hole_findings
from spark_audit.jobs.options import Options
from spark_audit.jobs.pauses import joined, pauses_of
from spark_audit.report import text
from spark_audit.rules.candidates import find_candidates
from spark_audit.rules.copies import copy_findings
from spark_audit.rules.density import LEFT, READS_FROM, OffsetGap, QueueFacts, QueueKey, ReadKey, Top, unfinished_exits
from spark_audit.rules.entries import CELLS, REMOVALS, accept_findings, entry_facts, entry_findings, judge_entries
from spark_audit.rules.findings import join_findings
from spark_audit.rules.groups import group_findings, judge_places, message_facts, open_side, place_facts
from spark_audit.rules.rows import key_of, kind_in, with_letters
from spark_audit.rules.store import held_orphans, waiting_copies
from spark_audit.rules.totals import count_rows, failed_keys, fingerprints, is_equal
from spark_audit.rules.transactions import transaction_findings
from spark_audit.schema import CLOCK_CHANGED, DEAD, LETTER_KINDS, OF_LETTERS, RARE, READS, ROWS, Fields
from spark_audit.stops import Stop
from spark_audit.tables import TrailListing, read_contents

_SUBSCRIPTIONS: Fields = (
    ("cell", "string"),
    ("topic", "string"),
    ("group", "string"),
    ("queue_id", "int"),
    ("pass_number", "int"),
    ("from_offset", "bigint"),
    ("to_offset", "bigint"),
    ("after_sequence", "bigint"),
    ("to_sequence", "bigint"),
)
_NO_END = 2**62
_STEPPED_BACK = b" moved_ms=-"


class _Pass(NamedTuple):
    """One pass of a group over a queue: a range of offsets, among the messages stored between two events."""

    from_offset: int
    to_offset: int = _NO_END
    after_sequence: int = 0
    to_sequence: int = _NO_END


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Newest snapshots, one per cell."""

    entries: Relation
    queues: Relation
    progress: Relation


@dataclass(frozen=True, slots=True)
class Known:
    """Input of verdicts besides the events of a message."""

    subscriptions: Relation
    removals: Relation
    cells: Relation
    held: HeldRows
    ends: Relation
    watermark_ms: int


@dataclass(frozen=True, slots=True)
class Scan:
    """Result of one pass over rows. Two results can be added."""

    rows: Relation  # with letters
    counts: Relation
    rare: Relation


@dataclass(frozen=True, slots=True)
class Judged:
    """Verdicts about single messages."""

    entries: Relation
    groups: Relation
    side: Relation  # of messages for groups
    accepts: Relation
    findings: Relation


def scan_rows(rows: Relation, options: Options) -> Scan:
    """Count rows, and keep the rows of rare kinds."""
    rare = keep(rows.where(kind_in(*RARE, *LETTER_KINDS)))
    lettered = with_letters(rows, rare)
    counts = count_rows(lettered, window_ms=options.window_ms, late_after_ms=options.late_after_ms)
    return Scan(lettered, keep(counts), rare)


def read_held(engine: TableEngine, listing: TrailListing, cells: Sequence[CellState]) -> HeldRows:
    """Read the newest snapshot of each cell."""
    newest = [cell.snapshot for cell in cells if cell.snapshot is not None]
    entries, queues, progress = (
        read_contents(engine, listing, newest, name) for name in ("entries", "queues", "progress")
    )
    if not newest:
        return HeldRows(entries, queues, progress)  # not kept: the planner knows that local tables are empty
    return HeldRows(keep(entries), keep(queues), keep(progress))


def subscriptions_of(engine: TableEngine, rare: Sequence[Row], cells: Sequence[CellState], held: HeldRows) -> Relation:
    """Return the offset ranges that each group reads of each queue; a reset starts another pass.

    A pass ends with the offsets that the group finished before the reset, and with the removal of its topic. A topic
    created again under the same name starts with messages stored later. If the beginning of the trail was retired, the
    subscription events are gone: a group with a position in the snapshot then reads all remaining messages.
    """
    found: dict[tuple[str, str, str, int], list[_Pass]] = {}
    removed: dict[tuple[str, str], int] = {}
    retired = [cell.cell for cell in cells if cell.retired > 0]
    for row in rare:  # by cell and sequence
        if row["kind"] == "TOPIC_REMOVED":
            removed[row["cell"], row["topic"]] = row["sequence"]
            for key, passes in found.items():
                if key[:2] == (row["cell"], row["topic"]):
                    passes[:] = [each._replace(to_sequence=min(each.to_sequence, row["sequence"])) for each in passes]
        elif row["kind"] in READS and row["queue_id"] is not None and row["queue_id"] >= 0:
            after = removed.get((row["cell"], row["topic"]), 0)
            passes = found.setdefault((row["cell"], row["topic"], row["group"], row["queue_id"]), [])
            if not passes and row["kind"] == "RESET" and row["cell"] in retired:
                passes.append(_Pass(0, after_sequence=after))  # retention removed the SUBSCRIBED event of this pass
            _begin(passes, row, after)
    if retired:
        rest = held.progress.where(F.col("cell").isin(*retired) & (F.col("queue_id") >= 0))
        for row in rest.select("cell", "topic", "group", "queue_id").distinct().collect():
            found.setdefault((row["cell"], row["topic"], row["group"], row["queue_id"]), [_Pass(0)])
    rows = sorted((*key, number, *each) for key, passes in found.items() for number, each in enumerate(passes))
    return engine.local_table(rows, _SUBSCRIPTIONS)


def _begin(passes: list[_Pass], row: Row, after: int) -> None:
    """Add the pass that starts with an event. A second subscription to the same queue only widens the first."""
    last, offset = passes[-1] if passes else None, row["queue_offset"]
    is_open = last is not None and last.to_offset == _NO_END and last.to_sequence == _NO_END
    if last is not None and is_open and row["kind"] == "RESET":
        passes[-1] = last._replace(to_offset=row["detail"])
    elif last is not None and is_open:
        passes[-1] = last._replace(from_offset=min(last.from_offset, offset))
        return
    if offset < _NO_END:  # a removed group has no further pass
        passes.append(_Pass(offset, after_sequence=after))


def removals_of(engine: TableEngine, rare: Sequence[Row]) -> Relation:
    """Return the event that removed each removed topic."""
    found: list[tuple[str, str, int, int, int]] = []
    before: dict[tuple[str, str], int] = {}
    for row in rare:  # by cell and sequence
        if row["kind"] == "TOPIC_REMOVED":
            key = row["cell"], row["topic"]
            found.append((*key, before.get(key, 0), row["sequence"], row["at_ms"]))
            before[key] = row["sequence"]
    return engine.local_table(found, REMOVALS)


def holes_at_ends(
    tops: Mapping[QueueKey, Top], removals: Relation, cells: Sequence[CellState], held: HeldRows
) -> list[OffsetGap]:
    """Return the offsets of queues that the newest snapshots include and that are above all offsets of events."""
    taken = {cell.cell: cell.snapshot.sequence for cell in cells if cell.snapshot is not None}
    retired = {cell.cell for cell in cells if cell.retired}
    removed: dict[tuple[str, str], int] = {}
    for row in removals.collect():
        place = row["r_cell"], row["r_topic"]
        removed[place] = max(removed.get(place, 0), row["r_to_sequence"])
    found = []
    own = held.queues.where((F.col("queue_id") >= 0) & F.col("topic").is_not_null())
    for row in own.select("cell", "topic", "queue_id", "end_offset").collect():
        key = row["cell"], row["topic"], row["queue_id"]
        begun = removed.get(key[:2], 0)
        is_known = key in tops or begun > 0 or row["cell"] not in retired
        top = tops.get(key, Top(-1, begun))
        if is_known and begun < taken[row["cell"]] and top.offset + 1 < row["end_offset"]:
            found.append(OffsetGap(*key, top.offset + 1, row["end_offset"] - 1, top.sequence, taken[row["cell"]]))
    return found


def reads_of(engine: TableEngine, rare: Sequence[Row]) -> Relation:
    """Return the start offset of each event that subscribes a group to a queue, up to the removal of the topic."""
    removed = [(row["cell"], row["topic"], row["sequence"]) for row in rare if row["kind"] == "TOPIC_REMOVED"]
    found = []
    for row in rare:
        if row["kind"] != "TOPIC_REMOVED" and row["kind"] in READS and 0 < (row["queue_offset"] or 0) < _NO_END:
            later = [
                each[2] for each in removed if each[:2] == (row["cell"], row["topic"]) and each[2] > row["sequence"]
            ]
            place = row["cell"], row["topic"], row["group"], row["queue_id"]
            found.append((*place, row["queue_offset"], row["sequence"], min(later, default=_NO_END)))
    return engine.local_table(found, READS_FROM)


def queue_findings(  # noqa: PLR0917 - facts about queues
    engine: TableEngine,
    rare: Sequence[Row],
    queues: QueueFacts,
    removals: Relation,
    held: HeldRows,
    cells: Sequence[CellState],
    table: Relation,
) -> list[Finding]:
    """Return the contradictions among events of queues, and between these and the newest snapshot."""
    holes = [*queues.holes, *holes_at_ends(queues.tops, removals, cells, held)]
    of_groups = read_findings(engine, rare, queues.beyond, queues.exits, held, cells, table)
    return [*hole_findings(cells, holes), *of_groups]


def read_findings(  # noqa: PLR0917 - facts about groups
    engine: TableEngine,
    rare: Sequence[Row],
    beyond: Iterable[ReadKey],
    exits: Mapping[ReadKey, Top],
    held: HeldRows,
    cells: Sequence[CellState],
    table: Relation,
) -> list[Finding]:
    """Return the contradictions between events and the newest snapshot about reads of groups. A gap excuses
    them all.
    """
    begun: dict[ReadKey, int] = {}
    removed: dict[tuple[str, str], int] = {}
    for row in rare:
        if row["kind"] == "TOPIC_REMOVED":
            removed[row["cell"], row["topic"]] = row["sequence"]
        elif row["kind"] in READS and row["queue_id"] is not None:
            begun[row["cell"], row["topic"], row["group"], row["queue_id"]] = row["sequence"]
    left = [(*key, *top, max(begun.get(key, 0), removed.get(key[:2], 0))) for key, top in sorted(exits.items())]
    unfinished = unfinished_exits(engine.local_table(left, LEFT), held.progress, table)
    whole = {cell.cell for cell in cells if not (cell.gaps or cell.doubts)}
    known = engine.local_table(sorted(begun), LEFT[:4])
    complete = [cell.cell for cell in cells if cell.cell in whole and not cell.retired]
    named = held.progress.where((F.col("queue_id") >= 0) & F.col("cell").isin(*complete, "")).drop("done", "hidden")
    unknown = named.join(known, on=[name for name, _ in LEFT[:4]], how="left_anti").collect()
    strangers = [(row["cell"], row["topic"], row["group"], row["queue_id"]) for row in unknown]
    parts = (
        ("ILLEGAL", "a group begins beyond the end of the queue", beyond),
        ("ILLEGAL", "a group left an offset that the later snapshot calls unfinished", unfinished),
        ("UNPROVEN", "the snapshot names a group without an event that starts its reading", strangers),
    )
    return [
        finding(kind, rule, cell, f"queue {queue_id}", topic=topic, group=group)
        for kind, rule, keys in parts
        for cell, topic, group, queue_id in sorted(set(keys))
        if cell in whole
    ]


def cells_table(
    engine: TableEngine,
    cells: Sequence[CellState],
    entry_min: dict[str, int],
    rare: Sequence[Row],
    stops: Sequence[Stop],
    options: Options,
) -> Relation:
    """Return the facts about cells that verdicts need, one row per cell."""
    stepped: dict[str, list[int]] = {}
    for row in rare:
        if row["kind"] == CLOCK_CHANGED and _STEPPED_BACK in bytes(row["message_id"] or b""):
            stepped.setdefault(row["cell"], []).append(row["sequence"])
    pauses = pauses_of(rare)
    kept_back = {cell: joined(own, within_ms=options.grace_ms) for cell, own in pauses.items()}
    return engine.local_table(
        [
            (
                cell.cell,
                cell.role,
                cell.retired > 0,
                entry_min.get(cell.cell),
                cell.snapshot.sequence if cell.snapshot else None,
                cell.snapshot.taken_ms if cell.snapshot else None,
                cell.is_silent,
                [{"first": gap.first, "last": gap.last} for gap in (*cell.gaps, *cell.doubts)],
                stepped.get(cell.cell, []),
                [each._asdict() for each in pauses.get(cell.cell, [])],
                [dict(zip(("topic", "from_ms", "to_ms"), each, strict=True)) for each in kept_back.get(cell.cell, [])],
                [
                    {"from_ms": each.from_ms, "to_ms": each.to_ms, "words": text.downtime(each)}
                    for each in stops
                    if each.cell == cell.cell
                ],
            )
            for cell in cells
        ],
        CELLS,
    )


def failed_of(rows: Relation, options: Options) -> Relation:
    """Return the keys of failed messages, kept."""
    return keep(failed_keys(rows, options.key_bits))


def sum_up(rows: Relation, subscriptions: Relation, failed: Relation, options: Options) -> Relation:
    """Return the fingerprints of rows, kept."""
    sums = fingerprints(rows, subscriptions, failed, bits=options.key_bits)
    return keep(sums)


def windows_of(sums: Relation) -> tuple[int, int]:
    """Return the number of windows of messages, and the number of windows that do not balance."""
    row = sums.agg(F.count_rows().alias("all"), F.count_if(~is_equal()).alias("unequal")).collect()[0]
    return row["all"], row["unequal"]


def candidates_of(  # noqa: PLR0917 - as ``find_candidates``
    rows: Relation,
    subscriptions: Relation,
    sums: Relation | None,
    failed: Relation,
    held: HeldRows,
    options: Options,
    spools: Sequence[str],
) -> Relation:
    """Return the keys of messages to judge: suspicious ones, and those in a snapshot."""
    found = find_candidates(
        rows,
        subscriptions,
        sums,
        failed,
        late_after_ms=options.late_after_ms,
        bits=options.key_bits,
        spools=spools,
    )
    named = held.entries.select(key_of(F.col("topic"), F.col("message_id"), options.key_bits).alias("key"))
    return found.union(named).distinct()


def keyed(rows: Relation, options: Options) -> Relation:
    """Return the rows about messages, with the key of the message."""
    own = rows.where(F.col("message_id").is_not_null() & F.col("topic").is_not_null())
    return own.with_column("key", key_of(F.col("topic"), F.col("message_id"), options.key_bits))


def ends_of(rare: Relation) -> Relation:
    """Return the places that retention or an operator removed."""
    own = rare.where(kind_in("EXPIRED", "PURGED"))
    is_letter = F.col("kind") == "PURGED"
    # sent directly to a dead-letter queue without a group: that queue is its topic
    is_named = is_letter & F.col("group").is_not_null()
    return (
        own.select(
            "cell",
            F.when(is_named, F.concat(F.lit("%DLQ%"), F.col("group"))).otherwise(F.col("topic")).alias("topic"),
            F.when(is_letter, F.lit(0)).otherwise(F.col("queue_id")).alias("queue_id"),
            F.when(is_letter, F.col("detail")).otherwise(F.col("queue_offset")).alias("queue_offset"),
            "message_id",
            F.when(is_letter, F.lit("purged")).otherwise(F.lit("expired")).alias("ended"),
        )
        .group_by("cell", "topic", "queue_id", "queue_offset", "message_id")
        .agg(F.max_of("ended").alias("ended"))
    )


def judge(rows: Relation, known: Known, options: Options) -> Judged:
    """Judge all messages of ``rows``."""
    cells, held = known.cells, known.held
    facts = entry_facts(rows, cells, held.entries)
    entries = judge_entries(
        facts, watermark_ms=known.watermark_ms, grace_ms=options.grace_ms, window_ms=options.window_ms
    )
    entries = keep(entries)
    side = keep(open_side(rows, known.subscriptions))
    places = judge_places(place_facts(side), cells, held.queues, held.progress, known.ends)
    groups = keep(message_facts(side, places, waiting_copies(held.entries), cells))
    accepts = keep(accept_findings(rows, cells, known.removals, window_ms=options.window_ms))
    findings = join_findings(
        [
            entry_findings(entries, late_after_ms=options.late_after_ms),
            group_findings(groups),
            accepts,
            held_orphans(rows, held.entries, cells, window_ms=options.window_ms),
            transaction_findings(rows, held.entries, cells),
            copy_findings(rows, cells),
        ]
    )
    return Judged(entries, groups, side, accepts, findings)


def letters_of(rare: Relation) -> Relation:
    """Return dead letters by topic, group and reason, with their redrives and purges.

    Place and message together identify a letter, because a dead-letter queue that is created again starts at 0. Older
    daemons recorded no group after the removal of the queue; place and message then identify the group.
    """
    place = ("cell", "detail", "message_id")
    fate = (
        rare.where(kind_in(*OF_LETTERS))
        .group_by(*place, F.col("group").alias("of_group"))
        .agg(
            F.max_of((F.col("kind") == "REDRIVEN").cast("int")).alias("redriven"),
            F.max_of((F.col("kind") == "PURGED").cast("int")).alias("purged"),
        )
    )
    fate = fate.select(*(F.col(name).alias(f"f_{name}") for name in place), "of_group", "redriven", "purged")
    dead = rare.where(kind_in(*DEAD)).select(*place, "group", "topic", F.col("kind").alias("reason"))
    is_its = F.col("of_group").is_null() | (F.col("of_group") == F.col("group"))
    for name in place:
        is_its &= F.col(name) == F.col(f"f_{name}")
    return (
        dead.join(fate, on=is_its, how="left")
        .group_by("topic", "group", "reason")
        .agg(
            F.count_rows().alias("count"),
            F.coalesce(F.sum_of("redriven"), F.lit(0)).alias("redriven"),
            F.coalesce(F.sum_of("purged"), F.lit(0)).alias("purged"),
        )
    )


def empty_rows(engine: TableEngine) -> Relation:
    """Return a table without rows, with all columns of ``with_letters``."""
    return with_letters(engine.local_table([], ROWS))
