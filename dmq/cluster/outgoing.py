"""Local queues of messages for a cluster: read by a consumer group of the daemon, finished once the cluster has them.

Leases of this group have no time limit: their holders are in this process, and the leases end with it. So a failure of
the cluster costs no attempt. After a crash, messages in flight are handed out again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Delivery
from broker_adapter.contracts.topics import retry_topic
from dmq.broker import EmbeddedBroker
from dmq.broker.deliveries import ForwardedMessage
from dmq.broker.groups import GroupQueue, GroupSubscription
from dmq.broker.handles import read_receipt
from dmq.broker.io import Place, look_at
from dmq.broker.topics import FORWARDER_GROUP
from dmq.store import Store
from dmq.store.schema.cell.border import Border, decode_border, encode_border
from dmq.store.schema.keys import META_BORDER, Family, bound_key, pack_u64, unpack_u64
from dmq.store.schema.messages.index import Receipt
from dmq.store.writer.operations import Delete, Emit, Put

_LEASE_MS = 100 * 366 * 86_400_000
_REDRIVEN = retry_topic(FORWARDER_GROUP)


class Doubt(Enum):
    """The unfinished messages that the cluster may have from earlier runs."""

    NOTHING = 0
    IN_FLIGHT = 1  # the last run crashed
    ALL = 2  # this store is a copy of theirs


class QueueState(NamedTuple):
    """The state of a queue at the start of this run, before any message of this run."""

    end: int
    bound: int | None  # messages below it may have been forwarded; None: all messages


class Forwards:
    """The forwarder's access to the local queues. The event loop owns it."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self._store_number = broker.store.identity.number
        self._names = broker.names
        self._catalog = broker.catalog
        self._commits = broker.commits
        self._subscriptions = broker.subscriptions
        self._deliveries = broker.deliveries
        self._reader = broker.reader

    async def open(self) -> Doubt:
        """Create the group, durable on return; return the doubt about earlier runs.

        ``Subscriptions`` determines the start of the group in a topic that other groups have already read.
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
            return Doubt.ALL  # also in the next run, unless this one settles it
        if not left.is_settled:
            return Doubt.IN_FLIGHT
        await self._commits.commit([self._border(is_settled=False)])
        return Doubt.NOTHING

    async def settle(self) -> None:
        """Record that no message is in doubt, durable on return. No message is sent after it."""
        await self._commits.commit([self._border(is_settled=True)])

    def _border(self, *, is_settled: bool) -> Put:
        return Put(Family.META, META_BORDER, encode_border(Border(self._store_number, is_settled)))

    def topics(self) -> list[str]:
        """Return the topics whose messages are forwarded."""
        return [name for name in self._names.topics if self._names.leaves(name)]

    def topic_of(self, topic_id: int) -> str:
        """Return the topic of an extended queue if its messages are forwarded, else the empty string."""
        names = self._names
        found = names.topics_by_id.get(topic_id)
        if found is None:  # a lane that was removed with its topic
            return ""
        if found.name == _REDRIVEN:  # redriven letters
            of_topic = next(key[1] for key, lane in names.lanes.items() if lane.topic_id == topic_id)
            found = names.topics_by_id[of_topic]
        return found.name if names.leaves(found.name) else ""

    async def look_at(self, topic: str) -> None:
        """Load the unfinished messages of a topic; raise ``Refused`` if it does not exist: the call creates none."""
        self._catalog.known_topic(topic)
        await self._subscriptions.subscribe(FORWARDER_GROUP, topic)

    def places(self, topic: str) -> list[Place]:
        """Return the queues of a topic, including the queue of its redriven dead letters."""
        known = self._names.topics.get(topic)
        if known is None:
            return []
        lane = self._names.lanes.get((self._names.forwarder_id, known.topic_id))
        queues = [Place(known.topic_id, number) for number in range(known.queues)]
        return queues if lane is None else [*queues, Place(lane.topic_id, 0)]

    async def states(self, topics: Iterable[str]) -> dict[Place, QueueState]:
        """Return the state of each queue of these topics on disk."""
        places = [place for topic in topics for place in self.places(topic)]

        def read(store: Store) -> dict[Place, QueueState]:
            bounds = store.get_many(Family.META, [bound_key(*place) for place in places])
            return {
                place: QueueState(store.queue_end(*place), None if bound is None else unpack_u64(bound))
                for place, bound in zip(places, bounds, strict=True)
            }

        return await self._reader.run(read)

    def bound(self, bounds: Mapping[Place, int | None]) -> asyncio.Future[list[Receipt]]:
        """Store the offset below which messages of a queue may have been forwarded; ``None`` removes the bound.

        The bound applies once the result is ``durable``. Raises if the store is closing or busy.
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
        """Return the offset of each queue below which all messages are finished."""
        return {Place(each.topic_id, each.queue_id): each.floor for each in self._queues(topic)}

    @staticmethod
    def place_of(delivery: Delivery) -> Place:
        """Return the queue of a delivery."""
        receipt = read_receipt(delivery.receipt_handle)
        return Place(receipt.topic_id, receipt.queue_id)

    def waiting(self, topic: str) -> int:
        """Return the number of unfinished messages of a topic; 0 for a topic that was not loaded."""
        return sum(each.end - each.finished_count for each in self._queues(topic))

    def has_more(self, topic: str) -> bool:
        """Return True if a topic has unfinished messages, as far as it was loaded."""
        return any(each.floor < each.end for each in self._queues(topic))

    async def receive(self, topic: str, *, batch_max: int, wait_ms: int) -> Sequence[Delivery]:
        """Receive as ``PopBroker.receive``, from any queue; raise ``Refused`` for a topic that does not exist."""
        self._catalog.known_topic(topic)
        return await self._deliveries.receive(
            FORWARDER_GROUP, Subscription(topic), batch_max=batch_max, invisible_ms=_LEASE_MS, wait_ms=wait_ms
        )

    def held(self, topic: str, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Return the deliveries that are still to be sent; those removed with their topic are omitted."""
        found = self._found(topic)
        if found is None or found.is_retired:
            return []
        return [each for each in deliveries if self._deliveries.is_held(found, each.receipt_handle)]

    async def forwarded(self, topic: str, sent: Sequence[ForwardedMessage]) -> None:
        """Finish forwarded messages, durable on return. Messages that were removed meanwhile, with their topic for
        example, are skipped.
        """
        for result in await self._deliveries.forwarded(FORWARDER_GROUP, topic, sent):
            if result is not None and not (isinstance(result, Refused) and result.rule is Rule.RECEIPT_HANDLE):
                raise result

    async def refused(self, topic: str, delivery: Delivery, code: int, why: str) -> None:
        """Put a message that the cluster refuses for good into the group's dead-letter queue, durable on return."""
        try:
            await self._deliveries.refused(FORWARDER_GROUP, topic, delivery.receipt_handle, code, why)
        except Refused as refused:
            if refused.rule is not Rule.RECEIPT_HANDLE:
                raise

    def in_doubt(self, topic: str, deliveries: Sequence[Delivery], times: int) -> asyncio.Future[list[Receipt]] | None:
        """Write to the trail that the cluster may have these; the caller sends them again only once it is ``durable``.

        ``None`` if there is no event to write. Raises if the store is closing.
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
        """Return once the submitted operations are on disk."""
        await self._commits.committed(done)

    def _queues(self, topic: str) -> Sequence[GroupQueue]:
        found = self._found(topic)
        return found.all_queues if found is not None else ()

    def _found(self, topic: str) -> GroupSubscription | None:
        known = self._names.topics.get(topic)
        return self._subscriptions.get(self._names.forwarder_id, known.topic_id) if known is not None else None
