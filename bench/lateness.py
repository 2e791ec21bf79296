"""How late messages are while a million others wait: in their queue, as the daemon counts, and at a consumer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from bench import child, daemon
from bench.cell import QUANTILES, quantiles
from bench.figures import Beside, Figure, Goal
from bench.inside import LATENESS_RATE
from bench.load import check
from bench.messages import TOPIC
from bench.place import directory, syncs
from bench.plan import Plan

P99_MS = {LATENESS_RATE: 5.0, 10_000: 10.0}  # by messages per second
RATE_HELD = 0.98  # below it the daemon was saturated, and the lateness is that of a full queue, not of this rate
POLLS = 16  # four would limit: each poll sends its 32 messages frame by frame
_IN_FLIGHT = 256
_SYNCS_AT_ONCE = 500


def measure(plan: Plan) -> list[Figure]:
    """Return the figures of the queue and of the consumer, at each rate, and in process as their floor."""
    far, seconds = plan.pick(full=1_000_000, quick=20_000), plan.pick(full=20, quick=3)
    rates = [rate for rate in P99_MS if plan.load.is_native or rate == LATENESS_RATE]  # Python does not send so fast
    rounds: dict[int, list[dict[str, Any]]] = {rate: [] for rate in rates}
    inside: list[dict[str, float]] = []
    disk: list[dict[str, float]] = []
    plan.expect((2 + len(rates)) * plan.rounds + 1)
    with directory() as data:
        plan.step(f"{far} messages due far away")
        filler = child.Child("fill", data, far)
        for said in filler.said():
            if said["event"] == "full":
                break
        filler.end()
        for number in plan.each_round():
            plan.step(f"the disk alone for {seconds} s")
            disk.append(_on_disk(data / "appended", seconds))
            plan.step(f"{LATENESS_RATE}/s for {seconds} s in process")
            inside.append(child.run("lateness", data, LATENESS_RATE * seconds))
            for rate in rates:
                plan.step(f"{rate}/s for {seconds} s")
                with daemon.running(data, metrics=True) as ours:
                    rounds[rate].append(_round(plan, ours, rate, rate * seconds, f"bench-late-{rate}-{number}"))
    what = f"for {seconds} s, {far} far-future messages in the store"
    return [
        *_in_process(f"lateness at {LATENESS_RATE}/s {what}", inside, disk),
        *(figure for rate in rates for figure in _figures(rate, what, rounds[rate], inside, disk, far)),
    ]


def ideal_lateness_ms(took_ms: Sequence[float], per_s: int) -> list[float]:
    """Return how late messages would be whose only delay is the disk, due ``per_s`` times a second.

    ``took_ms`` are syncs, one after the other. Each message is durable with the first sync that begins when it is due
    or after that: the one under way does not cover it.
    """
    ends_ms = list(accumulate(took_ms))
    due_ms = (number * 1000 / per_s for number in range(int(ends_ms[-1] * per_s / 1000)))
    under_way = ((due, bisect_right(ends_ms, due)) for due in due_ms)
    return [ends_ms[at + 1] - due for due, at in under_way if at + 1 < len(ends_ms)]


def _on_disk(file: Path, seconds: int) -> dict[str, float]:
    took_ms: list[float] = []
    left_ms = seconds * 1000.0
    while left_ms > 0:
        more = syncs(file, count=_SYNCS_AT_ONCE)
        took_ms += more
        left_ms -= sum(more)
    file.unlink()
    return quantiles(ideal_lateness_ms(took_ms, LATENESS_RATE))


def _figures(
    rate: int,
    where: str,
    rounds: list[dict[str, Any]],
    inside: list[dict[str, float]],
    disk: list[dict[str, float]],
    far: int,
) -> list[Figure]:
    what = f"lateness at {rate}/s {where}"
    name = "lateness" if rate == LATENESS_RATE else f"lateness.{rate}"
    goal = Goal(sign="<=", bound=P99_MS[rate])
    histogram = [
        (bound, sum(each["received"]["histogram"][at][1] for each in rounds))
        for at, (bound, _) in enumerate(rounds[0]["received"]["histogram"])
    ]
    shared = {
        "per_s": rate,
        "waiting": far,
        "histogram": histogram,
        "max_ms": max(each["max"] for each in rounds),
        "cpu_share": median(each["cpu_share"] for each in rounds),
    }
    return [
        Figure(
            name=f"{name}.sent",
            what=f"sends answered per second, of {rate} offered; if missed, the lateness is not that of {rate}/s",
            unit="messages/s",
            rounds=[each["sent_per_s"] for each in rounds],
            goal=Goal(sign=">=", bound=rate * RATE_HELD),
            details={"p99_ms": median(each["sent_p99_ms"] for each in rounds)},
        ),
        *(
            Figure(
                name=f"{name}.queue.{q}",
                what=f"{what}: from the delivery time until durable in its queue (bucket bound)",
                unit="ms",
                rounds=[each[q] for each in rounds],
                goal=goal if q == "p99" else None,
                beside=_disk_alone(disk, q),
            )
            for q in (*QUANTILES, "max")
        ),
        Figure(
            name=f"{name}.early",
            what=f"{what}: stored in their queue or received before their delivery time",
            unit="messages",
            rounds=[float(each["early"]) for each in rounds],
            goal=Goal(sign="<=", bound=0),
        ),
        *(
            Figure(
                name=f"{name}.consumer.{q}",
                what=f"{what}: from the delivery time until received by a consumer with {POLLS} long polls",
                unit="ms",
                rounds=[each["received"]["lateness_ms"][q] for each in rounds],
                goal=goal if q == "p99" else None,
                beside=Beside(
                    what=f"in process at {LATENESS_RATE}/s, no consumer", rounds=[each[q] for each in inside]
                ),
                also=[_disk_alone(disk, q)],
                details=shared if q == "p99" else {},
            )
            for q in (*QUANTILES, "max")
        ),
    ]


def _disk_alone(disk: list[dict[str, float]], q: str) -> Beside:
    return Beside(what="if nothing but the disk took time", rounds=[each[q] for each in disk])


def _in_process(what: str, rounds: list[dict[str, float]], disk: list[dict[str, float]]) -> list[Figure]:
    return [
        Figure(
            name=f"lateness.in_process.{name}",
            what=f"{what}: in process, from the delivery time until durable in its queue",
            unit="ms",
            rounds=[each[name] for each in rounds],
            goal=Goal(sign="<=", bound=P99_MS[LATENESS_RATE]) if name == "p99" else None,
            beside=_disk_alone(disk, name),
            details={"early": sum(each["early"] for each in rounds)},
        )
        for name in (*QUANTILES, "max")
    ]


def _round(plan: Plan, ours: daemon.Daemon, rate: int, count: int, group: str) -> dict[str, Any]:
    topic = f"{TOPIC}-{group}"
    cpu_s = ours.cpu_s
    receiver = plan.load.start("receive", address=ours.address, topic=topic, group=group, count=count, parallel=POLLS)
    sent = plan.load.run(
        "send",
        address=ours.address,
        topic=topic,
        count=count,
        rate=rate,
        in_flight=_IN_FLIGHT,
        delay_min=1_000,
        delay_max=5_000,
    )
    check(sent)
    received = receiver.result()
    if received["received"] != count:
        raise RuntimeError(f"{received['received']} of {count} messages were received")
    buckets = ours.lateness_buckets()
    if buckets[-1][1] != count:  # what is due already when it comes, after a stall of a second, never waits
        raise RuntimeError(
            f"the daemon counted {buckets[-1][1]:.0f} of {count} messages: did this machine stand still?"
        )
    return {
        **{name: daemon.quantile_ms(buckets, q) for name, q in QUANTILES.items()},
        "max": ours.status().lateness.max_ms,
        "early": received["early"] + received["early_queued"],
        "received": received,
        "sent_per_s": sent["messages_per_s"],
        "sent_p99_ms": sent["latency_ms"]["p99"],
        "cpu_share": (ours.cpu_s - cpu_s) / received["seconds"],
    }
