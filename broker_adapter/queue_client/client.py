"""Clients of a cluster by its address: producers, and consumers that divide the queues of their topics.

    broker = await connect("rocketmq-remoting://127.0.0.1:9876", environment="dev1", environments=["dev1", "dev2"])
    producer = await broker.producer("orders-producer")

    @broker.consumer("orders-group", {"orders": "created || paid"})
    async def handle(batch): ...

The part after the scheme depends on the kind:

- ``rocketmq-remoting://``: name servers of Apache RocketMQ 4 or 5
- ``rocketmq://``: gRPC proxies of RocketMQ 5, or a daemon
- ``embedded:``: directory of a broker in this process

The kinds are entry points of the group ``rock_dmq.brokers``.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from importlib.metadata import entry_points
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

from broker_adapter.contracts.classic import ClassicBroker, Filter
from broker_adapter.queue_client.balance import Environments, OwnEnvironment
from broker_adapter.queue_client.consumer import Consumer, ConsumerOptions, Handler, by_handler
from broker_adapter.queue_client.membership import Intervals, Membership
from broker_adapter.queue_client.producer import Checker, Producer, ProducerOptions
from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.log import LibraryLog

_GROUP = "rock_dmq.brokers"
_EMBEDDED = Intervals(heartbeat_ms=5_000)  # as equeue: calls to a broker in this process are cheap
_WITHOUT_QUEUES = frozenset({"rocketmq"})  # kinds of brokers that assign messages instead of queues
_CONSUMER, _PRODUCER = ConsumerOptions(), ProducerOptions()

_log = LibraryLog("broker_adapter")

Opener = Callable[..., Awaitable[ClassicBroker]]


class RunningConsumer(Protocol):
    """Consumer of any kind of broker."""

    group: str

    async def start(self) -> None:
        """Start consuming."""
        ...

    async def close(self) -> None:
        """Stop receiving messages, and wait for running handlers."""
        ...


@runtime_checkable
class ConsumerMaker(Protocol):
    """Broker that creates its own consumers because their members do not divide its queues."""

    def consumer(
        self, group: str, filters: Mapping[str, str | Filter], handler: Handler, options: ConsumerOptions
    ) -> RunningConsumer:
        """Return a consumer that is not started."""
        ...


class Client(AbstractAsyncContextManager["Client"]):
    """Client of a cluster. Belongs to one event loop. Call ``close``, or use it as a context manager."""

    def __init__(
        self,
        broker: ClassicBroker,
        intervals: Intervals | None = None,
        environments: Environments | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock
        self._membership = Membership(broker, intervals or Intervals())
        self._environments = environments
        self._environment = environments.of_client(broker.client_id) or "" if environments else ""
        self._starting: set[asyncio.Task[None]] = set()
        self._producers: list[Producer] = []
        self._consumers: list[Any] = []  # running ones, of either kind

    @property
    def client_id(self) -> str:
        """Id of this client in the cluster."""
        return self._membership.client_id

    async def producer(
        self,
        group: str,
        *,
        fault_avoidance: bool = False,
        options: ProducerOptions = _PRODUCER,
        on_check: Checker | None = None,
    ) -> Producer:
        """Return a started producer; closing this client closes it."""
        options = replace(
            options,
            fault_avoidance=fault_avoidance or options.fault_avoidance,
            environment=self._environment,
            environments=self._environments,
        )
        producer = Producer(self._membership, group, options, on_check=on_check, clock=self._clock)
        await producer.start()
        self._producers.append(producer)
        return producer

    def consumer(
        self, group: str, topics: Mapping[str, str | Filter], options: ConsumerOptions = _CONSUMER
    ) -> Callable[[Handler], RunningConsumer]:
        """Return a decorator that turns a handler into a consumer. It starts at once and ends with this client.

        In an environment its group is ``<group>|<environment>``, with separate retry and dead-letter topics. So delayed
        messages, retries and dead letters stay in their environment.
        """
        if self._environments is not None:
            group = f"{group}|{self._environment}"
            options = replace(options, strategy=OwnEnvironment(environments=self._environments, inner=options.strategy))

        def begin(handler: Handler) -> RunningConsumer:
            broker = self._membership.broker
            consumer: RunningConsumer = (
                broker.consumer(group, topics, handler, options)
                if isinstance(broker, ConsumerMaker)
                else Consumer(self._membership, group, topics, by_handler(handler), options, self._clock)
            )
            self._consumers.append(consumer)
            task = asyncio.ensure_future(consumer.start())
            self._starting.add(task)
            task.add_done_callback(self._started)
            return consumer

        return begin

    def _started(self, task: asyncio.Task[None]) -> None:
        self._starting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("consumer_start_failed", error=f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """Close consumers, producers and connections, in this order."""
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(each.close() for each in self._consumers))
        await asyncio.gather(*(each.close() for each in self._producers))
        await self._membership.close()
        await self._membership.broker.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def connect(
    address: str,
    *,
    environment: str = "",
    environments: Sequence[str] = (),
    queues_each: int = 1,
    **options: Any,  # noqa: ANN401 - those of the broker's kind
) -> Client:
    """Return a client of the cluster at ``address``; the client connects on first use.

    ``environment`` is the environment of this client, one of ``environments``. All clients of the cluster use the same
    list. Each environment has ``queues_each`` queues of every topic at every broker. ``options`` depend on the kind of
    broker: ``access_key``, ``secret_key``, ``tls``, ``tls_ca``. ``ValueError`` for an unknown kind of address, and for
    an environment that is not in the list.
    """
    scheme, _, rest = address.partition(":")
    known = {each.name: each for each in entry_points(group=_GROUP)}
    if scheme not in known or not rest.strip("/"):
        kinds = ", ".join(sorted(known)) or "none is installed"
        raise ValueError(f"the address of a broker begins with its kind and a colon ({kinds}); got {address!r}")
    if scheme in _WITHOUT_QUEUES and (environment or environments):
        raise ValueError(f"{scheme} does not support environments")
    shared = Environments(names=tuple(environments), queues_each=queues_each) if environments else None
    if environment and (shared is None or environment not in shared.names):
        raise ValueError(f"environment {environment!r} is not in the list of environments {list(environments)!r}")
    if shared is not None and not environment:
        raise ValueError(f"environments requires environment; choose one of {list(environments)!r}")
    opener: Opener = known[scheme].load()
    broker = await opener(rest.removeprefix("//"), client_id=_client_id(environment), **options)
    return Client(broker, _EMBEDDED if scheme == "embedded" else None, shared)


def _client_id(environment: str) -> str:
    name = f"{socket.gethostname()}@{os.getpid()}#{secrets.token_hex(4)}"
    return f"{name}@{environment}" if environment else name
