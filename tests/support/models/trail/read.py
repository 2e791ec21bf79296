"""A cell's trail, read with pyarrow and checked against docs/reference/trail.md; the expected row of a record."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from dmq.store.schema.accounting.outbox import NOT_APPLICABLE, OutboxRecord
from dmq.trail.events import FAILURES, LANE, NO_QUEUE, EventKind, has_reason, split_reason

HOUR_MS = 3_600_000
_DUE = {
    *(EventKind.SCHEDULED, EventKind.DELIVERED, EventKind.RECALLED, EventKind.NACKED, EventKind.RETRIED),
    *(EventKind.RESCHEDULED, EventKind.REPLACED, EventKind.ABSORBED),
    *(EventKind.RETRY_MOVED, EventKind.POSTPONED, EventKind.INVISIBLE_CHANGED),
    *(EventKind.SENT, EventKind.SEND_FAILED, EventKind.REQUEUED, EventKind.HALF, EventKind.TX_CHECKED),
}
_DETAIL = {
    *(EventKind.SEND_DEAD, EventKind.DROPPED, EventKind.REDRIVEN, EventKind.PURGED, EventKind.RESET),
    EventKind.QUEUED_FOR_GROUP,
}
_DETAIL |= {EventKind.CLOCK_CHANGED, EventKind.CLOCK_ACCEPTED, EventKind.FORWARDED, EventKind.FETCHED}
_DETAIL |= {EventKind.TAKEN_OVER, EventKind.OCCURRED, EventKind.OPERATED}


def lines(trail: Path, cell: str) -> list[dict[str, Any]]:
    """Every line of a cell's manifests, in the order of their sequences."""
    found = [
        json.loads(line)
        for path in (trail / "manifest" / f"cell={cell}").glob("????-??-??.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return sorted(found, key=lambda line: int(line["first_sequence"]))


def data_files(trail: Path, cell: str) -> set[str]:
    """Every file of events that is part of the trail, relative to it."""
    found = (trail / "events" / f"cell={cell}").rglob("*.parquet")
    return {path.relative_to(trail).as_posix() for path in found if path.name[0] not in "._"}


def read_trail(trail: Path, cell: str, *, has_gaps: bool = False) -> list[dict[str, Any]]:
    """Return all events of a cell; fails where files, manifests and paths do not agree, or do not follow each other."""
    events: list[dict[str, Any]] = []
    listed = lines(trail, cell)
    assert {line["path"] for line in listed} == data_files(trail, cell), "files and manifests"
    for line in listed:
        path = trail / line["path"]
        content = path.read_bytes()
        assert (line["bytes"], line["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
        file = pq.ParquetFile(path)
        assert (file.metadata.metadata or {})[b"rockdmq.trail_version"] == b"1"
        rows = file.read().to_pylist()
        sequences = [row["sequence"] for row in rows]
        assert sequences == list(range(line["first_sequence"], line["last_sequence"] + 1))
        assert path.name == f"{sequences[0]:020}-{sequences[-1]:020}.parquet"
        assert (line["rows"], line["cell"], line["version"]) == (len(rows), cell, 1)
        assert (line["first_at_ms"], line["last_at_ms"]) == (rows[0]["at_ms"], rows[-1]["at_ms"])
        assert len({row["at_ms"] // HOUR_MS for row in rows}) == 1, "one hour"
        events += rows
    for first, second in pairwise(listed):
        assert has_gaps or first["last_sequence"] + 1 == second["first_sequence"], "files follow each other"
        assert first["last_sequence"] < second["first_sequence"]
    return events


def sequences(trail: Path, cell: str) -> list[int]:
    """The numbers of all events of a cell."""
    return [event["sequence"] for event in read_trail(trail, cell)]


def expected_row(record: OutboxRecord, names: dict[int, str]) -> dict[str, Any]:
    """Return what docs/reference/trail.md makes of a record: slowly, one rule after the other."""
    event = record.event
    number = event[0]
    kind = EventKind(number) if number in set(EventKind) else None
    topic_id, group_id = int.from_bytes(event[1:5], "big"), int.from_bytes(event[5:9], "big")
    queue, attempt = int.from_bytes(event[9:11], "big"), int.from_bytes(event[11:13], "big")
    time_ms, message_id = int.from_bytes(event[13:21], "big"), event[21:]
    error = client = None
    if kind in FAILURES and has_reason(message_id):
        message_id, error, client = split_reason(message_id)
    offset = None if record.queue_offset == NOT_APPLICABLE else record.queue_offset
    due_ms = detail = None
    if kind in _DUE or kind is None:
        due_ms = time_ms
    elif kind in {EventKind.QUEUED, EventKind.EXPIRED, EventKind.COMMITTED, EventKind.SCHEDULE_CHANGED}:
        due_ms = time_ms or None
    elif kind in _DETAIL:
        detail = time_ms
    elif kind in {EventKind.GAP, EventKind.TAIL_LOST}:
        detail, due_ms, message_id = time_ms, int.from_bytes(message_id, "big"), b""
    if kind in {EventKind.TX_GIVEN_UP, EventKind.TX_TOO_OLD, EventKind.FORWARD_REFUSED} or (
        kind is not None and kind.name.startswith("DEAD_")
    ):
        detail, offset = offset, None
    elif kind in {EventKind.REDRIVEN, EventKind.PURGED}:
        offset = None
    return {
        "sequence": record.sequence,
        "boot": record.boot,
        "kind": kind.name if kind is not None else f"KIND_{number}",
        "at_ms": record.committed_at_ms,
        "topic": names[topic_id] if topic_id else None,
        "group": names[group_id] if group_id else None,
        "queue_id": {NO_QUEUE: None, LANE: -1}.get(queue, queue),
        "queue_offset": offset,
        "attempt": attempt,
        "due_ms": due_ms,
        "detail": detail,
        "entry": None if record.entry_sequence == NOT_APPLICABLE else record.entry_sequence,
        "message_id": message_id or None,
        "error": error or None,
        "client": client or None,
    }
