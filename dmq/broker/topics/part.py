"""Parts of the broker and the objects that they share: the catalog, and the access to the store."""

from __future__ import annotations

from typing import NamedTuple

from dmq.broker.io import Commits, Reader
from dmq.broker.topics.catalog import Catalog


class SharedParts(NamedTuple):
    """Catalog, and write and read path of the store."""

    catalog: Catalog
    commits: Commits
    reader: Reader


class BrokerPart:
    """Part of the broker with the shared parts at hand. It belongs to the event loop."""

    def __init__(self, shared: SharedParts) -> None:
        self._catalog, self._commits, self._reader = shared
        self._names = self._catalog.names
        self._store = self._commits.store
        self._clock = self._store.clock
