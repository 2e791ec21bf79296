"""Routes, assignments, heartbeats and telemetry: what keeps every client alive, also after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

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
    producer_settings,
)

from broker_adapter.contracts.deferred import Deferred
from broker_adapter.contracts.errors import BrokerUnavailable, Refused, Rule
from broker_adapter.runtime.clock import ManualClock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.rocketmq_server.calls.call import Call
from dmq.rocketmq_server.calls.dispatch import CLIENT_ID_CHARS_MAX, StreamEnded
from dmq.rocketmq_server.sessions.settings import SidecarConfig

SERVED = {
    "QueryRoute",
    "Heartbeat",
    "SendMessage",
    "RecallMessage",
    "QueryAssignment",
    "ReceiveMessage",
    "AckMessage",
    "ChangeInvisibleDuration",
    "ForwardMessageToDeadLetterQueue",
    "NotifyClientTermination",
    "Telemetry",
}


def run(scenario: Callable[[Sidecar], Coroutine[object, object, None]], config: SidecarConfig | None = None) -> None:
    asyncio.run(scenario(Sidecar(ManualClock(), config)))


async def status_of(sidecar: Sidecar, rpc: str, body: bytes, call: Call) -> wire.Status:
    """Send bytes to any RPC but Telemetry and return the (first) status."""
    response_class: Any = wire.METHODS[rpc].response_class
    if wire.METHODS[rpc].server_streaming:
        answers = [answer async for piece in sidecar.dispatcher.streaming(rpc)(body, call) for answer in piece]
    else:
        answers = [await sidecar.dispatcher.unary(rpc)(body, call)]
    status: wire.Status = response_class.FromString(answers[0]).status
    return status


@asynccontextmanager
async def streaming(sidecar: Sidecar) -> AsyncIterator[None]:
    """Hold a consumer's telemetry stream open."""

    async def bodies() -> AsyncIterator[bytes]:
        yield consumer_settings().SerializeToString()
        await asyncio.Event().wait()

    async with aclosing(sidecar.dispatcher.telemetry()(bodies(), from_client())) as stream:
        await anext(stream)
        yield


UNARY_AND_STREAMING = [name for name in wire.METHODS if name != "Telemetry"]


@pytest.mark.parametrize("rpc", UNARY_AND_STREAMING)
def test_every_rpc_wants_a_client_id(rpc: str) -> None:
    """40017 in the RPC's own answer, before anything else is looked at; absurdly long ones are refused as well."""

    async def scenario(sidecar: Sidecar) -> None:
        body = b"" if rpc != "Heartbeat" else wire.HeartbeatRequest(client_type=wire.PRODUCER).SerializeToString()
        assert (await status_of(sidecar, rpc, body, Call(client_id=""))).code == wire.CLIENT_ID_REQUIRED
        long = Call(client_id="x" * (CLIENT_ID_CHARS_MAX + 1))
        status = await status_of(sidecar, rpc, b"", long)
        assert (status.code, f"limit {CLIENT_ID_CHARS_MAX}" in status.message) == (wire.CLIENT_ID_REQUIRED, True)

    run(scenario)


@pytest.mark.parametrize("rpc", UNARY_AND_STREAMING)
def test_every_rpc_survives_bytes_that_are_no_message(rpc: str) -> None:
    """40000 with the name of what was expected, and no word in the log."""

    async def scenario(sidecar: Sidecar) -> None:
        with capture_logs() as logs:
            status = await status_of(sidecar, rpc, b"\xff\xff\xff", from_client())
        assert status.code == wire.BAD_REQUEST
        assert wire.METHODS[rpc].request_class.__name__ in status.message
        assert logs == []

    run(scenario)


@pytest.mark.parametrize("rpc", UNARY_AND_STREAMING)
def test_an_empty_request_is_answered_by_every_rpc(rpc: str) -> None:
    """The protocol's refusal for served calls, 50100 for the others; never an internal error."""

    async def scenario(sidecar: Sidecar) -> None:
        code = (await status_of(sidecar, rpc, b"", from_client())).code
        if rpc in SERVED:
            assert 40000 <= code < 50000 or rpc in {"NotifyClientTermination", "Heartbeat"}
        else:
            assert code == wire.NOT_IMPLEMENTED
        assert sidecar.calls.done == [(rpc, int(code))]

    run(scenario)


