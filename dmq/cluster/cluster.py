"""The interface of a cluster, an extension of the broker contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from broker_adapter.contracts.adapter import PopBroker, TopicRoute
from broker_adapter.contracts.transactions import TransactionalBroker


class Cluster(PopBroker, TransactionalBroker, Protocol):
    """A cluster behind an adapter, which detects on its own whether the cluster is reachable."""

    @property
    def is_away(self) -> bool:
        """True if no part of the cluster answers."""
        ...

    @property
    def errors(self) -> Mapping[str, str]:
        """The errors of its parts that do not answer, by address."""
        ...

    def owns(self, handle: str) -> bool:
        """Return True if the cluster issued a handle or a transaction id."""
        ...

    def known_route(self, topic: str) -> TopicRoute | None:
        """Return the last known route of a topic, of any age; ``None`` if there is none."""
        ...

    def is_known(self, kind: str, name: str) -> bool:
        """Return True if the cluster is known to have one of ``topics`` or ``groups``."""
        ...

    async def close(self) -> None:
        """Announce the termination of the client, and close all connections."""
        ...
