"""What leaves for a cluster: read by one group of the daemon's own, and finished once the cluster has it.

Leases of this group never end by time: who holds them is in this process, and they end with it. So nothing that
happens to the cluster costs an attempt. After a kill what was on its way is handed out again.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker_adapter.adapter import Subscription as Wanted
from broker_adapter.errors import BrokerError, Refused, Rule
from broker_adapter.message import Delivery
from broker_adapter.topics import DEAD_LETTER_PREFIX, RETRY_PREFIX, retry_topic
from dmq.embedded.catalog import Catalog
from dmq.embedded.commits import Commits, look_at
from dmq.embedded.deliveries import Deliveries, Forwarded
from dmq.embedded.names import FORWARDER_GROUP
from dmq.embedded.subscription import Subscription
from dmq.embedded.subscriptions import Subscriptions
from dmq.store.ops import Emit

_LEASE_MS = 100 * 366 * 86_400_000
_REDRIVEN = retry_topic(FORWARDER_GROUP)
_LOCAL = (DEAD_LETTER_PREFIX, RETRY_PREFIX)


class Forwards:
    """The forwarder's side of the local queues. Belongs to the event loop."""

    def __init__(
        self, catalog: Catalog, commits: Commits, *, subscriptions: Subscriptions, deliveries: Deliveries
    ) -> None:
        self._catalog = catalog
        self._names = catalog.names
        self._commits = commits
        self._subscriptions = subscriptions
        self._deliveries = deliveries

    async def open(self) -> None:
        """Make the group, durable on return."""
        if not self._names.forwarder_id:
            await self._catalog.make_group(FORWARDER_GROUP)

    def topics(self) -> list[str]:
        """Return the topics whose messages leave."""
        return [name for name in self._names.topics if not name.startswith(_LOCAL)]

    def topic_of(self, topic_id: int) -> str:
        """Return the topic of a queue that has grown, if its messages leave, else nothing."""
        names = self._names
        found = names.topics_by_id[topic_id]
        if found.name == _REDRIVEN:  # letters that are sent again
            of_topic = next(key[1] for key, lane in names.lanes.items() if lane.topic_id == topic_id)
            return names.topics_by_id[of_topic].name
        return "" if found.name.startswith(_LOCAL) else found.name

    async def ends(self, topic: str) -> dict[int, int]:
        """Return the end of each queue of a topic, now."""
        found = await self._subscriptions.subscribe(FORWARDER_GROUP, topic)
        return {queue.queue_id: queue.end for queue in found.queues}

    def waiting(self, topic: str) -> int:
        """Return how many messages of a topic are here and not finished; those of a topic that was not looked at: 0."""
        found = self._found(topic)
        return sum(each.end - each.finished_count for each in found.all_queues) if found is not None else 0

    async def receive(self, topic: str, *, batch_max: int, wait_ms: int) -> Sequence[Delivery]:
        """As ``PopBroker.receive``, of any queue."""
        return await self._deliveries.receive(
            FORWARDER_GROUP, Wanted(topic), batch_max=batch_max, invisible_ms=_LEASE_MS, wait_ms=wait_ms
        )

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
