"""Official clients at work while what serves them goes away and comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pytest
from support.clients.official.client import ANSWER_S_MAX, ClientError, Language, OfficialClient, can_run

RECOVERY_S_MAX = 30.0
TOPIC, GROUPS = "restarted", ("simple", "push")  # of each language's topic the name begins so


class Traffic:
    """A producer, a simple consumer and a listener at work, as applications that try again when a call fails."""

    def __init__(self, process: OfficialClient, *, patience_s: float = RECOVERY_S_MAX) -> None:
        self._process = process
        self._patience_s = patience_s
        self._topic = f"{TOPIC}-{process.language.name}"
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
        self.wait_until(lambda: self.failures > 0, self._patience_s)

    def finish(self) -> None:
        """Send no more, wait until both consumers had all that was sent, and receive no more."""
        self.end_producing()
        for consumer, seen in (("simple", self._simply_received), ("push", self.pushed)):
            self._wait_for_all(consumer, seen)
        self._is_ending.set()

    def _wait_for_all(self, consumer: str, seen: Callable[[], list[str]]) -> None:
        try:
            self.wait_until(lambda: self.sent.keys() <= set(seen()), self._patience_s)
        except AssertionError:
            now_s, missing = time.monotonic(), self.sent.keys() - set(seen())
            ages = ", ".join(sorted(f"{each} sent {now_s - self.sent[each]:.1f} s ago" for each in missing))
            raise AssertionError(
                f"the {consumer} consumer misses {len(missing)} of {len(self.sent)} messages: {ages}"
            ) from None

    def _simply_received(self) -> list[str]:
        return [message_id for message_id, _ in self.received]

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
            found = {name: pool.submit(self.wait_until, wait, self._patience_s) for name, wait in waits.items()}
            return {name: round(took.result(), 2) for name, took in found.items()}


class Outage(NamedTuple):
    """What is done to what serves clients. ``is_noticed``: a producer or a simple consumer fails meanwhile."""

    name: str
    begin: Callable[[], object]
    end: Callable[[], object]
    is_noticed: bool = True


class Restarts:
    """Every language's traffic through the same restarts: how long each client took, or why it did not go on."""

    def __init__(self, traffics: dict[str, Traffic]) -> None:
        self._going = traffics
        self._pool = ThreadPoolExecutor(max_workers=len(traffics))
        self.failed: dict[str, BaseException] = {}

    def run(self, *outages: Outage) -> None:
        """Take what serves them away and bring it back, again and again; wait until all that was sent has come."""
        self._together(Traffic.recovery_s)  # everything flows
        for outage in outages:
            for traffic in self._going.values():
                traffic.failures = 0
            outage.begin()
            if outage.is_noticed:
                self._together(Traffic.wait_for_failure)
            outage.end()
            print(f"recovery after {outage.name}: {self._together(Traffic.recovery_s)} s")
        self._together(Traffic.finish)
        self._pool.shutdown()

    def _together(self, do: Callable[[Traffic], Any]) -> dict[str, Any]:
        """Do it with each traffic that still goes on, and return what came of it; who fails takes no further part."""
        begun = {name: self._pool.submit(do, traffic) for name, traffic in self._going.items()}
        failed = {name: error for name, each in begun.items() if (error := each.exception()) is not None}
        self.failed |= failed
        self._going = {name: traffic for name, traffic in self._going.items() if name not in failed}
        return {name: each.result() for name, each in begun.items() if name not in failed}


@contextmanager
def at_work(
    languages: Sequence[Language], address: str, folders: pytest.TempPathFactory, patience_s: float = RECOVERY_S_MAX
) -> Iterator[Restarts]:
    """Run the traffic of all clients that this machine has; yield the restarts that they go through."""
    with ExitStack() as stack:
        traffics = {}
        for language in filter(can_run, languages):
            process = stack.enter_context(OfficialClient(language, folders.mktemp(language.name), address))
            traffics[language.name] = Traffic(process, patience_s=patience_s)
        for traffic in traffics.values():
            stack.enter_context(traffic.running())
        yield Restarts(traffics)
