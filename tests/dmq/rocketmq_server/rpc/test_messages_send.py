"""SendMessage: what is stored, what is answered, and that a refused batch leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from unittest.mock import patch

import pytest
from support.clients.wire.protocol import TOPIC, Sidecar, a_message, a_receive, a_send, from_client

from broker_adapter.contracts.errors import BrokerUnavailable, Overloaded, Refused, Rule
from broker_adapter.contracts.limits import MESSAGES_PER_SEND_MAX
from broker_adapter.runtime.clock import ManualClock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.rocketmq_server.sessions.settings import SidecarConfig

NOW = 1_700_000_000_000


def run(scenario: Callable[[Sidecar], Coroutine[object, object, None]], config: SidecarConfig | None = None) -> None:
    asyncio.run(scenario(Sidecar(ManualClock(NOW), config)))


def test_one_entry_per_message_in_order() -> None:
    """Clients index entries by position; ids are the clients' own, the real server answers a batch with one entry."""

    async def scenario(sidecar: Sidecar) -> None:
        answer = await sidecar.ask("SendMessage", a_send(*(a_message(f"01{n}") for n in range(10))))
        assert answer.status.code == wire.OK
        assert [entry.message_id for entry in answer.entries] == [f"01{n}" for n in range(10)]
        assert [entry.transaction_id for entry in answer.entries] == [f"01{n}" for n in range(10)]
        assert [entry.offset for entry in answer.entries] == list(range(10))
        assert {entry.status.code for entry in answer.entries} == {wire.OK}
        assert sidecar.calls.done == [("SendMessage", wire.OK)]

    run(scenario)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_refused_message_refuses_its_batch(bad: int) -> None:
    """Nothing is stored; the bad entry carries its code and the others say which one stopped them."""

    async def scenario(sidecar: Sidecar) -> None:
        messages = [a_message(f"01{n}") for n in range(3)]
        messages[bad].user_properties["TIMER_DELAY_MS"] = "soon"
        answer = await sidecar.ask("SendMessage", a_send(*messages))
        assert sidecar.broker.stored("orders") == []
        codes = [wire.ILLEGAL_DELIVERY_TIME if n == bad else wire.BAD_REQUEST for n in range(3)]
        assert [entry.status.code for entry in answer.entries] == codes
        assert [entry.message_id for entry in answer.entries] == ["010", "011", "012"]
        assert answer.status.code == wire.ILLEGAL_DELIVERY_TIME
        assert "TIMER_DELAY_MS" in answer.status.message
        assert "'soon'" in answer.status.message
        other = answer.entries[(bad + 1) % 3].status.message
        assert f"message {bad + 1} of 3" in other

    run(scenario)


@pytest.mark.parametrize("count", [1, 2])
def test_a_send_that_the_broker_refuses_as_a_whole_carries_the_reason(count: int) -> None:
    """Danger: the only message of a call was answered 40000, "message 2 of 1 in this request was refused"."""

    async def scenario(sidecar: Sidecar) -> None:
        def refuse(*_: object) -> None:
            raise Refused(Rule.MESSAGE_TYPE, "the topic takes no delayed messages", value="orders")

        with patch.object(type(sidecar.broker), "send", refuse):
            answer = await sidecar.ask("SendMessage", a_send(*(a_message(f"01{n}") for n in range(count))))
        said = [answer.status, *(each.status for each in answer.entries)]
        assert len(said) == count + 1
        assert {each.code for each in said} == {wire.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE}
        assert all("the topic takes no delayed messages" in each.message for each in said)

    run(scenario)


def test_a_send_of_too_many_messages_is_answered_once() -> None:
    """Danger: 40 KB of empty messages asked for an answer of 1.5 MB, with an entry for each of them."""

    async def scenario(sidecar: Sidecar) -> None:
        answer = await sidecar.ask("SendMessage", a_send(*[wire.Message()] * (MESSAGES_PER_SEND_MAX + 1)))
        assert (answer.status.code, len(answer.entries)) == (wire.BAD_REQUEST, 0)
        assert "too many messages" in answer.status.message

    run(scenario)


