"""The daemon goes away under running official clients and comes back: every one of them goes on by itself.

The reference server leaves Python, Go and Rust consumers dead for minutes after its restart (it has forgotten their
settings). Here nothing a client told us is needed to serve it. All languages are at work while one daemon is restarted,
so that the waits overlap.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.daemon import Daemon
from support.effort import at_length
from support.official_client import (
    ANSWER_S_MAX,
    NODE,
    PYTHON,
    ClientError,
    Language,
    OfficialClient,
    can_run,
    require,
    those_with,
)

RECOVERY_S_MAX = 30.0
_TOPIC = "restarted"
_AT_ONCE = 8  # languages under one daemon; all published versions at once would be thirty processes of three clients
_RESTARTABLE = those_with("restart")


class Traffic:
    """A producer, a simple consumer and a listener at work, as applications that try again when a call fails."""

    def __init__(self, process: OfficialClient) -> None:
        self._process = process
        self._topic = f"restarted-{process.language.name}"
        started = [
            process.begin_start("producer", "producer", self._topic),
            process.begin_start("simple", "simple", self._topic, group="simple", wait_s=2),
            process.begin_start("push", process.language.listener, self._topic, group="push"),
        ]
        for each in started:
            each.result(ANSWER_S_MAX)
        self._news = threading.Condition()
        self._is_ending = threading.Event()
        self._producing_ends = threading.Event()
        self.sent: dict[str, float] = {}  # message id: when its send was begun
        self.received: list[tuple[str, float]] = []  # message id, when
        self.failures = 0

    def produce(self) -> None:
        """Send ten messages a second, some of them delayed, until told to end."""
        number = 0
        while not self._producing_ends.wait(0.1):
            number += 1
            begun_s = time.monotonic()
            properties = {"TIMER_DELAY_MS": "500"} if number % 3 == 0 else {}
            try:
                message_id = self._process.send("producer", self._topic, body=f"{number}", properties=properties)
            except ClientError:
                self.failures += 1
                continue
            with self._news:
                self.sent[message_id] = begun_s
                self._news.notify_all()

    def consume(self) -> None:
        """Receive and acknowledge until told to end."""
        while not self._is_ending.is_set():
            try:
                for delivery in self._process.do("receive", name="simple"):
                    with self._news:
                        self.received.append((delivery["message_id"], time.monotonic()))
                        self._news.notify_all()
                    self._process.do("ack", name="simple", token=delivery["token"])
            except ClientError:
                self.failures += 1
                self._is_ending.wait(0.1)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep both loops going in the body."""
        with ThreadPoolExecutor(max_workers=2) as pool:
            loops = [pool.submit(self.produce), pool.submit(self.consume)]
            try:
                yield
            finally:
                self.end_producing()
                self._is_ending.set()
        for loop in loops:
            loop.result()

    def end_producing(self) -> None:
        """Send no more."""
        self._producing_ends.set()

    def wait_until(self, is_true: Callable[[], bool], timeout_s: float) -> float:
        """Wait until ``is_true`` and return how long that took; asserts that it was in time."""
        began_s = time.monotonic()
        with self._news:
            while not is_true():
                assert time.monotonic() - began_s < timeout_s, f"not within {timeout_s} s"
                self._news.wait(0.1)
        return time.monotonic() - began_s

    def wait_for_failure(self) -> None:
        """Wait until the producer or the simple consumer found out that nobody serves them."""
        self.wait_until(lambda: self.failures > 0, RECOVERY_S_MAX)

    def finish(self) -> None:
        """Send no more, wait until both consumers had all that was sent, and receive no more."""
        self.end_producing()
        wanted = set(self.sent)
        self.wait_until(lambda: wanted <= {found for found, _ in self.received}, RECOVERY_S_MAX)
        self.wait_until(lambda: wanted <= set(self.pushed()), RECOVERY_S_MAX)
        self._is_ending.set()

    def pushed(self) -> list[str]:
        """Return the ids the push consumer was given."""
        return [delivery["message_id"] for delivery in self._process.deliveries("push")]

    def recovery_s(self) -> dict[str, float]:
        """Wait until each client did its work again, from now, and return how long each took."""
        now_s, pushed = time.monotonic(), len(self.pushed())
        waits: dict[str, Callable[[], bool]] = {
            "producer": lambda: any(at_s > now_s for at_s in self.sent.values()),
            "simple": lambda: any(at_s > now_s for _, at_s in self.received),
            "push": lambda: len(self.pushed()) > pushed,
        }
        with ThreadPoolExecutor(max_workers=3) as pool:
            found = {name: pool.submit(self.wait_until, wait, RECOVERY_S_MAX) for name, wait in waits.items()}
            return {name: round(took.result(), 2) for name, took in found.items()}


