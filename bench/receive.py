"""Receive and acknowledge a backlog over the wire, 32 at a time, beside the same in process without a wire."""

from __future__ import annotations

from statistics import median
from typing import Any

from bench import child, daemon
from bench.figures import Beside, Figure, Goal
from bench.load import LoadFailed, check
from bench.messages import TOPIC
from bench.place import directory
from bench.plan import Plan

PER_S = 60_000
POLLS = 16
_GROUP = "bench-receive"


def measure(plan: Plan) -> list[Figure]:
    """Return the rate of durable acknowledgements, with the CPU time of the daemon per message."""
    count = plan.pick(full=200_000, quick=10_000 if plan.load.is_native else 2_000)
    rounds: list[dict[str, Any]] = []
    floor: list[dict[str, Any]] = []
    plan.expect(3 * plan.rounds)
    for _ in plan.each_round():
        plan.step(f"{count} messages in process")
        with directory() as data:
            floor.append(child.run("receive", data, count))
        plan.step(f"{count} messages sent")
        with directory() as data, daemon.running(data) as ours:
            rounds.append(_round(plan, ours, count))
    return [
        Figure(
            name="receive",
            what=f"a backlog of {count} messages received 32 at a time with {POLLS} receives, and durably acknowledged",
            unit="messages/s",
            rounds=[each["received"] / each["seconds"] for each in rounds],
            goal=Goal(sign=">=", bound=PER_S),
            beside=Beside(what="in process, no wire", rounds=[float(each["per_s"]) for each in floor]),
            details={
                "messages": count,
                "cpu_us": median(each["cpu_us"] for each in rounds),
                "load_cpu_us": median(each["cpu_s"] / count * 1e6 for each in rounds),
                "cpu_us_in_process": median(each["cpu_us"] for each in floor),
            },
        )
    ]


def _round(plan: Plan, ours: daemon.Daemon, count: int) -> dict[str, Any]:
    check(plan.load.run("send", address=ours.address, topic=TOPIC, count=count, batch=32, in_flight=8))
    plan.step(f"{count} messages received")
    before_s = ours.cpu_s
    found = plan.load.run("receive", address=ours.address, topic=TOPIC, group=_GROUP, count=count, parallel=POLLS)
    if found["received"] != count or found["codes"].get("ack 20000") != count:
        raise LoadFailed(f"{found['received']} of {count} messages were received; {found['codes']}")
    return {**found, "cpu_us": (ours.cpu_s - before_s) / count * 1e6}
