"""Removing whole dates of a cell's trail that are older than it is kept.

In this order, so that a kill in between never looks like a loss: what is retired is said first (``cells/<cell>.json``),
then the manifest of the date goes, then its files. Files that are left then are removed by the next recovery.
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
    """Remove the dates that ended more than ``keep`` ago; return what is known of the cell then.

    A date goes only when nothing older stays, by the sequences, which a clock that was set back can mix. The date with
    the newest events stays. OSError or ValueError if something cannot be removed, or read.
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
        log.info("trail_retired", date=date, retired_sequence=cell.retired_sequence)
    return cell


def _before_all_kept(spans: Mapping[str, tuple[int, int]], oldest_kept: str) -> set[str]:
    """Return the dates all of whose events lie before those of every date that stays."""
    newest = max(spans, key=lambda date: spans[date][1], default="")
    kept = {date for date in spans if date >= oldest_kept or date == newest}
    while mixed := {date for date in spans.keys() - kept if spans[date][1] >= min(spans[each][0] for each in kept)}:
        kept |= mixed
    return spans.keys() - kept


class Span(NamedTuple):
    """The date of a file of events, and what is in it."""

    date: str
    first_sequence: int
    last_sequence: int


def contradiction(retired_sequence: int, left: Sequence[Span]) -> str:
    """Say why retention cannot have removed all up to a sequence, by what is left; empty: it can.

    It removes whole dates, and leaves the newest. What it was about to remove may still be there.
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
