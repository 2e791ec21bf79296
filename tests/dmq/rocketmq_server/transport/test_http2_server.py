"""The protocol over real gRPC: what a hostile or clumsy client sends, and what a shutdown does to clients."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs
from support.clients.wire.protocol import Sidecar, a_message, a_receive, a_send, consumer_settings
from support.clients.wire.raw import RawClient
from support.rigs.fronts.fronted import FrontedTransport

from broker_adapter.contracts.adapter import GroupSettings
from broker_adapter.contracts.limits import BODY_BYTES_MAX, REQUEST_BYTES_MAX
from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire import consumer_v1
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.errors import AddressInUse, DmqError
from dmq.rocketmq_server.transport.grpc_server import GrpcServer
from dmq.rocketmq_server.transport.http2_server import Http2Transport, Port

pytestmark = pytest.mark.integration
Server = GrpcServer | Http2Transport | FrontedTransport
_transport = ["http2"]  # of the test that runs


@pytest.fixture(params=["http2", "front", "grpcio"], autouse=True)
def transport(request: pytest.FixtureRequest) -> None:
    _transport[0] = str(request.param)


def serve(sidecar: Sidecar, host: str, port: int) -> Server:
    if _transport[0] == "grpcio":
        return GrpcServer(sidecar.service, sidecar.dispatcher, host=host, port=port)
    served = Port(sidecar.service, sidecar.dispatcher)
    if _transport[0] == "front":
        return FrontedTransport(served, host=host, port_number=port)
    return Http2Transport(served, host=host, port_number=port, monotonic_s=time.monotonic)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Sidecar, Server, RawClient]]:
    sidecar = Sidecar(SystemClock())
    server = serve(sidecar, "127.0.0.1", 0)
    client = RawClient(await server.start())
    try:
        yield sidecar, server, client
    finally:
        await server.stop(1.0)
        await client.channel.close()


def run(scenario: Callable[[Sidecar, Server, RawClient], Coroutine[object, object, None]]) -> None:
    async def scene() -> None:
        async with asyncio.timeout(30), served() as parts:
            await scenario(*parts)

    asyncio.run(scene())


@pytest.mark.parametrize("rpc", list(wire.METHODS))
def test_every_path_of_the_protocol_answers(rpc: str) -> None:
    """An empty request gets a status of the protocol, from all 17 calls; none is UNIMPLEMENTED for gRPC."""

    async def scenario(sidecar: Sidecar, server: Server, client: RawClient) -> None:
        if rpc == "Telemetry":
            answer = await client.ask(rpc, consumer_settings().SerializeToString())
        else:
            answer = await client.ask(rpc, b"")
        assert answer.status.code

    run(scenario)


@pytest.mark.parametrize("rpc", list(wire.METHODS))
def test_malformed_protobuf_is_answered_and_the_server_continues(rpc: str) -> None:
    """40000 on the same connection that works on."""

    async def scenario(sidecar: Sidecar, server: Server, client: RawClient) -> None:
        for body in (b"\xff\xff\xff\xff", b"\x0a\x7f", b"\x08"):
            assert (await client.ask(rpc, body)).status.code == wire.BAD_REQUEST
        assert (await client.ask("SendMessage", a_send(a_message()).SerializeToString())).status.code == wire.OK

    run(scenario)


@pytest.mark.parametrize("rpc", list(wire.METHODS))
def test_a_missing_client_id_is_40017_on_every_call(rpc: str) -> None:
    """As a normal reply; the telemetry stream also ends with a status of gRPC. An empty heartbeat asks for health."""
    body = b"" if rpc != "Heartbeat" else wire.HeartbeatRequest(client_type=wire.PRODUCER).SerializeToString()

    async def scenario(sidecar: Sidecar, server: Server, client: RawClient) -> None:
        assert (await client.ask(rpc, body, metadata=())).status.code == wire.CLIENT_ID_REQUIRED
        odd = (("x-mq-client-id-bin", b"\x00\xff"), ("x-mq-client-id", ""), ("x-mq-language", "\x7e"))
        assert (await client.ask(rpc, body, metadata=odd)).status.code == wire.CLIENT_ID_REQUIRED

    run(scenario)


def test_a_telemetry_stream_with_bad_settings_ends_with_a_status() -> None:
    """INVALID_ARGUMENT, after the frame that says why."""

    async def scenario(sidecar: Sidecar, server: Server, client: RawClient) -> None:
        stream = client.telemetry()
        await stream.write(consumer_settings(wire.LITE_PUSH_CONSUMER).SerializeToString())
        assert (await stream.read()).status.code == wire.UNRECOGNIZED_CLIENT_TYPE
        assert await stream.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "40015" in await stream.details()

    run(scenario)


def test_a_body_over_the_limit_gets_the_protocols_answer() -> None:
    """Exactly 4 MiB passes, one byte more is 41301, and only beyond the request limit does gRPC itself refuse."""

    async def scenario(sidecar: Sidecar, server: Server, client: RawClient) -> None:
        for extra, code in ((0, wire.OK), (1, wire.MESSAGE_BODY_TOO_LARGE), (5_000_000, wire.MESSAGE_BODY_TOO_LARGE)):
            request = a_send(a_message(f"01{extra}", bytes(BODY_BYTES_MAX + extra)))
            assert (await client.ask("SendMessage", request.SerializeToString())).status.code == code
        assert len(sidecar.broker.stored("orders")) == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.ask("SendMessage", bytes(REQUEST_BYTES_MAX + 1))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED

    run(scenario)


def test_the_largest_message_comes_back() -> None:
    """A frame carries the body and what the server adds to it."""

    async def scenario(sidecar: Sidecar, server: Server, client: RawClient) -> None:
        request = a_send(a_message("01A", bytes(BODY_BYTES_MAX)), a_message("01B", bytes(BODY_BYTES_MAX)))
        assert (await client.ask("SendMessage", request.SerializeToString())).status.code == wire.OK
        frames = [frame async for frame in client.receive(polling_s=5)]
        assert [len(frame.message.body) for frame in frames[1:-1]] == [BODY_BYTES_MAX] * 2

    run(scenario)


def test_properties_reserved_for_the_service_are_removed() -> None:
    """No sender can claim an occurrence, a redrive or a dead letter; nor is a message refused that is sent on."""
    written = (
        *("DMQ_SCHEDULE", "DMQ_OCCURRENCE", "DLQ_PARENT_MESSAGE_ID", "DLQ_ATTEMPTS", "DLQ_REASON"),
        *("DLQ_FIRST_FAILED_AT", "DLQ_LAST_FAILED_AT", "DMQ_REFUSED", "DMQ_UNREADABLE"),
    )

    async def scenario(sidecar: Sidecar, server: Server, client: RawClient) -> None:
        request = a_send(a_message("01A", properties=dict.fromkeys((*written, "mine"), "1")))
        assert (await client.ask("SendMessage", request.SerializeToString())).status.code == wire.OK
        frames = [frame async for frame in client.receive(polling_s=5)]
        assert dict(frames[1].message.user_properties) == {"mine": "1"}

    run(scenario)


def test_a_client_that_hangs_up_cancels_its_long_poll() -> None:
    """The broker stops waiting for it, so that the next message goes to somebody who is there."""

    async def scenario(sidecar: Sidecar, server: Server, client: RawClient) -> None:
        poll = client.receive(polling_s=20)
        await sidecar.broker.waiting.wait()
        ended = asyncio.Event()
        sidecar.broker.on_cancel = ended.set
        poll.cancel()
        await ended.wait()
        await client.ask("SendMessage", a_send(a_message()).SerializeToString())
        frames = [frame async for frame in client.receive(polling_s=5)]
        assert frames[1].message.system_properties.delivery_attempt == 1

    run(scenario)


def test_a_long_poll_is_answered_before_its_deadline() -> None:
    """Rust's deadline is its polling time: 40401 in time, not DEADLINE_EXCEEDED."""

    async def scenario(sidecar: Sidecar, server: Server, client: RawClient) -> None:
        body = a_receive(polling_s=1).SerializeToString()
        answer = await client.ask("ReceiveMessage", body, timeout=1.0)
        assert answer.status.code == wire.MESSAGE_NOT_FOUND

    run(scenario)


