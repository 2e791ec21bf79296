"""Which offsets of a queue were saved, and where they lie in the new store.

The daemon takes a queue without a message between its first and its last one for damaged. So a queue with a gap, or one
whose end is lost, begins anew behind all that it ever held, with the messages that were saved in their order. No offset
is used a second time, and a receipt handle from before leads to no other message.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple


class Run(NamedTuple):
    """Offsets from ``first`` up to, not including, ``end``, and the first one's new offset."""

    first: int
    end: int
    to: int


class Move(NamedTuple):
    """How the offsets of a queue change. ``begin`` is the first one of the new queue."""

    runs: tuple[Run, ...]
    begin: int

    def of(self, offset: int) -> int | None:
        """Return the new offset of a message; ``None`` if it was not saved."""
        run = self._run(offset)
        return run.to + offset - run.first if run is not None and offset < run.end else None

    def place(self, offset: int) -> int:
        """Return the new offset of a place in the queue: that of the first message saved from there on."""
        run = self._run(offset)
        return run.to + min(offset, run.end) - run.first if run is not None else self.begin

    def offsets(self) -> Iterator[int]:
        """Give the old offsets of what was saved."""
        for run in self.runs:
            yield from range(run.first, run.end)

    def _run(self, offset: int) -> Run | None:
        """Return the last run that begins there or before."""
        at = bisect_right(self.runs, offset, key=lambda run: run.first) - 1
        return self.runs[at] if at >= 0 else None


class Spans:
    """The offsets of one queue that can be read, taken in ascending order; and how far it is known to have gone."""

    def __init__(self, begin: int | None) -> None:
        """``begin`` is where it begins, ``None`` if nothing tells."""
        self.begin = begin
        self.end = begin or 0
        self._spans: list[tuple[int, int]] = []

    def add(self, offset: int) -> None:
        """Take one in; not one that retention was about to remove."""
        if self.begin is not None and offset < self.begin:
            return
        if self._spans and self._spans[-1][1] == offset:
            self._spans[-1] = (self._spans[-1][0], offset + 1)
        else:
            self._spans.append((offset, offset + 1))
        self.reaches(offset + 1)

    def reaches(self, end: int) -> None:
        """Take note that there were messages below ``end``."""
        self.end = max(self.end, end)

    @property
    def assumed_begin(self) -> int:
        """Where it is taken to begin because nothing tells; 0: nothing is assumed. What lay below may be lost."""
        return self._spans[0][0] if self.begin is None and self._spans else 0

    def gaps(self) -> list[tuple[int, int]]:
        """Return the ranges that should be there and cannot be read."""
        at = self.begin if self.begin is not None else self._spans[0][0] if self._spans else 0
        found = []
        for first, end in (*self._spans, (self.end, self.end)):
            if first > at:
                found.append((at, first))
            at = end
        return found

    def move(self) -> Move | None:
        """Return how the offsets change; ``None`` if all of them stay."""
        if not self.gaps():
            return None
        runs: list[Run] = []
        at = self.end
        for first, end in self._spans:
            runs.append(Run(first, end, at))
            at += end - first
        return Move(tuple(runs), self.end)
