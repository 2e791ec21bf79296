"""Per-key order: of the entries of one key only the first is on the timeline, the others are parked behind it.

A key queue exists while its first entry does. What a failing entry keeps back costs no look at it, however much it is.
Everything here is called under the spool's lock; what was changed is ahead of the disk by the units under way.
"""

from __future__ import annotations

from typing import NamedTuple

from dmq.errors import StoreCorrupt
from dmq.store.schema.keys import Family, pack_pair, unpack_pair
from dmq.store.schema.spool import KeyQueueId, key_queue_key, parked_key, uid_key, uid_of_entry
from dmq.store.store import Store
from dmq.store.writer.operations import Delete, Op, Put


class _KeyQueue(NamedTuple):
    first: int
    next: int


class Change(NamedTuple):
    """Ops that ride in the unit which makes the change, and what is to be kept in memory once it is submitted."""

    ops: list[Op]
    key_queue_id: KeyQueueId
    after: _KeyQueue | None
    parked: tuple[bytes, bytes] | None = None  # row of an entry that was parked
    head: bytes | None = None  # value of the entry that is the first now


class KeyQueues:
    """The key queues of a spool. Only those with a unit under way are in memory: the others are on disk."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ahead: dict[KeyQueueId, Change] = {}  # the last change of a key queue, until it is written
        self._parked: dict[bytes, bytes] = {}  # rows of units under way

    def exists(self, key_queue: KeyQueueId) -> bool:
        """Say whether entries of a key wait or are held."""
        return self._find(key_queue) is not None

    def has_parked(self, key_queue: KeyQueueId, uid: bytes) -> bool:
        """Say whether an entry with ``uid`` is parked, and written."""
        (number,) = self._store.get_many(Family.GROUP, [uid_key(key_queue, uid)])
        if number is None:
            return False
        (value,) = self._store.get_many(Family.GROUP, [parked_key(key_queue, int.from_bytes(number, "big"))])
        return value is not None and uid_of_entry(value) == uid

    def enter(self, key_queue: KeyQueueId, value: bytes) -> Change | None:
        """Plan to park ``value`` at the end of a key queue; ``None`` if it is the first: it goes onto the timeline."""
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
        """Plan a key queue whose first entry goes onto the timeline."""
        return Change([_put(key_queue, _KeyQueue(0, 0))], key_queue, _KeyQueue(0, 0))

    def leave(self, key_queue: KeyQueueId) -> Change:
        """Plan that the first entry is gone: the next one becomes the first, or the key queue ends."""
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
        """Keep a change whose unit was submitted."""
        self._ahead[change.key_queue_id] = change
        if change.parked is not None:
            row, value = change.parked
            self._parked[row] = value

    def settled(self, change: Change) -> None:
        """Forget what the store has now."""
        if change.parked is not None:
            row, value = change.parked
            if self._parked.get(row) is value:  # numbers begin anew with every life of a key queue
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