def test_an_unexpected_error_is_logged_once_and_answered_without_details() -> None:
    """With its traceback in the log, 50001 for the client."""

    async def scenario(sidecar: Sidecar) -> None:
        sidecar.broker.fail_next = ZeroDivisionError("secret")
        with capture_logs() as logs:
            answer = await sidecar.ask("QueryRoute", wire.QueryRouteRequest(topic=TOPIC))
        assert answer.status.code == wire.INTERNAL_SERVER_ERROR
        assert "secret" not in answer.status.message
        (entry,) = logs
        assert (entry["event"], entry["rpc"], entry["client_id"]) == ("call_failed", "QueryRoute", "client-1")
        assert isinstance(entry["exc_info"], ZeroDivisionError)

    run(scenario)


def test_a_send_that_ends_with_the_process_is_no_fault() -> None:
    """Danger: each that was under way when the event loop ended left an error with a traceback in the log."""

    async def scenario(sidecar: Sidecar) -> None:
        sending = asyncio.create_task(asyncio.Event().wait())
        sidecar.service.unary["SendMessage"] = lambda *_: Deferred.of(sending)  # type: ignore[index]
        asking = asyncio.create_task(sidecar.ask("SendMessage", a_send(a_message())))
        await asyncio.sleep(0)
        with capture_logs() as logs:
            sending.cancel()  # as a loop that ends does to all of its tasks
            answer = await asking
        assert answer.status.code == wire.INTERNAL_SERVER_ERROR
        assert [each for each in logs if each["log_level"] != "debug"] == []

    run(scenario)


def endpoints(host: str, port: int) -> wire.Endpoints:
    return wire.Endpoints(scheme=wire.DOMAIN_NAME, addresses=[wire.Address(host=host, port=port)])


def test_a_route_shows_every_queue_at_the_address_that_was_dialled() -> None:
    """Ids from 0, read and write, broker id 0, at least one address: what Java throws on otherwise."""

    async def scenario(sidecar: Sidecar) -> None:
        dialled = endpoints("gateway.example", 443)
        answer = await sidecar.ask("QueryRoute", wire.QueryRouteRequest(topic=TOPIC, endpoints=dialled))
        assert answer.status.code == wire.OK
        assert [queue.id for queue in answer.message_queues] == list(range(8))
        for queue in answer.message_queues:
            assert (queue.topic, queue.permission) == (TOPIC, wire.READ_WRITE)
            assert (queue.broker.name, queue.broker.id, queue.broker.endpoints) == ("rock-dmq", 0, dialled)
            assert list(queue.accept_message_types) == [
                wire.NORMAL,
                wire.FIFO,
                wire.DELAY,
                wire.TRANSACTION,
            ]

    run(scenario)


def test_the_repeated_part_of_each_queue_is_short() -> None:
    """Danger: a route repeated the endpoints of its request, and fields that nobody knows: 300 bytes became 256 MB."""

    async def scenario(sidecar: Sidecar) -> None:
        unknown = b"\xfa\x7f\x7d" + bytes(125)  # field 2047, of 125 bytes
        topic = wire.Resource.FromString(TOPIC.SerializeToString() + unknown)
        assert len(topic.SerializeToString()) > len(unknown)
        few = wire.Endpoints(scheme=wire.DOMAIN_NAME, addresses=[wire.Address(host="a" * 250, port=1)] * 3)
        many = wire.Endpoints(scheme=wire.DOMAIN_NAME, addresses=[wire.Address(host="a" * 250, port=1)] * 4)
        asked = {"topic": topic, "group": GROUP}
        for rpc, request in (
            ("QueryRoute", lambda endpoints: wire.QueryRouteRequest(topic=topic, endpoints=endpoints)),
            ("QueryAssignment", lambda endpoints: wire.QueryAssignmentRequest(**asked, endpoints=endpoints)),
        ):
            answer = await sidecar.ask(rpc, request(few))
            assert answer.status.code == wire.OK
            assert unknown not in answer.SerializeToString()
            refused = await sidecar.ask(rpc, request(many))
            assert refused.status.code == wire.ILLEGAL_ACCESS_POINT
            assert "the endpoints have too many bytes" in refused.status.message
            assert refused.status.message.endswith("limit 1024")
            assert refused.ByteSize() < 200

    run(scenario)