def test_a_changed_policy_reaches_an_open_stream() -> None:
    """Without being asked for, as a settings frame like the first one."""

    async def scenario(sidecar: Sidecar, server: Server, client: RawClient) -> None:
        stream = client.telemetry()
        await stream.write(consumer_settings().SerializeToString())
        assert (await stream.read()).settings.backoff_policy.max_attempts == 17
        sidecar.broker.policies["billing"] = GroupSettings(is_fifo=False, max_attempts=3, delays_ms=(1000,))
        sidecar.service.group_changed("billing")
        frame = await stream.read()
        assert (frame.status.code, frame.settings.backoff_policy.max_attempts) == (wire.OK, 3)

    run(scenario)


def test_stop_ends_long_polls_and_streams_promptly() -> None:
    """With proper ends, long before the grace is over: 40401 for the poll, NOT_SERVING for watches, no error."""

    async def scenario(sidecar: Sidecar, server: Server, client: RawClient) -> None:
        poll = client.receive(polling_s=20)
        stream = client.telemetry()
        await stream.write(consumer_settings().SerializeToString())
        assert (await stream.read()).status.code == wire.OK
        stub: Any = health_pb2_grpc.HealthStub(client.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=wire.SERVICE))
        states = aiter(watch)
        assert (await anext(states)).status == health_pb2.HealthCheckResponse.SERVING
        await sidecar.broker.waiting.wait()
        async with asyncio.timeout(5):
            await server.stop(60)
        frames = [frame async for frame in poll]
        assert [frame.WhichOneof("content") for frame in frames] == ["status", "delivery_timestamp"]
        assert frames[0].status.code == wire.MESSAGE_NOT_FOUND
        assert await stream.read() == grpc.aio.EOF
        assert await stream.code() == grpc.StatusCode.OK
        assert [answer.status async for answer in states] == [health_pb2.HealthCheckResponse.NOT_SERVING]
        assert await watch.code() == grpc.StatusCode.OK

    run(scenario)


