"""Client process of the demo, a producer and a consumer on the official RocketMQ client; no module imports this one.

The order is one line of JSON on stdin. Reports are lines of JSON in a file; progress goes to stdout. The process ends
when all messages were received, or when stdin ends. The official client opens a log file in HOME at import, starts its
own threads and registers its wire definitions in the process. This is why it has a separate process.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

from rocketmq import ClientConfiguration, Credentials, FilterExpression, Message, Producer, SimpleConsumer

from broker_adapter.runtime.clock import SystemClock
from dmq.demo.plan import PlannedSend

SENDERS = 4
RECEIVERS = 2
BATCH = 16
INVISIBLE_S = 10  # the minimum of the protocol
POLL_S = 5
REQUEST_TIMEOUT_S = 3
RETRY_AFTER_S = 0.1
LINGER_S = 1.0  # after the last message, to detect unexpected repetitions
PROGRESS_EVERY_S = 5.0
_INVALID_RECEIPT_HANDLE = 40013

_clock = SystemClock()
_over = threading.Event()
_stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")


class Reports:
    """Reports of this process, one line of JSON each; safe from any thread."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._lock = threading.Lock()
        self._numbers: dict[str, set[int]] = {"sent": set(), "received": set()}

    def add(self, kind: str, *fields: Any) -> None:  # noqa: ANN401 - values of JSON
        """Write a report. The first field of ``sent`` and ``received`` is the number of the message."""
        with self._lock:
            self._file.write(json.dumps([kind, *fields]) + "\n")
            self._file.flush()
            if kind in self._numbers:
                self._numbers[kind].add(fields[0])

    def are_complete(self, planned: int) -> bool:
        """Return True if every message was sent and received."""
        return all(len(numbers) == planned for numbers in self._numbers.values())

    def __str__(self) -> str:
        return f"{len(self._numbers['sent']):,} accepted, {len(self._numbers['received']):,} delivered"


class SameMessage(Message):  # type: ignore[misc]  # the official client has no types
    """Message that keeps its first id.

    The official client creates a new id at each call of ``send``, so a send repeated by the application would be
    another message. With the same id the daemon detects the repetition and stores the message once.
    """

    _first_id = ""

    @property
    def message_id(self) -> str:
        """Id of the first attempt."""
        return self._first_id

    @message_id.setter
    def message_id(self, message_id: str) -> None:
        self._first_id = self._first_id or message_id


def _send(producer: Producer, topic: str, send: PlannedSend, began_s: float, reports: Reports) -> None:
    """Send a planned message at its planned time; repeat the send until it is answered OK."""
    if _over.wait(send.at_ms / 1000 - (_clock.monotonic_s() - began_s)):
        return
    started_ms = _clock.now_ms()
    message = SameMessage()
    message.topic = topic
    message.body = json.dumps({"number": send.number}).encode()
    asked_s = 0
    match send.kind:
        case "delivery timestamp":
            asked_s = -(-(started_ms + send.delay_ms) // 1000)  # the client sends whole seconds, so round up
            message.delivery_timestamp = asked_s
        case "delay level":
            message.add_property("DELAY", str(send.level))
        case _:
            message.add_property("TIMER_DELAY_MS", str(send.delay_ms))
    attempts, _ = _until_answered(lambda: producer.send(message), reports)
    if attempts:
        reports.add("sent", send.number, message.message_id, asked_s * 1000, started_ms, _clock.now_ms(), attempts)


def _consume(consumer: SimpleConsumer, reports: Reports) -> None:
    """Receive and acknowledge messages until the demo is over."""
    while (messages := _until_answered(lambda: consumer.receive(BATCH, INVISIBLE_S), reports)[1]) is not None:
        at_ms = _clock.now_ms()
        for message in messages:
            reports.add("received", json.loads(message.body)["number"], at_ms, message.delivery_timestamp or 0)
        for message in messages:
            _until_answered(functools.partial(consumer.ack, message), reports)


def _until_answered(attempt: Callable[[], object], reports: Reports) -> tuple[int, Any]:
    """Repeat ``attempt`` until there is an answer, and report its errors. Return the number of attempts and the result.

    The number is 0 once the demo is over. An acknowledgement that comes too late is answered, too: the message was
    delivered again.
    """
    for attempts in count(1):
        if _over.is_set():
            break
        try:
            return attempts, attempt()
        except Exception as error:  # noqa: BLE001 - the client's errors are of many kinds; the demo shows the last one
            if getattr(error, "code", None) == _INVALID_RECEIPT_HANDLE:
                return attempts, None
            details = getattr(error, "details", None)  # of gRPC's errors
            text = str(details() if callable(details) else error)
            reports.add("failed", f"{type(error).__name__}: {(text.splitlines() or [''])[0]}"[:300])
            _over.wait(RETRY_AFTER_S)
    return 0, None


def _run(order: dict[str, Any]) -> None:
    topic = order["topic"]
    configuration = ClientConfiguration(order["address"], Credentials(), request_timeout=REQUEST_TIMEOUT_S)
    consumer = SimpleConsumer(configuration, order["group"], {topic: FilterExpression()}, await_duration=POLL_S)
    producer = Producer(configuration, [topic])
    reports = Reports(Path(order["reports"]))
    for startup in (consumer.startup, producer.startup):
        _until_answered(startup, reports)
    reports.add("connected")
    began_s, told_s = _clock.monotonic_s(), 0.0
    senders = ThreadPoolExecutor(SENDERS)
    for send in order["sends"]:
        senders.submit(_send, producer, topic, PlannedSend(*send), began_s, reports)
    for _ in range(RECEIVERS):
        threading.Thread(target=_consume, args=(consumer, reports), daemon=True).start()
    while not (_over.wait(RETRY_AFTER_S) or reports.are_complete(len(order["sends"]))):
        elapsed_s = _clock.monotonic_s() - began_s
        if elapsed_s >= told_s + PROGRESS_EVERY_S:
            told_s += PROGRESS_EVERY_S
            print(f"{elapsed_s:6.1f} s  {reports}", file=_stdout, flush=True)
    _over.wait(LINGER_S)


def _watch_stdin() -> None:
    sys.stdin.read()
    _over.set()


if __name__ == "__main__":
    os.dup2(2, 1)  # other output must not mix with the progress
    first_line = sys.stdin.readline()
    threading.Thread(target=_watch_stdin, daemon=True).start()
    _run(json.loads(first_line))
    os._exit(0)  # the client's threads wait for a server that may be gone
