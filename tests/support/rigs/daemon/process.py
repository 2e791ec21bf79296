"""A real daemon in a process of its own: start, wait until it serves, stop, kill, start again at the same address.

Ports lie below the range the system hands out by itself. A client that tries to reconnect while the daemon is away
would otherwise, now and then, be given the daemon's own port as its local one and connect to itself, and the daemon
could not come back. Each worker of a run has ports of its own, so that none takes what another one's daemon is about to
open, or to open again.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from support.effort import SEED
from support.parallel import WORKERS_MAX, worker
from support.rigs.commands import forked
from support.rigs.commands.forked import Forked
from support.rigs.daemon.processes import NAME as PROCESSES
from support.rigs.daemon.processes import processes_of
from support.trusted import of_daemon

START_S_MAX = 90.0  # two fronts import what they need, beside others' that do so
STOP_S_MAX = 90.0  # the disk of a machine may stall for a minute
_PORTS = range(20_000 + worker(), 32_000, WORKERS_MAX)
_BEFORE_ARGUMENTS = 3  # of the command line: the interpreter, -m, dmq
_TAKEN = "is in use by another process"


def free_port() -> int:
    """Return a port nobody listens on, outside the range of ports that connections get by themselves."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port


class DaemonDied(AssertionError):
    """The process ended when it should not have; the message holds its log."""


