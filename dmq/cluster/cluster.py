"""What the daemon needs of a cluster beyond the broker contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from broker_adapter.contracts.adapter import PopBroker, TopicRoute
from broker_adapter.contracts.transactions import TransactionalBroker


class Cluster(PopBroker, TransactionalBroker, Protocol):
    """A cluster behind an adapter, which finds out by itself whether it can be reached."""

    @property
    def is_away(self) -> bool:
        """Whether nothing of it answers."""
        ...

    @property
    def errors(self) -> Mapping[str, str]:
        """Why parts of it do not answer, by their addresses."""
        ...

    def owns(self, handle: str) -> bool:
        """Say whether it gave a handle, or what tells a transaction."""
        ...

    def known_route(self, topic: str) -> TopicRoute | None:
        """Return what it said of a topic last, however long ago; ``None`` if it never did."""
        ...

    def is_known(self, kind: str, name: str) -> bool:
        """Say whether it was heard to have one of ``topics`` or ``groups``."""
        ...

    async def close(self) -> None:
        """Say goodbye to it and close all connections."""
        ...
