"""What leaves for a cluster: read by one group of the daemon's own, and finished once the cluster has it.

Leases of this group never end by time: who holds them is in this process, and they end with it. So nothing that
happens to the cluster costs an attempt. After a kill what was on its way is handed out again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from broker_adapter.contracts.adapter import Subscription as Wanted
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Delivery
from broker_adapter.contracts.topics import retry_topic
from dmq.broker.broker import EmbeddedBroker
from dmq.broker.deliveries.deliveries import Forwarded
from dmq.broker.groups.group_queue import GroupQueue
from dmq.broker.groups.subscription import Subscription
from dmq.broker.handles.receipt_handle import read_handle
from dmq.broker.io.commits import look_at
from dmq.broker.io.queue_log import Place
from dmq.broker.topics.registry import FORWARDER_GROUP
from dmq.store.schema.border import Border, decode_border, encode_border
from dmq.store.schema.index import Receipt
from dmq.store.schema.keys import META_BORDER, Family, bound_key, pack_u64, unpack_u64
from dmq.store.store import Store
from dmq.store.writer.operations import Delete, Emit, Put

_LEASE_MS = 100 * 366 * 86_400_000
_REDRIVEN = retry_topic(FORWARDER_GROUP)


class Doubt(Enum):
    """What is not known of earlier runs: which of what is not finished the cluster may have."""

    NOTHING = 0
    IN_FLIGHT = 1  # the run before was killed
    ALL = 2  # this is a copy of the store that they ran on


class QueueState(NamedTuple):
    """What a queue held when this run began, before any message of this run."""

    end: int
    bound: int | None  # below it messages may have been forwarded; None: all of the queue


class Forwards:
    """The forwarder's side of the local queues. Belongs to the event loop."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self._store_number = broker.store.identity.number
        self._names = broker.names
        self._catalog = broker.catalog
        self._commits = broker.commits
        self._subscriptions = broker.subscriptions
        self._deliveries = broker.deliveries
        self._reader = broker.reader

    async def open(self) -> Doubt:
        """Make the group, durable on return; say what is not known of earlier runs.

        Where it begins in a topic that groups read here before, ``Subscriptions`` says.
        """
        names = self._names
        if names.forwarder_id:
            return await self._begin()
        group, ops = names.plan_group(FORWARDER_GROUP, self._commits.store.clock.now_ms())
        group = group._replace(stay=str(names.stay))
        done = self._commits.submit([*ops, *names.plan_settings(group), self._border(is_settled=False)])
        names.add_group(group)
        await self._commits.committed(done)
        return Doubt.NOTHING

    async def _begin(self) -> Doubt:
        (row,) = await self._reader.values(Family.META, [META_BORDER])
        left = decode_border(row) if row is not None else None
        if left is None or left.store_number != self._store_number:
            return Doubt.ALL  # and so in the next run, unless this one settles it
        if not left.is_settled:
            return Doubt.IN_FLIGHT
        await self._commits.commit([self._border(is_settled=False)])
        return Doubt.NOTHING

    async def settle(self) -> None:
        """Note that nothing is in doubt, durable on return: from here on nothing is sent."""
        await self._commits.commit([self._border(is_settled=True)])

    def _border(self, *, is_settled: bool) -> Put:
        return Put(Family.META, META_BORDER, encode_border(Border(self._store_number, is_settled)))

    def topics(self) -> list[str]:
        """Return the topics whose messages leave."""
        return [name for name in self._names.topics if self._names.leaves(name)]

    def topic_of(self, topic_id: int) -> str:
        """Return the topic of a queue that has grown, if its messages leave, else nothing."""
        names = self._names
        found = names.topics_by_id.get(topic_id)
        if found is None:  # a lane that went with its topic
            return ""
        if found.name == _REDRIVEN:  # letters that are sent again
            of_topic = next(key[1] for key, lane in names.lanes.items() if lane.topic_id == topic_id)
            found = names.topics_by_id[of_topic]
        return found.name if names.leaves(found.name) else ""

    async def look_at(self, topic: str) -> None:
        """Find out what of a topic is not finished; ``Refused`` if it is gone: none is made by asking."""
        self._catalog.known_topic(topic)
        await self._subscriptions.subscribe(FORWARDER_GROUP, topic)

    def places(self, topic: str) -> list[Place]:
        """Return the queues of a topic, the queue of its redriven dead letters included."""
        known = self._names.topics.get(topic)
        if known is None:
            return []
        lane = self._names.lanes.get((self._names.forwarder_id, known.topic_id))
        queues = [Place(known.topic_id, number) for number in range(known.queues)]
        return queues if lane is None else [*queues, Place(lane.topic_id, 0)]

    async def states(self, topics: Iterable[str]) -> dict[Place, QueueState]:
        """Return the state of each queue of these topics as it is on disk."""
        places = [place for topic in topics for place in self.places(topic)]

        def read(store: Store) -> dict[Place, QueueState]:
            bounds = store.get_many(Family.META, [bound_key(*place) for place in places])
            return {
                place: QueueState(store.queue_end(*place), None if bound is None else unpack_u64(bound))
                for place, bound in zip(places, bounds, strict=True)
            }

        return await self._reader.run(read)

    def bound(self, bounds: Mapping[Place, int | None]) -> asyncio.Future[list[Receipt]]:
        """Store below which offset messages of a queue may have been forwarded; ``None`` removes the bound.

        The bound holds once the result is ``durable``. Raises if the store is ending or busy.
        """
        done = self._commits.submit(
            [
                Delete(Family.META, bound_key(*place))
                if bound is None
                else Put(Family.META, bound_key(*place), pack_u64(bound))
                for place, bound in bounds.items()
            ]
        )
        done.add_done_callback(look_at)
        return done

    def floors(self, topic: str) -> dict[Place, int]:
        """Return below which offset each queue is finished."""
        return {Place(each.topic_id, each.queue_id): each.floor for each in self._queues(topic)}

    @staticmethod
    def place_of(delivery: Delivery) -> Place:
        """Return the queue that a delivery came from."""
        receipt = read_handle(delivery.receipt_handle)
        return Place(receipt.topic_id, receipt.queue_id)

    def waiting(self, topic: str) -> int:
        """Return how many messages of a topic are here and not finished; those of a topic that was not looked at: 0."""
        return sum(each.end - each.finished_count for each in self._queues(topic))

    def has_more(self, topic: str) -> bool:
        """Say whether a topic holds anything that is not finished, as far as it was looked at."""
        return any(each.floor < each.end for each in self._queues(topic))

    async def receive(self, topic: str, *, batch_max: int, wait_ms: int) -> Sequence[Delivery]:
        """As ``PopBroker.receive``, of any queue; ``Refused`` of a topic that is gone."""
        self._catalog.known_topic(topic)
        return await self._deliveries.receive(
            FORWARDER_GROUP, Wanted(topic), batch_max=batch_max, invisible_ms=_LEASE_MS, wait_ms=wait_ms
        )

    def held(self, topic: str, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Return those that are still to be sent: what was removed with its topic is not."""
        found = self._found(topic)
        if found is None or found.is_retired:
            return []
        return [each for each in deliveries if self._deliveries.is_held(found, each.receipt_handle)]

    async def forwarded(self, topic: str, sent: Sequence[Forwarded]) -> None:
        """Finish what the cluster has, durable on return. What left otherwise, with its topic say, is passed over."""
        for result in await self._deliveries.forwarded(FORWARDER_GROUP, topic, sent):
            if result is not None and not (isinstance(result, Refused) and result.rule is Rule.RECEIPT_HANDLE):
                raise result

    async def refused(self, topic: str, delivery: Delivery, code: int, why: str) -> None:
        """Put what the cluster refuses for good into the group's dead-letter queue, durable on return."""
        try:
            await self._deliveries.refused(FORWARDER_GROUP, topic, delivery.receipt_handle, code, why)
        except Refused as refused:
            if refused.rule is not Rule.RECEIPT_HANDLE:
                raise

    def in_doubt(self, topic: str, deliveries: Sequence[Delivery], times: int) -> asyncio.Future[list[Receipt]] | None:
        """Leave in the trail that the cluster may have these; whoever sends them again waits until it is ``durable``.

        ``None``: there is nothing to tell. Raises if the store is ending.
        """
        found = self._found(topic)
        if found is None:
            return None
        told = [self._deliveries.in_doubt(found, each.receipt_handle, times) for each in deliveries]
        events: list[Emit] = [each for each in told if each is not None]
        if not events:
            return None
        done = self._commits.submit(events)
        done.add_done_callback(look_at)
        return done

    async def durable(self, done: asyncio.Future[list[Receipt]]) -> None:
        """Return once what was submitted is on disk."""
        await self._commits.committed(done)

    def _queues(self, topic: str) -> Sequence[GroupQueue]:
        found = self._found(topic)
        return found.all_queues if found is not None else ()

    def _found(self, topic: str) -> Subscription | None:
        known = self._names.topics.get(topic)
        return self._subscriptions.get(self._names.forwarder_id, known.topic_id) if known is not None else None
