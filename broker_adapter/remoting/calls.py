"""Calls to the name servers and brokers of one cluster: who is where, signed, answered in time, or an error of ours."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable
from broker_adapter.remoting.codes import Operation, Result, error_of
from broker_adapter.remoting.connection import Connection, not_served
from broker_adapter.remoting.frames import Frame, FrameBroken
from broker_adapter.remoting.routes import MASTER, Part, decode_route
from broker_adapter.remoting.signature import signed


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotingOptions:
    """How to reach a cluster. ``tls_ca`` is a file of certificates; without it and ``tls`` nothing is encrypted."""

    names: tuple[str, ...]  # its name servers
    access_key: str = ""
    secret_key: str = ""
    tls: bool = False
    tls_ca: Path | None = None
    request_timeout_ms: int = 3_000  # default of RocketMQ's clients

    def __repr__(self) -> str:
        return f"RemotingOptions(names={self.names!r}, access_key={self.access_key!r})"


class Calls:
    """Belongs to one event loop; connects where it is first needed, ``close`` it. Every call is tried once.

    ``on_request`` is told the address of a peer and what it asks by itself; ``greeting`` gives what is said first when
    a connection to a broker is made anew; ``on_answer`` is told of each call why there was no answer, or nothing.
    """

    def __init__(
        self,
        options: RemotingOptions,
        *,
        on_request: Callable[[str, Frame], Frame | None] = lambda _, request: not_served(request),
        greeting: Callable[[], Frame | None] = lambda: None,
        on_answer: Callable[[str, str], None] = lambda _address, _why: None,
    ) -> None:
        self._options = options
        self._tls = _tls(options)
        self._on_request, self._greeting, self._on_answer = on_request, greeting, on_answer
        self._connections: dict[str, Connection] = {}
        self._addresses: dict[str, Mapping[int, str]] = {}  # of brokers, by name
        self._names_at = 0  # the name server that answered last

    async def close(self) -> None:
        """Close all connections; calls that wait fail."""
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
    ) -> Frame:
        """Return the answer to a request if its code is one of ``accepted``; any other is raised as an error.

        ``accepted`` none: whatever its code is.
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
        """Send a request that nobody answers."""
        await self._connection(address).tell(self.request(operation, fields, body), timeout_s=timeout_s)

    async def ask_names(self, operation: Operation, fields: Mapping[str, str]) -> Frame:
        """Ask one name server after the other, from the one that answered last, until one answers."""
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
        """Ask where a topic lies, and remember where its brokers are. ``Refused(TOPIC_UNKNOWN)``."""
        fields = {"topic": topic, "acceptStandardJsonOnly": "true"}
        parts = decode_route(topic, (await self.ask_names(Operation.ROUTE, fields)).body)
        for part in parts:
            if part.addresses:
                self._addresses[part.broker] = part.addresses
        return parts

    def forget(self, address: str) -> None:
        """Forget that a broker is at an address, until a route says so again."""
        self._addresses = {
            name: {number: each for number, each in at.items() if each != address}
            for name, at in self._addresses.items()
        }

    def remember(self, brokers: Mapping[str, Mapping[int, str]]) -> None:
        """Remember where brokers are, by their names."""
        self._addresses.update(brokers)

    @property
    def names(self) -> Sequence[str]:
        """The addresses of the name servers."""
        return self._options.names

    @property
    def brokers(self) -> Mapping[str, Mapping[int, str]]:
        """Where each broker is that is known: its addresses, by number."""
        return self._addresses

    async def master(self, broker: str, topic: str) -> str:
        """Return the address of the broker that writes, asking for the route of a topic if it is not known."""
        address = self._addresses.get(broker, {}).get(MASTER)
        if address is None:
            await self.route(topic)
            address = self._addresses.get(broker, {}).get(MASTER)
        if address is None:
            raise BrokerUnavailable(f"broker {broker} of topic {topic} has no master now")
        return address

    def broker_at(self, address: str) -> str:
        """Return the name of the broker at an address, empty if it is nobody's."""
        return next((name for name, each in self._addresses.items() if address in each.values()), "")

    def version(self, address: str) -> int:
        """Return the version that a peer gave over the connection to it, 0 if it said nothing yet."""
        return self._connection(address).version

    async def offset(self, address: str, operation: Operation, fields: Mapping[str, str]) -> int:
        """Ask for an offset of a queue."""
        return number_of(await self.ask(address, operation, fields), "offset", address)

    def request(self, operation: Operation, fields: Mapping[str, str], body: bytes = b"") -> Frame:
        """Return a request as it is sent, signed if there is a key."""
        request = Frame(code=operation, fields=fields, body=body)
        if self._options.access_key:
            return signed(request, self._options.access_key, self._options.secret_key)
        return request

    def _connection(self, address: str) -> Connection:
        connection = self._connections.get(address)
        if connection is None:
            is_broker = address not in self._options.names
            connection = self._connections[address] = Connection(
                address,
                timeout_s=self._options.request_timeout_ms / 1000,
                tls=self._tls,
                on_request=lambda request: self._on_request(address, request),
                greeting=self._greeting if is_broker else lambda: None,
            )
        return connection


def number_of(answer: Frame, name: str, address: str) -> int:
    """Return a number among the fields of an answer; ``FrameBroken`` if it is none."""
    text = answer.fields.get(name, "")
    try:
        return int(text)
    except ValueError:
        raise FrameBroken(f"{address} answers {text[:40]!r} for {name}, which is no number") from None


def _tls(options: RemotingOptions) -> ssl.SSLContext | None:
    if not options.tls and options.tls_ca is None:
        return None
    return ssl.create_default_context(cafile=str(options.tls_ca) if options.tls_ca is not None else None)
