"""Lease timers: all leases in the order of expiry, and the live clients that have their leases renewed.

All times are on the boot clock, so a step of the wall clock does not change the duration of a lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from broker_adapter.contracts.limits import AUTO_RENEW_INVISIBLE_MS, AUTO_RENEW_MS_MAX
from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.live_clients import LiveClients
from dmq.broker.groups.group_queue import Lease
from dmq.broker.groups.subscription import SubscribedQueue

CLIENT_GONE_INVISIBLE_MS = 1_000
IN_HAND_MAX = 1_000_000  # leases of all groups, some 600 bytes each
IN_HAND_SHARE = 32  # leases allowed per group and topic at that bound: the usual batch of one receive
TIDY_AGAIN_S = 30.0  # interval at that bound: one clean-up costs 0.2 s there
_NAP_S_MAX = 0.2  # the loop's own timers do not count a suspended machine
_TIDY_AT_MIN = 8192
_TOGETHER_MAX = 1024  # leases under one timer

_Place = tuple[SubscribedQueue, int, int]  # queue, offset, epoch
_Watched = tuple[int, int, list[_Place], str]  # ends_ms, turn, the leases, and the client they may be renewed for


class Ended(NamedTuple):
    """Lease that has expired."""

    queue: SubscribedQueue
    offset: int
    lease: Lease


class LeaseEnds:
    """All leases of the broker in the order of expiry. It belongs to the event loop. Only renewed leases are rows."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[_Watched] = []
        self._places = 0  # leases in the heap
        self._renewed: dict[str, dict[int, list[_Place]]] = {}  # renewed leases, by client and turn
        self._turn = 0
        self._tidy_at = _TIDY_AT_MIN
        self._tidied_s = -TIDY_AGAIN_S
        self._sooner = asyncio.Event()
        self.clients = LiveClients(clock)

    def watch(self, queue: SubscribedQueue, offset: int, lease: Lease) -> None:
        """Start the timer of one lease."""
        self.watch_together(((queue, offset, lease),))

    def watch_together(self, leases: Sequence[tuple[SubscribedQueue, int, Lease]]) -> None:
        """Start one timer for the leases of one receive, which share one end."""
        if not leases:
            return
        lease = leases[0][2]
        ends_ms, renew_for = lease.ends_ms, lease.renew_for
        if renew_for:
            until_ms = self._clock.boot_ms() + AUTO_RENEW_MS_MAX
            for _, _, each in leases:
                each.renew_until_ms = each.renew_until_ms or until_ms
            if not self.clients.is_alive(lease.renew_for):
                self.client_seen(lease.renew_for)
        self._put(ends_ms, [(queue, offset, each.epoch) for queue, offset, each in leases], renew_for)
        if self._places >= self._tidy_at:
            self._tidy()

    def _put(self, ends_ms: int, places: list[_Place], renew_for: str) -> None:
        if not self._heap or ends_ms < self._heap[0][0]:
            self._sooner.set()
        self._turn += 1
        self._places += len(places)
        if renew_for:
            self._renewed.setdefault(renew_for, {})[self._turn] = places
        heappush(self._heap, (ends_ms, self._turn, places, renew_for))

    def is_full(self) -> bool:
        """Return True if the number of leases is at its limit.

        Finished leases may still count for up to ``TIDY_AGAIN_S`` seconds.
        """
        if self._places >= IN_HAND_MAX and self._clock.monotonic_s() >= self._tidied_s + TIDY_AGAIN_S:
            self._tidy()
        return self._places >= IN_HAND_MAX

    def _tidy(self) -> None:
        """Drop timers of leases finished before their expiry; set the next threshold to twice the remaining number."""
        heap: list[_Watched] = []
        self._places = 0
        self._tidied_s = self._clock.monotonic_s()
        for ends_ms, turn, places, renew_for in self._heap:
            places[:] = [each for each in places if _is_held(each)]
            if places:
                heap.append((ends_ms, turn, places, renew_for))
                self._places += len(places)
            elif renew_for:
                self._watch_no_more(renew_for, turn)
        heapify(heap)
        self._heap = heap
        self._tidy_at = max(_TIDY_AT_MIN, 2 * self._places)

    def client_seen(self, client_id: str) -> None:
        """Record a sign of life of a client."""
        self.clients.seen(client_id)

    def client_gone(self, client_id: str) -> None:
        """Expire the client's renewed leases within ``CLIENT_GONE_INVISIBLE_MS``."""
        if not self.clients.gone(client_id):
            return
        soon_ms = self._clock.boot_ms() + CLIENT_GONE_INVISIBLE_MS
        sooner: list[_Place] = []
        for place in [place for places in self._renewed.pop(client_id, {}).values() for place in places]:
            queue, offset, epoch = place
            lease = queue.leases.get(offset)
            if lease is not None and lease.epoch == epoch and lease.renew_for == client_id:
                lease.renew_for = ""
                if lease.ends_ms > soon_ms:
                    lease.ends_ms = soon_ms
                    sooner.append(place)
        for first in range(0, len(sooner), _TOGETHER_MAX):
            self._put(soon_ms, sooner[first : first + _TOGETHER_MAX], "")

    async def wait(self) -> None:
        """Return when a lease may have expired, at the latest after ``_NAP_S_MAX`` if any lease is watched."""
        self._sooner.clear()
        nap_s = None
        if self._heap:
            nap_s = min(max((self._heap[0][0] - self._clock.boot_ms()) / 1000, 0.001), _NAP_S_MAX)
        try:
            async with asyncio.timeout(nap_s):
                await self._sooner.wait()
        except TimeoutError:
            return

    def pop(self, count_max: int) -> list[Ended]:
        """Remove and return up to ``count_max`` expired leases; renew the leases of live clients instead."""
        self.clients.look()
        now_ms = self._clock.boot_ms()
        ended: list[Ended] = []
        while self._heap and self._heap[0][0] <= now_ms and len(ended) < count_max:
            ends_ms, turn, places, renew_for = heappop(self._heap)
            if renew_for:
                self._watch_no_more(renew_for, turn)
            self._places -= len(places)
            room = count_max - len(ended)
            if len(places) > room:
                self._put(ends_ms, places[room:], renew_for)
                del places[room:]
            for queue, offset, epoch in places:
                lease = queue.leases.get(offset)
                if lease is None or lease.epoch != epoch or lease.is_returning:
                    continue  # finished, delivered again, or already returning
                if lease.ends_ms > now_ms:
                    continue  # extended, with a newer timer
                if self._is_renewed(lease, now_ms):
                    lease.ends_ms = min(now_ms + AUTO_RENEW_INVISIBLE_MS, lease.renew_until_ms)
                    self.watch(queue, offset, lease)
                else:
                    lease.is_returning = True  # the heap may hold the lease more than once
                    ended.append(Ended(queue, offset, lease))
        return ended

    def _watch_no_more(self, renew_for: str, turn: int) -> None:
        own = self._renewed.get(renew_for)
        if own is not None:  # otherwise the client has unregistered
            own.pop(turn, None)
            if not own:
                del self._renewed[renew_for]

    def _is_renewed(self, lease: Lease, now_ms: int) -> bool:
        if not lease.renew_for or now_ms >= lease.renew_until_ms:
            return False
        return self.clients.is_alive(lease.renew_for)


def _is_held(place: _Place) -> bool:
    queue, offset, epoch = place
    lease = queue.leases.get(offset)
    return lease is not None and lease.epoch == epoch
