"""Nacks of push deliveries in process, one call per message: how many a second, and how late they come again."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import Any

from bench import child
from bench.cell import QUANTILES
from bench.figures import Beside, Figure, Goal
from bench.inside_nack import RATE
from bench.place import directory
from bench.plan import Plan

IN_FLIGHT = (64, 256)
_KINDS = {"raw_nack": "raw RocksDB", "ack": "acks", "nack": "nacks"}
_LATENESS = {"delay_lateness": "delayed messages", "retry_lateness": "retries"}


def measure(plan: Plan) -> list[Figure]:
    """Return the rates, beside the floor and beside acks, and the lateness of retries beside that of delays."""
    count, seconds = plan.pick(full=20_000, quick=2_000), plan.pick(full=10, quick=1)
    found: defaultdict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    late: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _LATENESS}
    plan.expect(plan.rounds * (len(IN_FLIGHT) * len(_KINDS) + len(_LATENESS)))
    for _ in range(plan.rounds):
        for in_flight in IN_FLIGHT:
            for kind, what in _KINDS.items():
                plan.step(f"{what}, {in_flight} in flight")
                with directory() as data:
                    found[kind, in_flight].append(child.run(kind, data, count, in_flight=in_flight))
        for kind, what in _LATENESS.items():
            plan.step(f"lateness of {what}, {RATE}/s for {seconds} s")
            with directory() as data:
                late[kind].append(child.run(kind, data, RATE * seconds))
    return [
        *(figure for in_flight in IN_FLIGHT for figure in _rates(found, in_flight, count)),
        *_lateness(late, seconds),
    ]


def _rates(found: dict[tuple[str, int], list[dict[str, Any]]], in_flight: int, count: int) -> list[Figure]:
    nacks, acks = found["nack", in_flight], found["ack", in_flight]
    per_s = {kind: [float(each["per_s"]) for each in found[kind, in_flight]] for kind in _KINDS}
    if any(each["retried"] != count for each in nacks):
        raise RuntimeError("not every nack put a copy on the timeline")
    floor = Beside(what=f"raw rocksdict, a row deleted and a copy put, batch {in_flight}", rounds=per_s["raw_nack"])

    def details(rounds: list[dict[str, Any]]) -> dict[str, object]:
        names = ("cpu_us", "sync_us", "per_batch")
        return {
            "messages": count,
            **{name: median(float(each[name]) for each in rounds) for name in names},
            **{f"{q}_ms": median(float(each["latency_ms"][q]) for each in rounds) for q in ("p50", "p99")},
        }

    return [
        Figure(
            name=f"nack.{in_flight}",
            what=f"nacks of push deliveries until the copy on the timeline is durable, {in_flight} calls in flight",
            unit="messages/s",
            rounds=per_s["nack"],
            beside=floor,
            details=details(nacks),
        ),
        Figure(
            name=f"nack.{in_flight}.to_acks",
            what=f"the same nacks beside acks of the same deliveries, {in_flight} calls in flight",
            unit="messages/s",
            rounds=per_s["nack"],
            beside=Beside(what="acks", rounds=per_s["ack"]),
            details=details(acks),
        ),
    ]


def _lateness(late: dict[str, list[dict[str, Any]]], seconds: int) -> list[Figure]:
    retries, delays = late["retry_lateness"], late["delay_lateness"]
    places = {"queue": "until visible again, durable (whole ms)", "consumer": "until handed out to a waiting consumer"}
    return [
        *(
            Figure(
                name=f"nack.lateness.{place}.{name}",
                what=f"retries, nacked at {RATE}/s for {seconds} s: from their delivery time {what}",
                unit="ms",
                rounds=[float(each[place][name]) for each in retries],
                beside=Beside(what="delayed messages", rounds=[float(each[place][name]) for each in delays]),
                details={"max_ms": max(float(each[place]["max"]) for each in retries)},
            )
            for place, what in places.items()
            for name in QUANTILES
        ),
        Figure(
            name="nack.lateness.early",
            what="retries and delayed messages that were visible or handed out before their delivery time",
            unit="messages",
            rounds=[float(ours["early"] + peer["early"]) for ours, peer in zip(retries, delays, strict=True)],
            goal=Goal(sign="<=", bound=0),
        ),
    ]
