"""Which clients gave a sign of life lately."""

from __future__ import annotations

from broker_adapter.runtime.clock import Clock

CLIENT_ALIVE_S = 60.0  # clients send a heartbeat every 10 s
CLIENTS_MAX = 100_000  # remembered; the longest unseen give way
STOOD_STILL_S = 15.0  # who did not look for longer was stopped meanwhile


class LiveClients:
    """Belongs to one event loop.

    While the process is stopped no client falls silent: what they say then is read once it goes on. So ``look`` more
    often than each ``STOOD_STILL_S`` while it matters who is alive; a longer time without a look does not count.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looked_s = clock.monotonic_s()
        self._stood_still_s = 0.0
        self._seen_s: dict[str, float] = {}  # by ``look``, the longest unseen first

    def look(self) -> float:
        """Note that the event loop turns, and return how long it has done so, in seconds from some moment on."""
        now_s = self._clock.monotonic_s()
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        if passed_s > STOOD_STILL_S:
            self._stood_still_s += passed_s
        return now_s - self._stood_still_s

    def seen(self, client_id: str) -> None:
        """Note a sign of life, and forget who gave none for long."""
        now_s = self.look()
        seen_s = self._seen_s
        seen_s.pop(client_id, None)
        seen_s[client_id] = now_s
        oldest = next(iter(seen_s))
        while len(seen_s) > CLIENTS_MAX or now_s - seen_s[oldest] >= CLIENT_ALIVE_S:
            del seen_s[oldest]
            oldest = next(iter(seen_s))

    def is_alive(self, client_id: str) -> bool:
        """Say whether a client gave a sign of life lately."""
        seen_s = self._seen_s.get(client_id)
        return seen_s is not None and self.look() - seen_s < CLIENT_ALIVE_S

    def gone(self, client_id: str) -> bool:
        """Note that a client left; say whether it was known."""
        return self._seen_s.pop(client_id, None) is not None
