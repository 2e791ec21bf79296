"""Run of the demo: a daemon, the client process, a kill in the middle, and the verdict.

With a second copy there is a standby too, and the data of the killed daemon is deleted.

Each child has its own process group, so that Ctrl-C reaches only the demo, which then ends them in order.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

from broker_adapter.runtime.clock import SystemClock
from dmq.config.units import format_delay_levels, format_duration
from dmq.demo.plan import LEVELS, Plan, make_plan
from dmq.demo.second_copy import SecondCopy, make_second_copy
from dmq.demo.verdict import DaemonOutage, DemoVerdict, judge, lines_of
from dmq.errors import DmqError

TOPIC = "demo"
GROUP = "demo-consumers"
GRACE_S = 30.0  # beyond the planned end, for redeliveries after the invisible duration
GRACE_OF_CLUSTER_S = 90.0  # the same in front of a cluster, whose broker needs longer to restart
DOWN_S = 0.5  # between the kill and the new start
LEASE_S = 5  # of the primary; the standby takes over after it
SERVING_WITHIN_S = 30.0
CONNECTED_WITHIN_S = 20.0
STOPPING_WITHIN_S = 15.0
TAKING_OVER_WITHIN_S = 60.0
_POLL_S = 0.02
_PORTS = range(20_000, 32_000)
_INTERRUPTED = 130
_LOST_SHOWN = 10

_CLIENT_MISSING = (
    "The demo drives the daemon with the official RocketMQ client for Python, which is not\n"
    "installed. In a checkout `make demo` installs it; elsewhere:\n"
    "pip install 'rock-dmq[server,demo]'"
)


class DemoFailed(DmqError):
    """The demo cannot continue; the text gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoCluster:
    """Running cluster that the daemon forwards to. Its topic accepts normal messages; ``kill`` and ``start`` kill and
    start one of its brokers.
    """

    endpoints: tuple[str, ...]
    topic: str
    group: str
    kill: Callable[[], None]
    start: Callable[[], None]  # returns once it serves again


