"""SIGKILL of a daemon with indexed properties: after each kill a search finds what lists without the index find.

``DMQ_TEST_CRASHES=200`` makes a long run of it, ``DMQ_TEST_SEED`` repeats the choices of one (not its timing).
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import grpc
import pytest
from support.clients.wire.client import Received, WireClient, a_message, a_receive, received_of
from support.effort import CRASHES, SEED
from support.rigs.daemon.process import Daemon

from broker_adapter.contracts.message_id import new_message_id
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.admin import admin_v1
from dmq.admin.client import AdminClient
from dmq.errors import DmqError
from dmq.recovery import check_store

pytestmark = pytest.mark.fault
KILLS = max(3, CRASHES // 3)
TOPIC, SIDE, GROUP = "orders", "side", "billing"
PROPERTIES = ("order-id", "color")
VALUES = ("1", "2", "3", "4")
HOUR_MS = 3_600_000
_PATIENCE_S = 60.0
_FAILURES = (DmqError, grpc.RpcError, AssertionError)  # refused, or the daemon is away

Places = Counter[tuple[str, str]]  # state and message id


class Load:
    """A thread that sends, fails, forwards, cancels, redrives, purges, and adds and removes an index."""

    def __init__(self, address: str) -> None:
        self.answered: Counter[str] = Counter()
        self.news = threading.Condition()
        self._address = address
        self._rng = random.Random(f"{SEED}-index")
        self._number = 0
        self._delayed: list[str] = []
        self._goes_on = threading.Event()
        self._rests = threading.Event()
        self._ends = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def start(self) -> None:
        """Continue."""
        self._rests.clear()
        self._goes_on.set()

    def pause(self) -> None:
        """Return when the current call has ended."""
        self._goes_on.clear()
        assert self._rests.wait(_PATIENCE_S)

    def close(self) -> None:
        """End the thread."""
        self._ends = True
        self._goes_on.set()
        self._thread.join()

    def _run(self) -> None:
        with AdminClient(self._address) as admin, WireClient(self._address) as client:
            calls: dict[str, Callable[[], object]] = {
                "sent": lambda: self._send(client),
                "failed": lambda: self._receive(client, self._fail),
                "forwarded": lambda: self._receive(client, self._forward),
                "cancelled": lambda: admin.cancel(TOPIC, [self._delayed.pop()]),
                "fired": lambda: admin.fire(TOPIC, [self._delayed.pop()]),
                "redriven": lambda: admin.start_job(admin_v1.StartJobRequest(kind=admin_v1.REDRIVE, group=GROUP)),
                "purged": lambda: admin.start_job(
                    admin_v1.StartJobRequest(kind=admin_v1.PURGE, group=GROUP, why="a test")
                ),
                "indexed": lambda: admin.set_topic(TOPIC, index_properties=["color"]),
                "not indexed": lambda: admin.set_topic(TOPIC, no_index_properties=["color"]),
                "topic removed": lambda: self._side(admin, client),
            }
            names = [*["sent"] * 6, *["failed", "forwarded", "cancelled", "indexed", "not indexed"] * 2, *calls]
            while not self._ends:
                if not self._goes_on.is_set():
                    self._rests.set()
                    self._goes_on.wait()
                    continue
                name = self._rng.choice(names)
                with suppress(*_FAILURES, IndexError):
                    calls[name]()
                    with self.news:
                        self.answered[name] += 1
                        self.news.notify_all()

    def _new(self, topic: str) -> wire.Message:
        self._number += 1
        now_ms = time.time_ns() // 1_000_000
        message_id = new_message_id(now_ms, os.getpid(), self._number.to_bytes(10, "big"))
        after_ms = self._rng.choice((0, 0, 50, HOUR_MS, HOUR_MS))
        if after_ms == HOUR_MS:
            self._delayed.append(message_id)
        properties = {name: self._rng.choice(VALUES) for name in PROPERTIES}
        return a_message(topic, message_id, deliver_at_ms=after_ms and now_ms + after_ms, properties=properties)

    def _send(self, client: WireClient) -> None:
        for message in [self._new(TOPIC) for _ in range(self._rng.randint(1, 4))]:
            assert client.send(message).status.code == wire.OK

    def _side(self, admin: AdminClient, client: WireClient) -> None:
        assert client.send(self._new(SIDE)).status.code == wire.OK
        admin.set_topic(SIDE, index_properties=["color"])
        assert client.send(self._new(SIDE)).status.code == wire.OK
        admin.remove_topic(SIDE, force=True)

    @staticmethod
    def _receive(client: WireClient, do: Callable[[WireClient, Received], object]) -> None:
        request = a_receive(TOPIC, GROUP, batch=4)
        request.auto_renew = True  # failures follow the policy of the group
        for each in received_of(client.frames("ReceiveMessage", request, deadline_s=5)):
            do(client, each)

    @staticmethod
    def _fail(client: WireClient, each: Received) -> None:
        client.change_invisible(TOPIC, GROUP, each, 1_000)

    @staticmethod
    def _forward(client: WireClient, each: Received) -> None:
        request = wire.ForwardMessageToDeadLetterQueueRequest(
            topic=wire.Resource(name=TOPIC),
            group=wire.Resource(name=GROUP),
            message_id=each.message_id,
            receipt_handle=each.receipt_handle,
            delivery_attempt=1,
            max_delivery_attempts=1,
        )
        client.ask("ForwardMessageToDeadLetterQueue", request)


def by_lists(admin: AdminClient, name: str, value: str) -> Places:
    """Places of the messages with a value, by lists that use no index."""
    found: Places = Counter()
    request = admin_v1.ListMessagesRequest(topic=TOPIC, limit=1000)
    while True:
        page = admin.messages(request)
        found.update(_state(each) for each in page.messages if each.content.properties.get(name) == value)
        if not page.next_token:
            break
        request.token = page.next_token
    retries = admin.retries(GROUP)
    assert not retries.next_token
    found.update(("RETRYING", each.message_id) for each in retries.retries if each.content.properties[name] == value)
    at = 0
    while at >= 0:
        letters = admin.dead_letters(
            GROUP, admin_v1.DeadFilter(), offset=at, with_outcome=True, with_body=True, limit=100
        )
        for letter in letters.letters:
            if letter.content.properties.get(name) == value:
                found["DEAD", letter.message_id] += 1
        at = letters.next_offset
    return found


def by_index(admin: AdminClient, name: str, value: str) -> Places:
    """Places of the messages with a value that a search finds; retries that are ready again are in no list."""
    found: Places = Counter()
    token = ""
    while True:
        page = admin.find_messages(TOPIC, name, value, token, 1000)
        if page.is_building:
            raise DmqError("the index is being built")
        found.update(_state(each) for each in page.messages if each.state != admin_v1.READY)
        token = page.next_token
        if not token:
            return found


def _state(each: admin_v1.FoundMessage | admin_v1.ListedMessage) -> tuple[str, str]:
    return admin_v1.MessageState.Name(each.state), each.message_id


def differences(admin: AdminClient) -> Iterator[str]:
    """Values whose search differs from the lists."""
    (topic,) = [each for each in admin.topics() if each.name == TOPIC]
    for name in topic.index_properties:
        for value in VALUES:
            listed, searched = by_lists(admin, name, value), by_index(admin, name, value)
            if listed != searched:
                yield f"{name}={value}: only by lists {listed - searched}, only by the index {searched - listed}"


def until_equal(admin: AdminClient) -> None:
    """Wait until all searches equal the lists: messages that become due, jobs and builds end soon."""
    until_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            found = list(differences(admin))
        except DmqError as error:
            found = [str(error)]
        if not found:
            return
        assert time.monotonic() < until_s, "\n".join(found)
        time.sleep(0.1)


@pytest.mark.timeout(180 + 20 * KILLS)
def test_a_search_equals_the_lists_after_each_kill(tmp_path: Path) -> None:
    """Under sends, failures, dead letters, recalls, redrives, purges and changes of an index; the check is clean."""
    print(f"DMQ_TEST_SEED={SEED} DMQ_TEST_CRASHES={CRASHES}")
    rng = random.Random(SEED)
    env = {**os.environ, "DMQ_TRAIL": "off"}
    with Daemon(tmp_path / "data", env=env, processes=1) as daemon, AdminClient(daemon.address) as admin:
        admin.create_topic(TOPIC, queues=2)
        admin.set_topic(TOPIC, index_properties=["order-id"])
        admin.set_group(GROUP, policy=admin_v1.Policy(fixed=admin_v1.FixedBackoff(delay_ms=HOUR_MS), max_attempts=9))
        with closing(Load(daemon.address)) as load:
            for _ in range(KILLS):
                load.start()
                with load.news:
                    wanted = load.answered.total() + rng.randint(30, 90)
                    assert load.news.wait_for(lambda: load.answered.total() >= wanted, _PATIENCE_S)  # noqa: B023
                daemon.kill()
                daemon.restart()
                load.pause()
                until_equal(admin)
            print(f"answered: {dict(load.answered)}")
            assert load.answered.keys() >= {"sent", "failed", "forwarded", "indexed", "not indexed"}
        daemon.stop()
    found = check_store(tmp_path / "data", lambda _: None).findings
    assert not found.count, found.lines()
