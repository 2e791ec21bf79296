"""Giving back and giving up: what the broker is asked, what clients are told, what a dead letter says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest
from structlog.testing import capture_logs
from support.clients.wire.protocol import (
    GROUP,
    TOPIC,
    Sidecar,
    a_message,
    a_receive,
    a_send,
    consumer_settings,
    from_client,
)

from broker_adapter.contracts.adapter import GroupSettings, Subscription
from broker_adapter.contracts.errors import BrokerUnavailable, Overloaded, Refused, Rule
from broker_adapter.contracts.message import DeadLetterFacts
from broker_adapter.runtime.clock import ManualClock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.rocketmq_server.calls.call import Call
from dmq.rocketmq_server.codec import mapping

NOW = 1_700_000_000_123
DEAD_LETTERS = wire.Resource(name="%DLQ%billing")


def run(scenario: Callable[[Sidecar], Coroutine[object, object, None]]) -> None:
    asyncio.run(scenario(Sidecar(ManualClock(NOW))))


async def received(sidecar: Sidecar, *, is_push: bool = False, topic: wire.Resource = TOPIC) -> list[wire.Message]:
    request = a_receive(auto_renew=is_push)
    request.message_queue.topic.CopyFrom(topic)
    frames = await sidecar.stream("ReceiveMessage", request)
    return [frame.message for frame in frames[1:-1]]


async def a_delivery(sidecar: Sidecar, *, is_push: bool = False) -> str:
    """Send a message, receive it, and return its handle."""
    await sidecar.ask("SendMessage", a_send(a_message()))
    (message,) = await received(sidecar, is_push=is_push)
    return message.system_properties.receipt_handle


def a_change(handle: str, ms: int, *, suspend: bool | None = None) -> wire.ChangeInvisibleDurationRequest:
    request = wire.ChangeInvisibleDurationRequest(group=GROUP, topic=TOPIC, receipt_handle=handle)
    request.invisible_duration.seconds, rest = divmod(ms, 1000)
    request.invisible_duration.nanos = rest * 1_000_000
    if suspend is not None:
        request.suspend = suspend
    return request


def a_forward(handle: str, attempt: int = 1) -> wire.ForwardMessageToDeadLetterQueueRequest:
    return wire.ForwardMessageToDeadLetterQueueRequest(
        group=GROUP, topic=TOPIC, receipt_handle=handle, message_id="01A", delivery_attempt=attempt
    )


def test_changing_gives_a_handle_in_every_answer() -> None:
    """Clients store it without a look at the status: refused, failed and overloaded answers repeat the old one."""

    async def scenario(sidecar: Sidecar) -> None:
        handle = await a_delivery(sidecar)
        good = await sidecar.ask("ChangeInvisibleDuration", a_change(handle, 30_000))
        assert (good.status.code, good.receipt_handle) == (wire.OK, handle)
        unknown = await sidecar.ask("ChangeInvisibleDuration", a_change("nonsense", 30_000))
        assert (unknown.status.code, unknown.receipt_handle) == (wire.INVALID_RECEIPT_HANDLE, "nonsense")
        too_long = await sidecar.ask("ChangeInvisibleDuration", a_change(handle, 43_200_001))
        assert (too_long.status.code, too_long.receipt_handle) == (wire.ILLEGAL_INVISIBLE_TIME, handle)
        for error, code in (
            (Overloaded("store", limit=1), wire.TOO_MANY_REQUESTS),
            (KeyError(), wire.INTERNAL_SERVER_ERROR),
        ):
            sidecar.broker.fail_next = error
            failed = await sidecar.ask("ChangeInvisibleDuration", a_change(handle, 30_000))
            assert (failed.status.code, failed.receipt_handle) == (code, handle)

    run(scenario)


@pytest.mark.parametrize("is_push", [False, True])
@pytest.mark.parametrize("ms", [0, 5, 2000, 43_200_000])
@pytest.mark.parametrize("suspend", [None, False, True])
def test_a_duration_reaches_the_broker_as_it_was_asked_for(is_push: bool, ms: int, suspend: bool | None) -> None:
    """Whoever asks, known or not: the broker remembers whose delivery it is, and knows the policy."""

    async def scenario(sidecar: Sidecar) -> None:
        handle = await a_delivery(sidecar, is_push=is_push)
        answer = await sidecar.ask(
            "ChangeInvisibleDuration", a_change(handle, ms, suspend=suspend), from_client(language="HTTP")
        )
        assert (answer.status.code, answer.receipt_handle) == (wire.OK, handle)
        assert sidecar.broker.calls[-1] == ("change", "billing", "orders", handle, ms, bool(suspend))

    run(scenario)


def test_a_nack_of_a_push_consumer_that_is_repeated_is_refused() -> None:
    """Its first answer was lost; 40013 is what makes clients stop, and the handle is there."""

    async def scenario(sidecar: Sidecar) -> None:
        handle = await a_delivery(sidecar, is_push=True)
        for code in (wire.OK, wire.INVALID_RECEIPT_HANDLE):
            answer = await sidecar.ask("ChangeInvisibleDuration", a_change(handle, 0))
            assert (answer.status.code, answer.receipt_handle) == (code, handle)

    run(scenario)


def test_a_forwarded_message_is_a_dead_letter() -> None:
    """The group never sees it again; its dead-letter queue has it."""

    async def scenario(sidecar: Sidecar) -> None:
        handle = await a_delivery(sidecar)
        answer = await sidecar.ask("ForwardMessageToDeadLetterQueue", a_forward(handle, 3))
        assert answer.status.code == wire.OK
        assert sidecar.broker.calls[-1] == ("dead_letter", "billing", "orders", handle, 3)
        assert await received(sidecar) == []
        (dead,) = await received(sidecar, topic=DEAD_LETTERS)
        assert (dead.topic, dead.body) == (DEAD_LETTERS, b"body")
        assert dead.system_properties.delivery_attempt == 1  # counted anew, for whoever reads dead letters

    run(scenario)


@pytest.mark.parametrize(("language", "said"), [("JAVA", 2), ("GO", 2), ("PYTHON", 2), ("HTTP", 2), ("RUST", 3)])
def test_every_client_forwards_the_attempt_that_failed(language: str, said: int) -> None:
    """Rust says the next one; believed, its messages would be dead one attempt early."""

    async def scenario(sidecar: Sidecar) -> None:
        handle = await a_delivery(sidecar)
        forward = a_forward(handle, said)
        await sidecar.ask("ForwardMessageToDeadLetterQueue", forward, from_client(language=language))
        assert sidecar.broker.calls[-1] == ("dead_letter", "billing", "orders", handle, 2)

    run(scenario)


def test_a_push_consumer_of_a_fifo_group_gives_up_early_and_gets_its_message_again() -> None:
    """What it is told makes it forward at the first failure; the broker brings the message back by the policy."""

    async def scenario(sidecar: Sidecar) -> None:
        sidecar.broker.policies["billing"] = GroupSettings(True, 2, (1000,))
        handle = await a_delivery(sidecar, is_push=True)
        assert (await sidecar.ask("ForwardMessageToDeadLetterQueue", a_forward(handle, 1))).status.code == wire.OK
        assert await received(sidecar, topic=DEAD_LETTERS) == []
        assert isinstance(sidecar.broker.clock, ManualClock)
        sidecar.broker.clock.advance(1000)
        (again,) = await received(sidecar, is_push=True)
        system = again.system_properties
        assert (again.topic, system.delivery_attempt) == (TOPIC, 2)
        last = await sidecar.ask("ForwardMessageToDeadLetterQueue", a_forward(system.receipt_handle, 2))
        assert last.status.code == wire.OK
        assert len(await received(sidecar, topic=DEAD_LETTERS)) == 1

    run(scenario)


def refused_forwards() -> list[tuple[wire.ForwardMessageToDeadLetterQueueRequest, int]]:
    bad_topic, retry_topic, bad_group = a_forward("h"), a_forward("h"), a_forward("h")
    bad_topic.topic.name, retry_topic.topic.name, bad_group.group.name = "a b", "%RETRY%billing", ""
    return [
        (bad_topic, wire.ILLEGAL_TOPIC),
        (retry_topic, wire.ILLEGAL_TOPIC),
        (bad_group, wire.ILLEGAL_CONSUMER_GROUP),
        (a_forward("nonsense"), wire.INVALID_RECEIPT_HANDLE),
        (a_forward(""), wire.INVALID_RECEIPT_HANDLE),
    ]


@pytest.mark.parametrize(("request_", "code"), refused_forwards())
def test_a_refused_forward(request_: wire.ForwardMessageToDeadLetterQueueRequest, code: int) -> None:
    """Names by their rules, a handle nobody knows as 40013: never an internal error, which everybody repeats."""

    async def scenario(sidecar: Sidecar) -> None:
        assert (await sidecar.ask("ForwardMessageToDeadLetterQueue", request_)).status.code == code

    run(scenario)


def test_a_push_consumer_is_not_made_to_repeat_a_forward_for_ever() -> None:
    """Official ones repeat until OK, with the rest of their batch behind it: a stale handle is OK, and says why."""

    async def scenario(sidecar: Sidecar) -> None:
        handle = await a_delivery(sidecar)
        await sidecar.telemetry(consumer_settings(wire.PUSH_CONSUMER), call=from_client("push"))
        await sidecar.telemetry(consumer_settings(wire.SIMPLE_CONSUMER), call=from_client("simple"))

        async def forwarded(client_id: str) -> wire.Status:
            call = from_client(client_id)
            status: wire.Status = (await sidecar.ask("ForwardMessageToDeadLetterQueue", a_forward(handle), call)).status
            return status

        assert await forwarded("push") == wire.Status(code=wire.OK, message="OK")
        with capture_logs() as logs:
            stale = await forwarded("push")
        assert (stale.code, "no effect" in stale.message) == (wire.OK, True)
        assert [(entry["event"], entry["message_id"]) for entry in logs] == [("forward_outdated", "01A")]
        assert (await forwarded("simple")).code == wire.INVALID_RECEIPT_HANDLE
        assert (await forwarded("unknown")).code == wire.INVALID_RECEIPT_HANDLE
        assert len(await received(sidecar, topic=DEAD_LETTERS)) == 1

    run(scenario)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Overloaded("store", limit=1), wire.TOO_MANY_REQUESTS),
        (BrokerUnavailable("down"), wire.INTERNAL_SERVER_ERROR),
        (Refused(Rule.TOPIC_UNKNOWN, "no such topic"), wire.TOPIC_NOT_FOUND),
    ],
)
def test_a_forward_that_failed_is_no_success(error: Exception, code: int) -> None:
    """Also for a push consumer: it is right to repeat that."""

    async def scenario(sidecar: Sidecar) -> None:
        await sidecar.telemetry(consumer_settings(wire.PUSH_CONSUMER))
        handle = await a_delivery(sidecar)
        sidecar.broker.fail_next = error
        assert (await sidecar.ask("ForwardMessageToDeadLetterQueue", a_forward(handle))).status.code == code

    run(scenario)


def test_a_dead_letter_shows_its_outcome() -> None:
    """In the protocol's field and in properties that every client shows, beside what its producer wrote."""

    async def scenario(sidecar: Sidecar) -> None:
        await sidecar.ask("SendMessage", a_send(a_message("01A", properties={"mine": "x", "DLQ_REASON": "faked"})))
        (message,) = await received(sidecar)
        assert not message.system_properties.HasField("dead_letter_queue")
        assert dict(message.user_properties) == {"mine": "x"}
        forward = a_forward(message.system_properties.receipt_handle)
        await sidecar.ask("ForwardMessageToDeadLetterQueue", forward)
        (dead,) = await received(sidecar, topic=DEAD_LETTERS)
        origin = dead.system_properties.dead_letter_queue
        assert (origin.topic, origin.message_id) == ("orders", "01A")
        assert dict(dead.user_properties) == {
            "mine": "x",
            "DLQ_ORIGIN_TOPIC": "orders",
            "DLQ_ORIGIN_MESSAGE_ID": "01A",
            "DLQ_ATTEMPTS": "1",
            "DLQ_REASON": "forwarded",
            "DLQ_FIRST_FAILED_AT": str(NOW),
            "DLQ_LAST_FAILED_AT": str(NOW),
        }

    run(scenario)


