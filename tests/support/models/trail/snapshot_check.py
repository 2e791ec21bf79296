"""The expected content of a snapshot: the rules of docs/reference/trail.md, replayed plainly from the events.

Events are dicts with the columns of the page. Only what events tell of is compared: who has read how far in memory,
and names, are not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from support.models.store.outbox import read_outbox

from broker_adapter.contracts.topics import dead_letter_topic
from dmq.broker.topics.registry import Names
from dmq.store.schema.accounting.outbox import NOT_APPLICABLE
from dmq.store.store import Store
from dmq.trail.events import LANE, NO_QUEUE, EventKind, gap_count

Event = dict[str, Any]
Place = tuple[str, str | None, int]  # topic, group of a lane, queue

_EXITS = {"ACKED", "FILTERED"}
_DEAD = {
    *("DEAD_EXHAUSTED", "DEAD_TOO_OLD", "DEAD_TOO_LATE", "DEAD_FORWARDED", "DEAD_SENT_BACK", "DEAD_BY_OPERATOR"),
}
_NOT_TIMES = {"ACKED", "FILTERED", "LEASE_EXPIRED", "GIVEN_BACK", "TAIL_LOST", "GAP", "SUBSCRIBED", *_DEAD}


class Replayed:
    """What the events up to a sequence leave behind."""

    def __init__(self, events: Iterable[Event], until: int) -> None:
        self.waiting: dict[int, Event] = {}
        self.ends: dict[Place, int] = {}
        self.finished: dict[tuple[str, Place], set[int]] = {}  # by group
        self._ids: dict[tuple[Place, bytes], list[int]] = {}
        at = 0
        for event in events:
            if event["sequence"] > until:
                break
            assert event["sequence"] == at + 1, f"event {at + 1} is missing"
            at += 1
            self._take(event)
        assert at == until, f"the trail ends at {at}, before {until}"

    def _take(self, event: Event) -> None:
        kind, topic, group = event["kind"], event["topic"], event["group"]
        if kind in {"SCHEDULED", "NACKED"}:
            self.waiting[event["entry"]] = event
        if kind in {"DELIVERED", "RETRIED", "RETRY_MOVED", "RECALLED", "REPLACED"}:
            del self.waiting[event["entry"]]
        if kind in {"QUEUED", "DELIVERED"}:
            self._visible((topic, None, event["queue_id"]), event["queue_offset"], event["message_id"])
        elif kind in {"RETRIED", "RETRY_MOVED"}:
            self._visible((topic, group, -1), event["queue_offset"], event["message_id"])
        elif kind in _EXITS:
            self._left(group, _place(event), event["queue_offset"])
        elif kind == "NACKED" or kind in _DEAD:
            if kind in _DEAD:
                self._visible((dead_letter_topic(group), None, 0), event["detail"], event["message_id"])
            if event["queue_id"] is None:
                del self.waiting[event["entry"]]
            else:
                self._left_somewhere(group, _place(event), event["message_id"])

    def _visible(self, place: Place, offset: int, message_id: bytes) -> None:
        assert offset == self.ends.get(place, 0), f"{place}: {offset} is not the next offset"
        self.ends[place] = offset + 1
        self._ids.setdefault((place, message_id), []).append(offset)

    def _left(self, group: str, place: Place, offset: int) -> None:
        left = self.finished.setdefault((group, place), set())
        assert offset not in left, f"{group} left {place} {offset} twice"
        left.add(offset)

    def _left_somewhere(self, group: str, place: Place, message_id: bytes) -> None:
        """The event names the queue only: the message's one place in it that was not left."""
        left = self.finished.get((group, place), set())
        (offset,) = [each for each in self._ids[place, message_id] if each not in left]
        self._left(group, place, offset)


def _place(event: Event) -> Place:
    is_lane = event["queue_id"] == -1
    return event["topic"], event["group"] if is_lane else None, event["queue_id"]


def check_snapshot(path: Path, events: Iterable[Event]) -> Replayed:
    """Fail unless the snapshot holds exactly what the events up to its sequence say; return that."""
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    assert int(path.name) == manifest["sequence"]
    for name, facts in manifest["files"].items():
        found = (path / name).read_bytes()
        assert (len(found), sha256(found).hexdigest()) == (facts["bytes"], facts["sha256"])
    tables = {name: pq.read_table(path / f"{name}.parquet").to_pylist() for name in ("entries", "progress", "queues")}
    assert {name: len(rows) for name, rows in tables.items()} == {name: manifest[name] for name in tables}
    replayed = Replayed(events, manifest["sequence"])
    _check_entries(tables["entries"], replayed)
    queues = {(row["topic"], row["group"], row["queue_id"]): row for row in tables["queues"]}
    assert len(queues) == len(tables["queues"])
    assert {place: row["end_offset"] for place, row in queues.items() if row["end_offset"]} == replayed.ends
    assert not any(row["first_offset"] for row in queues.values())
    _check_progress(tables["progress"], replayed)
    return replayed


def _check_entries(rows: list[Event], replayed: Replayed) -> None:
    found = {row["entry"]: row for row in rows}
    assert len(found) == len(rows)
    assert found.keys() == replayed.waiting.keys()
    for entry, row in found.items():
        event = replayed.waiting[entry]
        assert not row["is_stranded"]
        assert row["kind"] == ("RETRY" if event["group"] else "DELAYED")
        assert row["attempt"] == (event["attempt"] if event["group"] else 0)
        same = ("topic", "group", "message_id", "due_ms")
        assert {name: row[name] for name in same} == {name: event[name] for name in same}
        assert row["accepted_at_ms"] <= event["at_ms"]


def _check_progress(rows: list[Event], replayed: Replayed) -> None:
    finished: dict[tuple[str, Place], set[int]] = {}
    for row in rows:
        place = (row["topic"], row["group"] if row["queue_id"] == -1 else None, row["queue_id"])
        assert (row["group"], place) not in finished
        assert all(offset >= row["floor"] for offset in row["done"])
        assert row["done"] == sorted(set(row["done"]))
        finished[row["group"], place] = {*range(row["floor"]), *row["done"]}
        assert not finished[row["group"], place] & set(row["hidden"])
    assert {key: left for key, left in finished.items() if left} == replayed.finished


def outbox_events(store: Store) -> list[Event]:
    """Return the events in the outbox with the columns of the trail; for stores without an exporter."""
    names = Names(store)
    made: list[Event] = []
    for record, event in read_outbox(store):
        kind = event.kind.name
        is_dead, is_cell = kind in _DEAD, event.kind in {EventKind.GAP, EventKind.TAIL_LOST}
        topic, group = names.topics_by_id.get(event.topic_id), names.groups_by_id.get(event.group_id)
        offset = None if record.queue_offset == NOT_APPLICABLE else record.queue_offset
        made.append(
            {
                "sequence": record.sequence,
                "kind": kind,
                "at_ms": record.committed_at_ms,
                "topic": topic.name if topic is not None else None,
                "group": group.name if group is not None else None,
                "queue_id": {NO_QUEUE: None, LANE: -1}.get(event.queue_id, event.queue_id),
                "queue_offset": None if is_dead or kind == "NACKED" else offset,
                "attempt": event.attempt,
                "due_ms": gap_count(event) if is_cell else None if kind in _NOT_TIMES else event.time_ms or None,
                "detail": offset if is_dead else None,
                "entry": None if record.entry_sequence == NOT_APPLICABLE else record.entry_sequence,
                "message_id": event.message_id,
            }
        )
    return made
