"""Paths of a trail's files, and its manifests: pure paths and lines, and the syncs that make them durable.

docs/reference/trail.md defines their content. This module reads no Parquet.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from dmq.store.files.durable import make_directory, sync_directory

HOUR_MS = 3_600_000
_NAME = re.compile(r"(\d{20})-(\d{20})\.parquet")
_VERSION = 1

Role = Literal["daemon", "spool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """Line of a manifest: one file of events. ``path`` is relative to the trail.

    ``previous`` is the SHA-256 of the previous line of the cell, by sequence, as stored in its manifest. It is empty
    for the first line, and ``None`` for lines of earlier builds, which have no such field.
    """

    path: str
    cell: str
    first_sequence: int
    last_sequence: int
    rows: int
    first_at_ms: int
    last_at_ms: int
    bytes: int
    sha256: str
    version: int = _VERSION
    previous: str | None = None

    @property
    def date(self) -> str:
        """Date in its path."""
        return date_of(Path(self.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFile:
    """Content of ``cells/<cell>.json``."""

    cell: str
    role: str
    host: str
    retired_sequence: int = 0
    version: int = _VERSION


def encode_line(listed: Listed) -> bytes:
    """Return a manifest line as bytes, with its line feed."""
    known = {name: value for name, value in asdict(listed).items() if name != "previous" or value is not None}
    return json.dumps(known).encode() + b"\n"


class Layout:
    """Paths of one cell in a trail."""

    def __init__(self, trail: Path, cell: str) -> None:
        self.trail = trail
        self.cell = cell
        self.events = trail / "events" / f"cell={cell}"
        self.manifests = trail / "manifest" / f"cell={cell}"
        self.cell_file = trail / "cells" / f"{cell}.json"
        self.tail: tuple[int, str] | None = None  # last sequence and digest of the newest line, once read or written

    def hour(self, at_ms: int) -> Path:
        """Return the directory of the events committed in the hour of ``at_ms``."""
        at = datetime.fromtimestamp(at_ms // 1000, UTC)
        return self.events / f"date={at:%Y-%m-%d}" / f"hour={at:%H}"

    def manifest(self, date: str) -> Path:
        """Return the path of the manifest of a date."""
        return self.manifests / f"{date}.jsonl"

    def relative(self, path: Path) -> str:
        """Return a path relative to the trail, as in manifests."""
        return path.relative_to(self.trail).as_posix()


def file_name(first_sequence: int, last_sequence: int) -> str:
    """Return the name of a file of events."""
    return f"{first_sequence:020}-{last_sequence:020}.parquet"


def sequences_of(name: str) -> tuple[int, int] | None:
    """Return the first and the last sequence in the name of a file of events; ``None`` if it is not such a name."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2])) if found is not None else None


def date_of(path: Path) -> str:
    """Return the date in the path of a file of events."""
    return path.parent.parent.name.removeprefix("date=")


class ManifestScan(NamedTuple):
    """Valid lines of a manifest, its size without a torn last line, and the reason for each invalid complete line."""

    lines: list[Listed]
    whole_bytes: int
    damaged: list[str]


def scan_manifest(path: Path) -> ManifestScan:
    """Read a manifest around invalid lines; raise ``OSError`` if there is no such file."""
    content = path.read_bytes()
    found = ManifestScan([], content.rfind(b"\n") + 1, [])
    for number, line in enumerate(content[: found.whole_bytes].splitlines(), start=1):
        try:
            found.lines.append(Listed(**json.loads(line)))
        except (ValueError, TypeError) as error:
            found.damaged.append(f"{path}, line {number}: {error}")
    return found


def read_manifest(path: Path) -> tuple[list[Listed], int]:
    """Return the lines of a manifest and their size in bytes. Bytes after that size are a torn last line.

    Raise ``ValueError`` for an invalid complete line, ``OSError`` if there is no such file.
    """
    found = scan_manifest(path)
    if found.damaged:
        raise ValueError(found.damaged[0])
    return found.lines, found.whole_bytes


def append(layout: Layout, listed: Listed) -> None:
    """Append a line to the manifest of its date, durable on return. The line gets the digest of the previous one."""
    listed = replace(listed, previous=_digest_before(layout, listed.first_sequence))
    path = layout.manifest(listed.date)
    is_new = not path.exists()
    if is_new:
        make_directory(path.parent)
    with path.open("ab") as file:
        file.write(encode_line(listed))
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        sync_directory(path.parent)
    layout.tail = listed.last_sequence, _digest_of(encode_line(listed))


def _digest_before(layout: Layout, first_sequence: int) -> str:
    """Return the digest of the last line before a sequence; empty if there is none."""
    if layout.tail is not None and layout.tail[0] < first_sequence:
        return layout.tail[1]
    newest = 0, ""
    for path in layout.manifests.glob("????-??-??.jsonl"):
        for line in path.read_bytes().splitlines(keepends=True):
            last = int(json.loads(line)["last_sequence"])
            if newest[0] < last < first_sequence:
                newest = last, _digest_of(line)
    return newest[1]


def _digest_of(line: bytes) -> str:
    return hashlib.sha256(line.rstrip(b"\n")).hexdigest()


def read_cell(layout: Layout) -> CellFile | None:
    """Return the cell file, or ``None`` if there is none; raise ``ValueError`` if it is invalid."""
    try:
        return CellFile(**json.loads(layout.cell_file.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{layout.cell_file}: {error}") from error


def write_cell(layout: Layout, cell: CellFile) -> None:
    """Replace the cell file, durable on return."""
    make_directory(layout.cell_file.parent)
    part = layout.cell_file.with_name(layout.cell_file.name + ".tmp")
    with part.open("wb") as file:
        file.write(json.dumps(asdict(cell)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(layout.cell_file)
    sync_directory(layout.cell_file.parent)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
