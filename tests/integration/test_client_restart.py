"""The daemon goes away under running official clients and comes back: every one of them goes on by itself.

The reference server leaves Python, Go and Rust consumers dead for minutes after its restart (it has forgotten their
settings). Here nothing a client told us is needed to serve it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.daemon import Daemon
from support.official_client import LANGUAGES, ClientError, Language, OfficialClient, require

RECOVERY_S_MAX = 30.0
_TOPIC = "restarted"


class Traffic:
    """A producer, a simple consumer and a push consumer at work, as applications that try again when a call fails."""

    def __init__(self, process: OfficialClient) -> None:
        self._process = process
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
                message_id = self._process.send("producer", _TOPIC, body=f"{number}", properties=properties)
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


@pytest.mark.timeout(150)
@pytest.mark.parametrize("language", LANGUAGES, ids=lambda language: language.name)
def test_clients_go_on_after_a_restart(language: Language, daemon: Daemon, tmp_path: Path) -> None:
    """After a clean stop and after SIGKILL, producer and consumers work again within seconds, and nothing is lost."""
    require(language)
    home = tmp_path / "home"
    home.mkdir()
    with OfficialClient(language, home, daemon.address) as process:
        process.start("producer", "producer", _TOPIC)
        process.start("simple", "simple", _TOPIC, group="simple")
        process.start("push", "push", _TOPIC, group="push")
        traffic = Traffic(process)
        with traffic.running():
            traffic.recovery_s()  # everything flows
            for how in (signal.SIGTERM, signal.SIGKILL):
                if how is signal.SIGTERM:
                    daemon.stop()
                else:
                    daemon.kill()
                failures = traffic.failures
                traffic.wait_until(lambda: traffic.failures > failures, RECOVERY_S_MAX)  # noqa: B023 - used at once
                daemon.restart()
                print(f"recovery of {language.name} after {how.name}: {traffic.recovery_s()} s")
            traffic.end_producing()
            wanted = set(traffic.sent)
            traffic.wait_until(lambda: wanted <= {found for found, _ in traffic.received}, RECOVERY_S_MAX)
            traffic.wait_until(lambda: wanted <= set(traffic.pushed()), RECOVERY_S_MAX)
    daemon.stop()


CHECK_BACK_S_MAX = 70.0  # Python asks for its routes every 30 s, and may be told the address it has at the first time


@pytest.mark.timeout(150)
@pytest.mark.parametrize("language", LANGUAGES, ids=lambda language: language.name)
def test_a_producer_is_asked_again_after_a_restart(language: Language, data: Path, tmp_path: Path) -> None:
    """Its half message was undecided when the daemon was killed; its telemetry stream comes back without its doing."""
    require(language)
    home = tmp_path / "home"
    home.mkdir()
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
