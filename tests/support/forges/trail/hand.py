"""Writes trails by hand: one message, one question, one answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.forges.trail.files import CellWriter, Event, Snapshot, write_snapshot

START_MS = 1_795_248_000_000
TOPIC, GROUP = "orders", "billing"


class Hand:
    """Writes one cell of a trail, event by event."""

    def __init__(self, trail: Path, cell: str = "one", role: str = "daemon", *, of: str = "") -> None:
        self.trail, self.cell, self.sequence = trail, cell, 0
        self.of, self.topic, self.group = of, TOPIC + of, GROUP + of  # ``of``: what makes its names its own
        self.writer = CellWriter(trail, cell, role=role)
        self.is_read = False  # the group reads queue 0
        self.add("OPENED", 0)

    def add(self, kind: str, at_ms: int, **columns: Any) -> int:  # noqa: ANN401 - columns of rows
        """Write the next event, ``at_ms`` after the beginning."""
        self.sequence += 1
        made: dict[str, Any] = dict.fromkeys(Event._fields)
        made |= {"sequence": self.sequence, "boot": 1, "kind": kind, "at_ms": START_MS + at_ms, "attempt": 0}
        self.writer.add(Event(**(made | columns)))
        return self.sequence

    def skip(self, count: int) -> None:
        """Leave a gap."""
        self.sequence += count

    def scheduled(self, entry: int, due_ms: int, at_ms: int = 0) -> int:
        """Accept a message for later."""
        return self.add(
            "SCHEDULED", at_ms, topic=self.topic, due_ms=START_MS + due_ms, entry=entry, message_id=self.id_of(entry)
        )

    def queued(self, entry: int, offset: int, at_ms: int = 0) -> int:
        """Accept a message into queue 0."""
        place: dict[str, Any] = {"queue_id": 0, "queue_offset": offset}
        return self.add("QUEUED", at_ms, topic=self.topic, entry=entry, message_id=self.id_of(entry), **place)

    def of_group(self, kind: str, number: int, at_ms: int = 0, **columns: Any) -> int:  # noqa: ANN401 - columns of rows
        """Let the group do something with a message."""
        return self.add(kind, at_ms, topic=self.topic, group=self.group, message_id=self.id_of(number), **columns)

    def subscribed(self) -> None:
        """Let the group read queue 0 from its beginning."""
        self.is_read = True
        self.add("SUBSCRIBED", 0, topic=self.topic, group=self.group, queue_id=0, queue_offset=0)

    def snapshot(self, entries: list[dict[str, Any]], floor: int = 0, end: int = 0, **progress: Any) -> None:  # noqa: ANN401 - columns of rows
        """Write a snapshot of what the store holds now."""
        place = {"group": self.group, "topic": self.topic, "queue_id": 0}
        way = place | {"floor": floor, "done": [], "hidden": [], "cursor": None} | progress
        queue = {"topic": self.topic, "group": None, "queue_id": 0, "first_offset": 0, "end_offset": end}
        write_snapshot(
            self.trail,
            Snapshot(
                cell=self.cell,
                sequence=self.sequence,
                boot=1,
                taken_ms=START_MS,
                entries=entries,
                progress=[way] if self.is_read else [],
                queues=[queue],
            ),
        )

    def end(self, at_ms: int, **options: Any) -> None:  # noqa: ANN401 - columns of rows
        """Let time go on until ``at_ms``, and finish the files."""
        self.add("HEARTBEAT", at_ms)
        self.writer.close(**options)

    def id_of(self, number: int) -> bytes:
        """Return a text id."""
        return b"\0" + f"message-{number}{self.of}".encode()

    def held(self, entry: int, due_ms: int, kind: str = "DELAYED", **columns: Any) -> dict[str, Any]:  # noqa: ANN401 - columns of rows
        """Return a row of a snapshot."""
        row: dict[str, Any] = {
            "entry": entry,
            "kind": kind,
            "topic": self.topic,
            "group": None,
            "message_id": self.id_of(entry),
            "attempt": 0,
        }
        return row | {"due_ms": START_MS + due_ms, "accepted_at_ms": START_MS, "is_stranded": False} | columns
