"""Trails cut off at their beginning, as the trail's own retention cuts them: many cuts of one trail, in one trail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from support.forges.trail.files import (
    CellWriter,
    Event,
    Snapshot,
    cells_of,
    read_events,
    read_snapshots,
    write_snapshot,
)

_RETIRED_LINE = "f" * 64  # the digest of the line that the first one left continues


def midnights(events: Sequence[Event]) -> list[int]:
    """Return the sequences after which a date can begin: the next event is of a later batch, and of a later time."""
    return [one.sequence for one, other in pairwise(events) if one.at_ms < other.at_ms]


class Cuts:
    """The cells of one trail, to be written cut off. Names are changed so that no cut has anything of another one."""

    def __init__(self, trail: Path) -> None:
        self._roles = {cell: str(about["role"]) for cell, about in cells_of(trail).items()}
        self.events = {cell: list(read_events(trail, cell)) for cell in self._roles}
        self._snapshots = {cell: read_snapshots(trail, cell) for cell in self._roles}

    def write(self, out: Path, name: str, after: Mapping[str, int]) -> None:
        """Write all cells without the events up to a sequence of each, under names that end in ``name``."""
        for cell, sequence in after.items():
            self._write(out, cell, name, sequence, self.events[cell][-1].sequence, ())
            for each in self._snapshots[cell]:
                write_snapshot(out, _renamed_snapshot(each, name))

    def write_steps(self, before: Path, later: Path, after: Mapping[str, int], upto: Mapping[str, int]) -> None:
        """Write the trail as it was before the cut, up to a sequence of each cell, and as it is after the cut.

        Files that are in both are the same.
        """
        for cell in self._roles:
            ends = (after[cell], upto[cell])
            self._write(before, cell, "", 0, upto[cell], ends)
            self._write(later, cell, "", after[cell], self.events[cell][-1].sequence, ends)
            for each in self._snapshots[cell]:
                write_snapshot(later, each)

    def _write(self, out: Path, cell: str, name: str, after: int, upto: int, ends: Sequence[int]) -> None:
        """Write the events of a cell after one sequence and up to another; files end at each of ``ends``."""
        previous = _RETIRED_LINE if after else ""
        writer = CellWriter(out, cell + name, role=self._roles[cell], previous=previous)
        for event in self.events[cell]:
            if after < event.sequence <= upto:
                writer.add(event._replace(**_renamed(event._asdict(), name)))
                if event.sequence in ends:
                    writer.close()
        writer.close(retired_sequence=after)


def _renamed(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {column: row[column] + name for column in ("topic", "group") if row[column] is not None}


def _renamed_snapshot(snapshot: Snapshot, name: str) -> Snapshot:
    def rows(table: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row | _renamed(row, name) for row in table]

    return replace(
        snapshot,
        cell=snapshot.cell + name,
        entries=rows(snapshot.entries),
        progress=rows(snapshot.progress),
        queues=rows(snapshot.queues),
    )
