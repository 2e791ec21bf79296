"""Many messages due at one instant: how long until the last one is durable in its queue."""

from __future__ import annotations

import time

from bench import child, daemon
from bench.figures import Figure, Goal
from bench.load import check
from bench.messages import TOPIC
from bench.place import directory
from bench.plan import Plan
from broker_adapter.clock import SystemClock

LAST_MS = 200
_AHEAD_S = 4
_WAIT_S_MAX = 30


def measure(plan: Plan) -> list[Figure]:
    """Return the figure in process and the one of a daemon."""
    count = plan.pick(full=20_000, quick=5_000)
    inside: list[dict[str, float]] = []
    outside: list[float] = []
    plan.expect(2 * plan.rounds)
    for _ in range(plan.rounds):
        plan.step("in process")
        with directory() as data:
            inside.append(child.run("burst", data, count))
        plan.step("in a daemon")
        with directory() as data, daemon.running(data) as ours:
            outside.append(_in_daemon(plan, ours, count))
    goal = Goal(sign="<=", bound=LAST_MS)
    what = f"{count} messages due at one instant: until the last is durable in its queue"
    return [
        Figure(
            name="burst.in_process",
            what=f"{what}, scheduler beside an idle loop",
            unit="ms",
            rounds=[each["last_ms"] for each in inside],
            goal=goal,
            details={"early": sum(each["early"] for each in inside), "first_ms": [each["first_ms"] for each in inside]},
        ),
        Figure(name="burst.daemon", what=f"{what}, in an idle daemon", unit="ms", rounds=outside, goal=goal),
    ]


def _in_daemon(plan: Plan, ours: daemon.Daemon, count: int) -> float:
    clock = SystemClock()
    deliver_at_ms = (clock.now_ms() // 1000 + _AHEAD_S) * 1000
    sent = plan.load.run(
        "send", address=ours.address, topic=TOPIC, count=count, batch=100, in_flight=4, deliver_at=deliver_at_ms
    )
    check(sent)
    if clock.now_ms() >= deliver_at_ms:
        raise RuntimeError("the sends took until the messages were due; this machine is too slow for the figure")
    time.sleep((deliver_at_ms - clock.now_ms()) / 1000 + 0.5)  # nothing asks the daemon anything meanwhile
    until_s = clock.monotonic_s() + _WAIT_S_MAX
    lateness = ours.status().lateness
    while clock.monotonic_s() < until_s:
        if lateness.count == count:
            return lateness.max_ms
        time.sleep(0.1)
        lateness = ours.status().lateness
    raise RuntimeError(f"only {lateness.count} of {count} messages became visible within {_WAIT_S_MAX} s")