@pytest.mark.parametrize(
    ("host", "scheme"), [("10.0.0.1", wire.IPv4), ("::1", wire.IPv6), ("host.example", wire.DOMAIN_NAME)]
)
def test_without_a_dialled_address_a_route_shows_the_servers_own(host: str, scheme: int) -> None:
    """With the scheme that fits it."""

    async def scenario(sidecar: Sidecar) -> None:
        sidecar.service.listening_at(host, 1234)
        answer = await sidecar.ask("QueryRoute", wire.QueryRouteRequest(topic=TOPIC))
        own = answer.message_queues[0].broker.endpoints
        assert (own.scheme, own.addresses[0].host, own.addresses[0].port) == (scheme, host, 1234)

    run(scenario)


def test_a_route_that_is_refused() -> None:
    """An illegal name by us, an unknown topic by the broker."""

    async def scenario(sidecar: Sidecar) -> None:
        bad = wire.QueryRouteRequest(topic=wire.Resource(name="a b"))
        assert (await sidecar.ask("QueryRoute", bad)).status.code == wire.ILLEGAL_TOPIC
        sidecar.broker.fail_next = Refused(Rule.TOPIC_UNKNOWN, "no such topic")
        answer = await sidecar.ask("QueryRoute", wire.QueryRouteRequest(topic=TOPIC))
        assert answer.status.code == wire.TOPIC_NOT_FOUND

    run(scenario)


def test_heartbeats_and_goodbyes_reach_the_broker() -> None:
    """The group of a consumer is made on the fly; an empty group of a producer (Go) is no group."""

    async def scenario(sidecar: Sidecar) -> None:
        beat = wire.HeartbeatRequest(group=GROUP, client_type=wire.SIMPLE_CONSUMER)
        assert (await sidecar.ask("Heartbeat", beat)).status.code == wire.OK
        producer = wire.HeartbeatRequest(group=wire.Resource(), client_type=wire.PRODUCER)
        assert (await sidecar.ask("Heartbeat", producer, from_client("p"))).status.code == wire.OK
        assert sidecar.broker.groups == {"billing"}
        assert sidecar.broker.seen == ["client-1", "p"]
        assert [session.client_id for session in sidecar.sessions] == ["client-1", "p"]
        lite = wire.HeartbeatRequest(group=GROUP, client_type=wire.LITE_SIMPLE_CONSUMER)
        assert (await sidecar.ask("Heartbeat", lite)).status.code == wire.UNRECOGNIZED_CLIENT_TYPE
        bye = wire.NotifyClientTerminationRequest(group=wire.Resource())
        assert (await sidecar.ask("NotifyClientTermination", bye)).status.code == wire.OK
        assert sidecar.broker.gone == ["client-1"]
        assert sidecar.sessions.get("client-1") is None

    run(scenario)


@pytest.mark.parametrize("told", [wire.CLIENT_TYPE_UNSPECIFIED, wire.PRODUCER, wire.LITE_PUSH_CONSUMER])
def test_the_kind_of_a_client_follows_from_its_stream(told: wire.ClientType) -> None:
    """The Java client 5.0.3 leaves the type out of every heartbeat; RocketMQ's proxy never looks at it."""

    async def scenario(sidecar: Sidecar) -> None:
        async with streaming(sidecar):
            beat = wire.HeartbeatRequest(group=GROUP, client_type=told)
            assert (await sidecar.ask("Heartbeat", beat)).status.code == wire.OK
            assert sidecar.broker.seen.count("client-1") == 2  # by its settings, and by its heartbeat
            session = sidecar.sessions.get("client-1")
            assert session is not None
            assert (session.client_type, session.group) == (wire.PUSH_CONSUMER, "billing")
        assert sidecar.broker.groups == {"billing"}

    run(scenario)


