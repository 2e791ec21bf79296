"""What may go from the front of a queue: a few rows, who has read how far, how large it is. For the reading thread.

Nothing here grows with what lies in the queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from broker_adapter.contracts.limits import GROUPS_MAX
from dmq.broker.groups.group_queue import GroupQueue
from dmq.broker.groups.pull_offsets import NOBODY
from dmq.broker.io.queue_log import Place, begin_of, messages_from
from dmq.errors import StoreCorrupt
from dmq.store.schema.group import GROUPS_END, committed_range, group_queue_range, unpack_group_key
from dmq.store.schema.keys import Family, pack_queue_key, unpack_u64
from dmq.store.schema.record import QUEUED_HEADER_BYTES, QueuedMessage, body_header_bytes, decode_queued, encode_history
from dmq.store.store import Store

ROWS_PER_STEP_MAX = 512
BYTES_PER_STEP_MAX = 4 * 1024 * 1024
_SAMPLES_MAX = 256
_SAMPLED_BYTES_MAX = 8 * 1024 * 1024
_GROUP_ROWS_MAX = 1_000_000
_GOLDEN = 0.6180339887498949  # its multiples, without what is before the point, are spread evenly, however many


class Edges(NamedTuple):
    """Where a queue begins and ends, and when its first message was stored; 0 if it is empty."""

    begin: int
    end: int
    oldest_ms: int


class Front(NamedTuple):
    """The first messages of a queue, and who has read how far as far as that is only in the store."""

    begin: int
    rows: list[tuple[int, QueuedMessage]]
    asleep: list[GroupQueue]
    pulled: int  # the lowest offset that a group which pulls committed; ``NOBODY`` if there is no such group


def edges(store: Store, topic_id: int, queues: int) -> list[Edges]:
    """Look at both ends of every queue of a topic."""
    found = []
    for queue_id in range(queues):
        place = Place(topic_id, queue_id)
        end = store.queue_end(*place)
        begin = begin_of(store, place, 0, end) if end else 0  # of many queues nobody has used yet
        (value,) = store.get_many(Family.QUEUE, [pack_queue_key(*place, begin)]) if begin < end else (None,)
        found.append(Edges(begin, end, decode_queued(value).stored_at_ms if value is not None else 0))
    return found


def front(store: Store, place: Place, groups: Iterable[int]) -> Front:
    """Look at the front of a queue, and at how far ``groups`` are that are not loaded; who has no place is left out."""
    begin = store.queue_begin(*place)
    rows = messages_from(store, place, begin, NOBODY - 1, limit=ROWS_PER_STEP_MAX, bytes_max=BYTES_PER_STEP_MAX)
    asleep = [queue for group_id in groups if (queue := progress(store, group_id, place)) is not None]
    committed = store.scan(Family.GROUP, *committed_range(*place), limit=GROUPS_MAX)
    if not committed.is_complete:  # each row is of a group that is known
        raise StoreCorrupt(f"over {GROUPS_MAX} groups have an offset in topic {place.topic_id} queue {place.queue_id}")
    return Front(begin, rows, asleep, min((unpack_u64(value) for _, value in committed.rows), default=NOBODY))


def progress(store: Store, group_id: int, place: Place) -> GroupQueue | None:
    """Return how far a group is with a queue by what is stored; ``None`` if it has no place there."""
    found = store.scan(Family.GROUP, *group_queue_range(group_id, *place), limit=_GROUP_ROWS_MAX)
    if not found.is_complete:
        raise StoreCorrupt(f"group {group_id} has over {_GROUP_ROWS_MAX} rows for topic {place.topic_id}")
    queue = GroupQueue(group_id, *place)
    queue.load(found.rows)
    return queue if found.rows else None


class FinishedByAll(NamedTuple):
    """What some groups have all finished of a queue: everything below ``floor``, and some of what is above."""

    floor: int
    above: list[int]


def finished_by_all(store: Store, place: Place, groups: Iterable[int], end: int) -> FinishedByAll | None:
    """Return what those of ``groups`` that read a queue have all finished below ``end``; ``None`` if none reads it."""
    readers = [queue for group_id in groups if (queue := progress(store, group_id, place)) is not None]
    if not readers:
        return None
    floor = min(queue.floor for queue in readers)
    above = [offset for offset in range(floor, end) if all(queue.is_finished(offset) for queue in readers)]
    return FinishedByAll(floor, above)


def readers_from(store: Store, start: bytes, limit: int) -> tuple[set[tuple[int, int]], bytes]:
    """Return (group, topic) of whoever has progress, from ``start`` on, and where to go on; empty at the end.

    Begins with group 1: 0 is who keeps account of dead letters and of committed offsets. One seek for each.
    """
    found: set[tuple[int, int]] = set()
    start = start or group_queue_range(1, 0, 0)[0]
    while len(found) < limit:
        rows = store.scan(Family.GROUP, start, GROUPS_END, limit=1).rows
        if not rows:
            return found, b""
        group_id, topic_id, *_ = unpack_group_key(rows[0][0])
        found.add((group_id, topic_id))
        start = group_queue_range(group_id, topic_id + 1, 0)[0]
    return found, start


class Finished(NamedTuple):
    """The part of a lane that its group has finished, and about how large it is."""

    begin: int
    end: int
    size_bytes: int


def finished(store: Store, place: Place, group_id: int, floor: int) -> Finished:
    """Look at what the group of a lane has finished: all below ``floor``, or what is stored of it if that is more."""
    begin = store.queue_begin(*place)
    stored = progress(store, group_id, place) if not floor else None
    end = max(begin, floor, stored.floor if stored is not None else 0)
    return Finished(begin, end, _size(store, place, Edges(begin, end, 0)))


def sizes(store: Store, topic_id: int, ends: Sequence[Edges]) -> list[int]:
    """Return about how many bytes lie in each queue of a topic: exact for a few messages, else from evenly spread ones.

    Of many messages whose sizes differ by as much as they are large, right to some 6 %.
    """
    return [_size(store, Place(topic_id, queue_id), each) for queue_id, each in enumerate(ends)]


def size_of(record: QueuedMessage) -> int:
    """Return the size of a message as ``sizes`` counts it."""
    tag_bytes = len(record.tag.encode())
    texts = len(record.message_id) + tag_bytes + len(record.message_group.encode())
    history_bytes = len(encode_history(record.history)) if record.history is not None else 0
    header_bytes = QUEUED_HEADER_BYTES + history_bytes + body_header_bytes(tag_bytes, record.not_after_ms)
    return header_bytes + texts + len(record.payload)


def _size(store: Store, place: Place, ends: Edges) -> int:
    count = ends.end - ends.begin
    at_all = range(count) if count <= _SAMPLES_MAX else (int(n * _GOLDEN % 1 * count) for n in range(_SAMPLES_MAX))
    looked = total = 0
    for at in at_all:
        (value,) = store.get_many(Family.QUEUE, [pack_queue_key(*place, ends.begin + at)])
        if value is not None:
            looked += 1
            total += len(value)
        if total >= _SAMPLED_BYTES_MAX:
            break
    return total * count // max(1, looked)
