"""Connections to proxies: signed calls with a deadline, and the isolation of failing proxies."""

# ruff: noqa: ANN401 - one class of requests and answers per RPC

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc

from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable, Refused
from broker_adapter.rocketmq.codes import error_of_call
from broker_adapter.runtime.clock import Clock
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.failure_reports import REFUSED_S, REPORT
from broker_adapter.wire.signature import Signer

CLIENT_VERSION = "5.1.2"  # of the official Python client, the model of these requests
_LANGUAGE = "PYTHON"
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # also gRPC's connect timeout: a busy proxy is slow
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Apache's proxy closes connections idle for 120 s. Only keepalive detects a dead host.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
)
_PROBE_EVERY_S = 1.0
_PROBE_MS = 1_000
_WATCH_EVERY_S = 5.0
_PROBE_SHARE = 4  # a proxy with slow probes is probed less often: gRPC keeps reconnecting meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Connection settings of a cluster. ``tls_ca`` is a certificate file; without it and ``tls`` there is no
    encryption.
    """

    endpoints: tuple[str, ...]
    access_key: str = ""
    secret_key: str = ""
    tls: bool = False
    tls_ca: Path | None = None
    request_timeout_ms: int = 3_000  # default of the official clients
    sends_max: int = 3  # attempts within one send: default of the official clients
    route_ms: int = 30_000  # cache time of a route: default of the official clients
    heartbeat_ms: int = 10_000  # default of the official clients


class CallLog(Protocol):
    """Log function for events of proxies."""

    def __call__(self, event: str, **fields: object) -> None:
        """Log an event."""
        ...


def log_nothing(event: str, **fields: object) -> None:
    """Discard an event."""


class Proxy:
    """Connection to one proxy, and its isolation state."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.is_isolated = False
        self.error = ""  # reason of the isolation
        self.answered_s = float("-inf")  # time of the last answer, monotonic
        self.probing: asyncio.Task[None] | None = None
        self.channel = channel
        self._calls: dict[str, Callable[..., Any]] = {}
        self.reports_again_s = 0.0  # monotonic; no failure report before it

    def call(self, rpc: str) -> Callable[..., Any]:
        """Return the callable that starts an RPC of the protocol."""
        made = self._calls.get(rpc)
        if made is None:
            method = REPORT if rpc == REPORT.name else wire.METHODS[rpc]
            serialize, parse = method.request_class.SerializeToString, method.response_class.FromString
            if method.client_streaming:
                made = self.channel.stream_stream(method.path, serialize, parse)
            elif method.server_streaming:
                made = self.channel.unary_stream(method.path, serialize, parse)
            else:
                made = self.channel.unary_unary(method.path, serialize, parse)
            self._calls[rpc] = made
        return made


