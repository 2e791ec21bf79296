"""Number of entries that are due and still on the timeline."""

from __future__ import annotations

import threading
from typing import Final

from dmq.store import Store
from dmq.store.schema.accounting.counts import end_of_minute

_REST_PART: Final = 19  # a result is used again for so many times the duration of its reads
_REST_S_MAX: Final = 10.0  # limit of that: a process suspended during the reads measures a long duration


class OverdueCount:
    """Count of the entries due in an earlier minute. Any thread may call it.

    It reads a row for each scope with pending entries if the scheduler is late, else for each topic with held entries.
    These reads take at most a twentieth of the time, however many topics there are.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._count, self._until_s = 0, float("-inf")

    def __call__(self) -> int:
        """Return the count, which may be some seconds old."""
        clock = self._store.clock
        with self._lock:
            began_s = clock.monotonic_s()
            if began_s >= self._until_s:
                self._count = self._read(clock.now_ms())
                ended_s = clock.monotonic_s()
                self._until_s = ended_s + min(_REST_S_MAX, _REST_PART * (ended_s - began_s))
            return self._count

    def _read(self, now_ms: int) -> int:
        # If the first entry of the timeline is not late, only held ones can be. An entry that was late on acceptance
        # has the time of its acceptance as its timeline key.
        store, next_due_ms = self._store, self._store.next_due_ms()
        is_late = next_due_ms is not None and end_of_minute(next_due_ms) <= now_ms
        return sum(
            bucket.count
            for scope in (store.pending() if is_late else store.held())
            for bucket in store.due_counts(scope, 0, now_ms)
            if bucket.until_ms <= now_ms
        )
