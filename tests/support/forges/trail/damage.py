"""Damage to the files of a trail: records and files that are missing, altered or there twice.

Unlike the lies about messages these leave the numbers of the events as they were, so an audit must name what is
missing, and must not call anything lost because of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
from support.forges.trail.bend import Bent
from support.forges.trail.files import (
    Event,
    files_of,
    line_of,
    read_events,
    read_file,
    read_manifest,
    table_of,
    text_of,
    write_manifest,
    write_table,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """What must be found of a damaged cell: exactly these gaps, files (their paths in the trail) and sequences.

    ``touched`` are the messages of the missing records: they alone may be INCONCLUSIVE.
    """

    cell: str
    gaps: tuple[tuple[int, int], ...] = ()
    missing: frozenset[str] = frozenset()
    altered: frozenset[str] = frozenset()
    repeated: frozenset[int] = frozenset()
    touched: frozenset[str] = frozenset()


Damager = Callable[[Path, str, int, int], Damage]


def cut_records(trail: Path, cell: str, count: int, seed: int) -> Damage:
    """Take ``count`` records out of their files and mend manifest and checksums, so that only the numbers tell."""
    return _cut(trail, cell, count, seed, is_mended=True)


def cut_records_unmended(trail: Path, cell: str, count: int, seed: int) -> Damage:
    """Take ``count`` records out of their files behind the manifest's back."""
    return _cut(trail, cell, count, seed, is_mended=False)


def _cut(trail: Path, cell: str, count: int, seed: int, *, is_mended: bool) -> Damage:
    files = {path: read_file(path) for path in files_of(trail, cell)}
    # The first and the last record of a file are in its name, and the very last of the cell shows in nothing else.
    # Without the record of who reads a queue nothing can be said of any message in it.
    inner = [(path, event) for path, events in files.items() for event in events[1:-1] if event.kind != "SUBSCRIBED"]
    chosen = Random(seed).sample(inner, count)
    cut = {event.sequence: event for _, event in chosen}
    changed = {path for path, _ in chosen}
    for path in changed:
        write_table(path, table_of([event for event in files[path] if event.sequence not in cut]))
    if is_mended:
        _mend(trail, cell, changed)
    altered = frozenset() if is_mended else frozenset(path.relative_to(trail).as_posix() for path in changed)
    return Damage(cell=cell, gaps=ranges_of(cut), altered=altered, touched=_ids(cut.values()))


def remove_files(trail: Path, cell: str, count: int, seed: int) -> Damage:
    """Remove files that the manifest speaks of."""
    return _remove(trail, cell, count, seed, is_told=True)


def remove_files_and_lines(trail: Path, cell: str, count: int, seed: int) -> Damage:
    """Remove files and their lines of the manifest."""
    return _remove(trail, cell, count, seed, is_told=False)


def _remove(trail: Path, cell: str, count: int, seed: int, *, is_told: bool) -> Damage:
    paths = Random(seed).sample(files_of(trail, cell)[1:-1], count)
    events = [event for path in paths for event in read_file(path)]
    names = frozenset(path.relative_to(trail).as_posix() for path in paths)
    for path in paths:
        path.unlink()
    if not is_told:
        write_manifest(trail, cell, [line for line in read_manifest(trail, cell) if line["path"] not in names])
    return Damage(
        cell=cell,
        gaps=ranges_of(event.sequence for event in events),
        missing=names if is_told else frozenset(),
        touched=_ids(events),
    )


