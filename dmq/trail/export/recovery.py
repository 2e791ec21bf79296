"""Recovery of a cell's trail, on opening and after every failure: finds its content and finishes interrupted work.

Unexpected files are renamed with the prefix ``_unexpected-``, and never removed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from broker_adapter.runtime.log import LibraryLog
from dmq.store.files.durable import sync_directory, sync_file
from dmq.trail import manifest
from dmq.trail.export.retention import Span, contradiction
from dmq.trail.manifest import CellFile, Layout, Listed, read_manifest, sequences_of

log = LibraryLog("dmq.trail")

_TAKEN_TRIES = 1000


class RecoveredTrail(NamedTuple):
    """Last exported sequence of a cell, 0 if there is none, and its cell file."""

    last_sequence: int
    cell: CellFile


def recover(layout: Layout, role: manifest.Role, host: str) -> RecoveredTrail:
    """Repair a cell's trail and return its state; raise ``OSError`` if it cannot be read or written."""
    layout.tail = None
    lines, broken = _manifests(layout)
    listed = {line.path for line in lines}
    cell = _cell(layout, role, host, lines)
    last = max((cell.retired_sequence, *(line.last_sequence for line in lines)))
    for path in _files(layout):
        if path.name.endswith(".tmp"):
            path.unlink(missing_ok=True)
            continue
        found = sequences_of(path.name)
        if found is None:
            _put_aside(path, "not the name of an event file")
        elif found[1] <= cell.retired_sequence and layout.relative(path) not in listed:
            if lines:  # retention was killed after it removed the manifest
                path.unlink(missing_ok=True)
            else:
                _put_aside(path, "it is said to be removed, and no manifest is left that says what stays")
    for path in sorted(_files(layout), key=lambda each: each.name):
        found = sequences_of(path.name)
        if found is None or layout.relative(path) in listed:
            continue
        if found[0] != last + 1 and manifest.date_of(path) not in broken:
            _put_aside(path, f"it is in no manifest, and {last + 1} is the next event")
            continue
        taken = _take_in(layout, path, found)
        if taken is not None:
            last = max(last, taken.last_sequence)
    return RecoveredTrail(last, cell)


def _cell(layout: Layout, role: manifest.Role, host: str, lines: Sequence[Listed]) -> CellFile:
    """Return the cell file; rewrite it if it cannot be read or its retired sequence contradicts the remaining files.

    These are known from the manifests or, without any, from the names of the files. A lost retired sequence is the one
    before the first remaining event: retention removes the oldest dates.
    """
    layout.cell_file.with_name(layout.cell_file.name + ".tmp").unlink(missing_ok=True)
    try:
        known = manifest.read_cell(layout)
    except ValueError as error:
        _put_aside(layout.cell_file, str(error))
        known = None
    left = [Span(line.date, line.first_sequence, line.last_sequence) for line in lines] or [
        Span(manifest.date_of(path), *found) for path in _files(layout) if (found := sequences_of(path.name))
    ]
    if known is not None and (why := contradiction(known.retired_sequence, left)):
        _put_aside(layout.cell_file, f"retired_sequence is {known.retired_sequence}: {why}")
        known = None
    derived = min((span.first_sequence for span in left), default=1) - 1
    retired = known.retired_sequence if known is not None else derived
    cell = CellFile(cell=layout.cell, role=role, host=host, retired_sequence=retired)
    if cell != known:
        manifest.write_cell(layout, cell)
    return cell


def _manifests(layout: Layout) -> tuple[list[Listed], set[str]]:
    """Return the lines of all manifests, and the dates with an invalid manifest.

    Torn last lines are cut. An invalid manifest is put aside, and rebuilt from the files of its date.
    """
    found: list[Listed] = []
    broken: set[str] = set()
    for path in sorted(layout.manifests.glob("*.jsonl")):
        if path.name.startswith("_"):
            continue
        try:
            lines, whole_bytes = read_manifest(path)
        except ValueError as error:
            _put_aside(path, str(error))
            broken.add(path.stem)
            continue
        if whole_bytes < path.stat().st_size:
            log.warning("trail_manifest_cut", path=str(path), cut_bytes=path.stat().st_size - whole_bytes)
            os.truncate(path, whole_bytes)
            sync_file(path)
        found += lines
    return found, broken


def _files(layout: Layout) -> Iterator[Path]:
    for hour in sorted(layout.events.glob("date=*/hour=*")):
        for path in sorted(hour.iterdir()):
            if path.name[0] not in "._":
                yield path


def _take_in(layout: Layout, path: Path, found: tuple[int, int]) -> Listed | None:
    from dmq.trail.files import verify_events  # pyarrow is only needed for unlisted files

    try:
        listed = verify_events(layout, path, *found)
    except ValueError as error:
        _put_aside(path, str(error))
        return None
    sync_directory(path.parent)
    layout.tail = None  # its sequence may be between existing lines
    manifest.append(layout, listed)
    layout.tail = None
    log.info("trail_file_adopted", path=listed.path, rows=listed.rows)
    return listed


def _put_aside(path: Path, why: str) -> None:
    names = (f"_unexpected-{path.name}" + (f".{number}" if number else "") for number in range(_TAKEN_TRIES))
    aside = next(each for name in names if not (each := path.with_name(name)).exists())
    path.rename(aside)
    sync_directory(path.parent)
    log.error("trail_file_unexpected", path=str(path), why=why, now=aside.name)