class Restarts:
    """Every language's traffic through the same restarts: how long each client took, or why it did not go on."""

    def __init__(self, traffics: dict[str, Traffic]) -> None:
        self._going = traffics
        self._pool = ThreadPoolExecutor(max_workers=len(traffics))
        self.failed: dict[str, BaseException] = {}

    def run(self, daemon: Daemon) -> None:
        """Stop and kill the daemon under them all, and wait until all that was sent has come."""
        self._together(Traffic.recovery_s)  # everything flows
        for how in (signal.SIGTERM, signal.SIGKILL):
            for traffic in self._going.values():
                traffic.failures = 0
            daemon.stop() if how is signal.SIGTERM else daemon.kill()
            self._together(Traffic.wait_for_failure)
            daemon.restart()
            print(f"recovery after {how.name}: {self._together(Traffic.recovery_s)} s")
        self._together(Traffic.finish)
        self._pool.shutdown()

    def _together(self, do: Callable[[Traffic], Any]) -> dict[str, Any]:
        """Do it with each traffic that still goes on, and return what came of it; who fails takes no further part."""
        begun = {name: self._pool.submit(do, traffic) for name, traffic in self._going.items()}
        failed = {name: error for name, each in begun.items() if (error := each.exception()) is not None}
        self.failed |= failed
        self._going = {name: traffic for name, traffic in self._going.items() if name not in failed}
        return {name: each.result() for name, each in begun.items() if name not in failed}


@pytest.fixture(scope="module")
def restarts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restarts]:
    languages: tuple[Language, ...] = request.param
    with Daemon(tmp_path_factory.mktemp("daemon") / "data") as daemon:
        with ExitStack() as stack:
            traffics = {}
            for language in filter(can_run, languages):
                home = tmp_path_factory.mktemp(language.name)
                process = stack.enter_context(OfficialClient(language, home, daemon.address))
                traffics[language.name] = Traffic(process)
            for traffic in traffics.values():
                stack.enter_context(traffic.running())
            restarts = Restarts(traffics)
            restarts.run(daemon)
        yield restarts
        daemon.stop()


@pytest.mark.parametrize(
    ("restarts", "language"),
    [
        pytest.param(_RESTARTABLE[at : at + _AT_ONCE], language, id=language.name)
        for at in range(0, len(_RESTARTABLE), _AT_ONCE)
        for language in _RESTARTABLE[at : at + _AT_ONCE]
    ],
    indirect=["restarts"],
)
def test_clients_go_on_after_a_restart(language: Language, restarts: Restarts) -> None:
    """After a clean stop and after SIGKILL, producer and consumers work again within seconds, and nothing is lost."""
    require(language)
    if language.name in restarts.failed:
        raise restarts.failed[language.name]


CHECK_BACK_S_MAX = 70.0  # Python asks for its routes every 30 s, and may be told the address it has at the first time


@pytest.mark.parametrize("language", [NODE, pytest.param(PYTHON, marks=at_length)], ids=lambda language: language.name)
def test_a_producer_is_asked_again_after_a_restart(language: Language, tmp_path: Path) -> None:
    """Its half message was undecided when the daemon was killed; its telemetry stream comes back without its doing.

    Go's client opens its stream again when it repeats its settings, after minutes, and nothing hurries it.
    """
    require(language)
    home = tmp_path / "home"
    home.mkdir()
    data = tmp_path / "data"
    env = {**os.environ, "DMQ_TRANSACTION_TIMEOUT": "1s", "DMQ_TRANSACTION_CHECK_INTERVAL": "1s"}
    with Daemon(data, env=env) as daemon, OfficialClient(language, home, daemon.address) as process:
        process.start("producer", "transactional", _TOPIC)
        message_id = process.send("producer", _TOPIC, body="commit after the restart", is_half=True)
        daemon.kill()
        daemon.restart()
        began_s = time.monotonic()
        while True:  # a producer at work shows itself at once, an idle one with its next heartbeat
            try:
                process.send("producer", _TOPIC, body="rollback", is_half=True)
                break
            except ClientError:
                assert time.monotonic() - began_s < RECOVERY_S_MAX
                time.sleep(0.1)
        assert process.wait_for_deliveries("producer", 1, within_s=CHECK_BACK_S_MAX)
        print(f"{language.name} was asked after {time.monotonic() - began_s:.1f} s")
        process.start("push", "push", _TOPIC, group="push")
        assert [each["message_id"] for each in process.wait_for_deliveries("push", 1)] == [message_id]
        daemon.stop()
