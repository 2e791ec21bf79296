"""Reads of a queue by offset, on the read thread. The cost of each function does not grow with the queue."""

from __future__ import annotations

from typing import NamedTuple

from dmq.errors import StoreCorrupt
from dmq.store import Store
from dmq.store.schema.keys import Family, pack_queue_key, queue_offset_of
from dmq.store.schema.messages.record import QueuedMessage, decode_queued


class Place(NamedTuple):
    """One queue of a topic."""

    topic_id: int
    queue_id: int


def messages_from(
    store: Store, place: Place, first: int, stop: int, *, limit: int, bytes_max: int
) -> list[tuple[int, QueuedMessage]]:
    """Return up to ``limit`` consecutive messages from ``first`` on and below ``stop``, each with its offset.

    They begin after ``first`` if the queue does. Raise ``StoreCorrupt`` for a gap between them.
    """
    rows = store.scan(
        Family.QUEUE, pack_queue_key(*place, first), pack_queue_key(*place, stop), limit=limit, bytes_max=bytes_max
    ).rows
    found = [(queue_offset_of(key), decode_queued(value)) for key, value in rows]
    for number, (offset, _) in enumerate(found):
        if offset != found[0][0] + number:
            missing = found[0][0] + number
            raise StoreCorrupt(f"topic {place.topic_id} queue {place.queue_id} has no message {missing}")
    return found


def begin_of(store: Store, place: Place, known: int, end: int) -> int:
    """Return the first stored offset, or ``end`` if there is none; ``known`` is a lower bound of it."""
    known = max(known, store.queue_begin(*place))
    start, stop = pack_queue_key(*place, known), pack_queue_key(*place, end)
    rows = store.scan(Family.QUEUE, start, stop, limit=1).rows
    return queue_offset_of(rows[0][0]) if rows else end


def offset_stored_at(store: Store, place: Place, begin: int, end: int, stored_at_ms: int) -> int:
    """Return the offset defined by ``PullBroker.offset_at``, by binary search with a few dozen point reads."""
    low, high = begin, end  # invariant: the message before ``low`` is older; the one at ``high`` is not
    while low < high:
        middle = (low + high) // 2
        (value,) = store.get_many(Family.QUEUE, [pack_queue_key(*place, middle)])
        # A missing message was removed from the front in the meantime.
        if value is None or decode_queued(value).stored_at_ms < stored_at_ms:
            low = middle + 1
        else:
            high = middle
    return low
