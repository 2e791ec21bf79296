"""Durable sends through gRPC, one message per call, beside a grpcio server that stores nothing."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import Any

from bench import daemon, echo
from bench.figures import Beside, Figure, Goal
from bench.load import check
from bench.messages import HOUR_MS, TOPIC
from bench.place import directory
from bench.plan import Plan

SHARE = 0.6
IN_FLIGHT = (64, 256)
_DELAYS: dict[str, dict[str, int]] = {"normal": {}, "delayed": {"delay_min": 12 * HOUR_MS, "delay_max": 36 * HOUR_MS}}


def measure(plan: Plan) -> list[Figure]:
    """Return a figure for each kind of message and number in flight, and what a parsing echo does."""
    seconds = {"seconds": 1.0 if plan.is_quick else 4.0, "warm_up": 0.3 if plan.is_quick else 1.0}
    found: defaultdict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    plan.expect(plan.rounds * len(IN_FLIGHT) * (2 + len(_DELAYS)))
    with directory() as data, echo.running("raw") as raw, echo.running("parsed") as parsed:
        for _ in range(plan.rounds):
            for in_flight in IN_FLIGHT:
                for name, peer in (("raw", raw), ("parsed", parsed)):
                    plan.step(f"echo {name}, {in_flight} in flight")
                    cpu_s = peer.cpu_s
                    done = plan.load.run(
                        "send", address=peer.address, in_flight=in_flight, echo=name == "raw", **seconds
                    )
                    check(done)
                    found[name, in_flight].append(_with_cpu(done, peer.cpu_s - cpu_s))
                with daemon.running(data) as ours:
                    for name, delays in _DELAYS.items():
                        plan.step(f"{name} messages, {in_flight} in flight")
                        cpu_s = ours.cpu_s
                        done = plan.load.run(
                            "send", address=ours.address, topic=TOPIC, in_flight=in_flight, **seconds, **delays
                        )
                        check(done)
                        found[name, in_flight].append(_with_cpu(done, ours.cpu_s - cpu_s))
    return [_figure(name, in_flight, found) for in_flight in IN_FLIGHT for name in (*_DELAYS, "parsed")]


def _with_cpu(done: dict[str, Any], cpu_s: float) -> dict[str, Any]:
    # The CPU time covers the warm-up too: calls are those of the whole run.
    return {**done, "cpu_us": cpu_s / max(1, done["calls_all"]) * 1e6}


def _figure(name: str, in_flight: int, found: dict[tuple[str, int], list[dict[str, Any]]]) -> Figure:
    rounds, peers = found[name, in_flight], found["raw", in_flight]
    is_ours = name in _DELAYS
    return Figure(
        name=f"grpc_send.{name}.{in_flight}" if is_ours else f"grpc_echo.{name}.{in_flight}",
        what=f"durable {name} sends, one message per call, {in_flight} in flight on one connection"
        if is_ours
        else f"an echo that parses and builds an answer, {in_flight} in flight",
        unit="calls/s",
        rounds=[each["messages_per_s"] for each in rounds],
        goal=Goal(sign=">=", bound=SHARE, of="ratio") if is_ours else None,
        beside=Beside(what="grpcio echo, raw bytes", rounds=[each["messages_per_s"] for each in peers]),
        details={
            "p50_ms": median(each["latency_ms"]["p50"] for each in rounds),
            "p99_ms": median(each["latency_ms"]["p99"] for each in rounds),
            "cpu_us_per_call": median(each["cpu_us"] for each in rounds),
            "peer_p50_ms": median(each["latency_ms"]["p50"] for each in peers),
            "peer_cpu_us_per_call": median(each["cpu_us"] for each in peers),
            "parsed_echo_per_s": median(each["messages_per_s"] for each in found["parsed", in_flight]),
        },
    )
