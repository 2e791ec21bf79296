"""Front processes before one store process, beside one process that does all: sends, receives, and whose CPU it is."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from bench import burst, daemon
from bench.daemon import Daemon
from bench.figures import Beside, Figure, Goal
from bench.lateness import P99_MS, POLLS, RATE_HELD
from bench.load import LoadFailed, check
from bench.messages import TOPIC
from bench.place import directory
from bench.plan import Plan
from bench.rocketmq import NAME as PEER
from bench.rocketmq import TOPICS
from bench.send import CONNECTIONS, DELAYS, IN_FLIGHT, IN_FLIGHT_QUICK
from broker_adapter.contracts.message import Envelope, SendReceipt
from broker_adapter.runtime.clock import SystemClock
from dmq.acl.quotas import ADDRESS, Holder
from dmq.http2 import LOOPBACK
from dmq.processes import frames

ONE, FRONTS = "one process", "fronts"
STORE_US_MAX = 13.0
TIMES_THE_PEER, TIMES_ONE = 1.1, 1.3
PROCESSORS = (4, 8, 16)
_BATCH = 64
_BODY_BYTES = 200
_Found = dict[tuple[str, str, int], list[dict[str, Any]]]


def measure(plan: Plan) -> list[Figure]:
    """Return sends and receives with fronts and without, lateness and a burst with them, and what each process took."""
    levels = IN_FLIGHT_QUICK if plan.is_quick else IN_FLIGHT
    found: _Found = defaultdict(list)
    plan.expect(
        plan.rounds * (2 * (len(levels) * len(DELAYS) + 1) + len(P99_MS) + 1 + (len(levels) * 2 if plan.peer else 0))
    )
    for number in plan.each_round():
        modes = (ONE, FRONTS) if number % 2 else (FRONTS, ONE)
        for mode in modes:
            with _daemon(mode) as ours:
                for in_flight in levels:
                    for kind in DELAYS:
                        _send(plan, found, (kind, mode, in_flight), ours.address, ours)
            with _daemon(mode) as ours:
                _receive(plan, found, mode, ours)
        for rate in P99_MS:
            with _daemon(FRONTS) as ours:
                _lateness(plan, found, rate, ours)
        with _daemon(FRONTS) as ours:
            plan.step("a burst to a client")
            found["burst", FRONTS, 0].append(burst.to_client(plan, ours, plan.pick(full=20_000, quick=2_000)))
        if plan.peer is not None:
            with plan.peer.awake() as address:
                for in_flight in levels:
                    for kind in DELAYS:
                        _send(plan, found, (kind, PEER, in_flight), address, None)
    return [
        *(_of_sends(kind, in_flight, found) for in_flight in levels for kind in DELAYS),
        *(figure for in_flight in levels for kind in DELAYS for figure in _to_peer(kind, in_flight, found)),
        *_of_cpu(levels[-1], found),
        *_of_receives(found),
        *(figure for rate in P99_MS for figure in _of_lateness(rate, found)),
        Figure(
            name="fronts.burst.client",
            what="messages due at one instant, received by a client through fronts, and their acknowledgements durable",
            unit="ms",
            rounds=[each["last_ms"] for each in found["burst", FRONTS, 0]],
            goal=Goal(sign="<=", bound=burst.CLIENT_LAST_MS),
        ),
        _codec(plan),
    ]


@contextmanager
def _daemon(mode: str) -> Iterator[Daemon]:
    count = max(2, min(4, os.cpu_count() or 1))
    with directory() as data, daemon.running(data, processes=1 if mode == ONE else count) as ours:
        yield ours


def _send(plan: Plan, found: _Found, key: tuple[str, str, int], address: str, ours: Daemon | None) -> None:
    kind, mode, in_flight = key
    plan.step(f"{kind} sends, {mode}, {in_flight} in flight")
    before = ours.cpu_by_process() if ours is not None else ()
    done = plan.load.run(
        "send",
        address=address,
        topic=TOPICS[kind] if ours is None else TOPIC,
        in_flight=in_flight,
        connections=CONNECTIONS.get(in_flight, 1),
        seconds=0.7 if plan.is_quick else 2.5,
        warm_up=0.2 if plan.is_quick else 0.5,
        **DELAYS[kind],
    )
    check(done)
    found[key].append({**done, "cpu_us": _cpu_us(ours, before, done["calls_all"])})


def _receive(plan: Plan, found: _Found, mode: str, ours: Daemon) -> None:
    count = plan.pick(full=40_000, quick=4_000)
    plan.step(f"{count} received and acknowledged, {mode}")
    check(plan.load.run("send", address=ours.address, topic=TOPIC, count=count, batch=100, in_flight=4))
    before = ours.cpu_by_process()
    done = plan.load.run(
        "receive", address=ours.address, topic=TOPIC, group="bench-fronts", count=count, parallel=POLLS
    )
    if done["received"] != count:
        raise LoadFailed(f"{done['received']} of {count} messages were received; {done['codes']}")
    per_s = count / done["seconds"]
    found["receive", mode, 0].append({"messages_per_s": per_s, "cpu_us": _cpu_us(ours, before, count)})


def _cpu_us(ours: Daemon | None, before: Sequence[float], calls: int) -> list[float]:
    if ours is None:
        return []
    return [(now - then) / max(1, calls) * 1e6 for then, now in zip(before, ours.cpu_by_process(), strict=True)]


def _lateness(plan: Plan, found: _Found, rate: int, ours: Daemon) -> None:
    seconds = plan.pick(full=10, quick=2)
    plan.step(f"{rate}/s for {seconds} s through fronts")
    receiver = plan.load.start(
        "receive", address=ours.address, topic=TOPIC, group="bench-late", count=rate * seconds, parallel=POLLS
    )
    try:
        sent = plan.load.run(
            "send",
            address=ours.address,
            topic=TOPIC,
            rate=rate,
            in_flight=256,
            connections=4,
            count=rate * seconds,
            delay_min=1000,
            delay_max=1000,
        )
        check(sent)
        found["lateness", FRONTS, rate].append({"sent": sent, "received": receiver.result()})
    finally:
        receiver.end()


def _of_sends(kind: str, in_flight: int, found: _Found) -> Figure:
    rounds, alone = found[kind, FRONTS, in_flight], found[kind, ONE, in_flight]
    connections = CONNECTIONS.get(in_flight, 1)
    return Figure(
        name=f"fronts.{kind}.{in_flight}",
        what=f"durable {kind} sends through fronts, {in_flight} in flight on {connections} connection(s)",
        unit="messages/s",
        rounds=_rates(rounds),
        goal=Goal(sign=">=", bound=1.0, of="ratio"),
        beside=Beside(what=ONE, rounds=_rates(alone)),
        details={
            "p50_ms": median(each["latency_ms"]["p50"] for each in rounds),
            "p99_ms": median(each["latency_ms"]["p99"] for each in rounds),
            "store_cpu_us": _store_us(rounds),
            "fronts_cpu_us": _fronts_us(rounds),
            "one_process_cpu_us": _store_us(alone),
        },
    )


def _to_peer(kind: str, in_flight: int, found: _Found) -> list[Figure]:
    peers = found.get((kind, PEER, in_flight))
    if not peers:
        return []
    return [
        Figure(
            name=f"fronts.{kind}.{in_flight}.to_peer",
            what=f"the same {kind} sends beside {PEER}",
            unit="messages/s",
            rounds=_rates(found[kind, FRONTS, in_flight]),
            goal=Goal(sign=">=", bound=TIMES_THE_PEER, of="ratio") if in_flight >= _BATCH else None,
            beside=Beside(what=PEER, rounds=_rates(peers)),
        )
    ]


def _of_cpu(most: int, found: _Found) -> list[Figure]:
    """Return what a send costs each side, and what that comes to on more processors than there are here."""
    rounds = found["normal", FRONTS, most]
    store, fronts = [each["cpu_us"][0] for each in rounds], [sum(each["cpu_us"][1:]) for each in rounds]
    made = [
        Figure(
            name="fronts.cpu.store",
            what=f"CPU of the store process for a durable send, {most} in flight",
            unit="us",
            rounds=store,
            goal=Goal(sign="<=", bound=STORE_US_MAX),
            beside=Beside(what="of all fronts", rounds=fronts),
        )
    ]
    for processors in PROCESSORS:
        limits = [
            {"the store process": 1e6 / ours, "processors": processors * 1e6 / (ours + theirs)}
            for ours, theirs in zip(store, fronts, strict=True)
        ]
        made.append(
            Figure(
                name=f"fronts.projected.{processors}",
                what=f"durable sends that {processors} processors would give by the CPU of each, clients elsewhere",
                unit="messages/s",
                rounds=[min(each.values()) for each in limits],
                details={"limited_by": min(limits[0], key=limits[0].__getitem__)},
            )
        )
    return made


def _of_receives(found: _Found) -> list[Figure]:
    rounds, alone = found["receive", FRONTS, 0], found["receive", ONE, 0]
    return [
        Figure(
            name="fronts.receive",
            what=f"a backlog received and acknowledged one by one through fronts, {POLLS} receives at once",
            unit="messages/s",
            rounds=_rates(rounds),
            goal=Goal(sign=">=", bound=TIMES_ONE, of="ratio"),
            beside=Beside(what=ONE, rounds=_rates(alone)),
            details={"store_cpu_us": _store_us(rounds), "fronts_cpu_us": _fronts_us(rounds)},
        )
    ]


def _of_lateness(rate: int, found: _Found) -> list[Figure]:
    rounds = found["lateness", FRONTS, rate]
    return [
        Figure(
            name=f"fronts.lateness.{rate}",
            what=f"lateness p99 at a consumer through fronts, {rate}/s",
            unit="ms",
            rounds=[each["received"]["lateness_ms"]["p99"] for each in rounds],
            goal=Goal(sign="<=", bound=P99_MS[rate]),
        ),
        Figure(
            name=f"fronts.lateness.{rate}.sent",
            what=f"sends answered per second meanwhile, of {rate} offered",
            unit="messages/s",
            rounds=[each["sent"]["messages_per_s"] for each in rounds],
            goal=Goal(sign=">=", bound=rate * RATE_HELD),
        ),
    ]


def _codec(plan: Plan) -> Figure:
    """Return what a send costs both ends in bytes written and read, both ways."""
    holders = (Holder(ADDRESS, LOOPBACK),)
    sends = [
        frames.SendMessages(at, [Envelope(TOPIC, f"01{at:032X}", bytes(_BODY_BYTES), "tag")], holders, 0)
        for at in range(_BATCH)
    ]
    answers = [frames.Sent(at, [SendReceipt(f"01{at:032X}", 3, at)]) for at in range(_BATCH)]
    clock, rounds = SystemClock(), []
    times = plan.pick(full=2_000, quick=100)
    for _ in range(plan.rounds):
        started_s = clock.monotonic_s()
        for _ in range(times):
            frames.from_front(memoryview(frames.encode(sends))[frames.LENGTH_BYTES :])
            frames.from_store(memoryview(frames.encode(answers))[frames.LENGTH_BYTES :])
        rounds.append((clock.monotonic_s() - started_s) / times / _BATCH * 1e6)
    return Figure(
        name="fronts.codec",
        what=f"a send and its receipt written and read by both ends, {_BATCH} in a batch, {_BODY_BYTES} bytes of body",
        unit="us",
        rounds=rounds,
    )


def _rates(rounds: Sequence[dict[str, Any]]) -> list[float]:
    return [float(each["messages_per_s"]) for each in rounds]


def _store_us(rounds: Sequence[dict[str, Any]]) -> float:
    return float(median(each["cpu_us"][0] for each in rounds))


def _fronts_us(rounds: Sequence[dict[str, Any]]) -> float:
    return float(median(sum(each["cpu_us"][1:]) for each in rounds))
