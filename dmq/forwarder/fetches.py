"""Receives at the cluster that go on when who asked has something else, or is gone: what they bring is for the next.

A receive that is called off may leave what was on its way to it hidden at the cluster. So one that is not needed any
more is kept: the next receive of the same group, subscription and terms takes it, and what it brought. What nobody
takes is given back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from broker_adapter.adapter import PopBroker, Subscription
from broker_adapter.errors import BrokerError
from broker_adapter.message import Delivery

HOLD_S = 3.0  # what was brought waits so long for somebody
KEPT_MAX = 1_000  # fetches that nobody waits for; one more is called off


class Asked(NamedTuple):
    """What a receive asks for."""

    group: str
    subscription: Subscription
    batch_max: int
    invisible_ms: int
    renew_for: str


Fetch = asyncio.Task[Sequence[Delivery]]


class Fetches:
    """Belongs to the event loop. ``close`` gives back what is left."""

    def __init__(self, cluster: PopBroker) -> None:
        self._cluster = cluster
        self._kept: dict[Asked, deque[Fetch]] = {}
        self._count = 0
        self._giving_back: set[asyncio.Task[None]] = set()

    def take(self, asked: Asked, fetch: Coroutine[Any, Any, Sequence[Delivery]]) -> Fetch:
        """Return a fetch that was kept, which may be done, or ``fetch`` as a new one."""
        kept = self._kept.get(asked)
        while kept:
            found = self._pop(asked, kept)
            if not found.done() or (not found.cancelled() and found.exception() is None and found.result()):
                fetch.close()
                return found
        return asyncio.get_running_loop().create_task(fetch, name="dmq-fetch")

    def keep(self, asked: Asked, fetch: Fetch) -> None:
        """Keep a fetch that nobody waits for now."""
        if self._count >= KEPT_MAX and not fetch.done():
            fetch.cancel()
            return
        self._kept.setdefault(asked, deque()).append(fetch)
        self._count += 1
        fetch.add_done_callback(lambda _: self._has_come(asked, fetch))

    async def close(self) -> None:
        """Call off what is under way, and give back what was brought."""
        for asked, kept in list(self._kept.items()):
            while kept:
                fetch = self._pop(asked, kept)
                fetch.cancel()
                await asyncio.gather(fetch, return_exceptions=True)
                self._give_back(asked, fetch)
        await asyncio.gather(*self._giving_back)

    def _pop(self, asked: Asked, kept: deque[Fetch]) -> Fetch:
        self._count -= 1
        fetch = kept.popleft()
        if not kept:
            del self._kept[asked]
        return fetch

    def _has_come(self, asked: Asked, fetch: Fetch) -> None:
        asyncio.get_running_loop().call_later(HOLD_S, self._drop, asked, fetch)

    def _drop(self, asked: Asked, fetch: Fetch) -> None:
        kept = self._kept.get(asked)
        if kept is not None and fetch in kept:
            kept.remove(fetch)
            self._count -= 1
            if not kept:
                del self._kept[asked]
            self._give_back(asked, fetch)

    def _give_back(self, asked: Asked, fetch: Fetch) -> None:
        if not fetch.cancelled() and fetch.exception() is None and fetch.result():
            task = asyncio.get_running_loop().create_task(self._returned(asked, fetch.result()))
            self._giving_back.add(task)
            task.add_done_callback(self._giving_back.discard)

    async def _returned(self, asked: Asked, deliveries: Sequence[Delivery]) -> None:
        for each in deliveries:
            with suppress(BrokerError):  # else it comes back when its invisible duration is over
                await self._cluster.change_invisible(asked.group, each.topic, each.receipt_handle, 0)
