"""The ready adapter for the official Python client in front of the real sidecar.

The application's clock runs ten times as fast, so that what was kept is tried again soon.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.clients.official.hook_app import UID_PROPERTY, Consumer, HookApp
from support.rigs.daemon.process import Daemon, free_port

from broker_adapter.wire import rocketmq_v2 as wire

pytestmark = pytest.mark.integration
_TOPIC = "hooked"
_SPEED = 10.0
_DURABLE = ("durable-on_failure", "durable-write_ahead")
_LANES = (*_DURABLE, "handler-on_failure", "handler-write_ahead", "futures", "asyncio")
_BACK_S_MAX = 30.0
_RECEIPT = "rocketmq.v5.model.send_receipt.SendReceipt"
_BODY = b"\x00\xff not text"
# What of a delivery is made by each attempt, or by the broker.
_PER_ATTEMPT = (
    "message_id",
    "born_timestamp",
    "store_timestamp",
    "queue_id",
    "queue_offset",
    "receipt_handle",
    "invisible_duration",
)


class Rig:
    """A daemon, and an application in front of it."""

    def __init__(self, daemon: Daemon, app: HookApp) -> None:
        self.daemon = daemon
        self.app = app

    def consumer(self, group: str) -> Consumer:
        return Consumer(self.daemon.address, _TOPIC, group)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One daemon and one application for this file; each test leaves the daemon running and the spool empty."""
    tmp_path = tmp_path_factory.mktemp("rig")
    with (
        Daemon(tmp_path / "data") as daemon,
        HookApp(tmp_path / "app", daemon.address, tmp_path / "spool", _TOPIC, speed=_SPEED) as app,
    ):
        yield Rig(daemon, app)


def _full(kind: str, name: str, deliver_at_s: int) -> dict[str, Any]:
    """All that a message of this kind can carry."""
    fields: dict[str, Any] = {
        "topic": _TOPIC,
        "tag": "red",
        "keys": ["order-1", "order-2"],
        "properties": {"name": name, "text": 'größer \u2713 "quoted"'},
    }
    if kind == "fifo":
        fields["message_group"] = "customer-7"
    elif kind == "delayed":
        fields["delivery_timestamp"] = deliver_at_s
    return fields


def _content(message: wire.Message) -> wire.Message:
    """Return a delivery without what differs between two sends of one message."""
    content = wire.Message()
    content.CopyFrom(message)
    for name in _PER_ATTEMPT:
        content.system_properties.ClearField(name)
    keys = sorted(content.system_properties.keys)  # the client keeps them in a set
    del content.system_properties.keys[:]
    content.system_properties.keys.extend(keys)
    del content.user_properties[UID_PROPERTY]
    return content


def _named(consumer: Consumer, name: str) -> list[wire.Message]:
    return [message for message in consumer.messages if message.user_properties.get("name") == name]


@pytest.mark.parametrize("lane", _LANES)
def test_a_send_returns_the_clients_own_receipt(rig: Rig, lane: str) -> None:
    """The receipt is the client's, of the message that arrives, once, and marked with the hook's uid."""
    answer = rig.app.send(lane, topic=_TOPIC, properties={"name": lane})
    assert (answer["outcome"], answer["receipt"]) == ("delivered", _RECEIPT)
    with rig.consumer(f"receipt-{lane}") as consumer:
        consumer.receive_until(lambda: bool(_named(consumer, lane)), within_s=10)
        (message,) = _named(consumer, lane)
    assert message.system_properties.message_id == answer["message_id"]
    assert message.user_properties[UID_PROPERTY] == answer["uid"]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({}, "ValueError"),  # no topic
        ({"topic": _TOPIC, "body_bytes": 4 * 1024 * 1024 + 1}, "IllegalArgumentException"),
        ({"topic": _TOPIC, "properties": {"TRAN_MSG": "true"}}, "BadRequestException"),  # refused by the server
        ({"topic": _TOPIC, "delivery_timestamp": 2_000_000_000_000}, "BadRequestException"),  # ms for seconds
    ],
    ids=["no topic", "too large", "reserved property", "delivery time"],
)
@pytest.mark.parametrize("lane", _DURABLE)
def test_a_message_that_can_never_be_sent_is_raised_and_not_kept(
    rig: Rig, lane: str, fields: dict[str, Any], error: str
) -> None:
    """The caller gets the client's error, or the codec's, and nothing is left in the spool."""
    answer = rig.app.send(lane, **fields)
    assert (answer["outcome"], answer["error"]) == ("rejected", error)
    _wait_until_empty(rig.app)


