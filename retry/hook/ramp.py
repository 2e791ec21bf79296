"""How fast what waits is sent once a destination is back: slowly at first, as whoever was away starts cold.

Starts at 50 a second, doubles with each second of success, halves on a failure, ends at the limit. Without a limit it
ends when the rate is beyond anything a process sends. No clock, no lock.
"""

from __future__ import annotations

START_PER_S = 50.0
LEAST_PER_S = 1.0
UNLIMITED_PER_S = 50_000.0  # from here on a rate holds nobody back
BURST_S = 0.05  # how much of its time a late sender may catch up


class Ramp:
    """Paces the attempts of one destination. Times are monotonic seconds, given by the caller."""

    def __init__(self, limit_per_s: float | None = None) -> None:
        if limit_per_s is not None and not limit_per_s > 0:
            raise ValueError(f"the limit is {limit_per_s!r}, it must be above 0")
        self._limit_per_s = limit_per_s
        self._rate_per_s = limit_per_s
        self._doubles_at_s = 0.0
        self._next_at_s = 0.0

    @property
    def rate_per_s(self) -> float | None:
        """The rate now; ``None``: unlimited."""
        return self._rate_per_s

    def start(self, now_s: float) -> None:
        """Begin slowly: after an outage, or with a backlog at the start."""
        self._set(START_PER_S)
        self._doubles_at_s = now_s + 1.0
        self._next_at_s = now_s

    def on_success(self, now_s: float) -> None:
        """An attempt succeeded: double if a second has gone by without a failure."""
        if self._rate_per_s is None or self._rate_per_s == self._limit_per_s or now_s < self._doubles_at_s:
            return
        self._set(self._rate_per_s * 2)
        self._doubles_at_s = now_s + 1.0

    def on_failure(self, now_s: float) -> None:
        """An attempt failed: halve, and wait a second before doubling again."""
        if self._rate_per_s is not None:
            self._set(max(LEAST_PER_S, self._rate_per_s / 2))
            self._doubles_at_s = now_s + 1.0

    def wait_s(self, now_s: float) -> float:
        """Return how long until an attempt may begin."""
        return 0.0 if self._rate_per_s is None else max(0.0, self._next_at_s - now_s)

    def spend(self, now_s: float) -> None:
        """An attempt begins now."""
        if self._rate_per_s is not None:
            self._next_at_s = max(self._next_at_s, now_s - BURST_S) + 1 / self._rate_per_s

    def _set(self, rate_per_s: float) -> None:
        if self._limit_per_s is not None:
            self._rate_per_s = min(rate_per_s, self._limit_per_s)
        else:
            self._rate_per_s = rate_per_s if rate_per_s < UNLIMITED_PER_S else None
