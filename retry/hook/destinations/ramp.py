"""Rate of kept messages after an outage: slow at first, because a recovering destination starts cold.

Starts at 50 per second, doubles with each second of success, halves on a failure, ends at the limit. Without a limit
it ends at a rate that no process reaches. No clock, no lock.
"""

from __future__ import annotations

START_PER_S = 50.0
LEAST_PER_S = 1.0
UNLIMITED_PER_S = 50_000.0  # from this rate on the ramp limits nothing
BURST_S = 0.05  # maximum delay that a late sender may catch up


class Ramp:
    """Paces the attempts of one destination. Times are monotonic seconds from the caller."""

    def __init__(self, limit_per_s: float | None = None) -> None:
        if limit_per_s is not None and not limit_per_s > 0:
            raise ValueError(f"the limit is {limit_per_s!r}, it must be above 0")
        self._limit_per_s = limit_per_s
        self._rate_per_s = limit_per_s
        self._doubles_at_s = 0.0
        self._next_at_s = 0.0

    @property
    def rate_per_s(self) -> float | None:
        """The current rate; ``None``: unlimited."""
        return self._rate_per_s

    def start(self, now_s: float) -> None:
        """Restart at the lowest rate of the ramp: after an outage, or with a backlog at the start."""
        self._set(START_PER_S)
        self._doubles_at_s = now_s + 1.0
        self._next_at_s = now_s

    def on_success(self, now_s: float) -> None:
        """Record a successful attempt: double the rate after a second without a failure."""
        if self._rate_per_s is None or self._rate_per_s == self._limit_per_s or now_s < self._doubles_at_s:
            return
        self._set(self._rate_per_s * 2)
        self._doubles_at_s = now_s + 1.0

    def on_failure(self, now_s: float) -> None:
        """Record a failed attempt: halve the rate, and wait a second before the next doubling."""
        if self._rate_per_s is not None:
            self._set(max(LEAST_PER_S, self._rate_per_s / 2))
            self._doubles_at_s = now_s + 1.0

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next attempt may begin."""
        return 0.0 if self._rate_per_s is None else max(0.0, self._next_at_s - now_s)

    def spend(self, now_s: float) -> None:
        """Record the start of an attempt."""
        if self._rate_per_s is not None:
            self._next_at_s = max(self._next_at_s, now_s - BURST_S) + 1 / self._rate_per_s

    def _set(self, rate_per_s: float) -> None:
        if self._limit_per_s is not None:
            self._rate_per_s = min(rate_per_s, self._limit_per_s)
        else:
            self._rate_per_s = rate_per_s if rate_per_s < UNLIMITED_PER_S else None