def test_an_empty_heartbeat_keeps_leases_and_creates_nothing() -> None:
    """A client whose stream is on its way is alive; a client of which nothing is known gets no session, no group."""

    async def scenario(sidecar: Sidecar) -> None:
        named = wire.HeartbeatRequest(group=GROUP)
        for beat in (wire.HeartbeatRequest(), named):
            assert (await sidecar.ask("Heartbeat", beat, from_client("new"))).status.code == wire.OK
        assert (sidecar.broker.seen, sidecar.broker.groups, len(sidecar.sessions)) == (["new", "new"], set(), 0)
        await sidecar.telemetry(consumer_settings())  # its stream ended again
        assert (await sidecar.ask("Heartbeat", wire.HeartbeatRequest())).status.code == wire.OK
        session = sidecar.sessions.get("client-1")
        assert session is not None
        assert (session.client_type, session.group) == (wire.PUSH_CONSUMER, "billing")
        assert sidecar.broker.seen[-1] == "client-1"

    run(scenario)


def test_an_empty_heartbeat_without_headers_asks_whether_the_server_is_healthy() -> None:
    """The Go client 5.1 sends it when its stream came back, and gives the stream up unless the answer is OK."""

    async def scenario(sidecar: Sidecar) -> None:
        status = await status_of(sidecar, "Heartbeat", b"", Call(client_id=""))
        assert (status.code, sidecar.broker.seen, len(sidecar.sessions)) == (wire.OK, [], 0)

    run(scenario)


@pytest.mark.parametrize("client_type", [wire.CLIENT_TYPE_UNSPECIFIED, wire.PUSH_CONSUMER, wire.PULL_CONSUMER])
def test_a_heartbeat_makes_no_group_of_a_namespace_alone(client_type: wire.ClientType) -> None:
    """A group without a name is none, whatever the namespace; with it, access rules were asked about nothing."""

    async def scenario(sidecar: Sidecar) -> None:
        beat = wire.HeartbeatRequest(group=wire.Resource(resource_namespace="ns"), client_type=client_type)
        assert (await sidecar.ask("Heartbeat", beat)).status.code == wire.OK
        assert sidecar.broker.groups == set()
        assignment = wire.QueryAssignmentRequest(topic=TOPIC, group=beat.group)
        assert (await sidecar.ask("QueryAssignment", assignment)).status.code == wire.ILLEGAL_CONSUMER_GROUP
        route = wire.QueryRouteRequest(topic=wire.Resource(resource_namespace="ns"))
        assert (await sidecar.ask("QueryRoute", route)).status.code == wire.ILLEGAL_TOPIC

    run(scenario)


def test_a_consumer_that_calls_itself_a_producer_makes_no_group() -> None:
    """Access rules ask nothing of a producer's heartbeat: the group it names is not looked at."""

    async def scenario(sidecar: Sidecar) -> None:
        async with streaming(sidecar):
            other = wire.HeartbeatRequest(group=wire.Resource(name="others"), client_type=wire.PRODUCER)
            assert (await sidecar.ask("Heartbeat", other)).status.code == wire.OK
        assert sidecar.broker.groups == {"billing"}

    run(scenario)


def test_telemetry_answers_each_settings_frame_with_ok_and_settings() -> None:
    """The status counts: Python looks at it first. Frames without settings are taken in silence."""

    async def scenario(sidecar: Sidecar) -> None:
        trace = wire.TelemetryCommand(thread_stack_trace=wire.ThreadStackTrace(nonce="n"))
        frames = await sidecar.telemetry(consumer_settings(), trace, wire.TelemetryCommand(), producer_settings())
        assert [frame.status.code for frame in frames] == [wire.OK, wire.OK]
        assert [frame.WhichOneof("command") for frame in frames] == ["settings", "settings"]
        assert frames[0].settings.subscription.receive_batch_size == 32
        assert frames[1].settings.publishing.max_body_size > 0
        assert sidecar.broker.groups == {"billing"}
        assert set(sidecar.broker.seen) == {"client-1"}
        assert sidecar.calls.done == [("Telemetry", wire.OK)]

    run(scenario)


