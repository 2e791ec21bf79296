"""Forged audit trails: what daemons and spools would have left, simulated, with the truth about every message beside.

``forge(path, messages=20_000, seed=1)`` writes a whole trail in the format of docs/reference/trail.md. The truth comes
from the simulation's own objects, never from the events it wrote.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.forges.cells.cell import WINDOW_MS, Counts, Shape
from support.forges.cells.daemon import ForgedDaemon
from support.forges.cells.spool import ForgedSpool

Row = dict[str, Any]
BOUNDS_MS = tuple(step * 10**power for power in range(7) for step in (1, 2, 5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What an audit of the trail must say, in the rows of report.json; columns that count nothing may be left out.

    ``lateness_ms`` holds every single lateness by (window, topic).
    """

    path: Path
    watermark_ms: int
    events: int
    cells: list[Row]
    scheduled: list[Row]
    fired: list[Row]
    spooled: list[Row]
    retries: list[Row]
    dead: list[Row]
    lateness: list[Row]
    lateness_ms: Mapping[tuple[int, str], list[int]]


def forge(path: Path, *, messages: int, seed: int, **shape: Any) -> Truth:  # noqa: ANN401 - the fields of Shape
    """Write a trail of ``messages`` messages in ``path`` and return the truth about it; ``shape`` are fields of Shape.

    A tenth of the messages goes to the spools, if there are any. Dead letters that are redriven come on top.
    """
    chosen = Shape(**shape)
    of_spools = messages // 10 if chosen.spools else 0
    daemons = [
        ForgedDaemon(path, f"daemon-{number}", chosen, seed, count)
        for number, count in enumerate(_shares(messages - of_spools, chosen.cells))
    ]
    one_queue = dataclasses.replace(chosen, rows_per_file=max(10, chosen.rows_per_file // 4))
    spools = [
        ForgedSpool(path, f"spool-{number}", one_queue, seed, count)
        for number, count in enumerate(_shares(of_spools, chosen.spools))
    ]
    for cell in [*daemons, *spools]:
        cell.run()
    return _truth(path, chosen, daemons, spools)


def _shares(count: int, parts: int) -> list[int]:
    return [count // parts + (number < count % parts) for number in range(parts)]


def _truth(path: Path, shape: Shape, daemons: list[ForgedDaemon], spools: list[ForgedSpool]) -> Truth:
    cells = [*daemons, *spools]
    fired, spooled, ladder, dead = Counts(), Counts(), Counts(), Counts()
    for daemon in daemons:
        for message in daemon.messages:
            for way in message.ways.values():
                fired.add((way.topic, way.group), "fired")
                fired.add((way.topic, way.group), way.state)
        for topic, group, attempt, what in daemon.ladder:
            ladder.add((topic, group, attempt), what)
        for death in daemon.deaths:
            key = (death["topic"], death["group"], death["reason"])
            dead.add(key, "count")
            if death["fate"]:
                dead.add(key, death["fate"])
    for spool in spools:
        for kept in spool.kept:
            spooled.add((spool.name, kept.type_name), "spooled")
            spooled.add((spool.name, kept.type_name), {"waiting": "pending"}.get(kept.state, kept.state))
    scheduled, lateness_ms = _scheduled(daemons)
    return Truth(
        path=path,
        watermark_ms=min([cell.last_at_ms for cell in cells], default=shape.start_ms),
        events=sum(cell.sequence for cell in cells),
        cells=[
            {
                "cell": cell.name,
                "first_sequence": 1,
                "last_sequence": cell.sequence,
                "events": cell.sequence,
                "runs": cell.boot,
                "kills": cell.kills,
                "is_closed": shape.is_closed,
                "snapshot_sequence": cell.snapshots[-1].sequence if cell.snapshots else None,
            }
            for cell in cells
        ],
        scheduled=scheduled,
        fired=_rows(fired, ("topic", "group")),
        spooled=_rows(spooled, ("cell", "type")),
        retries=_rows(ladder, ("topic", "group", "attempt")),
        dead=_rows(dead, ("topic", "group", "reason")),
        lateness=_histogram(lateness_ms),
        lateness_ms=lateness_ms,
    )


def _scheduled(daemons: Iterable[ForgedDaemon]) -> tuple[list[Row], dict[tuple[int, str], list[int]]]:
    counts = Counts()
    lateness_ms: dict[tuple[int, str], list[int]] = {}
    for message in (message for daemon in daemons for message in daemon.messages):
        if message.state == "for a group":
            continue
        if message.due_ms is None:
            counts.add((message.accepted_at_ms // WINDOW_MS * WINDOW_MS, message.topic), "accepted_at_once")
            continue
        key = (message.due_ms // WINDOW_MS * WINDOW_MS, message.topic)
        counts.add(key, "scheduled")
        counts.add(key, {"waiting": "pending"}.get(message.state, message.state))
        if message.state == "fired":
            lateness_ms.setdefault(key, []).append(message.fired_at_ms - message.due_ms)
    return _rows(counts, ("window_start_ms", "topic")), lateness_ms


def _histogram(lateness_ms: Mapping[tuple[int, str], list[int]]) -> list[Row]:
    found: Counter[tuple[str, int]] = Counter()
    for (_, topic), late in lateness_ms.items():
        found.update((topic, bound_of(each)) for each in late)
    return [{"topic": topic, "upper_ms": upper, "count": count} for (topic, upper), count in sorted(found.items())]


def bound_of(lateness_ms: int) -> int:
    """Return the upper bound of the bar of the histogram that a lateness belongs to."""
    return next((bound for bound in (0, *BOUNDS_MS) if lateness_ms <= bound), -1)


def _rows(counts: Counts, names: tuple[str, ...]) -> list[Row]:
    return [dict(zip(names, key, strict=True)) | counts.rows[key] for key in sorted(counts.rows)]


def same_ledger(
    expected: Iterable[Mapping[str, Any]], actual: Iterable[Mapping[str, Any]], keys: tuple[str, ...]
) -> list[str]:
    """Return how two ledgers differ in their counts, a line each. Zeros need not be said; neither do percentiles."""
    sides = [{tuple(row[key] for key in keys): row for row in rows} for rows in (expected, actual)]
    said: list[str] = []
    for key in sorted(sides[0].keys() | sides[1].keys(), key=str):
        mine, theirs = sides[0].get(key, {}), sides[1].get(key, {})
        names = sorted(name for name in mine.keys() | theirs.keys() - {*keys} if not name.startswith("lateness_"))
        pairs = [(name, mine.get(name) or 0, theirs.get(name) or 0) for name in names if name not in keys]
        said += [f"{key} {name}: {this} expected, {that} found" for name, this, that in pairs if this != that]
    return said