def test_a_blank_topic_is_refused_by_the_client_itself(rig: Rig) -> None:
    """Its message does not take one, so the hook never sees the send."""
    with pytest.raises(AssertionError, match="IllegalArgumentException"):
        rig.app.send("durable-on_failure", topic=" ")
    _wait_until_empty(rig.app)


def test_a_handlers_message_that_can_never_be_sent_is_rejected(rig: Rig) -> None:
    """``Redelivery.send`` does not raise it, it says so."""
    answer = rig.app.send("handler-on_failure", topic=_TOPIC, properties={"TRAN_MSG": "true"})
    assert (answer["outcome"], answer["error"]) == ("rejected", "BadRequestException")
    _wait_until_empty(rig.app)


def test_all_of_a_message_survives_the_spool(rig: Rig) -> None:
    """Body, tag, keys, properties, message group and delivery timestamp arrive as those of a message that was sent at
    once, on every way through the hook.
    """
    kinds = ("normal", "fifo", "delayed")
    deliver_at_s = int(time.time()) + 6
    names = [f"{lane} {kind}" for lane in _LANES for kind in kinds]
    with rig.consumer("content") as consumer:
        for lane in _LANES:
            for kind in kinds:
                direct = rig.app.send(lane, _BODY, **_full(kind, f"{lane} {kind}", deliver_at_s))
                assert direct["outcome"] == "delivered"
        rig.daemon.stop()
        answers = [
            rig.app.send(lane, _BODY, **_full(kind, f"{lane} {kind}", deliver_at_s))
            for lane in _LANES
            for kind in kinds
        ]
        assert {answer["outcome"] for answer in answers} == {"spooled"}, answers
        rig.daemon.restart()
        consumer.receive_until(lambda: all(len(_named(consumer, name)) >= 2 for name in names), within_s=_BACK_S_MAX)
        _wait_until_empty(rig.app)
        for name in names:
            direct_one, kept_one = (_content(message) for message in _named(consumer, name))
            assert kept_one == direct_one, name
        uids = {message.user_properties[UID_PROPERTY] for message in consumer.messages}
        assert {answer["uid"] for answer in answers} <= uids
    message = _named(consumer, "durable-on_failure delayed")[1]
    assert message.body == _BODY
    assert message.system_properties.delivery_timestamp.seconds == deliver_at_s
    assert message.system_properties.tag == "red"
    assert set(message.system_properties.keys) == {"order-1", "order-2"}
    assert _named(consumer, "durable-on_failure fifo")[1].system_properties.message_group == "customer-7"


def test_an_attempt_without_a_connection_is_not_uncertain(rig: Rig) -> None:
    """All attempts of the client met a closed port: nothing can have got through, and the outcome does not say so."""
    rig.daemon.stop()
    try:
        answer = rig.app.send("handler-on_failure", topic=_TOPIC, properties={"name": "sure"})
        assert (answer["outcome"], answer["is_uncertain"]) == ("spooled", False), answer
        assert "failed to connect" in answer["reason"]
    finally:
        rig.daemon.restart()
    _wait_until_empty(rig.app)


