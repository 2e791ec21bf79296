"""The loop that moves due entries from the timeline to the queues, in its own thread.

One turn reads the due entries, of the live cursor first, then a share of the backlog. It turns them into ops, and
commits these as one unit. The next turn starts at once if there may be more entries, else after a sleep until the next
delivery time.

The only destination is a local queue, so nothing downstream can delay a turn, and a crash between two turns repeats
nothing. Half messages return to the timeline instead, and their producers are asked after the commit. A schedule
returns as well, in the op that appends its occurrence to a queue.

Due messages of a topic that is paused, or exceeds its rate, are held after all times (``dmq.scheduler.held``).

A flood (100 000 retries of one group, due in the same second) is left to the backlog once it fills the turns. It then
gets a small share of each turn, so that other due entries wait only for that share. A flood too large to be read
through in one turn is skipped: to the end of a millisecond, and twice as far in each further turn. The skipped range
may extend past the flood, by less than the flood's length. Entries of other scopes in this range are searched from then
on, a little in each turn.

Messages of a message group are the exception. They wait for the backlog, which may have an earlier message of their
group.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from broker_adapter.runtime.log import LibraryLog
from dmq.broker import MessageSpans
from dmq.broker.schedules import Recurring
from dmq.broker.sending import Placement, message_group_of
from dmq.broker.transactions import Checks
from dmq.errors import StoreClosed, StoreError, StoreFailed, StoreNoDescriptors
from dmq.scheduler.held import HeldTopics, ReadSoFar
from dmq.scheduler.moves import ClockStepCorrection
from dmq.store import Store
from dmq.store.schema.keys import HELD_BEGIN, Family, timeline_key, unpack_timeline_key
from dmq.store.schema.messages.record import is_recurring, stays, waiting_scope
from dmq.store.writer.marks import Cursor
from dmq.store.writer.operations import Done, HandOver, Hold, Recur, Reschedule

ROWS_PER_CURSOR_MAX = 1024
FLOOD_ROWS = 128  # of one scope in a turn; more are left to the backlog
BACKLOG_SHARE_ROWS = 128  # per turn while entries other than floods use the live cursor: about a millisecond,
BACKLOG_SHARE_ROWS_PER_S = 5_000  # or more if turns are long, as on a slow disk; see _backlog_share
LIVE_USED_S = 1.0  # how long the live cursor counts as in use
BUSY_LAG_MS = 20  # lag from which a reader that did not reach the end counts as behind
BYTES_PER_LANE_MAX = 8 * 1024 * 1024
READS_PER_TURN_MAX = 4  # of the live cursor, to get past a flood: half a millisecond each, and more under load
SKIPPED_READS_PER_TURN = 2  # of the range that it skipped
SKIP_MS_MAX = 2**20  # in one turn: a quarter of an hour
NAP_MS_MAX = 200  # bounds the delay caused by a wall clock step
_PAUSE_S = 0.2  # before a read is tried again

log = LibraryLog("dmq.scheduler")


class Turn(NamedTuple):
    """Result of one turn, and the time of the next work (``None``: when an entry is scheduled)."""

    handed_over: int  # also 1 if clock step corrections are unfinished
    next_due_ms: int | None


class CursorRead(NamedTuple):
    """Rows of one cursor that a turn processes."""

    rows: list[tuple[bytes, bytes]]
    is_done: bool  # whether there is nothing more to read now
    is_flood: bool  # whether the turn's reads ended within a flood


class Scheduler:
    """Hands due entries over. ``turn`` does one step and never waits; ``start`` runs turns until ``close``.

    ``observe`` gets the lateness of each message in ms, one batch per call, and the id of its topic or retry lane. The
    lateness is the time from its delivery timestamp until it is durable in its queue. It is called in the scheduler's
    thread.
    """

    def __init__(
        self,
        store: Store,
        placement: Placement,
        checks: Checks,
        *,
        on_failure: Callable[[StoreError], None],
        observe: Callable[[Sequence[int], Sequence[int]], None] = lambda _, __: None,
        spans: MessageSpans | None = None,
    ) -> None:
        self._store = store
        self._marks = store.marks
        self._clock = store.clock
        self._placement = placement
        self._checks = checks
        self._recurring = Recurring(placement.names, placement, store.get_many, store.is_disk_low)
        self._moves = ClockStepCorrection(store)
        self._held = HeldTopics(store, placement.slowed)
        self._on_failure = on_failure
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="dmq-scheduler", daemon=True)
        self._observe = observe
        self._spans = spans
        self.handed_over_total = 0
        self._is_behind = False
        self._skip_ms = 0  # by how much the live cursor skipped in the last turn
        self._floods: set[bytes] = set()  # scopes with too many rows in this turn
        self._left: set[bytes] = set()  # scopes with rows left to the backlog
        self._live_used_s = -LIVE_USED_S
        self._turn_s = 0.0  # duration of the last turn that handed entries over

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop after the current turn, and wait for the thread."""
        self._is_closing = True
        self._marks.wake()
        if self._thread.is_alive():
            self._thread.join()

    def turn(self) -> Turn:
        """Hand over the entries due now, up to a batch per cursor; durable on return."""
        now_ms = self._clock.now_ms()
        has_moves = self._moves.turn(now_ms)
        began_s = self._clock.monotonic_s()
        self._marks.split_backlog(now_ms, BUSY_LAG_MS if self._is_behind else None)
        low, live = self._marks.low(), self._marks.live()
        self._floods.clear()
        if not self._marks.has_backlog():
            self._left.clear()
        rows, is_live_done, is_flood = self._take_around_floods(Cursor.LIVE, now_ms, READS_PER_TURN_MAX)
        self._is_behind = not is_live_done and not is_flood
        # As short as possible: due entries within the skipped range wait as long as the flood's own entries.
        self._skip_ms = min(max(1, 2 * self._skip_ms), SKIP_MS_MAX) if is_flood else 0
        if is_flood:
            self._marks.skip(now_ms, self._skip_ms)
        is_backlog_done, ahead = True, 0
        if self._marks.has_backlog():
            skipped, is_skipped_done, _ = self._take_around_floods(Cursor.SKIPPED, now_ms, SKIPPED_READS_PER_TURN)
            rows = self._without_grouped(skipped + _besides(skipped, rows))
            ahead = len(rows)
            is_live = any(waiting_scope(value) not in self._floods for _, value in rows)
            overdue, is_backlog_done = self._take(Cursor.BACKLOG, now_ms, self._backlog_share(is_live=is_live))
            rows += _besides(rows, overdue)  # the backlog may include rows that were already read
            is_backlog_done = is_backlog_done and is_skipped_done
            if not self._marks.has_backlog():  # no older rows are left: a rate-limited topic continues in order
                rows.sort()
                ahead = 0
        held: list[Hold] = []
        if not self._held.is_idle:
            read = ReadSoFar(low, live, None if self._marks.has_unread() else self._left)
            freed = self._held.take(read, now_ms, self._backlog_share(is_live=bool(rows)))
            rows, held = self._held.divide(rows, ahead, read)
            rows = freed + rows
        if not rows and not held:
            is_done = is_live_done and is_backlog_done and not has_moves
            return Turn(int(has_moves), self._next_due_ms(now_ms) if is_done else now_ms)
        staying = [row for row in rows if stays(row[1])]
        moving = [row for row in rows if not stays(row[1])] if staying else rows
        moved = self._placement.hand_over(moving, now_ms)
        schedules = [row for row in staying if is_recurring(row[1])]
        halves = [row for row in staying if not is_recurring(row[1])]
        checked = self._checks.plan(halves, now_ms, self._store.get_many) if halves else []
        made = self._with_occurrences(moved, schedules, now_ms) if schedules else moved
        receipts = self._store.commit([*made, *checked, *held, Done(self._marks.low(), now_ms)], is_urgent=True)
        if checked:
            self._checks.planned(checked, receipts[len(made) :][: len(checked)])
        done_ms = self._clock.now_ms()
        self._turn_s = self._clock.monotonic_s() - began_s
        late_ms, topic_ids = [done_ms - op.deliver_at_ms for op in moved], [op.topic_id for op in moved]
        if schedules:
            occurred = [op for op in made if isinstance(op, Recur) and op.occurrences]
            late_ms += [done_ms - op.due_ms for op in occurred]
            topic_ids += [op.topic_id for op in occurred]
        self.handed_over_total += len(late_ms)
        self._observe(late_ms, topic_ids)
        if self._spans is not None:
            self._spans.handed_over(moving, done_ms)
        return Turn(len(rows) + len(held), done_ms)

    def _with_occurrences(
        self, moved: list[HandOver], schedules: list[tuple[bytes, bytes]], now_ms: int
    ) -> list[HandOver | Recur | Reschedule]:
        """Add the ops of due schedules, in order of time.

        The order matters, since an occurrence may belong to the message group of a moved message.
        """
        made = [*moved, *self._recurring.plan(schedules, now_ms)]
        return sorted(made, key=lambda op: (op.key < HELD_BEGIN, op.key))  # held entries are older than all others

    def _take_around_floods(self, which: Cursor, now_ms: int, reads: int) -> CursorRead:
        """Return rows of a cursor that belong to no flood, including rows after a flood, by at most ``reads`` reads."""
        rows: list[tuple[bytes, bytes]] = []
        for _ in range(reads):
            found, is_done = self._take(which, now_ms, ROWS_PER_CURSOR_MAX)
            kept = self._without_floods(found)
            rows += _besides(rows, kept)  # the cursor may have been lowered between two reads
            if is_done or len(kept) == len(found):
                return CursorRead(rows, is_done, is_flood=False)
        return CursorRead(rows, is_done=False, is_flood=True)

    def _backlog_share(self, *, is_live: bool) -> int:
        now_s = self._clock.monotonic_s()
        if is_live:
            self._live_used_s = now_s
        if now_s - self._live_used_s >= LIVE_USED_S:
            return ROWS_PER_CURSOR_MAX
        # In long turns more entries than a fixed share would fall due meanwhile. But a larger share makes turns longer:
        # on a busy machine a row costs 80 us of a turn, and a share of 25,000 rows a second would feed on itself.
        return min(ROWS_PER_CURSOR_MAX, max(BACKLOG_SHARE_ROWS, int(self._turn_s * BACKLOG_SHARE_ROWS_PER_S)))

    def _without_grouped(self, rows: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Leave rows of message groups to the backlog, so that they are read in its order."""
        return self._leave(rows, [bool(message_group_of(value)) for _, value in rows])

    def _without_floods(self, rows: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Leave the rows of scopes with more than ``FLOOD_ROWS`` rows to the backlog."""
        if len(rows) <= FLOOD_ROWS:
            return rows
        scopes = [waiting_scope(value) for _, value in rows]
        floods = {scope for scope, count in Counter(scopes).items() if count > FLOOD_ROWS}
        self._floods |= floods
        return self._leave(rows, [scope in floods for scope in scopes])

    def _leave(self, rows: list[tuple[bytes, bytes]], is_left: list[bool]) -> list[tuple[bytes, bytes]]:
        """Return the rows that are not left, and extend the backlog over the others."""
        left = [row for row, is_one in zip(rows, is_left, strict=True) if is_one]
        if not left:
            return rows
        self._left.update(waiting_scope(value) for _, value in left)
        self._marks.defer(int.from_bytes(left[0][0], "big"), int.from_bytes(left[-1][0], "big"))
        return [row for row, is_one in zip(rows, is_left, strict=True) if not is_one]

    def _take(self, which: Cursor, now_ms: int, limit: int) -> tuple[list[tuple[bytes, bytes]], bool]:
        """Return due rows of a cursor, and whether these were all that can be read now."""
        claim = self._marks.claim(which, now_ms)
        if claim.stop <= claim.start:
            return [], True
        start, stop = timeline_key(claim.start), timeline_key(claim.stop)
        try:
            found = self._store.scan(Family.TIMELINE, start, stop, limit=limit, bytes_max=BYTES_PER_LANE_MAX)
        except StoreNoDescriptors as error:  # the rows are undamaged, and are read again shortly
            self._marks.retreat(which, claim.start)
            log.warning("scheduler_read_failed", error=str(error))
            self._marks.wait(0, _PAUSE_S)
            return [], True
        rows = found.rows
        unsynced = self._marks.unsynced()
        while rows and int.from_bytes(rows[-1][0], "big") >= unsynced:
            rows.pop()
        if rows and not found.is_complete:
            self._marks.retreat(which, int.from_bytes(rows[-1][0], "big") + 1)
        return rows, found.is_complete

    def _next_due_ms(self, now_ms: int) -> int | None:
        """Return the time when the next pending entry is due or the next held entry may be released.

        Entries of a batch in flight need not be considered: their release wakes the reader.
        """
        start = timeline_key(self._marks.low())
        try:
            first = self._store.scan(Family.TIMELINE, start, HELD_BEGIN, limit=1).rows
        except StoreNoDescriptors:
            return None
        times = [max(unpack_timeline_key(first[0][0])[0], now_ms)] if first else []
        if self._held.wait_s is not None:
            times.append(now_ms + max(1, int(self._held.wait_s * 1000)))
        return min(times, default=None)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                done = self.turn()
                if done.handed_over:
                    continue
                now_ms = self._clock.now_ms()
                until_ms = now_ms + NAP_MS_MAX
                if done.next_due_ms is not None:
                    # Due entries that are not readable yet are in flight. Their release wakes this thread;
                    # spinning would delay it.
                    until_ms = min(until_ms, max(done.next_due_ms, now_ms + 1))
                self._marks.wait(until_ms, (until_ms - now_ms) / 1000)
        except StoreClosed:
            return
        except Exception as error:  # noqa: BLE001 - whatever it is: ending without a word would look like being idle
            if not self._is_closing:
                cause = f"the scheduler failed: {type(error).__name__}: {error}"
                self._on_failure(error if isinstance(error, StoreError) else StoreFailed(cause))


def _besides(rows: list[tuple[bytes, bytes]], more: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the rows of ``more`` with keys that are not in ``rows``."""
    if not rows:
        return more
    known = {key for key, _ in rows}
    return [row for row in more if row[0] not in known]
