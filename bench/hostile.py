"""An honest client beside each attack: how much later it is answered, and what memory the daemon takes meanwhile.

The daemon has one half of the processors; honest client and attacker share the other, the attacker with a low priority,
so that what is measured is what the attack costs the daemon and not what the attacker takes from its neighbour.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any, Self

from bench import daemon
from bench.attacks import ATTACKS
from bench.figures import Beside, Figure, Goal
from bench.load import LoadFailed
from bench.messages import TOPIC
from bench.overload import children_on
from bench.place import ROOT, directory
from bench.plan import Plan

TIMES = 3.0
MEMORY_MB = 400.0
_RATE_PER_S, _IN_FLIGHT = 200, 16
_BEGUN_S = 1.0  # the attack is in full swing when counting begins
_SAMPLE_S = 0.05
_NICE = 15


def measure(plan: Plan) -> list[Figure]:
    """Return, for each attack, the 99th percentile of an honest client's sends beside the quiet one, and the memory."""
    return measure_these(plan, list(ATTACKS))


def measure_these(plan: Plan, names: list[str]) -> list[Figure]:
    """As ``measure``, of some attacks only."""
    found: list[Figure] = []
    plan.expect(len(names) * plan.rounds)
    for name in names:
        rounds = []
        for _ in plan.each_round():
            plan.step(name)
            rounds.append(_round(plan, name))
        found += _figures(name, rounds)
    return found


def _figures(name: str, rounds: list[dict[str, Any]]) -> list[Figure]:
    return [
        Figure(
            name=f"hostile.{name}.p99",
            what=f"sends of an honest client beside the attack {name!r}, {_RATE_PER_S}/s offered: p99",
            unit="ms",
            rounds=[each["p99_ms"] for each in rounds],
            goal=Goal(sign="<=", bound=TIMES, of="ratio"),
            beside=Beside(what="without the attack", rounds=[each["quiet_p99_ms"] for each in rounds]),
            details={
                each: median(one[each] for one in rounds)
                for each in ("sent_mb", "connections", "refused", "max_ms", "quiet_max_ms", "cpu_us_per_byte")
            },
        ),
        Figure(
            name=f"hostile.{name}.memory",
            what=f"the most resident memory during the attack {name!r}, less that before it",
            unit="MB",
            rounds=[each["memory_mb"] for each in rounds],
            goal=Goal(sign="<=", bound=MEMORY_MB),
            is_difference=True,
        ),
    ]


def _round(plan: Plan, name: str) -> dict[str, Any]:
    seconds = plan.pick(full=8, quick=3)
    with ExitStack() as last:
        data = last.enter_context(directory())
        with children_on(0):
            ours = last.enter_context(daemon.running(data))
        last.enter_context(children_on(1))
        shared = {"address": ours.address, "topic": TOPIC, "in_flight": _IN_FLIGHT, "rate": _RATE_PER_S}
        quiet = plan.load.run("send", seconds=seconds, warm_up=1.0, **shared)
        before, cpu_s = ours.rss_bytes, ours.cpu_s
        peak = last.enter_context(_Peak(lambda: ours.rss_bytes))
        lasts_s = seconds + _BEGUN_S + 1.0
        attack = subprocess.Popen(
            ["nice", f"-n{_NICE}", sys.executable, "-m", "bench.attacks", name, ours.address, str(lasts_s)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        try:
            beside = plan.load.run("send", seconds=seconds, warm_up=_BEGUN_S, **shared)
        finally:
            out, _ = attack.communicate(timeout=120)
        if attack.returncode:
            raise LoadFailed(f"the attack {name!r} ended with {attack.returncode}")
        sent = json.loads(out)
        used_s = ours.cpu_s - cpu_s
    return {
        "p99_ms": beside["latency_ms"]["p99"],
        "max_ms": beside["latency_ms"]["max"],
        "quiet_p99_ms": quiet["latency_ms"]["p99"],
        "quiet_max_ms": quiet["latency_ms"]["max"],
        "refused": sum(count for code, count in beside["codes"].items() if code != "20000"),
        "memory_mb": (max(peak.value, before) - before) / 1e6,
        "sent_mb": sent["sent_bytes"] / 1e6,
        "connections": sent["connections"],
        "cpu_us_per_byte": used_s * 1e6 / max(1, sent["sent_bytes"]),
    }


class _Peak:
    """The highest value of a figure while it is looked at, many times a second."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.value = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            self.value = max(self.value, self._read())
