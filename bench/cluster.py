"""A daemon in front of Apache RocketMQ: how late, how many, and what one hop more costs. Only with ``--peer``."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from statistics import median, quantiles
from typing import Any

from bench import daemon
from bench.figures import Beside, Figure, Goal
from bench.load import check
from bench.place import directory
from bench.plan import Plan
from bench.rocketmq import TOPICS
from broker_adapter.contracts.adapter import Subscription
from broker_adapter.rocketmq import ClusterOptions, RocketMQBroker
from broker_adapter.runtime.clock import SystemClock

RATE = 2_000
P99_MS = 20.0
_GROUP = "bench-cluster"
_RECEIVERS = 8
_LEVELS = (1, 64)
_AHEAD_MS = 5_000
_WAIT_S_MAX = 300.0


def measure(plan: Plan) -> list[Figure]:
    """Return lateness beside RocketMQ's own, the rate of a backlog beside direct sends, and the hop beside none."""
    peer = plan.peer
    if peer is None:
        return []
    seconds, backlog = plan.pick(full=20, quick=3), plan.pick(full=20_000, quick=3_000)
    found: defaultdict[str, list[float]] = defaultdict(list)
    plan.expect(plan.rounds * (3 + 2 * len(_LEVELS)))
    with asyncio.Runner() as runner:  # one loop for all rounds: grpcio stays with the first that it meets
        for number in plan.each_round():
            with peer.awake() as address, directory() as data:
                group = f"{_GROUP}-{number}"
                peer.make_group(group)
                with daemon.running(data, options=("--broker", "rocketmq", "--endpoints", address)) as ours:
                    _through_the_daemon(plan, ours, address, found, RATE * seconds, backlog)
                plan.step(f"{RATE}/s for {seconds} s, RocketMQ's own delay")
                late_ms = _own_delay(plan, runner, address, group, RATE * seconds)
                found["own.p50"].append(median(late_ms))
                found["own.p99"].append(quantiles(late_ms, n=100)[98])
    return _figures(found, seconds, backlog)


def _through_the_daemon(
    plan: Plan, ours: daemon.Daemon, address: str, found: dict[str, list[float]], count: int, backlog: int
) -> None:
    plan.step(f"{RATE}/s for {count // RATE} s through the daemon")
    _lateness(plan, ours, found, count)
    plan.step(f"{backlog} due at once")
    _backlog(plan, ours, found, backlog)
    for in_flight in _LEVELS:
        for name, where in (("hop", ours.address), ("direct", address)):
            plan.step(f"{name}, {in_flight} in flight")
            _pass_through(plan, found, f"{name}.{in_flight}", where, in_flight)


def _lateness(plan: Plan, ours: daemon.Daemon, found: dict[str, list[float]], count: int) -> None:
    cpu_s, began_s = ours.cpu_s, time.monotonic()
    sent = plan.load.run(
        "send",
        address=ours.address,
        topic=TOPICS["normal"],
        count=count,
        rate=RATE,
        in_flight=256,
        delay_min=1_000,
        delay_max=_AHEAD_MS,
    )
    check(sent)
    cluster = _forwarded(ours, count)
    found["sent_per_s"].append(sent["messages_per_s"])
    found["ok.p50"].append(cluster.lateness.p50_ms)
    found["ok.p99"].append(cluster.lateness.p99_ms)
    found["cpu_share"].append((ours.cpu_s - cpu_s) / (time.monotonic() - began_s))


def _backlog(plan: Plan, ours: daemon.Daemon, found: dict[str, list[float]], count: int) -> None:
    """Have so many messages due within one millisecond, and see how long they take."""
    before = ours.status().cluster.forwarded
    due_s = time.time() + _AHEAD_MS / 1000 + count / 2_000
    ahead_ms = int((due_s - time.time()) * 1000)
    began_s = time.monotonic()
    sent = plan.load.run(
        "send",
        address=ours.address,
        topic=TOPICS["normal"],
        count=count,
        in_flight=256,
        delay_min=ahead_ms,
        delay_max=ahead_ms + 1,
    )
    check(sent)
    took_s = time.monotonic() - began_s
    _forwarded(ours, before + 1)
    first_s = time.monotonic()
    _forwarded(ours, before + count)
    # What was sent over some time falls due over the same time: the rate is bounded by both.
    found["forwarded_per_s"].append(count / (time.monotonic() - first_s))
    found["offered_per_s"].append(count / took_s)


