"""Where a bench keeps data: directories on a real disk, removed afterwards, and what they take there."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
