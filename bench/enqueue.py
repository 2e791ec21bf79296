"""Durable sends in process, 100 to a batch, one caller: the whole price of a message but for the transport."""

from __future__ import annotations

from statistics import median

from bench import child
from bench.figures import Beside, Figure, Goal
from bench.place import directory
from bench.plan import Plan

PER_S = 60_000


def measure(plan: Plan) -> list[Figure]:
    """Return the one figure."""
    count = plan.pick(full=100_000, quick=20_000)
    plan.expect(2 * plan.rounds)
    ours, floor, details = [], [], []
    for _ in range(plan.rounds):
        plan.step("raw RocksDB")
        with directory() as data:
            floor.append(float(child.run("raw", data, count)["per_s"]))
        plan.step("through the broker")
        with directory() as data:
            found = child.run("enqueue", data, count)
            ours.append(float(found["per_s"]))
            details.append(found)
    return [
        Figure(
            name="enqueue_in_process",
            what="durable sends through the embedded broker, batch 100, fsync before the answer, index and audit too",
            unit="messages/s",
            rounds=ours,
            goal=Goal(sign=">=", bound=PER_S),
            beside=Beside(what="raw rocksdict, record only", rounds=floor),
            details={
                "messages": count,
                "cpu_us_per_message": median(each["cpu_us"] for each in details),
                "sync_us_per_message": median(each["sync_us"] for each in details),
            },
        )
    ]
