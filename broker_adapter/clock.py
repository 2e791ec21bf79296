"""The only module that reads a clock.

Two clocks, named: *wall* (epoch milliseconds, may step) decides when a message is due; *monotonic* (seconds, never
steps) measures durations and timeouts.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """Where time comes from. Both methods may be called from any thread."""

    def now_ms(self) -> int:
        """Wall-clock time: whole milliseconds since 1970-01-01 UTC, rounded down, so that nothing is ever early."""
        ...

    def monotonic_s(self) -> float:
        """Seconds from an arbitrary start; never goes back."""
        ...


class SystemClock:
    """This host's clocks."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told; it may be stepped back, as hosts' clocks are."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._lock = threading.Lock()
        self._now_ms = now_ms
        self._monotonic_s = 0.0

    def now_ms(self) -> int:
        with self._lock:
            return self._now_ms

    def monotonic_s(self) -> float:
        with self._lock:
            return self._monotonic_s

    def advance(self, ms: int) -> None:
        """Let ``ms`` milliseconds pass on both clocks."""
        assert ms >= 0
        with self._lock:
            self._now_ms += ms
            self._monotonic_s += ms / 1000

    def step_to(self, now_ms: int) -> None:
        """Set the wall clock, forward or back, without time passing."""
        with self._lock:
            self._now_ms = now_ms
