"""The end of one queue, for those who read by offset: unlike receives, they do not share what arrives."""

from __future__ import annotations

import asyncio


class Tail:
    """Where a queue begins and ends, and who waits for it to grow. Belongs to the event loop.

    Below ``end`` everything is durable; ``is_known`` once the queue was looked at, until then it only hears of what is
    new. ``begin`` is where the queue began at the last look: it only moves up.
    """

    __slots__ = ("_waiters", "begin", "end", "is_known")

    def __init__(self) -> None:
        self.begin = 0
        self.end = 0
        self.is_known = False
        self._waiters: set[asyncio.Future[None]] = set()

    def grew(self, end: int) -> None:
        """Note a durable end, and wake everybody if it is a later one."""
        if end > self.end:
            self.end = end
            for woken in self._waiters:
                if not woken.done():
                    woken.set_result(None)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiters)

    async def wait(self, timeout_s: float) -> None:
        """Return when the queue has grown, or time is up."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(woken)
        try:
            await asyncio.wait((woken,), timeout=timeout_s)
        finally:
            self._waiters.discard(woken)