def _forwarded(ours: daemon.Daemon, count: int) -> Any:  # noqa: ANN401 - a wire message
    until_s = time.monotonic() + _WAIT_S_MAX
    while (cluster := ours.status().cluster).forwarded < count:
        if time.monotonic() > until_s:
            raise RuntimeError(f"{cluster.forwarded} of {count} messages were forwarded")
        time.sleep(0.02)
    return cluster


def _pass_through(plan: Plan, found: dict[str, list[float]], name: str, address: str, in_flight: int) -> None:
    done = plan.load.run(
        "send",
        address=address,
        topic=TOPICS["normal"],
        in_flight=in_flight,
        connections=1 if in_flight == 1 else 4,
        seconds=0.7 if plan.is_quick else 2.5,
        warm_up=0.2 if plan.is_quick else 0.5,
    )
    check(done)
    found[f"{name}.per_s"].append(done["messages_per_s"])
    found[f"{name}.p50"].append(done["latency_ms"]["p50"])


def _own_delay(plan: Plan, runner: asyncio.Runner, address: str, group: str, count: int) -> list[float]:
    sending = plan.load.start(
        "send",
        address=address,
        topic=TOPICS["delayed"],
        count=count,
        rate=RATE,
        in_flight=256,
        delay_min=1_000,
        delay_max=_AHEAD_MS,
    )
    late_ms = runner.run(_received(address, group, count))
    check(sending.result())
    return late_ms


async def _received(address: str, group: str, count: int) -> list[float]:
    """Return how late each message came to a consumer; those of earlier runs in the topic are passed over."""
    clock = SystemClock()
    began_ms = clock.now_ms()
    late_ms: list[float] = []
    broker = RocketMQBroker(ClusterOptions(endpoints=(address,)), clock)

    async def receive() -> None:
        while len(late_ms) < count:
            found = await broker.receive(
                group, Subscription(TOPICS["delayed"]), batch_max=32, invisible_ms=60_000, wait_ms=5_000
            )
            at_ms = clock.now_ms()
            late_ms.extend(at_ms - each.deliver_at_ms for each in found if each.deliver_at_ms > began_ms)
            await broker.ack(group, TOPICS["delayed"], [each.receipt_handle for each in found])

    try:
        async with asyncio.timeout(_WAIT_S_MAX):
            await broker.ensure_group(group)
            await asyncio.gather(*(receive() for _ in range(_RECEIVERS)))
    finally:
        await broker.close()
    return late_ms


def _figures(found: dict[str, list[float]], seconds: int, backlog: int) -> list[Figure]:
    what = f"lateness at {RATE}/s for {seconds} s through the daemon to the cluster's OK"
    return [
        *(
            Figure(
                name=f"cluster.lateness.{q}",
                what=f"{what} (bucket bound)",
                unit="ms",
                rounds=found[f"ok.{q}"],
                goal=Goal(sign="<=", bound=P99_MS) if q == "p99" else None,
                beside=Beside(what="RocketMQ's own delay, to a consumer", rounds=found[f"own.{q}"]),
                details={"sent_per_s": median(found["sent_per_s"]), "cpu_share": median(found["cpu_share"])},
            )
            for q in ("p50", "p99")
        ),
        Figure(
            name="cluster.forwarded",
            what=f"messages forwarded a second, {backlog} due as fast as they were sent",
            unit="messages/s",
            rounds=found["forwarded_per_s"],
            beside=Beside(what="sent directly, 64 in flight", rounds=found["direct.64.per_s"]),
            details={"offered_per_s": median(found["offered_per_s"])},
        ),
        *(
            Figure(
                name=f"cluster.hop.{in_flight}.{name}",
                what=f"undelayed sends through the daemon, {in_flight} in flight: {said}",
                unit=unit,
                rounds=found[f"hop.{in_flight}.{name}"],
                beside=Beside(what="directly", rounds=found[f"direct.{in_flight}.{name}"]),
            )
            for in_flight in _LEVELS
            for name, said, unit in (("per_s", "rate", "messages/s"), ("p50", "median latency", "ms"))
        ),
    ]
