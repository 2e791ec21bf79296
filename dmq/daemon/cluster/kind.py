"""Kind of server at a configured address of a cluster, determined by a call in both protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from enum import Enum

from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable, Refused, Rule
from broker_adapter.remoting import Operation, RemotingCalls, Result
from broker_adapter.rocketmq import Proxies
from broker_adapter.runtime.clock import Clock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.config.settings import DaemonConfig
from dmq.daemon.cluster.options import grpc_options, remoting_options

TIMEOUT_MS = 3_000  # of each of the two calls to an address


class ServerKind(Enum):
    """Kind of server that answered, as shown to operators."""

    PROXY = "a RocketMQ proxy"
    NAME_SERVER = "a RocketMQ name server"
    BROKER = "a RocketMQ broker"
    OTHER = "a gRPC server, not a RocketMQ proxy"
    NONE = "no RocketMQ server"


class ClusterRefused(BrokerError):
    """The server answers and refuses the daemon's access key."""


_WANTED = {
    "rocketmq": (ServerKind.PROXY, "endpoints needs proxies (usually port 8081)"),
    "rocketmq-remoting": (ServerKind.NAME_SERVER, "namesrv needs name servers (usually port 9876)"),
}


async def kind_of(address: str, config: DaemonConfig, clock: Clock) -> ServerKind:
    """Return the kind of server at ``address`` within about ``TIMEOUT_MS``.

    Raise ``ClusterRefused`` if it refuses the daemon's access key.
    """
    classic, grpc = await asyncio.gather(_classic(address, config), _grpc(address, config, clock))
    return grpc if classic is ServerKind.NONE else classic


def misplaced(found: ServerKind, broker: str) -> str:
    """Return the reason why a daemon with this ``broker`` setting cannot use the server; empty if it can."""
    wanted, advice = _WANTED[broker]
    return "" if found is wanted else f"it is {found.value}: {advice}"


async def _classic(address: str, config: DaemonConfig) -> ServerKind:
    calls = RemotingCalls(remoting_options(config, names=(address,), timeout_ms=TIMEOUT_MS))
    try:
        answer = await calls.ask(address, Operation.CLUSTER, {}, accepted=None)
    except BrokerError:  # no answer, or bytes that are not a frame
        return ServerKind.NONE
    finally:
        await calls.close()
    return ServerKind.NAME_SERVER if answer.code == Result.OK else ServerKind.BROKER


async def _grpc(address: str, config: DaemonConfig, clock: Clock) -> ServerKind:
    proxies = Proxies(grpc_options(config, endpoints=(address,), timeout_ms=TIMEOUT_MS), clock)
    request = wire.HeartbeatRequest(client_type=wire.PRODUCER)
    try:
        await proxies.ask(proxies.at(address), "Heartbeat", request, "probe")
    except Refused as refused:
        if refused.rule is Rule.UNSUPPORTED:
            return ServerKind.OTHER
        raise ClusterRefused(f"{address} refuses: {refused}") from refused
    except BrokerUnavailable:
        return ServerKind.NONE
    finally:
        await proxies.close()
    return ServerKind.PROXY


class KindWatch:
    """Watch that determines the kind of each configured address that does not answer. Owned by the event loop."""

    def __init__(self, config: DaemonConfig, clock: Clock, on_found: Callable[[str, str], None]) -> None:
        self.misplaced: dict[str, str] = {}  # reason why an address is unusable, by address
        self._config, self._clock, self._on_found = config, clock, on_found
        self._asking: dict[str, asyncio.Task[None]] = {}

    def ask(self, address: str) -> None:
        """Start to determine the kind of server at an address that gives no valid answer; the result follows later."""
        if address not in self._asking:
            self._asking[address] = asyncio.get_running_loop().create_task(self._ask(address))

    def answers(self, address: str) -> None:
        """Record that a server gives valid answers."""
        self.misplaced.pop(address, None)

    async def close(self) -> None:
        """Cancel running queries."""
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)

    async def _ask(self, address: str) -> None:
        try:
            with suppress(BrokerError):
                found = await kind_of(address, self._config, self._clock)
                why = misplaced(found, self._config.broker)
                if why and found is not ServerKind.NONE:
                    self.misplaced[address] = why
                    self._on_found(address, why)
        finally:
            del self._asking[address]