def test_every_fact_of_a_dead_letter_has_its_own_place() -> None:
    """Six different values, so that none stands where another belongs."""

    async def scenario(sidecar: Sidecar) -> None:
        await sidecar.ask("SendMessage", a_send(a_message()))
        (found,) = await sidecar.broker.receive(
            "billing", Subscription("orders"), batch_max=1, invisible_ms=30_000, wait_ms=0
        )
        facts = DeadLetterFacts("from", "id", 7, "too_old", 11, 12)
        dead = wire.Message()
        mapping.fill(dead, found._replace(dead_letter=facts), DEAD_LETTERS, "h:1")
        assert dead.system_properties.dead_letter_queue == wire.DeadLetterQueue(topic="from", message_id="id")
        values = {name.removeprefix("DLQ_"): value for name, value in dead.user_properties.items()}
        assert values == {
            "ORIGIN_TOPIC": "from",
            "ORIGIN_MESSAGE_ID": "id",
            "ATTEMPTS": "7",
            "REASON": "too_old",
            "FIRST_FAILED_AT": "11",
            "LAST_FAILED_AT": "12",
        }

    run(scenario)


@pytest.mark.parametrize("rpc", ["QueryRoute", "QueryAssignment", "ReceiveMessage", "SendMessage", "AckMessage"])
def test_retry_topics_are_not_for_clients(rpc: str) -> None:
    """40002 with a text that says where retries are, and no topic is made; dead-letter topics are served."""

    async def asked(sidecar: Sidecar, name: str, call: Call) -> wire.Status:
        topic = wire.Resource(name=name)
        if rpc == "ReceiveMessage":
            receive = a_receive()
            receive.message_queue.topic.CopyFrom(topic)
            first: wire.Status = (await sidecar.stream(rpc, receive, call))[0].status
            return first
        request = {
            "QueryRoute": wire.QueryRouteRequest(topic=topic),
            "QueryAssignment": wire.QueryAssignmentRequest(topic=topic, group=GROUP),
            "SendMessage": a_send(a_message(topic=name)),
            "AckMessage": wire.AckMessageRequest(topic=topic, group=GROUP, entries=[wire.AckMessageEntry()]),
        }[rpc]
        status: wire.Status = (await sidecar.ask(rpc, request, call)).status
        return status

    async def scenario(sidecar: Sidecar) -> None:
        status = await asked(sidecar, "%RETRY%billing", from_client())
        assert (status.code, "under the topic" in status.message) == (wire.ILLEGAL_TOPIC, True)
        assert sidecar.broker.calls == []
        assert sidecar.broker.stored("%RETRY%billing") == []
        assert (await asked(sidecar, "%DLQ%billing", from_client())).code != wire.ILLEGAL_TOPIC

    run(scenario)
