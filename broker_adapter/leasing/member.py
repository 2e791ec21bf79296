"""Membership of this process in a consumer group.

It joins at the first receive, and leaves after a minute without one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.classic import Filter, Start
from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable, Refused, Rule
from broker_adapter.leasing.leases import ATTEMPTS_MAX, HeldDelivery, MemberLeases, Wanted
from broker_adapter.queue_client import Membership
from broker_adapter.queue_client.balance import WindowBounds
from broker_adapter.queue_client.consumer import Consumer, ConsumerOptions, DeliveryService, Work
from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.live_clients import LiveClients

_IDLE_MS = 60_000  # without a receive, until other members get the queues
_FILTER_MS = 60_000  # validity of an SQL filter for the whole group after a receive
# A long lease holds back the commit offset of its group, and so increases the repetitions after a crash. The
# large span keeps other consumers busy meanwhile; the count and the size bound the memory.
_BOUNDS = WindowBounds(count_max=512, bytes_max=2 * 1024 * 1024, span_max=20_000)
_FLUSH_MS = 1_000


class GroupMember:
    """Member of a consumer group. Belongs to one event loop; must be closed with ``close``."""

    def __init__(
        self,
        membership: Membership,
        group: str,
        clock: Clock,
        clients: LiveClients,
        *,
        run: str,
        numbers: Iterator[int],
        start: Start,
    ) -> None:
        """Store the parameters. ``run`` and ``numbers`` make the handles of all deliveries of all groups unique."""
        self.group = group
        self.leases: MemberLeases | None = None
        self._membership = membership
        self._clock = clock
        self._clients = clients
        self._run = run
        self._numbers = numbers
        self._start = start
        self._changing = asyncio.Lock()
        self._filters: dict[str, tuple[Filter, int]] = {}  # by topic, with the time of the last receive
        self._consumer: Consumer | None = None
        self._receives = 0

    async def receive(
        self, subscription: Subscription, *, batch_max: int, invisible_ms: int, wait_ms: int, renew_for: str
    ) -> Sequence[HeldDelivery]:
        """Lease messages of a topic. Raises the errors of the brokers if none of its queues can be consumed."""
        self._receives += 1
        try:
            return await self._receive(subscription, batch_max, invisible_ms, wait_ms, renew_for)
        finally:
            self._receives -= 1

    async def _receive(
        self, subscription: Subscription, batch_max: int, invisible_ms: int, wait_ms: int, renew_for: str
    ) -> Sequence[HeldDelivery]:
        topic = subscription.topic
        await self._membership.route(topic)  # refuse an unknown topic before any change
        wanted = Filter(subscription.sql, is_sql=True) if subscription.sql else Filter()
        async with self._changing:
            leases = await self._consume(topic, wanted)
        asked = Wanted(topic, subscription.tags, batch_max, invisible_ms, renew_for)
        found = await leases.receive(asked, wait_ms)
        if not found and self._consumer is not None and (error := self._consumer.trouble(topic)) is not None:
            raise error if isinstance(error, BrokerError) else BrokerUnavailable(str(error))
        return found

    @property
    def is_over(self) -> bool:
        """True if it has left its group, and no receive is about to start."""
        return self.leases is None and not self._receives and not self._changing.locked()

    def tick(self, *, looks: bool) -> bool:
        """End expired leases; return True after a minute without a receive, when the member should leave."""
        if self.leases is None:
            return False
        self.leases.end_due()
        if looks:
            self.leases.look_at_unwanted()
        return not self._receives and self.leases.idle_ms() > _IDLE_MS

    async def close(self, *, if_idle: bool = False) -> None:
        """Leave the group: another member redelivers leased messages.

        ``if_idle`` leaves it only if no receive has begun by then: it would be cancelled.
        """
        async with self._changing:
            if if_idle and self._receives:
                return
            consumer, self._consumer, self.leases = self._consumer, None, None
            if consumer is not None:
                await consumer.close()

    async def _consume(self, topic: str, wanted: Filter) -> MemberLeases:
        """Subscribe to the topic with a filter. Tags are filtered at delivery, SQL is filtered by brokers."""
        now_ms = self._clock.boot_ms()
        known, asked_ms = self._filters.get(topic, (wanted, now_ms))
        if known != wanted and now_ms - asked_ms < _FILTER_MS:
            why = f"group {self.group!r} filters topic {topic!r} otherwise now: all its consumers need the same filter"
            raise Refused(Rule.FILTER, why, value=wanted.expression, limit=known.expression)
        is_new = topic not in self._filters or known != wanted
        self._filters[topic] = (wanted, now_ms)
        if self._consumer is None or self.leases is None:
            options = ConsumerOptions(
                start=self._start, retries_max=ATTEMPTS_MAX - 1, bounds=_BOUNDS, flush_ms=_FLUSH_MS, close_ms=1
            )
            filters = {each: filtered for each, (filtered, _) in self._filters.items()}
            consumer = Consumer(self._membership, self.group, filters, self._serve, options, self._clock)
            await consumer.start()
            self._consumer = consumer
        elif is_new:
            await self._consumer.subscribe(topic, wanted)
        assert self.leases is not None, "the consumer has started"
        return self.leases

    def _serve(self, work: Work) -> DeliveryService:
        self.leases = MemberLeases(work, self._clock, self._clients, self._run, self._numbers)
        return self.leases
