"""Bending a trail: take the events of a cell, change some, and write all back so that nothing else gives it away.

Numbers of events, offsets of queues, files, manifests and snapshots are made to fit again. Works on any trail in the
format of docs/reference/trail.md, by any writer.
"""

from __future__ import annotations

import shutil
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

from support.forges.trail.files import (
    LANE,
    CellWriter,
    Event,
    Snapshot,
    cells_of,
    read_events,
    read_manifest,
    read_snapshots,
    text_of,
    write_snapshot,
)

# What happens to a message that leaves no copy, no lane place and no dead letter behind.
PLAIN = {
    "SCHEDULED",
    "DELIVERED",
    "ACKED",
    "FILTERED",
    "LEASE_EXPIRED",
    "GIVEN_BACK",
    "INVISIBLE_CHANGED",
    "POSTPONED",
}
_OF_OTHERS = {"GAP", "TAIL_LOST"}
Place = tuple[str | None, str | None, int | None]


class Life(NamedTuple):
    """The events of one plain message: accepted once, handed over once, finished in its queue or still there."""

    message_id: str
    scheduled: Event
    delivered: Event
    later: tuple[Event, ...]

    @property
    def place(self) -> tuple[Place, int]:
        """Where it was put."""
        assert self.delivered.queue_offset is not None
        return place_of(self.delivered), self.delivered.queue_offset


def place_of(event: Event) -> Place:
    """Return the queue, or the lane of a group, that an event speaks of."""
    return event.topic, event.group if event.queue_id == LANE else None, event.queue_id


