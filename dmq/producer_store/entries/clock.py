"""The clock of a spool: all that waits in one waits for a time after a failure, so it must not stick.

It follows the host's clock, but never goes back. Set back by an hour, the host's clock would let every entry wait an
hour longer; this one goes on from where it was, until the host's has caught up. A step forward of more than ten minutes
is not followed before the host's clock was steady for as long: entries would be too old at once, and die.

What is kept of the clocks in each directory lets the next process go on from there.
"""

from __future__ import annotations

import threading

from broker_adapter.runtime.clock import Clock
from dmq.store.files.steady_clock import JUMP_MAX_MS, BelievedClock, ClockOptions
from dmq.store.schema.clock import ClockRow


class ForwardClock:
    """A ``Clock`` whose wall time never goes back. May be called from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._believed = BelievedClock(clock, ClockOptions(jump_max_ms=JUMP_MAX_MS), None, is_new=True)
        self._lock = threading.Lock()
        self.monotonic_s = clock.monotonic_s
        self.boot_ms = clock.boot_ms
        self.boot_id = clock.boot_id
        self._offset_ms = self._believed.now_ms() - clock.boot_ms()

    def now_ms(self) -> int:
        """Wall-clock time, or what passed since it was set back."""
        with self._lock:
            wall_ms, boot_ms = self._believed.now_ms(), self.boot_ms()  # in this order: a pause in between adds nothing
            self._offset_ms = max(self._offset_ms, wall_ms - boot_ms)
            return boot_ms + self._offset_ms

    def go_on_from(self, known: ClockRow) -> bool:
        """Be no earlier than the clock of an earlier process; say whether that changes anything."""
        with self._lock:
            boot_ms = self.boot_ms()
            is_same_boot = known.boot_id == self.boot_id() != "" and boot_ms >= known.boot_ms
            offset_ms = known.believed_offset_ms if is_same_boot else known.wall_ms - boot_ms
            is_ahead = offset_ms > self._offset_ms
            self._offset_ms = max(self._offset_ms, offset_ms)
            return is_ahead
