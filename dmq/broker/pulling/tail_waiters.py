"""Ends of queues, and pulls that wait for them: unlike receives, all waiting pulls get an arriving message."""

from __future__ import annotations

import asyncio

from dmq.broker.io import Place
from dmq.store.writer.operations import Appended


class Tail:
    """Range of a queue, and the pulls that wait for its growth. It belongs to the event loop.

    All messages below ``end`` are durable. ``is_known`` is True once the stored end was read; before that, ``end``
    covers only new messages. ``begin`` is the begin of the queue at the last read; it only increases.
    """

    __slots__ = ("_waiters", "begin", "end", "is_known")

    def __init__(self) -> None:
        self.begin = 0
        self.end = 0
        self.is_known = False
        self._waiters: set[asyncio.Future[None]] = set()

    def grew(self, end: int) -> None:
        """Record a durable end, and wake all waiting pulls if it is higher."""
        if end > self.end:
            self.end = end
            for woken in self._waiters:
                if not woken.done():
                    woken.set_result(None)

    @property
    def waiting(self) -> int:
        """Number of waiting pulls."""
        return len(self._waiters)

    async def wait(self, timeout_s: float) -> None:
        """Return when the queue has grown, or after ``timeout_s`` seconds."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(woken)
        try:
            await asyncio.wait((woken,), timeout=timeout_s)
        finally:
            self._waiters.discard(woken)


class Tails:
    """Tails of the pulled queues. It belongs to the event loop."""

    def __init__(self) -> None:
        self._by_place: dict[Place, Tail] = {}

    def of(self, place: Place) -> Tail:
        """Return the tail of a queue, which is notified of new messages from now on."""
        return self._by_place.setdefault(place, Tail())

    def on_appended(self, appended: Appended) -> None:
        """Update the tails after an append and wake their pulls."""
        for place, growth in appended.items():
            if (tail := self._by_place.get(Place(*place))) is not None:
                tail.grew(growth.end)

    def forget(self, topic_id: int) -> None:
        """Drop the tails of a removed topic."""
        self._by_place = {place: tail for place, tail in self._by_place.items() if place.topic_id != topic_id}

    @property
    def waiting(self) -> int:
        """Number of waiting pulls of all tails."""
        return sum(tail.waiting for tail in self._by_place.values())
