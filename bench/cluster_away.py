"""Whether a topic of the daemon's own is late while the cluster behind the daemon is away. Only with ``--peer``.

The cluster's processes are stopped, so that it takes connections and answers nothing: the worst way to be away.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from bench import daemon
from bench.figures import Beside, Figure, Goal
from bench.load import check
from bench.place import directory
from bench.plan import Plan
from bench.rocketmq import TOPICS

RATE, LATE_RATE = 500, 200
RATIO = 1.25
_TOPIC = "bench-embedded-"  # and a name for each time: a new group reads a topic from its begin
_GROUP = "bench"
_POLLS = 8
_AHEAD_MS = 5_000
_AWAY_S_MAX = 60.0
_QUANTILES = ("p50", "p99")


def measure(plan: Plan) -> list[Figure]:
    """Return the lateness of an embedded topic with the cluster away beside that with it well, in pairs."""
    if plan.peer is None:
        return []
    seconds = plan.pick(full=20, quick=3)
    well: list[dict[str, Any]] = []
    away: list[dict[str, Any]] = []
    plan.expect(2 * plan.rounds)
    for _ in plan.each_round():
        with plan.peer.awake() as address, directory() as data:
            options = ("--broker", "rocketmq", "--endpoints", address, "--embedded-topics", f"{_TOPIC}*")
            with daemon.running(data, options=options) as ours:
                plan.step(f"an embedded topic, the cluster well under {RATE} sends/s")
                with _sends(plan, ours, seconds):
                    well.append(_lateness(plan, ours, "well", seconds))
                plan.step(f"an embedded topic, the cluster away under {RATE} sends/s")
                with plan.peer.asleep(), _sends(plan, ours, seconds):
                    _until_away(ours)
                    away.append(_lateness(plan, ours, "away", seconds))
    return _figures(well, away, seconds)


@contextmanager
def _sends(plan: Plan, ours: daemon.Daemon, seconds: int) -> Iterator[None]:
    """Send undelayed messages to the cluster's topic all the while."""
    count = RATE * (2 * seconds + _AHEAD_MS // 1000)
    sending = plan.load.start(
        "send", address=ours.address, topic=TOPICS["normal"], count=count, rate=RATE, in_flight=2 * RATE
    )
    try:
        yield
    finally:
        sending.end()


def _until_away(ours: daemon.Daemon) -> None:
    until_s = time.monotonic() + _AWAY_S_MAX
    while not ours.status().cluster.away_since_ms:
        if time.monotonic() > until_s:
            raise RuntimeError("the daemon does not notice that the cluster is away")
        time.sleep(0.1)


def _lateness(plan: Plan, ours: daemon.Daemon, name: str, seconds: int) -> dict[str, Any]:
    """Return how late messages came to a consumer of the embedded topic."""
    count = LATE_RATE * seconds
    topic = f"{_TOPIC}{name}"
    receiver = plan.load.start("receive", address=ours.address, topic=topic, group=_GROUP, count=count, parallel=_POLLS)
    sent = plan.load.run(
        "send",
        address=ours.address,
        topic=topic,
        count=count,
        rate=LATE_RATE,
        in_flight=64,
        delay_min=1_000,
        delay_max=_AHEAD_MS,
    )
    check(sent)
    received = receiver.result()
    if received["received"] != count:
        raise RuntimeError(f"{received['received']} of {count} messages were received")
    found: dict[str, Any] = received["lateness_ms"]
    return found


def _figures(well: list[dict[str, Any]], away: list[dict[str, Any]], seconds: int) -> list[Figure]:
    what = (
        f"lateness of an embedded topic, {LATE_RATE}/s for {seconds} s beside {RATE} sends/s to a cluster that is away"
    )
    return [
        Figure(
            name=f"cluster.away.{q}",
            what=what,
            unit="ms",
            rounds=[each[q] for each in away],
            goal=Goal(sign="<=", bound=RATIO, of="ratio") if q == "p99" else None,
            beside=Beside(what="the cluster well, under the same sends", rounds=[each[q] for each in well]),
            details={"more_ms": median(each[q] for each in away) - median(each[q] for each in well)},
        )
        for q in _QUANTILES
    ]
