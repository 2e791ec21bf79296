"""The default transport: gRPC over ``dmq.http2``, with the same interface as ``grpc_server``."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from types import MappingProxyType
from typing import Any

import structlog
from grpc_health.v1 import health_pb2

from broker_adapter.contracts.errors import Overloaded
from broker_adapter.contracts.limits import REQUEST_BYTES_MAX
from broker_adapter.wire import consumer_v1
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.pool import POOL
from dmq.acl.gate import Entrance, RpcPolicy, holders_of
from dmq.acl.guard import Authenticator
from dmq.acl.quotas import Holder, Quota, Quotas
from dmq.errors import AddressInUse, DmqError
from dmq.http2 import (
    Bidirectional,
    CallEnded,
    CertificateFault,
    Http2Server,
    Limits,
    Method,
    PlainServedTo,
    RequestHeaders,
    Status,
    Streaming,
    Unary,
    no_certificate_fault,
)
from dmq.metrics.usage import ProcessStatus, store_process
from dmq.rocketmq_server.calls.access import HEALTH, REFLECTION, all_entrances
from dmq.rocketmq_server.calls.dispatch import Dispatcher
from dmq.rocketmq_server.rpc import health
from dmq.rocketmq_server.rpc.service import MessagingService
from dmq.rocketmq_server.transport.http2_methods import messaging, with_bounds

log = structlog.get_logger("dmq.rocketmq_server")


class Port:
    """All methods on a daemon's port, by path, with health and reflection; and the gate that authorizes calls."""

    def __init__(
        self,
        service: MessagingService,
        dispatcher: Dispatcher,
        *,
        methods: Mapping[str, Method] | None = None,
        reflected: Sequence[str] = (),
        guard: Authenticator | None = None,
        entrances: Mapping[str, Entrance] = MappingProxyType({}),
    ) -> None:
        """``methods`` belong to other services, ``entrances`` are their header checks by path, ``reflected`` their
        names.

        The descriptors of reflected services must be in the project's private descriptor pool.
        """
        self.service = service
        self.health = health.HealthService(("", wire.SERVICE))
        names = (wire.SERVICE, consumer_v1.SERVICE, HEALTH, REFLECTION, *reflected)
        places = _Watches(service.quotas)
        self.gate = RpcPolicy(all_entrances(entrances), guard, service.quotas)
        self.methods: Mapping[str, Method] = {
            **messaging(dispatcher),
            **health_methods(self.health, places.one),
            f"/{REFLECTION}/ServerReflectionInfo": Bidirectional(_Reflection(names, places)),
            **(methods or {}),
        }
        # A front counts its own calls, including sends that it finally relays.
        self.methods_of_fronts = {**self.methods, **messaging(dispatcher.uncounted(), service.messages.unary)}

    def drain(self) -> None:
        """Report NOT_SERVING, and end streams and long polls now with regular answers."""
        self.health.set(is_serving=False, is_ending=True)
        self.service.drain()


class Http2Transport:
    """A server of a port in this process. Create and use it on one event loop."""

    def __init__(
        self,
        port: Port,
        *,
        host: str,
        port_number: int,
        monotonic_s: Callable[[], float],
        tls: Callable[[], ssl.SSLContext] | None = None,
        certificate_fault: CertificateFault = no_certificate_fault,
        plain_served_to: PlainServedTo = "all",
        limits: Limits | None = None,
        sockets: Iterable[socket.socket] = (),
    ) -> None:
        """Create the transport without listening; ``sockets`` listen already.

        ``tls`` returns the context of the next connection. ``plain_served_to`` selects the peers that may connect
        without TLS. ``certificate_fault`` is as in ``Http2Server``.
        """
        self._served = port
        self._host = host
        self._port = port_number
        quotas, messages = port.service.quotas, port.service.messages
        self._server = Http2Server(
            port.methods,
            host=host,
            port=port_number,
            monotonic_s=monotonic_s,
            limits=with_bounds(limits or Limits(request_max=REQUEST_BYTES_MAX), quotas.bounds),
            admit=port.gate.admit,
            share_of=lambda kind, name: quotas.limit(Quota.BYTES, Holder(kind, name)),
            tls=tls,
            certificate_fault=certificate_fault,
            plain_served_to=plain_served_to,
            is_busy=messages.is_busy,
            sockets=sockets,
        )
        accounts = self._server.accounts
        quotas.bytes_of = lambda holder: accounts.held_by(*holder)
        quotas.on_change = accounts.share_changed
        messages.on_room = self._server.turns.go_on

    @property
    def port(self) -> int:
        """The configured port; after ``start`` the port in use."""
        return self._port

    async def start(self) -> int:
        """Listen, serve, and return the port (chosen by the system if 0 was configured).

        Raises AddressInUse if the port is in use, DmqError if the address cannot be bound.
        """
        with said_plainly(self._host, self._port):
            self._port = await self._server.start()
        self._served.service.listening_at(self._host, self._port)
        await self.set_serving(is_serving=True)
        log.info("listening", host=self._host, port=self._port)
        return self._port

    def processes(self) -> Sequence[ProcessStatus]:
        """Return the single process; safe from any thread."""
        figures = self._server.figures()
        return [store_process(figures.connections, figures.streams)]

    async def set_serving(self, *, is_serving: bool) -> None:
        """Set the state of the health service; calls are answered in either state."""
        self._served.health.set(is_serving=is_serving)

    def abort(self) -> None:
        """End every call with UNAVAILABLE now, and serve no connection until ``stop``."""
        self._server.abort()

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, end streams and long polls now, and finish other calls within ``grace_s``."""
        self._served.drain()
        await self._server.stop(grace_s)


@contextmanager
def said_plainly(host: str, port: int) -> Iterator[None]:
    """Raise AddressInUse if the port is in use, DmqError if the address cannot be bound."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        yield
    except OSError as reason:
        if reason.errno == errno.EADDRINUSE:
            raise AddressInUse(f"{address} is in use by another process (gRPC)") from reason
        raise DmqError(f"cannot listen on {address} (gRPC): {reason.strerror or reason}") from reason


