"""How late messages are while a million others wait: in their queue, as the daemon counts, and at a consumer."""

from __future__ import annotations

from statistics import median
from typing import Any

from bench import child, daemon
from bench.cell import QUANTILES
from bench.figures import Figure, Goal
from bench.inside import LATENESS_RATE
from bench.load import check
from bench.messages import TOPIC
from bench.place import directory
from bench.plan import Plan

P99_MS = 5.0
RATE = LATENESS_RATE
RATE_HELD = 0.98  # below it the daemon was saturated, and the lateness is that of a full queue, not of this rate
POLLS = 16  # four would limit: each poll sends its 32 messages frame by frame


def measure(plan: Plan) -> list[Figure]:
    """Return the figures of the queue and of the consumer."""
    far, seconds = plan.pick(full=1_000_000, quick=100_000), plan.pick(full=30, quick=5)
    count = RATE * seconds
    rounds: list[dict[str, Any]] = []
    inside: list[dict[str, float]] = []
    plan.expect(2 * plan.rounds + 1)
    with directory() as data:
        plan.step(f"{far} messages due far away")
        filler = child.Child("fill", data, far)
        for said in filler.said():
            if said["event"] == "full":
                break
        filler.end()
        for number in range(plan.rounds):
            plan.step(f"{RATE}/s for {seconds} s in process")
            inside.append(child.run("lateness", data, count))
            plan.step(f"{RATE}/s for {seconds} s")
            with daemon.running(data, metrics=True) as ours:
                rounds.append(_round(plan, ours, count, f"bench-late-{number}"))
    what = f"lateness at {RATE}/s for {seconds} s, {far} far-future messages in the store"
    shared = {
        "messages": count,
        "max_ms": max(each["max"] for each in rounds),
        "cpu_share": median(each["cpu_share"] for each in rounds),
    }
    return [
        *_in_process(what, inside),
        Figure(
            name="lateness.sent",
            what=f"sends answered per second, of {RATE} offered; if missed, the lateness is not that of {RATE}/s",
            unit="messages/s",
            rounds=[each["sent_per_s"] for each in rounds],
            goal=Goal(sign=">=", bound=RATE * RATE_HELD),
            details={"p99_ms": median(each["sent_p99_ms"] for each in rounds)},
        ),
        *(
            Figure(
                name=f"lateness.queue.{name}",
                what=f"{what}: from the delivery time until durable in its queue (bucket bound)",
                unit="ms",
                rounds=[each[name] for each in rounds],
                goal=Goal(sign="<=", bound=P99_MS) if name == "p99" else None,
                details=shared,
            )
            for name in (*QUANTILES, "max")
        ),
        Figure(
            name="lateness.early",
            what=f"{what}: stored in their queue or received before their delivery time",
            unit="messages",
            rounds=[float(each["early"]) for each in rounds],
            goal=Goal(sign="<=", bound=0),
        ),
        *(
            Figure(
                name=f"lateness.consumer.{name}",
                what=f"{what}: at a consumer with {POLLS} long polls",
                unit="ms",
                rounds=[each["received"]["lateness_ms"][name] for each in rounds],
                details={"generator_is_native": plan.load.is_native},
            )
            for name in (*QUANTILES, "max")
        ),
    ]


def _in_process(what: str, rounds: list[dict[str, float]]) -> list[Figure]:
    return [
        Figure(
            name=f"lateness.in_process.{name}",
            what=f"{what}: in process, from the delivery time until durable in its queue",
            unit="ms",
            rounds=[each[name] for each in rounds],
            goal=Goal(sign="<=", bound=P99_MS) if name == "p99" else None,
            details={"early": sum(each["early"] for each in rounds)},
        )
        for name in (*QUANTILES, "max")
    ]


def _round(plan: Plan, ours: daemon.Daemon, count: int, group: str) -> dict[str, Any]:
    topic = f"{TOPIC}-{group}"
    cpu_s = ours.cpu_s
    receiver = plan.load.start("receive", address=ours.address, topic=topic, group=group, count=count, parallel=POLLS)
    sent = plan.load.run(
        "send",
        address=ours.address,
        topic=topic,
        count=count,
        rate=RATE,
        in_flight=128,
        delay_min=1_000,
        delay_max=5_000,
    )
    check(sent)
    received = receiver.result()
    if received["received"] != count:
        raise RuntimeError(f"{received['received']} of {count} messages were received")
    buckets = ours.lateness_buckets()
    if buckets[-1][1] != count:
        raise RuntimeError(f"the daemon counted {buckets[-1][1]:.0f} of {count} messages")
    return {
        **{name: daemon.quantile_ms(buckets, q) for name, q in QUANTILES.items()},
        "max": ours.status().lateness.max_ms,
        "early": received["early"] + received["early_queued"],
        "received": received,
        "sent_per_s": sent["messages_per_s"],
        "sent_p99_ms": sent["latency_ms"]["p99"],
        "cpu_share": (ours.cpu_s - cpu_s) / received["seconds"],
    }
