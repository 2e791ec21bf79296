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
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

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
        self._counts: Counter[str] = Counter()
        self._delivered: set[int] = set()

    def add(self, kind: str, *fields: Any) -> None:  # noqa: ANN401 - values of JSON
        """Write a report."""
        with self._lock:
            self._file.write(json.dumps([kind, *fields]) + "\n")
            self._file.flush()
            self._counts[kind] += 1
            if kind == "received":
                self._delivered.add(fields[1])

    def are_complete(self, planned: int) -> bool:
        """Return True if every message was sent and received, and every acknowledgement has an answer."""
        with self._lock:
            counts = self._counts
            is_answered = counts["received"] == counts["acked"] + counts["ack_refused"]
            return is_answered and planned == counts["sent"] == len(self._delivered)

    def __str__(self) -> str:
        return f"{self._counts['sent']:,} accepted, {len(self._delivered):,} delivered"


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
    if attempts := _until_answered(lambda: producer.send(message), reports).attempts:
        asked_ms, answered_ms = asked_s * 1000, _clock.now_ms()
        reports.add("sent", send.number, message.message_id, asked_ms, started_ms, answered_ms, attempts)


def _consume(consumer: SimpleConsumer, numbers: count[int], reports: Reports) -> None:
    """Receive and acknowledge messages until the demo is over."""
    while (messages := _until_answered(lambda: consumer.receive(BATCH, INVISIBLE_S), reports).result) is not None:
        at_ms = _clock.now_ms()
        received = [(next(numbers), message) for message in messages]
        for reception, message in received:
            number = json.loads(message.body)["number"]
            reports.add("received", reception, number, message.message_id, at_ms, message.delivery_timestamp or 0)
        for reception, message in received:
            answer = _until_answered(functools.partial(consumer.ack, message), reports)
            if answer.attempts:
                reports.add("ack_refused" if answer.is_stale else "acked", reception, _clock.now_ms())


class Answer(NamedTuple):
    """Answer to a call of the client."""

    attempts: int  # 0: the demo is over, and there is no answer
    result: Any = None
    is_stale: bool = False  # the acknowledgement came too late: the message was delivered again


def _until_answered(attempt: Callable[[], object], reports: Reports) -> Answer:
    """Repeat ``attempt`` and report its errors, until there is an answer or the demo is over."""
    for attempts in count(1):
        if _over.is_set():
            break
        try:
            return Answer(attempts, attempt())
        except Exception as error:  # noqa: BLE001 - the client's errors are of many kinds; the demo shows the last one
            if getattr(error, "code", None) == _INVALID_RECEIPT_HANDLE:
                return Answer(attempts, is_stale=True)
            details = getattr(error, "details", None)  # of gRPC's errors
            text = str(details() if callable(details) else error)
            reports.add("failed", f"{type(error).__name__}: {(text.splitlines() or [''])[0]}"[:300])
            _over.wait(RETRY_AFTER_S)
    return Answer(0)


def _run(order: dict[str, Any]) -> None:
    topic = order["topic"]
    configuration = ClientConfiguration(order["address"], Credentials(), request_timeout=REQUEST_TIMEOUT_S)
    consumer = SimpleConsumer(configuration, order["group"], {topic: FilterExpression()}, await_duration=POLL_S)
    producer = Producer(configuration, [topic])
    reports = Reports(Path(order["reports"]))
    for startup in (consumer.startup, producer.startup):
        _until_answered(startup, reports)
    reports.add("connected")
    began_s, told_s, numbers = _clock.monotonic_s(), 0.0, count(1)
    senders = ThreadPoolExecutor(SENDERS)
    for send in order["sends"]:
        senders.submit(_send, producer, topic, PlannedSend(*send), began_s, reports)
    for _ in range(RECEIVERS):
        threading.Thread(target=_consume, args=(consumer, numbers, reports), daemon=True).start()
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
