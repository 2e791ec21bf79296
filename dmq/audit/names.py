"""Names for the trail: ids of topics, groups and lanes, looked up in the store when they are first met.

    record     version 1 | kind 1 (1 topic, 2 group, 3 retry lane) | queues 2 | created_at_ms 8 | name
                                                                                   | group id 4 | topic id 4   of a lane
                           4 removed                                               | kind 1 | name

The records are those of ``dmq.embedded.names``, which stands above this package. An id is never used again and its name
never changes, so what was read once holds.
"""

from __future__ import annotations

import struct

from broker_adapter.topics import retry_topic
from dmq.store.keys import name_key
from dmq.store.ops import Family
from dmq.store.store import Store
from retry.log import LibraryLog

_HEAD = struct.Struct(">BBHQ")
_LANE = struct.Struct(">II")
_VERSION, _NAMED, _OF_LANE, _REMOVED = 1, frozenset({1, 2}), 3, 4

log = LibraryLog("dmq.audit")


class TrailNames:
    """Names by id, of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._names: dict[int, str] = {}

    def name(self, name_id: int) -> str:
        """Return the name of an id; of one that has no record that can be read, ``?`` and the id."""
        found = self._names.get(name_id)
        return self._load(name_id) if found is None else found

    def _load(self, name_id: int) -> str:
        (value,) = self._store.get_many(Family.META, [name_key(name_id)])
        name = self._decoded(value) if value is not None else ""
        if not name:
            log.error("trail_name_unknown", id=name_id)
            name = f"?{name_id}"
        self._names[name_id] = name
        return name

    def _decoded(self, value: bytes) -> str:
        if len(value) < _HEAD.size or value[0] != _VERSION:
            return ""
        kind, rest = value[1], value[_HEAD.size :]
        if kind == _REMOVED:
            return rest[1:].decode(errors="replace")
        if kind in _NAMED:
            return rest.decode(errors="replace")
        if kind == _OF_LANE and len(rest) == _LANE.size:
            return retry_topic(self.name(_LANE.unpack(rest)[0]))
        return ""
