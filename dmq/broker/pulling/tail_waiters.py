"""The ends of queues, for those who read by offset: unlike receives, they do not share what arrives."""

from __future__ import annotations

import asyncio

from dmq.broker.io.queue_log import Place
from dmq.store.writer.operations import Appended


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


class Tails:
    """The tails of the queues that are pulled from. Belongs to the event loop."""

    def __init__(self) -> None:
        self._by_place: dict[Place, Tail] = {}

    def of(self, place: Place) -> Tail:
        """Return the tail of a queue, which hears of new messages from here on."""
        return self._by_place.setdefault(place, Tail())

    def on_appended(self, appended: Appended) -> None:
        """Tell who waits that queues have grown."""
        for place, growth in appended.items():
            if (tail := self._by_place.get(Place(*place))) is not None:
                tail.grew(growth.end)

    def forget(self, topic_id: int) -> None:
        """Drop the tails of a topic that is gone."""
        self._by_place = {place: tail for place, tail in self._by_place.items() if place.topic_id != topic_id}

    @property
    def waiting(self) -> int:
        """How many wait, at all of them."""
        return sum(tail.waiting for tail in self._by_place.values())
