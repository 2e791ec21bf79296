"""Reachability of the cluster, shared by all lanes, so that each lane need not detect it separately."""

from __future__ import annotations

import asyncio
from collections import deque

_TOGETHER = 32  # lanes released at a time, because each sends a call
_PAUSE_S = 0.01  # between two releases, for other tasks of the loop


class ClusterReach:
    """The shared state, and the lanes that wait for it. The event loop owns it."""

    def __init__(self) -> None:
        self.is_there = True
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._releasing: asyncio.TimerHandle | None = None

    def away(self) -> None:
        """Record that no proxy answers; lanes make no attempts until ``back``."""
        self.is_there = False

    def back(self) -> None:
        """Record that a proxy answers, and release waiting lanes in batches."""
        self.is_there = True
        if self._releasing is None:
            self._release()

    async def wait(self) -> None:
        """Wait until sends are allowed, in turn."""
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
            if not waiter.done():  # done if its lane is closing
                waiter.set_result(None)
        if self._waiting:
            self._releasing = asyncio.get_running_loop().call_later(_PAUSE_S, self._release)
