"""Program that becomes the primary of a replication log, writes some rows, and kills itself at a step.

It notes each answered row in a file, and refuses to begin without the rows that are in it. The term of its lease is
longer than any test.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial, wraps
from pathlib import Path
from typing import Any

from support.rigs.commands.forked import run_code

from broker_adapter.runtime.clock import SystemClock
from dmq.errors import ReplicaFenced
from dmq.replication.base import prune, upload
from dmq.replication.directory_objects import DirectoryObjects
from dmq.replication.log import LogOptions, ReplicationLog
from dmq.replication.role import Primacy
from dmq.store.engines.rocks import RocksEngine
from dmq.store.files.cell import Cell
from dmq.store.schema.keys import Family
from dmq.store.store import Store
from dmq.store.writer.batch_log import LogStart
from dmq.store.writer.operations import Put

STEPS: dict[str, tuple[type[Any], str]] = {
    "put": (DirectoryObjects, "create"),
    "lease": (DirectoryObjects, "replace"),
    "removal": (DirectoryObjects, "delete"),
    "local write": (RocksEngine, "write"),
    "sync": (RocksEngine, "sync"),
    "marker": (Cell, "rewrite_marker"),
    "rename": (Path, "rename"),
}
PREFIX = b"~"
_TESTS = Path(__file__).resolve().parents[3]
_ROWS_MAX = 1_000_000
_TERM_MS = 3_600_000
_CLOCK = SystemClock()


def run_primary(
    folder: Path, data: Path, *, seed: int, step: str = "", occurrence: int = 0, is_after: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the program to its end; without a ``step`` it ends in order."""
    code = "from support.rigs.replica.driver import main; main()"
    arguments = (str(folder), str(data), str(seed), step, str(occurrence), str(int(is_after)))
    return run_code(code, *arguments, cwd=_TESTS, timeout_s=120)


def answered(folder: Path) -> set[bytes]:
    """Return the keys of the answered rows."""
    path = folder / "answered"
    return set(path.read_bytes().split()) if path.exists() else set()


def open_copy(folder: Path) -> DirectoryObjects:
    """Return the objects with the log."""
    return DirectoryObjects((folder / "copy").as_uri())


def main() -> None:
    """Be the program."""
    folder, data, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    step, occurrence, is_after = sys.argv[4], int(sys.argv[5]), sys.argv[6] == "1"
    if step:
        _kill_at(*STEPS[step], occurrence, is_after=is_after)
    rng, objects = random.Random(seed), open_copy(folder)
    log = ReplicationLog(objects, _CLOCK, LogOptions(is_sync=True), lambda start: _make_base(objects, start))
    with ExitStack() as stack:
        primacy = Primacy(
            *(objects, objects, _CLOCK, data),
            address="driver:8081",
            term_ms=_TERM_MS,
            on_lost=lambda reason: log.refuse(ReplicaFenced(reason)),
        )
        stack.callback(partial(primacy.close, is_complete=True))
        primacy.wait(may_begin=True)
        store = stack.enter_context(closing(Store.open(data, _CLOCK, batch_log=log)))
        rows = store.scan(Family.META, PREFIX, b"\xff", limit=_ROWS_MAX).rows
        lost = answered(folder) - {key[len(PREFIX) :] for key, _ in rows}
        assert not lost, f"answered and lost: {lost}"
        notes = os.open(folder / "answered", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for _ in range(rng.randint(1, 8)):
            key = b"%032x" % rng.getrandbits(128)
            store.commit([Put(Family.META, PREFIX + key, b"v")])
            os.write(notes, key + b"\n")
        if rng.random() < 0.2:
            _make_base(objects, LogStart(store.identity.number, store.boot, data, store.checkpoint))
            prune(objects, _CLOCK.now_ms(), needs_verified=False)


def _make_base(objects: DirectoryObjects, start: LogStart) -> int:
    assert start.directory is not None
    assert start.checkpoint is not None
    path = start.directory / ".checkpoint-test"
    shutil.rmtree(path, ignore_errors=True)
    start.checkpoint(path)
    return upload(objects, path, _CLOCK.now_ms()).batch


def _kill_at(owner: type[Any], name: str, occurrence: int, *, is_after: bool) -> None:
    """Kill this process at a call of the function."""
    function: Callable[..., object] = getattr(owner, name)
    calls = 0

    @wraps(function)
    def counted(*arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        is_due = calls == occurrence
        if is_due and not is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments, **options)
        if is_due:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, counted)
