"""Where the timeline's reader is, and the two rules that keep it from missing anything.

Marks are timeline keys as numbers (``timeline_mark``). The *live* cursor is the next key the reader reads. When the
reader lags (after a restart, after a burst) what is overdue gets a second cursor, the *backlog* ``[cursor, end)``, so
that it is drained in order beside what is due now instead of in front of it. The reader may also leave rows of the
live cursor to it (``defer``), or all that it has not read yet (``skip``); a third cursor, *skipped*, then goes through
those ahead of the backlog, for what must not wait for it.

Rule 1, kept by ``reserve``: the writer never assigns a key below the live cursor; a message that is due already gets
the cursor's time, its true time stays in the value. If the wall clock has stepped back, so that the cursor lies in the
future, the true time is used and the cursor is lowered to it.

Rule 2, kept by ``claim`` and ``unsynced``: while a batch is in flight (assembled, not yet synced) the reader stops
below its smallest key. So it never passes a row that is not yet visible and never hands out one not yet durable.

A claim moves the cursor to its stop *before* the rows are read, so a batch that is assembled meanwhile cannot slip a
key in behind the reader; ``retreat`` moves it back to the first row that was not taken. The reader commits what it took
before it claims again: when the cursor was lowered meanwhile, what it took is gone before it could be read twice.
"""

from __future__ import annotations

import threading
from enum import Enum
from typing import NamedTuple

from dmq.store.schema.keys import timeline_mark

BACKLOG_LAG_MS = 1_000
_NEVER = 2**128
_NOTHING = (b"", b"")


class Cursor(Enum):
    """Which of the reader's cursors."""

    LIVE = "live"
    BACKLOG = "backlog"
    SKIPPED = "skipped"


class Claim(NamedTuple):
    """A range the reader may read now; ``stop <= start`` means there is nothing to read."""

    which: Cursor
    start: int
    stop: int


