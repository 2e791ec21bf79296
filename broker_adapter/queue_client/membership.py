"""Membership of one client in a cluster: routes of topics, its groups, and heartbeats."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from broker_adapter.contracts.classic import ClassicBroker, MemberState, Presence, Route, TransactionCheck
from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable, Refused, Rule
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.runtime.log import LibraryLog

_log = LibraryLog("broker_adapter.queue_client.membership")


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Intervals of heartbeats and route refreshes. Defaults of RocketMQ's clients."""

    heartbeat_ms: int = 30_000
    route_ms: int = 30_000


class Member(Protocol):
    """Consumer of a group. Called on the event loop; must not block."""

    def members_changed(self) -> None:
        """Handle a change of the group's members."""
        ...

    def go_on_at(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Continue at these offsets after an operator's reset."""
        ...

    def state(self) -> MemberState:
        """Return the current state, including the assigned queues."""
        ...


class GroupTaken(ValueError):
    """This client already has a producer or consumer of the group."""


class Membership:
    """Routes, refreshed while they are in use, and heartbeats. Belongs to one event loop; must be closed with
    ``close``.

    A route that cannot be refreshed stays in use: its brokers may still work. Concurrent callers for one topic share
    one request.
    """

    def __init__(self, broker: ClassicBroker, intervals: Intervals = Intervals()) -> None:
        self.broker = broker
        self._intervals = intervals
        self._routes: dict[str, Route] = {}
        self._asking: dict[str, asyncio.Task[Route]] = {}
        self._producers: dict[str, Callable[[TransactionCheck], None]] = {}
        self._consumers: dict[str, tuple[Presence, Member]] = {}
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        broker.attach(self)

    @property
    def client_id(self) -> str:
        return self.broker.client_id

    # -- routes ----------------------------------------------------------------------------------------

    async def route(self, topic: str) -> Route:
        """Return the cached route of a topic, or request it. ``Refused(TOPIC_UNKNOWN)``, ``BrokerUnavailable``."""
        self._run()
        return self._routes.get(topic) or await self.refresh(topic)

    async def refresh(self, topic: str) -> Route:
        """Request the current route of a topic. Errors as ``route``; the cached route of a deleted topic is removed."""
        asking = self._asking.get(topic)
        if asking is None:
            asking = self._asking[topic] = asyncio.ensure_future(self._ask(topic))
            asking.add_done_callback(lambda task: self._asked(topic, task))
        return await asyncio.shield(asking)

    async def _ask(self, topic: str) -> Route:
        try:
            route = await self.broker.route(topic)
        except Refused as refused:
            if refused.rule is Rule.TOPIC_UNKNOWN:
                self._routes.pop(topic, None)
            raise
        known = {queue.broker for each in self._routes.values() for queue in each.readable + each.writable}
        self._routes[topic] = route
        if {queue.broker for queue in route.readable + route.writable} - known and self._consumers:
            await self.beat()  # a broker refuses pulls before the first heartbeat of the group
        return route

    def _asked(self, topic: str, task: asyncio.Task[Route]) -> None:
        self._asking.pop(topic, None)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: all waiters may be cancelled

    # -- groups ----------------------------------------------------------------------------------------

    async def add_producer(self, group: str, on_check: Callable[[TransactionCheck], None]) -> None:
        """Join a producer group: brokers may then send transaction checks for it."""
        if group in self._producers:
            raise GroupTaken(f"this client has a producer of group {group!r} already; use it")
        self._producers[group] = on_check
        self._run()
        await self.beat()

    async def add_consumer(self, presence: Presence, member: Member) -> None:
        """Join a consumer group; ``member`` receives the notifications of brokers for the group."""
        if presence.group in self._consumers:
            raise GroupTaken(
                f"this client has a consumer of group {presence.group!r} already; one consumer can have many topics"
            )
        self._consumers[presence.group] = (presence, member)
        self._run()
        await self.beat()

    async def change_consumer(self, presence: Presence) -> None:
        """Report changed subscriptions of a consumer in its group."""
        _, member = self._consumers[presence.group]
        self._consumers[presence.group] = (presence, member)
        await self.beat()

    async def remove_producer(self, group: str) -> None:
        """Leave a producer group."""
        if self._producers.pop(group, None) is not None:
            with suppress(BrokerError):
                await self.broker.leave(producer=group)

    async def remove_consumer(self, group: str) -> None:
        """Leave a consumer group; its other members then rebalance."""
        if self._consumers.pop(group, None) is not None:
            with suppress(BrokerError):
                await self.broker.leave(consumer=group)

    def members_changed(self, group: str) -> None:
        """Forward a broker's notification to the member."""
        if group in self._consumers:
            self._consumers[group][1].members_changed()

    def offsets_reset(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        """Forward an operator's reset to the member."""
        if group in self._consumers:
            self._consumers[group][1].go_on_at(offsets)

    def state_of(self, group: str) -> MemberState | None:
        """Return the state of the member for an operator, or ``None`` without a consumer of the group."""
        return self._consumers[group][1].state() if group in self._consumers else None

    def check(self, check: TransactionCheck) -> None:
        """Forward a transaction check to the producer of its group."""
        on_check = self._producers.get(check.group)
        if on_check is not None:
            on_check(check)

    # -- in the background ----------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop heartbeats and refreshes. Producers and consumers must leave their groups first."""
        tasks, self._tasks = (*self._tasks, *self._asking.values()), ()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self) -> None:
        if not self._tasks:
            self._tasks = (
                asyncio.ensure_future(self._each(self._intervals.heartbeat_ms, self.beat)),
                asyncio.ensure_future(self._each(self._intervals.route_ms, self._refresh_all)),
            )

    async def _each(self, interval_ms: int, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(interval_ms / 1000)
            try:
                await act()
            except Exception as error:  # noqa: BLE001 - brokers drop a client without heartbeats
                _log.error("background_work_failed", client_id=self.client_id, error=f"{type(error).__name__}: {error}")

    async def beat(self) -> None:
        """Send a heartbeat to all brokers at once. Failures are logged, and the next heartbeat retries."""
        if not self._producers and not self._consumers:
            return
        try:
            await self.broker.heartbeat(list(self._producers), [presence for presence, _ in self._consumers.values()])
        except BrokerError as error:
            _log.warning("heartbeat_failed", client_id=self.client_id, error=str(error))

    async def _refresh_all(self) -> None:
        for topic in list(self._routes):
            try:
                await self.refresh(topic)
            except BrokerUnavailable as error:
                _log.warning("route_refresh_failed", topic=topic, error=str(error))
            except BrokerError as error:
                _log.error("route_refused", topic=topic, error=str(error))
