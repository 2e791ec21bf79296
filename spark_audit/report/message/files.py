"""Trail files, read for one message: rows by id, gaps, newest snapshots. Uses pyarrow only, no Spark.

Row group statistics do not help to find an id. So the id column of every file is read, and whole rows only from files
that contain the id.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spark_audit.report import text
from spark_audit.schema import EVENTS
from spark_audit.undone import Undone

_RANGE = re.compile(r"(\d+)-(\d+)\.parquet")
_HEX_ID = re.compile(r"[0-9A-Fa-f]{34}")
_OF_LINE = ("first_sequence", "last_sequence", "first_at_ms", "last_at_ms")
_READERS = 4
_TOLD_EVERY_S = 1.0
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileGap:
    """Missing sequences of a cell; the times are those of the adjacent files."""

    cell: str
    first: int
    last: int
    why: str
    after_ms: int | None = None
    before_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSnapshot:
    """Content of the newest snapshot of a cell about the message and the queues of its topics."""

    cell: str
    sequence: int
    taken_ms: int | None
    entries: list[Row] = field(default_factory=list)
    progress: list[Row] = field(default_factory=list)
    queues: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EventsFile:
    """File of events, and the sequence range in its name."""

    path: Path
    cell: str
    first: int
    last: int


class TrailFiles:
    """Files of a trail, and the list of unreadable ones."""

    def __init__(self, root: Path, progress: TextIO) -> None:
        self.root = root
        self.unreadable: list[str] = []
        self._progress = progress
        files = []
        for path in _within(root / "events", "*.parquet"):
            cell = next((part[5:] for part in path.parts if part.startswith("cell=")), "")
            if (numbers := _RANGE.fullmatch(path.name)) is None or not cell:
                self.unreadable.append(f"{path.relative_to(root)}: not named as a file of events")
            else:
                files.append(EventsFile(path, cell, int(numbers[1]), int(numbers[2])))
        self.files = sorted(files, key=lambda file: (file.cell, file.first))

    def rows(self, files: Sequence[EventsFile], column: str, values: pa.Array[Any], what: str) -> list[Row]:
        """Return every row of ``files`` whose ``column`` is one of ``values``, by cell and in the order of events."""
        read: list[Path] = []

        def one(file: EventsFile) -> list[Row]:
            found = self.matching(file.path, column, values)
            read.append(file.path)
            if found and not _is_event(found[0]):
                self._note(file.path, "its columns are not those of events")
                return []
            return [{"cell": file.cell, "path": str(file.path.relative_to(self.root)), **row} for row in found]

        def told() -> str:
            return f"explain: {what}, {text.count(len(read))} of {text.count(len(files))} files read"

        with _telling(self._progress, told), ThreadPoolExecutor(_READERS) as readers:
            found = [row for rows in readers.map(one, files) for row in rows]
        return sorted(found, key=lambda row: (row["cell"], row["sequence"]))

    def matching(self, path: Path, column: str, values: pa.Array[Any]) -> list[Row]:
        """Return the matching rows of one file. An unreadable file is recorded and has no rows."""
        rows: list[Row] = []
        try:
            with pq.ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    held = file.read_row_group(group, columns=[column], use_threads=False).column(column)
                    hits = pc.indices_nonzero(pc.is_in(held.cast(values.type), value_set=values))
                    if len(hits):
                        rows += file.read_row_group(group, use_threads=False).take(hits).to_pylist()
        except (pa.ArrowException, OSError, KeyError) as error:
            self._note(path, type(error).__name__)
        return rows

    def _note(self, path: Path, why: str) -> None:
        self.unreadable.append(f"{path.relative_to(self.root)}: {why}")

    def last_at_ms(self, cell: str) -> int | None:
        """Return the time of the newest event of a cell."""
        files = [file for file in self.files if file.cell == cell]
        try:
            with pq.ParquetFile(files[-1].path) as newest:
                latest: int | None = pc.max(newest.read(columns=["at_ms"]).column("at_ms")).as_py()
                return latest
        except (IndexError, pa.ArrowException, OSError, KeyError):
            return None

    def gaps(self, cell: str) -> list[FileGap]:
        """Return the sequences of a cell that no file contains, after the retention limit."""
        lines = list(self._manifest(cell))
        retired = self._json(self.root / "cells" / f"{cell}.json").get("retired_sequence")
        before = retired if isinstance(retired, int) else 0
        held = [(file.first, file.last) for file in self.files if file.cell == cell]
        end = max([before, *(last for _, last in held), *(line["last_sequence"] for line in lines)])
        gaps = []
        for first, last in [*held, (end + 1, end)]:
            if first > before + 1:
                gaps.append(_gap(cell, before + 1, first - 1, lines))
            before = max(before, last)
        return gaps

    def retired_cells(self) -> set[str]:
        """Return the cells that an operator declared gone and that have no later event."""
        said = {path.stem: self._json(path).get("last_sequence") for path in (self.root / "retired").glob("*.json")}
        last = {file.cell: file.last for file in self.files}
        return {cell for cell, at in said.items() if isinstance(at, int) and last.get(cell, 0) <= at}

    def snapshot(
        self, cell: str, ids: pa.Array[Any], topics: Sequence[str], undone: Sequence[Undone]
    ) -> MessageSnapshot | None:
        """Return the content of the newest complete snapshot of a cell, ignoring snapshots of undone events."""
        found = (self.root / "snapshots" / f"cell={cell}").glob("*/manifest.json")
        standing = (
            each.parent
            for each in found
            if each.parent.name.isdigit() and not any(one.has(cell, _number(each.parent)) for one in undone)
        )
        newest = max(standing, key=_number, default=None)
        if newest is None:
            return None
        taken_ms = self._json(newest / "manifest.json").get("taken_ms")
        of_topics = pa.array(topics, pa.string())
        return MessageSnapshot(
            cell=cell,
            sequence=_number(newest),
            taken_ms=taken_ms if isinstance(taken_ms, int) else None,
            entries=self.matching(newest / "entries.parquet", "message_id", ids),
            progress=self.matching(newest / "progress.parquet", "topic", of_topics),
            queues=self.matching(newest / "queues.parquet", "topic", of_topics),
        )

    def _manifest(self, cell: str) -> Iterator[Row]:
        for path in _within(self.root / "manifest" / f"cell={cell}", "*.jsonl"):
            whole, _, _ = path.read_text(encoding="utf-8", errors="replace").rpartition(
                "\n"
            )  # the rest is still being written
            for number, line in enumerate(whole.split("\n"), start=1):
                told = _object(line)
                if isinstance(told.get("path"), str) and all(isinstance(told.get(name), int) for name in _OF_LINE):
                    yield told
                elif line:
                    self._note(path, f"line {number} cannot be read")

    def _json(self, path: Path) -> Row:
        """Return the object in a file; empty if the file does not exist or is unreadable, which is recorded."""
        if not path.is_file():
            return {}
        told = _object(path.read_text(encoding="utf-8", errors="replace"))
        if not told:
            self._note(path, "cannot be read")
        return told


def packed_forms(message_id: str) -> list[bytes]:
    """Return the stored forms of an id: text, and also 17 bytes if it is 34 hex digits in any case."""
    forms = {b"\0" + message_id.encode("utf-8", "surrogateescape")}
    if _HEX_ID.fullmatch(message_id):
        forms |= {bytes.fromhex(message_id), b"\0" + message_id.upper().encode(), b"\0" + message_id.lower().encode()}
    return sorted(forms)


def unpacked(packed: bytes | None) -> str | None:
    """Return a packed id as text."""
    if packed is None:
        return None
    if packed[:1] == b"\0":
        try:
            return packed[1:].decode()
        except UnicodeDecodeError:  # uid of a spool entry, 16 arbitrary bytes
            pass
    return packed.hex().upper()


def _number(path: Path) -> int:
    return int(path.name)


def _first(line: Row) -> int:
    return int(line["first_sequence"])


def _gap(cell: str, first: int, last: int, lines: Sequence[Row]) -> FileGap:
    missing = [line["path"] for line in lines if line["first_sequence"] <= last and line["last_sequence"] >= first]
    why = f"in the manifest, but not there: {missing[0]}" if missing else "in no file, and in no manifest"
    below = max((line for line in lines if line["last_sequence"] < first), key=_first, default=None)
    above = min((line for line in lines if line["first_sequence"] > last), key=_first, default=None)
    after_ms = below["last_at_ms"] if below else None
    before_ms = above["first_at_ms"] if above else None
    return FileGap(cell=cell, first=first, last=last, why=why, after_ms=after_ms, before_ms=before_ms)


def _within(root: Path, pattern: str) -> list[Path]:
    """Return the files that match, without the hidden and temporary ones that docs/reference/trail.md excludes."""
    return sorted(
        path
        for path in root.rglob(pattern)
        if not any(part.startswith((".", "_")) or part.endswith(".tmp") for part in path.relative_to(root).parts)
    )


def _object(text: str) -> Row:
    """Return a JSON object; an empty one if the text is not a JSON object."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def _is_event(row: Row) -> bool:
    has_numbers = all(isinstance(row.get(name), int) for name in ("sequence", "boot", "at_ms"))
    return has_numbers and all(name in row for name, _ in EVENTS)


@contextmanager
def _telling(progress: TextIO, told: Callable[[], str]) -> Iterator[None]:
    """Write a progress line once a second during the block. A block shorter than a second writes nothing."""
    is_over = threading.Event()

    def tell() -> None:
        while not is_over.wait(_TOLD_EVERY_S):
            progress.write(f"{told()}\n")
            progress.flush()

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        is_over.set()
        teller.join()
