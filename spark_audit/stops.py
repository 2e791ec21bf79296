"""Stops of a cell's process: the time between the last event of one run and the first event of the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Place = tuple[str, int]  # cell and sequence


class Stop(NamedTuple):
    """One stop. After a kill it starts at the last event, which is at most a minute before the kill."""

    cell: str
    from_ms: int
    to_ms: int
    is_killed: bool

    def delayed(self, due_ms: int, fired_ms: int) -> bool:
        """Return True if the process was down at a time between due time and delivery."""
        return self.from_ms <= fired_ms and self.to_ms >= due_ms


def last_of_runs(events: Iterable[Any]) -> set[Place]:
    """Return the places of the last events of all runs except the newest. ``events`` are rows of any kinds."""
    return {(row["cell"], row["sequence"] - 1) for row in events if row["kind"] == "OPENED" and row["sequence"] > 1}


def stops_of(events: Iterable[Any], ends_ms: Mapping[Place, int]) -> list[Stop]:
    """Return the stops, sorted by cell and time. ``ends_ms`` are the known times of ``last_of_runs``."""
    rows = list(events)
    closed = {(row["cell"], row["sequence"]) for row in rows if row["kind"] == "CLOSED"}
    found = []
    for row in rows:
        end = row["cell"], row["sequence"] - 1
        if row["kind"] == "OPENED" and end in ends_ms:
            found.append(Stop(row["cell"], ends_ms[end], row["at_ms"], end not in closed))
    return sorted(found)
