"""Clients of queues: this one beside Apache's Java client, and beside a broker that is stopped. Only with ``--peer``.

Both speak the classic protocol to the same broker, each in a process of its own, and are otherwise left at their
defaults: a handler gets one message, twenty are at work at once. The Java client sends from as many threads as are in
flight.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.figures import Beside, Figure
from bench.load import LoadFailed, check
from bench.messages import BODY_BYTES
from bench.place import directory
from bench.plan import Plan
from bench.queue_client import SLOW_MS
from bench.rocketmq import TOPICS, VERSION, RocketMQ, artifacts

RATE, STEADY_RATE = 500, 100
_LEVELS = (1, 64)
_QUEUES = 4  # of a topic at each broker
_BACKLOG, _COMES, _SHARED = "bench-queue-backlog", "bench-queue-comes", "bench-queue-shared"
_JAVA = f"Apache's Java client {VERSION}"
_PROGRAM = Path(__file__).parent / "QueueClient.java"
_ATTEMPT_MS = 500
_WAYS: Mapping[str, Mapping[str, object]] = {
    "without": {"avoid": False, "attempt_ms": None},
    "with": {"avoid": True, "attempt_ms": None},
    "short": {"avoid": True, "attempt_ms": _ATTEMPT_MS},
}
_SAID = {
    "without": "without fault avoidance",
    "with": "with fault avoidance",
    "short": f"with it, and attempts of {_ATTEMPT_MS} ms",
}

_Found = defaultdict[str, list[float]]


def measure(plan: Plan) -> list[Figure]:
    """Return rates and latencies beside the Java client's, and latencies while one of two brokers is stopped."""
    if plan.peer is None:
        return []
    found: _Found = defaultdict(list)
    plan.expect(2 + plan.rounds * (2 * len(_LEVELS) + 4) + 1 + plan.rounds * len(_WAYS))
    with plan.peer.awake() as address:
        _beside_java(plan, plan.peer, address, found)
        _while_one_is_stopped(plan, plan.peer, found)
    return [*_figures_beside_java(found), *_figures_while_one_is_stopped(found)]


class Program:
    """A client that is measured, as a process."""

    def __init__(self, *command: str) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)

    def begin(self, do: str, **order: object) -> None:
        """Give an order; ``told`` has what comes of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, "body_bytes": BODY_BYTES, **order}) + "\n")
        self._process.stdin.flush()

    def told(self) -> dict[str, Any]:
        """Return what it says next. Raises LoadFailed if it ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                said: dict[str, Any] = json.loads(line)
                return said
        raise LoadFailed(f"a client that was measured ended with {self._process.wait()}")

    def ask(self, do: str, **order: object) -> dict[str, Any]:
        """Give an order and return what comes of it."""
        self.begin(do, **order)
        return self.told()

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def _ours(names: str) -> Iterator[Program]:
    program = Program(sys.executable, "-m", "bench.queue_client", names)
    try:
        yield program
    finally:
        program.end()


@contextmanager
def _java(names: str) -> Iterator[Program]:
    with directory() as home:
        program = Program("java", f"-Duser.home={home}", "-cp", f"{artifacts()}/*", str(_PROGRAM), names)
        try:
            yield program
        finally:
            program.end()


def _beside_java(plan: Plan, peer: RocketMQ, address: str, found: _Found) -> None:
    backlog = plan.pick(full=20_000, quick=2_000)
    comes = [f"{_COMES}-{number}-{name}" for number in range(plan.rounds) for name in ("ours", "java")]
    peer.make_topics(dict.fromkeys([_BACKLOG, *comes], "NORMAL"))
    check(plan.load.run("send", address=address, topic=_BACKLOG, count=backlog, in_flight=64))
    with _ours(peer.names) as ours, _java(peer.names) as java:
        programs = {"ours": ours, "java": java}
        for name, program in programs.items():
            plan.step(f"{name} warms up")
            _send(program, 64, plan.pick(full=10, quick=1))
            _consume_backlog(program, f"warm-{name}", backlog)
        for number in plan.each_round():
            for name, program in programs.items():
                for in_flight in _LEVELS:
                    plan.step(f"{name}: sends, {in_flight} in flight")
                    sent = _send(program, in_flight, plan.pick(full=5, quick=1))
                    found[f"send.{in_flight}.per_s.{name}"].append(sent["per_s"])
                    found[f"send.{in_flight}.p99.{name}"].append(sent["p99_ms"])
                plan.step(f"{name}: consumes {backlog}")
                found[f"consume.{name}"].append(_consume_backlog(program, f"{number}-{name}", backlog))
                plan.step(f"{name}: consumes {RATE} a second")
                late = _consume_what_comes(plan, program, address, f"{_COMES}-{number}-{name}")
                found[f"late.p50.{name}"].append(late["p50_ms"])
                found[f"late.p99.{name}"].append(late["p99_ms"])


