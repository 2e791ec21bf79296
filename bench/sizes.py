"""What waiting costs against how many wait: from ten thousand to ten million, filled in process."""

from __future__ import annotations

import shutil
from typing import Any

from bench.figures import Figure, Goal
from bench.pending import filled_inside, reopened
from bench.place import BUILD, directory
from bench.plan import Plan

FEW = (10_000, 100_000)
FEW_QUICK = (1_000, 10_000)
MANY = 10_000_000
RAM_BYTES, READY_S = 30, 1.0  # the goals of ten million
_DISK_BYTES_EACH = 1_000  # with what compaction takes meanwhile


def measure(plan: Plan) -> list[Figure]:
    """Return memory, disk and readiness for each count. The large one is measured once: it takes minutes."""
    counts = FEW_QUICK if plan.is_quick else FEW
    found: dict[int, list[dict[str, Any]]] = {count: [] for count in counts}
    many = 0 if plan.is_quick else plan.many
    plan.expect(plan.rounds * len(counts) + bool(many))
    for _ in plan.each_round():
        for count in counts:
            found[count].append(_measured(plan, count))
    if many and _has_room(many):
        found[many] = [_measured(plan, many)]
    elif many:
        plan.progress.console.print(f"the disk has no room for {many} messages: they are left out")
    return [figure for count, rounds in found.items() for figure in _figures(count, rounds)]


def _measured(plan: Plan, count: int) -> dict[str, Any]:
    plan.step(f"{count} messages")
    with directory() as data:
        return filled_inside(data, count) | reopened(data, count)


def _has_room(count: int) -> bool:
    return shutil.disk_usage(BUILD).free > 2 * count * _DISK_BYTES_EACH


def _figures(count: int, rounds: list[dict[str, Any]]) -> list[Figure]:
    is_many = count >= MANY
    goals = {
        "ram": Goal(sign="<=", bound=RAM_BYTES) if is_many else None,
        "disk": None,
        "ready_beyond_imports": Goal(sign="<=", bound=READY_S) if is_many else None,
    }
    texts = {
        "ram": ("B/message", "growth of the resident memory, settled"),
        "disk": ("B/message", "on disk, settled"),
        "ready_beyond_imports": ("s", "after SIGKILL: from the end of the imports to serving"),
    }
    return [
        Figure(
            name=f"sizes.{count}.{key}",
            what=f"{count} pending messages of 286 B on the wire: {text}",
            unit=unit,
            rounds=[float(each[key]) for each in rounds],
            goal=goals[key],
            details={"count": count, "per_s": rounds[0]["per_s"], "reopened_rss_mb": rounds[0]["reopened_rss_mb"]},
        )
        for key, (unit, text) in texts.items()
    ]
