"""How much later a steady flow is because of what others do: pairs of runs, alone and beside a disturbance, in turn."""

from __future__ import annotations

from statistics import median
from typing import Any

from bench import child
from bench.cell import QUANTILES
from bench.figures import Beside, Figure, Goal
from bench.inside_fairness import RATE, Disturbance
from bench.place import directory
from bench.plan import Plan

ADDED_MS, ADDED_SHARE = 1.0, 0.25  # what a disturbance may add to the 99th percentile: the larger of the two
_REFUSED_SHARE = 100  # a refused message comes back every second, so far fewer of them are as much work
_WHAT = {
    Disturbance.RETRIES_WAITING: "retries of another group wait, due one after the other over the next two hours",
    Disturbance.RETRIES_SPREAD: "retries of another group wait, a third of them due during the run",
    Disturbance.RETRIES_BURST: "retries of another group wait, all due within one second of the run",
    Disturbance.REFUSING: "messages of a tenth topic are nacked each time they come, with a fixed delay of 1 s",
    Disturbance.HOARDING: "messages lie at another group, which takes what it may and never acknowledges",
}
_PLACES = {"queue": "durable in its queue (whole ms)", "consumer": "handed out to a waiting consumer"}
_FACTS = ("cpu_share", "handed_over_beside", "leases_beside")
_Pair = tuple[dict[str, Any], dict[str, Any]]


def measure(plan: Plan) -> list[Figure]:
    """Return, for each disturbance, the lateness beside it and alone, and what it adds."""
    seconds = plan.pick(full=10, quick=1)
    sizes = dict.fromkeys(_WHAT, plan.retries) | {Disturbance.REFUSING: plan.retries // _REFUSED_SHARE}
    pairs: dict[Disturbance, list[_Pair]] = {each: [] for each in _WHAT}
    plan.expect(2 * plan.rounds * len(_WHAT))
    for _ in range(plan.rounds):
        for disturbance, size in sizes.items():
            plan.step(f"{RATE}/s for {seconds} s alone")
            alone = _run(Disturbance.ALONE, 0, seconds)
            plan.step(f"{RATE}/s for {seconds} s beside {disturbance.value.replace('_', ' ')}, {size} messages")
            beside = _run(disturbance, size, seconds)
            if not beside["handed_over_beside"] and not beside["leases_beside"]:
                raise RuntimeError(f"nothing happened beside the flow: {disturbance.value}")
            pairs[disturbance].append((alone, beside))
    figures = [figure for each, size in sizes.items() for figure in _figures(each, size, seconds, pairs[each])]
    return [*figures, _early(list(pairs.values()))]


def _run(disturbance: Disturbance, size: int, seconds: int) -> dict[str, Any]:
    with directory() as data:
        return child.run("fairness", data, size, disturbance=disturbance.value, seconds=seconds)


def _figures(disturbance: Disturbance, size: int, seconds: int, pairs: list[_Pair]) -> list[Figure]:
    flow = f"lateness of {RATE} messages/s for {seconds} s while {size} {_WHAT[disturbance]}"
    facts = {name: median(float(beside[name]) for _, beside in pairs) for name in _FACTS}
    facts["cpu_share_alone"] = median(float(alone["cpu_share"]) for alone, _ in pairs)
    figures: list[Figure] = []
    for place, where in _PLACES.items():
        name = f"fairness.{disturbance.value}.{place}"
        what = f"{flow}: from the delivery time until {where}"
        values = {
            q: ([float(alone[place][q]) for alone, _ in pairs], [float(beside[place][q]) for _, beside in pairs])
            for q in (*QUANTILES, "max")
        }
        alone_max, beside_max = values.pop("max")
        details = {**facts, "max_ms": max(beside_max), "max_ms_alone": max(alone_max)}
        figures += [
            Figure(
                name=f"{name}.{q}",
                what=what,
                unit="ms",
                rounds=beside,
                beside=Beside(what="alone", rounds=alone),
                details=details,
            )
            for q, (alone, beside) in values.items()
        ]
        alone, beside = values["p99"]
        figures.append(
            Figure(
                name=f"{name}.p99_added",
                what=f"{what}: p99 beside it less p99 alone, pair by pair",
                unit="ms",
                rounds=[ours - peer for peer, ours in zip(alone, beside, strict=True)],
                goal=Goal(sign="<=", bound=max(ADDED_MS, ADDED_SHARE * median(alone))),
                beside=Beside(what="alone, p99", rounds=alone),
                is_difference=True,
                details=details,
            )
        )
    return figures


def _early(pairs: list[list[_Pair]]) -> Figure:
    return Figure(
        name="fairness.early",
        what="messages of the flow queued or handed out before their delivery time, in every run of a round",
        unit="messages",
        rounds=[float(sum(run["early"] for pair in each for run in pair)) for each in zip(*pairs, strict=True)],
        goal=Goal(sign="<=", bound=0),
    )