def _send(program: Program, in_flight: int, seconds: int) -> dict[str, Any]:
    return program.ask("send", topic=TOPICS["normal"], in_flight=in_flight, warm_up_s=0.5, seconds=seconds)


def _consume_backlog(program: Program, name: str, count: int) -> float:
    program.begin("consume", topic=_BACKLOG, group=f"bench-backlog-{name}", count=count, queues=_QUEUES)
    program.told()  # that it is ready
    return float(program.told()["per_s"])


def _consume_what_comes(plan: Plan, program: Program, address: str, topic: str) -> dict[str, Any]:
    count = RATE * plan.pick(full=10, quick=2)
    program.begin("consume", topic=topic, group=f"bench-{topic}", count=count, queues=_QUEUES)
    program.told()
    check(plan.load.run("send", address=address, topic=topic, count=count, rate=RATE, in_flight=64))
    return program.told()


def _while_one_is_stopped(plan: Plan, peer: RocketMQ, found: _Found) -> None:
    seconds = plan.pick(full=26, quick=3)
    plan.step("a second broker starts")
    with peer.one_more("broker-b") as second, _ours(peer.names) as ours:
        peer.make_topics({_SHARED: "NORMAL"})
        ours.ask("send", topic=_SHARED, in_flight=8, warm_up_s=0, seconds=plan.pick(full=20, quick=1))
        for _ in plan.each_round():
            for name, way in _WAYS.items():
                plan.step(f"{_SAID[name]}, one of two brokers stopped")
                ours.begin("steady", topic=_SHARED, rate=STEADY_RATE, seconds=seconds, **way)
                ours.told()  # that it is ready
                with peer.asleep(second):
                    said = ours.told()
                for each in ("p50_ms", "p99_ms", "slow_share", "failed_share"):
                    found[f"stopped.{each}.{name}"].append(said[each])


def _figures_beside_java(found: _Found) -> Iterator[Figure]:
    said = {
        **{
            f"send.{in_flight}.{kind}": (f"{what}, {in_flight} in flight", unit)
            for in_flight in _LEVELS
            for kind, what, unit in (("per_s", "sends", "messages/s"), ("p99", "p99 latency of a send", "ms"))
        },
        "consume": ("messages consumed of a backlog", "messages/s"),
        **{f"late.{q}": (f"from the store to the handler, {RATE} messages/s: {q}", "ms") for q in ("p50", "p99")},
    }
    for name, (what, unit) in said.items():
        yield Figure(
            name=f"queue_clients.{name}",
            what=f"{what}, over the classic protocol",
            unit=unit,
            rounds=found[f"{name}.ours"],
            beside=Beside(what=_JAVA, rounds=found[f"{name}.java"]),
        )


def _figures_while_one_is_stopped(found: _Found) -> Iterator[Figure]:
    for name, what, unit, scale in (
        ("p50_ms", "median latency", "ms", 1),
        ("p99_ms", "p99 latency", "ms", 1),
        ("slow_share", f"share that took more than {SLOW_MS:g} ms", "%", 100),
        ("failed_share", "share that failed", "%", 100),
    ):
        rounds = {way: [each * scale for each in found[f"stopped.{name}.{way}"]] for way in _WAYS}
        yield Figure(
            name=f"queue_clients.stopped.{name.partition('_')[0]}",
            what=f"sends with fault avoidance, {STEADY_RATE}/s, while one of two brokers is stopped: {what}",
            unit=unit,
            rounds=rounds["with"],
            beside=Beside(what=_SAID["without"], rounds=rounds["without"]),
            also=[Beside(what=_SAID["short"], rounds=rounds["short"])],
        )
