"""The server: one port, its connections, deadlines, and shutdown."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from dmq.http2.admission.admission import Admit, admit_all
from dmq.http2.admission.backpressure import Backpressure
from dmq.http2.admission.bounds import Accounts, ShareOf, Shares, address_of
from dmq.http2.admission.connection_admission import AdmissionPlace, ConnectionAdmission
from dmq.http2.admission.limits import Limits
from dmq.http2.admission.slices import InputSlices
from dmq.http2.connection.methods import Method, Methods
from dmq.http2.server.listener import SocketListener
from dmq.http2.server.protocol import ClientProtocol, PlainServedTo
from dmq.http2.server.tls import CertificateFault, no_certificate_fault

_CHECK_S_MAX: Final = 1.0
_NAP_S_MAX: Final = 3600.0
_NAP_S_MIN: Final = 0.005  # closer deadlines expire together
_CLOSE_S_MAX: Final = 1.0
_CHECKED_PER_TURN: Final = 128

log = structlog.get_logger("dmq.http2")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFigures:
    """A snapshot of a server's metrics."""

    connections: int
    streams: int
    held_bytes: int  # unfinished requests, and answers that no peer has read
    opened_connections: int  # since the start
    refused_connections: int


class Http2Server:
    """A server of gRPC methods on one port. Create and use it on one event loop, asyncio's own or uvloop's.

    ``monotonic_s`` is the clock. ``tls`` returns the context for the next connection, so a new certificate needs no
    restart. TLS and plain text share the port if ``plain_served_to`` allows it; the first byte distinguishes them.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        *,
        host: str,
        port: int,
        monotonic_s: Callable[[], float],
        limits: Limits | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        plain_served_to: PlainServedTo = "all",
        certificate_fault: CertificateFault = no_certificate_fault,
        is_busy: Callable[[], bool] = lambda: False,
        is_full: Callable[[], bool] = lambda: False,
        admit: Admit = admit_all,
        share_of: ShareOf = lambda _, __: None,
        on_left: Callable[[str], None] = lambda _: None,
        sockets: Iterable[socket.socket] = (),
    ) -> None:
        """Create the server without listening. ``methods`` are keyed by path, such as ``/package.Service/Method``.

        A connection for which ``certificate_fault`` returns a reason is logged with it and ends within a second.
        ``admit`` decides about each call from its headers. ``share_of`` returns the limit of buffered bytes for an
        address or a key. While ``is_busy`` returns True, heavy senders are not read, until ``turns.go_on`` is called.
        While ``is_full`` returns True, every client is paused after its next read. ``on_left`` is called with the
        address of each connection that ends. ``sockets`` are as in ``SocketListener``.
        """
        self.limits = limits or Limits()
        self.methods = Methods(methods)
        self.monotonic_s = monotonic_s
        self.tls = tls
        self.plain_served_to: PlainServedTo = "all" if tls is None else plain_served_to
        self.certificate_fault = certificate_fault
        self.accounts = Accounts(self.limits.held_in_all, self.limits.held_reserve, share_of)
        self.admit = admit
        self.lists = Shares(self.limits.lists_in_all, self.limits.lists_per_address)
        self._listener = SocketListener(host, port, self.take, sockets)
        self._is_stopped = self._is_aborted = False
        self.slices = InputSlices()
        self.turns = Backpressure(is_busy, is_full)
        self._clients: dict[ClientProtocol, None] = {}  # the newest last
        self._connection_admission = ConnectionAdmission(self.limits, self._clients.keys)
        self._opened = self._refused = 0
        self._watched_s = math.inf  # the deadline of the timer
        self._alarm: asyncio.TimerHandle | None = None
        self._checking: asyncio.TimerHandle | None = None
        self._is_empty = asyncio.Event()
        self._on_left = on_left

    async def start(self) -> int:
        """Listen, serve, and return the port (chosen by the system if 0 was configured). Raises OSError."""
        self._loop = asyncio.get_running_loop()
        port = await self._listener.start()
        self.begin()
        return port

    def begin(self) -> None:
        """Serve connections passed to ``take``, without listening; ``start`` also listens."""
        self._loop = asyncio.get_running_loop()
        self._check()

    async def take(self, accepted: socket.socket, peer: object) -> None:
        """Serve a connection that was accepted from ``peer``."""
        if self._is_aborted:
            accepted.close()
            return
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(partial(ClientProtocol, self, peer), accepted)
        except Exception as error:  # noqa: BLE001 - one connection fails, and the next ones are accepted
            log.debug("connection_failed", peer=str(peer), why=f"{type(error).__name__}: {error}")
            accepted.close()
            self._on_left(address_of(peer))

    async def stop(self, grace_s: float) -> None:
        """Stop accepting connections, drain the clients, and wait up to ``grace_s`` for calls in flight.

        The remaining calls then end with UNAVAILABLE, and all connections are closed.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        await self._listener.stop()
        now_s = self.monotonic_s()
        for client in list(self._clients):
            client.drain(now_s)
        await self._wait_until_empty(grace_s)
        for client in list(self._clients):
            client.finish()
        await self._wait_until_empty(_CLOSE_S_MAX)
        for client in list(self._clients):
            client.abort("the server stops")
        await self._wait_until_empty(_CLOSE_S_MAX)
        for timer in (self._alarm, self._checking):
            if timer is not None:
                timer.cancel()

    def abort(self) -> None:
        """End every call with UNAVAILABLE before its handler can answer, and serve no connection from now on."""
        self._is_aborted = True
        for client in list(self._clients):
            client.finish()

    def turn_away(self, peer: str, text: str) -> bool:
        """Refuse the calls of the connection of a ``RequestHeaders.peer`` and close it; False if it closes already."""
        found = [each for each in self._clients if each.peer == peer and not each.connection.control.is_draining]
        for client in found:
            client.turn_away(text)
        return bool(found)

    def figures(self) -> ServerFigures:
        """Return a snapshot of the metrics; safe from any thread."""
        clients = list(self._clients)
        return ServerFigures(
            connections=len(clients),
            streams=sum(len(client.connection.streams) for client in clients),
            held_bytes=self.accounts.everyone.bytes_held,
            opened_connections=self._opened,
            refused_connections=self._refused,
        )

    async def _wait_until_empty(self, limit_s: float) -> None:
        if not self._clients:
            return
        self._is_empty.clear()
        try:
            async with asyncio.timeout(limit_s):
                await self._is_empty.wait()
        except TimeoutError:
            pass

    # -- called by connections -----------------------------------------------------------------------------------------

    def joined(self, client: ClientProtocol) -> AdmissionPlace:
        """Register a client, and return the decision about its admission."""
        place, victim = self._connection_admission.admit(client, self.monotonic_s())
        if place is AdmissionPlace.NOWHERE:
            self._refused += 1
            self._on_left(client.address)
            return place
        if victim is not None:
            victim.make_room()
        self._opened += 1
        self._clients[client] = None
        return place

    def left(self, client: ClientProtocol) -> None:
        """Remove a disconnected client."""
        del self._clients[client]
        self._connection_admission.left(client)
        self.turns.left(client)
        self._on_left(client.address)
        if not self._clients:
            self._is_empty.set()

    def watch(self, at_s: float) -> None:
        """Set the timer for a deadline. One timer serves all calls, because most end long before their deadline."""
        if at_s < self._watched_s:
            self._set_alarm(at_s)

    # -- time ----------------------------------------------------------------------------------------------------------

    def _set_alarm(self, at_s: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._watched_s = at_s
        left_s = at_s - self.monotonic_s()
        self._alarm = self._loop.call_later(min(max(left_s, _NAP_S_MIN), _NAP_S_MAX), self._expire)

    def _expire(self) -> None:
        self._alarm = None
        self._watched_s = math.inf
        now_s = self.monotonic_s()
        deadlines = [at_s for client in list(self._clients) if (at_s := client.expire(now_s)) is not None]
        if deadlines:
            self.watch(min(deadlines))

    def _check(self) -> None:
        self._check_some(list(self._clients))

    def _check_some(self, clients: list[ClientProtocol]) -> None:
        """Check some of the clients, and the others in the next loop iterations."""
        limits = self.limits
        now_s = self.monotonic_s()
        for client in clients[-_CHECKED_PER_TURN:]:
            client.check(now_s)
        del clients[-_CHECKED_PER_TURN:]
        if clients:
            self._checking = self._loop.call_later(0, self._check_some, clients)
            return
        spans_s = (limits.preface_s, limits.ping_after_s, limits.ping_answer_s, limits.idle_s, limits.age_s)
        others_s = (limits.age_grace_s, limits.request_s, limits.header_block_s)
        shortest_s = min(span_s for span_s in (*spans_s, *others_s) if span_s is not None)
        self._checking = self._loop.call_later(min(_CHECK_S_MAX, shortest_s / 4), self._check)
