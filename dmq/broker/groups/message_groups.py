"""Message order: decides which messages of a message group in one queue may be delivered while others are leased. Pure.

A message may be delivered if every earlier unfinished message of its group is delivered in the same receive. All other
messages are *parked*: they are read, and wait for the earlier ones.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

RUN_MAX = 32  # messages of one group that become ready together when the earlier ones are finished


class Remembered:
    """Count of parked and returned messages in all queues that share this object."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0


@dataclass(slots=True)
class _Line:
    """One message group: its offsets that are read and not finished."""

    parked: list[int] = field(default_factory=list)  # sorted
    out: dict[int, int] = field(default_factory=dict)  # delivered: offset to epoch
    run_max: int = RUN_MAX  # of the last receive: a push consumer uses only one, so that reads of more are wasted

    def ready(self) -> list[int]:
        """Return the parked offsets before all delivered ones, up to the run limit."""
        until = bisect_left(self.parked, min(self.out)) if self.out else len(self.parked)
        return self.parked[: min(until, self.run_max, RUN_MAX)]

    def unpark(self, offset: int) -> None:
        at = bisect_left(self.parked, offset)
        if at < len(self.parked) and self.parked[at] == offset:
            del self.parked[at]


class MessageOrder:
    """All message groups of one queue. Methods that change the state return the offsets that are ready now."""

    def __init__(self, everywhere: Remembered | None = None) -> None:
        """Create an empty order; ``everywhere`` counts its parked offsets together with those of other queues."""
        self._lines: dict[str, _Line] = {}
        self._group_of: dict[int, str] = {}
        self.parked_count = 0
        self.everywhere = everywhere or Remembered()

    def _count(self, parked: int) -> None:
        self.parked_count += parked
        self.everywhere.total += parked

    def admit(self, offset: int, message_group: str, epoch: int, *, first_epoch: int, run_max: int) -> bool:
        """Return True if ``offset`` may be delivered by the receive with epochs from ``first_epoch`` on.

        Otherwise park it. Call it in ascending order of offsets and epochs. Messages of the group already in the
        receive then have epochs from ``first_epoch`` up to ``epoch``.
        """
        line = self._lines.setdefault(message_group, _Line())
        line.run_max = run_max
        run = [other for other, out_epoch in line.out.items() if first_epoch <= out_epoch < epoch]
        is_next = not line.parked or offset <= line.parked[0]
        is_free = all(other > offset or other in run for other in line.out)
        self._forget(line, offset)
        self._group_of[offset] = message_group
        if is_next and is_free and len(run) < run_max:
            line.out[offset] = epoch
            return True
        insort(line.parked, offset)
        self._count(1)
        return False

    def park(self, offset: int, message_group: str) -> None:
        """Park an offset because messages of its group are delivered from another queue and not finished."""
        line = self._lines.setdefault(message_group, _Line())
        self._forget(line, offset)
        self._group_of[offset] = message_group
        insort(line.parked, offset)
        self._count(1)

    def is_out(self, message_group: str) -> bool:
        """Return True if a message of the group is delivered and not finished."""
        line = self._lines.get(message_group)
        return line is not None and bool(line.out)

    def ready(self, message_group: str) -> list[int]:
        """Return the offsets of a message group that are ready now."""
        line = self._lines.get(message_group)
        return line.ready() if line is not None else []

    def is_grouped(self, offset: int) -> bool:
        """Return True if an offset is known to belong to a message group."""
        return offset in self._group_of

    def group_of(self, offset: int) -> str:
        """Return the message group of a read offset, or an empty string if it has none."""
        return self._group_of.get(offset, "")

    def hold(self, offset: int, message_group: str, epoch: int) -> None:
        """Mark ``offset`` as delivered without an order check: its lease dates from before a restart."""
        line = self._lines.setdefault(message_group, _Line())
        self._forget(line, offset)
        self._group_of[offset] = message_group
        line.out[offset] = epoch

    def came_back(self, offset: int) -> list[int]:
        """Park an offset again after its delivery ended unfinished."""
        line = self._lines[self._group_of[offset]]
        self._forget(line, offset)
        insort(line.parked, offset)
        self._count(1)
        return line.ready()

    def finished(self, offset: int) -> list[int]:
        """Remove a finished offset; return an empty list if it has no message group."""
        message_group = self._group_of.pop(offset, None)
        if message_group is None:
            return []
        line = self._lines[message_group]
        self._forget(line, offset)
        if not line.parked and not line.out:
            del self._lines[message_group]
        return line.ready()

    def _forget(self, line: _Line, offset: int) -> None:
        before = len(line.parked)
        line.unpark(offset)
        self._count(len(line.parked) - before)
        line.out.pop(offset, None)
