"""A second opinion on small trails: docs/reference/trail.md and the verdict's rules, replayed event by event.

It shares nothing with the audit and is as slow as it is simple to check by reading. What it does not look at: files
and their checksums, cells that fell silent, lateness beyond counting what is late.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from support.forges.trail.files import LANE, Event, Snapshot, cells_of, read_events, read_snapshots, text_of

GRACE_MS, LATE_AFTER_MS, WINDOW_MS = 120_000, 60_000, 600_000
ENDS = {"DELIVERED": "fired", "RECALLED": "cancelled", "REPLACED": "cancelled"}
SPOOL_ENDS = {"SENT": "sent", "SEND_DEAD": "dead", "DROPPED": "dropped"}


class Found(NamedTuple):
    """A finding, as far as the oracle names it."""

    kind: str
    topic: str | None
    group: str | None
    message_id: str


@dataclass(slots=True)
class Entry:
    """What the trail says about an entry that waits or waited to be handed over or sent."""

    first: Event | None = None
    ends: list[Event] = field(default_factory=list)
    due_ms: int = 0


@dataclass(slots=True)
class Place:
    """Where a message is visible to a group."""

    queue_id: int
    offset: int
    sequence: int
    exits: int = 0
    ended: str = ""


@dataclass(slots=True)
class Way:
    """A group's way with a message in one cell."""

    places: list[Place] = field(default_factory=list)
    copies: dict[int, Event] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    fired: int = 0


