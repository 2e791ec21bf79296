"""Lease timers: items in the order of their expiry, and renewal while a client is alive.

All times are on the boot clock, so a step of the wall clock does not change the duration of a lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.live_clients import LiveClients

_NAP_S_MAX = 0.2  # the loop's own timers do not count a suspended machine

Item = TypeVar("Item")


class Renewable(Protocol):
    """Lease that may be renewed for a live client."""

    ends_ms: int
    renew_for: str  # client id; empty: not renewed
    renew_until_ms: int


class LeaseTimers(Generic[Item]):
    """Heap of timers. It belongs to one event loop. A timer is never stopped: its owner ignores it when it expires.

    ``weigh`` returns the number of leases for which a timer still counts. Timers without any are dropped whenever their
    number has doubled.
    """

    def __init__(
        self,
        clock: Clock,
        clients: LiveClients,
        weigh: Callable[[int, Item], int],
        *,
        renewed_ms: int,
        tidy_at_min: int,
    ) -> None:
        self.size = 0  # leases under all timers
        self.tidied_s = float("-inf")
        self._clock = clock
        self._clients = clients
        self._weigh = weigh
        self._renewed_ms = renewed_ms
        self._heap: list[tuple[int, int, int, Item]] = []  # ends_ms, number, leases, item
        self._number = 0
        self._tidy_at = self._tidy_at_min = tidy_at_min
        self._sooner = asyncio.Event()

    def start(self, ends_ms: int, item: Item, leases: int = 1) -> None:
        """Start one timer for leases that share one end."""
        if not self._heap or ends_ms < self._heap[0][0]:
            self._sooner.set()
        self._number += 1
        self.size += leases
        heappush(self._heap, (ends_ms, self._number, leases, item))
        if self.size >= self._tidy_at:
            self.tidy()

    def tidy(self) -> None:
        """Drop the timers of finished leases; set the next threshold to twice the remaining number."""
        self.tidied_s = self._clock.monotonic_s()
        weighed = ((ends_ms, number, self._weigh(ends_ms, item), item) for ends_ms, number, _, item in self._heap)
        self._heap = [each for each in weighed if each[2]]
        heapify(self._heap)
        self.size = sum(each[2] for each in self._heap)
        self._tidy_at = max(self._tidy_at_min, 2 * self.size)

    async def wait(self) -> None:
        """Return when a timer may have expired, at the latest after ``_NAP_S_MAX`` if there is any."""
        self._sooner.clear()
        nap_s = None
        if self._heap:
            nap_s = min(max((self._heap[0][0] - self._clock.boot_ms()) / 1000, 0.001), _NAP_S_MAX)
        with suppress(TimeoutError):
            async with asyncio.timeout(nap_s):
                await self._sooner.wait()

    def pop(self, now_ms: int) -> tuple[int, Item] | None:
        """Remove and return the first expired timer, with its end; None if none has expired."""
        if not self._heap or self._heap[0][0] > now_ms:
            return None
        ends_ms, _, leases, item = heappop(self._heap)
        self.size -= leases
        return ends_ms, item

    def renew(self, lease: Renewable, now_ms: int) -> bool:
        """Extend an expired lease of a live client; return False if it is not renewed."""
        if not lease.renew_for or now_ms >= lease.renew_until_ms or not self._clients.is_alive(lease.renew_for):
            return False
        lease.ends_ms = min(now_ms + self._renewed_ms, lease.renew_until_ms)
        return True
