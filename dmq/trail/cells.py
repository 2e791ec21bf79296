"""Contents of a trail, from its manifests and the names of its files. No file of events is opened."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from dmq.trail.manifest import CellFile, Layout, read_cell, scan_manifest, sequences_of
from dmq.trail.snapshots import list_snapshots


class SnapshotOf(NamedTuple):
    """A snapshot, from its manifest."""

    sequence: int
    taken_at_ms: int
    entries: int
    path: str


class CellOf(NamedTuple):
    """Contents of the trail for one cell. Sequences and times are 0 if there are none."""

    cell: str
    role: str
    host: str
    retired_sequence: int
    first_sequence: int
    last_sequence: int
    first_at_ms: int
    last_at_ms: int
    events: int
    files: int
    unlisted: int  # files that are in no manifest yet
    size_bytes: int
    gaps: tuple[tuple[int, int], ...]
    snapshots: tuple[SnapshotOf, ...]
    damaged: tuple[str, ...]  # unreadable cell file and manifest lines

    @property
    def missing(self) -> int:
        """Number of events in the gaps."""
        return sum(last - first + 1 for first, last in self.gaps)

    def plain(self) -> dict[str, object]:
        """Return the contents as JSON values."""
        return {
            **self._asdict(),
            "missing": self.missing,
            "gaps": [{"first_sequence": first, "last_sequence": last} for first, last in self.gaps],
            "snapshots": [each._asdict() for each in self.snapshots],
        }


def cells_of(trail: Path) -> list[CellOf]:
    """Return the cells of a trail by name; unreadable lines and files are reported with their cell."""
    names = {path.name.partition("=")[2] for part in _PARTS for path in (trail / part).glob("cell=*")}
    names |= {path.stem for path in (trail / "cells").glob("*.json")}
    return [_cell(trail, name) for name in sorted(names) if not name.startswith((".", "_"))]


_PARTS = ("events", "manifest", "snapshots")


def _cell(trail: Path, name: str) -> CellOf:
    layout = Layout(trail, name)
    scans = [scan_manifest(path) for path in sorted(layout.manifests.glob("????-??-??.jsonl"))]
    listed = [line for scan in scans for line in scan.lines]
    damaged = [why for scan in scans for why in scan.damaged]
    known: CellFile | None = None
    try:
        known = read_cell(layout)
    except ValueError as error:
        damaged.insert(0, str(error))
    spans = {(line.first_sequence, line.last_sequence) for line in listed}
    paths = {line.path for line in listed}
    # A file that is not listed yet is no gap: it is new, or its writer was killed before listing it.
    others = [
        path
        for path in layout.events.glob("date=*/hour=*/*.parquet")
        if sequences_of(path.name) is not None and layout.relative(path) not in paths
    ]
    spans |= {span for path in others if (span := sequences_of(path.name)) is not None}
    retired = known.retired_sequence if known is not None else 0
    return CellOf(
        cell=name,
        role=known.role if known is not None else "",
        host=known.host if known is not None else "",
        retired_sequence=retired,
        first_sequence=min((first for first, _ in spans), default=0),
        last_sequence=max((last for _, last in spans), default=0),
        first_at_ms=min((line.first_at_ms for line in listed), default=0),
        last_at_ms=max((line.last_at_ms for line in listed), default=0),
        events=sum(last - first + 1 for first, last in spans),
        files=len(listed) + len(others),
        unlisted=len(others),
        size_bytes=sum(line.bytes for line in listed) + sum(path.stat().st_size for path in others),
        gaps=tuple(gaps_between(spans, after=retired)),
        snapshots=tuple(
            SnapshotOf(int(manifest["sequence"]), int(manifest["taken_ms"]), int(manifest["entries"]), str(path))
            for path, manifest in list_snapshots(trail, name)
        ),
        damaged=tuple(damaged),
    )


def gaps_between(spans: set[tuple[int, int]], *, after: int) -> list[tuple[int, int]]:
    """Return the missing ranges between ``after`` and the last span, as first and last sequence."""
    gaps: list[tuple[int, int]] = []
    reached = after
    for first, last in sorted(spans):
        if first > reached + 1:
            gaps.append((reached + 1, first - 1))
        reached = max(reached, last)
    return gaps
