"""Clients that send, recall, reschedule, receive and acknowledge the same messages at once, and record each answer."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Self

import grpc
from support.clients.wire.client import Received, WireClient, a_message
from support.models.broker.message_history import Answer, Kind, Operation

from broker_adapter.wire import rocketmq_v2 as wire
from dmq.admin import admin_v1
from dmq.admin.client import AdminClient
from dmq.errors import DmqError

TOPIC, GROUP = "histories", "readers"
_DELAY_MS_MAX = 4_000
_PAUSE_S = 0.02
_OUTCOMES = {
    admin_v1.ChangedMessage.DONE: Answer.DONE,
    admin_v1.ChangedMessage.TOO_LATE: Answer.TOO_LATE,
    admin_v1.ChangedMessage.CANCELLED: Answer.CANCELLED,
    admin_v1.ChangedMessage.UNKNOWN: Answer.UNKNOWN,
}


class HistoryLoad:
    """Clients at work until ``end``; ``histories`` has the operations of each message."""

    def __init__(self, address: str, seed: int) -> None:
        self.histories: dict[str, list[Operation]] = defaultdict(list)
        self._address = address
        self._seed = seed
        self._lock = threading.Lock()
        self._recent: list[str] = []
        self._ends_causes, self._ends_receivers = threading.Event(), threading.Event()
        with AdminClient(address) as admin:
            admin.create_topic(TOPIC)
        with WireClient(address, "readers") as client:
            client.receive(TOPIC, GROUP)  # the group exists before the first message
        self._pool = ThreadPoolExecutor(6)
        self._causes = [self._pool.submit(self._send, each) for each in range(2)]
        self._causes += [self._pool.submit(self._change, each) for each in range(2)]
        self._receivers = [self._pool.submit(self._receive, each) for each in range(2)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends_causes.set()
        self._ends_receivers.set()
        self._pool.shutdown()

    def end(self, within_s: float) -> None:
        """End the changes, wait until all messages are settled as far as their clients know, and observe that."""
        self._ends_causes.set()
        for each in self._causes:
            each.result(60)
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s and self.unsettled():
            self._ends_receivers.wait(0.1)
        self._ends_receivers.set()
        for each in self._receivers:
            each.result(60)
        for message_id, operations in self.histories.items():
            if not any(each.kind in {Kind.ACK, Kind.CANCEL} and each.answer is Answer.NONE for each in operations):
                self._note(message_id, Kind.END, Answer.DONE, time.time_ns())

    def unsettled(self) -> list[str]:
        """Return the messages without an end that their clients know or assume."""
        with self._lock:
            return [
                message_id
                for message_id, operations in self.histories.items()
                if not any(
                    each.kind in {Kind.ACK, Kind.CANCEL} and each.answer in {Answer.DONE, Answer.NONE}
                    for each in operations
                )
            ]

    def cancel_all(self) -> None:
        """Cancel every message, for its answer."""
        with AdminClient(self._address) as admin:
            for message_id in list(self.histories):
                self._ask(message_id, Kind.CANCEL, partial(admin.cancel, TOPIC, [message_id]))

    def _note(self, message_id: str, kind: Kind, answer: Answer, begun_ns: int, due_ms: int = 0) -> None:
        with self._lock:
            self.histories[message_id].append(Operation(kind, answer, begun_ns, time.time_ns(), due_ms))

    def _send(self, number: int) -> None:
        rng = random.Random(f"{self._seed}-send-{number}")
        with WireClient(self._address, f"sender-{number}") as client:
            while not self._ends_causes.wait(rng.uniform(0.0, 0.04)):
                message_id, begun_ns = f"01{rng.getrandbits(128):032X}", time.time_ns()
                due_ms = begun_ns // 1_000_000 + rng.randint(500, _DELAY_MS_MAX)
                with self._lock:
                    self._recent = [*self._recent[-20:], message_id]
                message = a_message(TOPIC, message_id, deliver_at_ms=due_ms)
                while True:  # repeated under one id: one operation
                    try:
                        if client.send(message, deadline_s=3).status.code == wire.OK:
                            break
                    except grpc.RpcError:
                        pass
                    time.sleep(_PAUSE_S)
                self._note(message_id, Kind.SEND, Answer.DONE, begun_ns, due_ms)

    def _change(self, number: int) -> None:
        rng = random.Random(f"{self._seed}-change-{number}")
        with AdminClient(self._address, timeout_s=3) as admin:
            while not self._ends_causes.wait(rng.uniform(0.0, 0.04)):
                with self._lock:
                    message_id = rng.choice(self._recent) if self._recent else ""
                if not message_id:
                    continue
                if rng.random() < 0.3:
                    self._ask(message_id, Kind.CANCEL, partial(admin.cancel, TOPIC, [message_id]))
                    continue
                due_ms = time.time_ns() // 1_000_000 + rng.randint(0, _DELAY_MS_MAX)
                change = partial(admin.reschedule, TOPIC, [message_id], deliver_at_ms=due_ms)
                self._ask(message_id, Kind.RESCHEDULE, change, due_ms)

    def _ask(
        self, message_id: str, kind: Kind, ask: Callable[[], Sequence[admin_v1.ChangedMessage]], due_ms: int = 0
    ) -> None:
        begun_ns = time.time_ns()
        try:
            (changed,) = ask()
            answer = _OUTCOMES[changed.outcome]
        except (DmqError, grpc.RpcError):
            answer = Answer.NONE
            time.sleep(_PAUSE_S)
        self._note(message_id, kind, answer, begun_ns, due_ms)

    def _receive(self, number: int) -> None:
        rng = random.Random(f"{self._seed}-receive-{number}")
        with WireClient(self._address, f"receiver-{number}") as client:
            while not self._ends_receivers.is_set():
                begun_ns = time.time_ns()
                try:
                    found = client.receive(TOPIC, GROUP, batch=8, wait_s=1)
                except (grpc.RpcError, AssertionError):  # AssertionError: the daemon ends
                    time.sleep(_PAUSE_S)
                    continue
                for each in found:
                    self._note(each.message_id, Kind.RECEIVE, Answer.DONE, begun_ns)
                    if rng.random() < 0.9:  # else it comes again
                        self._ack(client, each)

    def _ack(self, client: WireClient, delivery: Received) -> None:
        begun_ns = time.time_ns()
        try:
            code = client.ack(TOPIC, GROUP, [delivery]).entries[0].status.code
        except (grpc.RpcError, IndexError):
            code = wire.INTERNAL_SERVER_ERROR
        if code != wire.INVALID_RECEIPT_HANDLE:  # which is refused without effect
            self._note(delivery.message_id, Kind.ACK, Answer.DONE if code == wire.OK else Answer.NONE, begun_ns)
