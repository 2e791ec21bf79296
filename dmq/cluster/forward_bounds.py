"""The offsets below which messages of one topic may have been forwarded. Pure.

While the cluster accepts messages, a queue has no bound on disk: after a crash, any message of the queue may have been
sent. A lane that stops sending stores a bound for each of its queues. It raises the bound before it sends a message
beyond it. So messages that were stored while the cluster was away are not in doubt after a crash, and sends need no
extra sync.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dmq.broker.io import Place


class Bounds:
    """The bounds of one topic's queues. ``stored`` are those on disk at the start of the run."""

    def __init__(self, stored: Mapping[Place, int]) -> None:
        self._stored = dict(stored)
        self._begun: dict[Place, int] = {}
        self._lowered = 0

    def begin(self, messages: Iterable[tuple[Place, int]]) -> None:
        """Record the places and offsets of messages before they are sent."""
        for place, offset in messages:
            self._begun[place] = max(self._begun.get(place, 0), offset + 1)

    def exceeded(self, messages: Iterable[tuple[Place, int]]) -> set[Place]:
        """Return the queues whose bound must be raised before these messages may be sent."""
        return {place for place, offset in messages if offset >= self._stored.get(place, offset + 1)}

    def raised(self, places: Iterable[Place], *, is_sending: bool) -> dict[Place, int | None]:
        """Return the bounds to store before the next send: none while the topic is being sent, else the exact ones."""
        return {place: None if is_sending else self._begun[place] for place in places}

    def lowered(self, suspected: Mapping[Place, int]) -> dict[Place, int]:
        """Return the changed bounds to store while no message is sent.

        ``suspected``: the offsets below which an earlier run may have sent messages.
        """
        wanted = {place: max(end, self._begun.get(place, 0)) for place, end in suspected.items()}
        return {place: bound for place, bound in wanted.items() if self._stored.get(place) != bound}

    @property
    def version(self) -> int:
        """A number that changes when bounds are lowered."""
        return self._lowered

    def were_lowered(self, bounds: Mapping[Place, int]) -> None:
        """Record bounds that were submitted to the store; they apply at once."""
        self._stored |= bounds
        self._lowered += 1

    def were_raised(self, bounds: Mapping[Place, int | None], version: int) -> None:
        """Record bounds that are durable, unless lower ones were submitted since ``version``."""
        if version != self._lowered:
            return
        for place, bound in bounds.items():
            if bound is None:
                self._stored.pop(place, None)
            else:
                self._stored[place] = bound
