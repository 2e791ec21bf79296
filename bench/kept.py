"""What a bench keeps: the figures of each name, the machine they are from, and what was measured before on it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.figures import Figure
from bench.place import directory, syncs
from broker_adapter.runtime.clock import Clock

SCHEMA = 2  # raised when the page reads what older files do not have; those then count as nothing kept
_SYNCS = 200
_LIBRARIES = ("rocksdict", "uvloop", "protobuf", "grpcio")
_SAME = ("cpus", "cpu", "kernel", "python")  # without them, figures of two runs do not belong on one page


class NothingKept(Exception):
    """There is no file of figures, or none that this version reads."""


def machine() -> dict[str, Any]:
    """Return what figures depend on; the sync time is measured now."""
    with directory() as data:
        took_ms = sorted(syncs(data / "probe", count=_SYNCS))
    return {
        "cpus": os.cpu_count(),
        "cpu": _cpu(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in _LIBRARIES},
        "disk_sync_ms": {"p50": median(took_ms), "p99": took_ms[int(len(took_ms) * 0.99)]},
        "load_average": os.getloadavg(),
    }


def keep(
    path: Path,
    groups: Mapping[str, Sequence[Figure]],
    options: Mapping[str, object],
    *,
    here: Mapping[str, Any],
    clock: Clock,
) -> None:
    """Write the figures of ``groups``; those of other names stay if they are of the same machine.

    A name that was measured anew, or tried in vain, loses its old figures. The file is replaced as a whole.
    """
    measured = {"at_ms": clock.now_ms(), "commit": _commit(), "options": dict(options)}
    try:
        before = read(path)
    except NothingKept:
        before = {"machine": {}, "figures": []}
    is_same = all(before["machine"].get(name) == here.get(name) for name in _SAME)
    old = [each for each in before["figures"] if each["group"] not in groups] if is_same else []
    new = [
        {**figure.plain(), "group": group, "measured": measured}
        for group, figures in groups.items()
        for figure in figures
    ]
    kept = {"schema": SCHEMA, "machine": dict(here), **measured, "figures": [*old, *new]}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".new")
    unfinished.write_text(_text(kept), encoding="utf-8")
    unfinished.replace(path)


def _text(kept: Mapping[str, Any]) -> str:
    """One line per figure, so that a repository shows which of them changed."""
    head = json.dumps({name: value for name, value in kept.items() if name != "figures"})
    figures = ",\n".join(json.dumps(figure) for figure in kept["figures"])
    return f'{head[:-1]}, "figures": [\n{figures}\n]}}\n'


def read(path: Path) -> dict[str, Any]:
    """Return what was kept. Raises NothingKept."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NothingKept(f"{path} is not there: measure first") from None
    except ValueError as error:
        raise NothingKept(f"{path} cannot be read: {error}") from None
    if found.get("schema") != SCHEMA:
        raise NothingKept(f"{path} is of another version: measure again")
    return found


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip()
