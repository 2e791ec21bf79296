"""Long polls of clients: bounded in number, and all ended at once by ``drain``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from broker_adapter.errors import Overloaded

_Found = TypeVar("_Found")


class Waits:
    """The calls that wait now. Belongs to the event loop."""

    def __init__(self, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._waits: set[asyncio.Timeout] = set()
        self._draining = False

    async def run(self, poll: Callable[[int], Awaitable[_Found]], wait_ms: int, *, nothing: _Found) -> _Found:
        """Return what ``poll`` finds, which is told how long it may wait; ``nothing`` if ``drain`` ended it."""
        if len(self._waits) >= self._waiting_max:
            raise Overloaded("receives waiting", limit=self._waiting_max)
        wait = asyncio.timeout(None)
        self._waits.add(wait)
        try:
            async with wait:
                return await poll(0 if self._draining else wait_ms)
        except TimeoutError:
            if not wait.expired():
                raise
            return nothing
        finally:
            self._waits.discard(wait)

    def drain(self) -> None:
        """End all waits now, and let no new ones wait. Idempotent."""
        self._draining = True
        while self._waits:
            self._waits.pop().reschedule(0.0)
