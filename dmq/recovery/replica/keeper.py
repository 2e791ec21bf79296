"""Bases of a running store, at intervals: upload, verification and removal of old ones."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.log import LibraryLog
from dmq.errors import DmqError, StoreFailed
from dmq.recovery.replica.results import UNAVAILABLE, Pruned, Verified
from dmq.replication.base import Uploaded, list_bases, read_base, verified
from dmq.replication.log import LogState, LogStatus
from dmq.replication.objects import ObjectStore, ReplicaUnavailable
from dmq.store import Store
from dmq.store.writer.batch_log import LogStart

log = LibraryLog("dmq.replication")

_CHECKPOINT, _RESTORED = ".checkpoint-replica-", ".verify-replica-"
_LOOK_S = 1.0
_AGAIN_MS = 60_000  # after a failure
_ERROR_CHARS_MAX = 500
_BASE_SEGMENTS_MAX = 50_000  # read and applied in some minutes
_Result = TypeVar("_Result", Uploaded, Pruned, Verified)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperOptions:
    """Intervals; ``verify_every_ms`` is 0 if bases are not verified."""

    base_every_ms: int
    keep_ms: int
    verify_every_ms: int
    base_segments_max: int = _BASE_SEGMENTS_MAX  # after a base, until the next one is made early


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseStatus:
    """Newest base and newest verified base; times are 0 if there is none."""

    base_at_ms: int = 0
    base_bytes: int = 0
    verified_at_ms: int = 0  # time of the newest verified base
    error: str = ""  # of the last attempt


class Worker:
    """Runs one worker process at a time. ``cancel`` ends it, from any thread, and refuses further ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._is_cancelled = False

    def run(self, result: type[_Result], *arguments: object) -> _Result:
        """Run the worker and return its result.

        Raise ``ReplicaUnavailable`` if the object store was not reachable, and ``StoreFailed`` for any other failure.
        """
        command = [sys.executable, "-m", "dmq.recovery.replica.worker", *map(str, arguments)]
        with self._lock:
            if self._is_cancelled:
                raise StoreFailed("the daemon stops")
            child = self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        with child:
            assert child.stdout is not None
            assert child.stderr is not None
            output = child.stdout.read()  # a short line; not by communicate(), which would close stdin
            why = " ".join(child.stderr.read().split())[-_ERROR_CHARS_MAX:]
            code = child.wait()
        if code == UNAVAILABLE:
            raise ReplicaUnavailable(why)
        if code:
            raise StoreFailed(why or f"the worker process ended with {code}")
        return msgspec.json.decode(output, type=result)

    def cancel(self) -> None:
        """End the running process."""
        with self._lock:
            self._is_cancelled = True
            if self._child is not None:
                self._child.kill()


def make_base(worker: Worker, url: str, clock: Clock, start: LogStart) -> int:
    """Upload a base of an open store; return the number of the last batch in it."""
    return _make(worker, url, clock, start).batch


def sweep(data: Path) -> None:
    """Remove the checkpoints and restored copies of a dead process. The caller must own the directory."""
    for pattern in (_CHECKPOINT, _RESTORED):
        for path in data.glob(f"*{pattern}*"):
            shutil.rmtree(path, ignore_errors=True)


def _make(worker: Worker, url: str, clock: Clock, start: LogStart) -> Uploaded:
    assert start.directory is not None
    assert start.checkpoint is not None
    path = start.directory / f"{_CHECKPOINT}{secrets.token_hex(6)}"
    try:
        start.checkpoint(path)
        return worker.run(Uploaded, "base", url, path, clock.now_ms())
    finally:
        for each in (path, path.with_name(f"{path.name}.tmp")):  # .tmp: unfinished, by RocksDB
            shutil.rmtree(each, ignore_errors=True)


