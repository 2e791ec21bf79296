"""The loop from the timeline to the queues, in a thread of its own.

One turn: take what is due (the live lane first, then a share of the backlog), turn it into ops, commit them as one
unit, go on at once if there may be more, else sleep until the next delivery time. There is one destination, a local
queue, so nothing downstream can hold a turn up, and a crash between two turns repeats nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dmq.embedded.place import Placement
from dmq.errors import StoreClosed, StoreError, StoreFailed
from dmq.store.keys import timeline_key, unpack_timeline_key
from dmq.store.marks import Lane
from dmq.store.ops import Done, Family
from dmq.store.store import Store

ROWS_PER_LANE_MAX = 1024
BYTES_PER_LANE_MAX = 8 * 1024 * 1024
NAP_MS_MAX = 200  # a step of the wall clock delays nothing longer than this
_END_OF_TIMELINE = b"\xff" * 17


class Turn(NamedTuple):
    """What one turn did, and when the next one has something to do (``None``: when something is scheduled)."""

    handed_over: int
    next_due_ms: int | None


class Scheduler:
    """Hands due entries over. ``turn`` does one step and never waits; ``start`` runs turns until ``close``.

    ``observe`` is told, a batch at a time, how many ms after its delivery timestamp each message was in its queue,
    durable. It is called from the scheduler's thread.
    """

    def __init__(
        self,
        store: Store,
        placement: Placement,
        *,
        on_failure: Callable[[StoreError], None],
        observe: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._marks = store.marks
        self._clock = store.clock
        self._placement = placement
        self._on_failure = on_failure
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="dmq-scheduler", daemon=True)
        self._observe = observe
        self.handed_over_total = 0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End after the turn that is under way."""
        self._is_closing = True
        self._marks.wake()
        if self._thread.is_alive():
            self._thread.join()

    def turn(self) -> Turn:
        """Hand over what is due now, up to a batch per lane; durable on return."""
        now_ms = self._clock.now_ms()
        has_backlog = self._marks.split_backlog(now_ms)
        rows, is_live_done = self._take(Lane.LIVE, now_ms)
        is_backlog_done = True
        if has_backlog:
            overdue, is_backlog_done = self._take(Lane.BACKLOG, now_ms)
            rows += overdue
        if not rows:
            return Turn(0, self._next_due_ms(now_ms) if is_live_done and is_backlog_done else now_ms)
        moved = self._placement.hand_over(rows, now_ms)
        self._store.commit([*moved, Done(self._marks.low())], is_urgent=True)
        done_ms = self._clock.now_ms()
        self.handed_over_total += len(rows)
        self._observe([done_ms - op.deliver_at_ms for op in moved])
        return Turn(len(rows), done_ms)

    def _take(self, lane: Lane, now_ms: int) -> tuple[list[tuple[bytes, bytes]], bool]:
        """Return rows of ``lane`` that are due, and whether that was all there is to read now."""
        claim = self._marks.claim(lane, now_ms)
        if claim.stop <= claim.start:
            return [], True
        found = self._store.scan(
            Family.TIMELINE,
            timeline_key(claim.start),
            timeline_key(claim.stop),
            limit=ROWS_PER_LANE_MAX,
            bytes_max=BYTES_PER_LANE_MAX,
        )
        rows = found.rows
        unsynced = self._marks.unsynced()
        while rows and int.from_bytes(rows[-1][0], "big") >= unsynced:
            rows.pop()
        if rows and not found.is_complete:
            self._marks.retreat(lane, int.from_bytes(rows[-1][0], "big") + 1)
        return rows, found.is_complete

    def _next_due_ms(self, now_ms: int) -> int | None:
        """Return the key time of the first entry that waits; entries behind a batch in flight wake us themselves."""
        start = timeline_key(self._marks.low())
        first = self._store.scan(Family.TIMELINE, start, _END_OF_TIMELINE, limit=1).rows
        return max(unpack_timeline_key(first[0][0])[0], now_ms) if first else None

    def _run(self) -> None:
        try:
            while not self._is_closing:
                done = self.turn()
                if done.handed_over:
                    continue
                now_ms = self._clock.now_ms()
                until_ms = now_ms + NAP_MS_MAX
                if done.next_due_ms is not None:
                    # What is due but not readable yet is in flight; its release wakes us, a spin would slow it down.
                    until_ms = min(until_ms, max(done.next_due_ms, now_ms + 1))
                self._marks.wait(until_ms, (until_ms - now_ms) / 1000)
        except StoreClosed:
            return
        except Exception as error:  # noqa: BLE001 - whatever it is: ending without a word would look like being idle
            if not self._is_closing:
                cause = f"the scheduler failed: {type(error).__name__}: {error}"
                self._on_failure(error if isinstance(error, StoreError) else StoreFailed(cause))
