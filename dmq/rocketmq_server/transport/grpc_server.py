"""The alternative transport: grpc.aio. The only module of the server that imports grpc at load time.

Handlers accept and return bytes. ``dispatch`` parses them, so that a malformed request gets a status of the protocol
instead of a transport error.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from broker_adapter.contracts.limits import REQUEST_BYTES_MAX
from broker_adapter.wire import consumer_v1
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.pool import POOL
from dmq.errors import AddressInUse, DmqError
from dmq.metrics.usage import ProcessStatus, store_process
from dmq.rocketmq_server.calls.access import HEALTH
from dmq.rocketmq_server.calls.call import CLIENT_ID_HEADER, Call
from dmq.rocketmq_server.calls.dispatch import Dispatcher, StreamEnded, StreamHandler, TelemetryHandler, UnaryHandler
from dmq.rocketmq_server.calls.methods import METHODS
from dmq.rocketmq_server.rpc import health
from dmq.rocketmq_server.rpc.service import MessagingService

OPTIONS: Sequence[tuple[str, int]] = (
    # A body over 4 MiB must get the protocol's 41301 and not a transport error.
    ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
    # An answer consists of accepted messages: 4 MiB and a little per frame.
    ("grpc.max_send_message_length", REQUEST_BYTES_MAX),
    # A second daemon on the port must fail, not share it.
    ("grpc.so_reuseport", 0),
    # Per connection. A load generator keeps this many sends in flight; each push consumer keeps one receive.
    ("grpc.max_concurrent_streams", 2048),
    # Clients ping every few seconds to every 5 min, with and without calls. No client is disconnected for it.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    # Detect peers that vanished without closing: their telemetry stream would stay for ever.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Signatures and session tokens of real clients are long.
    ("grpc.max_metadata_size", 32 * 1024),
    ("grpc.absolute_max_metadata_size", 64 * 1024),
)

log = structlog.get_logger("dmq.rocketmq_server")

_Context = grpc.aio.ServicerContext[Any, Any]
_Headers = Iterable[tuple[str, str | bytes]]


class GrpcServer:
    """A server of one ``MessagingService`` on one port, with health and reflection. Create and use it on one event
    loop.
    """

    def __init__(
        self,
        service: MessagingService,
        dispatcher: Dispatcher,
        *,
        host: str,
        port: int,
        handlers: Sequence[grpc.GenericRpcHandler] = (),
        reflected: Sequence[str] = (),
    ) -> None:
        """Create the server without listening. ``handlers`` belong to other services on this port, ``reflected`` are
        their names.

        The descriptors of reflected services must be in the project's private descriptor pool.
        """
        self._service = service
        self._host = host
        self._port = port
        self._server = grpc.aio.server(options=list(OPTIONS))
        self._server.add_generic_rpc_handlers((_Handlers(dispatcher), *handlers))
        self._health = health.HealthService(("", wire.SERVICE))
        health_pb2_grpc.add_HealthServicer_to_server(_Health(self._health), self._server)
        for file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
            POOL.AddSerializedFile(file.serialized_pb)  # reflection looks in our private pool
        names = (wire.SERVICE, consumer_v1.SERVICE, HEALTH, reflection.SERVICE_NAME, *reflected)
        reflection.enable_server_reflection(names, self._server, pool=POOL)

    @property
    def port(self) -> int:
        """The configured port; after ``start`` the port in use."""
        return self._port

    async def start(self) -> int:
        """Listen, serve, and return the port (chosen by the system if 0 was configured).

        Raises AddressInUse if the port is in use, DmqError if the address cannot be bound.
        """
        address = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        _check_bind(self._host, self._port, address)
        try:
            self._port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise DmqError(f"cannot listen on {address} (gRPC)") from error
        self._service.listening_at(self._host, self._port)
        await self._server.start()
        await self.set_serving(is_serving=True)
        log.info("listening", host=self._host, port=self._port)
        return self._port

    def processes(self) -> Sequence[ProcessStatus]:
        """Return the single process; the library does not expose its number of connections."""
        return [store_process(None, None)]

    async def set_serving(self, *, is_serving: bool) -> None:
        """Set the state of the health service; calls are answered in either state."""
        self._health.set(is_serving=is_serving)

    def abort(self) -> None:
        """End every call soon, without its answer; the library cannot do it at once."""
        self._aborting = asyncio.get_running_loop().create_task(self._server.stop(0), name="dmq-abort")

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, end streams and long polls now, and finish other calls within ``grace_s``."""
        self._health.set(is_serving=False, is_ending=True)
        self._service.drain()
        await self._server.stop(grace_s)