class BaseKeeper:
    """Thread that keeps the bases of a running store. ``close`` ends it; the next run continues."""

    def __init__(
        self,
        store: Store,
        objects: ObjectStore,
        url: str,
        options: KeeperOptions,
        *,
        worker: Worker,
        log_status: Callable[[], LogStatus],
        start: LogStart,
    ) -> None:
        self._store = store
        self._clock = store.clock
        self._objects = objects
        self._url = url
        self._options = options
        self._worker = worker
        self._log_status = log_status
        self._start = start
        self._end = threading.Event()
        self._again_ms = 0
        self._since_ms = 0  # newest base, or the start of a run without one
        self._since_number = 0  # last segment before the newest base
        self.status = BaseStatus()
        self._thread = threading.Thread(target=self._run, name="dmq-replica-bases", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and its process."""
        self._end.set()
        self._worker.cancel()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        is_read = False
        while not self._end.wait(_LOOK_S):
            if self._clock.now_ms() < self._again_ms or self._log_status().state is not LogState.FOLLOWING:
                continue
            try:
                if not is_read:
                    self._read()
                    is_read = True
                self._look()
            except (DmqError, OSError) as error:
                if not self._end.is_set():
                    self._again_ms = self._clock.now_ms() + _AGAIN_MS
                    self.status = replace(self.status, error=str(error))
                    log.warning("replica_base_failed", url=self._objects.url, error=str(error))

    def _read(self) -> None:
        """Read the bases of earlier runs from the object store."""
        names = list_bases(self._objects)
        marks = verified(self._objects)
        now_ms = self._clock.now_ms()
        trusted = [each.time_ms for each in names if each.suffix in marks]
        newest = read_base(self._objects, names[-1]) if names else None
        self._since_ms = min(newest.time_ms, now_ms) if newest is not None else now_ms
        self._since_number = newest.number if newest is not None else 0
        self.status = BaseStatus(
            base_at_ms=self._since_ms if newest is not None else 0,
            base_bytes=newest.size_bytes if newest is not None else 0,
            verified_at_ms=min(trusted[-1], now_ms) if trusted else 0,
        )

    def _look(self) -> None:
        """Make and verify a base if it is time."""
        options, now_ms, number = self._options, self._clock.now_ms(), self._log_status().number
        is_due = now_ms - self._since_ms >= options.base_every_ms
        if is_due or number - self._since_number >= options.base_segments_max:
            made = _make(self._worker, self._url, self._clock, self._start)
            self._since_ms, self._since_number = now_ms, number
            self.status = replace(self.status, base_at_ms=now_ms, base_bytes=made.size_bytes, error="")
            log.info("replica_base_created", batch=made.batch, size_bytes=made.size_bytes, sent_bytes=made.sent_bytes)
            self._prune(now_ms)
        is_verified = now_ms - self.status.verified_at_ms < options.verify_every_ms
        if options.verify_every_ms and self.status.base_bytes and not is_verified:
            self._verify(now_ms)

    def _verify(self, now_ms: int) -> None:
        disk = self._store.disk()
        if disk is not None and disk.free_bytes - 2 * self.status.base_bytes < disk.low_water_bytes:
            raise StoreFailed("too little free space to restore and verify a base")
        assert self._start.directory is not None
        path = self._start.directory / f"{_RESTORED}{secrets.token_hex(6)}"
        try:
            found = self._worker.run(Verified, "verify", self._url, path)
        finally:
            for each in (path, path.with_name(f".{path.name}.part")):
                with suppress(OSError):
                    shutil.rmtree(each)
        self.status = replace(self.status, verified_at_ms=now_ms, error="")
        log.info("replica_base_verified", base=found.base, size_bytes=found.size_bytes)
        self._prune(now_ms)

    def _prune(self, now_ms: int) -> None:
        keep_from_ms = now_ms - self._options.keep_ms
        removed = self._worker.run(
            Pruned, "prune", self._url, keep_from_ms, int(bool(self._options.verify_every_ms))
        ).objects
        if removed:
            log.info("replica_pruned", objects=removed)
