"""The daemon's believed time: the host's wall clock, checked for steps.

The wall clock is compared with the boot clock, which cannot be set. Readings within 50 ms after the last comparison are
not compared again. If their distance changed by more than a second the wall clock was *stepped*; slewing and a
suspended machine are no steps. After a step:

    backward           the believed time is adjusted at once
    forward            the believed time is adjusted at once if the step is at most ``jump_max_ms``. A larger step is
                       *held*: the believed time continues as without the step until the clock was steady for
                       ``steady_after_ms``, was set back, or was accepted by an operator. A step that returns to the
                       last steady clock is adopted at once
    either             the clock is not *steady* for ``steady_after_ms``: deletion by age is suspended meanwhile

A forward step leaves the 50 ms window, so the next reading compares. A backward step into the window is noticed when
the window ends. A step that is reverted between two readings is never noticed.

The state that survives a restart is one row, ``ClockRow``. It reveals a step that occurred while the daemon was down.
After a reboot of the machine, only a wall clock before its last known reading is noticed.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from broker_adapter.runtime.clock import Clock
from dmq.store.schema.cell.clock import ClockRow

STEP_MS = 1_000  # a change of the clocks' distance by this much, beyond slewing, is a step
SLEW_DIVISOR = 2_000  # a clock is slewed by 500 ppm at most
STEADY_AFTER_MS = 10 * 60_000
JUMP_MAX_MS = 10 * 60_000
_COMPARE_MS = 50  # how often the clocks are compared
_TRACK_MS = 1_000  # how often their distance is updated
_READ_MS_MAX = 50  # between two readings that count as simultaneous
_READS_MAX = 20
_NEWS_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOptions:
    """Reaction to steps of the wall clock. With ``jump_max_ms`` ``None`` every step is followed at once."""

    steady_after_ms: int = STEADY_AFTER_MS
    jump_max_ms: int | None = None


class News(Enum):
    """Kind of a clock event."""

    STEPPED = "clock_stepped"  # and followed
    HELD = "clock_held"  # stepped forward by more than the limit, and not followed yet
    BELIEVED = "clock_believed"  # the held clock is followed from now on
    STEADY = "clock_steady"  # steady for ``steady_after_ms``
    ACCEPTED = "clock_accepted"  # by an operator


class ClockNews(NamedTuple):
    """One clock event, with the wall time at the event."""

    news: News
    step_ms: int  # size of the wall clock's step; 0: none
    moved_ms: int  # resulting change of the believed time
    wall_ms: int
    was_down: bool = False  # it happened while the daemon was down
    why: str = ""  # reason given by an operator


class ClockStatus(NamedTuple):
    """Current state of the clock."""

    wall_ms: int
    believed_ms: int
    is_steady: bool
    is_held: bool
    steady_in_ms: int  # 0: it is steady
    steps: int  # noticed in this run
    last_step_ms: int  # by how much; 0: none
    last_step_at_ms: int  # wall time after it


class SteadyClock:
    """``Clock`` with the believed time as wall time. Thread-safe."""

    def __init__(self, clock: Clock, options: ClockOptions, known: ClockRow | None, *, is_new: bool) -> None:
        """Continue from ``known``, the row of the last run.

        A new store starts steady: a wrong clock can destroy nothing in it.
        """
        self._clock = clock
        self._options = options
        self._wall_ms = clock.now_ms
        self._lock = threading.Lock()
        self._news: list[ClockNews] = []
        self._steps, self._last_step_ms, self._last_step_at_ms = 0, 0, 0
        self._compared_ms = self._compare_at_ms = 0  # readings in between are believed as they are
        self._held_offset_ms: int | None = None
        wall_ms, boot_ms = self._read()
        self._seen_wall_ms, self._seen_boot_ms = wall_ms, boot_ms  # at the last comparison
        self._offset_ms, self._tracked_ms = wall_ms - boot_ms, boot_ms  # their distance, and its boot time
        self._unsteady_from_ms = boot_ms
        self._is_steady = is_new
        self._trusted_offset_ms: int | None = None  # their distance when the clock was last steady
        self.monotonic_s = clock.monotonic_s
        self.boot_ms = clock.boot_ms
        self.boot_id = clock.boot_id
        if known is not None:
            self._go_on_from(known, wall_ms, boot_ms)

    def now_ms(self) -> int:
        """Return the believed wall time in epoch ms."""
        wall_ms = self._wall_ms()
        if self._compared_ms <= wall_ms < self._compare_at_ms:
            return wall_ms
        with self._lock:
            return self._look()

    def is_steady(self) -> bool:
        """Return True if the clock is trusted enough to delete data by age."""
        with self._lock:
            self._look()
            return self._is_steady

    def status(self) -> ClockStatus:
        """Compare the clocks and return their state."""
        with self._lock:
            believed_ms = self._look()
            boot_ms = self._seen_boot_ms
            wait_ms = self._unsteady_from_ms + self._options.steady_after_ms - boot_ms
            return ClockStatus(
                self._seen_wall_ms,
                believed_ms,
                self._is_steady,
                self._held_offset_ms is not None,
                0 if self._is_steady else max(0, wait_ms),
                self._steps,
                self._last_step_ms,
                self._last_step_at_ms,
            )

    def accept(self, why: str = "") -> bool:
        """Follow the wall clock from now on; return False if it was steady and followed already."""
        with self._lock:
            believed_ms = self._look()
            wall_ms = self._seen_wall_ms
            if self._is_steady and self._held_offset_ms is None:
                return False
            self._is_steady, self._held_offset_ms = True, None
            self._news.append(ClockNews(News.ACCEPTED, 0, wall_ms - believed_ms, wall_ms, why=why))
            return True

    @property
    def has_news(self) -> bool:
        """Whether there are events that are not recorded yet."""
        return bool(self._news)

    def news(self) -> tuple[list[ClockNews], ClockRow]:
        """Return the events that are not ``recorded`` yet, oldest first, and the clock row to store after them."""
        with self._lock:
            row = self._row()
            return list(self._news), row

    def recorded(self, count: int) -> None:
        """Drop the first ``count`` of ``news`` once they are durable."""
        with self._lock:
            del self._news[:count]

    def row(self) -> ClockRow | None:
        """Return the clock row to store now, or ``None`` while events are unrecorded.

        A later run then detects these events again.
        """
        with self._lock:
            row = self._row()
            return None if self._news else row

    def _row(self) -> ClockRow:
        believed_ms = self._look()
        return ClockRow(
            self._seen_wall_ms,
            self._seen_boot_ms,
            believed_ms - self._seen_boot_ms,
            self._unsteady_from_ms,
            self._is_steady,
            self._held_offset_ms is not None,
            self._clock.boot_id(),
            None if self._is_steady else self._trusted_offset_ms,
        )

    def _go_on_from(self, known: ClockRow, wall_ms: int, boot_ms: int) -> None:
        boot_id = self._clock.boot_id()
        if boot_id and boot_id == known.boot_id and boot_ms >= known.boot_ms:
            self._offset_ms, self._tracked_ms = known.wall_ms - known.boot_ms, known.boot_ms
            self._is_steady, self._unsteady_from_ms = known.is_steady, known.unsteady_from_ms
            self._trusted_offset_ms = known.trusted_offset_ms
            self._held_offset_ms = known.believed_offset_ms if known.is_held else None
            self._look(was_down=True)
        elif wall_ms + STEP_MS < known.wall_ms:
            self._stepped(wall_ms - known.wall_ms, wall_ms, boot_ms, was_down=True)

    def _read(self) -> tuple[int, int]:
        """Return readings of the wall and the boot clock taken at most 50 ms apart.

        On a busy machine it tries up to 20 times.
        """
        clock = self._clock
        reads = 0
        while True:
            before_ms, wall_ms, boot_ms = clock.boot_ms(), clock.now_ms(), clock.boot_ms()
            reads += 1
            if boot_ms - before_ms <= _READ_MS_MAX or reads == _READS_MAX:
                return wall_ms, boot_ms

    def _look(self, *, was_down: bool = False) -> int:
        """Compare the clocks and return the believed time."""
        options = self._options
        wall_ms, boot_ms = self._read()
        offset_ms = wall_ms - boot_ms
        moved_ms = offset_ms - self._offset_ms
        passed_ms = boot_ms - self._tracked_ms
        is_step = abs(moved_ms) >= STEP_MS + passed_ms // SLEW_DIVISOR
        if is_step:
            self._stepped(moved_ms, wall_ms, boot_ms, was_down=was_down)
        if is_step or passed_ms >= _TRACK_MS:  # not sooner: many small steps would pass unnoticed
            self._offset_ms, self._tracked_ms = offset_ms, boot_ms
        self._seen_wall_ms, self._seen_boot_ms = wall_ms, boot_ms
        if not self._is_steady and boot_ms - self._unsteady_from_ms >= options.steady_after_ms:
            self._is_steady = True
            if self._held_offset_ms is not None:
                held_ms, self._held_offset_ms = self._held_offset_ms, None
                self._tell(News.BELIEVED, offset_ms - held_ms, wall_ms)
            else:
                self._tell(News.STEADY, 0, wall_ms)
        if self._held_offset_ms is not None:
            self._compared_ms = self._compare_at_ms = 0  # every reading compares, as long as it is held
            return boot_ms + self._held_offset_ms
        self._compared_ms, self._compare_at_ms = wall_ms, wall_ms + _COMPARE_MS
        return wall_ms

    def _stepped(self, by_ms: int, wall_ms: int, boot_ms: int, *, was_down: bool) -> None:
        believed_offset_ms = self._offset_ms if self._held_offset_ms is None else self._held_offset_ms
        ahead_ms = wall_ms - boot_ms - believed_offset_ms
        if self._is_steady:
            self._trusted_offset_ms = believed_offset_ms
        trusted_ms, jump_max_ms = self._trusted_offset_ms, self._options.jump_max_ms
        leads_back = trusted_ms is not None and abs(wall_ms - boot_ms - trusted_ms) < 2 * STEP_MS
        is_held = jump_max_ms is not None and ahead_ms > jump_max_ms and not leads_back
        self._held_offset_ms = believed_offset_ms if is_held else None
        self._is_steady, self._unsteady_from_ms = False, boot_ms
        self._steps += 1
        self._last_step_ms, self._last_step_at_ms = by_ms, wall_ms
        what = News.HELD if is_held else News.STEPPED
        self._tell(what, 0 if is_held else ahead_ms, wall_ms, by_ms, was_down=was_down)

    def _tell(self, news: News, moved_ms: int, wall_ms: int, step_ms: int = 0, *, was_down: bool = False) -> None:
        self._news.append(ClockNews(news, step_ms, moved_ms, wall_ms, was_down))
        del self._news[:-_NEWS_MAX]
