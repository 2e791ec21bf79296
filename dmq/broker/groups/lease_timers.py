"""Lease timers: all leases in the order of expiry, and the live clients that have their leases renewed.

All times are on the boot clock, so a step of the wall clock does not change the duration of a lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from broker_adapter.contracts.limits import AUTO_RENEW_INVISIBLE_MS, AUTO_RENEW_MS_MAX
from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.lease_timers import LeaseTimers
from broker_adapter.runtime.live_clients import LiveClients
from dmq.broker.groups.group_queue import DeliveryLease
from dmq.broker.groups.subscription import SubscribedQueue

CLIENT_GONE_INVISIBLE_MS = 1_000
IN_HAND_MAX = 1_000_000  # leases of all groups, some 600 bytes each
IN_HAND_SHARE = 32  # leases allowed per group and topic at that bound: the usual batch of one receive
TIDY_AGAIN_S = 30.0  # interval at that bound: one clean-up costs 0.2 s there
_TIDY_AT_MIN = 8192
_TOGETHER_MAX = 1024  # leases under one timer

_Place = tuple[SubscribedQueue, int, int]  # queue, offset, epoch


class _Watched:
    """Leases under one timer, and the client for which they may be renewed."""

    __slots__ = ("places", "renew_for")

    def __init__(self, places: list[_Place], renew_for: str) -> None:
        self.places = places
        self.renew_for = renew_for


class Ended(NamedTuple):
    """Lease that has expired."""

    queue: SubscribedQueue
    offset: int
    lease: DeliveryLease


class LeaseEnds:
    """All leases of the broker in the order of expiry. It belongs to the event loop. Only renewed leases are rows."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.clients = LiveClients(clock)
        self._timers = LeaseTimers[_Watched](
            *(clock, self.clients, self._weigh), renewed_ms=AUTO_RENEW_INVISIBLE_MS, tidy_at_min=_TIDY_AT_MIN
        )
        self._renewed: dict[str, dict[_Watched, None]] = {}  # renewed leases, by client

    def watch(self, queue: SubscribedQueue, offset: int, lease: DeliveryLease) -> None:
        """Start the timer of one lease."""
        self.watch_together(((queue, offset, lease),))

    def watch_together(self, leases: Sequence[tuple[SubscribedQueue, int, DeliveryLease]]) -> None:
        """Start one timer for the leases of one receive, which share one end."""
        if not leases:
            return
        lease = leases[0][2]
        if lease.renew_for:
            until_ms = self._clock.boot_ms() + AUTO_RENEW_MS_MAX
            for _, _, each in leases:
                each.renew_until_ms = each.renew_until_ms or until_ms
            if not self.clients.is_alive(lease.renew_for):
                self.client_seen(lease.renew_for)
        self._put(lease.ends_ms, [(queue, offset, each.epoch) for queue, offset, each in leases], lease.renew_for)

    def _put(self, ends_ms: int, places: list[_Place], renew_for: str) -> None:
        watched = _Watched(places, renew_for)
        if renew_for:
            self._renewed.setdefault(renew_for, {})[watched] = None
        self._timers.start(ends_ms, watched, len(places))

    def is_full(self) -> bool:
        """Return True if the number of leases is at its limit.

        Finished leases may still count for up to ``TIDY_AGAIN_S`` seconds.
        """
        timers = self._timers
        if timers.size >= IN_HAND_MAX and self._clock.monotonic_s() >= timers.tidied_s + TIDY_AGAIN_S:
            timers.tidy()
        return timers.size >= IN_HAND_MAX

    def _weigh(self, _ends_ms: int, watched: _Watched) -> int:
        """Drop leases finished before their expiry, and return the number of the others."""
        watched.places[:] = [each for each in watched.places if _is_held(each)]
        if not watched.places:
            self._watch_no_more(watched)
        return len(watched.places)

    def client_seen(self, client_id: str) -> None:
        """Record a sign of life of a client."""
        self.clients.seen(client_id)

    def client_gone(self, client_id: str) -> None:
        """Expire the client's renewed leases within ``CLIENT_GONE_INVISIBLE_MS``."""
        if not self.clients.gone(client_id):
            return
        soon_ms = self._clock.boot_ms() + CLIENT_GONE_INVISIBLE_MS
        sooner: list[_Place] = []
        for place in [place for watched in self._renewed.pop(client_id, ()) for place in watched.places]:
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
        """As ``LeaseTimers.wait``."""
        await self._timers.wait()

    def pop(self, count_max: int) -> list[Ended]:
        """Remove and return up to ``count_max`` expired leases; renew the leases of live clients instead."""
        self.clients.look()
        now_ms = self._clock.boot_ms()
        ended: list[Ended] = []
        while len(ended) < count_max and (expired := self._timers.pop(now_ms)) is not None:
            ends_ms, watched = expired
            self._watch_no_more(watched)
            places, room = watched.places, count_max - len(ended)
            if len(places) > room:
                self._put(ends_ms, places[room:], watched.renew_for)
                del places[room:]
            for queue, offset, epoch in places:
                lease = queue.leases.get(offset)
                if lease is None or lease.epoch != epoch or lease.is_returning:
                    continue  # finished, delivered again, or already returning
                if lease.ends_ms > now_ms:
                    continue  # extended, with a newer timer
                if self._timers.renew(lease, now_ms):
                    self.watch(queue, offset, lease)
                else:
                    lease.is_returning = True  # the lease may have more than one timer
                    ended.append(Ended(queue, offset, lease))
        return ended

    def _watch_no_more(self, watched: _Watched) -> None:
        own = self._renewed.get(watched.renew_for)
        if own is not None:  # otherwise not renewed, or the client has unregistered
            own.pop(watched, None)
            if not own:
                del self._renewed[watched.renew_for]


def _is_held(place: _Place) -> bool:
    queue, offset, epoch = place
    lease = queue.leases.get(offset)
    return lease is not None and lease.epoch == epoch
