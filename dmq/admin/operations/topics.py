"""Operations on topics."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

from broker_adapter.contracts.adapter import Pulled, Subscription
from broker_adapter.contracts.errors import topic_unknown
from broker_adapter.contracts.message import MessageType
from broker_adapter.contracts.topics import retry_topic
from dmq.admin.operations.topic_quotas import quotas_of, with_halves
from dmq.admin.requests import status
from dmq.broker.broker import EmbeddedBroker
from dmq.broker.groups.queue_front import edges
from dmq.broker.topics.registry import Group, Topic
from dmq.broker.topics.settings import FLOW_STAYS, QUOTAS_STAY, FlowChange, KeepChange, QuotaChange
from dmq.store.schema.names import TopicSettings
from dmq.store.store import Store

_DUE_BUCKETS_MAX = 60


class _Figures(NamedTuple):
    """Figures of the store for all topics, by topic id."""

    pending: dict[int, int]
    sizes: dict[int, int]
    held: dict[int, int]


class Topics:
    """Status of topics from already maintained figures, and changes of them, durable on return."""

    def __init__(self, store: Store, broker: EmbeddedBroker) -> None:
        self._store = store
        self._broker = broker

    async def topics(self) -> Sequence[status.TopicStatus]:
        """Return every topic, by name."""
        return await asyncio.get_running_loop().run_in_executor(None, self._topics)

    def _topics(self, only: str = "") -> list[status.TopicStatus]:
        """Return all topics by name, or those of one name, including retry topics of groups."""
        names = self._broker.names
        figures = _Figures(self._store.pending(), self._store.pending_bytes(), self._store.held())
        groups, lanes = names.groups_by_id, defaultdict[int, list[int]](list)
        for (group_id, _), lane in names.lanes.copy().items():
            if only in {"", retry_topic(groups[group_id].name)}:
                lanes[group_id].append(lane.topic_id)
        found = [self._retry_topic(groups[group_id], ids, figures.pending) for group_id, ids in lanes.items()]
        topics = names.topics.copy().values() if not only else filter(None, [names.topics.get(only)])
        found += [self._topic(topic, figures) for topic in topics]
        return sorted(found, key=lambda topic: topic.name)

    def _topic(self, topic: Topic, figures: _Figures) -> status.TopicStatus:
        pending, sizes, held = figures
        waiting = pending.get(topic.topic_id, 0)
        ends = edges(self._store, topic.topic_id, topic.queues)
        own = zip(("time", "bytes", "unread"), topic.keep, strict=True)
        return status.TopicStatus(
            name=topic.name,
            queues=topic.queues,
            stored=sum(each.end - each.begin for each in ends),
            oldest_at_ms=min((each.oldest_ms for each in ends if each.oldest_ms), default=0),
            keep=self._broker.retention.keep_of(topic),
            keep_own=[what for what, said in own if said is not None],
            pending=waiting,
            due=self._due(topic.topic_id) if waiting else (),
            type=topic.message_type.name if topic.message_type is not None else "MIXED",
            created_at_ms=topic.created_at_ms,
            paused_since_ms=topic.paused_since_ms or 0,
            deliver_rate=topic.deliver_rate or 0,
            held=held.get(topic.topic_id, 0),
            pending_bytes=with_halves(sizes, topic),
            quotas=quotas_of(self._broker, topic, pending, sizes),
        )

    def _retry_topic(self, group: Group, lane_ids: Sequence[int], pending: dict[int, int]) -> status.TopicStatus:
        """Return the retry topic of a group with failed messages; its lanes are shown as queues."""
        waiting = pending.get(group.group_id, 0)
        return status.TopicStatus(
            name=retry_topic(group.name),
            queues=len(lane_ids),
            stored=sum(self._store.queue_end(each, 0) - self._store.queue_begin(each, 0) for each in lane_ids),
            pending=waiting,
            due=self._due(group.group_id) if waiting else (),
        )

    def _due(self, scope: int) -> list[status.DueBucket]:
        found = self._store.due_counts(scope, 0, 2**53, limit=_DUE_BUCKETS_MAX)
        return [status.DueBucket(until_ms=bucket.until_ms, count=bucket.count) for bucket in found]

    async def topic(self, name: str) -> status.TopicStatus:
        """Return one topic, with its readers."""
        found, topic = await self._with_ranges(name), self._broker.names.topics.get(name)
        return replace(found, readers=await self._readers(topic)) if topic is not None else found

    async def _with_ranges(self, name: str) -> status.TopicStatus:
        looked = await asyncio.get_running_loop().run_in_executor(None, self._topics, name)
        if not looked:
            raise topic_unknown(name)
        found = looked[0]
        return replace(found, ranges=(await self.count(name)).queues) if name in self._broker.names.topics else found

    async def _readers(self, topic: Topic) -> list[status.Reader]:
        look = partial(self._broker.lags.look, topic_id=topic.topic_id)
        lags = await asyncio.get_running_loop().run_in_executor(None, look)
        return [
            status.Reader(
                group=each.group,
                unread=each.unread,
                oldest_unread_age_ms=each.oldest_unread_age_ms,
                in_flight=each.in_flight,
                in_retry=each.in_retry,
                dead=each.dead,
            )
            for each in sorted(lags, key=lambda lag: lag.group)
            if each.unread is not None
        ]

    async def create_topic(
        self, name: str, *, queues: int, message_type: MessageType | None, keep: KeepChange
    ) -> status.TopicStatus:
        """Create a topic without readers."""
        await self._broker.operator.create_topic(name, queues=queues, message_type=message_type, keep=keep)
        return await self._with_ranges(name)

    async def set_topic(
        self,
        name: str,
        *,
        queues: int,
        message_type: MessageType | Literal["MIXED"] | None,
        keep: KeepChange,
        flow: FlowChange = FLOW_STAYS,
        quotas: QuotaChange = QUOTAS_STAY,
    ) -> status.TopicStatus:
        """Change a topic."""
        settings = None
        if message_type is not None:
            settings = TopicSettings(message_type if isinstance(message_type, MessageType) else None)
        await self._broker.operator.set_topic(
            name, queues=queues, settings=settings, keep=keep, flow=flow, quotas=quotas
        )
        return await self.topic(name)

    async def remove_topic(self, name: str, *, is_forced: bool) -> None:
        await self._broker.operator.remove_topic(name, is_forced=is_forced)

    async def count(self, topic: str) -> status.TopicCount:
        """Return the offset ranges of the queues of a topic."""
        known = self._broker.names.topics.get(topic)
        if known is None:
            raise topic_unknown(topic)
        queues = await asyncio.gather(*(self._broker.pulls.queue_range(topic, each) for each in range(known.queues)))
        pending = await asyncio.get_running_loop().run_in_executor(None, self._store.pending)
        return status.TopicCount(queues=queues, pending=pending.get(known.topic_id, 0))

    async def peek(self, topic: str, queue_id: int, offset: int, *, limit: int) -> Pulled:
        """Return messages of a queue without changing their state."""
        return await self._broker.pulls.pull(Subscription(topic, queue_id), offset, batch_max=limit, wait_ms=0)