class Daemon:
    """One data directory, one address, one process at a time. A context manager: leaving it ends the process."""

    def __init__(
        self,
        data: Path,
        *options: str,
        port: int = 0,
        metrics: str = "off",
        prefix: Sequence[str] = (),
        env: dict[str, str] | None = None,
        processes: int | None = None,
    ) -> None:
        """``env`` is all of its environment; the console is off unless it is set there. ``processes`` is for tests of
        one process, or of fronts; else drawn.
        """
        self.data = data
        self.port = port
        self._metrics = metrics
        self._options = options
        self._prefix = prefix
        self._env = env
        self._said_processes = processes
        self.processes: list[int] = []  # of each start
        self._process: subprocess.Popen[str] | Forked | None = None
        self._reader: threading.Thread | None = None
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._printed = 0
        self.started_s: list[float] = []  # from the start of each process until it served

    # -- life ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def spawn(self) -> Self:
        """Start the process and return at once; ``wait_until_serving`` is for later, or never."""
        assert self._process is None, "it runs already"
        if not self.port:
            self.port = free_port()
        self._spawned_s = time.monotonic()
        self._first_line = len(self._lines)
        command = serve_command(self.data, f"127.0.0.1:{self.port}", self._metrics, *self._options)
        env = {"DMQ_CONSOLE": "off", **of_daemon(), **(os.environ if self._env is None else self._env)}
        count = processes_of(env, self._said_processes)
        env[PROCESSES] = str(count)
        self.processes.append(count)
        if not self._prefix and forked.may_fork(env):
            self._process = forked.start(command[_BEFORE_ARGUMENTS:], env=env, cwd=self.data.parent)
        else:
            self._process = subprocess.Popen(
                [*self._prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=env,
                cwd=self.data.parent,
            )
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        return self

    def wait_until_serving(self) -> Self:
        """Return once the process says that it serves; ``DaemonDied`` if it ends or takes too long."""
        self.wait_for("serving", timeout_s=START_S_MAX)
        self.started_s.append(time.monotonic() - self._spawned_s)
        return self

    def start(self) -> Self:
        """Start and wait until it serves. A port that somebody else took meanwhile is replaced, the first time only."""
        is_first, chooses = not self._lines, not self.port
        while True:
            try:
                return self.spawn().wait_until_serving()
            except DaemonDied:
                if not (is_first and chooses and _TAKEN in self.log()):
                    raise
                self._process, self.port = None, 0

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask it to end, and assert that it does so in order: exit code 0."""
        self.signal(number)
        code = self.wait(STOP_S_MAX)
        assert code == 0, f"the daemon ended with {code}\n{self.log()}"

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        process = self._running()
        process.kill()
        self.wait(STOP_S_MAX)

    def restart(self) -> Self:
        """Start again on the same directory and the same port."""
        return self.spawn().wait_until_serving()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, and to nothing else."""
        self._running().send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """Wait for the end and return the exit code; its whole log has been read then."""
        process, reader = self._running(), self._reader
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise DaemonDied(f"the daemon did not end within {timeout_s} s\n{self.log()}") from None
        assert reader is not None
        reader.join(timeout_s)
        self._process = None
        return code

    def close(self) -> None:
        """End whatever still runs, and print the log: pytest shows it where a test failed."""
        if self._process is not None:
            self._process.kill()
            self.wait(STOP_S_MAX)
        self.print_log()

    # -- what it says -------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Where clients go."""
        return f"127.0.0.1:{self.port}"

    @property
    def metrics_address(self) -> str:
        """Where Prometheus goes, as this process said."""
        return str(self.event("serving")["metrics"])

    @property
    def pid(self) -> int:
        """The process that runs now."""
        return self._running().pid

    @property
    def fronts(self) -> list[psutil.Process]:
        """Its front processes that run now, ready or not, in the order they were started."""
        found = []
        for each in psutil.Process(self.pid).children():
            with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                if "dmq.processes.front" in each.cmdline():
                    found.append(each)
        return sorted(found, key=lambda each: (each.create_time(), each.pid))

    @property
    def is_running(self) -> bool:
        """Say whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """Return the whole log of all its processes."""
        with self._news:
            return "".join(self._lines)

    def print_log(self) -> None:
        """Print what the log gained since the last time."""
        with self._news:
            news, self._printed = self._lines[self._printed :], len(self._lines)
        drawn = ", ".join(f"DMQ_TEST_PROCESSES={each}" for each in self.processes)
        print(f"--- log of the daemon at {self.data} ({drawn}; DMQ_TEST_SEED={SEED})\n{''.join(news)}---")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the log events of that name, of all processes so far."""
        with self._news:
            return [event for line in self._lines if (event := _event(line)).get("event") == name]

    def event(self, name: str) -> dict[str, Any]:
        """Return the newest log event of that name."""
        return self.events(name)[-1]

    def wait_for(self, name: str, *, timeout_s: float) -> dict[str, Any]:
        """Wait until the running process logs the event."""
        until_s = time.monotonic() + timeout_s
        with self._news:
            at = self._first_line
            while True:
                for line in self._lines[at:]:
                    event = _event(line)
                    if event.get("event") == name:
                        return event
                at = len(self._lines)
                if self._reader is None or not self._reader.is_alive():
                    break
                if time.monotonic() > until_s:
                    break
                self._news.wait(0.5)
        raise DaemonDied(f"no event {name!r} within {timeout_s} s, or the daemon ended\n{self.log()}")

    def _read(self, process: subprocess.Popen[str] | Forked) -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                with self._news:
                    self._lines.append(line)
                    self._news.notify_all()

    def _running(self) -> subprocess.Popen[str] | Forked:
        assert self._process is not None, "no process was started"
        return self._process


def serve_command(data: Path, listen: str, metrics: str, *options: str) -> list[str]:
    """Return the command line of a daemon whose log can be read by a program."""
    command = [sys.executable, "-m", "dmq", "serve", "--data", str(data), "--listen", listen]
    if metrics:
        command += ["--metrics-listen", metrics]
    return [*command, "--log-format", "json", *options]


def run_to_end(data: Path, listen: str, *options: str, metrics: str = "off") -> subprocess.CompletedProcess[str]:
    """Run a daemon that is expected not to start, and return its exit code and what it said."""
    env = {PROCESSES: str(processes_of(os.environ))}
    return run_command(*serve_command(data, listen, metrics, *options)[_BEFORE_ARGUMENTS:], cwd=data.parent, env=env)


def _event(line: str) -> dict[str, Any]:
    if not line.startswith("{"):
        return {}
    try:
        event = json.loads(line)
    except ValueError:  # the last line of a killed process may be cut short
        return {}
    return event if isinstance(event, dict) else {}


def run_command(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout_s: float = START_S_MAX
) -> subprocess.CompletedProcess[str]:
    """Run a ``dmq`` command to its end; ``env`` is beside the environment of the tests.

    Its calls may take as long as the machine's disk may stall.
    """
    environment = {"DMQ_TIMEOUT": f"{STOP_S_MAX:.0f}s", **os.environ, **(env or {})}
    if forked.may_fork(environment):
        return forked.run(arguments, env=environment, cwd=cwd or Path.cwd(), timeout_s=timeout_s)
    return subprocess.run(
        [sys.executable, "-m", "dmq", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=environment,
        cwd=cwd,
    )
