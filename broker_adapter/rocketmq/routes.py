"""Routes of topics: cached for a while, with one request for concurrent callers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from broker_adapter.contracts.adapter import TopicRoute
from broker_adapter.contracts.errors import BrokerUnavailable
from broker_adapter.contracts.message import MessageType
from broker_adapter.rocketmq.addresses import address_of, endpoints_of
from broker_adapter.rocketmq.codes import check
from broker_adapter.rocketmq.proxies import Proxies
from broker_adapter.runtime.clock import Clock
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import resource_of

_MASTER = 0
_TOPICS_MAX = 10_000
_READABLE = frozenset({wire.READ, wire.READ_WRITE})
_WRITABLE = frozenset({wire.WRITE, wire.READ_WRITE})


@dataclass(frozen=True, slots=True)
class RouteQueue:
    """Message queue of the cluster. Its number in a topic is its index in the route."""

    broker: str
    broker_queue_id: int
    address: str  # of the proxy that serves it
    is_readable: bool
    is_writable: bool


@dataclass(frozen=True, slots=True)
class ProxyRoute:
    """Route of a topic at one time."""

    topic: str
    queues: tuple[RouteQueue, ...]
    types: tuple[MessageType, ...]
    at_s: float  # monotonic

    @property
    def as_topic_route(self) -> TopicRoute:
        """The route in the form of the broker contract."""
        return TopicRoute(self.topic, len(self.queues), self.types)

    def addresses(self) -> list[str]:
        """Return the addresses of all proxies in the route."""
        return list(dict.fromkeys(each.address for each in self.queues))

    def writable(self) -> list[str]:
        """Return the addresses of proxies with writable queues."""
        return list(dict.fromkeys(each.address for each in self.queues if each.is_writable))

    def readable(self) -> list[str]:
        """Return the addresses of proxies with readable queues."""
        return list(dict.fromkeys(each.address for each in self.queues if each.is_readable))

    def number_of(self, address: str, broker_queue_id: int) -> int:
        """Return the number of a queue, or -1 if it is not in the route."""
        for number, queue in enumerate(self.queues):
            if queue.address == address and queue.broker_queue_id == broker_queue_id:
                return number
        return -1


def place_of_message_group(message_group: str, addresses: Iterable[str]) -> str:
    """Return the proxy of a message group by rendezvous hashing: the one with the highest hash.

    A removed proxy only moves its own message groups. A new proxy only takes over some groups.
    """

    def weight(address: str) -> bytes:
        return blake2b(f"{address} {message_group}".encode(), digest_size=8).digest()

    return max(addresses, key=weight)


class Routes:
    """Routes of all topics in use. A route that cannot be refreshed stays in use: its proxies may still work."""

    def __init__(self, proxies: Proxies, clock: Clock, client_id: str) -> None:
        self._proxies = proxies
        self._clock = clock
        self._client_id = client_id
        self._routes: dict[str, ProxyRoute] = {}
        self._asking: dict[str, asyncio.Task[ProxyRoute]] = {}

    async def of(self, topic: str) -> ProxyRoute:
        """Return a route; ``Refused(TOPIC_UNKNOWN)``, ``BrokerUnavailable``."""
        known = self._routes.get(topic)
        if known is not None and (self._clock.monotonic_s() - known.at_s) * 1000 < self._proxies.options.route_ms:
            return known
        asking = self._asking.get(topic)
        if asking is None:
            asking = self._asking[topic] = asyncio.ensure_future(self._ask(topic))
            asking.add_done_callback(lambda task: self._asked(topic, task))
        try:
            return await asyncio.shield(asking)
        except BrokerUnavailable:
            if known is None:
                raise
            return known

    def known(self, topic: str) -> ProxyRoute | None:
        """Return the last route at any age, or ``None`` if there was none."""
        return self._routes.get(topic)

    def forget(self, topic: str) -> None:
        """Remove a wrong route; the next call requests a new one."""
        self._routes.pop(topic, None)

    def _asked(self, topic: str, task: asyncio.Task[ProxyRoute]) -> None:
        self._asking.pop(topic, None)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: all waiters may be cancelled

    async def _ask(self, topic: str) -> ProxyRoute:
        error: BrokerUnavailable | None = None
        for _ in self._proxies.options.endpoints:
            proxy = self._proxies.choose()
            request = wire.QueryRouteRequest(topic=resource_of(topic), endpoints=endpoints_of(proxy.address))
            try:
                answer = await self._proxies.ask(proxy, "QueryRoute", request, self._client_id)
                check(answer.status, proxy.address)
            except BrokerUnavailable as failure:
                error = failure
                continue
            route = self._read(topic, answer, proxy.address)
            if len(self._routes) >= _TOPICS_MAX:
                self._routes.pop(next(iter(self._routes)))
            self._routes[topic] = route
            return route
        assert error is not None
        raise error

    def _read(self, topic: str, answer: wire.QueryRouteResponse, asked: str) -> ProxyRoute:
        queues = [
            RouteQueue(
                each.broker.name,
                each.id,
                address_of(each.broker.endpoints) or asked,
                each.permission in _READABLE,
                each.permission in _WRITABLE,
            )
            for each in answer.message_queues
            if each.broker.id == _MASTER
        ]
        if not queues:
            raise BrokerUnavailable(f"{asked} knows no master broker for topic {topic}")
        named = {int(number) for each in answer.message_queues for number in each.accept_message_types}
        types = tuple(each for each in MessageType if each.value in named) or tuple(MessageType)
        ordered = tuple(sorted(queues, key=lambda each: (each.broker, each.broker_queue_id)))
        return ProxyRoute(topic, ordered, types, self._clock.monotonic_s())
