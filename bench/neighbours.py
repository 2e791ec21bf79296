"""How much later eight topics are because of two others: pairs of runs, without trouble and with, in turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from bench import child, daemon
from bench.cell import QUANTILES
from bench.daemon import Daemon
from bench.fairness import ADDED_MS, ADDED_SHARE
from bench.figures import Beside, Figure, Goal
from bench.inside_neighbours import AHEAD_MS, FLOOD, RATE, TOPICS
from bench.load import LoadFailed, check
from bench.place import directory
from bench.plan import Plan
from broker_adapter.runtime.clock import SystemClock
from dmq.admin.client import AdminClient

_PLACES = {"queue": "durable in its queue (whole ms)", "consumer": "handed out to a waiting consumer"}
_LEAD_MS = 8_000  # for the generators to start, and for what is sent ahead
_FILLS_PER_MS = 8
QUOTA = RATE + RATE // 2
_FACTS = ("cpu_share", "handed_over_beside")
_Pair = tuple[dict[str, Any], dict[str, Any]]


def measure(plan: Plan) -> list[Figure]:
    """Return the lateness of the eight with trouble and without, and what the trouble adds."""
    seconds = plan.pick(full=20, quick=2)
    pairs: list[_Pair] = []
    daemons: list[_Pair] = []
    plan.expect(4 * plan.rounds)
    for _ in range(plan.rounds):
        plan.step(f"ten topics, {RATE}/s each, for {seconds} s, all in one process")
        without = _run(plan.overdue, seconds, with_trouble=0)
        plan.step(f"the same, one of them flooding, one with {plan.overdue} overdue")
        pairs.append((without, _run(plan.overdue, seconds, with_trouble=1)))
        plan.step(f"ten topics of a daemon, {RATE}/s each, for {seconds} s")
        alone = _at_daemon(plan, seconds, with_trouble=False)
        plan.step(f"the same, one of them flooding, one with {plan.overdue} overdue")
        daemons.append((alone, _at_daemon(plan, seconds, with_trouble=True)))
    return [*_figures(plan.overdue, seconds, pairs), *_of_daemon(plan.overdue, seconds, daemons)]


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


def _at_daemon(plan: Plan, seconds: int, *, with_trouble: bool) -> dict[str, Any]:
    """Have clients of their own processes send and receive: what a user's eight topics see of the two others."""
    clock, overdue = SystemClock(), plan.overdue if with_trouble else 0
    with directory() as data, daemon.running(data, processes="auto") as ours, ExitStack() as last:
        names = [f"measured-{number}" for number in range(TOPICS)]
        start_ms = clock.now_ms() + _LEAD_MS + overdue // _FILLS_PER_MS
        if overdue:
            filled = plan.load.run(
                "send", address=ours.address, topic="stuck", count=overdue, batch=100, in_flight=8, deliver_at=start_ms
            )
            check(filled)
            if clock.now_ms() + AHEAD_MS > start_ms:
                raise RuntimeError("sending what is due at once took until the run; this machine is too slow for it")
        _set_quotas(ours, [*names, "flooded", "stuck"])
        time.sleep(max(0, start_ms - _LEAD_MS - clock.now_ms()) / 1000)  # who waits long for a message gives up
        count = RATE * seconds
        receivers = []
        for name in [*names, "flooded", "stuck"]:
            is_stuck = with_trouble and name == "stuck"
            receiver = plan.load.start(
                "receive", address=ours.address, topic=name, group="neighbours", count=count, deaf=is_stuck, idle=60
            )
            last.callback(receiver.end)
            receivers.append(receiver)
        time.sleep(max(0, start_ms - AHEAD_MS - clock.now_ms()) / 1000)
        senders = []
        for name in [*names, "flooded", "stuck"]:
            per_s = RATE * FLOOD if with_trouble and name == "flooded" else RATE
            sender = plan.load.start(
                "send",
                address=ours.address,
                topic=name,
                rate=per_s,
                count=per_s * seconds,
                in_flight=16,
                delay_min=AHEAD_MS,
                delay_max=AHEAD_MS,
            )
            last.callback(sender.end)
            senders.append(sender)
        found = [receiver.result() for receiver in receivers[:TOPICS]]
        for sender in senders[:TOPICS]:
            check(sender.result())
        if any(each["received"] < count for each in found):
            raise LoadFailed(f"of {count} messages each topic received {[each['received'] for each in found]}")
        cpu = ours.cpu_by_process()
    return {
        "early": sum(each["early"] + each["early_queued"] for each in found),
        "store_cpu_s": cpu[0],
        "worst_p99": max(each["lateness_ms"]["p99"] for each in found),
        **{q: median(each["lateness_ms"][q] for each in found) for q in QUANTILES},
    }


def _set_quotas(ours: Daemon, names: Sequence[str]) -> None:
    """Let each topic send and deliver half as much again as it is meant to: behind the fill, which is more."""
    with AdminClient(ours.address) as admin:
        there = {each.name for each in admin.topics()}
        for name in names:
            if name not in there:
                admin.create_topic(name)
            admin.set_topic(name, send_rate=QUOTA, deliver_rate=QUOTA)


def _of_daemon(overdue: int, seconds: int, pairs: list[_Pair]) -> list[Figure]:
    what = (
        f"lateness at the consumers of {TOPICS} topics of a daemon at {RATE}/s each for {seconds} s, whose clients are "
        f"other processes, while a ninth is sent {FLOOD} times as many and {overdue} of a tenth are overdue, whose "
        f"consumer acknowledges nothing; each topic may send and deliver {QUOTA}/s; the median topic"
    )
    alone, beside = ([float(run["p99"]) for run in runs] for runs in zip(*pairs, strict=True))
    details = {
        "worst_p99": [float(each["worst_p99"]) for _, each in pairs],
        "worst_p99_without": [float(each["worst_p99"]) for each, _ in pairs],
        "p50": median(float(each["p50"]) for _, each in pairs),
        "early": sum(one["early"] + other["early"] for one, other in pairs),
    }
    return [
        Figure(
            name="neighbours.daemon.p99",
            what=f"{what}: p99",
            unit="ms",
            rounds=beside,
            beside=Beside(what="all ten alike", rounds=alone),
            details=details,
        ),
        Figure(
            name="neighbours.daemon.p99_added",
            what=f"{what}: p99 with trouble less p99 without, pair by pair",
            unit="ms",
            rounds=[ours - peer for peer, ours in zip(alone, beside, strict=True)],
            goal=Goal(sign="<=", bound=max(ADDED_MS, ADDED_SHARE * median(alone))),
            beside=Beside(what="without, p99", rounds=alone),
            is_difference=True,
        ),
    ]
