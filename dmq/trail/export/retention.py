"""Retention of a cell's trail: removes whole dates that are older than the configured time.

The order ensures that a kill never looks like a loss. The retired sequence is stored first (``cells/<cell>.json``),
then the manifest of the date is removed, then its files. The next recovery removes the remaining files.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from broker_adapter.runtime.log import LibraryLog
from dmq.store.files.durable import sync_directory
from dmq.trail import manifest
from dmq.trail.manifest import CellFile, Layout, read_manifest

log = LibraryLog("dmq.trail")


def retire(layout: Layout, cell: CellFile, now_ms: int, keep: timedelta) -> CellFile:
    """Remove the dates that ended more than ``keep`` ago; return the updated cell file.

    A date is removed only if no older events, by sequence, remain: a clock that was set back can mix dates. The date
    with the newest events is kept. Raise ``OSError`` or ``ValueError`` if a file cannot be removed or read.
    """
    oldest_kept = f"{datetime.fromtimestamp(now_ms / 1000, UTC) - keep:%Y-%m-%d}"
    dates = sorted(path.stem for path in layout.manifests.glob("????-??-??.jsonl"))
    if not dates or dates[0] >= oldest_kept:
        return cell
    spans: dict[str, tuple[int, int]] = {}
    for date in dates:
        lines, _ = read_manifest(layout.manifest(date))
        if lines:
            spans[date] = lines[0].first_sequence, lines[-1].last_sequence
    gone = _before_all_kept(spans, oldest_kept)
    upto = max((spans[date][1] for date in gone), default=0)
    if upto > cell.retired_sequence:
        cell = replace(cell, retired_sequence=upto)
        manifest.write_cell(layout, cell)
    for date in [each for each in dates if each in gone or (each not in spans and each < oldest_kept)]:
        layout.manifest(date).unlink()
        sync_directory(layout.manifests)
        shutil.rmtree(layout.events / f"date={date}", ignore_errors=True)
        log.info("trail_files_removed", date=date, retired_sequence=cell.retired_sequence)
    return cell


def _before_all_kept(spans: Mapping[str, tuple[int, int]], oldest_kept: str) -> set[str]:
    """Return the dates with only events that precede those of every kept date."""
    newest = max(spans, key=lambda date: spans[date][1], default="")
    kept = {date for date in spans if date >= oldest_kept or date == newest}
    while mixed := {date for date in spans.keys() - kept if spans[date][1] >= min(spans[each][0] for each in kept)}:
        kept |= mixed
    return spans.keys() - kept


class Span(NamedTuple):
    """Date and sequences of a file of events."""

    date: str
    first_sequence: int
    last_sequence: int


def contradiction(retired_sequence: int, left: Sequence[Span]) -> str:
    """Return why retention cannot have removed all events up to ``retired_sequence``; empty if it can.

    The decision is based on the files left. Retention removes whole dates and keeps the newest one. Files that it was
    about to remove may still exist.
    """
    if not retired_sequence:
        return ""
    if all(span.last_sequence <= retired_sequence for span in left):
        return "no event behind it is there, and the newest date is never removed"
    removed = {span.date for span in left if span.first_sequence <= retired_sequence}
    kept = {span.date for span in left if span.last_sequence > retired_sequence}
    if halved := removed & kept:
        return f"it lies inside of {min(halved)}, and dates are removed whole"
    return ""