class Marks:
    """The cursors and the in-flight mark, shared by the writer thread and one reader."""

    def __init__(self, done: int) -> None:
        self._changed = threading.Condition()
        self._live = done
        self._backlog: tuple[int, int] | None = None
        self._skipped: tuple[int, int] | None = None  # lies within the backlog
        self._unread_end = 0  # up to where nobody has looked at what the backlog has
        self._claimed = 0  # where the claims of the reader's turn end
        self._held = _NOTHING  # what it reads of the entries that are held, in this turn
        self._in_flight: int | None = None
        self._released = _NEVER  # smallest key that became readable since the reader's turn began
        self._awaited = 0  # the reader waits for a key below
        self._is_closed = False

    # -- the writer's side --------------------------------------------------------------------------------------------

    def reserve(self, earliest_ms: int, now_ms: int, sequence: int) -> tuple[int, int | None]:
        """Announce a batch whose earliest delivery time is ``earliest_ms`` and whose first sequence is ``sequence``.

        Returns the smallest time its keys may carry, and the mark the durable ``done`` must be lowered to, if any.
        """
        with self._changed:
            cursor_ms = self._live >> 64
            true_mark = timeline_mark(earliest_ms, sequence)
            if true_mark >= self._live:
                self._in_flight = true_mark
                return 0, None
            if cursor_ms <= now_ms + 1:  # a claim at now_ms leaves the cursor at now_ms + 1
                self._in_flight = timeline_mark(cursor_ms, sequence)
                return cursor_ms, None
            self._lower(true_mark)
            self._in_flight = true_mark
            return 0, true_mark

    def release(self) -> None:
        """The batch in flight is durable and readable; wake the reader if it waits for something of it."""
        with self._changed:
            if self._in_flight is not None:
                self._released = min(self._released, self._in_flight)
                self._in_flight = None
                if self._released < self._awaited:  # else the reader is woken in vain, many times a second
                    self._changed.notify_all()

    def _lower(self, mark: int) -> None:
        if self._backlog is not None:
            cursor, end = self._backlog
            if mark < end:
                self._backlog = (min(cursor, mark), end)
                self._live = self._unread_end = end  # later keys of the same batch may lie between the two cursors
                return
        self._live = mark

    # -- the reader's side --------------------------------------------------------------------------------------------

    def begin_turn(self) -> None:
        """Forget wake-ups: one that comes from now on, also during the turn, ends the ``wait`` behind it."""
        with self._changed:
            self._released = _NEVER
            self._claimed = 0
            self._held = _NOTHING

    def claim(self, which: Cursor, now_ms: int) -> Claim:
        """Take the range of a cursor that may be read now; a turn begins with ``begin_turn`` or ``split_backlog``."""
        with self._changed:
            if which is Cursor.BACKLOG:
                if self._backlog is None:
                    return Claim(which, 0, 0)
                cursor, end = self._backlog
                stop = min(end, timeline_mark(now_ms + 1, 0))
            elif which is Cursor.SKIPPED:
                if self._skipped is None or self._backlog is None:
                    return Claim(which, 0, 0)
                cursor, stop = (
                    max(self._skipped[0], self._backlog[0]),
                    min(self._skipped[1], timeline_mark(now_ms + 1, 0)),
                )
            else:
                cursor, stop = self._live, timeline_mark(now_ms + 1, 0)
            if self._in_flight is not None:
                stop = min(stop, self._in_flight)
            self._claimed = max(self._claimed, stop)
            if stop > cursor:
                self._move(which, stop)
            return Claim(which, cursor, stop)

    def unsynced(self) -> int:
        """Return the mark from which on rows that were just read are not to be used: they are in flight.

        Only when the clock stepped back between the claim and the read can there be such rows; the cursor is below
        them already, so they are read next time.
        """
        with self._changed:
            return _NEVER if self._in_flight is None else self._in_flight

    def retreat(self, which: Cursor, mark: int) -> None:
        """The claim was read only up to ``mark``; what follows is read next time."""
        with self._changed:
            of = {Cursor.BACKLOG: self._backlog, Cursor.SKIPPED: self._skipped}.get(which) or (self._live,)
            if mark < of[0]:
                self._move(which, mark)

    def split_backlog(self, now_ms: int, lag_ms: int | None = None) -> bool:
        """Begin a turn. If the live cursor lags, what it lags behind becomes the backlog; say whether there is one now.

        ``lag_ms`` is from when on it counts, by default ``BACKLOG_LAG_MS``: an idle reader lags by its nap.
        """
        self.begin_turn()
        with self._changed:
            if self._backlog is not None and self._backlog[0] >= self._backlog[1]:
                self._backlog = self._skipped = None
            if self._backlog is None and self._live >> 64 < now_ms - (BACKLOG_LAG_MS if lag_ms is None else lag_ms):
                boundary = timeline_mark(now_ms, 0)
                self._backlog = (self._live, boundary)
                self._live = self._unread_end = boundary
            return self._backlog is not None

    def low(self) -> int:
        """Return the smallest cursor: everything below it was taken by the reader."""
        with self._changed:
            return self._live if self._backlog is None else min(self._live, self._backlog[0])

    def live(self) -> int:
        """Return where the live cursor is."""
        with self._changed:
            return self._live

    def has_unread(self) -> bool:
        """Say whether the backlog has rows that were not looked at: what the reader lagged behind, not what it left."""
        with self._changed:
            return self._backlog is not None and self._backlog[0] < min(self._unread_end, self._backlog[1])

    def high(self) -> int:
        """Return where the claims of the reader's turn end: it has nothing from here on in its hand."""
        with self._changed:
            return self._claimed

    def read_held(self, start: bytes, stop: bytes) -> None:
        """Note that the reader is about to read entries that are held, in this range and what it read before."""
        with self._changed:
            self._held = (min(start, self._held[0] or start), max(stop, self._held[1]))

    def held_range(self) -> tuple[bytes, bytes]:
        """Return the keys between which the reader may have entries in its hand that are held."""
        with self._changed:
            return self._held

    def has_backlog(self) -> bool:
        """Say whether some of the backlog was not taken yet."""
        with self._changed:
            return self._backlog is not None and self._backlog[0] < self._backlog[1]

    def defer(self, first: int, last: int) -> None:
        """Let the backlog go on up to row ``last``, or begin at ``first``: rows left there are read in order, later.

        For rows that must not pass others of the backlog, or not hold up others of the live cursor.
        """
        with self._changed:
            cursor, end = self._backlog or (first, first)
            # If the live cursor was lowered below them meanwhile, it comes by again itself.
            end = max(end, min(last + 1, self._live))
            cursor = min(cursor, first)
            if cursor < end:
                self._backlog = (cursor, end)

    def skip(self, now_ms: int, by_ms: int) -> None:
        """Leave what the live cursor has before it to the backlog, and to the cursor ``SKIPPED``: so many milliseconds.

        For a flood of which there is no end in sight: what is due behind it does not wait until all of it was read.
        What is due now is not skipped.
        """
        with self._changed:
            boundary = timeline_mark(min(now_ms, (self._live >> 64) + by_ms), 0)
            if boundary <= self._live:
                return
            cursor, _ = self._backlog or (self._live, 0)
            first = self._live if self._skipped is None or self._skipped[0] >= self._skipped[1] else self._skipped[0]
            self._skipped = (min(first, self._live), boundary)
            self._backlog = (min(cursor, self._live), boundary)
            self._live = boundary

    def wait(self, until_ms: int, timeout_s: float) -> None:
        """Sleep until a key below ``until_ms`` becomes readable, ``wake`` or ``close`` is called, or time is up."""
        with self._changed:
            self._awaited = bound = timeline_mark(until_ms, 0)
            self._changed.wait_for(lambda: self._released < bound or self._is_closed, timeout_s)
            self._awaited = 0

    def wake(self) -> None:
        """Make the reader look again now."""
        with self._changed:
            self._released = 0
            self._changed.notify_all()

    def close(self) -> None:
        """Let ``wait`` return at once from here on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _move(self, which: Cursor, mark: int) -> None:
        if which is Cursor.LIVE:
            self._live = mark
        elif which is Cursor.BACKLOG and self._backlog is not None:
            self._backlog = (mark, self._backlog[1])
        elif self._skipped is not None:
            self._skipped = (mark, self._skipped[1])
