"""What the forged cells have in common: a clock of their own, runs that end, and events with numbers."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from support.forges.trail.files import CellWriter, Event, Snapshot, write_snapshot

HEARTBEAT_MS = 45_000
WINDOW_MS = 600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a forged trail looks. Shares are of messages; ``span_ms`` is how long messages are accepted."""

    cells: int = 2
    spools: int = 1
    topics: int = 3
    queues: int = 4
    start_ms: int = 1_795_248_000_000 - 43 * 60_000  # 43 minutes before a full hour, an hour before midnight UTC
    span_ms: int = 2 * 3_600_000
    rest_ms: int = 300_000  # after the last accepted message
    delay_ms_max: int = 1_500_000
    kills: int = 2
    stops: int = 1
    is_closed: bool = False  # the last run ended in order
    snapshots: int = 1  # the last one at the end of the trail, the others in the middle
    rows_per_file: int = 5_000
    immediate: float = 0.25
    recalled: float = 0.02
    text_ids: float = 0.2
    failing: float = 0.12
    attempts_max: int = 4
    expiring: bool = True
    filtered: float = 0.1
    with_late_group: bool = True
    with_stalled_group: bool = True
    with_undertaker: bool = True  # a group that reads the dead letters of another one


@dataclass(slots=True)
class Counts:
    """Counters by key and column."""

    rows: dict[tuple[Any, ...], dict[str, int]] = field(default_factory=dict)

    def add(self, key: tuple[Any, ...], column: str, count: int = 1) -> None:
        """Count something."""
        row = self.rows.setdefault(key, {})
        row[column] = row.get(column, 0) + count


class ForgedCell:
    """A process of its own time: actions in order, runs, heartbeats. What it does is up to its children."""

    def __init__(self, trail: Path, name: str, role: str, shape: Shape, seed: int) -> None:
        self.trail, self.name, self.shape = trail, name, shape
        self.random = Random(f"{seed}/{name}")
        self.writer = CellWriter(trail, name, role=role, rows_per_file=shape.rows_per_file)
        self.sequence, self.boot, self.now_ms, self.entries = 0, 0, shape.start_ms, 0
        self.end_ms = shape.start_ms + shape.span_ms + shape.rest_ms
        self.last_at_ms, self.kills = shape.start_ms, 0
        self.snapshots: list[Snapshot] = []
        self._actions: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self._up_ms = shape.start_ms

    def at(self, at_ms: int, action: Callable[..., None], *values: Any) -> None:  # noqa: ANN401 - handed on as they are
        """Do something at a time, or once the cell is up again."""
        self._number += 1
        heapq.heappush(self._actions, (at_ms, self._number, action, values))

    def emit(self, kind: str, **columns: Any) -> int:  # noqa: ANN401 - the columns of an event
        """Write the next event and return its number."""
        self.sequence += 1
        self.last_at_ms = self.now_ms
        self.writer.add(Event(self.sequence, self.boot, kind, self.now_ms, **columns))
        return self.sequence

    def next_entry(self) -> int:
        """Return a number that no entry of the store had."""
        self.entries += 1
        return self.entries

    def run(self) -> None:
        """Live from the start to the end, and write everything."""
        shape = self.shape
        self._open(is_first=True)
        ways = ["kill"] * shape.kills + ["stop"] * shape.stops
        self.random.shuffle(ways)
        for number, way in enumerate(ways, start=1):
            at_ms = shape.start_ms + number * shape.span_ms // (len(ways) + 1)
            self.at(at_ms, self._go_down, way == "kill", at_ms + self.random.randint(500, 20_000))
        for number in range(1, shape.snapshots):
            self.at(shape.start_ms + number * shape.span_ms // shape.snapshots + 7, self._snapshot)
        self.at(shape.start_ms + HEARTBEAT_MS, self._beat)
        while self._actions and self._actions[0][0] < self.end_ms:
            at_ms, _, action, values = heapq.heappop(self._actions)
            self.now_ms = max(at_ms, self._up_ms, self.now_ms)
            action(*values)
        self.now_ms = max(self.end_ms, self.now_ms)
        self.emit("HEARTBEAT")
        if shape.snapshots:
            self._snapshot()
        if shape.is_closed:
            self.emit("CLOSED")
        self.writer.close()

    def opened(self) -> None:
        """What a new run does first."""

    def contents(self, snapshot: Snapshot) -> None:
        """Fill in what the store holds now."""

    def _open(self, *, is_first: bool = False) -> None:
        self.boot += 1
        self.emit("OPENED")
        if not is_first:
            self.opened()

    def _go_down(self, is_kill: bool, up_ms: int) -> None:
        if is_kill:
            self.kills += 1
        else:
            self.emit("CLOSED")
        self.now_ms = self._up_ms = up_ms
        self._open()

    def _beat(self) -> None:
        self.emit("HEARTBEAT")
        self.at(self.now_ms + HEARTBEAT_MS, self._beat)

    def _snapshot(self) -> None:
        snapshot = Snapshot(self.name, self.sequence, self.boot, self.now_ms)
        self.contents(snapshot)
        self.snapshots.append(snapshot)
        write_snapshot(self.trail, snapshot)
