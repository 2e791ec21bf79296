"""Receiving, acknowledging and changing: frames, fields, codes, and waits that end when they should."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from unittest.mock import patch

import pytest
from support.clients.wire.protocol import GROUP, TOPIC, Sidecar, a_message, a_receive, a_send, from_client

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.limits import AUTO_RENEW_INVISIBLE_MS
from broker_adapter.contracts.message import Envelope
from broker_adapter.runtime.clock import ManualClock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.rocketmq_server.sessions.settings import SidecarConfig

NOW = 1_700_000_000_123


def run(scenario: Callable[[Sidecar], Coroutine[object, object, None]], config: SidecarConfig | None = None) -> None:
    asyncio.run(scenario(Sidecar(ManualClock(NOW), config)))


async def received(sidecar: Sidecar) -> wire.Message:
    frames = await sidecar.stream("ReceiveMessage", a_receive())
    message: wire.Message = frames[1].message
    return message


def test_fields_known_to_the_server_are_filled_in() -> None:
    """Every field that clients read, with the values they can read."""

    async def scenario(sidecar: Sidecar) -> None:
        sidecar.service.listening_at("10.1.2.3", 8081)
        message = a_message("01A", b"body", properties={"DELAY": "1"})
        message.system_properties.body_digest.type = wire.CRC32
        message.system_properties.body_digest.checksum = "12AB"
        await sidecar.ask("SendMessage", a_send(message))
        assert isinstance(sidecar.broker.clock, ManualClock)
        sidecar.broker.clock.advance(1000)
        system = (await received(sidecar)).system_properties
        assert system.receipt_handle == "billing/orders/0/1"
        assert (system.message_id, system.queue_id, system.queue_offset) == ("01A", 0, 0)
        assert system.HasField("queue_offset")
        assert system.delivery_attempt == 1
        assert (system.store_timestamp.ToMilliseconds(), system.store_host) == (NOW, "10.1.2.3:8081")
        assert system.delivery_timestamp.ToMilliseconds() == NOW + 1000
        assert system.message_type == wire.DELAY
        assert system.body_encoding == wire.IDENTITY
        assert system.invisible_duration.seconds == 15
        digest = hashlib.md5(b"body", usedforsecurity=False).hexdigest().upper()
        assert (system.body_digest.type, system.body_digest.checksum) == (wire.MD5, digest)

    run(scenario)


@pytest.mark.parametrize(
    ("digest_type", "checksum", "is_kept"),
    [
        (wire.SHA1, "A" * 40, True),
        (wire.MD5, "0" * 32, True),
        (wire.MD5, "a" * 32, False),
        (wire.SHA1, "A" * 32, False),
        (wire.DIGEST_TYPE_UNSPECIFIED, "", False),
    ],
)
def test_a_producers_digest_is_kept_if_all_clients_read_it(
    digest_type: wire.DigestType, checksum: str, is_kept: bool
) -> None:
    """So that consumers check from end to end; what they would misread is replaced by an MD5."""

    async def scenario(sidecar: Sidecar) -> None:
        message = a_message()
        message.system_properties.body_digest.type = digest_type
        message.system_properties.body_digest.checksum = checksum
        message.system_properties.body_encoding = wire.GZIP
        await sidecar.ask("SendMessage", a_send(message))
        system = (await received(sidecar)).system_properties
        assert (system.body_digest.checksum == checksum) == is_kept
        assert is_kept or system.body_digest.type == wire.MD5
        assert system.body_encoding == wire.GZIP

    run(scenario)


def test_nothing_found_is_40401_and_the_time() -> None:
    """Python loses everything when the last frame is missing."""

    async def scenario(sidecar: Sidecar) -> None:
        frames = await sidecar.stream("ReceiveMessage", a_receive())
        assert [frame.WhichOneof("content") for frame in frames] == ["status", "delivery_timestamp"]
        assert frames[0].status.code == wire.MESSAGE_NOT_FOUND
        assert frames[1].delivery_timestamp.ToMilliseconds() == NOW
        assert sidecar.broker.groups == {"billing"}
        assert sidecar.calls.done == [("ReceiveMessage", wire.MESSAGE_NOT_FOUND)]

    run(scenario)


def refused_receives() -> list[tuple[wire.ReceiveMessageRequest, int]]:
    bad_group, bad_topic, bad_filter = a_receive(), a_receive(), a_receive()
    bad_group.group.name = "a b"
    bad_topic.message_queue.topic.name = ""
    bad_filter.filter_expression.type = wire.SQL
    return [
        (bad_group, wire.ILLEGAL_CONSUMER_GROUP),
        (bad_topic, wire.ILLEGAL_TOPIC),
        (bad_filter, wire.ILLEGAL_FILTER_EXPRESSION),
        (a_receive(invisible_s=9), wire.ILLEGAL_INVISIBLE_TIME),
        (a_receive(polling_s=-1), wire.ILLEGAL_POLLING_TIME),
    ]


@pytest.mark.parametrize(("request_", "code"), refused_receives())
def test_a_refused_receive_is_a_status_and_the_time(request_: wire.ReceiveMessageRequest, code: int) -> None:
    """The broker never hears of it."""

    async def scenario(sidecar: Sidecar) -> None:
        frames = await sidecar.stream("ReceiveMessage", request_)
        assert [frame.WhichOneof("content") for frame in frames] == ["status", "delivery_timestamp"]
        assert frames[0].status.code == code
        assert sidecar.broker.calls == []

    run(scenario)


def test_requests_to_the_broker() -> None:
    """Tags, batch, lease and wait as given; any queue for a simple consumer, that of its assignment for a push one."""

    async def scenario(sidecar: Sidecar) -> None:
        simple = a_receive(tags="a || b", invisible_s=30, polling_s=3)
        simple.message_queue.id = 5
        simple.batch_size = 64
        task = asyncio.ensure_future(sidecar.stream("ReceiveMessage", simple))
        await sidecar.broker.waiting.wait()
        task.cancel()
        push = a_receive(auto_renew=True)
        for queue_id in (5, -1, -7):
            push.message_queue.id = queue_id
            await sidecar.stream("ReceiveMessage", push, from_client("me"))
        any_queue = Subscription("orders", -1, frozenset({"a", "b"}))
        assert sidecar.broker.calls == [
            ("receive", "billing", any_queue, 32, 30_000, 3000, ""),
            ("receive", "billing", Subscription("orders", 5), 32, AUTO_RENEW_INVISIBLE_MS, 0, "me"),
            ("receive", "billing", Subscription("orders"), 32, AUTO_RENEW_INVISIBLE_MS, 0, "me"),
            ("receive", "billing", Subscription("orders"), 32, AUTO_RENEW_INVISIBLE_MS, 0, "me"),
        ]
        assert sidecar.broker.seen == ["me"] * 3

    run(scenario)


def test_a_long_poll_ends_with_the_message() -> None:
    """It wakes on arrival, not at its end."""

    async def scenario(sidecar: Sidecar) -> None:
        task = asyncio.ensure_future(sidecar.stream("ReceiveMessage", a_receive(polling_s=20)))
        await sidecar.broker.waiting.wait()
        await sidecar.ask("SendMessage", a_send(a_message()))
        async with asyncio.timeout(5):
            assert len(await task) == 3

    run(scenario)


def test_a_cancelled_receive_cancels_the_brokers_wait() -> None:
    """A client that hung up must not be handed messages."""

    async def scenario(sidecar: Sidecar) -> None:
        task = asyncio.ensure_future(sidecar.stream("ReceiveMessage", a_receive(polling_s=20)))
        await sidecar.broker.waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await sidecar.ask("SendMessage", a_send(a_message()))
        assert (await received(sidecar)).system_properties.delivery_attempt == 1

    run(scenario)


def test_drain_ends_waits_at_once_and_starts_no_new_ones() -> None:
    """With the answer of an empty poll; draining twice is fine."""

    async def scenario(sidecar: Sidecar) -> None:
        task = asyncio.ensure_future(sidecar.stream("ReceiveMessage", a_receive(polling_s=20)))
        await sidecar.broker.waiting.wait()
        sidecar.service.drain()
        sidecar.service.drain()
        async with asyncio.timeout(5):
            frames = await task
            again = await sidecar.stream("ReceiveMessage", a_receive(polling_s=20))
        assert frames[0].status.code == again[0].status.code == wire.MESSAGE_NOT_FOUND

    run(scenario)


def test_too_many_waits_are_refused() -> None:
    """42900 and the time; room again when one ends."""

    async def scenario(sidecar: Sidecar) -> None:
        task = asyncio.ensure_future(sidecar.stream("ReceiveMessage", a_receive(polling_s=20)))
        await sidecar.broker.waiting.wait()
        frames = await sidecar.stream("ReceiveMessage", a_receive(polling_s=20))
        assert frames[0].status.code == wire.TOO_MANY_REQUESTS
        assert frames[1].HasField("delivery_timestamp")
        task.cancel()
        await asyncio.wait([task])
        assert (await sidecar.stream("ReceiveMessage", a_receive()))[0].status.code == wire.MESSAGE_NOT_FOUND

    run(scenario, SidecarConfig(receives_waiting_max=1))


def test_an_unreadable_message_does_not_hide_the_others() -> None:
    """It is logged and skipped; the rest of the batch arrives."""

    async def scenario(sidecar: Sidecar) -> None:
        await sidecar.broker.send([Envelope("orders", "01", b"\xff\xff\xff")])
        await sidecar.ask("SendMessage", a_send(a_message("02")))
        frames = await sidecar.stream("ReceiveMessage", a_receive())
        assert [frame.message.system_properties.message_id for frame in frames[1:-1]] == ["02"]

    run(scenario)


def test_a_message_is_delivered_under_the_topic_that_was_asked_for() -> None:
    """A dead letter keeps the old name inside; clients acknowledge under the name they see."""

    async def scenario(sidecar: Sidecar) -> None:
        inside = a_message(topic="old-home").SerializeToString()
        await sidecar.broker.send([Envelope("orders", "01", inside)])
        assert (await received(sidecar)).topic == TOPIC

    run(scenario)


def test_large_messages_go_out_in_pieces() -> None:
    """What is small goes together with the status and the time; a piece ends with the message that fills it."""

    async def scenario(sidecar: Sidecar) -> None:
        for number, size in enumerate((10, 70_000, 40_000, 40_000, 10)):
            await sidecar.ask("SendMessage", a_send(a_message(f"0{number}", b"x" * size)))
        handle = sidecar.dispatcher.streaming("ReceiveMessage")
        pieces = [piece async for piece in handle(a_receive().SerializeToString(), from_client())]
        assert [len(piece) for piece in pieces] == [3, 2, 2]

    run(scenario)


def an_ack(*handles: str) -> wire.AckMessageRequest:
    entries = [wire.AckMessageEntry(message_id=f"id {handle}", receipt_handle=handle) for handle in handles]
    return wire.AckMessageRequest(group=GROUP, topic=TOPIC, entries=entries)


def test_acknowledging() -> None:
    """Each entry has its result; the whole is the common code or 30000; a handle nobody knows is 40013."""

    async def scenario(sidecar: Sidecar) -> None:
        await sidecar.ask("SendMessage", a_send(a_message("011"), a_message("012")))
        frames = await sidecar.stream("ReceiveMessage", a_receive())
        one, two = (frame.message.system_properties.receipt_handle for frame in frames[1:-1])
        mixed = await sidecar.ask("AckMessage", an_ack(one, "nonsense"))
        assert mixed.status.code == wire.MULTIPLE_RESULTS
        assert [entry.status.code for entry in mixed.entries] == [wire.OK, wire.INVALID_RECEIPT_HANDLE]
        assert [entry.message_id for entry in mixed.entries] == [f"id {one}", "id nonsense"]
        assert [entry.receipt_handle for entry in mixed.entries] == [one, "nonsense"]
        assert (await sidecar.ask("AckMessage", an_ack(one, two))).status.code == wire.OK
        bad = await sidecar.ask("AckMessage", an_ack("", "x/y/z/1"))
        assert bad.status.code == wire.INVALID_RECEIPT_HANDLE

    run(scenario)


def test_large_acknowledgements_make_the_transport_wait() -> None:
    """As sends do, by their entries: a few are no reason to, and sends are refused for none of them."""

    async def scenario(sidecar: Sidecar) -> None:
        messages, gate = sidecar.service.messages, asyncio.Event()
        told: list[bool] = []
        messages.on_room = lambda: told.append(messages.is_busy())

        async def acked(_: str, __: str, handles: Sequence[str]) -> Sequence[None]:
            await gate.wait()
            return [None] * len(handles)

        with patch.object(messages._exchange, "ack", acked):
            asked = [asyncio.ensure_future(sidecar.ask("AckMessage", an_ack(*["h"] * 31))) for _ in range(5)]
            await asyncio.sleep(0)
            assert not messages.is_busy()
            asked.append(asyncio.ensure_future(sidecar.ask("AckMessage", an_ack(*["h"] * 1024))))
            await asyncio.sleep(0)
            assert messages.is_busy()
            assert (await sidecar.ask("SendMessage", a_send(a_message("011")))).status.code == wire.OK
            gate.set()
            assert {(await each).status.code for each in asked} == {wire.OK}
        assert told == [False]

    run(scenario, SidecarConfig(sends_busy=6, sends_in_flight_max=2))


def test_refused_acknowledgements() -> None:
    """Topic, group, no entries."""

    async def scenario(sidecar: Sidecar) -> None:
        assert (await sidecar.ask("AckMessage", an_ack())).status.code == wire.BAD_REQUEST
        request = an_ack("h")
        request.topic.name = "a b"
        assert (await sidecar.ask("AckMessage", request)).status.code == wire.ILLEGAL_TOPIC
        request = an_ack("h")
        request.group.name = ""
        assert (await sidecar.ask("AckMessage", request)).status.code == wire.ILLEGAL_CONSUMER_GROUP

    run(scenario)
