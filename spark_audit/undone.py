"""Undone events: events of a trail whose effects are not in the store, because it was rolled back.

The event ``TAIL_LOST`` records a rollback, by a restored backup or by a disk that lost its last writes. The store then
continues after the sequences of its trail. The undone events happened, but they do not count for later ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

TAIL_LOST = "TAIL_LOST"


_ALL = 2**63 - 1


class Undone(NamedTuple):
    """Range of undone events of a cell, from first to last."""

    cell: str
    first: int
    last: int

    def has(self, cell: str, sequence: int) -> bool:
        """Return True if the event is in the range."""
        return cell == self.cell and self.first <= sequence <= self.last


def all_of_cell(cell: str) -> Undone:
    """Return all events of a retired cell: its store is gone."""
    return Undone(cell, 1, _ALL)


def undone_of(events: Iterable[Any]) -> list[Undone]:
    """Return the undone events of cells; ``events`` are rows of any kinds.

    A store may be rolled back to a state before an earlier rollback. The earlier rollback is then itself undone.
    """
    found: list[Undone] = []
    told = (row for row in events if row["kind"] == TAIL_LOST and row["detail"] is not None and row["due_ms"])
    for row in sorted(told, key=lambda row: (row["cell"], -row["sequence"])):
        if not any(each.has(row["cell"], row["sequence"]) for each in found):
            last = min(row["detail"] + row["due_ms"], row["sequence"]) - 1
            found.append(Undone(row["cell"], row["detail"], last))
    return sorted(found)
