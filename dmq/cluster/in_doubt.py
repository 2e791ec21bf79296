"""Messages that an earlier run may have sent without marking them as forwarded. Pure.

after a crash   the messages in flight: the first unfinished ones in each queue, and of each message group, below the
                queue's bound and its end at the start of this run
in a copy       all messages that the copy held, or that were due, when it was opened: the original may have sent them

The set of suspects is never smaller than the set of sent messages. A message that became due while no run was alive is
no suspect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from dmq.broker.io import Place
from dmq.cluster.outgoing import Doubt


@dataclass(slots=True)
class _Front:
    """The suspects at the front of a queue: the end of the queue, and the number of suspects left."""

    end: int
    left: int
    of_group: Counter[str] = field(default_factory=Counter)


class InDoubtMessages:
    """The suspects of one topic."""

    def __init__(
        self, doubt: Doubt, ends: Mapping[Place, int], *, opened_at_ms: int, in_flight_max: int, together_max: int
    ) -> None:
        """``ends`` are the ends of its queues at the start of this run, or their bounds if these are lower.

        At most ``together_max`` messages of a message group were in flight.
        """
        self._is_copy = doubt is Doubt.ALL
        self._opened_at_ms = opened_at_ms
        # Messages in flight, and the first ones of message groups that were next.
        left = 2 * in_flight_max
        self._together_max = together_max
        self._fronts = {place: _Front(end, left) for place, end in ends.items()} if doubt is not Doubt.NOTHING else {}

    def take(self, place: Place, offset: int, message_group: str, deliver_at_ms: int) -> bool:
        """Return True if an earlier run may have sent the message; call it once, before the message is sent."""
        if self._is_copy and 0 < deliver_at_ms <= self._opened_at_ms:
            return True
        front = self._fronts.get(place)
        if front is None or offset >= front.end:
            return False
        if self._is_copy:
            return True
        if message_group:
            front.of_group[message_group] += 1
            if front.of_group[message_group] > 1:  # only the first of a group is deducted from ``left``
                return front.of_group[message_group] <= self._together_max
        if not front.left:
            return False
        front.left -= 1
        return True

    def end(self, place: Place) -> int:
        """Return the offset below which messages of a queue are suspects."""
        front = self._fronts.get(place)
        return front.end if front is not None else 0

    def are_left(self, floors: Mapping[Place, int]) -> bool:
        """Return True if suspects remain that are not sent again; messages below ``floors`` are finished."""
        return any(front.left and floors.get(place, front.end) < front.end for place, front in self._fronts.items())
