"""Names for the trail: ids of topics, groups and lanes, read from the store at their first use.

An id is never reused and its name never changes, so a cached name stays valid.
"""

from __future__ import annotations

from broker_adapter.contracts.topics import retry_topic
from broker_adapter.runtime.log import LibraryLog
from dmq.errors import StoreCorrupt
from dmq.store import Store
from dmq.store.schema.keys import Family, name_key
from dmq.store.schema.topics.names import decode_name

log = LibraryLog("dmq.trail")


class TrailNames:
    """Cache of the names of one store, by id."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._names: dict[int, str] = {}

    def name(self, name_id: int) -> str:
        """Return the name of an id; ``?`` and the id if it has no readable record."""
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
