"""The three tables of a snapshot, read from a store in chunks: pending entries, queues, and progress of groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from dmq.errors import StoreCorrupt
from dmq.store.engines.engine import Engine, queue_begin, queue_end, scan_pages
from dmq.store.schema.keys import (
    TIMELINE_END,
    Family,
    is_held_key,
    pack_queue_key,
    queue_offset_of,
    sequence_of,
    unpack_u64,
)
from dmq.store.schema.messages.record import EntryKind
from dmq.store.schema.spool import DEAD_HEAD_BYTES, SPOOL_DEAD, SPOOL_PARKED, spool_rows
from dmq.store.schema.topics.group import (
    CHUNK_BYTES,
    CHUNK_OFFSETS,
    GROUPS_END,
    GroupKind,
    is_hidden,
    unpack_group_key,
    unpack_group_row,
)
from dmq.trail.snapshots.layout import NamesOf, QueueId, Waiting, read_waiting

_ROWS_PER_SCAN = 8_192
_BYTES_PER_SCAN = 8 * 1024 * 1024  # values come with their payloads
_OFFSETS_PER_BATCH = 200_000
_PROGRESS_ROWS_PER_BATCH = 10_000
_QUEUES_PER_BATCH = 256  # two reads of the store each; cancelling a snapshot waits for one batch
_END = b"\xff" * 40
HELD = "HELD"  # a due delayed message, held by a pause or rate limit of its topic


def _schema(*fields: tuple[str, Any] | tuple[str, Any, bool]) -> pa.Schema:
    """Return a schema from names and types. A third element makes the column nullable."""
    made: Any = [pa.field(each[0], each[1], nullable=len(each) > 2) for each in fields]
    return pa.schema(made)


ENTRIES = _schema(
    ("entry", pa.int64(), True),
    ("kind", pa.string()),
    ("topic", pa.string()),
    ("group", pa.string(), True),
    ("message_id", pa.binary()),
    ("due_ms", pa.int64()),
    ("attempt", pa.int32()),
    ("accepted_at_ms", pa.int64()),
    ("is_stranded", pa.bool_()),
)
QUEUES = _schema(
    ("topic", pa.string()),
    ("group", pa.string(), True),
    ("queue_id", pa.int32()),
    ("first_offset", pa.int64()),
    ("end_offset", pa.int64()),
)
PROGRESS = _schema(
    ("group", pa.string()),
    ("topic", pa.string()),
    ("queue_id", pa.int32()),
    ("floor", pa.int64()),
    ("done", pa.list_(pa.int64())),
    ("hidden", pa.list_(pa.int64())),
    ("cursor", pa.int64(), True),
)

_KINDS = {int(kind): kind.name for kind in EntryKind} | {int(EntryKind.WHOLE_HALF): EntryKind.TRANSACTION.name}


def rows_of(
    engine: Engine, family: Family, start: bytes, stop: bytes = _END, *, bytes_max: int = _BYTES_PER_SCAN
) -> Iterator[list[tuple[bytes, bytes]]]:
    """Yield the rows of ``[start, stop)`` in order, a bounded number at a time."""
    return scan_pages(engine, family, start, stop, limit=_ROWS_PER_SCAN, bytes_max=bytes_max)


def entries(engine: Engine, names: NamesOf, *, done: int) -> Iterator[pa.RecordBatch]:
    """Yield all pending entries: the timeline, then a producer store's parked entries and its dead set."""
    for rows in rows_of(engine, Family.TIMELINE, b"", TIMELINE_END):
        marks = [int.from_bytes(key, "big") for key, _ in rows]
        found = [read_waiting(value) for _, value in rows]
        kinds = [
            HELD if is_held_key(key) else _KINDS.get(each.kind, str(each.kind))
            for (key, _), each in zip(rows, found, strict=True)
        ]
        yield _entries(names, found, kinds, [sequence_of(mark) for mark in marks], [mark < done for mark in marks])
    for letter, kind, head in ((SPOOL_PARKED, "PARKED", 0), (SPOOL_DEAD, "DEAD", DEAD_HEAD_BYTES)):
        for rows in rows_of(engine, Family.GROUP, *spool_rows(letter)):
            found = [read_waiting(value[head:]) for _, value in rows]
            yield _entries(names, found, [kind] * len(rows), [None] * len(rows), [False] * len(rows))


def _entries(
    names: NamesOf, found: list[Waiting], kinds: list[str], numbers: list[Any], stranded: list[bool]
) -> pa.RecordBatch:
    topics = {topic_id: names.topic(topic_id) for topic_id in {each.topic_id for each in found}}
    groups = {group_id: names.group(group_id) for group_id in {each.group_id for each in found} - {0}}
    columns: list[list[Any]] = [
        numbers,
        kinds,
        [topics[each.topic_id] for each in found],
        [groups.get(each.group_id) for each in found],
        [each.message_id for each in found],
        [each.due_ms for each in found],
        [each.attempt for each in found],
        [each.accepted_at_ms for each in found],
        stranded,
    ]
    return _batch(columns, ENTRIES)


