"""The public protocol behind access keys: what each RPC takes, and how a refusal looks there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from support.clients.wire.protocol import (
    GROUP,
    TOPIC,
    Sidecar,
    a_message,
    a_receive,
    a_send,
    consumer_settings,
    from_client,
    producer_settings,
)
from support.rigs.daemon.acl import ACL, OPERATOR, READER, SHOP, Key, write_acl

from broker_adapter.contracts.errors import Refused
from broker_adapter.runtime.clock import ManualClock
from broker_adapter.wire import consumer_v1
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.acl.file import KeyFile
from dmq.acl.guard import Authenticator
from dmq.rocketmq_server.calls.access import AT_ALL, NEEDS, Guarded
from dmq.rocketmq_server.calls.call import Call
from dmq.rocketmq_server.calls.dispatch import Dispatcher, StreamEnded
from dmq.rocketmq_server.calls.methods import METHODS

OTHER = wire.Resource(name="prices")
QUEUE, OTHER_QUEUE = wire.MessageQueue(topic=TOPIC), wire.MessageQueue(topic=OTHER)
HANDLE = "the-handle-of-the-request"


@dataclass(frozen=True)
class Fixed:
    """A service of these handlers, whose telemetry repeats the first frame, and then says what it is told to say."""

    unary: Mapping[str, Callable[[Any, Call], Awaitable[Any]]] = field(default_factory=dict)
    streaming: Mapping[str, Callable[[Any, Call], Awaitable[Iterator[Any]]]] = field(default_factory=dict)
    offered: asyncio.Queue[wire.TelemetryCommand] = field(default_factory=asyncio.Queue)

    async def telemetry(
        self, requests: AsyncIterator[wire.TelemetryCommand], call: Call
    ) -> AsyncGenerator[wire.TelemetryCommand, None]:
        yield await anext(requests)
        while True:
            yield await self.offered.get()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def guard(tmp_path: Path, clock: ManualClock) -> Authenticator:
    return Authenticator(KeyFile(write_acl(tmp_path), clock), clock)


@pytest.fixture
def sidecar(clock: ManualClock, guard: Authenticator) -> Sidecar:
    return Sidecar(clock, guard=guard)


def from_key(key: Key, clock: ManualClock, client_id: str = "client-1", language: str = "JAVA") -> Call:
    return from_client(client_id, language, signed=key.signer(clock).metadata())


def needed(rpc: str, request: Message) -> set[str]:
    return {str(need) for need in NEEDS[rpc](request)}


def test_every_rpc_is_in_the_table() -> None:
    """One that is added to the protocol must say what it takes."""
    assert set(NEEDS) == set(METHODS) == set(AT_ALL)
    assert len(METHODS) == len(wire.METHODS) + len(consumer_v1.METHODS)


CONSUME = {"SUB on topic 'prices'", "SUB on group 'billing'"}


@pytest.mark.parametrize(
    ("rpc", "request_", "needs"),
    [
        ("QueryRoute", wire.QueryRouteRequest(topic=OTHER), {"PUB or SUB on topic 'prices'"}),
        ("Heartbeat", wire.HeartbeatRequest(group=GROUP, client_type=wire.PUSH_CONSUMER), {"SUB on group 'billing'"}),
        ("Heartbeat", wire.HeartbeatRequest(client_type=wire.PRODUCER), set()),
        ("Heartbeat", wire.HeartbeatRequest(group=wire.Resource(), client_type=wire.PRODUCER), set()),
        ("NotifyClientTermination", wire.NotifyClientTerminationRequest(group=GROUP), set()),
        (
            "SendMessage",
            a_send(a_message(), a_message(topic="prices")),
            {"PUB on topic 'orders'", "PUB on topic 'prices'"},
        ),
        ("SendMessage", a_send(a_message(topic="%DLQ%billing")), {"PUB on topic '%DLQ%billing'"}),
        ("RecallMessage", wire.RecallMessageRequest(topic=OTHER), {"PUB on topic 'prices'"}),
        ("EndTransaction", wire.EndTransactionRequest(topic=OTHER), {"PUB on topic 'prices'"}),
        ("QueryAssignment", wire.QueryAssignmentRequest(topic=OTHER, group=GROUP), CONSUME),
        ("ReceiveMessage", wire.ReceiveMessageRequest(message_queue=OTHER_QUEUE, group=GROUP), CONSUME),
        ("AckMessage", wire.AckMessageRequest(topic=OTHER, group=GROUP), CONSUME),
        ("ChangeInvisibleDuration", wire.ChangeInvisibleDurationRequest(topic=OTHER, group=GROUP), CONSUME),
        (
            "ForwardMessageToDeadLetterQueue",
            wire.ForwardMessageToDeadLetterQueueRequest(topic=OTHER, group=GROUP),
            CONSUME,
        ),
        ("PullMessage", wire.PullMessageRequest(message_queue=OTHER_QUEUE, group=GROUP), CONSUME),
        ("GetOffset", wire.GetOffsetRequest(message_queue=OTHER_QUEUE, group=GROUP), CONSUME),
        ("UpdateOffset", wire.UpdateOffsetRequest(message_queue=OTHER_QUEUE, group=GROUP), CONSUME),
        ("QueryOffset", wire.QueryOffsetRequest(message_queue=OTHER_QUEUE), {"SUB on topic 'prices'"}),
        ("SyncLiteSubscription", wire.SyncLiteSubscriptionRequest(topic=OTHER, group=GROUP), CONSUME),
        ("Telemetry", producer_settings(), {"PUB on topic 'orders'"}),
        ("Telemetry", consumer_settings(), {"SUB on group 'billing'"}),
        ("Telemetry", wire.TelemetryCommand(thread_stack_trace=wire.ThreadStackTrace()), set()),
    ],
)
def test_the_elements_that_each_rpc_accepts(rpc: str, request_: Message, needs: set[str]) -> None:
    """The topic, or the topic and the group, that the request names."""
    assert needed(rpc, request_) == needs


def test_a_namespace_is_part_of_the_name() -> None:
    """As everywhere else in the daemon."""
    topic = wire.Resource(name="orders", resource_namespace="shop")
    assert needed("QueryRoute", wire.QueryRouteRequest(topic=topic)) == {"PUB or SUB on topic 'shop%orders'"}
    dead = wire.Resource(name="%DLQ%billing", resource_namespace="shop")
    assert needed("QueryRoute", wire.QueryRouteRequest(topic=dead)) == {"PUB or SUB on topic '%DLQ%shop%billing'"}


def test_a_subscription_takes_each_of_its_topics() -> None:
    """Beside its group."""
    frame = consumer_settings()
    frame.settings.subscription.subscriptions.add(topic=OTHER)
    frame.settings.subscription.subscriptions.add(topic=TOPIC)
    assert needed("Telemetry", frame) == CONSUME | {"SUB on topic 'orders'"}


def test_an_rpc_that_is_not_in_the_table_takes_an_admin_key(guard: Authenticator, clock: ManualClock) -> None:
    """It is refused, and not served unseen."""

    async def serve(request: object, call: Call) -> object:
        return request

    served = Guarded(Fixed(unary={"New": serve}), guard)

    async def ask(key: Key) -> object:
        return await served.unary["New"]("asked", from_key(key, clock))

    with pytest.raises(Refused, match="lacks an admin key"):
        asyncio.run(ask(SHOP))
    assert asyncio.run(ask(OPERATOR)) == "asked"


@pytest.mark.parametrize(("key", "code"), [(READER, wire.FORBIDDEN), (Key("shop", "guess"), wire.UNAUTHORIZED)])
@pytest.mark.parametrize(
    ("rpc", "request_"),
    [
        ("SendMessage", a_send(a_message())),
        ("RecallMessage", wire.RecallMessageRequest(topic=TOPIC, recall_handle="x")),
        ("AckMessage", wire.AckMessageRequest(topic=TOPIC, group=GROUP)),
        ("QueryAssignment", wire.QueryAssignmentRequest(topic=TOPIC, group=GROUP)),
        (
            "ChangeInvisibleDuration",
            wire.ChangeInvisibleDurationRequest(topic=TOPIC, group=GROUP, receipt_handle=HANDLE),
        ),
    ],
)
def test_a_refused_call_has_a_code_and_no_effect(
    rpc: str, request_: Message, key: Key, code: int, sidecar: Sidecar, clock: ManualClock
) -> None:
    """The text says what is missing; a handle is repeated, for clients that store it unseen; the figures count it."""
    untouched = sidecar.broker.fail_next = RuntimeError("the broker was asked")
    answer = asyncio.run(sidecar.ask(rpc, request_, from_key(key, clock)))
    assert answer.status.code == code
    assert ("lacks" in answer.status.message) == (code == wire.FORBIDDEN)
    assert sidecar.calls.done == [(rpc, code)]
    assert getattr(answer, "receipt_handle", HANDLE) == HANDLE
    assert sidecar.broker.fail_next is untouched
    assert not len(sidecar.sessions)


def test_a_call_that_is_not_signed_is_refused(sidecar: Sidecar) -> None:
    """Behind the check for a client id, which comes first as it does without keys."""
    answer = asyncio.run(sidecar.ask("SendMessage", a_send(a_message())))
    assert (answer.status.code, "is not signed" in answer.status.message) == (wire.UNAUTHORIZED, True)
    answer = asyncio.run(sidecar.ask("SendMessage", a_send(a_message()), from_client("")))
    assert answer.status.code == wire.CLIENT_ID_REQUIRED


def test_a_refused_receive_has_its_last_frame(sidecar: Sidecar, clock: ManualClock) -> None:
    """Python loses the status without it."""
    frames = asyncio.run(sidecar.stream("ReceiveMessage", a_receive(), from_key(READER, clock)))
    assert [frame.WhichOneof("content") for frame in frames] == ["status", "delivery_timestamp"]
    assert frames[0].status.code == wire.FORBIDDEN


def test_an_allowed_call_is_served(sidecar: Sidecar, clock: ManualClock) -> None:
    """As without keys."""
    call = from_key(SHOP, clock)
    assert asyncio.run(sidecar.ask("SendMessage", a_send(a_message()), call)).status.code == wire.OK
    frames = asyncio.run(sidecar.stream("ReceiveMessage", a_receive(), from_key(SHOP, clock)))
    assert [frame.WhichOneof("content") for frame in frames] == ["status", "message", "delivery_timestamp"]
    (frame,) = asyncio.run(sidecar.telemetry(producer_settings(), call=from_key(SHOP, clock)))
    assert frame.HasField("settings")


@pytest.mark.parametrize(
    ("key", "code", "status"),
    [
        (READER, "PERMISSION_DENIED", wire.FORBIDDEN),
        (Key("shop", "guess"), "UNAUTHENTICATED", wire.UNAUTHORIZED),
    ],
)
def test_a_refused_stream_ends_with_a_frame_and_a_status(
    key: Key, code: str, status: int, sidecar: Sidecar, clock: ManualClock
) -> None:
    """Before its client is known, or gets a message to decide on."""
    frames: list[bytes] = []

    async def run() -> None:
        async def bodies() -> AsyncIterator[bytes]:
            yield producer_settings().SerializeToString()

        async for frame in sidecar.dispatcher.telemetry()(bodies(), from_key(key, clock)):
            frames.append(frame)  # noqa: PERF401 - it ends with an error, and what came before it counts

    with pytest.raises(StreamEnded) as ended:
        asyncio.run(run())
    assert ended.value.code == code
    assert [wire.TelemetryCommand.FromString(frame).status.code for frame in frames] == [status]
    assert not len(sidecar.sessions)


def test_a_client_id_counts_within_its_key(sidecar: Sidecar, clock: ManualClock) -> None:
    """Who sends the id of somebody else's client ends nobody's session."""

    async def run() -> None:
        for key, group in ((SHOP, "billing"), (READER, "reading")):
            heartbeat = wire.HeartbeatRequest(group=wire.Resource(name=group), client_type=wire.PUSH_CONSUMER)
            assert (await sidecar.ask("Heartbeat", heartbeat, from_key(key, clock))).status.code == wire.OK
        goodbye = wire.NotifyClientTerminationRequest()
        await sidecar.ask("NotifyClientTermination", goodbye, from_key(READER, clock))

    asyncio.run(run())
    assert [(session.client_id, session.group) for session in sidecar.sessions] == [("shop/client-1", "billing")]


def test_an_open_stream_hears_nothing_that_its_key_may_not_hear_any_more(
    tmp_path: Path, guard: Authenticator, clock: ManualClock
) -> None:
    """A permission is taken away while a producer is connected: it is not asked about half messages, and must go."""
    service = Fixed()
    question = wire.TelemetryCommand()
    question.recover_orphaned_transaction_command.message.CopyFrom(a_message())
    dispatcher = Dispatcher(Guarded(service, guard), clock=clock)

    async def run() -> None:
        async def bodies() -> AsyncIterator[bytes]:
            yield producer_settings().SerializeToString()
            await asyncio.Event().wait()

        frames = dispatcher.telemetry()(bodies(), from_key(SHOP, clock))
        assert wire.TelemetryCommand.FromString(await anext(frames)).HasField("settings")
        service.offered.put_nowait(question)
        assert wire.TelemetryCommand.FromString(await anext(frames)) == question
        write_acl(tmp_path, ACL.replace("PUB|SUB", "SUB"))
        clock.advance(1000)
        service.offered.put_nowait(question)
        assert wire.TelemetryCommand.FromString(await anext(frames)).status.code == wire.FORBIDDEN
        with pytest.raises(StreamEnded):
            await anext(frames)

    asyncio.run(run())