def test_a_late_refusal_is_a_dead_letter_and_delays_no_other(rig: Rig) -> None:
    """A message that the server refuses when it is back goes to the dead set; the next one of its group arrives."""
    lane = "durable-on_failure"
    rig.daemon.stop()
    try:
        bad = rig.app.send(lane, topic=_TOPIC, message_group="late", properties={"TRAN_MSG": "true"})
        good = rig.app.send(lane, topic=_TOPIC, message_group="late")
        assert bad["outcome"] == good["outcome"] == "spooled"
    finally:
        rig.daemon.restart()
    with rig.consumer("late") as consumer:
        consumer.receive_until(lambda: bool(consumer.with_uid(good["uid"])), within_s=_BACK_S_MAX)
        assert len(consumer.with_uid(good["uid"])) == 1
    (dead,) = rig.app.do("dead", lane=lane)
    assert (dead["uid"], dead["death"]) == (bad["uid"], "PERMANENT")
    assert "BadRequestException" in dead["error"]


class Proxy:
    """Passes bytes on, between applications and a daemon. It can keep the answers to itself, and go away."""

    def __init__(self, daemon_port: int) -> None:
        self.port = free_port()
        self._daemon_port = daemon_port
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self.is_deaf = threading.Event()
        self.listen()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def listen(self) -> None:
        """Take connections, again if it was cut."""
        self.is_deaf.clear()
        listener = socket.create_server(("127.0.0.1", self.port))
        with self._lock:
            self._open.append(listener)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def cut(self) -> None:
        """Close every connection, and take no new ones."""
        with self._lock:
            closing, self._open = self._open, []
        for each in closing:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._daemon_port))
            with self._lock:
                self._open += [client, server]
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if not (is_answer and self.is_deaf.is_set()):
                    sink.sendall(data)


@pytest.mark.parametrize("lane", ["durable-on_failure", "handler-write_ahead", "futures", "plain-futures"])
def test_a_send_without_an_answer_is_uncertain_and_repeated_with_its_uid(tmp_path: Path, rig: Rig, lane: str) -> None:
    """The connection breaks after the message was stored: the outcome says that it may come twice, and it does, both
    times with the uid that the outcome named.
    """
    proxy = Proxy(rig.daemon.port)
    name = f"lost-{lane}"
    try:
        with (
            HookApp(tmp_path / "app", proxy.address, tmp_path / "spool", _TOPIC, speed=_SPEED) as app,
            rig.consumer(name) as consumer,
            ThreadPoolExecutor(1) as pool,
        ):
            assert app.send(lane, topic=_TOPIC)["outcome"] == "delivered"
            proxy.is_deaf.set()
            sending = pool.submit(app.send, lane, topic=_TOPIC, properties={"name": name})
            consumer.receive_until(lambda: bool(_named(consumer, name)), within_s=5)
            proxy.cut()
            answer = sending.result()
            assert (answer["outcome"], answer["is_uncertain"]) == ("spooled", True), answer
            proxy.listen()
            consumer.receive_until(lambda: len(_named(consumer, name)) == 2, within_s=_BACK_S_MAX)
            assert [each.user_properties[UID_PROPERTY] for each in _named(consumer, name)] == [answer["uid"]] * 2
            _wait_until_empty(app)
    finally:
        proxy.cut()


def test_pending_messages_are_sent_while_the_client_would_not_connect_for_minutes(tmp_path: Path, rig: Rig) -> None:
    """After a long outage its connection tries again every two minutes; here it does so from the first failure on. The
    hook sends what it kept over a fresh one.
    """
    app = HookApp(tmp_path / "app", rig.daemon.address, tmp_path / "spool", _TOPIC, speed=_SPEED, reconnect_ms=600_000)
    with app:
        for lane in _DURABLE:
            assert app.send(lane, topic=_TOPIC)["outcome"] == "delivered"
        rig.daemon.stop()
        try:
            outcomes = [app.send(lane, topic=_TOPIC)["outcome"] for lane in (*_DURABLE, "futures")]
        finally:
            rig.daemon.restart()
        assert outcomes == ["spooled"] * 3
        _wait_until_empty(app)


def _wait_until_empty(app: HookApp) -> None:
    """Wait until nothing waits in the spool, nor is in the hook's hands."""
    until_s = time.monotonic() + _BACK_S_MAX
    while (stats := app.do("stats"))["waiting"] or stats["held"]:
        assert time.monotonic() < until_s, stats
        threading.Event().wait(0.05)
