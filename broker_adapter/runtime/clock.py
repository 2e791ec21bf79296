"""Clocks; the only module that reads a clock.

- *wall* (epoch milliseconds, may step) decides when a message is due.
- *boot* (milliseconds, never steps, counts the time of suspension) measures durations that must hold exactly. It
  distinguishes a step of the wall clock from elapsed time.
- *monotonic* (seconds, never steps) measures timeouts and costs.
"""

from __future__ import annotations

import threading
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

__all__ = ["Clock", "ManualClock", "Moment", "SystemClock", "moment"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock(Protocol):
    """Source of time. All methods may be called from any thread."""

    def now_ms(self) -> int:
        """Return the wall-clock time: whole milliseconds since 1970-01-01 UTC, rounded down, so that nothing is ever
        early.
        """
        ...

    def monotonic_s(self) -> float:
        """Return seconds from an arbitrary start; never decreases."""
        ...

    def boot_ms(self) -> int:
        """Return milliseconds since the start of this host, including suspension; never decreases, never steps."""
        ...

    def boot_id(self) -> str:
        """Return the id of the host's boot from which ``boot_ms`` counts; empty if the host provides none."""
        ...


class Moment(NamedTuple):
    """Instant by two clocks: wall for stored times, boot for exact durations."""

    wall_ms: int
    boot_ms: int


def moment(clock: Clock) -> Moment:
    """Return the current time of both clocks."""
    return Moment(clock.now_ms(), clock.boot_ms())


class SystemClock:
    """Clocks of this host."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        return time.monotonic()

    def boot_ms(self) -> int:
        return _boot_ns() // 1_000_000

    def boot_id(self) -> str:
        return _boot_id()


if hasattr(time, "CLOCK_BOOTTIME"):

    def _boot_ns() -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

else:  # without it, suspension looks like a step of the wall clock
    _boot_ns = time.monotonic_ns


@cache
def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


class ManualClock:
    """Clocks that only move on request; the wall clock may step, and the machine may be suspended or rebooted."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._lock = threading.Lock()
        self._now_ms = now_ms
        self._monotonic_ms = 0
        self._boot_ms = 0
        self._boots = 1
        self.was_set = False  # True once the wall clock moved without the boot clock, even if corrected later

    def now_ms(self) -> int:
        with self._lock:
            return self._now_ms

    def monotonic_s(self) -> float:
        with self._lock:
            return self._monotonic_ms / 1000

    def boot_ms(self) -> int:
        with self._lock:
            return self._boot_ms

    def boot_id(self) -> str:
        with self._lock:
            return f"boot-{self._boots}"

    def advance(self, ms: int) -> None:
        """Advance all clocks by ``ms`` milliseconds."""
        self.pass_by(wall_ms=ms, monotonic_ms=ms, boot_ms=ms)

    def suspend(self, ms: int) -> None:
        """Suspend the machine for ``ms`` milliseconds: only the wall and boot clocks advance."""
        self.pass_by(wall_ms=ms, boot_ms=ms)

    def pass_by(self, *, wall_ms: int = 0, monotonic_ms: int = 0, boot_ms: int = 0) -> None:
        """Advance each clock by its own amount; only the wall clock may go back."""
        assert monotonic_ms >= 0
        assert boot_ms >= 0
        with self._lock:
            self._now_ms += wall_ms
            self._monotonic_ms += monotonic_ms
            self._boot_ms += boot_ms
            self.was_set |= wall_ms != boot_ms

    def step_to(self, now_ms: int) -> None:
        """Set the wall clock, forward or back, without advancing the others."""
        with self._lock:
            self.was_set |= now_ms != self._now_ms
            self._now_ms = now_ms

    def reboot(self, ms: int = 0) -> None:
        """Reboot the machine, ``ms`` milliseconds of wall-clock time later."""
        with self._lock:
            self._now_ms += ms
            self._boot_ms = 0
            self._boots += 1
            self.was_set = True
