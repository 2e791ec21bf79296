"""Long polls that wait: how soon after the answer to a send the message is at a consumer."""

from __future__ import annotations

from typing import Any

from bench import daemon
from bench.figures import Figure, Goal
from bench.load import LoadFailed, check
from bench.messages import TOPIC
from bench.place import directory
from bench.plan import Plan

P50_MS = 1.0
POLLS = 4
EVERY_MS = 10


def measure(plan: Plan) -> list[Figure]:
    """Return quantiles of the wake-up, and of the whole way from the send to the consumer."""
    count = plan.pick(full=500, quick=50)
    rounds: list[dict[str, Any]] = []
    plan.expect(plan.rounds)
    for _ in plan.each_round():
        plan.step(f"{count} messages, one at a time")
        with directory() as data, daemon.running(data) as ours:
            found = plan.load.run(
                "wake",
                address=ours.address,
                topic=TOPIC,
                group="bench-wake",
                count=count,
                parallel=POLLS,
                every=EVERY_MS,
            )
        check(found)
        if found["received"] != count:
            raise LoadFailed(f"{found['received']} of {count} messages were received")
        rounds.append(found)
    histogram = [
        (bound, sum(each["histogram"][at][1] for each in rounds))
        for at, (bound, _) in enumerate(rounds[0]["histogram"])
    ]
    places = {
        "wake_ms": ("wakeup", "from the answer to a send until a long poll that waits has the message"),
        "total_ms": ("wakeup.whole", "from the send until a long poll that waits has the message"),
    }
    return [
        Figure(
            name=f"{name}.{q}",
            what=f"{what}; {POLLS} polls, a message every {EVERY_MS} ms",
            unit="ms",
            rounds=[max(0.0, each[key][q]) for each in rounds],
            goal=Goal(sign="<=", bound=P50_MS) if (name, q) == ("wakeup", "p50") else None,
            details={"histogram": histogram} if (name, q) == ("wakeup", "p50") else {},
        )
        for key, (name, what) in places.items()
        for q in ("p50", "p99")
    ]