@dataclass(slots=True)
class Opinion:
    """What became of everything: ledgers by key and column, findings, gaps by cell."""

    watermark_ms: int = 0
    scheduled: dict[tuple[int, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    fired: dict[tuple[str, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    spooled: dict[tuple[str, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    findings: set[Found] = field(default_factory=set)
    gaps: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def find(self, kind: str, topic: str | None, group: str | None, message_id: bytes | None) -> None:
        """Keep a finding."""
        self.findings.add(Found(kind, topic, group, text_of(message_id or b"\0")))


class _Cell:
    """Replays one cell."""

    def __init__(self, trail: Path, name: str, about: dict[str, Any]) -> None:
        self.name, self.is_spool = name, about["role"] == "spool"
        rows = sorted(read_events(trail, name), key=lambda event: event.sequence)
        self.events = [each for at, each in enumerate(rows) if not at or rows[at - 1].sequence != each.sequence]
        self.last = self.events[-1]
        self.snapshots = read_snapshots(trail, name)
        self.retired = int(about["retired_sequence"])
        self.gaps = _gaps([event.sequence for event in self.events], self.retired, self.snapshots)
        self.entries: dict[int | bytes, Entry] = defaultdict(Entry)
        self.ways: dict[tuple[str, str, bytes], Way] = defaultdict(Way)
        self.since: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
        for event in self.events:  # a group may begin with what was there before it
            if event.kind == "SUBSCRIBED":
                self.since[event.topic or "", event.queue_id or 0][event.group or ""] = event.queue_offset or 0
        self.accepted: Counter[tuple[str, bytes]] = Counter()
        self.accepted_at_once: list[Event] = []

    def replay(self, said: Opinion) -> None:
        """Take in every event, and find what shows at once."""
        for event in self.events:
            if (
                event.kind in {"SCHEDULED", "RESCHEDULED", "SEND_FAILED", "REQUEUED"}
                or event.kind in ENDS
                or event.kind in SPOOL_ENDS
            ):
                self._of_entry(event, said)
            if self.is_spool:
                continue
            if event.kind in {"SCHEDULED", "QUEUED"}:
                self.accepted[event.topic or "", event.message_id or b""] += 1
            if event.kind == "QUEUED":
                self.accepted_at_once.append(event)
            if event.kind in {"QUEUED", "DELIVERED"}:
                self._visible(event, event.topic or "", event.queue_id or 0, event.queue_offset or 0)
            elif event.kind == "EXPIRED":
                self._ended(event, event.topic or "", event.queue_id or 0, event.queue_offset or 0)
            elif event.kind == "PURGED":
                self._ended(event, f"%DLQ%{event.group}", 0, event.detail or 0)
            elif event.group is not None and event.message_id is not None:
                self._of_group(event, said)

    def _of_entry(self, event: Event, said: Opinion) -> None:
        entry = self.entries[self._life(event.entry, event.message_id)]
        if event.kind == "SCHEDULED":
            if entry.ends:
                said.find("ILLEGAL", event.topic, None, event.message_id)
            entry.first = entry.first or event
            entry.due_ms = event.due_ms or 0
        elif event.kind in {"SEND_FAILED", "RESCHEDULED"}:
            if event.kind == "RESCHEDULED" and entry.ends:
                said.find("ILLEGAL", event.topic, None, event.message_id)
            entry.due_ms = event.due_ms or 0
        elif event.kind == "REQUEUED":
            entry.ends.clear()
            entry.due_ms = event.due_ms or 0
        else:
            if entry.first is not None and event.kind in ENDS and event.due_ms != entry.due_ms:
                if self.has_gap(entry.first.sequence, event.sequence):
                    entry.due_ms = event.due_ms or 0
                else:
                    said.find("ILLEGAL", event.topic, None, event.message_id)
            entry.ends.append(event)

    def _life(self, entry: int | None, message_id: bytes | None) -> int | bytes:
        """A spool's entry has another number whenever it waits again, and none at its end."""
        return (message_id or b"") if self.is_spool else (entry or 0)

    def _visible(self, event: Event, topic: str, queue_id: int, offset: int) -> None:
        for group, from_offset in self.since[topic, queue_id].items():
            if offset >= from_offset:
                way = self.ways[topic, group, event.message_id or b""]
                way.places.append(Place(queue_id, offset, event.sequence))
                way.fired += 1

    def _ended(self, event: Event, topic: str, queue_id: int, offset: int) -> None:
        for group in self.since[topic, queue_id]:
            for place in self.ways[topic, group, event.message_id or b""].places:
                if (place.queue_id, place.offset) == (queue_id, offset):
                    place.ended = event.kind.lower()

    def _of_group(self, event: Event, said: Opinion) -> None:
        assert event.topic is not None
        assert event.group is not None
        assert event.message_id is not None
        way = self.ways[event.topic, event.group, event.message_id]
        if event.kind == "QUEUED_FOR_GROUP":
            way.places.append(Place(LANE, event.queue_offset or 0, event.sequence))
            way.fired += 1
        elif event.kind in {"RETRIED", "RETRY_MOVED"}:
            way.copies.pop(event.entry or 0, None)
            way.places.append(Place(LANE, event.queue_offset or 0, event.sequence))
        elif event.kind in {"ACKED", "FILTERED", "NACKED"} or event.kind.startswith("DEAD_"):
            if event.kind.startswith("DEAD_"):
                self._visible(event, f"%DLQ%{event.group}", 0, event.detail or 0)
            if event.queue_id is None:
                way.copies.pop(event.entry or 0, None)
                way.outcomes["dead"] += 1
            elif self._left(event, way, said):
                if event.kind == "NACKED":
                    way.copies[event.entry or 0] = event
                else:
                    way.outcomes[{"A": "acked", "F": "filtered", "D": "dead"}[event.kind[0]]] += 1

    def _left(self, event: Event, way: Way, said: Opinion) -> bool:
        at_queue = [place for place in way.places if place.queue_id == event.queue_id]
        if event.queue_offset is not None:
            at_queue = [place for place in at_queue if place.offset == event.queue_offset]
        still_open = [place for place in at_queue if not place.exits]
        if still_open:
            still_open[0].exits = 1
            return True
        if at_queue and event.queue_offset is not None:
            said.find("DUPLICATE_EXIT", event.topic, event.group, event.message_id)
        elif not self.has_gap(0, event.sequence):  # else it came, or came back, in the gap
            said.find("DUPLICATE_EXIT" if at_queue else "ORPHAN", event.topic, event.group, event.message_id)
        return False

    def has_gap(self, after: int, until: int) -> bool:
        """Say whether a number between is missing."""
        return any(first <= until and last > after for first, last in self.gaps)

    # -- verdicts -----------------------------------------------------------------------------------------------------

    def judge(self, said: Opinion) -> None:
        """Say what became of every entry and every place."""
        for event in self.accepted_at_once:
            said.scheduled[event.at_ms // WINDOW_MS * WINDOW_MS, event.topic or ""]["accepted_at_once"] += 1
        for life, entry in self.entries.items():
            self._judge_entry(life, entry, said)
        for (topic, group, message_id), way in self.ways.items():
            row = said.fired[topic, group]
            row.update(fired=way.fired)
            row.update(way.outcomes)
            for state in self._open_states(group, topic, way, message_id):
                row[state] += 1
                if state in {"lost", "inconclusive"}:
                    said.find(state.upper(), topic, group, message_id)
        self._judge_snapshots(said)

    def _judge_entry(self, life: int | bytes, entry: Entry, said: Opinion) -> None:
        first = entry.first
        if first is None:
            if entry.ends and not self.has_gap(0, entry.ends[0].sequence):
                said.find("ORPHAN", entry.ends[0].topic, None, entry.ends[0].message_id)
            return
        topic = first.topic or ""
        state = self._open_state(life, entry, first, said.watermark_ms)
        if entry.ends:
            state = (SPOOL_ENDS if self.is_spool else ENDS)[entry.ends[0].kind]
        if state in {"lost", "inconclusive", "overdue"}:
            said.find(state.upper(), topic, None, first.message_id)
        if self.is_spool:
            said.spooled[self.name, topic].update(("spooled", state))
            return
        row = said.scheduled[entry.due_ms // WINDOW_MS * WINDOW_MS, topic]
        row.update(("scheduled", state))
        handed_over = [end for end in entry.ends if end.kind == "DELIVERED"]
        if len(handed_over) > 1:
            said.find("DUPLICATE_DELIVERY", topic, None, first.message_id)
        if handed_over and handed_over[0].at_ms - entry.due_ms > LATE_AFTER_MS:
            said.find("LATE", topic, None, first.message_id)
            row["late"] += 1
        if handed_over and handed_over[0].at_ms < entry.due_ms:
            said.find("EARLY", topic, None, first.message_id)
            row["early"] += 1

    def _open_state(self, life: int | bytes, entry: Entry, first: Event, watermark_ms: int) -> str:
        is_over = watermark_ms > entry.due_ms + GRACE_MS
        newer = [snapshot for snapshot in self.snapshots if snapshot.sequence >= first.sequence]
        if not newer:
            return "inconclusive" if is_over else "pending"
        held = [row for row in newer[-1].entries if self._life(row["entry"], row["message_id"]) == life]
        if any(not row["is_stranded"] for row in held):
            return "overdue" if is_over else "pending"
        return "inconclusive" if self.has_gap(first.sequence, newer[-1].sequence) else "lost"

    def _open_states(self, group: str, topic: str, way: Way, message_id: bytes) -> list[str]:
        copies = [self._copy_state(group, copy, message_id) for copy in way.copies.values()]
        still_open = [place for place in way.places if not place.exits]
        return copies + [place.ended or self._place_state(group, topic, place) for place in still_open]

    def _copy_state(self, group: str, copy: Event, message_id: bytes) -> str:
        if not self.snapshots or self.snapshots[-1].sequence < copy.sequence:
            return "in_retry"
        for row in self.snapshots[-1].entries:
            if (row["kind"], row["group"], row["message_id"]) == ("RETRY", group, message_id):
                return "lost" if row["is_stranded"] else "in_retry"
        return "inconclusive" if self.has_gap(copy.sequence, self.snapshots[-1].sequence) else "lost"

    def _place_state(self, group: str, topic: str, place: Place) -> str:
        if not self.snapshots or self.snapshots[-1].sequence < place.sequence:
            return "unread"
        snapshot = self.snapshots[-1]
        gone = "inconclusive" if self.has_gap(place.sequence, snapshot.sequence) else "lost"
        for row in snapshot.queues:
            owner = group if place.queue_id == LANE else None
            is_it = (row["topic"], row["group"], row["queue_id"]) == (topic, owner, place.queue_id)
            if is_it and row["end_offset"] <= place.offset:
                return gone
        for row in snapshot.progress:
            if (row["group"], row["topic"], row["queue_id"]) == (group, topic, place.queue_id):
                if place.offset < row["floor"] or place.offset in row["done"]:
                    return gone
                is_out = row["cursor"] is not None and place.offset < row["cursor"]
                return "in_flight" if is_out or place.offset in row["hidden"] else "unread"
        return "unread"

    def _judge_snapshots(self, said: Opinion) -> None:
        for snapshot in self.snapshots[-1:]:
            for row in snapshot.entries:
                if row["kind"] != "RETRY" and not self._was_open(row, snapshot.sequence):
                    said.find("ORPHAN", row["topic"], row["group"], row["message_id"])

    def _was_open(self, row: dict[str, Any], sequence: int) -> bool:
        entry = self.entries.get(self._life(row["entry"], row["message_id"]))
        if self.retired or self.has_gap(0, sequence):
            return True
        if entry is None or entry.first is None or entry.first.sequence > sequence:
            return False
        ended = [end for end in entry.ends if end.sequence <= sequence and end.kind != "SEND_DEAD"]
        return not ended


def _gaps(sequences: list[int], retired: int, snapshots: list[Snapshot]) -> list[tuple[int, int]]:
    gaps, expected = [], retired + 1
    for sequence in sequences:
        if sequence > expected:
            gaps.append((expected, sequence - 1))
        expected = max(expected, sequence + 1)
    if snapshots and snapshots[-1].sequence >= expected:
        gaps.append((expected, snapshots[-1].sequence))
    return gaps


def ask(trail: Path) -> Opinion:
    """Say what became of everything in a trail."""
    said = Opinion()
    cells = [_Cell(trail, name, about) for name, about in cells_of(trail).items()]
    ends = [cell.last.at_ms for cell in cells if cell.last.kind != "CLOSED"]
    said.watermark_ms = min(ends or [max(cell.last.at_ms for cell in cells)])
    accepted: Counter[tuple[str, bytes]] = Counter()
    for cell in cells:
        said.gaps[cell.name] = cell.gaps
        cell.replay(said)
        accepted += cell.accepted
        cell.judge(said)
    for (topic, message_id), count in accepted.items():
        if count > 1:
            said.find("DUPLICATE_ACCEPT", topic, None, message_id)
    return said


def rows_of(ledger: dict[Any, Counter[str]], names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return a ledger as the rows of a report."""
    return [dict(zip(names, key, strict=True)) | counts for key, counts in sorted(ledger.items())]
