"""A daemon as a process of its own: started, asked, killed."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal

import psutil

from broker_adapter.runtime.clock import SystemClock
from dmq.admin import admin_v1
from dmq.admin.client import AdminClient

_READY_S_MAX = 60.0
_STOP_S_MAX = 60.0
_HIGH_WATER = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)
_BUCKET = re.compile(r'dmq_lateness_seconds_bucket\{le="([^"]+)"\} (\S+)')


class Daemon:
    """A running daemon. ``ready_s`` is the wall time from its start until it serves, or listens as standby."""

    def __init__(
        self,
        data: Path,
        *,
        metrics: bool = False,
        transport: Literal["http2", "grpcio"] = "http2",
        options: Sequence[str] = (),
        processes: int | Literal["auto"] = 1,
        environment: Mapping[str, str] | None = None,
        is_standby: bool = False,
    ) -> None:
        clock = SystemClock()
        started_s = clock.monotonic_s()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "dmq", "serve", "--data", str(data), "--listen", "127.0.0.1:0"),
                *("--metrics-listen", "127.0.0.1:0" if metrics else "off", "--log-format", "json"),
                *options,
            ],
            stderr=subprocess.PIPE,
            text=True,
            env={
                **{
                    name: value
                    for name, value in os.environ.items()
                    if not name.startswith("DMQ_") or name == "DMQ_COMPILED"
                },
                "DMQ_CONSOLE": "off",
                "DMQ_TRANSPORT": transport,
                "DMQ_PROCESSES": str(processes),
                **(environment or {}),
            },
        )
        assert self._process.stderr is not None
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=_read_events, args=(self._process.stderr, self._events), daemon=True).start()
        self.events: dict[str, dict[str, Any]] = {}
        ready = "standby_listening" if is_standby else "serving"
        while ready not in self.events:
            event = self._events.get(timeout=_READY_S_MAX)
            if event is None:
                raise RuntimeError(f"the daemon ended before it served; its log: {self.events}")
            self.events[str(event.get("event"))] = event
        self.ready_s = clock.monotonic_s() - started_s
        self.address: str = self.events[ready]["listen"]
        self._metrics: str = self.events[ready]["metrics"]
        self.process = psutil.Process(self._process.pid)
        self._all = [self.process, *_fronts(self.process)]  # a front that is started anew is not among them

    @property
    def ready_after_imports_s(self) -> float:
        """Seconds from ``starting``, which it logs once everything is imported, until it served; by its own clock."""
        starting, serving = (datetime.fromisoformat(self.events[name]["time"]) for name in ("starting", "serving"))
        return (serving - starting).total_seconds()

    @property
    def rss_bytes(self) -> int:
        """Memory that is resident now, in all of its processes."""
        return sum(int(each.memory_info().rss) for each in self._all)

    @property
    def rss_bytes_max(self) -> int:
        """The most memory that was resident in each of them at any time so far, as the kernel noted it."""
        found = [Path(f"/proc/{each.pid}/status").read_text(encoding="ascii") for each in self._all]
        return sum(int(_HIGH_WATER.findall(status)[0]) * 1024 for status in found)

    @property
    def cpu_s(self) -> float:
        """CPU time of all of them so far, user and system."""
        return sum(float(each.user + each.system) for each in (process.cpu_times() for process in self._all))

    def cpu_by_process(self) -> list[float]:
        """CPU time so far, of the store process first, then of each front."""
        return [sum(each.cpu_times()[:2]) for each in (self.process, *self.process.children())]

    def status(self) -> admin_v1.GetStatusResponse:
        """Ask for its figures."""
        with AdminClient(self.address) as client:
            return client.status()

    def lateness_buckets(self) -> list[tuple[float, float]]:
        """Return ``(upper bound in ms, messages up to it)`` since its start."""
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return [(float(bound) * 1000, float(count)) for bound, count in _BUCKET.findall(text)]

    def end(self, *, is_killed: bool = False) -> None:
        """End it in order, or with SIGKILL, and wait until it is gone."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL if is_killed else signal.SIGTERM)
        try:
            self._process.wait(_STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def running(
    data: Path,
    *,
    metrics: bool = False,
    transport: Literal["http2", "grpcio"] = "http2",
    options: Sequence[str] = (),
    processes: int | Literal["auto"] = 1,
    environment: Mapping[str, str] | None = None,
    is_standby: bool = False,
) -> Iterator[Daemon]:
    """Run a daemon for a while."""
    daemon = Daemon(
        data,
        metrics=metrics,
        transport=transport,
        options=options,
        processes=processes,
        environment=environment,
        is_standby=is_standby,
    )
    try:
        yield daemon
    finally:
        daemon.end()


def quantile_ms(buckets: Sequence[tuple[float, float]], q: float) -> float:
    """Return the upper bound of the bucket in which the quantile lies: never less than the true one."""
    rank = q * buckets[-1][1]
    return next(bound for bound, count in buckets if count >= rank)


def _fronts(process: psutil.Process) -> list[psutil.Process]:
    return [each for each in process.children() if "dmq.processes.front" in each.cmdline()]


def _read_events(stream: IO[str], events: queue.Queue[dict[str, Any] | None]) -> None:
    with stream:
        for line in stream:
            try:
                events.put(json.loads(line))
            except ValueError:
                events.put({"event": "unreadable", "line": line})
    events.put(None)
