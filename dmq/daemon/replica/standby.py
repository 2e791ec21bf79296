"""Port of a daemon while it is a standby: health, status and metrics. Clients are sent to the primary."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from broker_adapter.runtime.clock import Clock
from broker_adapter.wire import rocketmq_v2
from dmq.acl.guard import Authenticator
from dmq.admin import admin_v1 as wire
from dmq.admin.api import lacking, refusal_of
from dmq.config.settings import DaemonConfig
from dmq.config.units import Address
from dmq.daemon.server import WatchedFiles, limits_of, plain_served_to
from dmq.daemon.telemetry import gauges
from dmq.http2 import (
    Bidirectional,
    CallEnded,
    Http2Server,
    Method,
    RequestHeaders,
    SocketListener,
    Status,
    Streaming,
    Unary,
    address_of,
    no_certificate_fault,
)
from dmq.metrics.registry import Metrics, MetricsServer
from dmq.rocketmq_server.calls.methods import METHODS
from dmq.rocketmq_server.rpc import health
from dmq.rocketmq_server.transport.http2_server import health_methods, said_plainly
from dmq.version import version_here

if TYPE_CHECKING:
    from dmq.daemon.replica.replica import Replica

_REMEMBERED_S: Final = 60.0
_REMEMBERED_MAX: Final = 4096
_RETURNS_MAX: Final = 16  # of an address, before its clients get an answer

log = structlog.get_logger("dmq.daemon")


class Redirects:
    """Connections that are closed at once, because their client has called the standby.

    gRPC clients with several addresses connect to the first one that completes the connection, each time. A call that
    fails does not change that. So for each connection that a refused client has to leave, the next one from its
    address is closed before the handshake: the client then connects to the primary.
    """

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._known: dict[str, _Refusals] = {}  # by address

    def note_refused(self, address: str) -> None:
        """Note that a client of the address has to leave a connection."""
        now_s = self._monotonic_s()
        if len(self._known) >= _REMEMBERED_MAX:
            self._known = {each: known for each, known in self._known.items() if known.until_s > now_s}
        if len(self._known) >= _REMEMBERED_MAX:
            return
        known = self._known.get(address)
        if known is None or known.until_s <= now_s:
            known = self._known[address] = _Refusals()
        known.until_s = now_s + _REMEMBERED_S
        known.count += 1
        known.due += 1

    def is_stranded(self, address: str) -> bool:
        """Return True if clients of the address return so often that they must know no other address."""
        known, now_s = self._known.get(address), self._monotonic_s()
        if known is None or known.count < _RETURNS_MAX or known.until_s <= now_s:
            return False
        known.until_s = now_s + _REMEMBERED_S
        return True

    def is_redirected(self, address: str) -> bool:
        """Return True if a new connection from the address is to be closed at once; each time for one connection."""
        known = self._known.get(address)
        if known is None or not known.due or known.until_s <= self._monotonic_s():
            return False
        known.due -= 1
        return True


@dataclass(slots=True)
class _Refusals:
    """Refused connections of one address, until it was quiet for a minute: all of them, and the redirects due."""

    count: int = 0
    due: int = 0
    until_s: float = 0.0


class StandbyPort:
    """Sockets, health, status and metrics of a daemon while it is a standby. Use it on one event loop."""

    def __init__(self, config: DaemonConfig, clock: Clock, connections_max: int) -> None:
        self._config = config
        self._clock = clock
        self._connections_max = connections_max
        self._listener = SocketListener(config.listen.host, config.listen.port, self._take)
        self._redirects = Redirects(clock.monotonic_s)
        self._server: Http2Server | None = None
        self._metrics: MetricsServer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._listen = ""

    async def start(self, replica: Replica) -> None:
        """Listen, and answer for a standby. Raise ``AddressInUse`` and ``DmqError``."""
        config, clock = self._config, self._clock
        self._replica, self._started_ms = replica, clock.now_ms()
        files = WatchedFiles.of(config, clock)
        self._guard = Authenticator(files.keys, clock) if files.keys is not None else None
        tls = files.certificates
        self._server = Http2Server(
            self._methods(),
            host=config.listen.host,
            port=config.listen.port,
            monotonic_s=clock.monotonic_s,
            limits=limits_of(config, self._connections_max),
            tls=tls.context if tls is not None else None,
            certificate_fault=tls.fault if tls is not None else no_certificate_fault,
            plain_served_to=plain_served_to(config),
        )
        self._server.begin()
        with said_plainly(config.listen.host, config.listen.port):
            port = await self._listener.start()
        self._listen = str(Address(config.listen.host, port))
        self._tasks.append(asyncio.get_running_loop().create_task(files.watch(), name="dmq-files"))
        metrics = Metrics(version=version_here())
        metrics.set_state("not_serving")
        gauges.follow_replica(metrics.replica, replica.status)
        self._metrics = gauges.start_metrics(config, metrics, lambda: False, self._reason)
        where = str(self._metrics.address) if self._metrics is not None else "off"
        log.info("standby_listening", listen=self._listen, metrics=where)

    def leave(self) -> None:
        """Remove the registration of the standby, if this process is one, because it ends; for a signal handler."""
        if self._server is not None:
            self._replica.leave()

    async def release(self) -> Sequence[socket.socket]:
        """End all connections, and return the sockets that still listen, for the transport of the primary.

        There are none if this process was no standby, nor for grpcio, which opens its own sockets.
        """
        server, self._server = self._server, None
        if server is None:
            return ()
        sockets = await self._listener.release()
        for task in self._tasks:
            task.cancel()
        if self._metrics is not None:
            self._metrics.stop()
        self._tasks = [asyncio.get_running_loop().create_task(server.stop(0), name="dmq-standby")]
        if self._config.transport == "http2":
            return sockets
        for each in sockets:
            each.close()
        return ()

    async def close(self) -> None:
        """End everything. Idempotent."""
        for each in await self.release():
            each.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _reason(self) -> str:
        return f"standby of {self._replica.primary or 'an unknown primary'}"

    async def _take(self, accepted: socket.socket, peer: object) -> None:
        server = self._server
        if server is None or self._redirects.is_redirected(address_of(peer)):
            accepted.close()
        else:
            await server.take(accepted, peer)

    # -- methods -------------------------------------------------------------------------------------------------------

    def _methods(self) -> dict[str, Method]:
        methods: dict[str, Method] = {}
        for method in METHODS.values():
            if method.client_streaming:
                methods[method.path] = Bidirectional(self._refuse_stream)
            elif method.server_streaming:
                methods[method.path] = Streaming(self._refuse_stream)
            else:
                methods[method.path] = Unary(self._refuse_client)
        methods |= {each.path: Unary(self._refuse_operator) for each in wire.METHODS.values()}
        methods[wire.METHODS["GetStatus"].path] = Unary(self._get_status)
        state = health.HealthService(("", rocketmq_v2.SERVICE))
        return methods | health_methods(state, lambda _: nullcontext())

    def _refusal(self) -> CallEnded:
        primary = self._replica.primary
        where = f"call the primary at {primary}" if primary else "the primary is unknown"
        return CallEnded(Status.UNAVAILABLE, f"this daemon is a standby and serves no clients: {where}")

    async def _refuse_operator(self, _body: bytes, _headers: RequestHeaders) -> bytes:
        raise self._refusal()

    async def _refuse_client(self, _body: bytes, headers: RequestHeaders) -> bytes:
        """Close the connection so that the client repeats its call elsewhere; answer if it returns too often."""
        assert self._server is not None and headers.admission is not None
        refusal, server, address = self._refusal(), self._server, headers.admission.address
        if self._redirects.is_stranded(address):
            raise refusal

        def close() -> None:
            if server.turn_away(headers.peer, refusal.text):
                self._redirects.note_refused(address)

        asyncio.get_running_loop().call_soon(close)
        await asyncio.Event().wait()  # until the call is cancelled with its connection
        raise refusal

    async def _refuse_stream(
        self, _bodies: bytes | AsyncIterator[bytes], headers: RequestHeaders
    ) -> AsyncGenerator[bytes, None]:
        yield await self._refuse_client(b"", headers)

    async def _get_status(self, _body: bytes, headers: RequestHeaders) -> bytes:
        try:
            if self._guard is not None:
                self._guard.enter("GetStatus", headers.get, lacking("GetStatus"))
        except Exception as error:  # every error becomes a status
            refusal = refusal_of(error)
            raise CallEnded(Status(refusal.code), refusal.text) from error
        return wire.GetStatusResponse(
            version=version_here(),
            broker_name=self._config.broker_name,
            pid=os.getpid(),
            state=wire.NOT_SERVING,
            state_reason=self._reason(),
            started_at_ms=self._started_ms,
            now_ms=self._clock.now_ms(),
            listen=self._listen,
            metrics_listen=str(self._metrics.address) if self._metrics is not None else "",
            data=str(self._config.data.absolute()),
            durability=self._config.durability,
            replica=self._replica.status(),
        ).SerializeToString()
