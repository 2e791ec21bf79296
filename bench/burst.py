"""Many messages due at one instant: how long until the last one is durable in its queue, and at a client."""

from __future__ import annotations

import time
from contextlib import ExitStack
from statistics import median
from typing import Any

from bench import child, daemon
from bench.figures import Beside, Figure, Goal
from bench.load import LoadFailed, check
from bench.messages import TOPIC
from bench.place import directory
from bench.plan import Plan
from broker_adapter.runtime.clock import SystemClock

LAST_MS, CLIENT_LAST_MS = 200, 500
POLLS = 16
_AHEAD_S, _AHEAD_S_QUICK = 4, 3
_WAIT_S_MAX = 30


def measure(plan: Plan) -> list[Figure]:
    """Return the figure in process, the one of a daemon, and the one of a client."""
    count = plan.pick(full=20_000, quick=2_000)
    inside: list[dict[str, float]] = []
    outside: list[float] = []
    clients: list[dict[str, float]] = []
    plan.expect(3 * plan.rounds)
    for _ in plan.each_round():
        plan.step("in process")
        with directory() as data:
            inside.append(child.run("burst", data, count))
        plan.step("in a daemon")
        with directory() as data, daemon.running(data) as ours:
            outside.append(_in_daemon(plan, ours, count))
        plan.step("to a client")
        with directory() as data, daemon.running(data) as ours:
            clients.append(to_client(plan, ours, count))
    goal = Goal(sign="<=", bound=LAST_MS)
    what = f"{count} messages due at one instant: until the last is"
    return [
        Figure(
            name="burst.in_process",
            what=f"{what} durable in its queue, scheduler beside an idle loop",
            unit="ms",
            rounds=[each["last_ms"] for each in inside],
            goal=goal,
            details={"early": sum(each["early"] for each in inside), "first_ms": [each["first_ms"] for each in inside]},
        ),
        Figure(
            name="burst.daemon",
            what=f"{what} durable in its queue, in a daemon that does nothing else",
            unit="ms",
            rounds=outside,
            goal=goal,
            beside=Beside(what="in process", rounds=[each["last_ms"] for each in inside]),
        ),
        Figure(
            name="burst.client",
            what=f"{what} received by a client with {POLLS} long polls, and its acknowledgement durable",
            unit="ms",
            rounds=[each["last_ms"] for each in clients],
            goal=Goal(sign="<=", bound=CLIENT_LAST_MS),
            beside=Beside(what="last in its queue, in an idle daemon", rounds=outside),
            details={name: median(each[name] for each in clients) for name in ("received_ms", "p50_ms", "queue_ms")},
        ),
    ]


def _send(plan: Plan, ours: daemon.Daemon, count: int) -> int:
    """Send ``count`` messages that are due at one instant, and return it; it lies ahead."""
    clock = SystemClock()
    deliver_at_ms = (clock.now_ms() // 1000 + plan.pick(full=_AHEAD_S, quick=_AHEAD_S_QUICK)) * 1000
    sent = plan.load.run(
        "send", address=ours.address, topic=TOPIC, count=count, batch=100, in_flight=4, deliver_at=deliver_at_ms
    )
    check(sent)
    if clock.now_ms() >= deliver_at_ms:
        raise RuntimeError("the sends took until the messages were due; this machine is too slow for the figure")
    return deliver_at_ms


def to_client(plan: Plan, ours: daemon.Daemon, count: int) -> dict[str, Any]:
    """Have ``count`` messages fall due at one instant while a client waits; return when it had what."""
    with ExitStack() as last:
        receiver = plan.load.start(
            "receive", address=ours.address, topic=TOPIC, group="bench-burst", count=count, parallel=POLLS
        )
        last.callback(receiver.end)
        deliver_at_ms = _send(plan, ours, count)
        found = receiver.result()
    if found["received"] != count or found["codes"].get("ack 20000") != count:
        raise LoadFailed(f"{found['received']} of {count} messages were received; {found['codes']}")
    return {
        "last_ms": float(found["last_ack_ms"] - deliver_at_ms),
        "received_ms": found["lateness_ms"]["max"],
        "p50_ms": found["lateness_ms"]["p50"],
        "queue_ms": ours.status().lateness.max_ms,
    }


def _in_daemon(plan: Plan, ours: daemon.Daemon, count: int) -> float:
    clock = SystemClock()
    deliver_at_ms = _send(plan, ours, count)
    time.sleep((deliver_at_ms - clock.now_ms()) / 1000 + 0.5)  # nothing asks the daemon anything meanwhile
    until_s = clock.monotonic_s() + _WAIT_S_MAX
    lateness = ours.status().lateness
    while clock.monotonic_s() < until_s:
        if lateness.count == count:
            return lateness.max_ms
        time.sleep(0.1)
        lateness = ours.status().lateness
    raise RuntimeError(f"only {lateness.count} of {count} messages became visible within {_WAIT_S_MAX} s")