def queues(engine: Engine, names: NamesOf, *, is_spool: bool) -> Iterator[pa.RecordBatch]:
    """Yield every queue of every topic, and every lane. The types of a producer store have no queues."""
    columns: list[list[Any]] = [[] for _ in QUEUES]
    for topic_id, place in {} if is_spool else names.places.items():
        for queue_id in range(place.queues):
            start, stop = pack_queue_key(topic_id, queue_id, 0), pack_queue_key(topic_id, queue_id + 1, 0)
            first = engine.scan(Family.QUEUE, start, stop, limit=1).rows
            if place.is_removed and not first:
                continue
            row = (
                place.topic,
                place.group or None,
                -1 if place.group else queue_id,
                queue_offset_of(first[0][0]) if first else queue_begin(engine, topic_id, queue_id),
                queue_end(engine, topic_id, queue_id),
            )
            for column, value in zip(columns, row, strict=True):
                column.append(value)
            if len(columns[0]) == _QUEUES_PER_BATCH:
                yield _batch(columns, QUEUES)
                columns = [[] for _ in QUEUES]
    yield _batch(columns, QUEUES)


def _batch(columns: list[list[Any]], schema: pa.Schema) -> pa.RecordBatch:
    arrays: list[Any] = [pa.array(column, each.type) for column, each in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


@dataclass(slots=True)
class _Progress:
    """Progress of one group on one queue of a topic, collected from its rows."""

    place: QueueId
    floor: int = 0
    done: list[Any] = field(default_factory=list)  # arrays, in order
    hidden: list[int] = field(default_factory=list)

    def add(self, key: bytes, value: bytes) -> int:
        """Add a row; return the approximate number of offsets added."""
        kind, number = unpack_group_row(key)
        if kind == GroupKind.FLOOR:
            self.floor = unpack_u64(value)
        elif kind == GroupKind.CHUNK:
            if len(value) != CHUNK_BYTES:
                raise StoreCorrupt(f"a bitmap of {len(value)} bytes instead of {CHUNK_BYTES}")
            bits = np.unpackbits(np.frombuffer(value, np.uint8), bitorder="little")
            offsets = np.flatnonzero(bits).astype(np.int64) + number * CHUNK_OFFSETS
            self.done.append(offsets[offsets >= self.floor])  # the floor's own chunk may have bits of offsets below it
            return len(offsets)
        elif kind == GroupKind.EXCEPTION and is_hidden(value):
            self.hidden.append(number)
            return 1
        return 0

    def above_floor(self) -> Any:  # noqa: ANN401 - an array of offsets
        """Raise the floor over finished offsets, and return the finished offsets above it.

        This is needed because the row of the floor is updated late.
        """
        done = np.concatenate(self.done) if self.done else np.empty(0, np.int64)
        is_next = done == self.floor + np.arange(len(done))
        run = len(done) if is_next.all() else int(is_next.argmin())
        self.floor += run
        return done[run:]


def progress(engine: Engine, names: NamesOf, cursors: Mapping[QueueId, int]) -> Iterator[pa.RecordBatch]:
    """Yield the progress of each group on each queue; ``cursors`` has the cursors of loaded queues."""
    made: list[_Progress] = []
    offsets = 0
    # From group 1 on: group 0 has outcomes of dead letters and committed offsets.
    for rows in rows_of(engine, Family.GROUP, b"\0\0\0\1", GROUPS_END):
        for key, value in rows:
            group_id, topic_id, queue_id, *_ = unpack_group_key(key)
            place = group_id, topic_id, queue_id
            if not made or made[-1].place != place:
                if offsets >= _OFFSETS_PER_BATCH or len(made) >= _PROGRESS_ROWS_PER_BATCH:
                    yield _progress_batch(names, made, cursors)
                    made, offsets = [], 0
                made.append(_Progress(place))
            offsets += made[-1].add(key, value)
    yield _progress_batch(names, made, cursors)


def _progress_batch(names: NamesOf, made: list[_Progress], cursors: Mapping[QueueId, int]) -> pa.RecordBatch:
    places = [names.places.get(each.place[1]) for each in made]
    if None in places:
        raise StoreCorrupt(f"topic {made[places.index(None)].place[1]} has no record")
    queue_ids = [-1 if place and place.group else each.place[2] for each, place in zip(made, places, strict=True)]
    done = [each.above_floor() for each in made]
    ends = np.cumsum([0, *(len(each) for each in done)], dtype=np.int32)
    flat = np.concatenate(done) if done else np.empty(0, np.int64)
    arrays: list[Any] = [
        pa.array([names.group(each.place[0]) for each in made], pa.string()),
        pa.array([place.topic for place in places if place], pa.string()),
        pa.array(queue_ids, pa.int32()),
        pa.array([each.floor for each in made], pa.int64()),
        pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(flat, pa.int64())),
        pa.array([each.hidden for each in made], pa.list_(pa.int64())),
        pa.array([cursors.get(each.place) for each in made], pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=PROGRESS)
