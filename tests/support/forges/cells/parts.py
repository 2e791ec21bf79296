"""What a forged daemon is made of: messages, the ways of groups with them, queues, progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from support.forges.cells.cell import Shape


@dataclass(slots=True, eq=False)
class Way:
    """A group's way with a message: where it lies for the group, and how it stands."""

    group: str
    topic: str  # that of the queue: the message's own, or one of dead letters
    message: Message
    queue_id: int
    offset: int
    entry: int
    attempt: int = 1
    state: str = "unread"
    turn: int = 0  # what was planned before this turn does not happen any more


@dataclass(slots=True, eq=False)
class Message:
    """A message and its fate."""

    topic: str
    message_id: bytes
    entry: int
    accepted_at_ms: int
    due_ms: int | None
    state: str = "waiting"
    fired_at_ms: int = 0
    ways: dict[str, Way] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Queue:
    """A queue or a lane: what lies in it, from ``first`` on."""

    topic: str
    group: str | None
    queue_id: int
    items: list[Any] = field(default_factory=list)
    first: int = 0


@dataclass(slots=True, eq=False)
class Progress:
    """How far a group is in a queue."""

    floor: int
    done: set[int] = field(default_factory=set)
    hidden: set[int] = field(default_factory=set)
    cursor: int | None = None
    leased: dict[int, Way] = field(default_factory=dict)
    is_polling: bool = False

    def finish(self, offset: int) -> None:
        """A place was left."""
        self.done.add(offset)
        self.hidden.discard(offset)
        self.leased.pop(offset, None)
        self._rise()

    def skip_to(self, floor: int) -> None:
        """All below ``floor`` counts as finished, and whatever lies finished directly behind it."""
        self.floor = max(self.floor, floor)
        self.done = {offset for offset in self.done if offset >= self.floor}
        self._rise()

    def _rise(self) -> None:
        while self.floor in self.done:
            self.done.remove(self.floor)
            self.floor += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group: what it reads, and how it behaves."""

    name: str
    topic: str
    since_ms: int
    until_ms: int
    filtered: float = 0.0
    is_fifo: bool = False  # fails in place


def groups_of(shape: Shape) -> list[Group]:
    """Return the groups of a forged trail: topic 0 has several, each other topic one."""
    ever = 1 << 60
    found = [
        Group(name=f"readers-{number}", topic=f"topic-{number}", since_ms=0, until_ms=ever)
        for number in range(shape.topics)
    ]
    found.append(Group(name="picky", topic="topic-0", since_ms=0, until_ms=ever, filtered=shape.filtered))
    middle_ms = shape.start_ms + shape.span_ms // 2
    if shape.with_late_group:
        found.append(Group(name="late-comers", topic="topic-0", since_ms=middle_ms, until_ms=ever, is_fifo=True))
    if shape.with_stalled_group:
        last = f"topic-{shape.topics - 1}"
        found.append(Group(name="stalled", topic=last, since_ms=0, until_ms=middle_ms + shape.span_ms // 8))
    if shape.with_undertaker:
        found.append(Group(name="undertaker", topic="%DLQ%readers-0", since_ms=0, until_ms=ever, is_fifo=True))
    return found
