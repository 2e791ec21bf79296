"""Client process of the demo, a producer and a consumer on the official RocketMQ client; no module imports this one.

The order is one line of JSON on stdin. Reports are lines of JSON in a file; progress goes to stdout. The process ends
when all messages were received, or when stdin ends. The official client opens a log file in HOME at import, starts its
own threads and registers its wire definitions in the process. This is why it has a separate process.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections import Counter
from collections.abc import Callable
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


def _produce(
    producer: Producer, topic: str, sends: queue.SimpleQueue[PlannedSend], started_s: float, reports: Reports
) -> None:
    """Send planned messages at their planned times; repeat each send until it is answered OK."""
    while not _over.is_set():
        try:
            send = sends.get_nowait()
        except queue.Empty:
            return
        _over.wait(send.at_ms / 1000 - (_clock.monotonic_s() - started_s))
        if not _over.is_set():
            _send(producer, topic, send, reports)


def _send(producer: Producer, topic: str, send: PlannedSend, reports: Reports) -> None:
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
    attempts = count(1)
    if _until_it_works(lambda: (next(attempts), producer.send(message)), reports):
        answered_ms, used = _clock.now_ms(), next(attempts) - 1
        reports.add("sent", send.number, message.message_id, asked_s * 1000, started_ms, answered_ms, used)


def _consume(consumer: SimpleConsumer, numbers: count[int], reports: Reports) -> None:
    """Receive and acknowledge messages until the demo is over."""
    messages: list[Message] = []

    def receive() -> None:
        messages[:] = consumer.receive(BATCH, INVISIBLE_S)

    while _until_it_works(receive, reports):
        at_ms = _clock.now_ms()
        received = [(next(numbers), message) for message in messages]
        for reception, message in received:
            number = json.loads(message.body)["number"]
            reports.add("received", reception, number, message.message_id, at_ms, message.delivery_timestamp or 0)
        for reception, message in received:
            _ack(consumer, message, reception, reports)


def _ack(consumer: SimpleConsumer, message: Message, reception: int, reports: Reports) -> None:
    """Acknowledge until there is an answer: OK, or that the message was delivered again."""
    is_stale = False

    def ack() -> None:
        nonlocal is_stale
        try:
            consumer.ack(message)
        except Exception as error:
            if getattr(error, "code", None) != _INVALID_RECEIPT_HANDLE:
                raise
            is_stale = True

    if _until_it_works(ack, reports):
        reports.add("ack_refused" if is_stale else "acked", reception, _clock.now_ms())


def _until_it_works(attempt: Callable[[], object], reports: Reports) -> bool:
    """Repeat ``attempt`` and report its errors, until it succeeds (True) or the demo is over (False)."""
    while not _over.is_set():
        try:
            attempt()
        except Exception as error:  # noqa: BLE001 - the client's errors are of many kinds; the demo shows the last one
            details = getattr(error, "details", None)  # of gRPC's errors
            text = str(details() if callable(details) else error)
            reports.add("failed", f"{type(error).__name__}: {(text.splitlines() or [''])[0]}"[:300])
            _over.wait(RETRY_AFTER_S)
        else:
            return True
    return False


def _run(order: dict[str, Any]) -> None:
    topic = order["topic"]
    configuration = ClientConfiguration(order["address"], Credentials(), request_timeout=REQUEST_TIMEOUT_S)
    consumer = SimpleConsumer(configuration, order["group"], {topic: FilterExpression()}, await_duration=POLL_S)
    producer = Producer(configuration, [topic])
    reports = Reports(Path(order["reports"]))
    if not (_until_it_works(consumer.startup, reports) and _until_it_works(producer.startup, reports)):
        return
    sends: queue.SimpleQueue[PlannedSend] = queue.SimpleQueue()
    for send in order["sends"]:
        sends.put(PlannedSend(*send))
    reports.add("connected")
    started_s, told_s, numbers = _clock.monotonic_s(), 0.0, count(1)
    for _ in range(SENDERS):
        threading.Thread(target=_produce, args=(producer, topic, sends, started_s, reports), daemon=True).start()
    for _ in range(RECEIVERS):
        threading.Thread(target=_consume, args=(consumer, numbers, reports), daemon=True).start()
    while not (_over.wait(RETRY_AFTER_S) or reports.are_complete(len(order["sends"]))):
        elapsed_s = _clock.monotonic_s() - started_s
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