def bad_frames() -> list[tuple[wire.TelemetryCommand, int, str]]:
    no_group = consumer_settings()
    no_group.settings.subscription.group.name = ""
    neither = wire.TelemetryCommand(settings=wire.Settings(client_type=wire.PRODUCER))
    return [
        (no_group, wire.ILLEGAL_CONSUMER_GROUP, "INVALID_ARGUMENT"),
        (neither, wire.BAD_REQUEST, "INVALID_ARGUMENT"),
        (consumer_settings(wire.LITE_PUSH_CONSUMER), wire.UNRECOGNIZED_CLIENT_TYPE, "INVALID_ARGUMENT"),
    ]


@pytest.mark.parametrize(("frame", "code", "transport_code"), bad_frames())
def test_bad_settings_end_the_stream_with_the_reason(
    frame: wire.TelemetryCommand, code: int, transport_code: str
) -> None:
    """As the protocol's frame for clients that read frames (Node), and as the transport's status for the others."""

    async def scenario(sidecar: Sidecar) -> None:
        async def bodies() -> AsyncIterator[bytes]:
            yield frame.SerializeToString()
            await asyncio.Event().wait()

        stream = sidecar.dispatcher.telemetry()(bodies(), from_client())
        assert wire.TelemetryCommand.FromString(await anext(stream)).status.code == code
        with pytest.raises(StreamEnded) as caught:
            await anext(stream)
        assert (caught.value.code, caught.value.text.split()[0]) == (transport_code, str(code))
        assert sidecar.calls.done == [("Telemetry", code)]

    run(scenario)


def test_a_rust_client_learns_it_from_the_transport_alone() -> None:
    """An error behind a frame makes it read again without a pause; an error and nothing else fails its start."""

    async def scenario(sidecar: Sidecar) -> None:
        async def bodies() -> AsyncIterator[bytes]:
            yield consumer_settings(wire.LITE_PUSH_CONSUMER).SerializeToString()

        stream = sidecar.dispatcher.telemetry()(bodies(), from_client(language="RUST"))
        with pytest.raises(StreamEnded, match=str(wire.UNRECOGNIZED_CLIENT_TYPE)):
            await anext(stream)

    run(scenario)


@pytest.mark.parametrize(
    ("call", "body", "transport_code"),
    [
        (Call(client_id=""), b"", "INVALID_ARGUMENT"),
        (from_client(), b"\xff\xff\xff", "INVALID_ARGUMENT"),
    ],
)
def test_telemetry_that_cannot_be_read_ends_the_stream(call: Call, body: bytes, transport_code: str) -> None:
    """No client id, or bytes that are no frame."""

    async def scenario(sidecar: Sidecar) -> None:
        async def bodies() -> AsyncIterator[bytes]:
            yield body

        with pytest.raises(StreamEnded) as caught:
            async for _ in sidecar.dispatcher.telemetry()(bodies(), call):
                pass
        assert caught.value.code == transport_code

    run(scenario)


@pytest.mark.parametrize(
    ("error", "transport_code"), [(BrokerUnavailable("down"), "UNAVAILABLE"), (KeyError("secret"), "INTERNAL")]
)
def test_telemetry_ends_with_the_servers_failure(error: Exception, transport_code: str) -> None:
    """Clients open a new stream then."""

    async def scenario(sidecar: Sidecar) -> None:
        sidecar.broker.fail_next = error
        with pytest.raises(StreamEnded) as caught:
            await sidecar.telemetry(consumer_settings())
        assert caught.value.code == transport_code
        assert "secret" not in caught.value.text

    run(scenario)


