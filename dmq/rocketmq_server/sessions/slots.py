"""Limits on open streams and waiting calls, in total and per client, so that no client starves the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from broker_adapter.contracts.errors import Overloaded
from dmq.acl.quotas import Holder, Quota, Quotas

_Found = TypeVar("_Found")


class Slots:
    """Counter of the resources that clients hold. Each ``take`` is paired with a ``free``."""

    def __init__(self, what: str, *, in_all: int, per_client: int) -> None:
        self._what = what
        self._in_all = in_all
        self._per_client = per_client
        self._taken = 0
        self._by_client: dict[str, int] = {}

    def __len__(self) -> int:
        return self._taken

    def held_by(self, client_id: str) -> int:
        """Return the number of slots that a client holds."""
        return self._by_client.get(client_id, 0)

    def take(self, client_id: str) -> None:
        """Acquire a slot; raise ``Overloaded`` if none is free, or none for this client."""
        if self._taken >= self._in_all:
            raise Overloaded(self._what, limit=self._in_all)
        held = self._by_client.get(client_id, 0)
        if held >= self._per_client:
            raise Overloaded(f"{self._what} of one client", limit=self._per_client)
        self._taken += 1
        self._by_client[client_id] = held + 1

    def free(self, client_id: str) -> None:
        """Release a slot."""
        self._taken -= 1
        held = self._by_client.pop(client_id)
        if held > 1:
            self._by_client[client_id] = held - 1


class PollSlots:
    """Receives and pulls that wait for messages. Each has a timeout by which it can be ended early."""

    def __init__(self, *, in_all: int, per_client: int, quotas: Quotas) -> None:
        self._quotas = quotas
        self._places = Slots("receives waiting", in_all=in_all, per_client=per_client)
        self._waits: dict[str, set[asyncio.Timeout]] = {}
        self._is_closed = False

    async def run(
        self,
        client_id: str,
        holders: tuple[Holder, ...],
        poll: Callable[[int], Awaitable[_Found]],
        wait_ms: int,
        *,
        nothing: _Found,
    ) -> _Found:
        """Return the result of ``poll``, which is called with its maximum wait in ms; ``nothing`` if the wait was
        ended.

        Raises ``Overloaded`` if no slot is free.
        """
        self._quotas.take(Quota.POLLS, holders)
        try:
            self._places.take(client_id)
        except Overloaded:
            self._quotas.free(Quota.POLLS, holders)
            raise
        wait = asyncio.timeout(None)
        self._waits.setdefault(client_id, set()).add(wait)
        try:
            async with wait:
                return await poll(0 if self._is_closed else wait_ms)
        except TimeoutError:
            if not wait.expired():
                raise
            return nothing
        finally:
            self._places.free(client_id)
            self._quotas.free(Quota.POLLS, holders)
            waits = self._waits.get(client_id)
            if waits is not None:
                waits.discard(wait)
                if not waits:
                    del self._waits[client_id]

    def end(self, client_id: str) -> None:
        """End the waits of one client now."""
        for wait in self._waits.pop(client_id, ()):
            wait.reschedule(0.0)

    def close(self) -> None:
        """End all waits now; later polls do not wait. Idempotent."""
        self._is_closed = True
        for client_id in list(self._waits):
            self.end(client_id)
