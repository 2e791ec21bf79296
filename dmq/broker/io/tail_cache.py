"""Tail cache: the newest messages of queues with readers near the end, so that a new message needs no store read.

A store read uses a thread, which on a busy daemon waits twice for the interpreter. These waits would be most of the
time from a message's arrival in its queue to its delivery. The cache belongs to the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from dmq.store.writer.operations import AppendedRange

BYTES_MAX = 16 * 1024 * 1024
QUEUE_BYTES_MAX = 1024 * 1024  # so that one queue does not evict all others
LAG_MAX = 4096  # messages: a reader with a larger lag finds nothing here

_Place = tuple[int, int]  # topic id, queue id


@dataclass(slots=True)
class _Run:
    """Newest values of one queue, without a gap."""

    first: int
    records: list[bytes]
    size_bytes: int


class Recent:
    """Newest values of queues. All cached values are durable; a missing one may be in the store.

    A value stays as it was appended. Only a purge changes a stored value, and readers skip purged letters.
    """

    def __init__(self, bytes_max: int = BYTES_MAX, queue_bytes_max: int = QUEUE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._queue_bytes_max = queue_bytes_max
        self._runs: dict[_Place, _Run] = {}  # in the order of the last append, oldest first
        self.size_bytes = 0

    def keep(self, place: _Place, grown: AppendedRange) -> None:
        """Cache the appended values of a queue, as far as there is room."""
        run = self._runs.pop(place, None)
        size = sum(map(len, grown.records))
        if run is not None and run.first + len(run.records) == grown.first:
            run.records += grown.records
            run.size_bytes += size
        else:
            if run is not None:
                self.size_bytes -= run.size_bytes
            run = _Run(grown.first, list(grown.records), size)
        self._runs[place] = run
        self.size_bytes += size
        if run.size_bytes > self._queue_bytes_max:
            self._shorten(run)
        while self.size_bytes > self._bytes_max:
            self.forget(next(iter(self._runs)))

    def forget(self, place: _Place) -> None:
        """Evict a queue, also after an append that is not cached."""
        run = self._runs.pop(place, None)
        if run is not None:
            self.size_bytes -= run.size_bytes

    def find(self, topic_id: int, queue_id: int, offset: int) -> bytes | None:
        """Return the value at an offset, or None if it is not cached."""
        run = self._runs.get((topic_id, queue_id))
        if run is None:
            return None
        at = offset - run.first
        return run.records[at] if 0 <= at < len(run.records) else None

    def _shorten(self, run: _Run) -> None:
        """Drop the oldest values down to half the limit, so that not every append has to."""
        dropped = size = 0
        while run.size_bytes - size > self._queue_bytes_max // 2:
            size += len(run.records[dropped])
            dropped += 1
        del run.records[:dropped]
        run.first += dropped
        run.size_bytes -= size
        self.size_bytes -= size
