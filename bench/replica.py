"""Durable sends with a second copy in an object store, beside sends without one, and the pauses that bases cause."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench import child, daemon, object_server
from bench.daemon import Daemon
from bench.figures import Beside, Figure, Goal
from bench.load import check
from bench.messages import HOUR_MS, TOPIC
from bench.place import directory
from bench.plan import Plan

IN_FLIGHT, IN_FLIGHT_QUICK = (1, 64, 256, 1024), (1, 64)
_CONNECTIONS = {256: 4, 1024: 8}
_GOALS_AT = 64
_DELAYS = {"delay_min": 12 * HOUR_MS, "delay_max": 23 * HOUR_MS}
_BYTES_MAX = 240
_PAUSE_MS_MAX = 250
_Found = dict[tuple[str, int], list[dict[str, Any]]]


class _Mode(NamedTuple):
    """Setting of the daemon, and how long a put takes. ``cpu_max`` is a goal, relative to the CPU time without copy."""

    name: str
    replica: str
    put_ms: int
    what: str
    cpu_max: float | None = None
    has_link: bool = False  # with a standby on this host


_OFF = _Mode("off", "off", 0, "no copy")
_COPIES = (
    _Mode("async", "async", 20, "async copy, puts of 20 ms", 1.05),
    _Mode("sync_2ms", "sync", 2, "sync copy, puts of 2 ms", 1.4),
    _Mode("sync_20ms", "sync", 20, "sync copy, puts of 20 ms", 1.4),
    _Mode("sync_50ms", "sync", 50, "sync copy, puts of 50 ms", 1.4),
    _Mode("link_20ms", "sync", 20, "direct link to a standby, puts of 20 ms", has_link=True),
)


def measure(plan: Plan) -> list[Figure]:
    """Return the rates of each mode beside those without a copy, its goals at 64 in flight, and the longest batch."""
    levels = IN_FLIGHT_QUICK if plan.is_quick else IN_FLIGHT
    count, idle_s = plan.pick(full=100_000, quick=20_000), plan.pick(full=20, quick=2)
    found: _Found = defaultdict(list)
    idle: dict[str, list[float]] = defaultdict(list)
    bases: list[dict[str, Any]] = []
    plan.expect(plan.rounds * (len(levels) * (1 + len(_COPIES)) + len(_COPIES) + 1))
    for _ in plan.each_round():
        for mode in (_OFF, *_COPIES):
            with object_server.running(mode.put_ms) as environment, directory() as data:
                copy = () if mode is _OFF else ("--replica-url", f"s3://{object_server.BUCKET}/orders")
                options = ("--replica", mode.replica, *copy)
                with _running(data, mode, options, environment) as ours:
                    for in_flight in levels:
                        plan.step(f"{mode.what}, {in_flight} in flight")
                        found[mode.name, in_flight].append(_sent(plan, ours, in_flight))
                    if mode is not _OFF:
                        plan.step(f"{mode.what}, idle")
                        idle[mode.name].append(_idle_segments(ours, idle_s))
        plan.step("the longest batch during a base")
        with directory() as data:
            bases.append(child.run("replica_base", data, count))
    return [
        *(_rate(mode, in_flight, found) for in_flight in levels for mode in (_OFF, *_COPIES)),
        *(figure for mode in _COPIES for figure in _goals(mode, found)),
        *(
            Figure(
                name=f"replica.{mode.name}.idle",
                what=f"segments written while nothing happens for {idle_s} s, {mode.what}",
                unit="segments",
                rounds=idle[mode.name],
                goal=Goal(sign="<=", bound=0),
            )
            for mode in _COPIES
        ),
        *_pauses(bases),
    ]


@contextmanager
def _running(data: Path, mode: _Mode, options: tuple[str, ...], environment: dict[str, str]) -> Iterator[Daemon]:
    """Run the daemon of a mode; with a direct link, together with its standby."""
    link = {"DMQ_REPLICA_LINK": "127.0.0.1:0"} if mode.has_link else {}
    with ExitStack() as stack:
        ours = stack.enter_context(daemon.running(data / "data", options=options, environment=environment | link))
        if mode.has_link:
            standby = daemon.running(data / "standby", options=options, environment=environment | link, is_standby=True)
            stack.enter_context(standby)
            while ours.status().replica.link != "in_sync":
                time.sleep(0.1)
        yield ours


def _sent(plan: Plan, ours: Daemon, in_flight: int) -> dict[str, Any]:
    """Send for some seconds; return the rate, and CPU time, bytes and segments for each message."""
    before, before_s = ours.status().replica, ours.cpu_s
    done = plan.load.run(
        "send",
        address=ours.address,
        topic=TOPIC,
        in_flight=in_flight,
        connections=_CONNECTIONS.get(in_flight, 1),
        seconds=1.0 if plan.is_quick else 4.0,
        warm_up=0.3 if plan.is_quick else 1.0,
        **_DELAYS,
    )
    check(done)
    calls = max(1, done["calls_all"])  # the other figures cover the warm-up too
    cpu_s = ours.cpu_s - before_s
    after = _when_sent(ours)
    return {
        **done,
        "cpu_us": cpu_s / calls * 1e6,
        "bytes": (after.sent_bytes - before.sent_bytes) / calls,
        "messages_per_segment": calls / max(1, after.segments - before.segments),
    }


def _when_sent(ours: Daemon) -> Any:  # noqa: ANN401 - a message of the generated module
    """Return the figures of the copy once it has everything."""
    while (found := ours.status().replica).lag_batches or found.lag_bytes:
        time.sleep(0.1)
    return found


def _idle_segments(ours: Daemon, idle_s: int) -> float:
    before = _when_sent(ours).segments
    time.sleep(idle_s)
    return float(ours.status().replica.segments - before)


def _rate(mode: _Mode, in_flight: int, found: _Found) -> Figure:
    rounds = found[mode.name, in_flight]
    off = Beside(what=_OFF.what, rounds=_all(found[_OFF.name, in_flight], "messages_per_s"))
    names = ("cpu_us", *(() if mode is _OFF else ("bytes", "messages_per_segment")))
    return Figure(
        name=f"replica.{mode.name}.{in_flight}",
        what=f"durable delayed sends, one message per call, {in_flight} in flight, {mode.what}",
        unit="messages/s",
        rounds=_all(rounds, "messages_per_s"),
        beside=None if mode is _OFF else off,
        details={
            **{name: median(_all(rounds, name)) for name in names},
            **{f"{q}_ms": median(float(each["latency_ms"][q]) for each in rounds) for q in ("p50", "p99")},
        },
    )


def _goals(mode: _Mode, found: _Found) -> list[Figure]:
    rounds = found[mode.name, _GOALS_AT]
    of = f"replica.{mode.name}.{_GOALS_AT}"
    what = f"{_GOALS_AT} in flight, {mode.what}"
    figures = [
        Figure(
            name=f"{of}.cpu",
            what=f"CPU time of the daemon for a message, {what}",
            unit="us",
            rounds=_all(rounds, "cpu_us"),
            beside=Beside(what=_OFF.what, rounds=_all(found[_OFF.name, _GOALS_AT], "cpu_us")),
            goal=Goal(sign="<=", bound=mode.cpu_max, of="ratio") if mode.cpu_max else None,
        ),
        Figure(
            name=f"{of}.bytes",
            what=f"bytes in the object store for a message with a body of 200 random bytes, {what}",
            unit="B",
            rounds=_all(rounds, "bytes"),
            goal=Goal(sign="<=", bound=_BYTES_MAX),
        ),
    ]
    if mode.replica == "sync":
        figures.append(
            Figure(
                name=f"{of}.p50",
                what=f"time until a send is answered, median, {what}",
                unit="ms",
                rounds=[float(each["latency_ms"]["p50"]) for each in rounds],
                goal=None if mode.has_link else Goal(sign="<=", bound=2 * mode.put_ms + 20),
                beside=_latency("sync_20ms", "without a link", found) if mode.has_link else None,
                also=[_latency(_OFF.name, _OFF.what, found)] if mode.has_link else (),
            )
        )
    return figures


def _latency(name: str, what: str, found: _Found) -> Beside:
    """Return the median latencies of a mode."""
    return Beside(what=what, rounds=[float(each["latency_ms"]["p50"]) for each in found[name, _GOALS_AT]])


def _pauses(bases: list[dict[str, Any]]) -> list[Figure]:
    return [
        Figure(
            name=f"replica.base.{name}",
            what=f"longest batch of the writer during the {name} base of a store under load, and without a base",
            unit="ms",
            rounds=_all(bases, name),
            beside=Beside(what="no base", rounds=_all(bases, f"{name}_floor")),
            goal=Goal(sign="<=", bound=_PAUSE_MS_MAX),
            details={"base_s": median(_all(bases, f"{name}_s"))},
        )
        for name in ("first", "second")
    ]


def _all(rounds: list[dict[str, Any]], name: str) -> list[float]:
    return [float(each[name]) for each in rounds]
