"""Reading a queue by offset: few looks, none of which grows with the queue. For the reading thread."""

from __future__ import annotations

from typing import NamedTuple

from dmq.errors import StoreCorrupt
from dmq.store.schema.keys import Family, pack_queue_key, queue_offset_of
from dmq.store.schema.record import QueuedMessage, decode_queued
from dmq.store.store import Store


class Place(NamedTuple):
    """One queue of a topic."""

    topic_id: int
    queue_id: int


def messages_from(
    store: Store, place: Place, first: int, stop: int, *, limit: int, bytes_max: int
) -> list[tuple[int, QueuedMessage]]:
    """Return up to ``limit`` messages from ``first`` on and below ``stop``, each with its offset, without a gap.

    They begin later than ``first`` if the queue does. A gap between them is damage.
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
    """Return the first offset that is there; ``known`` is one that it is not below, ``end`` the answer if none is."""
    known = max(known, store.queue_begin(*place))
    start, stop = pack_queue_key(*place, known), pack_queue_key(*place, end)
    rows = store.scan(Family.QUEUE, start, stop, limit=1).rows
    return queue_offset_of(rows[0][0]) if rows else end


def offset_stored_at(store: Store, place: Place, begin: int, end: int, stored_at_ms: int) -> int:
    """Return the offset that ``PullBroker.offset_at`` promises, by halving the range: a few dozen point reads."""
    low, high = begin, end  # the one below ``low``, if any, is older; the one at ``high``, if any, is not
    while low < high:
        middle = (low + high) // 2
        (value,) = store.get_many(Family.QUEUE, [pack_queue_key(*place, middle)])
        # A message that is gone was removed from the front meanwhile.
        if value is None or decode_queued(value).stored_at_ms < stored_at_ms:
            low = middle + 1
        else:
            high = middle
    return low
