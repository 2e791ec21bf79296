"""Recount of the ledger from the rows of a store: all of it, or its opening balance.

No message in a queue is read: queues are counted by their ends, and progress by floors and bitmaps. Memory grows with
the number of names and queues, not of messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from broker_adapter.contracts.errors import Overloaded
from dmq.store.engines.engine import Engine, Rows, scan_pages
from dmq.store.schema import keys
from dmq.store.schema.accounting.ledger import decode_ledger, unpack_ledger_key
from dmq.store.schema.keys import TIMELINE_END, Family, unpack_u64
from dmq.store.schema.messages.index import failed_topic_id
from dmq.store.schema.messages.record import PLACE_BYTES, EntryKind, decode_place
from dmq.store.schema.topics.group import (
    CHUNK_OFFSETS,
    GROUPS_END,
    NO_GROUP,
    GroupKind,
    group_queue_range,
    pack_group_key,
    unpack_group_key,
    unpack_group_row,
)
from dmq.store.schema.topics.names import NameKind, decode_name

ROWS_PER_SLICE = 4_096
_BYTES_PER_SLICE = 8 * 1024 * 1024  # values come with their payloads
_ROWS_MAX = 10_000_000
_RETRY = int(EntryKind.RETRY)

Pair = tuple[int, int]  # topic (or lane) and group


class Scanned(Protocol):
    """Source of rows: an engine, an open store, or the readable part of one."""

    def scan(self, family: Family, start: bytes, stop: bytes, *, limit: int) -> Rows:
        """Return rows as ``Engine.scan`` does."""
        ...


class CountedLane(NamedTuple):
    """Group and topic of a retry lane."""

    group_id: int
    topic_id: int


@dataclass(slots=True)
class KnownIds:
    """Ids of existing topics, groups and lanes, with their queues. Only ``names`` includes removed ones."""

    queues: dict[int, int] = field(default_factory=dict)  # number of queues, by existing topic or lane
    names: dict[int, str] = field(default_factory=dict)  # of topics and groups, removed ones included
    lanes: dict[int, CountedLane] = field(default_factory=dict)  # by id
    groups: set[int] = field(default_factory=set)  # existing groups

    @classmethod
    def of(cls, source: Scanned) -> KnownIds:
        """Read the names of a store; raise ``StoreCorrupt`` for an invalid record."""
        return cls.of_rows(read_names(source))

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[bytes, bytes]]) -> KnownIds:
        """Decode the rows of all names; raise ``StoreCorrupt`` for an invalid record."""
        known = cls()
        for key, value in rows:
            name_id = keys.meta_id(key)
            record = decode_name(name_id, value)
            if record.kind is not NameKind.LANE:
                known.names[name_id] = record.name
            if record.is_removed:
                continue
            if record.kind is NameKind.GROUP:
                known.groups.add(name_id)
                continue
            known.queues[name_id] = record.queues
            if record.kind is NameKind.LANE:
                known.lanes[name_id] = CountedLane(record.group_id, record.topic_id)
        return known


def read_names(source: Scanned) -> list[tuple[bytes, bytes]]:
    """Return the rows of all names."""
    return source.scan(Family.META, *keys.meta_range(keys.META_NAME), limit=_ROWS_MAX).rows


@dataclass(slots=True)
class Recount:
    """Result of a recount. Unfinished messages of group 0 are dead letters without an outcome."""

    stored: dict[int, int] = field(default_factory=dict)  # sum of the ends of the queues, by topic or lane
    queues: Counter[Pair] = field(default_factory=Counter)  # number of a topic's queues that a group reads
    unfinished: Counter[Pair] = field(default_factory=Counter)
    waiting: Mapping[int, int] = field(default_factory=dict)  # entries of the timeline, by scope
    copies: Mapping[Pair, int] = field(default_factory=dict)  # pending retries


def read_ledger(
    source: Scanned, rows_max: int = _ROWS_MAX
) -> tuple[dict[tuple[int, int], dict[int, int]], dict[int, int]]:
    """Return the ledger's counts by topic and group, and the pending entries by scope, all of one instant.

    Raise ``Overloaded`` beyond ``rows_max`` rows.
    """
    start, stop = keys.META_TOTAL, keys.meta_range(keys.META_LEDGER)[1]  # adjacent ranges: one scan reads one instant
    rows: dict[tuple[int, int], dict[int, int]] = {}
    pending: dict[int, int] = {}
    found = source.scan(Family.META, start, stop, limit=rows_max)
    if not found.is_complete:
        raise Overloaded("the ledger has too many rows to be looked through", limit=rows_max)
    for key, value in found.rows:
        if key[:1] == keys.META_TOTAL:
            pending[keys.meta_id(key)] = keys.unpack_u64(value)
        else:
            rows[unpack_ledger_key(key)] = decode_ledger(value)
    return rows, pending


def recount_queues(
    source: Scanned,
    known: KnownIds,
    end_of: Callable[[int, int], int],
    *,
    breathe: Callable[[int], None] = lambda _: None,
) -> Recount:
    """Count everything except pending entries, from the ends of queues and the progress of groups.

    The cost is one seek per queue, and one scan of bitmaps per group and queue. ``end_of`` returns the end of a queue
    of a topic. ``breathe`` is called regularly with the number of rows read since the last call. Topics, groups and
    lanes under removal are left out.
    """
    found = Recount()
    ends: dict[Pair, int] = {}
    for topic_id, queues in known.queues.items():
        for queue_id in range(queues):
            ends[topic_id, queue_id] = end_of(topic_id, queue_id)
        found.stored[topic_id] = sum(ends[topic_id, queue_id] for queue_id in range(queues))
        breathe(queues)
    start = group_queue_range(NO_GROUP, 0, 0)[0]
    while rows := source.scan(Family.GROUP, start, GROUPS_END, limit=1).rows:
        group_id, topic_id, queue_id, kind, _ = unpack_group_key(rows[0][0])
        start = group_queue_range(group_id, topic_id, queue_id)[1]
        if group_id == NO_GROUP and kind > GroupKind.CHUNK:  # outcomes of dead letters, and offsets of pulling groups
            continue
        finished, looked = _finished(source, group_id, topic_id, queue_id)
        breathe(looked)
        if (topic_id, queue_id) in ends:
            found.unfinished[topic_id, group_id] += ends[topic_id, queue_id] - finished
            found.queues[topic_id, group_id] += 1
    return found


def _finished(source: Scanned, group_id: int, topic_id: int, queue_id: int) -> tuple[int, int]:
    """Return the number of offsets of a queue that a group has finished, and the number of rows read for it."""
    start, stop = (
        pack_group_key(group_id, topic_id, queue_id, kind, 0) for kind in (GroupKind.FLOOR, GroupKind.EXCEPTION)
    )
    rows = source.scan(Family.GROUP, start, stop, limit=_ROWS_MAX).rows
    floor = above = 0
    for key, value in rows:
        kind, number = unpack_group_row(key)
        if kind == GroupKind.FLOOR:
            floor = unpack_u64(value)
        else:  # the floor's own chunk may have bits of offsets below the floor
            above += (int.from_bytes(value, "little") >> max(0, floor - number * CHUNK_OFFSETS)).bit_count()
    return floor + above, len(rows)


def recount_timeline(engine: Engine, known: KnownIds, found: Recount, breathe: Callable[[int], None]) -> None:
    """Count the pending entries by one scan of the timeline, in slices.

    ``breathe`` is called after each slice with its number of rows.
    """
    waiting: Counter[int] = Counter()
    copies: Counter[int] = Counter()  # by lane
    pages = scan_pages(engine, Family.TIMELINE, b"", TIMELINE_END, limit=ROWS_PER_SLICE, bytes_max=_BYTES_PER_SLICE)
    for rows in pages:
        for head, count in Counter([value[:PLACE_BYTES] for _, value in rows]).items():
            kind, topic_id, scope = decode_place(head)
            waiting[scope] += count
            if kind == _RETRY:
                copies[topic_id] += count
        breathe(len(rows))
    found.waiting, found.copies = waiting, copies_of(known, copies)


def copies_of(known: KnownIds, by_lane: Mapping[int, int]) -> dict[Pair, int]:
    """Return the pending retries by topic and group, from the counts by lane."""
    lanes = {lane_id: known.lanes[lane_id] for lane_id in by_lane if lane_id in known.lanes}
    return {(lane.topic_id, lane.group_id): by_lane[lane_id] for lane_id, lane in lanes.items()}


def assume_counts(engine: Engine, known: KnownIds, found: Recount) -> None:
    """Fill in the pending entries from the store's own counts, without a scan of the timeline.

    These counts give the pending retries of a group, but not their topics. For a group with lanes of several topics the
    index is read, one short row per retry.
    """
    rows = engine.scan(Family.META, *keys.meta_range(keys.META_TOTAL), limit=_ROWS_MAX).rows
    found.waiting = {keys.meta_id(key): unpack_u64(value) for key, value in rows}
    topics: dict[int, list[int]] = {}
    for lane in known.lanes.values():
        topics.setdefault(lane.group_id, []).append(lane.topic_id)
    copies: Counter[Pair] = Counter()
    for group_id, failed in topics.items():
        if len(failed) == 1 or not found.waiting.get(group_id):
            copies[failed[0], group_id] = found.waiting.get(group_id, 0)
            continue
        for page in scan_pages(engine, Family.INDEX, *keys.waiting_range(group_id), limit=ROWS_PER_SLICE):
            copies.update((failed_topic_id(key), group_id) for key, _ in page)
    found.copies = copies