def test_stop_finishes_sends_that_are_in_flight() -> None:
    """A send that was accepted by the transport gets its answer; one that comes later is refused by it."""

    async def scenario(sidecar: Sidecar, server: Server, client: RawClient) -> None:
        gate = sidecar.broker.send_gate = asyncio.Event()
        request = a_send(a_message()).SerializeToString()
        send = asyncio.ensure_future(client.ask("SendMessage", request))
        await sidecar.broker.sending.wait()
        stopping = asyncio.ensure_future(server.stop(20))

        async def is_refused() -> bool:
            """Say whether a send is; one that left before the client heard of the stop waits for its time instead."""
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await client.ask("SendMessage", request, timeout=1)
            return ended.value.code() is grpc.StatusCode.UNAVAILABLE

        while not await is_refused():
            assert not stopping.done()
        assert not stopping.done()
        gate.set()
        assert (await send).status.code == wire.OK
        await stopping

    run(scenario)


def test_stop_has_one_deadline() -> None:
    """A send that hangs does not hold up the shutdown for longer than the grace."""

    async def scenario(sidecar: Sidecar, server: Server, client: RawClient) -> None:
        sidecar.broker.send_gate = asyncio.Event()
        send = asyncio.ensure_future(client.ask("SendMessage", a_send(a_message()).SerializeToString()))
        await sidecar.broker.sending.wait()
        async with asyncio.timeout(5):
            await server.stop(0.1)
        with pytest.raises(grpc.aio.AioRpcError):
            await send

    run(scenario)


def test_an_unexpected_error_does_not_end_the_connection() -> None:
    """One call fails with 50001, one line in the log; the next works."""

    async def scenario(sidecar: Sidecar, server: Server, client: RawClient) -> None:
        sidecar.broker.fail_next = RuntimeError("secret")
        with capture_logs() as logs:
            answer = await client.ask("SendMessage", a_send(a_message()).SerializeToString())
        assert answer.status.code == wire.INTERNAL_SERVER_ERROR
        assert [entry["event"] for entry in logs] == ["call_failed"]
        assert (await client.ask("SendMessage", a_send(a_message()).SerializeToString())).status.code == wire.OK

    run(scenario)