class Bent:
    """The events of one cell and what is to become of them. Plan with ``drop``, ``add`` and ``put``, then ``save``."""

    def __init__(self, trail: Path, cell: str) -> None:
        self.trail, self.cell = trail, cell
        self.events = list(read_events(trail, cell))
        self.snapshots = read_snapshots(trail, cell)
        self.snapshot_sequence = self.snapshots[-1].sequence if self.snapshots else 0
        self._dropped: set[int] = set()
        self._added: dict[int, list[Event]] = defaultdict(list)
        self._put: dict[int, Event] = {}
        self._gone: dict[Place, list[int]] = defaultdict(list)
        self._doubled: dict[Place, list[int]] = defaultdict(list)
        self._twins: dict[int, int] = {}

    # -- looking ------------------------------------------------------------------------------------------------------

    def lives(self, avoid: Iterable[str] = ()) -> list[Life]:
        """Return the plain messages that were handed over before the newest snapshot, but for those in ``avoid``."""
        found: dict[tuple[str | None, bytes], list[Event]] = defaultdict(list)
        for event in self.events:
            if event.message_id is not None:
                found[event.topic, event.message_id].append(event)
        avoided = set(avoid)
        expired = {(*place_of(event), event.queue_offset) for event in self.events if event.kind == "EXPIRED"}
        lives = []
        for (_, message_id), events in found.items():
            first, kinds = events[0], [event.kind for event in events]
            if kinds[:2] != ["SCHEDULED", "DELIVERED"] or not PLAIN.issuperset(kinds) or text_of(message_id) in avoided:
                continue
            life = Life(text_of(message_id), first, events[1], tuple(events[2:]))
            is_plain = kinds.count("SCHEDULED") == kinds.count("DELIVERED") == 1 and first.entry == events[1].entry
            if (
                is_plain
                and life.delivered.sequence < self.snapshot_sequence
                and (*life.place[0], life.place[1]) not in expired
            ):
                lives.append(life)
        return lives

    def pick(self, count: int, seed: int, lives: list[Life]) -> list[Life]:
        """Return ``count`` of them, drawn by ``seed``; fails when there are too few."""
        assert len(lives) >= count, f"{self.cell} has {len(lives)} messages of that kind, {count} are needed"
        return Random(seed).sample(lives, count)

    # -- planning -----------------------------------------------------------------------------------------------------

    def drop(self, event: Event) -> None:
        """Leave an event out; those behind it move up."""
        self._dropped.add(event.sequence)

    def put(self, event: Event) -> None:
        """Put ``event`` in the place of the one that has its sequence."""
        self._put[event.sequence] = event

    def add(self, after: Event, event: Event) -> None:
        """Put an event behind ``after``; those behind it move down."""
        self._added[after.sequence].append(event._replace(boot=after.boot))

    def drop_place(self, life: Life) -> None:
        """Take a message's place out of its queue; those behind it move up."""
        place, offset = life.place
        self._gone[place].append(offset)

    def double_place(self, life: Life) -> int:
        """Make a second place right behind a message's own, finished and hidden as that is; return its offset."""
        place, offset = life.place
        self._doubled[place].append(offset)
        return offset

    def add_entry(self, entry: int, twin: int) -> None:
        """Let every snapshot that holds ``entry`` hold ``twin`` as well."""
        self._twins[entry] = twin

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the cell anew: events, manifests, snapshots."""
        about = cells_of(self.trail)[self.cell]
        rows_per_file = max((line["rows"] for line in read_manifest(self.trail, self.cell)), default=5_000)
        events = list(self._moved())
        for kind in ("events", "manifest", "snapshots"):
            shutil.rmtree(self.trail / kind / f"cell={self.cell}", ignore_errors=True)
        writer = CellWriter(self.trail, self.cell, role=about["role"], rows_per_file=rows_per_file)
        for event, filed_ms in events:
            writer.add(event, filed_ms=filed_ms)
        writer.close(retired_sequence=about["retired_sequence"])
        for snapshot in self.snapshots:
            write_snapshot(self.trail, self._moved_snapshot(snapshot))

    def _moved(self) -> Iterator[tuple[Event, int]]:
        self._index()
        for event in self.events:
            kept = self._put.get(event.sequence, event)
            sequence = self._sequence(event.sequence)
            if event.sequence not in self._dropped:
                yield self._at_new_place(kept)._replace(sequence=sequence), event.at_ms
            else:
                sequence -= 1
            for number, added in enumerate(self._added.get(event.sequence, ()), start=1):
                yield added._replace(sequence=sequence + number), event.at_ms

    def _index(self) -> None:
        self._drops = sorted(self._dropped)
        self._adds = sorted(at for at, events in self._added.items() for _ in events)
        for offsets in [*self._gone.values(), *self._doubled.values()]:
            offsets.sort()

    def _sequence(self, sequence: int) -> int:
        return sequence - bisect_left(self._drops, sequence) + bisect_left(self._adds, sequence)

    def _offset(self, place: Place, offset: int) -> int:
        return offset - bisect_left(self._gone[place], offset) + bisect_left(self._doubled[place], offset)

    def _at_new_place(self, event: Event) -> Event:
        if event.kind in _OF_OTHERS and event.detail is not None:
            return event._replace(detail=self._sequence(event.detail))
        if event.queue_offset is None:
            return event
        return event._replace(queue_offset=self._offset(place_of(event), event.queue_offset))

    def added_offset(self, event: Event, offset: int) -> Event:
        """Return ``event`` at the place behind ``offset``, as it will be once all is saved. Ask when all is planned."""
        self._index()
        return event._replace(queue_offset=self._offset(place_of(event), offset) + 1)

    def _moved_snapshot(self, snapshot: Snapshot) -> Snapshot:
        last = snapshot.sequence
        sequence = last - bisect_right(self._drops, last) + bisect_left(self._adds, last)
        queues, progress = [], []
        for row in snapshot.queues:
            place = (row["topic"], row["group"], row["queue_id"])
            moved = {name: self._offset(place, row[name]) for name in ("first_offset", "end_offset")}
            queues.append(row | moved)
        for row in snapshot.progress:
            place = (row["topic"], row["group"] if row["queue_id"] == LANE else None, row["queue_id"])
            cursor = None if row["cursor"] is None else self._offset(place, row["cursor"])
            sets = {name: self._moved_set(place, row[name]) for name in ("done", "hidden")}
            progress.append(row | sets | {"floor": self._offset(place, row["floor"]), "cursor": cursor})
        entries = list(snapshot.entries)
        entries += [row | {"entry": self._twins[row["entry"]]} for row in entries if row["entry"] in self._twins]
        return Snapshot(snapshot.cell, sequence, snapshot.boot, snapshot.taken_ms, entries, progress, queues)

    def _moved_set(self, place: Place, offsets: list[int]) -> list[int]:
        moved: list[int] = []
        for offset in offsets:
            if offset not in self._gone[place]:
                moved.append(self._offset(place, offset))
                moved += [moved[-1] + 1] * (offset in self._doubled[place])
        return moved