# -- services that come with every port --------------------------------------------------------------------------------


def health_methods(
    state: health.HealthService, place: Callable[[RequestHeaders], AbstractContextManager[None]]
) -> dict[str, Method]:
    """Return the methods of the health service by path; each open watch is in a ``place``."""

    def parsed(body: bytes) -> health_pb2.HealthCheckRequest:
        try:
            return health_pb2.HealthCheckRequest.FromString(body)
        except Exception as error:
            raise CallEnded(Status.INVALID_ARGUMENT, "the request cannot be read") from error

    async def check(body: bytes, _: RequestHeaders) -> bytes:
        try:
            return state.check(parsed(body)).SerializeToString()
        except health.UnknownService as error:
            raise CallEnded(Status.NOT_FOUND, "unknown service") from error

    async def watch(body: bytes, headers: RequestHeaders) -> AsyncGenerator[bytes, None]:
        with place(headers):
            async with aclosing(state.watch(parsed(body))) as answers:
                async for answer in answers:
                    yield answer.SerializeToString()

    return {f"/{HEALTH}/Check": Unary(check), f"/{HEALTH}/Watch": Streaming(watch)}


class _Watches:
    """The limit on open streams of health and reflection, which need no key."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._open = 0

    @contextmanager
    def one(self, headers: RequestHeaders) -> Iterator[None]:
        """Count one open stream for the duration of the context. Raises CallEnded above the limit."""
        holders, limit = holders_of(headers.admission), self._quotas.bounds.watches
        try:
            if self._open >= limit:
                raise Overloaded("watches", limit=limit)
            self._quotas.take(Quota.WATCHES, holders)
        except Overloaded as error:
            raise CallEnded(Status.RESOURCE_EXHAUSTED, str(error)) from error
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            self._quotas.free(Quota.WATCHES, holders)


class _Reflection:
    """grpcio's reflection servicer, on bytes. The first call loads it, because it imports all of grpcio."""

    def __init__(self, names: Sequence[str], places: _Watches) -> None:
        self._names = names
        self._places = places
        self._loaded: Any = None

    async def __call__(self, bodies: AsyncIterator[bytes], headers: RequestHeaders) -> AsyncGenerator[bytes, None]:
        with self._places.one(headers):
            async for answer in self._answers(bodies):
                yield answer
                await asyncio.sleep(0)  # the next request may already be here; yield to other tasks

    async def _answers(self, bodies: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        if self._loaded is None:
            self._loaded = await asyncio.get_running_loop().run_in_executor(None, self._load)
        servicer, parse = self._loaded

        async def requests() -> AsyncIterator[Any]:
            async for body in bodies:
                yield parse(body)

        async for answer in servicer.ServerReflectionInfo(requests(), None):
            yield answer.SerializeToString()

    def _load(self) -> tuple[Any, Callable[[bytes], Any]]:
        from grpc_reflection.v1alpha import reflection, reflection_pb2

        for file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
            POOL.AddSerializedFile(file.serialized_pb)  # reflection looks in our private pool
        servicer = reflection.aio.ReflectionServicer(self._names, pool=POOL)
        return servicer, reflection_pb2.ServerReflectionRequest.FromString
