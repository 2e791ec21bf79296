"""Interface to the clients of the public protocol, as the admin service uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dmq.admin import admin_v1 as wire
from dmq.errors import DmqError


class ClientSource(Protocol):
    """Registry of the clients of the public protocol, which can also query them. Owned by the event loop.

    ``stack`` and ``verify`` raise ``Refused(NOT_FOUND)`` for a client that is not connected and ``ClientSilent`` for
    one that does not answer in time.
    """

    def clients(self, group: str) -> Sequence[wire.Client]:
        """Return the live clients of one group or (empty) all, by group and client id."""
        ...

    async def stack(self, client_id: str, timeout_s: float) -> str:
        """Return the thread stacks of a client."""
        ...

    async def verify(self, client_id: str, payload: bytes, timeout_s: float) -> tuple[int, str]:
        """Make a client consume a stored message; return the protocol code and the text of its answer."""
        ...


class ClientSilent(DmqError):
    """A client did not answer in time."""