class _Handlers(grpc.GenericRpcHandler):
    """The lookup of handlers by path."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._unary: dict[str, UnaryHandler] = {}
        self._streaming: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        for name, method in METHODS.items():
            if method.client_streaming:
                telemetry = _telemetry(dispatcher.telemetry())
                self._streaming[method.path] = grpc.stream_stream_rpc_method_handler(telemetry)
            elif method.server_streaming:
                streaming = _streaming(dispatcher.streaming(name))
                self._streaming[method.path] = grpc.unary_stream_rpc_method_handler(streaming)
            else:
                self._unary[method.path] = dispatcher.unary(name)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        handle = self._unary.get(handler_call_details.method)
        if handle is None:
            return self._streaming.get(handler_call_details.method)
        return _UnaryOnce(handle, handler_call_details.invocation_metadata or ())


class _UnaryOnce(grpc.RpcMethodHandler):  # type: ignore[type-arg]  # it is generic in the stubs only
    """The handler of one call, with the metadata that gRPC decoded for the lookup; reading it from the context costs 7
    us.
    """

    request_streaming = response_streaming = False
    request_deserializer = response_serializer = None
    unary_stream = stream_unary = stream_stream = None

    def __init__(self, handle: UnaryHandler, headers: _Headers) -> None:
        self._handle = handle
        self._headers = headers

    async def unary_unary(self, body: bytes, context: _Context) -> bytes:  # type: ignore[override]  # noqa: ARG002
        return await self._handle(body, _call(self._headers))


def _call(headers: _Headers) -> Call:
    for key, value in headers:
        if key == CLIENT_ID_HEADER and isinstance(value, str):
            return Call(client_id=value, headers=headers)
    return Call(client_id="", headers=headers)


def _waiting_call(context: _Context) -> Call:
    call = _call(context.invocation_metadata() or ())
    call.deadline_s = context.time_remaining()
    call.peer = context.peer()
    return call


def _streaming(handle: StreamHandler) -> Callable[[bytes, _Context], Awaitable[None]]:
    async def serve(body: bytes, context: _Context) -> None:
        async with aclosing(handle(body, _waiting_call(context))) as pieces:
            async for frames in pieces:
                for frame in frames:
                    await context.write(frame)

    return serve


def _telemetry(handle: TelemetryHandler) -> Callable[[AsyncIterator[bytes], _Context], Awaitable[None]]:
    async def serve(bodies: AsyncIterator[bytes], context: _Context) -> None:
        try:
            async with aclosing(handle(bodies, _waiting_call(context))) as frames:
                async for frame in frames:
                    await context.write(frame)
        except StreamEnded as end:
            await context.abort(grpc.StatusCode[end.code], end.text)

    return serve


class _Health(health_pb2_grpc.HealthServicer):
    """The health service on this transport. Cancelling the library's own watches during a write leaves calls open."""

    def __init__(self, state: health.HealthService) -> None:
        self._state = state

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        try:
            return self._state.check(request)
        except health.UnknownService:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:  # noqa: N802
        async with aclosing(self._state.watch(request)) as answers:
            async for answer in answers:
                await context.write(answer)


def _check_bind(host: str, port: int, address: str) -> None:
    """Raise the reason why an address cannot be bound: grpc does not report it to its caller, and prints it instead."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen()
    except OSError as reason:
        if reason.errno == errno.EADDRINUSE:
            raise AddressInUse(f"{address} is in use by another process (gRPC)") from reason
        raise DmqError(f"cannot listen on {address} (gRPC): {reason.strerror or reason}") from reason