def test_refusals_of_the_whole_send() -> None:
    """No message, or two topics: there is still an entry for each message."""

    async def scenario(sidecar: Sidecar) -> None:
        answer = await sidecar.ask("SendMessage", a_send())
        assert (answer.status.code, len(answer.entries)) == (wire.MESSAGE_CORRUPTED, 0)
        answer = await sidecar.ask("SendMessage", a_send(a_message(), a_message(topic="other")))
        assert (answer.status.code, len(answer.entries)) == (wire.MESSAGE_CORRUPTED, 2)
        answer = await sidecar.ask("SendMessage", a_send(a_message(topic="TBW102")))
        assert answer.status.code == answer.entries[0].status.code == wire.ILLEGAL_TOPIC
        empty = a_send(a_message(body=b""))
        assert (await sidecar.ask("SendMessage", empty)).status.code == wire.MESSAGE_BODY_EMPTY
        answer = await sidecar.ask("SendMessage", empty, from_client(language="RUST"))
        assert answer.status.code == answer.entries[0].status.code == wire.BAD_REQUEST

    run(scenario)


@pytest.mark.parametrize(
    ("properties", "due_ms"),
    [
        ({"DELAY": "2"}, NOW + 5000),
        ({"TIMER_DELAY_SEC": "3"}, NOW + 3000),
        ({"TIMER_DELAY_MS": "3"}, NOW + 3),
        ({"TIMER_DELIVER_MS": str(NOW + 77)}, NOW + 77),
        ({"TIMER_DELIVER_MS": str(NOW - 77)}, NOW - 77),
    ],
)
def test_delay_properties_are_consumed(properties: dict[str, str], due_ms: int) -> None:
    """The stored message has the type DELAY, its time, and only the user's own properties."""

    async def scenario(sidecar: Sidecar) -> None:
        answer = await sidecar.ask("SendMessage", a_send(a_message("01A", properties={"mine": "x"} | properties)))
        assert answer.status.code == wire.OK
        (envelope,) = sidecar.broker.stored("orders")
        assert envelope.deliver_at_ms == due_ms
        stored = wire.Message.FromString(envelope.payload)
        assert dict(stored.user_properties) == {"mine": "x"}
        assert stored.system_properties.message_type == wire.DELAY
        assert stored.system_properties.delivery_timestamp.ToMilliseconds() == due_ms
        assert answer.entries[0].offset == 0

    run(scenario)


def test_a_level_that_is_none_is_consumed_too() -> None:
    """DELAY=0 asks for no delay; it does not reach the consumer either, and the type stays NORMAL."""

    async def scenario(sidecar: Sidecar) -> None:
        await sidecar.ask("SendMessage", a_send(a_message(properties={"DELAY": "0"})))
        (envelope,) = sidecar.broker.stored("orders")
        stored = wire.Message.FromString(envelope.payload)
        assert (envelope.deliver_at_ms, dict(stored.user_properties)) == (0, {})
        assert stored.system_properties.message_type == wire.NORMAL

    run(scenario)


def test_type_delay_without_a_time_is_a_conflict() -> None:
    """40014: the producer forgot the time, and would never know."""

    async def scenario(sidecar: Sidecar) -> None:
        message = a_message()
        message.system_properties.message_type = wire.DELAY
        answer = await sidecar.ask("SendMessage", a_send(message))
        assert answer.status.code == wire.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
        message.user_properties["TIMER_DELAY_MS"] = "5"
        assert (await sidecar.ask("SendMessage", a_send(message))).status.code == wire.OK

    run(scenario)


@pytest.mark.parametrize(
    ("seconds", "nanos"), [(NOW, 0), (2**63 - 1, 0), (-(2**63), 0), (-1, 0), (5, -1), (5, 2**31 - 1), (253402300800, 0)]
)
def test_absurd_delivery_timestamps(seconds: int, nanos: int) -> None:
    """Whatever the wire can carry: 40012, nothing stored, and the server goes on."""

    async def scenario(sidecar: Sidecar) -> None:
        message = a_message()
        message.system_properties.delivery_timestamp.seconds = seconds
        message.system_properties.delivery_timestamp.nanos = nanos
        answer = await sidecar.ask("SendMessage", a_send(message))
        assert answer.status.code == wire.ILLEGAL_DELIVERY_TIME
        assert sidecar.broker.stored("orders") == []

    run(scenario)


def test_a_maximum_delay_is_enforced() -> None:
    """``delay_max_ms`` holds for every way to ask."""

    async def scenario(sidecar: Sidecar) -> None:
        for properties in ({"DELAY": "3"}, {"TIMER_DELAY_SEC": "10"}, {"TIMER_DELIVER_MS": str(NOW + 10_000)}):
            answer = await sidecar.ask("SendMessage", a_send(a_message(properties=properties)))
            assert answer.status.code == wire.ILLEGAL_DELIVERY_TIME
            assert "limit 9999 ms" in answer.status.message

    run(scenario, SidecarConfig(delay_max_ms=9_999))


