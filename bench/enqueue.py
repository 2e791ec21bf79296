"""Durable sends in process, 100 to a batch, one caller: the whole price of a message but for the transport."""

from __future__ import annotations

from statistics import median
from typing import Any

from bench import child
from bench.figures import Beside, Figure, Goal
from bench.place import directory
from bench.plan import Plan

PER_S = 80_000


_KINDS = {"enqueue": "all with one delay", "scattered": "due at any time of a day"}


def measure(plan: Plan) -> list[Figure]:
    """Return a figure for messages with one delay, and one for messages scattered over a day."""
    count = plan.pick(full=100_000, quick=20_000)
    plan.expect(plan.rounds * (1 + len(_KINDS)))
    floor: list[float] = []
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _KINDS}
    for _ in plan.each_round():
        plan.step("raw RocksDB")
        with directory() as data:
            floor.append(float(child.run("raw", data, count)["per_s"]))
        for kind, what in _KINDS.items():
            plan.step(f"through the broker, {what}")
            with directory() as data:
                found[kind].append(child.run(kind, data, count))
    return [
        Figure(
            name="enqueue_in_process" if kind == "enqueue" else f"enqueue_in_process.{kind}",
            what=f"durable sends through the embedded broker, {what}; batch 100, fsync, index and audit included",
            unit="messages/s",
            rounds=[float(each["per_s"]) for each in found[kind]],
            goal=Goal(sign=">=", bound=PER_S),
            beside=Beside(what="raw rocksdict, the same rows", rounds=floor),
            details={
                "messages": count,
                "cpu_us_per_message": median(each["cpu_us"] for each in found[kind]),
                "sync_us_per_message": median(each["sync_us"] for each in found[kind]),
            },
        )
        for kind, what in _KINDS.items()
    ]
