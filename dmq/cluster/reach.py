"""Whether the cluster can be reached at all: one answer for all lanes, so that not each of them finds out by itself."""

from __future__ import annotations

import asyncio
from collections import deque

_TOGETHER = 32  # lanes that go on at a time when it is back: each sends a call,
_PAUSE_S = 0.01  # and others have the loop in between


class Reach:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self.is_there = True
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._releasing: asyncio.TimerHandle | None = None

    def away(self) -> None:
        """No proxy answers: nothing needs to be tried until one does."""
        self.is_there = False

    def back(self) -> None:
        """One answers."""
        self.is_there = True
        if self._releasing is None:
            self._release()

    async def wait(self) -> None:
        """Return when something may be sent, in turn."""
        while not self.is_there or self._releasing is not None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter
            if self.is_there:
                return

    def _release(self) -> None:
        self._releasing = None
        if not self.is_there:
            return
        for _ in range(min(_TOGETHER, len(self._waiting))):
            waiter = self._waiting.popleft()
            if not waiter.done():  # else its lane is ending
                waiter.set_result(None)
        if self._waiting:
            self._releasing = asyncio.get_running_loop().call_later(_PAUSE_S, self._release)