def test_a_flood_of_pings_is_tolerated() -> None:
    """Clients' keepalives differ widely; gRPC's default would answer the third early ping with GOAWAY.

    Raw frames, because no client library pings more often than once in 10 s.
    """

    async def scenario(sidecar: Sidecar, server: Server, client: RawClient) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(kind=4))
        for _ in range(100):  # one after the other: a GOAWAY comes some way behind the ping that earned it
            writer.write(frame(kind=6, payload=bytes(8)) * 3)
            await writer.drain()
            for _ in range(3):
                await ping_answer(reader)
        writer.close()
        await writer.wait_closed()

    run(scenario)


async def ping_answer(reader: asyncio.StreamReader) -> None:
    """Read frames up to the next answered ping."""
    while True:
        head = await reader.readexactly(9)
        await reader.readexactly(int.from_bytes(head[:3]))
        assert head[3] != 7, "the server said GOAWAY"
        if head[3:5] == b"\x06\x01":
            return


def frame(*, kind: int, payload: bytes = b"") -> bytes:
    """An HTTP/2 frame on stream 0, without flags."""
    return len(payload).to_bytes(3) + bytes([kind, 0]) + bytes(4) + payload


def test_bytes_that_are_not_http2_do_not_disturb_others() -> None:
    """A browser, a TLS client, a port scanner: their connection ends, ours goes on."""

    async def scenario(sidecar: Sidecar, server: Server, client: RawClient) -> None:
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01" + bytes(500)):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(noise)
            await writer.drain()
            await reader.read()
            writer.close()
        assert (await client.ask("SendMessage", a_send(a_message()).SerializeToString())).status.code == wire.OK

    run(scenario)


def test_a_taken_port_is_a_clear_error() -> None:
    """Not a second listener on the same port, and not gRPC's advice about debug variables."""

    async def scenario(sidecar: Sidecar, server: Server, client: RawClient) -> None:
        second = serve(sidecar, "127.0.0.1", server.port)
        with pytest.raises(AddressInUse, match=f"127.0.0.1:{server.port} is in use by another process"):
            await second.start()
        elsewhere = serve(sidecar, "192.0.2.1", 0)
        with pytest.raises(DmqError, match=r"cannot listen on 192\.0\.2\.1:0"):
            await elsewhere.start()

    run(scenario)


def test_the_port_is_free_after_stop() -> None:
    """A restarted daemon gets it at once."""

    async def scenario(sidecar: Sidecar, server: Server, client: RawClient) -> None:
        await server.stop(1)
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", server.port))

    run(scenario)


def test_health_follows_the_daemon() -> None:
    """For the whole server and for the service by name; an unknown name is NOT_FOUND."""

    async def scenario(sidecar: Sidecar, server: Server, client: RawClient) -> None:
        stub: Any = health_pb2_grpc.HealthStub(client.channel)
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        for is_serving, status in ((True, serving), (False, not_serving), (True, serving)):
            await server.set_serving(is_serving=is_serving)
            for name in ("", wire.SERVICE):
                assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == status
            assert (await stub.Check(health_pb2.HealthCheckRequest(service="liveness"))).status == serving
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="nonsense"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND

    run(scenario)


def test_reflection_shows_the_protocol() -> None:
    """Tools such as grpcurl can list the services and read every message."""

    async def scenario(sidecar: Sidecar, server: Server, client: RawClient) -> None:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(client.channel)  # type: ignore[arg-type]
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=wire.SERVICE),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="grpc.health.v1.Health"),
        ]
        answers = [answer async for answer in stub.ServerReflectionInfo(iter(asked))]
        names = {service.name for service in answers[0].list_services_response.service}
        others = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        assert names == {wire.SERVICE, consumer_v1.SERVICE, *others}
        for answer in answers[1:]:
            assert answer.file_descriptor_response.file_descriptor_proto

    run(scenario)
