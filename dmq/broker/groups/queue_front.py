"""Front of a queue: its first rows, the progress of its readers, and its size. All functions run on the read thread.

The cost of each function is bounded and does not grow with the backlog.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from broker_adapter.contracts.limits import GROUPS_MAX
from dmq.broker.groups.group_queue import GroupQueue
from dmq.broker.groups.pull_offsets import NOBODY
from dmq.broker.io import Place, begin_of, messages_from
from dmq.errors import StoreCorrupt
from dmq.store import Store
from dmq.store.schema.keys import Family, pack_queue_key, queue_offset_of, unpack_u64
from dmq.store.schema.messages.record import (
    QUEUED_HEADER_BYTES,
    QueuedMessage,
    body_header_bytes,
    decode_queued,
    encode_history,
)
from dmq.store.schema.topics.group import GROUPS_END, committed_range, group_queue_range, unpack_group_key

ROWS_PER_STEP_MAX = 512
BYTES_PER_STEP_MAX = 4 * 1024 * 1024
_SAMPLES_MAX = 256
_SAMPLED_BYTES_MAX = 8 * 1024 * 1024
_GROUP_ROWS_MAX = 1_000_000
_GOLDEN = 0.6180339887498949  # the fractional parts of its multiples are spread evenly for any count (golden ratio)


class Edges(NamedTuple):
    """Begin and end offsets of a queue, and the store time of its first message, 0 if it is empty."""

    begin: int
    end: int
    oldest_ms: int


class QueueFront(NamedTuple):
    """First messages of a queue, and the stored progress of groups that are not loaded."""

    begin: int
    rows: list[tuple[int, QueuedMessage]]
    asleep: list[GroupQueue]
    pulled: int  # lowest committed offset of the pull groups; ``NOBODY`` if there are none


def edges(store: Store, topic_id: int, queues: int) -> list[Edges]:
    """Return both ends of every queue of a topic."""
    found = []
    for queue_id in range(queues):
        place = Place(topic_id, queue_id)
        end = store.queue_end(*place)
        begin = begin_of(store, place, 0, end) if end else 0  # many queues are still empty
        (value,) = store.get_many(Family.QUEUE, [pack_queue_key(*place, begin)]) if begin < end else (None,)
        found.append(Edges(begin, end, decode_queued(value).stored_at_ms if value is not None else 0))
    return found


def front(store: Store, place: Place, groups: Iterable[int]) -> QueueFront:
    """Return the front of a queue and the stored progress of ``groups``, which are not loaded; omit groups without
    progress.
    """
    begin = store.queue_begin(*place)
    rows = messages_from(store, place, begin, NOBODY - 1, limit=ROWS_PER_STEP_MAX, bytes_max=BYTES_PER_STEP_MAX)
    asleep = [queue for group_id in groups if (queue := progress(store, group_id, place)) is not None]
    committed = store.scan(Family.GROUP, *committed_range(*place), limit=GROUPS_MAX)
    if not committed.is_complete:  # one row per known group, so the limit holds
        raise StoreCorrupt(f"over {GROUPS_MAX} groups have an offset in topic {place.topic_id} queue {place.queue_id}")
    return QueueFront(begin, rows, asleep, min((unpack_u64(value) for _, value in committed.rows), default=NOBODY))


def progress(store: Store, group_id: int, place: Place) -> GroupQueue | None:
    """Return the stored progress of a group on a queue, or None if it has none."""
    found = store.scan(Family.GROUP, *group_queue_range(group_id, *place), limit=_GROUP_ROWS_MAX)
    if not found.is_complete:
        raise StoreCorrupt(f"group {group_id} has over {_GROUP_ROWS_MAX} rows for topic {place.topic_id}")
    queue = GroupQueue(group_id, *place)
    queue.load(found.rows)
    return queue if found.rows else None


class FinishedByAll(NamedTuple):
    """Offsets of a queue finished by all of several groups: all below ``floor``, and those in ``above``."""

    floor: int
    above: list[int]


def finished_by_all(store: Store, place: Place, groups: Iterable[int], end: int) -> FinishedByAll | None:
    """Return the offsets below ``end`` that all readers among ``groups`` have finished, or None without a reader."""
    readers = [queue for group_id in groups if (queue := progress(store, group_id, place)) is not None]
    if not readers:
        return None
    floor = min(queue.floor for queue in readers)
    above = [offset for offset in range(floor, end) if all(queue.is_finished(offset) for queue in readers)]
    return FinishedByAll(floor, above)


def readers_from(store: Store, start: bytes, limit: int) -> tuple[set[tuple[int, int]], bytes]:
    """Return up to ``limit`` (group, topic) pairs with progress from ``start`` on, and the next start key, empty at the
    end.

    Groups start at 1: group 0 records the outcomes of dead letters, and committed offsets. Costs one seek per pair.
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
    """BrokerPart of a lane that its group has finished, and the approximate size of that part."""

    begin: int
    end: int
    size_bytes: int


def finished(store: Store, place: Place, group_id: int, floor: int, *, is_read: bool = False) -> Finished:
    """Return the finished part of a lane: all below ``floor``, or below the stored floor if ``floor`` is 0.

    With ``is_read``, for messages that the writer reads before their removal, it ends after one step.
    """
    begin = store.queue_begin(*place)
    stored = progress(store, group_id, place) if not floor else None
    end = max(begin, floor, stored.floor if stored is not None else 0)
    end = step_end(store, place, begin, end) if is_read else end
    return Finished(begin, end, _size(store, place, Edges(begin, end, 0)))


def step_end(store: Store, place: Place, begin: int, end: int) -> int:
    """Return the offset after the last message of ``[begin, end)`` that one unit may remove if the writer reads it.

    It is ``begin`` if there is none.
    """
    start, stop = pack_queue_key(*place, begin), pack_queue_key(*place, end)
    rows = store.scan(Family.QUEUE, start, stop, limit=ROWS_PER_STEP_MAX, bytes_max=BYTES_PER_STEP_MAX).rows
    return queue_offset_of(rows[-1][0]) + 1 if rows else begin


def sizes(store: Store, topic_id: int, ends: Sequence[Edges]) -> list[int]:
    """Return the approximate size in bytes of each queue of a topic.

    The size is exact up to 256 messages, otherwise estimated from evenly spread samples. The error is some 6 % if the
    standard deviation of message sizes equals their mean.
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
