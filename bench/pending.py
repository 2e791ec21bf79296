"""What a message costs while it waits, in memory and on disk, and how soon a killed daemon is ready again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench import child, daemon
from bench.figures import Figure, Goal
from bench.load import check
from bench.messages import HOUR_MS, TOPIC
from bench.place import directory, disk_bytes
from bench.plan import Plan, Settled
from broker_adapter.runtime.clock import SystemClock

RAM_BYTES, DISK_BYTES = 100, 480
READY_S, IMPORTS_CPU_S = 0.5, 0.5
_SETTLED_S = 3.0
_SETTLE_S_MAX = 60.0
_QUICK_COUNT = 20_000
# What `dmq serve` imports before it opens the store.
_IMPORTS = "import dmq.__main__, dmq.cli.app, dmq.cli.service.serve, dmq.config.settings, dmq.daemon"


def measure(plan: Plan) -> list[Figure]:
    """Return memory, disk and readiness for a store filled in process, and for one filled through gRPC."""
    count = _QUICK_COUNT if plan.is_quick else plan.pending
    inside: list[dict[str, Any]] = []
    outside: list[dict[str, Any]] = []
    imports: list[tuple[float, float]] = []
    plan.expect(6 * plan.rounds)
    for _ in plan.each_round():
        imports += [_imports() for _ in range(3)]
        plan.step("fill in process")
        with directory() as data:
            inside.append(filled_inside(data, count, lambda: plan.step("settle")))
            plan.step("ready after SIGKILL")
            inside[-1] |= reopened(data, count)
        plan.step("fill through gRPC")
        with directory() as data:
            outside.append(_outside(plan, data, count))
            plan.step("ready after SIGKILL")
            outside[-1] |= reopened(data, count)
    return [*_figures("in_process", count, inside, imports), *_figures("grpc", count, outside, imports), *_of(imports)]


def filled_inside(data: Path, count: int, on_full: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Fill a store in a process of its own, which is killed in the end, and return what the messages took."""
    filler = child.Child("fill", data, count)
    try:
        empty = 0
        for said in filler.said():
            if said["event"] == "empty":
                empty = said["rss"]
            elif said["event"] == "full":
                full_rss, full_disk, rate = said["rss"], disk_bytes(data), said["per_s"]
                break
        else:
            raise RuntimeError("the process that fills the store ended")
        on_full()
        process = psutil.Process(filler.process.pid)
        settled = _settle(data, lambda: process.memory_info().rss)
    finally:
        filler.end(is_killed=True)
    return _taken(count, empty, full_rss, full_disk, settled) | {"per_s": rate}


def _outside(plan: Plan, data: Path, count: int) -> dict[str, Any]:
    ours = daemon.Daemon(data)
    try:
        empty = ours.rss_bytes
        sent = plan.load.run(
            "send",
            address=ours.address,
            topic=TOPIC,
            count=count,
            batch=32,
            in_flight=8,
            delay_min=12 * HOUR_MS,
            delay_max=36 * HOUR_MS,
            whole_seconds=True,
        )
        check(sent)
        full_rss, full_disk = ours.rss_bytes, disk_bytes(data)
        plan.step("settle")
        settled = _settle(data, lambda: ours.rss_bytes)
    finally:
        ours.end(is_killed=True)
    return _taken(count, empty, full_rss, full_disk, settled) | {"per_s": sent["messages_per_s"]}


def _settle(data: Path, rss_bytes: Callable[[], int]) -> Settled:
    """Wait until neither the disk nor the memory changes."""
    clock = SystemClock()
    started_s = unchanged_s = clock.monotonic_s()
    last = (0, 0)
    while True:
        time.sleep(0.2)
        now_s, disk, rss = clock.monotonic_s(), disk_bytes(data), rss_bytes()
        if (disk["all"], rss) != last:
            last, unchanged_s = (disk["all"], rss), now_s
        if now_s - unchanged_s >= _SETTLED_S:
            return Settled(rss_bytes=rss, disk=disk, seconds=unchanged_s - started_s, reason="settled")
        if now_s - started_s >= _SETTLE_S_MAX:
            return Settled(rss_bytes=rss, disk=disk, seconds=now_s - started_s, reason="time is up")


