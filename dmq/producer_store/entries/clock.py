"""Clock of a spool. All of its entries wait for a time after a failure, so the clock must not stop.

It follows the host's clock, but never goes back. If the host's clock were set back by an hour, every entry would wait
an hour longer. This clock continues from its last value until the host's has caught up. A step forward of more than
ten minutes is followed only after the host's clock was steady for that long. Otherwise entries would be too old at
once and die.

The clock state stored in each directory allows the next process to continue from it.
"""

from __future__ import annotations

import threading

from broker_adapter.runtime.clock import Clock
from dmq.store.files.steady_clock import JUMP_MAX_MS, ClockOptions, SteadyClock
from dmq.store.schema.cell.clock import ClockRow


class ForwardClock:
    """A ``Clock`` whose wall time never goes back. May be called from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._believed = SteadyClock(clock, ClockOptions(jump_max_ms=JUMP_MAX_MS), None, is_new=True)
        self._lock = threading.Lock()
        self.monotonic_s = clock.monotonic_s
        self.boot_ms = clock.boot_ms
        self.boot_id = clock.boot_id
        self._offset_ms = self._believed.now_ms() - clock.boot_ms()

    def now_ms(self) -> int:
        """Return the wall-clock time; after it was set back, the last value plus the elapsed time."""
        with self._lock:
            wall_ms, boot_ms = self._believed.now_ms(), self.boot_ms()  # in this order: a pause in between adds nothing
            self._offset_ms = max(self._offset_ms, wall_ms - boot_ms)
            return boot_ms + self._offset_ms

    def go_on_from(self, known: ClockRow) -> bool:
        """Advance to at least the clock of an earlier process; return True if that changes this clock."""
        with self._lock:
            boot_ms = self.boot_ms()
            is_same_boot = known.boot_id == self.boot_id() != "" and boot_ms >= known.boot_ms
            offset_ms = known.believed_offset_ms if is_same_boot else known.wall_ms - boot_ms
            is_ahead = offset_ms > self._offset_ms
            self._offset_ms = max(self._offset_ms, offset_ms)
            return is_ahead
