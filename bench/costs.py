"""The cost table of one durable send: where the CPU time of the daemon goes, step by step."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from bench import child, echo_http2
from bench.figures import Figure
from bench.inside_costs import STEPS
from bench.load import check
from bench.place import directory
from bench.plan import Plan

IN_FLIGHT = (64, 256)
WHAT = {
    "wire": "HTTP/2 and gRPC, both ways: an echo of the bytes on our transport",
    "parse": "decode the request (protobuf)",
    "validate": "check the message, find out when it is due",
    "envelope": "the message as it is stored (protobuf)",
    "place": "encode the row and its audit event",
    "assemble": "sequence, keys, index, counters, events: one batch",
    "write": "RocksDB: log and memtable",
    "sync": "wait for the disk, shared by the batch (not CPU time)",
    "reply": "encode the answer (protobuf), the recall handle in it",
    "rest": "tasks, futures, two threads that wake each other, the sync's own CPU: the broker less its steps",
}
_IN_BROKER = ("place", "assemble", "write")  # CPU steps that a send through the broker has too


def measure(plan: Plan) -> list[Figure]:
    """Return a figure for each step and number in flight: us per message."""
    count = plan.pick(full=40_000, quick=2_560)
    found: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    plan.expect(2 * plan.rounds * len(IN_FLIGHT))
    with echo_http2.running("raw") as wire:
        for _ in plan.each_round():
            for in_flight in IN_FLIGHT:
                plan.step(f"the wire, {in_flight} in flight")
                found["wire", in_flight].append(_wire_us(plan, wire, in_flight))
                plan.step(f"the steps, {in_flight} to a batch")
                with directory() as data:
                    steps: dict[str, Any] = child.run("costs", data, count, in_flight=in_flight)
                for step in STEPS:
                    found[step, in_flight].append(float(steps[step]))
                rest = steps["broker"] - sum(steps[step] for step in _IN_BROKER)
                found["rest", in_flight].append(max(0.0, rest))
    return [
        Figure(
            name=f"costs.{in_flight}.{step}",
            what=f"one delayed send of 200 B, {in_flight} in flight: {what}",
            unit="us",
            rounds=found[step, in_flight],
            details={"step": step, "in_flight": in_flight, "what": what},
        )
        for in_flight in IN_FLIGHT
        for step, what in WHAT.items()
    ]


def _wire_us(plan: Plan, wire: echo_http2.EchoHttp2, in_flight: int) -> float:
    before_s = wire.cpu_s
    done = plan.load.run(
        "send",
        address=wire.address,
        echo=True,
        in_flight=in_flight,
        connections=4 if in_flight > 64 else 1,
        seconds=0.5 if plan.is_quick else 2.0,
        delay_min=3_600_000,
        delay_max=7_200_000,
    )
    check(done)
    return (wire.cpu_s - before_s) / max(1, int(done["calls_all"])) * 1e6
