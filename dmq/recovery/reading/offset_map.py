"""Offset map: the saved offsets of a queue, and their offsets in the new store.

The daemon treats a queue with a gap between its first and its last message as damaged. So a queue with a gap or a lost
end restarts after the highest offset that it ever had. The saved messages keep their order. No offset is used twice,
and an old receipt handle never refers to another message.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from dmq.recovery.reading.rows import Indexed
from dmq.store.schema import keys
from dmq.store.schema.messages.index import encode_index_finished

Place = tuple[int, int]  # topic (or lane) id, queue id


class Run(NamedTuple):
    """Offsets from ``first`` up to, not including, ``end``, and the new offset of the first one."""

    first: int
    end: int
    to: int


class MovedRange(NamedTuple):
    """Offset change of a queue. ``begin`` is the first offset of the new queue."""

    runs: tuple[Run, ...]
    begin: int

    def of(self, offset: int) -> int | None:
        """Return the new offset of a message; ``None`` if it was not saved."""
        run = self._run(offset)
        return run.to + offset - run.first if run is not None and offset < run.end else None

    def place(self, offset: int) -> int:
        """Return the new offset of a position in the queue: that of the first saved message from there on."""
        run = self._run(offset)
        return run.to + min(offset, run.end) - run.first if run is not None else self.begin

    def offsets(self) -> Iterator[int]:
        """Yield the old offsets of the saved messages."""
        for run in self.runs:
            yield from range(run.first, run.end)

    def _run(self, offset: int) -> Run | None:
        """Return the last run that begins at ``offset`` or before."""
        at = bisect_right(self.runs, offset, key=lambda run: run.first) - 1
        return self.runs[at] if at >= 0 else None


class OffsetMap:
    """Readable offsets of one queue, added in ascending order, and its highest known end."""

    def __init__(self, begin: int | None) -> None:
        """Start a queue at ``begin``, ``None`` if its begin is unknown."""
        self.begin = begin
        self.end = begin or 0
        self._spans: list[tuple[int, int]] = []

    def add(self, offset: int) -> None:
        """Add a readable offset, unless retention was about to remove it."""
        if self.begin is not None and offset < self.begin:
            return
        if self._spans and self._spans[-1][1] == offset:
            self._spans[-1] = (self._spans[-1][0], offset + 1)
        else:
            self._spans.append((offset, offset + 1))
        self.reaches(offset + 1)

    def reaches(self, end: int) -> None:
        """Record that there were messages below ``end``."""
        self.end = max(self.end, end)

    @property
    def assumed_begin(self) -> int:
        """The assumed first offset if the begin is unknown; 0: none is assumed. Messages below it may be lost."""
        return self._spans[0][0] if self.begin is None and self._spans else 0

    def gaps(self) -> list[tuple[int, int]]:
        """Return the ranges of offsets that should exist and cannot be read."""
        at = self.begin if self.begin is not None else self._spans[0][0] if self._spans else 0
        found = []
        for first, end in (*self._spans, (self.end, self.end)):
            if first > at:
                found.append((at, first))
            at = end
        return found

    def move(self) -> MovedRange | None:
        """Return the offset change; ``None`` if all offsets stay."""
        if not self.gaps():
            return None
        runs: list[Run] = []
        at = self.end
        for first, end in self._spans:
            runs.append(Run(first, end, at))
            at += end - first
        return MovedRange(tuple(runs), self.end)


class MovedMessages:
    """Offset changes of all queues."""

    def __init__(self, spans: dict[Place, OffsetMap]) -> None:
        self.spans = spans
        self._moves = {place: move for place, each in spans.items() if (move := each.move()) is not None}

    def of(self, place: Place) -> MovedRange | None:
        """Return the offset change of a queue; ``None`` if its offsets stay."""
        return self._moves.get(place)

    def queue_counts(self) -> dict[int, int]:
        """Return the number of queues that each topic must have."""
        counts: dict[int, int] = {}
        for topic_id, queue_id in self.spans:
            counts[topic_id] = max(counts.get(topic_id, 0), queue_id + 1)
        return counts

    def is_removed(self, place: Place, offset: int) -> bool:
        """Whether retention removed the message at ``offset``. A missing message that it did not remove is lost."""
        spans = self.spans.get(place)
        return spans is not None and offset < (spans.assumed_begin or spans.begin or 0)

    def begins(self) -> dict[Place, int]:
        """Return the first offsets of queues whose offsets change, or whose begin is only assumed."""
        assumed = {place: each.assumed_begin for place, each in self.spans.items() if each.assumed_begin}
        return assumed | {place: move.begin for place, move in self._moves.items()}

    def queue_key(self, place: Place, offset: int) -> bytes:
        """Return the new key of a message. If it was not saved, return its old key, which no longer has a row."""
        move = self.of(place)
        to = move.of(offset) if move is not None else offset
        return keys.pack_queue_key(*place, offset if to is None else to)

    def index_row(self, row: Indexed, key: bytes) -> bytes:
        """Return the index row of a finished entry whose message now has the key ``key``."""
        receipt = row.receipt
        assert receipt.state is not None
        offset = keys.queue_offset_of(key)
        return encode_index_finished(receipt.state, receipt.sequence, receipt.at_ms, receipt.queue_id, offset)
