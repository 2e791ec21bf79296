"""Client processes of the demo, on the official RocketMQ client; no module imports this one.

    python -m dmq.demo.clients producer | consumer

The order is one line of JSON on stdin, facts are lines on stdout, and the process ends when stdin ends. The official
client opens a log file in HOME at import, starts its own threads and registers its wire definitions in the process.
This is why it has a separate process.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

from rocketmq import (
    ClientConfiguration,
    Credentials,
    FilterExpression,
    Message,
    Producer,
    SimpleConsumer,
)

from broker_adapter.runtime.clock import SystemClock
from dmq.demo.facts import (
    Acked,
    AckStale,
    Fact,
    Ready,
    Received,
    ReceiveFailed,
    SendFailed,
    SendsDone,
    Sent,
    to_line,
)

SENDERS = 4
RECEIVERS = 2
BATCH = 16
INVISIBLE_S = 10  # the minimum of the protocol
POLL_S = 5
REQUEST_TIMEOUT_S = 3
RETRY_AFTER_S = 0.1
_INVALID_RECEIPT_HANDLE = 40013

_clock = SystemClock()
_over = threading.Event()


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


class Teller:
    """Writer of facts as whole lines; safe from any thread."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lock = threading.Lock()

    def __call__(self, fact: Fact) -> None:
        with self._lock:
            self._out.write(to_line(fact) + "\n")
            self._out.flush()


def produce(order: dict[str, Any], tell: Teller) -> None:
    """Send the planned messages at their planned times; repeat each send until it is answered OK."""
    topic = order["topic"]
    producer = Producer(_configuration(order["address"]), [topic])
    _until_it_works(producer.startup, lambda why: tell(SendFailed(-1, _clock.now_ms(), why)))
    tell(Ready(_clock.now_ms()))
    started_s = _clock.monotonic_s()
    planned: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for send in order["sends"]:
        planned.put(send)

    def work() -> None:
        while not _over.is_set():
            try:
                send = planned.get_nowait()
            except queue.Empty:
                return
            _over.wait(send["at_ms"] / 1000 - (_clock.monotonic_s() - started_s))
            if not _over.is_set():
                _send(producer, topic, send, tell)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(SENDERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if not _over.is_set():
        tell(SendsDone(_clock.now_ms()))


def _send(producer: Producer, topic: str, send: dict[str, Any], tell: Teller) -> None:
    started_ms = _clock.now_ms()
    message = SameMessage()
    message.topic = topic
    message.body = json.dumps({"number": send["number"]}).encode()
    asked_s = 0
    match send["kind"]:
        case "delivery timestamp":
            asked_s = -(-(started_ms + send["delay_ms"]) // 1000)  # the client sends whole seconds, so round up
            message.delivery_timestamp = asked_s
        case "delay level":
            message.add_property("DELAY", str(send["level"]))
        case _:
            message.add_property("TIMER_DELAY_MS", str(send["delay_ms"]))
    attempts = 0

    def attempt() -> None:
        nonlocal attempts
        attempts += 1
        producer.send(message)

    if _until_it_works(attempt, lambda why: tell(SendFailed(send["number"], _clock.now_ms(), why))):
        tell(Sent(send["number"], message.message_id, asked_s * 1000, started_ms, _clock.now_ms(), attempts))


def consume(order: dict[str, Any], tell: Teller) -> None:
    """Receive and acknowledge messages until the demo is over."""
    consumer = SimpleConsumer(
        _configuration(order["address"]), order["group"], {order["topic"]: FilterExpression()}, await_duration=POLL_S
    )

    def complain(why: str) -> None:
        tell(ReceiveFailed(_clock.now_ms(), why))

    _until_it_works(consumer.startup, complain)
    tell(Ready(_clock.now_ms()))
    receptions = 0
    counting = threading.Lock()

    def work() -> None:
        nonlocal receptions
        messages: list[Message] = []

        def receive() -> None:
            messages[:] = consumer.receive(BATCH, INVISIBLE_S)

        while not _over.is_set():
            if not _until_it_works(receive, complain):
                return
            at_ms = _clock.now_ms()
            with counting:
                first = receptions + 1
                receptions += len(messages)
            for reception, message in enumerate(messages, first):
                number = json.loads(message.body)["number"]
                due_ms = message.delivery_timestamp or 0
                tell(Received(reception, number, message.message_id, at_ms, due_ms, message.delivery_attempt))
            for reception, message in enumerate(messages, first):
                _ack(consumer, message, reception, tell, complain)

    for _ in range(RECEIVERS):
        threading.Thread(target=work, daemon=True).start()
    _over.wait()


def _ack(
    consumer: SimpleConsumer, message: Message, reception: int, tell: Teller, complain: Callable[[str], None]
) -> None:
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

    if _until_it_works(ack, complain):
        tell(AckStale(reception, _clock.now_ms()) if is_stale else Acked(reception, _clock.now_ms()))


def _until_it_works(attempt: Callable[[], object], complain: Callable[[str], None]) -> bool:
    """Repeat ``attempt`` and report its errors, until it succeeds (True) or the demo is over (False)."""
    while not _over.is_set():
        try:
            attempt()
        except Exception as error:  # noqa: BLE001 - the client's errors are of many kinds; the parent shows them
            complain(_first_line(error))
            _over.wait(RETRY_AFTER_S)
        else:
            return True
    return False


def _first_line(error: Exception) -> str:
    details = getattr(error, "details", None)  # of gRPC's errors
    text = str(details() if callable(details) else error)
    return f"{type(error).__name__}: {(text.splitlines() or [''])[0]}"[:300]


def _configuration(address: str) -> ClientConfiguration:
    return ClientConfiguration(address, Credentials(), request_timeout=REQUEST_TIMEOUT_S)


def _watch_stdin() -> None:
    sys.stdin.read()
    _over.set()


def main() -> None:
    """Run the role in the first argument, with the order in the line on stdin."""
    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # other output must not mix with the facts
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_watch_stdin, daemon=True).start()
    {"producer": produce, "consumer": consume}[sys.argv[1]](order, Teller(told))
    _over.wait()
    os._exit(0)  # the client's threads wait for a server that may be gone


if __name__ == "__main__":
    main()
