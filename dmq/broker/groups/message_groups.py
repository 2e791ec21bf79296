"""The order of message groups within one queue: what may be handed out while earlier ones are under way. Pure.

A message may go out when every earlier unfinished message of its group goes out with it, or is finished. All others
are *parked*: they were looked at, and wait for those before them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

RUN_MAX = 32  # messages of one group that are offered at a time when those before them are finished


class Remembered:
    """How many messages all queues that share this remember: those that are parked, and those that came back."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0


@dataclass(slots=True)
class _Line:
    """One message group: offsets that were looked at and are not finished."""

    parked: list[int] = field(default_factory=list)  # sorted
    out: dict[int, int] = field(default_factory=dict)  # handed out: offset to epoch
    run_max: int = RUN_MAX  # of the last receive: to offer more than one to a push consumer would be read in vain

    def ready(self) -> list[int]:
        """Return the parked offsets in front of everything that is out."""
        until = bisect_left(self.parked, min(self.out)) if self.out else len(self.parked)
        return self.parked[: min(until, self.run_max, RUN_MAX)]

    def unpark(self, offset: int) -> None:
        at = bisect_left(self.parked, offset)
        if at < len(self.parked) and self.parked[at] == offset:
            del self.parked[at]


class MessageOrder:
    """All message groups of one queue. Methods that change something return the offsets that may be offered now."""

    def __init__(self, everywhere: Remembered | None = None) -> None:
        """``everywhere`` counts what is parked here, beside others."""
        self._lines: dict[str, _Line] = {}
        self._group_of: dict[int, str] = {}
        self.parked_count = 0
        self.everywhere = everywhere or Remembered()

    def _count(self, parked: int) -> None:
        self.parked_count += parked
        self.everywhere.total += parked

    def admit(self, offset: int, message_group: str, epoch: int, *, first_epoch: int, run_max: int) -> bool:
        """Say whether ``offset`` may go out with a receive whose epochs begin at ``first_epoch``; else it is parked.

        To be called in ascending order of offsets and epochs, so what the receive has of the group already is between.
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
        """Note that an offset was looked at and waits for what of its message group is out elsewhere."""
        line = self._lines.setdefault(message_group, _Line())
        self._forget(line, offset)
        self._group_of[offset] = message_group
        insort(line.parked, offset)
        self._count(1)

    def is_out(self, message_group: str) -> bool:
        """Say whether something of a message group is handed out."""
        line = self._lines.get(message_group)
        return line is not None and bool(line.out)

    def ready(self, message_group: str) -> list[int]:
        """Return what of a message group may be offered now."""
        line = self._lines.get(message_group)
        return line.ready() if line is not None else []

    def is_grouped(self, offset: int) -> bool:
        """Say whether an offset is known to belong to a message group."""
        return offset in self._group_of

    def group_of(self, offset: int) -> str:
        """Return the message group of an offset that was looked at; empty if it has none."""
        return self._group_of.get(offset, "")

    def hold(self, offset: int, message_group: str, epoch: int) -> None:
        """Note that ``offset`` is handed out, whatever is before it: a lease from before a restart."""
        line = self._lines.setdefault(message_group, _Line())
        self._forget(line, offset)
        self._group_of[offset] = message_group
        line.out[offset] = epoch

    def came_back(self, offset: int) -> list[int]:
        """Note that a hand-out ended without being finished."""
        line = self._lines[self._group_of[offset]]
        self._forget(line, offset)
        insort(line.parked, offset)
        self._count(1)
        return line.ready()

    def finished(self, offset: int) -> list[int]:
        """Note that an offset is finished; of one that is not grouped, nothing follows."""
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
