"""What leaves for a cluster: read by one group of the daemon's own, and finished once the cluster has it.

Leases of this group never end by time: who holds them is in this process, and they end with it. So nothing that
happens to the cluster costs an attempt. After a kill what was on its way is handed out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from broker_adapter.adapter import Subscription as Wanted
from broker_adapter.errors import BrokerError, Refused, Rule
from broker_adapter.message import Delivery
from broker_adapter.topics import DEAD_LETTER_PREFIX, RETRY_PREFIX, retry_topic
from dmq.audit.events import subscribed_event
from dmq.embedded.broker import EmbeddedBroker
from dmq.embedded.commits import look_at
from dmq.embedded.deliveries import Forwarded
from dmq.embedded.group_queue import GroupQueue
from dmq.embedded.names import FORWARDER_GROUP, Topic
from dmq.embedded.queue_log import Place
from dmq.embedded.removable import progress
from dmq.embedded.subscription import Subscription
from dmq.store.ops import Emit
from dmq.store.store import Store

_LEASE_MS = 100 * 366 * 86_400_000
_REDRIVEN = retry_topic(FORWARDER_GROUP)
_LOCAL = (DEAD_LETTER_PREFIX, RETRY_PREFIX)


class Forwards:
    """The forwarder's side of the local queues. Belongs to the event loop."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self._names = broker.names
        self._catalog = broker.catalog
        self._commits = broker.commits
        self._subscriptions = broker.subscriptions
        self._deliveries = broker.deliveries
        self._reader = broker.reader
        self._progress = broker.procedures.progress

    async def open(self) -> None:
        """Make the group, durable on return.

        Of topics that other groups read here before, it begins where the slowest of them is: what one of them has not
        finished goes to the cluster, and what all have does not.
        """
        names = self._names
        if names.forwarder_id:
            return
        first: list[tuple[Topic, list[int]]] = []
        for topic in [names.topics[name] for name in self.topics()]:
            readers = await self._progress.readers_of(topic)
            if readers:
                floors = partial(_floors, topic=topic, groups=[group.group_id for group in readers])
                first.append((topic, await self._reader.run(floors)))
        group, ops = names.plan_group(FORWARDER_GROUP, self._commits.store.clock.now_ms())
        for topic, floors_of in first:
            for queue_id, floor in enumerate(floors_of):
                event = subscribed_event(topic.topic_id, group.group_id, queue_id, floor)
                queue = GroupQueue(group.group_id, topic.topic_id, queue_id)
                ops += [*queue.start_at(floor), Emit(event, floor)]
        done = self._commits.submit(ops)
        names.add_group(group)
        await self._commits.committed(done)

    def topics(self) -> list[str]:
        """Return the topics whose messages leave."""
        return [name for name in self._names.topics if not name.startswith(_LOCAL)]

    def topic_of(self, topic_id: int) -> str:
        """Return the topic of a queue that has grown, if its messages leave, else nothing."""
        names = self._names
        found = names.topics_by_id.get(topic_id)
        if found is None:  # a lane that went with its topic
            return ""
        if found.name == _REDRIVEN:  # letters that are sent again
            of_topic = next(key[1] for key, lane in names.lanes.items() if lane.topic_id == topic_id)
            return names.topics_by_id[of_topic].name
        return "" if found.name.startswith(_LOCAL) else found.name

    async def ends(self, topic: str) -> dict[int, int]:
        """Return the end of each queue of a topic, now; ``Refused`` of one that is gone: none is made by asking."""
        self._catalog.known_topic(topic)
        found = await self._subscriptions.subscribe(FORWARDER_GROUP, topic)
        return {queue.queue_id: queue.end for queue in found.queues}

    def waiting(self, topic: str) -> int:
        """Return how many messages of a topic are here and not finished; those of a topic that was not looked at: 0."""
        found = self._found(topic)
        return sum(each.end - each.finished_count for each in found.all_queues) if found is not None else 0

    def has_more(self, topic: str) -> bool:
        """Say whether a topic holds anything that is not finished, as far as it was looked at."""
        found = self._found(topic)
        return found is not None and any(each.floor < each.end for each in found.all_queues)

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

    def in_doubt(self, topic: str, deliveries: Sequence[Delivery], times: int) -> None:
        """Leave in the trail that the cluster may have these, which it gets again. Nobody waits for it."""
        found = self._found(topic)
        if found is None:
            return
        told = [self._deliveries.in_doubt(found, each.receipt_handle, times) for each in deliveries]
        events: list[Emit] = [each for each in told if each is not None]
        if events:
            try:
                self._commits.submit(events).add_done_callback(look_at)
            except BrokerError:
                return  # the store is ending: what is in doubt is found out by the next run

    def _found(self, topic: str) -> Subscription | None:
        known = self._names.topics.get(topic)
        return self._subscriptions.get(self._names.forwarder_id, known.topic_id) if known is not None else None


def _floors(store: Store, topic: Topic, groups: Sequence[int]) -> list[int]:
    """Return where the slowest of some groups is, for each queue; for the reading thread."""
    found = []
    for queue_id in range(topic.queues):
        place = Place(topic.topic_id, queue_id)
        known = [each.floor for group_id in groups if (each := progress(store, group_id, place)) is not None]
        found.append(min(known, default=0))
    return found