async def open_stream(sidecar: Sidecar) -> tuple[AsyncIterator[bytes], asyncio.Event]:
    """Open a telemetry stream, exchange settings, and leave it open; the event tells that its reader ended."""
    hung_up = asyncio.Event()

    async def bodies() -> AsyncIterator[bytes]:
        try:
            yield consumer_settings().SerializeToString()
            await asyncio.Event().wait()
        finally:
            hung_up.set()

    stream = sidecar.dispatcher.telemetry()(bodies(), from_client())
    await anext(stream)
    return stream, hung_up


def test_drain_ends_open_streams_without_an_error() -> None:
    """And a stream that comes later ends at once."""

    async def scenario(sidecar: Sidecar) -> None:
        stream, _ = await open_stream(sidecar)
        sidecar.service.drain()
        async with asyncio.timeout(5):
            assert [answer async for answer in stream] == []
            assert await sidecar.telemetry() == []

    run(scenario)


def test_a_stream_that_is_dropped_leaves_nothing_behind() -> None:
    """The reader ends, the session stays without a stream, and the place is free again."""

    async def scenario(sidecar: Sidecar) -> None:
        stream, hung_up = await open_stream(sidecar)
        session = sidecar.sessions.get("client-1")
        assert session is not None
        outbox = session.outbox
        assert outbox is not None
        with pytest.raises(StreamEnded, match="RESOURCE_EXHAUSTED"):
            await sidecar.telemetry(consumer_settings())
        await stream.aclose()  # type: ignore[attr-defined]
        assert hung_up.is_set()
        assert outbox.is_closed  # whoever still holds it can put frames for ever without waiting
        assert [session.outbox for session in sidecar.sessions] == [None]
        assert len(await sidecar.telemetry(consumer_settings())) == 1

    run(scenario, SidecarConfig(streams_max=1))


def test_the_newest_stream_of_a_client_is_the_one_for_commands() -> None:
    """The older one goes on until its client closes it."""

    async def scenario(sidecar: Sidecar) -> None:
        first, _ = await open_stream(sidecar)
        session = sidecar.sessions.get("client-1")
        assert session is not None
        old = session.outbox
        second, _ = await open_stream(sidecar)
        assert session.outbox is not old
        assert old is not None
        assert not old.is_closed
        await first.aclose()  # type: ignore[attr-defined]
        assert session.outbox is not None
        await second.aclose()  # type: ignore[attr-defined]

    run(scenario)


def test_everything_works_without_a_session() -> None:
    """After a restart nobody is known, and nobody needs to be."""

    async def scenario(sidecar: Sidecar) -> None:
        assert (await sidecar.ask("SendMessage", a_send(a_message()))).status.code == wire.OK
        frames = await sidecar.stream("ReceiveMessage", a_receive(auto_renew=True))
        assert frames[0].status.code == wire.OK
        assert len(sidecar.sessions) == 0

    run(scenario)


def test_settings_of_a_stream_are_bounded() -> None:
    """Danger: 22 MiB of settings cost a gigabyte, and 20 s to let go of. Their size, their topics, and how often."""

    async def refused(sidecar: Sidecar, *told: wire.TelemetryCommand) -> str:
        with pytest.raises(StreamEnded) as caught:
            await sidecar.telemetry(*told)
        return caught.value.text

    async def scenario(sidecar: Sidecar) -> None:
        names = [wire.Resource(name=f"{number:0100}") for number in range(1000)]
        large = wire.TelemetryCommand(settings=wire.Settings(publishing=wire.Publishing(topics=names)))
        assert "the settings are too large" in await refused(sidecar, large)
        names = [wire.Resource(name=f"{number}") for number in range(1025)]
        many = wire.TelemetryCommand(settings=wire.Settings(publishing=wire.Publishing(topics=names)))
        assert "the settings name too many topics, got 1025, limit 1024" in await refused(sidecar, many)
        assert "settings of one telemetry stream" in await refused(sidecar, *[producer_settings()] * 65)
        assert len(await sidecar.telemetry(*[producer_settings()] * 20)) == 20
        assert not sidecar.service._transactions.producers._by_topic

    run(scenario)
