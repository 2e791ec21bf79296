"""How much later eight topics are because of two others: pairs of runs, without trouble and with, in turn."""

from __future__ import annotations

from statistics import median
from typing import Any

from bench import child
from bench.cell import QUANTILES
from bench.fairness import ADDED_MS, ADDED_SHARE
from bench.figures import Beside, Figure, Goal
from bench.inside_neighbours import AHEAD_MS, FLOOD, RATE, TOPICS
from bench.place import directory
from bench.plan import Plan

_PLACES = {"queue": "durable in its queue (whole ms)", "consumer": "handed out to a waiting consumer"}
_FACTS = ("cpu_share", "handed_over_beside")
_Pair = tuple[dict[str, Any], dict[str, Any]]


def measure(plan: Plan) -> list[Figure]:
    """Return the lateness of the eight with trouble and without, and what the trouble adds."""
    seconds = plan.pick(full=20, quick=2)
    pairs: list[_Pair] = []
    plan.expect(2 * plan.rounds)
    for _ in range(plan.rounds):
        plan.step(f"ten topics, {RATE}/s each, for {seconds} s")
        without = _run(plan.overdue, seconds, with_trouble=0)
        plan.step(f"the same, one of them flooding, one with {plan.overdue} overdue")
        pairs.append((without, _run(plan.overdue, seconds, with_trouble=1)))
    return _figures(plan.overdue, seconds, pairs)


def _run(overdue: int, seconds: int, *, with_trouble: int) -> dict[str, Any]:
    with directory() as data:
        return child.run("neighbours", data, overdue, with_trouble=with_trouble, seconds=seconds)


def _figures(overdue: int, seconds: int, pairs: list[_Pair]) -> list[Figure]:
    flow = (
        f"lateness of {TOPICS} topics at {RATE}/s each for {seconds} s, sent {AHEAD_MS} ms ahead, while a ninth gets "
        f"{FLOOD} times as many and {overdue} of a tenth are overdue, whose consumer acknowledges nothing"
    )
    facts = {name: median(float(beside[name]) for _, beside in pairs) for name in _FACTS}
    facts["cpu_share_without"] = median(float(alone["cpu_share"]) for alone, _ in pairs)
    figures: list[Figure] = []
    for place, where in _PLACES.items():
        what = f"{flow}: from the delivery time until {where}"
        for q in QUANTILES:
            without, beside = ([float(run[place][q]) for run in runs] for runs in zip(*pairs, strict=True))
            also = Beside(what="all ten alike", rounds=without)
            figures.append(
                Figure(name=f"neighbours.{place}.{q}", what=what, unit="ms", rounds=beside, beside=also, details=facts)
            )
            if q == "p99":
                added = [ours - peer for peer, ours in zip(without, beside, strict=True)]
                figures.append(
                    Figure(
                        name=f"neighbours.{place}.p99_added",
                        what=f"{what}: p99 with trouble less p99 without, pair by pair",
                        unit="ms",
                        rounds=added,
                        goal=Goal(sign="<=", bound=max(ADDED_MS, ADDED_SHARE * median(without))),
                        beside=Beside(what="without, p99", rounds=without),
                        is_difference=True,
                        details=facts,
                    )
                )
    early = [float(alone["early"] + beside["early"]) for alone, beside in pairs]
    what = "messages of the eight queued or handed out before their delivery time, in both runs of a pair"
    return [
        *figures,
        Figure(name="neighbours.early", what=what, unit="messages", rounds=early, goal=Goal(sign="<=", bound=0)),
    ]
