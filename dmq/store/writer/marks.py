"""Positions of the timeline's reader, the scheduler, and the two rules that keep it from missing entries.

Marks are timeline keys as numbers (``timeline_mark``). The *live* cursor is the next key to read.

A reader that lags, after a restart or a burst, gets a second cursor for the overdue entries: the *backlog*
``[cursor, end)``. The backlog is drained in order, alongside the entries that are due now instead of before them. The
reader may also leave rows of the live cursor to it (``defer``), or all rows that it has not read yet (``skip``). A
third cursor, *skipped*, then reads those ahead of the backlog, for entries that must not wait for it.

Rule 1, kept by ``reserve``: the writer never assigns a key below the live cursor. A message that is already due gets
the cursor's time; its true time stays in the value. After a backward step of the wall clock the cursor is in the
future. Then the true time is used and the cursor is lowered to it.

Rule 2, kept by ``claim`` and ``unsynced``: while a batch is in flight (assembled, not yet synced) the reader stops
below its smallest key. So it never passes a row that is not yet visible, and never hands out one that is not yet
durable.

A claim moves the cursor to its stop *before* the rows are read. A batch assembled during the read therefore cannot add
a key below the cursor. ``retreat`` moves the cursor back to the first unprocessed row. The reader commits the rows of a
claim before the next claim. So if the cursor was lowered in between, they are gone before they could be read twice.
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
    """Cursor of the reader."""

    LIVE = "live"
    BACKLOG = "backlog"
    SKIPPED = "skipped"


class Claim(NamedTuple):
    """Range that the reader may read now. It is empty if ``stop <= start``."""

    which: Cursor
    start: int
    stop: int


class Marks:
    """Cursors and in-flight mark, shared by the writer thread and one reader. Thread-safe."""

    def __init__(self, done: int) -> None:
        self._changed = threading.Condition()
        self._live = done
        self._backlog: tuple[int, int] | None = None
        self._skipped: tuple[int, int] | None = None  # within the backlog
        self._unread_end = 0  # end of the backlog's rows that were never read
        self._claimed = 0  # end of the claims of the reader's turn
        self._held = _NOTHING  # range of held entries read in this turn
        self._in_flight: int | None = None
        self._released = _NEVER  # smallest key that became readable since the reader's turn began
        self._awaited = 0  # the reader waits for a key below this one
        self._is_closed = False

    # -- the writer's side --------------------------------------------------------------------------------------------

    def reserve(self, earliest_ms: int, now_ms: int, sequence: int) -> tuple[int, int | None]:
        """Announce a batch with the earliest delivery time ``earliest_ms`` and the first sequence ``sequence``.

        Return the smallest time allowed in its keys, and the mark to which the durable ``done`` must be lowered, or
        ``None``.
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
        """Mark the batch in flight as durable and readable; wake the reader if it waits for one of its keys."""
        with self._changed:
            if self._in_flight is not None:
                self._released = min(self._released, self._in_flight)
                self._in_flight = None
                if self._released < self._awaited:  # otherwise the reader would be woken needlessly many times a second
                    self._changed.notify_all()

    def _lower(self, mark: int) -> None:
        if self._backlog is not None:
            cursor, end = self._backlog
            if mark < end:
                self._backlog = (min(cursor, mark), end)
                self._live = self._unread_end = end  # later keys of the same batch may be between the two cursors
                return
        self._live = mark

    # -- the reader's side --------------------------------------------------------------------------------------------

    def begin_turn(self) -> None:
        """Reset the wake-up state. A wake-up from now on, even during the turn, ends the next ``wait``."""
        with self._changed:
            self._released = _NEVER
            self._claimed = 0
            self._held = _NOTHING

    def claim(self, which: Cursor, now_ms: int) -> Claim:
        """Return the readable range of a cursor, and move the cursor to its end.

        A turn must begin with ``begin_turn`` or ``split_backlog``.
        """
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
        """Return the smallest mark in flight: rows just read from it on must not be used.

        Such rows exist only if the clock stepped back between the claim and the read. The cursor was then lowered below
        them, so the next turn reads them again.
        """
        with self._changed:
            return _NEVER if self._in_flight is None else self._in_flight

    def retreat(self, which: Cursor, mark: int) -> None:
        """Move a cursor back to ``mark``, the first row of its claim that was not processed."""
        with self._changed:
            of = {Cursor.BACKLOG: self._backlog, Cursor.SKIPPED: self._skipped}.get(which) or (self._live,)
            if mark < of[0]:
                self._move(which, mark)

    def split_backlog(self, now_ms: int, lag_ms: int | None = None) -> bool:
        """Begin a turn; turn the overdue range into the backlog if the live cursor lags.

        Return True if there is a backlog. The cursor lags if it is more than ``lag_ms`` behind, by default
        ``BACKLOG_LAG_MS``. An idle reader lags by the length of its sleep.
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
        """Return the smallest cursor. The reader has claimed every key below it."""
        with self._changed:
            return self._live if self._backlog is None else min(self._live, self._backlog[0])

    def live(self) -> int:
        """Return the live cursor."""
        with self._changed:
            return self._live

    def has_unread(self) -> bool:
        """Return True if the backlog has rows that were never read, as opposed to rows left there by ``defer``."""
        with self._changed:
            return self._backlog is not None and self._backlog[0] < min(self._unread_end, self._backlog[1])

    def high(self) -> int:
        """Return the end of the claims of the reader's turn. The reader has not read any key from there on."""
        with self._changed:
            return self._claimed

    def read_held(self, start: bytes, stop: bytes) -> None:
        """Extend the range of held entries read in this turn, before reading ``[start, stop)``."""
        with self._changed:
            self._held = (min(start, self._held[0] or start), max(stop, self._held[1]))

    def held_range(self) -> tuple[bytes, bytes]:
        """Return the key range in which the reader may have read held entries in this turn."""
        with self._changed:
            return self._held

    def has_backlog(self) -> bool:
        """Return True if part of the backlog is not claimed yet."""
        with self._changed:
            return self._backlog is not None and self._backlog[0] < self._backlog[1]

    def defer(self, first: int, last: int) -> None:
        """Extend the backlog to include the rows from ``first`` to ``last``, which are read again later, in order.

        For rows that must not pass others of the backlog, or not hold up others of the live cursor.
        """
        with self._changed:
            cursor, end = self._backlog or (first, first)
            # If the live cursor was lowered below them meanwhile, it reads them again itself.
            end = max(end, min(last + 1, self._live))
            cursor = min(cursor, first)
            if cursor < end:
                self._backlog = (cursor, end)

    def skip(self, now_ms: int, by_ms: int) -> None:
        """Leave the next ``by_ms`` of the live cursor to the backlog and to the cursor ``SKIPPED``.

        For a flood without a visible end, so that later due entries need not wait until all of it is read. Entries due
        now are not skipped.
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
        """Sleep until a key below ``until_ms`` becomes readable, but at most ``timeout_s``.

        ``wake`` and ``close`` end the sleep as well.
        """
        with self._changed:
            self._awaited = bound = timeline_mark(until_ms, 0)
            self._changed.wait_for(lambda: self._released < bound or self._is_closed, timeout_s)
            self._awaited = 0

    def wake(self) -> None:
        """Wake the reader, so that it reads again now."""
        with self._changed:
            self._released = 0
            self._changed.notify_all()

    def close(self) -> None:
        """Make ``wait`` return at once from now on."""
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
