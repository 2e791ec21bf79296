"""The files of an audit trail, by docs/reference/trail.md: pyarrow only, without code of the product.

Tests make trails with it and bend them. The exporter has code of its own, so that each is a check of the other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

VERSION = 1
HOUR_MS = 3_600_000
LANE = -1
_DICTIONARY: Any = ["kind", "topic", "group"]  # the stubs of pyarrow know a bool only


def _schema(**types: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, kind) for name, kind in types.items()])


EVENT_SCHEMA = _schema(
    sequence=pa.int64(),
    boot=pa.int32(),
    kind=pa.string(),
    at_ms=pa.int64(),
    topic=pa.string(),
    group=pa.string(),
    queue_id=pa.int32(),
    queue_offset=pa.int64(),
    attempt=pa.int32(),
    due_ms=pa.int64(),
    detail=pa.int64(),
    entry=pa.int64(),
    message_id=pa.binary(),
).with_metadata({"rockdmq.trail_version": str(VERSION)})
ENTRIES_SCHEMA = _schema(
    entry=pa.int64(),
    kind=pa.string(),
    topic=pa.string(),
    group=pa.string(),
    message_id=pa.binary(),
    due_ms=pa.int64(),
    attempt=pa.int32(),
    accepted_at_ms=pa.int64(),
    is_stranded=pa.bool_(),
)
QUEUES_SCHEMA = _schema(
    topic=pa.string(),
    group=pa.string(),
    queue_id=pa.int32(),
    first_offset=pa.int64(),
    end_offset=pa.int64(),
)
PROGRESS_SCHEMA = _schema(
    group=pa.string(),
    topic=pa.string(),
    queue_id=pa.int32(),
    floor=pa.int64(),
    done=pa.list_(pa.int64()),
    hidden=pa.list_(pa.int64()),
    cursor=pa.int64(),
)


class Event(NamedTuple):
    """A row of the trail."""

    sequence: int
    boot: int
    kind: str
    at_ms: int
    topic: str | None = None
    group: str | None = None
    queue_id: int | None = None
    queue_offset: int | None = None
    attempt: int = 0
    due_ms: int | None = None
    detail: int | None = None
    entry: int | None = None
    message_id: bytes | None = None


@dataclass(slots=True)
class Snapshot:
    """What a cell held at ``sequence``; rows as dicts of the columns."""

    cell: str
    sequence: int
    boot: int
    taken_ms: int
    entries: list[dict[str, Any]] = field(default_factory=list)
    progress: list[dict[str, Any]] = field(default_factory=list)
    queues: list[dict[str, Any]] = field(default_factory=list)


def text_of(message_id: bytes) -> str:
    """Return a packed message id as people write it."""
    return message_id[1:].decode() if message_id[:1] == b"\0" else message_id.hex().upper()


def hour_of(at_ms: int) -> tuple[str, str]:
    """Return date and hour of a time, as paths have them."""
    at = datetime.fromtimestamp(at_ms // HOUR_MS * 3600, UTC)
    return at.strftime("%Y-%m-%d"), at.strftime("%H")


class CellWriter:
    """Writes the events of one cell: full files, a line of the manifest for each. Call ``close`` at the end."""

    def __init__(
        self, trail: Path, cell: str, *, role: str = "daemon", rows_per_file: int = 5_000, previous: str = ""
    ) -> None:
        self.trail, self.cell, self._role, self._rows_per_file = trail, cell, role, rows_per_file
        self._previous = previous  # the digest that the first line names
        self._rows: list[Event] = []
        self._hour = -1

    def add(self, event: Event, *, filed_ms: int | None = None) -> None:
        """Take the next event. It goes to the file of its own hour, or to that of ``filed_ms``."""
        hour = (event.at_ms if filed_ms is None else filed_ms) // HOUR_MS
        if self._rows and (hour != self._hour or len(self._rows) >= self._rows_per_file):
            self._flush()
        self._hour = hour
        self._rows.append(event)

    def close(self, *, retired_sequence: int = 0) -> None:
        """Write what is left, and the cell's own file."""
        self._flush()
        path = self.trail / "cells" / f"{self.cell}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"version": VERSION, "cell": self.cell, "role": self._role, "host": "forge"}
        path.write_text(json.dumps(about | {"retired_sequence": retired_sequence}) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        if self._rows:
            file = write_events(self.trail, self.cell, self._rows, filed_ms=self._hour * HOUR_MS)
            add_to_manifest(self.trail, self.cell, [file], first=self._previous)
            self._rows = []


def table_of(events: Sequence[Event]) -> pa.Table:
    """Return events as a table of the trail's schema."""
    columns: Iterable[Sequence[Any]] = zip(*events, strict=True) if events else [[] for _ in EVENT_SCHEMA]
    arrays = [pa.array(column, type=kind.type) for column, kind in zip(columns, EVENT_SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=EVENT_SCHEMA)


def write_table(path: Path, table: pa.Table) -> None:
    """Write a file of events as the format wants it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, compression="zstd", use_dictionary=_DICTIONARY)


def write_events(trail: Path, cell: str, events: Sequence[Event], *, filed_ms: int | None = None) -> dict[str, Any]:
    """Write one file of events, all of one hour, and return its line of the manifest."""
    date, hour = hour_of(events[0].at_ms if filed_ms is None else filed_ms)
    name = f"{events[0].sequence:020}-{events[-1].sequence:020}.parquet"
    path = trail / "events" / f"cell={cell}" / f"date={date}" / f"hour={hour}" / name
    write_table(path, table_of(events))
    times = (events[0].at_ms, events[-1].at_ms)
    return line_of(trail, path, cell, (events[0].sequence, events[-1].sequence), times, len(events))


def line_of(
    trail: Path, path: Path, cell: str, sequences: tuple[int, int], times_ms: tuple[int, int], rows: int
) -> dict[str, Any]:
    """Return the line of the manifest of a file that is on the disk."""
    content = path.read_bytes()
    return {
        "version": VERSION,
        "path": path.relative_to(trail).as_posix(),
        "cell": cell,
        "first_sequence": sequences[0],
        "last_sequence": sequences[1],
        "rows": rows,
        "first_at_ms": times_ms[0],
        "last_at_ms": times_ms[1],
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def add_to_manifest(trail: Path, cell: str, lines: Iterable[dict[str, Any]], *, first: str = "") -> None:
    """Append lines to the manifests of the dates in their paths; the first of all names ``first`` as the one before."""
    for line in lines:
        path = _manifest_of(trail, cell, line)
        path.parent.mkdir(parents=True, exist_ok=True)
        before = [
            each for each in _raw_lines(trail, cell) if json.loads(each)["last_sequence"] < line["first_sequence"]
        ]
        newest = max(before, default="", key=lambda each: int(json.loads(each)["last_sequence"]))
        previous = hashlib.sha256(newest.encode()).hexdigest() if newest else first
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | {"previous": previous}) + "\n")


def _raw_lines(trail: Path, cell: str) -> list[str]:
    found: list[str] = []
    for path in (trail / "manifest" / f"cell={cell}").glob("*.jsonl"):
        text = path.read_text(encoding="utf-8")
        found += text[: text.rfind("\n") + 1].splitlines()
    return found


def write_manifest(trail: Path, cell: str, lines: Iterable[dict[str, Any]]) -> None:
    """Replace the whole manifest of a cell."""
    for old in (trail / "manifest" / f"cell={cell}").glob("*.jsonl"):
        old.unlink()
    add_to_manifest(trail, cell, lines)


def read_manifest(trail: Path, cell: str) -> list[dict[str, Any]]:
    """Return the whole lines of a cell's manifests, in the order of their sequences."""
    lines: list[dict[str, Any]] = []
    for path in sorted((trail / "manifest" / f"cell={cell}").glob("*.jsonl")):
        text = path.read_text(encoding="utf-8")
        lines += [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return sorted(lines, key=lambda line: int(line["first_sequence"]))


def _manifest_of(trail: Path, cell: str, line: dict[str, Any]) -> Path:
    date = str(line["path"]).split("/date=")[1].split("/")[0]
    return trail / "manifest" / f"cell={cell}" / f"{date}.jsonl"


def cells_of(trail: Path) -> dict[str, dict[str, Any]]:
    """Return the cells of a trail with what is said about each, by name."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((trail / "cells").glob("*.json"))]
    return {about["cell"]: about for about in found}


def files_of(trail: Path, cell: str) -> list[Path]:
    """Return the files of events of a cell, in the order of their names."""
    return sorted((trail / "events" / f"cell={cell}").glob("date=*/hour=*/*.parquet"), key=lambda path: path.name)


def read_file(path: Path) -> list[Event]:
    """Return the events of one file, in its order."""
    columns = pq.ParquetFile(path).read().to_pydict()
    return list(map(Event._make, zip(*(columns[name] for name in EVENT_SCHEMA.names), strict=True)))


def read_events(trail: Path, cell: str) -> Iterator[Event]:
    """Yield the events of a cell, file by file."""
    for path in files_of(trail, cell):
        yield from read_file(path)


def write_snapshot(trail: Path, snapshot: Snapshot) -> Path:
    """Write a snapshot and return its directory."""
    path = trail / "snapshots" / f"cell={snapshot.cell}" / f"{snapshot.sequence:020}"
    path.mkdir(parents=True, exist_ok=True)
    parts = {
        "entries": (snapshot.entries, ENTRIES_SCHEMA),
        "progress": (snapshot.progress, PROGRESS_SCHEMA),
        "queues": (snapshot.queues, QUEUES_SCHEMA),
    }
    files = {}
    for name, (rows, schema) in parts.items():
        file = path / f"{name}.parquet"
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), file, compression="zstd")
        content = file.read_bytes()
        files[file.name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    manifest = {
        "version": VERSION,
        "cell": snapshot.cell,
        "sequence": snapshot.sequence,
        "boot": snapshot.boot,
        "taken_ms": snapshot.taken_ms,
        **{name: len(rows) for name, (rows, _) in parts.items()},
        "files": files,
    }
    (path / "manifest.json").write_text(json.dumps(manifest) + "\n", encoding="utf-8")
    return path


def read_snapshots(trail: Path, cell: str) -> list[Snapshot]:
    """Return the snapshots of a cell, oldest first."""
    found = []
    for path in sorted((trail / "snapshots" / f"cell={cell}").glob("[0-9]*")):
        about = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        rows = [
            pq.ParquetFile(path / f"{name}.parquet").read().to_pylist() for name in ("entries", "progress", "queues")
        ]
        found.append(Snapshot(cell, about["sequence"], about["boot"], about["taken_ms"], *rows))
    return found
