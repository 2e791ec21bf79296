"""Operators beside the load on a daemon that is killed all the time: they reset, remove and make, redrive, purge, copy.

They act on a group of their own that reads the topic of the load, and on a topic of their own. The promises to
everybody else hold as if nobody did anything. An order that is refused, or whose answer a kill took, is given again
or not: all that counts is what is there in the end.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc
from support.clients.load.crash import TOPIC
from support.clients.wire.client import Received, WireClient, a_message

from broker_adapter.wire import rocketmq_v2 as wire
from dmq.admin import admin_v1
from dmq.admin.client import AdminClient
from dmq.errors import DmqError

INTERRUPTED, SIDE = "interrupted", "side"
ORDERS = {"reset", "group removed", "redriven", "purged", "topic made anew", "backed up"}
_PAUSE_S = 0.02


class Operators:
    """One thread that gives orders, and one that consumes as the group they are about."""

    def __init__(self, address: str, seed: int, backups: Path) -> None:
        self.done: Counter[str] = Counter()
        self.backups: list[Path] = []
        self._address = address
        self._rng = random.Random(f"{seed}-operators")
        self._folder = backups
        self._ends = threading.Event()
        self._news = threading.Condition()
        self._failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._watched, args=(work,)) for work in (self._operate, self._consume)
        ]
        for each in self._threads:
            each.start()

    def wait_until_each_was_done(self, within_s: float) -> None:
        """Wait until an order of every kind was carried out: without them the run says nothing of operators."""
        with self._news:
            assert self._news.wait_for(lambda: self._failures or self.done.keys() == ORDERS, within_s), self.done

    def close(self) -> None:
        """End both threads; errors they met are raised here."""
        self._ends.set()
        for each in self._threads:
            each.join()
        for failure in self._failures:
            raise failure

    def _watched(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with self._news:
                self._failures.append(error)
                self._news.notify_all()
            raise

    def _operate(self) -> None:
        with AdminClient(self._address) as admin, WireClient(self._address, "operator") as client:
            orders: dict[str, Callable[[], object]] = {
                "reset": lambda: self._reset(admin),
                "group removed": lambda: admin.remove_group(INTERRUPTED, force=True),
                "redriven": lambda: admin.start_job(self._job(admin_v1.REDRIVE)),
                "purged": lambda: admin.start_job(self._job(admin_v1.PURGE, "a test")),
                "topic made anew": lambda: self._make_anew(admin, client),
                "backed up": lambda: self._back_up(admin),
            }
            names = ["reset", *orders]
            while not self._ends.wait(self._rng.uniform(0.0, 0.2)):
                name = self._rng.choice(names)
                with suppress(DmqError, grpc.RpcError, AssertionError):  # refused, or nobody there
                    orders[name]()
                    with self._news:
                        self.done[name] += 1
                        self._news.notify_all()

    @staticmethod
    def _job(kind: admin_v1.JobKind, why: str = "") -> admin_v1.StartJobRequest:
        return admin_v1.StartJobRequest(kind=kind, group=INTERRUPTED, why=why)

    def _reset(self, admin: AdminClient) -> None:
        request = admin_v1.ResetGroupRequest(group=INTERRUPTED, topic=TOPIC)
        match self._rng.randrange(3):
            case 0:
                request.begin = True
            case 1:
                request.end = True
            case _:
                request.at_ms = time.time_ns() // 1_000_000 - 1_000
        admin.reset_group(request)

    def _make_anew(self, admin: AdminClient, client: WireClient) -> None:
        messages = [a_message(SIDE, f"{self._rng.getrandbits(128):034X}", b"side") for _ in range(5)]
        client.send(*messages)
        client.receive(SIDE, INTERRUPTED)
        admin.remove_topic(SIDE, force=True)

    def _back_up(self, admin: AdminClient) -> None:
        if len(self.backups) < 3:
            target = self._folder / f"backup-{self._rng.getrandbits(32)}"
            admin.back_up(str(target))
            self.backups.append(target)

    def _consume(self) -> None:
        """Acknowledge some, forward some, leave the rest."""
        with WireClient(self._address, "interrupted") as client:
            while not self._ends.is_set():
                try:
                    found = client.receive(TOPIC, INTERRUPTED, wait_s=1)
                    for each in found[:2]:
                        self._forward(client, each)
                    if found[2:]:
                        client.ack(TOPIC, INTERRUPTED, found[2:])
                except (grpc.RpcError, AssertionError):  # AssertionError: the group or the topic is just being removed
                    time.sleep(_PAUSE_S)

    @staticmethod
    def _forward(client: WireClient, each: Received) -> None:
        request = wire.ForwardMessageToDeadLetterQueueRequest(
            topic=wire.Resource(name=TOPIC),
            group=wire.Resource(name=INTERRUPTED),
            message_id=each.message_id,
            receipt_handle=each.receipt_handle,
            delivery_attempt=1,
            max_delivery_attempts=17,
        )
        client.ask("ForwardMessageToDeadLetterQueue", request)


def receive_all(address: str, wanted: set[str], within_s: float) -> set[str]:
    """Set the group back to the beginning and receive as it; return what did not come, after ``within_s`` at most."""
    until_s = time.monotonic() + within_s
    missing = set(wanted)
    with AdminClient(address) as admin, WireClient(address, "interrupted") as client:
        client.receive(TOPIC, INTERRUPTED)  # it may never have been there
        admin.reset_group(admin_v1.ResetGroupRequest(group=INTERRUPTED, topic=TOPIC, begin=True))
        while missing and time.monotonic() < until_s:
            found: list[Received] = list(client.receive(TOPIC, INTERRUPTED, wait_s=1))
            if found:
                answer = client.ack(TOPIC, INTERRUPTED, found)
                acked = zip(found, answer.entries, strict=True)
                missing -= {each.message_id for each, entry in acked if entry.status.code == wire.OK}
    return missing