def test_transactions_are_not_served_by_a_broker_without_them() -> None:
    """50100, and nothing stored as an ordinary message."""

    async def scenario(sidecar: Sidecar) -> None:
        message = a_message()
        message.system_properties.message_type = wire.TRANSACTION
        answer = await sidecar.ask("SendMessage", a_send(message))
        assert answer.status.code == answer.entries[0].status.code == wire.NOT_IMPLEMENTED
        assert sidecar.broker.stored("orders") == []

    run(scenario)


def test_the_transport_is_paused_and_resumed() -> None:
    """Busy from a number in flight on; there is room again at half of it, which is told once."""

    async def scenario(sidecar: Sidecar) -> None:
        service, gate = sidecar.service, asyncio.Event()
        told: list[bool] = []
        service.messages.on_room = lambda: told.append(service.messages.is_busy())
        sidecar.broker.send_gate = gate
        sends = []
        for number in range(6):
            assert not service.messages.is_busy()
            sends.append(asyncio.ensure_future(sidecar.ask("SendMessage", a_send(a_message(f"01{number}")))))
            await asyncio.sleep(0)
        assert service.messages.is_busy()
        gate.set()
        assert {(await each).status.code for each in sends} == {wire.OK}
        assert told == [False]

    run(scenario, SidecarConfig(sends_busy=6))


def test_too_many_sends_in_flight_are_refused_with_nothing_done() -> None:
    """42900 beyond the bound; room again as soon as one is answered."""

    async def scenario(sidecar: Sidecar) -> None:
        gate = sidecar.broker.send_gate = asyncio.Event()
        first = asyncio.ensure_future(sidecar.ask("SendMessage", a_send(a_message("011"))))
        await sidecar.broker.sending.wait()
        answer = await sidecar.ask("SendMessage", a_send(a_message("012")))
        assert answer.status.code == wire.TOO_MANY_REQUESTS
        assert "limit 1" in answer.status.message
        gate.set()
        assert (await first).status.code == wire.OK
        assert (await sidecar.ask("SendMessage", a_send(a_message("013")))).status.code == wire.OK
        assert [envelope.message_id for envelope in sidecar.broker.stored("orders")] == ["011", "013"]

    run(scenario, SidecarConfig(sends_in_flight_max=1))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Overloaded("store", limit="1 GiB"), wire.TOO_MANY_REQUESTS),
        (BrokerUnavailable("closed"), wire.INTERNAL_SERVER_ERROR),
        (ZeroDivisionError("secret"), wire.INTERNAL_SERVER_ERROR),
    ],
)
def test_failures_of_the_broker_free_their_place(error: Exception, code: int) -> None:
    """Each failed send is answered, and counts no longer as in flight."""

    async def scenario(sidecar: Sidecar) -> None:
        for n in range(3):
            sidecar.broker.fail_next = error
            answer = await sidecar.ask("SendMessage", a_send(a_message(f"01{n}")))
            assert answer.status.code == code
            assert "secret" not in answer.status.message
        assert (await sidecar.ask("SendMessage", a_send(a_message("01X")))).status.code == wire.OK

    run(scenario, SidecarConfig(sends_in_flight_max=1))


def test_a_repeated_send_gets_the_first_answer() -> None:
    """The message id is the idempotency key."""

    async def scenario(sidecar: Sidecar) -> None:
        first = await sidecar.ask("SendMessage", a_send(a_message("01A")))
        again = await sidecar.ask("SendMessage", a_send(a_message("01A")))
        assert first == again
        assert len(sidecar.broker.stored("orders")) == 1

    run(scenario)


def test_messages_arrive_as_they_were_sent() -> None:
    """Body, tag, keys, properties, group, born time: from send to receive."""

    async def scenario(sidecar: Sidecar) -> None:
        message = a_message("01A", b"\x00\xff", properties={"a": "1", "b": ""})
        system = message.system_properties
        system.tag, system.message_group, system.born_host = "T", "G", "host"
        system.keys.extend(["k1", "k2"])
        system.born_timestamp.seconds = 12
        system.queue_id = 77  # servers ignore the producer's choice
        await sidecar.ask("SendMessage", a_send(message))
        frames = await sidecar.stream("ReceiveMessage", a_receive())
        assert [frame.WhichOneof("content") for frame in frames] == ["status", "message", "delivery_timestamp"]
        got = frames[1].message
        assert (got.topic, got.body, dict(got.user_properties)) == (TOPIC, b"\x00\xff", {"a": "1", "b": ""})
        system = got.system_properties
        assert (system.tag, system.message_group, system.born_host) == ("T", "G", "host")
        assert (list(system.keys), system.born_timestamp.seconds, system.queue_id) == (["k1", "k2"], 12, 0)
        assert system.message_type == wire.FIFO

    run(scenario)
