"""Durable sends through gRPC, one message per call, beside servers that store nothing, and beside the peer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from bench import daemon, echo, echo_http2
from bench.daemon import Daemon
from bench.echo import Echo
from bench.figures import Beside, Figure, Goal
from bench.load import check
from bench.messages import HOUR_MS, TOPIC
from bench.place import directory, syncs
from bench.plan import Plan
from bench.rocketmq import NAME as PEER
from bench.rocketmq import TOPICS

IN_FLIGHT, IN_FLIGHT_QUICK = (1, 16, 64, 256), (1, 64)
CONNECTIONS = {256: 4}
PER_S = {64: 20_000, 256: 28_000}
TIMES_THE_PEER = 3.0
ECHO, GRPCIO_ECHO, ON_GRPCIO = "echo on our transport", "grpcio echo", "this daemon on grpcio"
# RocketMQ takes no more than a day.
DELAYS: dict[str, dict[str, int]] = {"normal": {}, "delayed": {"delay_min": 12 * HOUR_MS, "delay_max": 23 * HOUR_MS}}
_DISK = "disk"
_SYNCS = 500
_Found = dict[tuple[str, int], list[dict[str, Any]]]


def measure(plan: Plan) -> list[Figure]:
    """Return a figure for each kind of message and number in flight, what stands beside it, and the disk's own rate."""
    levels = IN_FLIGHT_QUICK if plan.is_quick else IN_FLIGHT
    found: _Found = defaultdict(list)
    disk: list[float] = []
    plan.expect(plan.rounds * (1 + len(levels) * (5 + (2 if plan.peer else 0))))
    with ExitStack() as last:
        echoes = {
            ECHO: last.enter_context(echo_http2.running("parsed")),
            GRPCIO_ECHO: last.enter_context(echo.running("parsed")),
        }
        for _ in plan.each_round():
            plan.step("the disk alone")
            with directory() as data:
                took_ms = syncs(data / "probe", count=_SYNCS // 10 if plan.is_quick else _SYNCS)
            disk.append(1000 * len(took_ms) / sum(took_ms))
            for in_flight in levels:
                run = _Run(plan, found, in_flight)
                for name, server in echoes.items():
                    run.measure(name, server.address, server, echo=True)
            with directory() as data:
                _daemons(plan, found, data, levels)
            if plan.peer is not None:
                with plan.peer.awake() as address:
                    for in_flight in levels:
                        for kind, delays in DELAYS.items():
                            _Run(plan, found, in_flight).measure(
                                f"peer {kind}", address, None, topic=TOPICS[kind], **delays
                            )
    return [
        *(_figure(kind, in_flight, found) for in_flight in levels for kind in DELAYS),
        *(figure for in_flight in levels for kind in DELAYS for figure in _to_peer(kind, in_flight, found)),
        _echo(levels, found),
        Figure(
            name="grpc_send.disk",
            what="appends of 4 KiB, each synced (fdatasync) before the next: what the disk gives one writer",
            unit="syncs/s",
            rounds=disk,
        ),
    ]


def _daemons(plan: Plan, found: _Found, data: Path, levels: tuple[int, ...]) -> None:
    with daemon.running(data / "ours") as ours:
        for in_flight in levels:
            for kind, delays in DELAYS.items():
                _Run(plan, found, in_flight).measure(kind, ours.address, ours, topic=TOPIC, **delays)
    with daemon.running(data / "grpcio", transport="grpcio") as other:
        for in_flight in levels:
            _Run(plan, found, in_flight).measure(ON_GRPCIO, other.address, other, topic=TOPIC)


class _Run:
    """One run of the load generator."""

    def __init__(self, plan: Plan, found: _Found, in_flight: int) -> None:
        self._plan = plan
        self._found = found
        self._in_flight = in_flight

    def measure(self, name: str, address: str, server: Daemon | Echo | None, **options: object) -> None:
        """Send for some seconds; note the rate, and the CPU time of ``server`` for each call."""
        plan, in_flight = self._plan, self._in_flight
        plan.step(f"{name}, {in_flight} in flight")
        cpu_s: Callable[[], float] = (lambda: server.cpu_s) if server is not None else (lambda: 0.0)
        before_s = cpu_s()
        done = plan.load.run(
            "send",
            address=address,
            in_flight=in_flight,
            connections=CONNECTIONS.get(in_flight, 1),
            seconds=0.7 if plan.is_quick else 2.5,
            warm_up=0.2 if plan.is_quick else 0.5,
            **options,
        )
        check(done)
        calls = max(1, done["calls_all"])  # the CPU times cover the warm-up too
        self._found[name, in_flight].append(
            {**done, "cpu_us": (cpu_s() - before_s) / calls * 1e6, "load_cpu_us": done["cpu_s"] / calls * 1e6}
        )


def _figure(kind: str, in_flight: int, found: _Found) -> Figure:
    rounds = found[kind, in_flight]
    names = [GRPCIO_ECHO, ON_GRPCIO]
    also = [Beside(what=name, rounds=_rates(found[name, in_flight])) for name in names]
    if peers := found.get((f"peer {kind}", in_flight)):
        also.append(Beside(what=PEER, rounds=_rates(peers)))
    connections = CONNECTIONS.get(in_flight, 1)
    bound = PER_S.get(in_flight)
    return Figure(
        name=f"grpc_send.{kind}.{in_flight}",
        what=f"durable {kind} sends, one message per call, {in_flight} in flight on {connections} connection(s)",
        unit="messages/s",
        rounds=_rates(rounds),
        goal=Goal(sign=">=", bound=bound) if bound else None,
        beside=Beside(what=ECHO, rounds=_rates(found[ECHO, in_flight])),
        also=also,
        details={
            "p50_ms": median(each["latency_ms"]["p50"] for each in rounds),
            "p99_ms": median(each["latency_ms"]["p99"] for each in rounds),
            "cpu_us": median(each["cpu_us"] for each in rounds),
            "load_cpu_us": median(each["load_cpu_us"] for each in rounds),
            "cpu_us_beside": {
                name: median(each["cpu_us"] for each in found[name, in_flight]) for name in (ECHO, *names)
            },
        },
    )


def _to_peer(kind: str, in_flight: int, found: _Found) -> list[Figure]:
    peers = found.get((f"peer {kind}", in_flight))
    if not peers or in_flight not in PER_S:
        return []
    return [
        Figure(
            name=f"grpc_send.{kind}.{in_flight}.to_peer",
            what=f"the same {kind} sends beside {PEER}",
            unit="messages/s",
            rounds=_rates(found[kind, in_flight]),
            goal=Goal(sign=">=", bound=TIMES_THE_PEER, of="ratio"),
            beside=Beside(what=PEER, rounds=_rates(peers)),
        )
    ]


def _echo(levels: tuple[int, ...], found: _Found) -> Figure:
    most = levels[-1]
    return Figure(
        name="grpc_send.echo",
        what=f"an echo on our transport that parses and builds an answer, {most} in flight: no disk, no broker",
        unit="calls/s",
        rounds=_rates(found[ECHO, most]),
        beside=Beside(what=GRPCIO_ECHO, rounds=_rates(found[GRPCIO_ECHO, most])),
    )


def _rates(rounds: list[dict[str, Any]]) -> list[float]:
    return [float(each["messages_per_s"]) for each in rounds]
