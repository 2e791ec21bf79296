"""Load for a daemon that is killed all the time, and a ledger of what its clients saw.

Senders repeat a message under the same id until it is accepted. Simple consumers acknowledge most of what they get,
leave some alone and hide some for a while; push consumers fail some. All fail *poison*, each time until it is dead, and
an undertaker reads the dead letters. What they are told goes into the ledger; ``crash_check`` compares it with the
promises.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
from support.clients.wire.client import Received, WireClient, a_message, a_receive, received_of
from support.effort import EFFORT

from broker_adapter.contracts.topics import dead_letter_topic
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.admin import admin_v1
from dmq.admin.client import AdminClient
from dmq.broker.handles.receipt_handle import read_receipt

TOPIC, GROUP, UNDERTAKER = "crashed", "survivors", "undertaker"
LETTERS = dead_letter_topic(GROUP)
RETRY_DELAYS_MS = (200, 500, 1_500)
ATTEMPTS_MAX = 4
INVISIBLE_MS = 10_000
DELAY_MS_MAX = 3_000
_PAUSE_S = 0.02  # between two tries while the daemon is away
_SENDS_PER_S_MAX = 400 if EFFORT > 1 else 150  # of each sender; more would only make the end longer
_MESSAGE_GROUPS = 24


@dataclass(slots=True)
class Sent:
    """One message id: when it was wanted (0: at once), and how often it was sent and answered OK."""

    deliver_at_ms: int
    message_group: str = ""
    is_poison: bool = False
    tries: int = 0
    accepted: int = 0


@dataclass(slots=True, frozen=True)
class Seen:
    """One delivery, as its receiver saw it; ``boot`` is the run of the daemon that handed it out."""

    received: Received
    boot: int
    at_ms: int


@dataclass(slots=True, frozen=True)
class Hidden:
    """A change of the invisible duration, or a failure, that was answered OK: not before ``until_ms``, if not done."""

    at_ms: int
    until_ms: int


@dataclass(slots=True)
class Ledger:
    """What the clients know. Written by many threads, read when they have ended."""

    sent: dict[str, Sent] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    acked_at_ms: dict[str, int] = field(default_factory=dict)
    in_doubt: set[str] = field(default_factory=set)  # acknowledged, and the answer was lost
    hidden: dict[str, list[Hidden]] = field(default_factory=dict)
    maybe_hidden: dict[str, list[Hidden]] = field(default_factory=dict)  # asked for, and the answer was lost
    dead: dict[str, set[int]] = field(default_factory=dict)  # where in the dead-letter queue
    nacked_total: int = 0
    stale_acks: int = 0
    refusals: list[str] = field(default_factory=list)
    news: threading.Condition = field(default_factory=threading.Condition)
    accepted_total: int = 0
    acked_total: int = 0

    def is_settled(self) -> bool:
        """Whether every accepted message was acknowledged or is dead, as far as its receivers know."""
        return not self.unsettled()

    def unsettled(self) -> list[str]:
        """What is still to come."""
        return [
            message_id
            for message_id, sent in self.sent.items()
            if sent.accepted and not any(message_id in over for over in (self.acked_at_ms, self.in_doubt, self.dead))
        ]

    def wait_for_sends(self, count: int) -> None:
        """Wait until so many further sends were answered OK."""
        with self.news:
            wanted = self.accepted_total + count
            assert self.news.wait_for(lambda: self.accepted_total >= wanted, timeout=60)


class Load:
    """Senders and receivers at work until told to end."""

    def __init__(self, address: str, seed: int, *, senders: int = 3, receivers: int = 4) -> None:
        self.ledger = Ledger()
        self._address = address
        self._seed = seed
        self._ends_sending = threading.Event()
        self._ends_receiving = threading.Event()
        self._is_careful = threading.Event()  # acknowledge everything from here on
        self._pool = ThreadPoolExecutor(max_workers=senders + receivers + 1, thread_name_prefix="load")
        with AdminClient(address) as admin:
            table = admin_v1.TableBackoff(steps_ms=RETRY_DELAYS_MS)
            admin.set_group(GROUP, policy=admin_v1.Policy(table=table, max_attempts=ATTEMPTS_MAX))
        self._senders: list[Future[None]] = [self._pool.submit(self._send, number) for number in range(senders)]
        self._receivers = [self._pool.submit(self._receive, number) for number in range(receivers)]
        self._receivers.append(self._pool.submit(self._bury))

    def end_sending(self) -> None:
        """Wait until every sender has an answer for its last message; the daemon must be there."""
        self._ends_sending.set()
        for sender in self._senders:
            sender.result(60)

    def drain(self, within_s: float) -> None:
        """Acknowledge everything, until all that was accepted is settled; asserts that this is in time."""
        self._is_careful.set()
        until_s = time.monotonic() + within_s
        with self.ledger.news:
            while not self.ledger.is_settled():
                assert time.monotonic() < until_s, f"not settled within {within_s} s: {self.ledger.unsettled()[:10]}"
                self.ledger.news.wait(0.5)

    def close(self) -> None:
        """End all threads; errors they met are raised here."""
        self._ends_sending.set()
        self._ends_receiving.set()
        self._pool.shutdown(wait=True)
        for worker in [*self._senders, *self._receivers]:
            worker.result()

    # -- sending ------------------------------------------------------------------------------------------------------

    def _send(self, number: int) -> None:
        rng = random.Random(f"{self._seed}-send-{number}")
        turn = 0
        with WireClient(self._address, f"sender-{number}") as client:
            while not self._ends_sending.wait(1 / _SENDS_PER_S_MAX):
                messages = []
                for _ in range(rng.choice((1, 1, 1, 4))):
                    turn += 1
                    messages.append(self._message(rng, f"01{number:04X}{turn:028X}"))
                self._insist(client, messages)
                if rng.random() < 0.1:
                    self._insist(client, messages)  # an answer that came back is asked for again

    def _message(self, rng: random.Random, message_id: str) -> wire.Message:
        deliver_at_ms = 0
        if rng.random() < 0.6:
            deliver_at_ms = _now_ms() + rng.randint(1, DELAY_MS_MAX)
        message_group = f"group-{rng.randrange(_MESSAGE_GROUPS)}" if rng.random() < 0.1 else ""
        self.ledger.sent[message_id] = Sent(deliver_at_ms, message_group, is_poison=rng.random() < 0.02)
        body = f"{message_id} {deliver_at_ms}".encode().ljust(rng.choice((64, 200, 1000)))
        return a_message(TOPIC, message_id, body, deliver_at_ms=deliver_at_ms, message_group=message_group)

    def _insist(self, client: WireClient, messages: Sequence[wire.Message]) -> None:
        """Send until accepted, always under the same ids."""
        ledger = self.ledger
        while not self._ends_receiving.is_set():  # only ever set while the daemon is up, or the test has failed
            for message in messages:
                ledger.sent[message.system_properties.message_id].tries += 1
            try:
                answer = client.send(*messages, deadline_s=3)
            except grpc.RpcError:
                time.sleep(_PAUSE_S)
                continue
            if answer.status.code == wire.OK:
                self._note_accepted(messages, answer)
                return
            if answer.status.code not in {wire.TOO_MANY_REQUESTS, wire.INTERNAL_SERVER_ERROR}:
                ledger.refusals.append(f"send: {answer.status}")
                return
            time.sleep(_PAUSE_S)

    def _note_accepted(self, messages: Sequence[wire.Message], answer: wire.SendMessageResponse) -> None:
        ledger = self.ledger
        with ledger.news:
            for message, entry in zip(messages, answer.entries, strict=True):
                if entry.message_id != message.system_properties.message_id or entry.status.code != wire.OK:
                    ledger.refusals.append(f"send: {entry}")
                ledger.sent[message.system_properties.message_id].accepted += 1
            ledger.accepted_total += len(messages)
            ledger.news.notify_all()

    # -- receiving ----------------------------------------------------------------------------------------------------

    def _receive(self, number: int) -> None:
        rng = random.Random(f"{self._seed}-receive-{number}")
        is_push = bool(number % 2)
        with WireClient(self._address, f"receiver-{number}") as client:
            while not self._ends_receiving.is_set():
                request = a_receive(TOPIC, GROUP, batch=rng.choice((1, 8, 32)), wait_s=1)
                if is_push:
                    request.auto_renew, request.message_queue.id = True, -1
                try:
                    found = received_of(client.frames("ReceiveMessage", request, deadline_s=6))
                except grpc.RpcError:
                    time.sleep(_PAUSE_S)
                    continue
                now_ms = _now_ms()
                boots = [read_receipt(each.receipt_handle).epoch >> 32 for each in found]
                self.ledger.seen += [Seen(each, boot, now_ms) for each, boot in zip(found, boots, strict=True)]
                self._finish(client, rng, found, is_push=is_push)

    def _finish(self, client: WireClient, rng: random.Random, found: Sequence[Received], *, is_push: bool) -> None:
        to_ack: list[Received] = []
        for each in found:
            sent = self.ledger.sent[each.message_id]
            choice = 1.0 if self._is_careful.is_set() else rng.random()
            if is_push and (sent.is_poison or choice < 0.06):
                self._hide(
                    client, each, rng.choice((0, 100)), at_least_ms=RETRY_DELAYS_MS[each.attempt - 1 : each.attempt]
                )
            elif choice < 0.03 and not sent.message_group:  # or its message group would wait for its lease, too
                continue  # left alone: it comes back when its lease expires
            elif sent.is_poison or choice < 0.06:
                self._hide(client, each, rng.randint(200, 1500))
            else:
                to_ack.append(each)
        if to_ack:
            self._ack(client, to_ack)

    def _bury(self) -> None:
        """Read the dead letters."""
        with WireClient(self._address, "undertaker") as client:
            while not self._ends_receiving.is_set():
                try:
                    found = client.receive(LETTERS, UNDERTAKER, wait_s=1)
                    with self.ledger.news:
                        for each in found:
                            self.ledger.dead.setdefault(each.message_id, set()).add(each.queue_offset)
                        self.ledger.news.notify_all()
                    if found:
                        client.ack(LETTERS, UNDERTAKER, found)
                except grpc.RpcError:
                    time.sleep(_PAUSE_S)

    def _ack(self, client: WireClient, deliveries: Sequence[Received]) -> None:
        ledger = self.ledger
        try:
            answer = client.ack(TOPIC, GROUP, deliveries)
        except grpc.RpcError:
            answer = None
        if answer is None or answer.status.code == wire.INTERNAL_SERVER_ERROR:  # a fenced daemon leaves it in doubt
            with ledger.news:
                ledger.in_doubt.update(each.message_id for each in deliveries)
            return
        now_ms = _now_ms()
        with ledger.news:
            for each, entry in zip(deliveries, answer.entries, strict=True):
                if entry.status.code == wire.OK:
                    ledger.acked_at_ms.setdefault(each.message_id, now_ms)
                    ledger.acked_total += 1
                elif entry.status.code == wire.INVALID_RECEIPT_HANDLE:
                    ledger.stale_acks += 1
                else:
                    ledger.refusals.append(f"ack: {entry}")
            ledger.news.notify_all()

    def _hide(
        self, client: WireClient, delivery: Received, invisible_ms: int, *, at_least_ms: Sequence[int] = ()
    ) -> None:
        """Hide a delivery, or fail it as a push consumer: then it waits for ``at_least_ms``, if it comes again."""
        begun_ms = _now_ms()
        until_ms = begun_ms + max(invisible_ms, *at_least_ms, 0)
        try:
            answer = client.change_invisible(TOPIC, GROUP, delivery, invisible_ms)
        except grpc.RpcError:
            answer = None
        if answer is None or answer.status.code == wire.INTERNAL_SERVER_ERROR:
            self.ledger.maybe_hidden.setdefault(delivery.message_id, []).append(Hidden(begun_ms, until_ms))
            return
        if answer.status.code == wire.OK:
            until = Hidden(_now_ms(), until_ms)
            with self.ledger.news:
                self.ledger.hidden.setdefault(delivery.message_id, []).append(until)
                self.ledger.nacked_total += bool(at_least_ms)
                self.ledger.news.notify_all()
        elif answer.status.code == wire.INVALID_RECEIPT_HANDLE:
            self.ledger.stale_acks += 1
        else:
            self.ledger.refusals.append(f"change: {answer.status}")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
