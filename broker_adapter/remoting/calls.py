"""Calls to the name servers and brokers of one cluster: addresses, signatures, timeouts, errors."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable
from broker_adapter.remoting.connection import RemotingConnection, not_served
from broker_adapter.remoting.protocol.codes import Operation, Result, error_of
from broker_adapter.remoting.protocol.frames import RemotingFrame, number_of
from broker_adapter.remoting.protocol.requests.routes import MASTER, Part, decode_route
from broker_adapter.remoting.protocol.signature import signed


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotingOptions:
    """Connection settings of a cluster. ``tls_ca`` is a certificate file; without it and ``tls`` there is no
    encryption.
    """

    names: tuple[str, ...]  # its name servers
    access_key: str = ""
    secret_key: str = ""
    tls: bool = False
    tls_ca: Path | None = None
    request_timeout_ms: int = 3_000  # default of RocketMQ's clients

    def __repr__(self) -> str:
        return f"RemotingOptions(names={self.names!r}, access_key={self.access_key!r})"


class RemotingCalls:
    """Calls to one cluster. Belongs to one event loop, connects on first use of an address, and must be closed.

    Every call has one attempt. ``on_request`` handles a request of a peer, given its address. ``greeting`` returns the
    first request of a reconnection to a broker. ``on_answer`` receives the address of each call and its failure reason,
    or an empty one.
    """

    def __init__(
        self,
        options: RemotingOptions,
        *,
        on_request: Callable[[str, RemotingFrame], RemotingFrame | None] = lambda _, request: not_served(request),
        greeting: Callable[[], RemotingFrame | None] = lambda: None,
        on_answer: Callable[[str, str], None] = lambda _address, _why: None,
    ) -> None:
        self._options = options
        self._tls = _tls(options)
        self._on_request, self._greeting, self._on_answer = on_request, greeting, on_answer
        self._connections: dict[str, RemotingConnection] = {}
        self._addresses: dict[str, Mapping[int, str]] = {}  # of brokers, by name
        self._names_at = 0  # the name server that answered last

    async def close(self) -> None:
        """Close all connections; pending calls fail."""
        await asyncio.gather(*(each.close() for each in self._connections.values()))

    async def ask(
        self,
        address: str,
        operation: Operation,
        fields: Mapping[str, str],
        body: bytes = b"",
        *,
        accepted: Sequence[int] | None = (Result.OK,),
        wait_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> RemotingFrame:
        """Return the answer to a request if its code is in ``accepted``; raise any other code as an error.

        With ``accepted=None`` every code is accepted.
        """
        request = self.request(operation, fields, body)
        try:
            answer = await self._connection(address).ask(request, wait_s=wait_s, timeout_s=timeout_s)
        except BrokerUnavailable as error:
            self._on_answer(address, str(error))
            raise
        self._on_answer(address, "")
        if accepted is not None and answer.code not in accepted:
            raise error_of(answer, address, operation)
        return answer

    async def tell(
        self,
        address: str,
        operation: Operation,
        fields: Mapping[str, str],
        body: bytes = b"",
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Send a one-way request."""
        await self._connection(address).tell(self.request(operation, fields, body), timeout_s=timeout_s)

    async def ask_names(self, operation: Operation, fields: Mapping[str, str]) -> RemotingFrame:
        """Send a request to the name servers in turn, starting with the last responsive one, until one answers."""
        failure: BrokerError | None = None
        for step in range(len(self._options.names)):
            at = (self._names_at + step) % len(self._options.names)
            try:
                answer = await self.ask(self._options.names[at], operation, fields)
            except BrokerUnavailable as error:
                failure = error
                continue
            self._names_at = at
            return answer
        assert failure is not None, "there is a name server"
        raise failure

    async def route(self, topic: str) -> tuple[Part, ...]:
        """Request the route of a topic and remember the addresses of its brokers. ``Refused(TOPIC_UNKNOWN)``."""
        fields = {"topic": topic, "acceptStandardJsonOnly": "true"}
        parts = decode_route(topic, (await self.ask_names(Operation.ROUTE, fields)).body)
        for part in parts:
            if part.addresses:
                self._addresses[part.broker] = part.addresses
        return parts

    def forget(self, address: str) -> None:
        """Remove a broker address until a route contains it again."""
        self._addresses = {
            name: {number: each for number, each in at.items() if each != address}
            for name, at in self._addresses.items()
        }

    def remember(self, brokers: Mapping[str, Mapping[int, str]]) -> None:
        """Store the addresses of brokers, by their names."""
        self._addresses.update(brokers)

    @property
    def names(self) -> Sequence[str]:
        """Addresses of the name servers."""
        return self._options.names

    @property
    def brokers(self) -> Mapping[str, Mapping[int, str]]:
        """Addresses of each known broker, by number."""
        return self._addresses

    async def master(self, broker: str, topic: str) -> str:
        """Return the address of a broker's master; request the route of the topic if the address is unknown."""
        address = self._addresses.get(broker, {}).get(MASTER)
        if address is None:
            await self.route(topic)
            address = self._addresses.get(broker, {}).get(MASTER)
        if address is None:
            raise BrokerUnavailable(f"broker {broker} of topic {topic} has no master now")
        return address

    def broker_at(self, address: str) -> str:
        """Return the name of the broker at an address, or an empty string if no broker has it."""
        return next((name for name, each in self._addresses.items() if address in each.values()), "")

    def version(self, address: str) -> int:
        """Return the RocketMQ version of a peer, or 0 if it has sent no frame over its connection."""
        return self._connection(address).version

    async def offset(self, address: str, operation: Operation, fields: Mapping[str, str]) -> int:
        """Request an offset of a queue."""
        return number_of(await self.ask(address, operation, fields), "offset", address)

    def request(self, operation: Operation, fields: Mapping[str, str], body: bytes = b"") -> RemotingFrame:
        """Return a request frame, signed if there is an access key."""
        request = RemotingFrame(code=operation, fields=fields, body=body)
        if self._options.access_key:
            return signed(request, self._options.access_key, self._options.secret_key)
        return request

    def _connection(self, address: str) -> RemotingConnection:
        connection = self._connections.get(address)
        if connection is None:
            is_broker = address not in self._options.names
            connection = self._connections[address] = RemotingConnection(
                address,
                timeout_s=self._options.request_timeout_ms / 1000,
                tls=self._tls,
                on_request=lambda request: self._on_request(address, request),
                greeting=self._greeting if is_broker else lambda: None,
            )
        return connection


class CallingClient(AbstractAsyncContextManager["CallingClient"]):
    """Client that connects to a cluster on first use and must be closed. Belongs to one event loop."""

    def __init__(self, options: RemotingOptions) -> None:
        self._calls = RemotingCalls(options)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def __aenter__(self) -> Self:
        return self

    async def close(self) -> None:
        """Close all connections."""
        await self._calls.close()


def _tls(options: RemotingOptions) -> ssl.SSLContext | None:
    if not options.tls and options.tls_ca is None:
        return None
    return ssl.create_default_context(cafile=str(options.tls_ca) if options.tls_ca is not None else None)
