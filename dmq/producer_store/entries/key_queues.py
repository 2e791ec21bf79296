"""Order per key: only the first entry of a key is on the timeline, the others are parked in its key queue.

A key queue exists while its first entry does. Entries parked after a failing one are never read, however many there
are. Every method is called under the spool's lock; changes in memory are ahead of the disk by the units in progress.
"""

from __future__ import annotations

from typing import NamedTuple

from dmq.errors import StoreCorrupt
from dmq.store import Store
from dmq.store.schema.keys import Family, pack_pair, unpack_pair
from dmq.store.schema.spool import KeyQueueId, key_queue_key, parked_key, uid_key, uid_of_entry
from dmq.store.writer.operations import Delete, Op, Put


class _KeyQueue(NamedTuple):
    first: int
    next: int


class Change(NamedTuple):
    """Ops of the unit that makes the change, and the state to apply in memory once the unit is submitted."""

    ops: list[Op]
    key_queue_id: KeyQueueId
    after: _KeyQueue | None
    parked: tuple[bytes, bytes] | None = None  # row of a newly parked entry
    head: bytes | None = None  # value of the new first entry


class KeyQueues:
    """Key queues of a spool. Only those with a unit in progress are in memory; the others are on disk."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ahead: dict[KeyQueueId, Change] = {}  # last change of a key queue, until it is durable
        self._parked: dict[bytes, bytes] = {}  # rows of units in progress

    def exists(self, key_queue: KeyQueueId) -> bool:
        """Return True if entries of a key are waiting or held."""
        return self._find(key_queue) is not None

    def has_parked(self, key_queue: KeyQueueId, uid: bytes) -> bool:
        """Return True if an entry with ``uid`` is parked and on disk."""
        (number,) = self._store.get_many(Family.GROUP, [uid_key(key_queue, uid)])
        if number is None:
            return False
        (value,) = self._store.get_many(Family.GROUP, [parked_key(key_queue, int.from_bytes(number, "big"))])
        return value is not None and uid_of_entry(value) == uid

    def enter(self, key_queue: KeyQueueId, value: bytes) -> Change | None:
        """Plan to park ``value`` at the end of a key queue; ``None`` if it is the first (for the timeline)."""
        found = self._find(key_queue)
        if found is None:
            return None
        row = parked_key(key_queue, found.next)
        after = _KeyQueue(found.first, found.next + 1)
        ops: list[Op] = [
            Put(Family.GROUP, row, value),
            Put(Family.GROUP, uid_key(key_queue, uid_of_entry(value)), found.next.to_bytes(8, "big")),
            _put(key_queue, after),
        ]
        return Change(ops, key_queue, after, parked=(row, value))

    def open(self, key_queue: KeyQueueId) -> Change:
        """Plan a new key queue, whose first entry goes onto the timeline."""
        return Change([_put(key_queue, _KeyQueue(0, 0))], key_queue, _KeyQueue(0, 0))

    def leave(self, key_queue: KeyQueueId) -> Change:
        """Plan the removal of the first entry: the next one becomes the first, or the key queue ends."""
        found = self._find(key_queue)
        if found is None:
            raise StoreCorrupt(f"a key queue of type {key_queue.type_id} is missing while its first entry is there")
        if found.first == found.next:
            return Change([Delete(Family.GROUP, key_queue_key(key_queue))], key_queue, None)
        row = parked_key(key_queue, found.first)
        value = self._parked.get(row)
        if value is None:
            (value,) = self._store.get_many(Family.GROUP, [row])
        if value is None:
            raise StoreCorrupt(f"entry {found.first} of a key queue of type {key_queue.type_id} is missing")
        after = _KeyQueue(found.first + 1, found.next)
        gone: list[Op] = [Delete(Family.GROUP, row), Delete(Family.GROUP, uid_key(key_queue, uid_of_entry(value)))]
        return Change([*gone, _put(key_queue, after)], key_queue, after, head=value)

    def submitted(self, change: Change) -> None:
        """Apply a change in memory after its unit was submitted."""
        self._ahead[change.key_queue_id] = change
        if change.parked is not None:
            row, value = change.parked
            self._parked[row] = value

    def settled(self, change: Change) -> None:
        """Remove a change from memory after its unit became durable."""
        if change.parked is not None:
            row, value = change.parked
            if self._parked.get(row) is value:  # numbers restart each time a key queue is created
                del self._parked[row]
        if self._ahead.get(change.key_queue_id) is change:
            del self._ahead[change.key_queue_id]

    def _find(self, key_queue: KeyQueueId) -> _KeyQueue | None:
        ahead = self._ahead.get(key_queue)
        if ahead is not None:
            return ahead.after
        (value,) = self._store.get_many(Family.GROUP, [key_queue_key(key_queue)])
        return None if value is None else _KeyQueue(*unpack_pair(value))


def _put(key_queue: KeyQueueId, after: _KeyQueue) -> Put:
    return Put(Family.GROUP, key_queue_key(key_queue), pack_pair(after.first, after.next))
