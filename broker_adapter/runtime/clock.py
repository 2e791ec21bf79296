"""The only module that reads a clock.

Three clocks, named: *wall* (epoch milliseconds, may step) decides when a message is due; *boot* (milliseconds, never
steps, counts a suspended machine) measures what must last as long as it says, and tells a step of the wall clock from
time that passed; *monotonic* (seconds, never steps) measures timeouts and costs.
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
    """Where time comes from. All methods may be called from any thread."""

    def now_ms(self) -> int:
        """Wall-clock time: whole milliseconds since 1970-01-01 UTC, rounded down, so that nothing is ever early."""
        ...

    def monotonic_s(self) -> float:
        """Seconds from an arbitrary start; never goes back."""
        ...

    def boot_ms(self) -> int:
        """Milliseconds since this host was started, also while it was suspended; never goes back, never steps."""
        ...

    def boot_id(self) -> str:
        """Name the start of the host that ``boot_ms`` counts from; empty if the host does not tell."""
        ...


class Moment(NamedTuple):
    """One moment by two clocks: for what is stored, and for what must last as long as it says."""

    wall_ms: int
    boot_ms: int


def moment(clock: Clock) -> Moment:
    """Return what both clocks say now."""
    return Moment(clock.now_ms(), clock.boot_ms())


class SystemClock:
    """This host's clocks."""

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

else:  # without it, the time that a machine is suspended looks like a step
    _boot_ns = time.monotonic_ns


@cache
def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


class ManualClock:
    """Clocks that move only when told; the wall clock may be stepped, the machine suspended or started anew."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._lock = threading.Lock()
        self._now_ms = now_ms
        self._monotonic_ms = 0
        self._boot_ms = 0
        self._boots = 1
        self.was_set = False  # whether the wall clock ever moved without the boot clock, even if it was set right again

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
        """Let ``ms`` milliseconds pass on all clocks."""
        self.pass_by(wall_ms=ms, monotonic_ms=ms, boot_ms=ms)

    def suspend(self, ms: int) -> None:
        """Suspend the machine for ``ms`` milliseconds: they pass on the wall and on the boot clock."""
        self.pass_by(wall_ms=ms, boot_ms=ms)

    def pass_by(self, *, wall_ms: int = 0, monotonic_ms: int = 0, boot_ms: int = 0) -> None:
        """Move each clock by as much as is said; only the wall clock may go back."""
        assert monotonic_ms >= 0
        assert boot_ms >= 0
        with self._lock:
            self._now_ms += wall_ms
            self._monotonic_ms += monotonic_ms
            self._boot_ms += boot_ms
            self.was_set |= wall_ms != boot_ms

    def step_to(self, now_ms: int) -> None:
        """Set the wall clock, forward or back, without time passing."""
        with self._lock:
            self.was_set |= now_ms != self._now_ms
            self._now_ms = now_ms

    def reboot(self, ms: int = 0) -> None:
        """Start the machine anew, ``ms`` milliseconds of wall-clock time later."""
        with self._lock:
            self._now_ms += ms
            self._boot_ms = 0
            self._boots += 1
            self.was_set = True
