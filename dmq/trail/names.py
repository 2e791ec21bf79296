"""Names for the trail: ids of topics, groups and lanes, looked up in the store when they are first met.

An id is never used again and its name never changes, so what was read once holds.
"""

from __future__ import annotations

from broker_adapter.contracts.topics import retry_topic
from broker_adapter.runtime.log import LibraryLog
from dmq.errors import StoreCorrupt
from dmq.store.schema.keys import Family, name_key
from dmq.store.schema.names import decode_name
from dmq.store.store import Store

log = LibraryLog("dmq.trail")


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
        name = self._decoded(name_id, value) if value is not None else ""
        if not name:
            log.error("trail_name_unknown", id=name_id)
            name = f"?{name_id}"
        self._names[name_id] = name
        return name

    def _decoded(self, name_id: int, value: bytes) -> str:
        try:
            record = decode_name(name_id, value)
        except StoreCorrupt:
            return ""
        return retry_topic(self.name(record.group_id)) if record.group_id else record.name
