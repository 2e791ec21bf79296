"""The audit of a long trail: what a whole run takes on each engine, beside plain questions to DuckDB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from bench.figures import Beside, Figure, Goal
from bench.place import ROOT, directory
from bench.plan import Plan
from bench.trail_maker import Made, make_trail
from broker_adapter.runtime.clock import SystemClock

CORES, DRIVER_MEMORY, WALL_S_PER_10M, RSS_MB = 2, "4g", 60.0, 6_000
DUCKDB_WALL_S_PER_10M, SMALLEST = 6.0, 1_000_000
_LOOK_S = 0.1
_RUN_S_MAX = 1_800


class _Run(NamedTuple):
    wall_s: float
    cpu_s: float
    rss_mb: float
    exit_code: int
    said: str


def measure(plan: Plan) -> list[Figure]:
    """Return wall time and memory of an audit of one trail, each run in a process of its own, start-up included."""
    plan.expect(2 + 2 * plan.rounds)
    runs: list[_Run] = []
    of_duckdb: list[_Run] = []
    with directory() as data:
        plan.step(f"make {plan.events} events")
        clock = SystemClock()
        started_s = clock.monotonic_s()
        made = make_trail(data / "trail", plan.events)
        details: dict[str, Any] = {"made_s": clock.monotonic_s() - started_s, **made._asdict()}
        plan.step("DuckDB")
        peer = _watched([sys.executable, "-m", "bench.audit_peer", str(data / "trail")])
        details["peer"] = {**_answers(peer), "rss_mb": peer.rss_mb, "cpu_s": peer.cpu_s}
        for number in range(plan.rounds):
            plan.step("audit")
            out = data / f"out-{number}"
            runs.append(_watched(_command(data / "trail", out)))
            details |= _checked(runs[-1], out, made)
            plan.step("audit with DuckDB")
            out = data / f"out-duckdb-{number}"
            of_duckdb.append(_watched(_command_of_duckdb(data / "trail", out)))
            details |= {"duckdb": _checked(of_duckdb[-1], out, made)["run"]}
    return [*_figures(made, runs, peer, details), _figure_of_duckdb(made, of_duckdb, peer)]


def _command_of_duckdb(trail: Path, out: Path) -> list[str]:
    job = ["run", "--engine", "duckdb", "--threads", str(CORES), "--trail", str(trail), "--out", str(out)]
    return [sys.executable, "-m", "spark_audit", *job]


def _command(trail: Path, out: Path) -> list[str]:
    options = ["--engine", "spark", "--master", f"local[{CORES}]", "--driver-memory", DRIVER_MEMORY, "--no-snapshot"]
    job = ["audit", "run", "--trail", str(trail), "--out", str(out), *options]
    return [sys.executable, "-m", "dmq", *job]


def _watched(command: Sequence[str]) -> _Run:
    """Run a command on two cores and look at its memory, and that of all it starts, until it ends."""
    clock = SystemClock()
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    started_s = clock.monotonic_s()
    process = subprocess.Popen(
        ["taskset", "-c", ",".join(map(str, cores)), *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    peak, cpu_s = 0, 0.0
    out = err = ""
    while process.returncode is None:
        try:
            out, err = process.communicate(timeout=_LOOK_S)
        except subprocess.TimeoutExpired:
            rss, used_s = _taken(process.pid)
            peak, cpu_s = max(peak, rss), max(cpu_s, used_s)
            if clock.monotonic_s() - started_s > _RUN_S_MAX:
                process.kill()
    said = out if process.returncode == 0 else out[-2_000:] + err[-2_000:]
    return _Run(clock.monotonic_s() - started_s, cpu_s, peak / 1e6, process.returncode, said)


def _taken(pid: int) -> tuple[int, float]:
    rss, cpu_s = 0, 0.0
    try:
        root = psutil.Process(pid)
        for each in (root, *root.children(recursive=True)):
            times = each.cpu_times()
            rss += each.memory_info().rss
            cpu_s += times.user + times.system
    except psutil.NoSuchProcess:
        pass
    return rss, cpu_s


def _answers(peer: _Run) -> dict[str, Any]:
    if peer.exit_code:
        raise RuntimeError(f"DuckDB failed with {peer.exit_code}: {peer.said}")
    found: dict[str, Any] = json.loads(peer.said)
    if found["gaps"] or found["lost"] or found["accepted_twice"] or found["delivered_twice"]:
        raise RuntimeError(f"DuckDB finds fault with a sound trail: {found}")
    return found


def _checked(run: _Run, out: Path, made: Made) -> dict[str, Any]:
    """Return what the audit says of its own run; a fast audit that gets it wrong is no figure."""
    if run.exit_code:
        raise RuntimeError(f"the audit of a sound trail ended with {run.exit_code}: {run.said}")
    report: Mapping[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
    scheduled = sum(row["scheduled"] for row in report["scheduled"])
    fired = sum(row["fired"] + row["accepted_at_once"] for row in report["scheduled"])
    if (scheduled, fired) != (made.scheduled, made.fired):
        raise RuntimeError(f"the audit counts {scheduled} scheduled and {fired} fired in {made}")
    of_run: dict[str, Any] = json.loads((out / "run.json").read_text(encoding="utf-8"))
    return {"run": of_run}


def _figures(made: Made, runs: Sequence[_Run], peer: _Run, details: Mapping[str, object]) -> list[Figure]:
    what = f"audit of {made.events} events of {made.messages} messages, {made.bytes / 1e6:.0f} MB"
    beside = "DuckDB, the same questions without histories"
    wall = [run.wall_s for run in runs]
    goal_s = WALL_S_PER_10M * max(1.0, made.events / 10_000_000)  # few events cost a start and its plans all the same
    return [
        Figure(
            name="audit.wall",
            what=f"{what}: whole run with start-up, {CORES} cores",
            unit="s",
            rounds=wall,
            goal=Goal(sign="<=", bound=goal_s),
            beside=Beside(what=beside, rounds=[peer.wall_s]),
            details={**details, "events_per_s": made.events / median(wall), "cpu_s": [run.cpu_s for run in runs]},
        ),
        Figure(
            name="audit.rss",
            what=f"{what}: peak resident memory of all its processes, driver memory {DRIVER_MEMORY}",
            unit="MB",
            rounds=[run.rss_mb for run in runs],
            goal=Goal(sign="<=", bound=RSS_MB),
            beside=Beside(what=beside, rounds=[max(peer.rss_mb, 1.0)]),
        ),
    ]


def _figure_of_duckdb(made: Made, runs: Sequence[_Run], peer: _Run) -> Figure:
    goal_s = DUCKDB_WALL_S_PER_10M * max(SMALLEST, made.events) / 10_000_000
    return Figure(
        name="audit.duckdb",
        what=f"the same audit with DuckDB in one process: whole run with start-up, {CORES} threads",
        unit="s",
        rounds=[run.wall_s for run in runs],
        goal=Goal(sign="<=", bound=goal_s),
        beside=Beside(what="DuckDB, the same questions without histories", rounds=[peer.wall_s]),
        details={"cpu_s": [run.cpu_s for run in runs], "rss_mb": [run.rss_mb for run in runs]},
    )
