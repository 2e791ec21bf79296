"""The end of the queues that somebody reads there, in memory: a message that just came needs no look at the store.

A look takes a thread, which on a busy daemon has to wait for its turn with the interpreter twice: that would be most of
the time between a message's being in its queue and its being with a consumer. Belongs to the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from dmq.store.writer.operations import Growth

BYTES_MAX = 16 * 1024 * 1024
QUEUE_BYTES_MAX = 1024 * 1024  # so that one queue does not drive out all others
LAG_MAX = 4096  # messages: who is further behind will find nothing here any more

_Place = tuple[int, int]  # topic id, queue id


@dataclass(slots=True)
class _Run:
    """The last values of one queue, without a gap."""

    first: int
    records: list[bytes]
    size_bytes: int


class Recent:
    """The last values of queues. What is here is durable, and what is not here may be in the store.

    A value stays as it was appended. Only a purge changes one where it lies, and what was purged is passed over.
    """

    def __init__(self, bytes_max: int = BYTES_MAX, queue_bytes_max: int = QUEUE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._queue_bytes_max = queue_bytes_max
        self._runs: dict[_Place, _Run] = {}  # the queue that grew last comes last
        self.size_bytes = 0

    def keep(self, place: _Place, grown: Growth) -> None:
        """Keep what was appended to a queue, as much of it as there is room for."""
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
        """Let go of a queue: it grew, and what was appended is not kept."""
        run = self._runs.pop(place, None)
        if run is not None:
            self.size_bytes -= run.size_bytes

    def find(self, topic_id: int, queue_id: int, offset: int) -> bytes | None:
        """Return the value at an offset, if it is here."""
        run = self._runs.get((topic_id, queue_id))
        if run is None:
            return None
        at = offset - run.first
        return run.records[at] if 0 <= at < len(run.records) else None

    def _shorten(self, run: _Run) -> None:
        """Let go of the older values, down to half the bound: not at every append."""
        dropped = size = 0
        while run.size_bytes - size > self._queue_bytes_max // 2:
            size += len(run.records[dropped])
            dropped += 1
        del run.records[:dropped]
        run.first += dropped
        run.size_bytes -= size
        self.size_bytes -= size
