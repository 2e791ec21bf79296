"""Removing whole dates of a cell's trail that are older than it is kept.

In this order, so that a kill in between never looks like a loss: what is retired is said first (``cells/<cell>.json``),
then the manifest of the date goes, then its files. Files that are left then are removed by the next recovery.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from broker_adapter.log import LibraryLog
from dmq.audit import manifest
from dmq.audit.manifest import CellFile, Layout, read_manifest
from dmq.store.durable import sync_directory

log = LibraryLog("dmq.audit")


def retire(layout: Layout, cell: CellFile, now_ms: int, keep: timedelta) -> CellFile:
    """Remove the dates that ended more than ``keep`` ago, oldest first; return what is known of the cell then.

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
    for date in [each for each in dates if each < oldest_kept]:
        last = spans.pop(date, (0, 0))[1]
        if not spans or last >= min(first for first, _ in spans.values()):
            break
        if last > cell.retired_sequence:
            cell = replace(cell, retired_sequence=last)
            manifest.write_cell(layout, cell)
        layout.manifest(date).unlink()
        sync_directory(layout.manifests)
        shutil.rmtree(layout.events / f"date={date}", ignore_errors=True)
        log.info("trail_retired", date=date, retired_sequence=cell.retired_sequence)
    return cell
