"""Twice what the daemon can take: what it still accepts, refuses, holds in memory, and how late the accepted are.

The daemon has one half of the processors and the load generator the other, in the run at the peak too: a generator that
offers twice as much would else take the processor from what it measures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench import daemon
from bench.figures import Beside, Figure, Goal
from bench.load import LoadFailed, check
from bench.messages import TOPIC
from bench.place import directory
from bench.plan import Plan
from broker_adapter.runtime.clock import SystemClock

TIMES = 2
GOODPUT_SHARE = 0.9
LATE_P99_MS = 10.0
MEMORY_MB = 336  # what may wait for the writer (pending_bytes_max) and the memtables (memtable_bytes_max)
_PEAK_IN_FLIGHT, _CONNECTIONS = 256, 8
_IN_FLIGHT = 16_000  # four times what the daemon works on at once, and what eight connections hold
_DELAYS = {"delay_min": 1_000, "delay_max": 2_000}
_REFUSED, _TOO_LATE = "42900", "grpc 4"
_WAIT_S_MAX = 60
_TOLD = (
    *("offered_per_s", "refused_per_s", "refused_share", "too_late_share"),
    *("p50_ms", "p99_ms", "rss_before_mb", "rss_after_mb"),
)


def measure(plan: Plan) -> list[Figure]:
    """Return the goodput beside the peak, the memory that it took, and the lateness of what was accepted."""
    rounds: list[dict[str, Any]] = []
    plan.expect(2 * plan.rounds)
    for _ in plan.each_round():
        with directory() as data:
            rounds.append(_round(plan, data))
    what = f"{TIMES} times the peak offered, open loop, delays of 1 to 2 s"
    return [
        Figure(
            name="overload.goodput",
            what=f"{what}: messages accepted per second",
            unit="messages/s",
            rounds=[each["accepted_per_s"] for each in rounds],
            goal=Goal(sign=">=", bound=GOODPUT_SHARE, of="ratio"),
            beside=Beside(what="the peak, closed loop", rounds=[each["peak_per_s"] for each in rounds]),
            details={name: median(each[name] for each in rounds) for name in _TOLD},
        ),
        Figure(
            name="overload.answered",
            what=f"{what}: calls answered per second, accepted or refused; the others found no place on a connection",
            unit="calls/s",
            rounds=[each["answered_per_s"] for each in rounds],
        ),
        Figure(
            name="overload.memory",
            what=f"{what}: the most resident memory during it, less that before it",
            unit="MB",
            rounds=[each["rss_max_mb"] - each["rss_before_mb"] for each in rounds],
            goal=Goal(sign="<=", bound=MEMORY_MB),
            is_difference=True,
        ),
        Figure(
            name="overload.lateness.p99",
            what=f"{what}: from the delivery time of accepted messages until durable in their queue (bucket bound)",
            unit="ms",
            rounds=[each["late_p99_ms"] for each in rounds],
            goal=Goal(sign="<=", bound=LATE_P99_MS),
        ),
    ]


def _round(plan: Plan, data: Path) -> dict[str, Any]:
    seconds = plan.pick(full=8, quick=2)
    with ExitStack() as last:
        with children_on(0):
            ours = last.enter_context(daemon.running(data, metrics=True))
        last.enter_context(children_on(1))
        shared = {"address": ours.address, "topic": TOPIC, "connections": _CONNECTIONS, "seconds": seconds, **_DELAYS}
        plan.step("the peak")
        peak = plan.load.run("send", in_flight=_PEAK_IN_FLIGHT, warm_up=0.5, **shared)
        check(peak)
        counted = _delivered(ours)
        rss_before = ours.rss_bytes
        rate = TIMES * peak["messages_per_s"]
        plan.step(f"{rate:.0f}/s offered")
        in_flight = _IN_FLIGHT if plan.load.is_native else _PEAK_IN_FLIGHT  # a task in Python costs what it measures
        over = plan.load.run("send", in_flight=in_flight, rate=round(rate), **shared)
        check(over, allowed=("20000", _REFUSED, _TOO_LATE))
        rss_max, rss_after = ours.rss_bytes_max, ours.rss_bytes
        late = _delivered(ours)
    accepted = over["codes"].get("20000", 0)
    return {
        "peak_per_s": peak["messages_per_s"],
        "offered_per_s": over["offered"] / seconds,
        "answered_per_s": over["messages_per_s"],
        "accepted_per_s": accepted / over["seconds"],
        "refused_per_s": over["codes"].get(_REFUSED, 0) / over["seconds"],
        "refused_share": over["codes"].get(_REFUSED, 0) / over["messages"],
        "too_late_share": over["codes"].get(_TOO_LATE, 0) / over["messages"],
        "p50_ms": over["latency_ms"]["p50"],
        "p99_ms": over["latency_ms"]["p99"],
        "rss_before_mb": rss_before / 1e6,
        "rss_max_mb": max(rss_max, rss_before) / 1e6,
        "rss_after_mb": rss_after / 1e6,
        "late_p99_ms": daemon.quantile_ms(
            [(bound, many - before) for (bound, many), (_, before) in zip(late, counted, strict=True)], 0.99
        ),
    }


@contextmanager
def children_on(half: int) -> Iterator[None]:
    """Let the processes that are started meanwhile run on one half of the processors, if there are two."""
    all_of_them = sorted(os.sched_getaffinity(0))
    middle = len(all_of_them) // 2
    os.sched_setaffinity(0, (all_of_them[middle:] if half else all_of_them[:middle]) or all_of_them)
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_of_them)


def _delivered(ours: daemon.Daemon) -> list[tuple[float, float]]:
    """Wait until nothing waits any more, and return how many were how late so far."""
    clock = SystemClock()
    until_s = clock.monotonic_s() + _WAIT_S_MAX
    while ours.status().timeline.pending:
        if clock.monotonic_s() > until_s:
            raise LoadFailed(f"messages still wait {_WAIT_S_MAX} s after the last was due")
        time.sleep(0.2)
    return ours.lateness_buckets()