def _taken(count: int, empty: int, full_rss: int, full_disk: dict[str, int], settled: Settled) -> dict[str, Any]:
    return {
        "ram": (settled.rss_bytes - empty) / count,
        "ram_full": (full_rss - empty) / count,
        "rss_mb": settled.rss_bytes / 1e6,
        "rss_empty_mb": empty / 1e6,
        "disk": settled.disk["all"] / count,
        "disk_full": full_disk["all"] / count,
        "disk_parts": {kind: round(taken / count, 1) for kind, taken in settled.disk.items()},
        "settled_s": settled.seconds,
        "settled": settled.reason,
    }


def reopened(data: Path, count: int) -> dict[str, Any]:
    """Open it with a daemon, and return how soon it was ready."""
    wal_mb = disk_bytes(data)["wal"] / 1e6
    with daemon.running(data) as ours:
        pending = ours.status().timeline.pending
        if pending != count:
            raise RuntimeError(f"{pending} of {count} messages wait after the kill")
        opened = ours.events["store_opened"]
        return {
            "ready_s": ours.ready_s,
            "ready_beyond_imports": ours.ready_after_imports_s,
            "open_ms": opened["took_ms"],
            "wal_mb": wal_mb,
            "reopened_rss_mb": ours.rss_bytes / 1e6,
        }


def _imports() -> tuple[float, float]:
    """Return wall and CPU seconds of a process that does nothing but the imports of a daemon."""
    clock = SystemClock()
    started_s = clock.monotonic_s()
    process = subprocess.Popen([sys.executable, "-c", _IMPORTS])
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError("the imports of the daemon failed")
    return clock.monotonic_s() - started_s, used.ru_utime + used.ru_stime


def _figures(name: str, count: int, rounds: list[dict[str, Any]], imports: list[tuple[float, float]]) -> list[Figure]:
    what = f"{count} pending messages of 286 B on the wire, filled {name.replace('_', ' ')}"
    others = ("ram_full", "rss_mb", "rss_empty_mb", "settled_s", "per_s", "reopened_rss_mb")

    def figure(key: str, unit: str, text: str, goal: Goal | None, **details: object) -> Figure:
        return Figure(
            name=f"pending.{name}.{key}",
            what=f"{what}: {text}",
            unit=unit,
            rounds=[float(each[key]) for each in rounds],
            goal=goal,
            details=details,
        )

    return [
        figure(
            "ram",
            "B/message",
            "growth of the resident memory, settled",
            Goal(sign="<=", bound=RAM_BYTES),
            count=count,
            **{other: median(float(each[other]) for each in rounds) for other in others},
        ),
        figure("rss_mb", "MB", "resident memory of the whole process, settled", None),
        figure(
            "disk",
            "B/message",
            "on disk, settled, everything in the data directory",
            Goal(sign="<=", bound=DISK_BYTES),
            count=count,
            parts=rounds[-1]["disk_parts"],
            settled=rounds[-1]["settled"],
        ),
        figure("disk_full", "B/message", "on disk right after the last send", Goal(sign="<=", bound=DISK_BYTES)),
        figure("per_s", "messages/s", "while filling", None),
        figure(
            "ready_beyond_imports",
            "s",
            "after SIGKILL: from the end of the imports to serving",
            Goal(sign="<=", bound=READY_S),
            open_ms=median(each["open_ms"] for each in rounds),
            wal_mb=median(each["wal_mb"] for each in rounds),
            ready_s=median(each["ready_s"] for each in rounds),
            imports_s=median(wall_s for wall_s, _ in imports),
        ),
    ]


def _of(imports: list[tuple[float, float]]) -> list[Figure]:
    return [
        Figure(
            name="imports_cpu",
            what="a process that does the daemon's imports and ends, interpreter included",
            unit="s CPU",
            rounds=[cpu_s for _, cpu_s in imports],
            goal=Goal(sign="<=", bound=IMPORTS_CPU_S),
        )
    ]
