"""Liveness of clients by their heartbeats."""

from __future__ import annotations

from broker_adapter.runtime.clock import Clock

CLIENT_ALIVE_S = 60.0  # clients send a heartbeat every 10 s
CLIENTS_MAX = 100_000  # the clients unseen for longest are removed first
STOOD_STILL_S = 15.0  # a longer gap between calls of ``look`` means a stopped process


class LiveClients:
    """Times of the last heartbeats of clients. Belongs to one event loop.

    While the process is stopped no client times out: heartbeats of that time are read afterwards. So call ``look`` more
    often than every ``STOOD_STILL_S`` while liveness matters; a longer time without a call is not counted.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looked_s = clock.monotonic_s()
        self._stood_still_s = 0.0
        self._seen_s: dict[str, float] = {}  # by ``look``, the longest unseen first

    def look(self) -> float:
        """Record that the event loop runs, and return its running time, in seconds from an arbitrary start."""
        now_s = self._clock.monotonic_s()
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        if passed_s > STOOD_STILL_S:
            self._stood_still_s += passed_s
        return now_s - self._stood_still_s

    def seen(self, client_id: str) -> None:
        """Record a heartbeat, and remove clients without a recent one."""
        now_s = self.look()
        seen_s = self._seen_s
        seen_s.pop(client_id, None)
        seen_s[client_id] = now_s
        oldest = next(iter(seen_s))
        while len(seen_s) > CLIENTS_MAX or now_s - seen_s[oldest] >= CLIENT_ALIVE_S:
            del seen_s[oldest]
            oldest = next(iter(seen_s))

    def is_alive(self, client_id: str) -> bool:
        """Return True if a client sent a heartbeat within ``CLIENT_ALIVE_S``."""
        seen_s = self._seen_s.get(client_id)
        return seen_s is not None and self.look() - seen_s < CLIENT_ALIVE_S

    def gone(self, client_id: str) -> bool:
        """Remove a client that left; return True if it was known."""
        return self._seen_s.pop(client_id, None) is not None