def alter_files(trail: Path, cell: str, count: int, seed: int) -> Damage:
    """Change one byte in the middle of files. What they hold cannot be trusted any more."""
    random = Random(seed)
    paths = random.sample(files_of(trail, cell)[1:-1], count)
    touched: list[Event] = []
    for path in paths:
        touched += read_file(path)
        content = bytearray(path.read_bytes())
        content[random.randrange(len(content) // 4, len(content) // 2)] ^= 1 << random.randrange(8)
        path.write_bytes(content)
    names = frozenset(path.relative_to(trail).as_posix() for path in paths)
    return Damage(cell=cell, altered=names, touched=_ids(touched))


def repeat_records(trail: Path, cell: str, count: int, seed: int) -> Damage:
    """Write ``count`` records twice, and mend manifest and checksums."""
    return _repeat(trail, cell, count, seed, is_changed=False)


def repeat_records_changed(trail: Path, cell: str, count: int, seed: int) -> Damage:
    """Write ``count`` records a second time with another time in them, and mend manifest and checksums."""
    return _repeat(trail, cell, count, seed, is_changed=True)


def _repeat(trail: Path, cell: str, count: int, seed: int, *, is_changed: bool) -> Damage:
    files = {path: read_file(path) for path in files_of(trail, cell)}
    inner = [event.sequence for events in files.values() for event in events[1:-1]]
    chosen = frozenset(Random(seed).sample(inner, count))
    changed, touched = set(), []
    for path, events in files.items():
        rows = []
        for event in events:
            rows.append(event)
            if event.sequence in chosen:
                rows.append(event._replace(at_ms=event.at_ms + 1) if is_changed else event)
                touched.append(event)
                changed.add(path)
        if path in changed:
            write_table(path, table_of(rows))
    _mend(trail, cell, changed)
    return Damage(cell=cell, repeated=chosen, touched=_ids(touched))


def cut_tail(trail: Path, cell: str, count: int, seed: int) -> Damage:
    """Cut the last ``count`` records up to the newest snapshot, and all behind it; the snapshot tells of them."""
    bent = Bent(trail, cell)
    last = bent.snapshot_sequence
    kept = [event for event in bent.events if event.sequence <= last - count]
    cut = [event for event in bent.events if event.sequence > last - count]
    for path in files_of(trail, cell):
        events = read_file(path)
        if events[-1].sequence > kept[-1].sequence:
            path.unlink()
            rest = [event for event in events if event.sequence <= kept[-1].sequence]
            if rest:
                name = f"{rest[0].sequence:020}-{rest[-1].sequence:020}.parquet"
                write_table(path.with_name(name), table_of(rest))
    _mend(trail, cell, set(files_of(trail, cell)))
    return Damage(cell=cell, gaps=((kept[-1].sequence + 1, last),), touched=_ids(cut))


def change_column(path: Path, column: str, kind: pa.DataType | None) -> None:
    """Give a column of a file another type, or remove it."""
    table = pq.read_table(path, partitioning=None)
    at = table.column_names.index(column)
    changed = table.remove_column(at)
    if kind is not None:
        changed = changed.add_column(at, column, table[column].cast(kind))
    pq.write_table(changed, path)


def vouch_for(trail: Path, cell: str, changed: set[Path]) -> None:
    """Forge the lines of changed files in the manifest: their sizes and checksums."""
    lines = read_manifest(trail, cell)
    for line in lines:
        if (path := trail / line["path"]) in changed:
            content = path.read_bytes()
            line |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_manifest(trail, cell, lines)


def _mend(trail: Path, cell: str, changed: set[Path]) -> None:
    """Write the lines of changed files anew, and leave out those of files that are gone."""
    lines = []
    known = {line["path"]: line for line in read_manifest(trail, cell)}
    for path in files_of(trail, cell):
        name = path.relative_to(trail).as_posix()
        if path in changed or name not in known:
            columns = pq.ParquetFile(path).read(columns=["sequence", "at_ms"]).to_pydict()
            sequences, times = columns["sequence"], columns["at_ms"]
            known[name] = line_of(
                trail, path, cell, (sequences[0], sequences[-1]), (times[0], times[-1]), len(sequences)
            )
        lines.append(known[name])
    write_manifest(trail, cell, lines)


def ranges_of(sequences: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return numbers as ranges, first and last of each."""
    ranges: list[tuple[int, int]] = []
    for sequence in sorted(sequences):
        if ranges and ranges[-1][1] == sequence - 1:
            ranges[-1] = (ranges[-1][0], sequence)
        else:
            ranges.append((sequence, sequence))
    return tuple(ranges)


def _ids(events: Iterable[Event]) -> frozenset[str]:
    return frozenset(text_of(event.message_id) for event in events if event.message_id is not None)


def is_readable(trail: Path, cell: str) -> bool:
    """Say whether every file of a cell can be read at all."""
    try:
        return sum(1 for _ in read_events(trail, cell)) > 0
    except (OSError, ValueError):
        return False


DAMAGERS: Mapping[str, Damager] = {
    "cut_records": cut_records,
    "cut_records_unmended": cut_records_unmended,
    "remove_files": remove_files,
    "remove_files_and_lines": remove_files_and_lines,
    "alter_files": alter_files,
    "repeat_records": repeat_records,
    "repeat_records_changed": repeat_records_changed,
    "cut_tail": cut_tail,
}
