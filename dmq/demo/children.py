"""Processes of the demo. Each has its own process group, so that Ctrl-C reaches only the demo, which then ends them in
order.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import IO

from broker_adapter.runtime.clock import Clock
from dmq.demo.facts import Fact, from_line
from dmq.errors import DmqError

SERVING_WITHIN_S = 30.0
STOPPING_WITHIN_S = 15.0
_LINES_KEPT = 20
_PORTS = range(20_000, 32_000)


class DemoFailed(DmqError):
    """The demo cannot continue; the text gives the reason."""


def free_port(random: Random) -> int:
    """Return a free loopback port, outside the range from which the system assigns ports.

    A client that connects while the daemon is down could otherwise get the daemon's port as its own local port. It
    would be connected to itself, and the daemon could not start again.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise DemoFailed(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free")


def clean_environment(home: Path) -> dict[str, str]:
    """Return the environment of this process with another HOME and without settings of a daemon."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("DMQ_")}
    return found | {"HOME": str(home)}


class Daemon:
    """Daemon that can be killed and started again on the same port and data. Its log goes to ``log``."""

    def __init__(self, config: Path, log: Path, environment: Mapping[str, str], clock: Clock) -> None:
        self._config = config
        self._log = log
        self._environment = environment
        self._clock = clock
        self._process: subprocess.Popen[str] | None = None
        self._serving = threading.Event()
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        """Process id, 0 if it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else 0

    def start(self) -> float:
        """Start it, wait until it serves, and return the duration in seconds."""
        started_s = self._clock.monotonic_s()
        self._serving.clear()
        command = [sys.executable, "-m", "dmq", "serve", "--config", str(self._config), "--log-format", "json"]
        with _interrupts_put_off():
            self._process = _popen(command, self._environment, stderr=subprocess.PIPE)
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        if not self._serving.wait(SERVING_WITHIN_S) or not self.pid:
            raise DemoFailed(f"the daemon does not serve: {self.last_words()}")
        return self._clock.monotonic_s() - started_s

    def kill(self) -> None:
        """Kill it, like a crash."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> int:
        """Stop it in order and return its exit code."""
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.terminate()
        try:
            code = self._process.wait(STOPPING_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.kill()
            code = -signal.SIGKILL
        if self._reader is not None:
            self._reader.join(1)
        return code

    def last_words(self) -> str:
        """Return the last line of its log."""
        if self._reader is not None and not self.pid:
            self._reader.join(1)
        return self._lines[-1] if self._lines else "it said nothing"

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with process.stderr as lines, self._log.open("a", encoding="utf-8") as log:
            for line in lines:
                log.write(line)
                log.flush()
                self._lines.append(line.strip())
                if _event(line) == "serving":
                    self._serving.set()
        if process is self._process:
            self._serving.set()  # it exited; waiting callers check ``pid``


def _event(line: str) -> str:
    try:
        return str(json.loads(line)["event"])
    except (ValueError, KeyError, TypeError):
        return ""


class Client:
    """Client process; ``take`` is called with its facts, in a thread. Its log goes to ``log``."""

    def __init__(
        self,
        role: str,
        order: Mapping[str, object],
        log: Path,
        environment: Mapping[str, str],
        take: Callable[[Fact], None],
    ) -> None:
        self.role = role
        self._order = order
        self._log = log
        self._environment = environment
        self._take = take
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def start(self) -> None:
        """Start it and send it its order. ``stop`` is valid afterwards even if this call fails."""
        with self._log.open("w", encoding="utf-8") as stderr, _interrupts_put_off():
            self._process = _popen(
                [sys.executable, "-m", "dmq.demo.clients", self.role],
                self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr.fileno(),
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        self._process.stdin.write(json.dumps(self._order) + "\n")
        self._process.stdin.flush()

    def check(self) -> None:
        """Raise ``DemoFailed`` if the process has exited on its own."""
        code = self._process.poll() if self._process is not None else None
        if code is not None:
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it said nothing"]
            raise DemoFailed(f"the {self.role} process ended with {code}: {lines[-1]}")

    def stop(self) -> None:
        """Close its stdin to end it, and kill it if it does not exit."""
        if self._process is None:
            return
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except BrokenPipeError:  # it has already exited
                self._process.poll()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._reader is not None:
            self._reader.join(1)

    def _read(self, facts: IO[str]) -> None:
        with facts:
            for line in facts:
                self._take(from_line(line))


@contextmanager
def _interrupts_put_off() -> Iterator[None]:
    """Defer interrupts while a process is started: a child with an unknown id could not be ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for interrupt in came:
            signal.raise_signal(interrupt)


def _popen(
    command: list[str],
    environment: Mapping[str, str],
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.DEVNULL,
    stderr: int = subprocess.DEVNULL,
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=dict(environment),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        text=True,
        encoding="utf-8",
        errors="replace",
        process_group=0,
    )