def run_demo(
    *,
    messages: int,
    seconds: float,
    keep_data: bool,
    kill: bool,
    failover: bool = False,
    cluster: DemoCluster | None = None,
) -> int:
    """Run the demo; see ``dmq.demo.run``. If the daemon forwards to a cluster, a broker of it is killed too."""
    if importlib.util.find_spec("rocketmq") is None:
        _print(_CLIENT_MISSING)
        return 1
    folder = Path(tempfile.mkdtemp(prefix="rock-dmq-demo-"))
    code = 1
    try:
        with _interrupts() as interrupts:
            copy = make_second_copy(folder, _free_port()) if failover else None
            verdict = _Demo(folder, make_plan(messages, seconds, Random()), cluster, copy, interrupts).run(kill=kill)
        code = 1 if verdict.faults else 0
    except KeyboardInterrupt:
        _print("interrupted; the processes are ended")
        code, keep_data = _INTERRUPTED, False
    except DmqError as error:
        _print(f"demo: {error}")
    finally:
        if keep_data or code == 1:
            _print(f"data and logs are kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return code


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Record Ctrl-C and SIGTERM, which CI systems send. ``_Demo._pause`` raises, so that no child is left."""
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, _frame: came.append(number)) for number in numbers]
    try:
        yield came
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _free_port() -> int:
    """Return a free loopback port, outside the range from which the system assigns ports.

    A client that connects while the daemon is down could otherwise get the daemon's port as its own local port. It
    would be connected to itself, and the daemon could not start again.
    """
    for port in Random().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise DemoFailed(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free")


@dataclass(slots=True)
class _Demo:
    folder: Path
    plan: Plan
    cluster: DemoCluster | None
    copy: SecondCopy | None
    interrupts: list[int]
    addresses: dict[str, str] = field(default_factory=dict)  # by name of the daemon
    primary: str = "daemon"
    clock: SystemClock = field(default_factory=SystemClock)
    children: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    reports: Path = field(init=False)
    began_s: float | None = None  # when the sends began

    def run(self, *, kill: bool) -> DemoVerdict:
        """Run it, print the result and return it."""
        self.reports = self.folder / "reports.jsonl"
        (self.folder / "home").mkdir()
        (self.folder / "demo.toml").write_text(self._config(), encoding="utf-8")
        try:
            if self.copy is not None:
                self._start_copy(self.copy)
            self._start_daemon()
            longest = format_duration(self.plan.levels_ms[-1])
            self._event(f"daemon serving at {self.addresses['daemon']}; delay level {LEVELS} is {longest} here")
            if self.copy is not None:
                self._start_standby()
            self._start_client()
            self._event(f"sending {len(self.plan.sends):,} messages, receiving and acknowledging them")
            outage, restart = self._wait(kill=kill)
            self._stop_daemon()
        finally:
            for name in list(self.children):
                self._kill(name)
        planned_ms = {send.number: send.delay_ms for send in self.plan.sends}
        trail = self._data(self.primary) / "trail"
        verdict = judge(planned_ms, self._reports(), outage)
        _print("\n".join(["", *lines_of(verdict, restart)]))
        for number in verdict.lost[:_LOST_SHOWN]:
            _print(f"look for message {number}: dmq audit explain {verdict.sends[number].message_id} --trail {trail}")
        return verdict

    def _wait(self, *, kill: bool) -> tuple[DaemonOutage | None, str]:
        """Kill the daemon half-way, and wait for the client process. Return the outage and its description."""
        outage, restart = None, ""
        if kill:
            while self._elapsed_s() * 1000 < self.plan.kill_at_ms:
                self._pause()
            outage, restart = self._kill_and_restart() if self.copy is None else self._kill_and_take_over()
        end_s = self.plan.end_ms / 1000 + (GRACE_S if self.cluster is None else GRACE_OF_CLUSTER_S)
        while self.children["client"].poll() is None and self._elapsed_s() < end_s:
            self._pause()
        if self.children["client"].poll() is None:
            errors = [fields[0] for name, *fields in self._reports() if name == "failed"]
            self._event(f"the time is over; last error of the client: {errors[-1] if errors else 'none'}")
        return outage, restart

    def _reports(self) -> list[list[Any]]:
        return [json.loads(line) for line in self.reports.read_bytes().splitlines(keepends=True) if line[-1:] == b"\n"]

    def _kill_and_restart(self) -> tuple[DaemonOutage, str]:
        killed_at_ms, killed_s = self.clock.now_ms(), self.clock.monotonic_s()
        self._kill("daemon")
        if self.cluster is not None:
            self.cluster.kill()
        self._event(f"SIGKILL to the daemon{' and its broker' if self.cluster is not None else ''}")
        self._pause(DOWN_S)
        start_s = self._start_daemon()
        down_s = self.clock.monotonic_s() - killed_s
        self._event("daemon serving again on the same port and data")
        restart = f"SIGKILL; down for {down_s:.2f} s, {start_s:.2f} s of it the new start"
        if self.cluster is not None:
            self.cluster.start()
            restart += f"\n{'':<11}its broker was down for {self.clock.monotonic_s() - killed_s:.2f} s"
            self._event("broker serving again; the daemon accepted sends without it")
        return DaemonOutage(killed_at_ms, self.clock.now_ms()), restart

    def _kill_and_take_over(self) -> tuple[DaemonOutage, str]:
        killed_at_ms, killed_s = self.clock.now_ms(), self.clock.monotonic_s()
        self._kill("daemon")
        shutil.rmtree(self._data("daemon"))
        self._event("SIGKILL to the primary, and its data deleted")
        self.primary = "standby"
        self._await("take over", TAKING_OVER_WITHIN_S, self._log_has("standby", "serving"), "standby")
        down_s = self.clock.monotonic_s() - killed_s
        self._event("standby serving as the primary, from the second copy")
        restart = f"SIGKILL, data deleted; standby served after {down_s:.2f} s (lease {LEASE_S} s)"
        return DaemonOutage(killed_at_ms, self.clock.now_ms()), restart

    # -- processes ----------------------------------------------------------------------------------------------------

    def _config(self) -> str:
        levels = format_delay_levels(self.plan.levels_ms)
        config = f'metrics_listen = "off"\nconsole = "off"\ndelay_levels = "{levels}"\n'
        if self.cluster is not None:
            config += f'broker = "rocketmq"\nendpoints = "{";".join(self.cluster.endpoints)}"\n'
        if self.copy is not None:
            config += f'replica = "sync"\nreplica_url = "{self.copy.url}"\nreplica_lease = "{LEASE_S}s"\n'
        return config

    def _data(self, daemon: str) -> Path:
        return self.folder / ("data" if daemon == "daemon" else f"data-of-{daemon}")

    def _start_copy(self, copy: SecondCopy) -> None:
        if copy.server:
            self._start("object server", *copy.server)
        self._await("serve", SERVING_WITHIN_S, copy.is_reachable)
        self._event(f"second copy in {copy.description}")

    def _start_daemon(self) -> float:
        """Start the daemon, wait until it serves, and return the duration in seconds."""
        started_s, is_serving = self.clock.monotonic_s(), self._log_has("daemon", "serving")
        self._start_serve("daemon")
        self._await("serve", SERVING_WITHIN_S, is_serving)
        return self.clock.monotonic_s() - started_s

    def _start_standby(self) -> None:
        """Start the standby, and wait until the primary counts on it."""
        self._start_serve("standby")
        self._await("follow", SERVING_WITHIN_S, self._log_has("daemon", "standby_registered"))
        self._event(f"standby waiting at {self.addresses['standby']}")

    def _start_serve(self, name: str) -> None:
        """Start a daemon on its own data and address; a second start has the same ones."""
        address = self.addresses.setdefault(name, f"127.0.0.1:{_free_port()}")
        options = ("--config", str(self.folder / "demo.toml"), "--data", str(self._data(name)), "--listen", address)
        self._start(name, sys.executable, "-m", "dmq", "serve", *options, "--log-format", "json")

    def _log_has(self, name: str, event: str) -> Callable[[], bool]:
        """Return a function that returns True once a daemon has logged an event since now."""
        log, line = self.folder / f"{name}.log", f'"event": "{event}"'.encode()
        begin = log.stat().st_size if log.exists() else 0
        return lambda: line in log.read_bytes()[begin:]

    def _start_client(self) -> None:
        """Start the client process, and wait until it is connected."""
        topic, group = (TOPIC, GROUP) if self.cluster is None else (self.cluster.topic, self.cluster.group)
        order = {
            "address": ";".join(self.addresses.values()),
            "topic": topic,
            "group": group,
            "reports": str(self.reports),
        }
        stdin = self._start("client", sys.executable, "-m", "dmq.demo.clients").stdin
        assert stdin is not None
        with suppress(BrokenPipeError):  # it ended; ``_pause`` reports that
            stdin.write(json.dumps(order | {"sends": self.plan.sends}) + "\n")
            stdin.flush()
        self.reports.touch()
        self._await("connect", CONNECTED_WITHIN_S, lambda: b'["connected"]' in self.reports.read_bytes())
        self.began_s = self.clock.monotonic_s()

    def _start(self, name: str, *command: str) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("DMQ_", "AWS_"))}
        if self.copy is not None:
            environment |= self.copy.environment
        with (self.folder / f"{name}.log").open("ab") as log:
            self.children[name] = subprocess.Popen(
                command,
                env=environment | {"HOME": str(self.folder / "home")},
                stdin=subprocess.PIPE,  # the client ends when it is closed, so also after a kill of the demo
                stdout=None if name == "client" else log,
                stderr=log,
                text=True,
                process_group=0,
            )
        return self.children[name]

    def _kill(self, name: str) -> None:
        child = self.children.pop(name)
        child.kill()
        child.wait()

    def _stop_daemon(self) -> None:
        if self.primary == "daemon" and "standby" in self.children:
            self._kill("standby")
        daemon = self.children[self.primary]
        daemon.terminate()
        try:
            self._event(f"daemon stopped, exit code {daemon.wait(STOPPING_WITHIN_S)}")
        except subprocess.TimeoutExpired:
            self._event(f"daemon killed; it did not stop within {STOPPING_WITHIN_S:g} s")

    def _await(self, verb: str, within_s: float, is_so: Callable[[], bool], name: str = "") -> None:
        """Wait until a child is ready, by default the newest one."""
        end_s = self.clock.monotonic_s() + within_s
        while not is_so():
            self._pause()
            if self.clock.monotonic_s() > end_s:
                name = name or list(self.children)[-1]
                raise DemoFailed(f"the {name} does not {verb}: {self._last_line(name)}")

    def _pause(self, seconds: float = _POLL_S) -> None:
        """Wait; raise after an interrupt, and if a child has ended on its own."""
        Event().wait(seconds)
        if self.interrupts:
            raise KeyboardInterrupt
        for name, child in self.children.items():
            if child.poll() is not None and (name, child.returncode) != ("client", 0):
                raise DemoFailed(f"the {name} process ended with {child.returncode}: {self._last_line(name)}")

    def _last_line(self, name: str) -> str:
        lines = (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "its log is empty")

    # -- output -------------------------------------------------------------------------------------------------------

    def _elapsed_s(self) -> float:
        return 0.0 if self.began_s is None else self.clock.monotonic_s() - self.began_s

    def _event(self, text: str) -> None:
        _print(f"{self._elapsed_s():6.1f} s  {text}")


def _print(line: str) -> None:
    print(line, flush=True)
