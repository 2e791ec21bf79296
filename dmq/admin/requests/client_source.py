"""What knows the clients of the public protocol, as the admin service sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dmq.errors import DmqError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStatus:
    """A client of the public protocol; fields as in ``admin_v1.proto``."""

    client_id: str
    kind: str
    group: str
    language: str
    version: str
    last_seen_at_ms: int
    streams: int


class ClientSource(Protocol):
    """What knows the clients of the public protocol, and can ask them. Call it on the event loop.

    ``stack`` and ``verify`` raise ``Refused(NOT_FOUND)`` for a client that is not connected and ``ClientSilent`` for
    one that does not answer in time.
    """

    def clients(self, group: str) -> Sequence[ClientStatus]:
        """Return those that are alive, of one group or (empty) all, by group and client id."""
        ...

    async def stack(self, client_id: str, timeout_s: float) -> str:
        """Return what a client's threads do."""
        ...

    async def verify(self, client_id: str, payload: bytes, timeout_s: float) -> tuple[int, str]:
        """Have a client consume a stored message; return the protocol's code and the text it answers."""
        ...


class ClientSilent(DmqError):
    """A client that was asked did not answer in time."""
