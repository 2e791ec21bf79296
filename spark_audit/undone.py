"""What a store forgot: one that was put back to an earlier state goes on behind the numbers of its trail.

The event ``TAIL_LOST`` says so, of a restored backup as of a disk that lost what was written last. What the events in
between tell of happened, and is not in the store: it counts for nothing that came later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

TAIL_LOST = "TAIL_LOST"


_ALL = 2**63 - 1


class Undone(NamedTuple):
    """The events of a cell, from first to last, that tell of what is not in its store."""

    cell: str
    first: int
    last: int

    def has(self, cell: str, sequence: int) -> bool:
        """Say whether an event is one of them."""
        return cell == self.cell and self.first <= sequence <= self.last


def all_of_cell(cell: str) -> Undone:
    """Return all events of a retired cell: its store is gone."""
    return Undone(cell, 1, _ALL)


def undone_of(events: Iterable[Any]) -> list[Undone]:
    """Return what the stores of cells forgot; ``events`` are rows of any kinds.

    A store may be put back to where it was before it was put back: then that one never happened.
    """
    found: list[Undone] = []
    told = (row for row in events if row["kind"] == TAIL_LOST and row["detail"] is not None and row["due_ms"])
    for row in sorted(told, key=lambda row: (row["cell"], -row["sequence"])):
        if not any(each.has(row["cell"], row["sequence"]) for each in found):
            last = min(row["detail"] + row["due_ms"], row["sequence"]) - 1
            found.append(Undone(row["cell"], row["detail"], last))
    return sorted(found)
