"""Per-key order: of the entries of one key only the first is on the timeline, the others are parked behind it.

    lane       ``l`` | type id 4 | digest 16              first 8 | next 8: numbers of the parked entries [first, next)
    parked     ``m`` | type id 4 | digest 16 | number 8   the entry

A lane exists while its first entry does. What a failing entry keeps back costs no look at it, however much it is.
Everything here is called under the spool's lock; what was changed is ahead of the disk by the units under way.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

from dmq.errors import StoreCorrupt
from dmq.store.keys import pack_pair, spool_range, unpack_pair
from dmq.store.ops import Delete, Family, Op, Put
from dmq.store.store import Store

_DIGEST_BYTES = 16


class LaneId(NamedTuple):
    """One key of one type."""

    type_id: int
    digest: bytes


class _Lane(NamedTuple):
    first: int
    next: int


class Change(NamedTuple):
    """Ops that ride in the unit which makes the change, and what is to be kept in memory once it is submitted."""

    ops: list[Op]
    lane_id: LaneId
    after: _Lane | None
    parked: tuple[bytes, bytes] | None = None  # row of an entry that was parked
    head: bytes | None = None  # value of the entry that is the first now
    taken: bytes | None = None  # its row, which is gone with this unit


def lane_id(type_id: int, key: str) -> LaneId:
    """Return the lane of a key."""
    return LaneId(type_id, blake2b(key.encode(), digest_size=_DIGEST_BYTES).digest())


class Lanes:
    """The lanes of a spool. Only those with a unit under way are in memory: the others are on disk."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ahead: dict[LaneId, Change] = {}  # the last change of a lane, until it is written
        self._parked: dict[bytes, bytes] = {}  # rows of units under way

    def exists(self, lane: LaneId) -> bool:
        """Say whether entries of a key wait or are held."""
        return self._find(lane) is not None

    def enter(self, lane: LaneId, value: bytes) -> Change | None:
        """Plan to park ``value`` behind those of its lane; ``None`` if it is the first and goes onto the timeline."""
        found = self._find(lane)
        if found is None:
            return None
        row = _parked_key(lane, found.next)
        after = _Lane(found.first, found.next + 1)
        return Change([Put(Family.GROUP, row, value), _put(lane, after)], lane, after, parked=(row, value))

    def open(self, lane: LaneId) -> Change:
        """Plan a lane whose first entry goes onto the timeline."""
        return Change([_put(lane, _Lane(0, 0))], lane, _Lane(0, 0))

    def leave(self, lane: LaneId) -> Change:
        """Plan that the first entry is gone: the next one becomes the first, or the lane ends."""
        found = self._find(lane)
        if found is None:
            raise StoreCorrupt(f"a lane of type {lane.type_id} is missing while its first entry is there")
        if found.first == found.next:
            return Change([Delete(Family.GROUP, lane_row(lane))], lane, None)
        row = _parked_key(lane, found.first)
        value = self._parked.get(row)
        if value is None:
            (value,) = self._store.get_many(Family.GROUP, [row])
        if value is None:
            raise StoreCorrupt(f"entry {found.first} of a lane of type {lane.type_id} is missing")
        after = _Lane(found.first + 1, found.next)
        return Change([Delete(Family.GROUP, row), _put(lane, after)], lane, after, head=value, taken=row)

    def submitted(self, change: Change) -> None:
        """Keep a change whose unit was submitted."""
        self._ahead[change.lane_id] = change
        if change.parked is not None:
            row, value = change.parked
            self._parked[row] = value
        if change.taken is not None:
            self._parked.pop(change.taken, None)

    def settled(self, change: Change) -> None:
        """Forget what the store has now."""
        if change.parked is not None:
            row, value = change.parked
            if self._parked.get(row) is value:  # numbers begin anew with every life of a lane
                del self._parked[row]
        if self._ahead.get(change.lane_id) is change:
            del self._ahead[change.lane_id]

    def _find(self, lane: LaneId) -> _Lane | None:
        ahead = self._ahead.get(lane)
        if ahead is not None:
            return ahead.after
        (value,) = self._store.get_many(Family.GROUP, [lane_row(lane)])
        return None if value is None else _Lane(*unpack_pair(value))


def parked_range(lane: LaneId) -> tuple[bytes, bytes]:
    """Return the range of the entries that are parked in a lane, in their order."""
    return spool_range(b"m", lane.type_id, lane.digest)


def parked_number(row: bytes) -> int:
    """Return the number in the row of a parked entry."""
    return int.from_bytes(row[-8:], "big")


def lane_row(lane: LaneId) -> bytes:
    """Return the row of a lane."""
    return spool_range(b"l", lane.type_id, lane.digest)[0]


def _parked_key(lane: LaneId, number: int) -> bytes:
    return spool_range(b"m", lane.type_id, lane.digest + number.to_bytes(8, "big"))[0]


def _put(lane: LaneId, after: _Lane) -> Put:
    return Put(Family.GROUP, lane_row(lane), pack_pair(after.first, after.next))
