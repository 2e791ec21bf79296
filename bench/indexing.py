"""The cost of an indexed user property per delayed message: CPU time of the process, and bytes in tables."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from bench import child
from bench.figures import Beside, Figure
from bench.place import directory
from bench.plan import Plan

_KINDS = ("no property indexed", "a property of another topic indexed", "one property indexed")


def measure(plan: Plan) -> list[Figure]:
    """Return CPU time and bytes per message, with none, another topic's and one indexed property."""
    count = plan.pick(full=100_000, quick=10_000)
    plan.expect(plan.rounds * len(_KINDS))
    found: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for _ in plan.each_round():
        for of, kind in enumerate(_KINDS):
            plan.step(kind)
            with directory() as data:
                told: dict[str, Any] = child.run("indexed", data, count, of=of)
            for unit in ("cpu_us", "bytes"):
                found[of, unit].append(float(told[unit]))
    return [
        Figure(
            name=f"indexing.{of}.{name}",
            what=f"one delayed send of 200 B through the embedded broker, {kind}: {what}",
            unit=unit,
            rounds=found[of, key],
            beside=Beside(what=f"{_KINDS[0]}", rounds=found[0, key]) if of else None,
        )
        for of, kind in enumerate(_KINDS)
        for key, name, unit, what in (
            ("cpu_us", "cpu", "us", "CPU of the process"),
            ("bytes", "bytes", "B/message", "in compressed tables"),
        )
    ]
