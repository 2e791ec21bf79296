"""Where a bench keeps data: directories on a real disk, removed afterwards, and what they take there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from broker_adapter.runtime.clock import SystemClock

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "bench"  # git-ignored; /tmp may be memory, where a sync costs nothing


@contextmanager
def directory() -> Iterator[Path]:
    """Make a directory for one measurement and remove it at the end."""
    BUILD.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=BUILD, prefix="data-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def syncs(file: Path, *, count: int, record_bytes: int = 4096) -> list[float]:
    """Return how many ms the disk takes for each of ``count`` appended records, one sync each: what durable means."""
    clock = SystemClock()
    record = os.urandom(record_bytes)
    took_ms: list[float] = []
    with file.open("ab", buffering=0) as opened:
        for _ in range(count):
            started_s = clock.monotonic_s()
            opened.write(record)
            os.fdatasync(opened.fileno())
            took_ms.append((clock.monotonic_s() - started_s) * 1000)
    return took_ms


def disk_bytes(path: Path) -> dict[str, int]:
    """Return what a directory takes on disk, as ``du`` counts it: in all, and by what it is taken for."""
    found = {"all": 0, "tables": 0, "wal": 0, "ballast": 0, "other": 0}
    for file in path.rglob("*"):
        try:
            taken = file.stat().st_blocks * 512
        except FileNotFoundError:  # a compaction is under way
            continue
        kind = {".sst": "tables", ".log": "wal"}.get(file.suffix, "ballast" if file.name == "BALLAST" else "other")
        found["all"] += taken
        found[kind] += taken
    return found