class Proxies:
    """All proxies in use by this client. Belongs to one event loop.

    A proxy that does not answer is isolated: other proxies serve its calls. It is probed once a second, less often if a
    probe takes long. Its first answer ends the isolation.
    """

    def __init__(self, options: ClusterOptions, clock: Clock, log: CallLog = log_nothing) -> None:
        self.options = options
        self.log = log
        self._signer = Signer(options.access_key, options.secret_key, clock) if options.access_key else None
        self._proxies: dict[str, Proxy] = {}
        self._turn = 0
        self._clock = clock
        self._ssl = _ssl(options)

    # -- which --------------------------------------------------------------------------------------------------------

    def at(self, address: str) -> Proxy:
        """Return the proxy at an address; it connects on first use."""
        proxy = self._proxies.get(address)
        if proxy is None:
            if self._ssl is None:
                channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
            else:
                channel = grpc.aio.secure_channel(address, self._ssl, options=_CHANNEL_OPTIONS)
            proxy = self._proxies[address] = Proxy(address, channel)
        return proxy

    def choose(self, addresses: Sequence[str] = ()) -> Proxy:
        """Return the next healthy proxy of ``addresses`` (default: the configured ones), round-robin.

        If all are isolated, return the next one anyway: it may have recovered.
        """
        candidates = [self.at(each) for each in addresses or self.options.endpoints]
        self._turn += 1
        well = [each for each in candidates if not each.is_isolated] or candidates
        return well[self._turn % len(well)]

    def is_known(self, address: str) -> bool:
        """Return True if the user or a route named this address. No other address is ever contacted."""
        return address in self._proxies or address in self.options.endpoints

    @property
    def errors(self) -> dict[str, str]:
        """Failure reasons of isolated proxies, by address."""
        return {each.address: each.error for each in self._proxies.values() if each.is_isolated}

    @property
    def is_away(self) -> bool:
        """True if at least one proxy is in use and all of them are isolated."""
        return bool(self._proxies) and all(each.is_isolated for each in self._proxies.values())

    # -- calls --------------------------------------------------------------------------------------------------------

    async def ask(
        self,
        proxy: Proxy,
        rpc: str,
        request: Any,
        client_id: str,
        *,
        timeout_ms: int = 0,
    ) -> Any:
        """Return the answer to a unary RPC, with any status.

        Raise ``Refused`` or ``BrokerUnavailable`` (in doubt) if there is no answer.
        """
        timeout_s = (timeout_ms or self.options.request_timeout_ms) / 1000
        try:
            answer = await proxy.call(rpc)(request, timeout=timeout_s, metadata=self.metadata(client_id))
        except grpc.aio.AioRpcError as error:
            raise self.failed(proxy, error) from None
        self._well(proxy)
        return answer

    async def report(self, proxy: Proxy, call: Any) -> None:
        """Wait for the answer to a pending failure report, and remember if the proxy does not support reports."""
        try:
            is_refused = (await call).status.code == wire.NOT_IMPLEMENTED
        except grpc.aio.AioRpcError as error:
            is_refused = error.code() is grpc.StatusCode.UNIMPLEMENTED
        if is_refused:
            proxy.reports_again_s = self._clock.monotonic_s() + REFUSED_S

    async def frames(
        self,
        proxy: Proxy,
        rpc: str,
        request: Any,
        client_id: str,
        *,
        timeout_ms: int,
    ) -> AsyncGenerator[Any, None]:
        """Yield the answers of a streaming RPC; raises as ``ask``. Closing the generator cancels the call."""
        call = proxy.call(rpc)(request, timeout=timeout_ms / 1000, metadata=self.metadata(client_id))
        try:
            async for frame in call:
                yield frame
        except grpc.aio.AioRpcError as error:
            raise self.failed(proxy, error) from None
        finally:
            call.cancel()
        self._well(proxy)

    def metadata(self, client_id: str) -> tuple[tuple[str, str], ...]:
        """Return the metadata of every call."""
        signed = self._signer.metadata() if self._signer is not None else ()
        return (
            ("x-mq-client-id", client_id),
            ("x-mq-language", _LANGUAGE),
            ("x-mq-client-version", CLIENT_VERSION),
            ("x-mq-protocol", "v2"),
            *signed,
        )

    def failed(self, proxy: Proxy, error: grpc.aio.AioRpcError) -> BrokerError:
        """Record a call without an answer, isolate the proxy if it is unavailable, and return the error to raise."""
        found = error_of_call(error, proxy.address)
        if isinstance(found, Refused):  # a refusal is an answer, too
            self._well(proxy)
        if isinstance(found, BrokerUnavailable) and not proxy.is_isolated:
            proxy.is_isolated, proxy.error = True, str(found)
            self.log("proxy_isolated", address=proxy.address, why=str(found))
            if proxy.probing is None or proxy.probing.done():
                proxy.probing = asyncio.ensure_future(self._probe(proxy))
        return found

    def _well(self, proxy: Proxy) -> None:
        proxy.answered_s = self._clock.monotonic_s()
        if proxy.is_isolated:
            proxy.is_isolated, proxy.error = False, ""
            self.log("proxy_returned", address=proxy.address)

    async def watch(self) -> None:
        """Call every proxy that was idle for five seconds, at once and then every five seconds, to detect outages.

        Never returns. A proxy that does not answer within the request timeout is isolated, as after any call.
        """
        while True:
            known = dict.fromkeys([*self.options.endpoints, *self._proxies])
            idle_since_s = self._clock.monotonic_s() - _WATCH_EVERY_S
            idle = [each for each in map(self.at, known) if not each.is_isolated and each.answered_s <= idle_since_s]
            await asyncio.gather(*map(self._greet, idle))
            await asyncio.sleep(_WATCH_EVERY_S)

    async def _greet(self, proxy: Proxy) -> None:
        with suppress(BrokerError):
            await self.ask(proxy, "Heartbeat", wire.HeartbeatRequest(client_type=wire.PRODUCER), "probe")

    async def _probe(self, proxy: Proxy) -> None:
        """Probe an isolated proxy until it answers."""
        request = wire.HeartbeatRequest(client_type=wire.PRODUCER)
        while proxy.is_isolated:
            began_s = self._clock.monotonic_s()
            with suppress(BrokerError):
                await self.ask(proxy, "Heartbeat", request, "probe", timeout_ms=_PROBE_MS)
            took_s = min(self._clock.monotonic_s() - began_s, _PROBE_MS / 1000)  # more if this process was stopped
            await asyncio.sleep(max(_PROBE_EVERY_S, took_s * _PROBE_SHARE))

    async def close(self) -> None:
        """Close the connections."""
        while self._proxies:
            _, proxy = self._proxies.popitem()
            if proxy.probing is not None:
                proxy.probing.cancel()
                await asyncio.gather(proxy.probing, return_exceptions=True)
            await proxy.channel.close()


def a_client_id(number: int) -> str:
    """Return a client id in the format of the official clients: host, process, number, random suffix."""
    return f"{socket.gethostname()}@{os.getpid()}@{number}@{os.urandom(4).hex()}"


def _ssl(options: ClusterOptions) -> grpc.ChannelCredentials | None:
    if not options.tls and options.tls_ca is None:
        return None
    roots = None
    if options.tls_ca is not None:
        try:
            roots = options.tls_ca.read_bytes()
        except OSError as error:
            raise BrokerUnavailable(f"the certificates in {options.tls_ca} cannot be read: {error}") from error
    return grpc.ssl_channel_credentials(roots)
