"""What a front believes of the time: its own clocks, which are the host's, and what the store process makes of them."""

from __future__ import annotations

from typing import Final

from broker_adapter.runtime.clock import Clock, SystemClock

NEAR_MS: Final = 20  # by which two readings of one host's clocks may differ: it was slewed in between
_READ_MS_MAX: Final = 1  # between two readings that count as one moment
_READS_MAX: Final = 20


class FrontClock:
    """The clocks of a front; its wall clock is what the store process believes, so that no step goes unwatched."""

    def __init__(self, wall_less_boot_ms: int) -> None:
        """``wall_less_boot_ms`` is what the store process told last."""
        self._system = system = SystemClock()
        self.wall_less_boot_ms = wall_less_boot_ms
        self.boot_ms = system.boot_ms
        self.boot_id = system.boot_id
        self.monotonic_s = system.monotonic_s

    def now_ms(self) -> int:
        """Believed wall-clock time.

        The host's own is exact, and taken as long as it is near to what is believed.
        """
        wall_ms = self._system.now_ms()
        believed_ms = self.boot_ms() + self.wall_less_boot_ms
        return wall_ms if -NEAR_MS <= wall_ms - believed_ms <= NEAR_MS else believed_ms


def wall_less_boot_ms(clock: Clock) -> int:
    """Return how far the wall clock is ahead of the boot clock at one moment, however busy the machine is."""
    reads = 0
    while True:
        before_ms, wall_ms, boot_ms = clock.boot_ms(), clock.now_ms(), clock.boot_ms()
        reads += 1
        if boot_ms - before_ms <= _READ_MS_MAX or reads == _READS_MAX:
            return wall_ms - boot_ms
