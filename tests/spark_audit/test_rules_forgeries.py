"""Forged trails: each forgery makes numbers, files and manifests fit again, and is found by what contradicts it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.forges.trail.files import CellWriter, Event, Snapshot, write_snapshot
from support.forges.trail.hand import GROUP, START_MS, TOPIC

from spark_audit.engines.table import TableEngine
from spark_audit.jobs.audit import run_audit
from spark_audit.jobs.options import Options

pytestmark = pytest.mark.spark
LETTERS = f"%DLQ%{GROUP}"
AT_ONCE, DELAYED, FAILED, DEAL = range(4)  # the messages, by their offsets in the queue
QUEUE: Mapping[str, Any] = {"queue_id": 0}


class Story(NamedTuple):
    """A healthy cell: its events without their numbers, and how far the snapshot says that the group is."""

    events: list[Event]
    floor: int = 4

    def of(self, number: int, kind: str) -> Event:
        """Return the event of one kind of a message."""
        (found,) = [each for each in self.events if (each.message_id, each.kind) == (_id(number), kind)]
        return found

    def without(self, *kinds: str, number: int) -> Story:
        """Leave out events of a message; all of them if no kind is named."""
        gone = [each for each in self.events if each.message_id == _id(number) and (not kinds or each.kind in kinds)]
        return self._replace(events=[each for each in self.events if each not in gone])

    def changed(self, event: Event, **columns: Any) -> Story:  # noqa: ANN401 - columns of rows
        """Change one event."""
        return self._replace(
            events=[each._replace(**columns) if each is event else each for each in self.events],
        )

    def swapped(self, one: Event, other: Event) -> Story:
        """Exchange the places of two events."""
        places = {id(one): other, id(other): one}
        return self._replace(events=[places.get(id(each), each) for each in self.events])


def _id(number: int) -> bytes:
    return b"\0" + f"message-{number}".encode()


def story() -> Story:
    """Return a healthy history: sent at once, delayed, failed and purged, and committed."""
    events: list[Event] = []

    def add(kind: str, number: int | None = None, **columns: Any) -> None:  # noqa: ANN401 - columns of rows
        if number is not None:
            columns |= {"topic": TOPIC, "message_id": _id(number)}
        events.append(Event(0, 1, kind, START_MS + len(events), **columns))

    def of_group(kind: str, number: int, **columns: Any) -> None:  # noqa: ANN401 - columns of rows
        add(kind, number, group=GROUP, **columns)

    add("OPENED")
    add("SUBSCRIBED", topic=TOPIC, group=GROUP, queue_offset=0, **QUEUE)
    add("QUEUED", AT_ONCE, entry=1, queue_offset=0, **QUEUE)
    of_group("ACKED", AT_ONCE, entry=1, attempt=1, queue_offset=0, **QUEUE)
    add("SCHEDULED", DELAYED, entry=2, due_ms=START_MS + 5)
    add("DELIVERED", DELAYED, entry=2, due_ms=START_MS + 5, queue_offset=1, **QUEUE)
    of_group("ACKED", DELAYED, entry=2, attempt=1, queue_offset=1, **QUEUE)
    add("QUEUED", FAILED, entry=3, queue_offset=2, **QUEUE)
    of_group("DEAD_EXHAUSTED", FAILED, entry=3, attempt=1, detail=0, **QUEUE)
    of_group("PURGED", FAILED, detail=0)
    add("HALF", DEAL, entry=4, due_ms=START_MS + 60_000)
    add("COMMITTED", DEAL)
    add("QUEUED", DEAL, entry=4, queue_offset=3, **QUEUE)
    of_group("ACKED", DEAL, entry=4, attempt=1, queue_offset=3, **QUEUE)
    add("HEARTBEAT")
    return Story(events)


def write(trail: Path, cell: str, told: Story) -> None:
    """Write a story as a cell with names of its own: numbered, chained, and with a snapshot of its end."""
    name = f"-{cell}"
    writer = CellWriter(trail, cell)
    for sequence, event in enumerate(told.events, 1):
        topic, group = (None if each is None else each + name for each in (event.topic, event.group))
        writer.add(event._replace(sequence=sequence, topic=topic, group=group, at_ms=START_MS + 2 * sequence))
    writer.close()
    place = {"topic": TOPIC + name, "queue_id": 0}
    way = place | {"group": GROUP + name, "floor": told.floor, "done": [], "hidden": [], "cursor": None}
    queues = [
        place | {"group": None, "first_offset": 0, "end_offset": 4},
        {"topic": LETTERS + name, "queue_id": 0, "group": None, "first_offset": 0, "end_offset": 1},
    ]
    taken = Snapshot(cell, len(told.events), 1, START_MS, progress=[way], queues=queues)
    write_snapshot(trail, taken)


def acked_before_queued(told: Story) -> Story:
    return told.swapped(told.of(AT_ONCE, "QUEUED"), told.of(AT_ONCE, "ACKED"))


def acked_before_delivered(told: Story) -> Story:
    return told.swapped(told.of(DELAYED, "DELIVERED"), told.of(DELAYED, "ACKED"))


def message_erased(told: Story) -> Story:
    return told.without(number=FAILED)


def first_message_erased(told: Story) -> Story:
    return told.without(number=AT_ONCE)


def last_message_erased(told: Story) -> Story:
    return told.without(number=DEAL)


def loss_recorded_as_recalled(told: Story) -> Story:
    event = told.of(DELAYED, "DELIVERED")
    return told.changed(event, kind="RECALLED", queue_id=None, queue_offset=None).without("ACKED", number=DELAYED)


def commit_recorded_as_rolled_back(told: Story) -> Story:
    return told.changed(told.of(DEAL, "COMMITTED"), kind="ROLLED_BACK").without("QUEUED", "ACKED", number=DEAL)


def dead_letter_recorded_as_acked(told: Story) -> Story:
    event = told.of(FAILED, "DEAD_EXHAUSTED")
    return told.changed(event, kind="ACKED", detail=None, queue_offset=2).without("PURGED", number=FAILED)


def group_erased(told: Story) -> Story:
    return told._replace(events=[each for each in told.events if each.group is None])


def subscribed_behind_lost_messages(told: Story) -> Story:
    lost = told.without("ACKED", number=AT_ONCE)
    (begin,) = [each for each in lost.events if each.kind == "SUBSCRIBED"]
    return lost.changed(begin, queue_offset=1)


def floor_lowered(told: Story) -> Story:
    return told._replace(floor=2)


ORPHAN = ("ORPHAN", "left a place it was not at")
HOLE = ("UNPROVEN", "no event names an offset of a queue")
UNKNOWN_GROUP = ("UNPROVEN", "the snapshot names a group without an event that starts its reading")
BEYOND = ("ILLEGAL", "a group begins beyond the end of the queue")
UNFINISHED = ("ILLEGAL", "a group left an offset that the later snapshot calls unfinished")
LOST = ("LOST", "finished by the snapshot, without an exit")
FORGERIES: Mapping[Callable[[Story], Story], set[tuple[str, str]]] = {
    acked_before_queued: {ORPHAN, LOST},
    acked_before_delivered: {ORPHAN, LOST},
    message_erased: {HOLE},
    first_message_erased: {HOLE},
    last_message_erased: {HOLE},
    loss_recorded_as_recalled: {HOLE},
    commit_recorded_as_rolled_back: {HOLE},
    dead_letter_recorded_as_acked: {HOLE},
    group_erased: {UNKNOWN_GROUP, HOLE},
    subscribed_behind_lost_messages: {BEYOND},
    floor_lowered: {UNFINISHED},
}


@pytest.mark.parametrize("exact", [False, True])
def test_forgeries_of_events_are_found(engine: TableEngine, tmp_path: Path, *, exact: bool) -> None:
    """Each forged cell has the findings that name the contradiction; the healthy cell has none."""
    write(tmp_path, "healthy", story())
    for forge in FORGERIES:
        write(tmp_path, forge.__name__, forge(story()))
    outcome = run_audit(engine, str(tmp_path), Options(exact=exact))
    found: dict[str, set[tuple[str, str]]] = {}
    for each in outcome.findings:
        found.setdefault(each["cell"], set()).add((each["kind"], each["rule"]))
    assert found == {forge.__name__: expected for forge, expected in FORGERIES.items()}
