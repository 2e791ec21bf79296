"""RPCs of ``AdminService`` about topics, from already maintained figures."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.errors import Refused, Rule, topic_unknown
from broker_adapter.contracts.message import MessageType
from broker_adapter.contracts.topics import check_topic, retry_topic
from dmq.admin import admin_v1 as wire
from dmq.admin.operations.objects.pages import page_of
from dmq.admin.operations.objects.topic_quotas import quotas_of, with_halves
from dmq.admin.requests import mapping, validate
from dmq.broker import EmbeddedBroker
from dmq.broker.groups import edges
from dmq.broker.topics import (
    FLOW_STAYS,
    INDEX_STAYS,
    KEEP_STAYS,
    QUOTAS_STAY,
    FlowChange,
    Group,
    IndexChange,
    KeepChange,
    QuotaChange,
    Topic,
)
from dmq.runtime.slices import in_slices
from dmq.store import Store
from dmq.store.schema.topics.names import MIXED, TopicSettings

_DUE_BUCKETS_MAX = 60
_MIXED = "MIXED"


class _Figures(NamedTuple):
    """Figures of the store for all topics, by topic id."""

    pending: dict[int, int]
    sizes: dict[int, int]
    held: dict[int, int]


class TopicCalls:
    """RPCs of topics. Changes are durable on return. Raise ``Refused`` for invalid input."""

    def __init__(self, store: Store, broker: EmbeddedBroker) -> None:
        self._store = store
        self._broker = broker

    async def list_topics(self, request: wire.ListTopicsRequest) -> wire.ListTopicsResponse:
        """List a page of the topics, by name, with the retry topics of groups."""
        return await asyncio.to_thread(self._page, request)

    def _page(self, request: wire.ListTopicsRequest) -> wire.ListTopicsResponse:
        names = self._broker.names
        lanes = {group_id for group_id, _ in names.lanes.copy()}
        retries = (retry_topic(names.groups_by_id[group_id].name) for group_id in lanes)
        page = page_of((*names.topics.copy(), *retries), request.token, request.limit)
        return wire.ListTopicsResponse(topics=self._topics(frozenset(page.names)), next_token=page.next_token)

    async def get_topic(self, request: wire.GetTopicRequest) -> wire.GetTopicResponse:
        """Return one topic with its readers."""
        return wire.GetTopicResponse(topic=await self._topic_of(check_topic(request.topic)))

    async def create_topic(self, request: wire.CreateTopicRequest) -> wire.CreateTopicResponse:
        """Create a topic without readers."""
        name = check_topic(request.topic)
        message_type, keep = _settings_of(request.type or _MIXED).message_type, _keep_of(request.keep)
        await self._broker.operator.create_topic(name, queues=request.queues, message_type=message_type, keep=keep)
        return wire.CreateTopicResponse(topic=await self._topic_of(name, with_readers=False))

    async def set_topic(self, request: wire.SetTopicRequest) -> wire.SetTopicResponse:
        """Change a topic, and return it with its readers."""
        name, settings = check_topic(request.topic), _settings_of(request.type) if request.type else None
        keep, flow = _keep_of(request.keep), FlowChange(*validate.given(request, *FlowChange._fields))
        quotas = QuotaChange(*validate.given(request, *QuotaChange._fields))
        index = IndexChange(tuple(request.index_properties), tuple(request.no_index_properties))
        stays = keep == KEEP_STAYS and flow == FLOW_STAYS and quotas == QUOTAS_STAY and index == INDEX_STAYS
        if settings is None and not request.queues and stays:
            raise Refused(Rule.REQUEST, "the request changes nothing")
        await self._broker.operator.set_topic(
            name, queues=request.queues, settings=settings, keep=keep, flow=flow, quotas=quotas, index=index
        )
        return wire.SetTopicResponse(topic=await self._topic_of(name))

    async def remove_topic(self, request: wire.RemoveTopicRequest) -> wire.RemoveTopicResponse:
        await self._broker.operator.remove_topic(check_topic(request.topic), is_forced=request.force)
        return wire.RemoveTopicResponse()

    async def count_messages(self, request: wire.CountMessagesRequest) -> wire.CountMessagesResponse:
        """Return the offset ranges of the queues of a topic."""
        topic = check_topic(request.topic)
        queues = await self._ranges(topic)
        pending, _ = self._store.pending_of(self._broker.names.topics[topic].topic_id)
        return wire.CountMessagesResponse(topic=topic, queues=queues, pending=pending)

    async def peek_messages(self, request: wire.PeekMessagesRequest) -> wire.PeekMessagesResponse:
        """Return messages of a queue without changing their state."""
        queue, limit = Subscription(check_topic(request.topic), request.queue_id), validate.check_limit(request.limit)
        found = await self._broker.pulls.pull(queue, request.offset, batch_max=limit, wait_ms=0)
        messages = [
            mapping.filled(
                wire.PeekedMessage,
                each,
                content=mapping.content_if_readable(each.payload, with_body=request.with_body),
            )
            async for each in in_slices(found.messages)
        ]
        return wire.PeekMessagesResponse(messages=messages, next_offset=found.next_offset)

    # -- parts --------------------------------------------------------------------------------------------------------

    async def _topic_of(self, name: str, *, with_readers: bool = True) -> wire.Topic:
        found = await asyncio.to_thread(self._topics, {name})
        if not found:
            raise topic_unknown(name)
        shown, topic = found[0], self._broker.names.topics.get(name)
        if topic is not None:
            shown.ranges.extend(await self._ranges(name))
            shown.readers.extend(await self._readers(topic) if with_readers else ())
        return shown

    def _topics(self, wanted: Collection[str]) -> list[wire.Topic]:
        """Return the topics of these names, by name, including retry topics of groups."""
        names = self._broker.names
        figures = _Figures(self._store.pending(), self._store.pending_bytes(), self._store.held())
        groups, lanes = names.groups_by_id, defaultdict[int, list[int]](list)
        for (group_id, _), lane in names.lanes.copy().items():
            if retry_topic(groups[group_id].name) in wanted:
                lanes[group_id].append(lane.topic_id)
        found = [self._retry_topic(groups[group_id], ids, figures.pending) for group_id, ids in lanes.items()]
        found += [self._topic(topic, figures) for name in wanted if (topic := names.topics.get(name)) is not None]
        return sorted(found, key=lambda topic: topic.name)

    def _topic(self, topic: Topic, figures: _Figures) -> wire.Topic:
        pending, sizes, held = figures
        waiting = pending.get(topic.topic_id, 0)
        ends = edges(self._store, topic.topic_id, topic.queues)
        keep, own = self._broker.retention.keep_of(topic), zip(("time", "bytes", "unread"), topic.keep, strict=True)
        return wire.Topic(
            name=topic.name,
            queues=topic.queues,
            stored=sum(each.end - each.begin for each in ends),
            oldest_at_ms=min((each.oldest_ms for each in ends if each.oldest_ms), default=0),
            keep_time_ms=keep.time_ms,
            keep_bytes=keep.size_bytes,
            keep_unread=keep.unread,
            keep_own=[name for name, setting in own if setting is not None],
            pending=waiting,
            due=self._due(topic.topic_id) if waiting else (),
            type=topic.message_type.name if topic.message_type is not None else _MIXED,
            created_at_ms=topic.created_at_ms,
            paused_since_ms=topic.paused_since_ms or 0,
            deliver_rate=topic.deliver_rate or 0,
            held=held.get(topic.topic_id, 0),
            pending_bytes=with_halves(sizes, topic),
            quotas=quotas_of(self._broker, topic, pending, sizes),
            index_properties=topic.index_properties,
        )

    def _retry_topic(self, group: Group, lane_ids: Collection[int], pending: dict[int, int]) -> wire.Topic:
        """Return the retry topic of a group with failed messages; its lanes are shown as queues."""
        waiting = pending.get(group.group_id, 0)
        return wire.Topic(
            name=retry_topic(group.name),
            type=_MIXED,
            keep_unread=True,
            queues=len(lane_ids),
            stored=sum(self._store.queue_end(each, 0) - self._store.queue_begin(each, 0) for each in lane_ids),
            pending=waiting,
            due=self._due(group.group_id) if waiting else (),
        )

    def _due(self, scope: int) -> list[wire.DueBucket]:
        found = self._store.due_counts(scope, 0, 2**53, limit=_DUE_BUCKETS_MAX)
        return [wire.DueBucket(**bucket._asdict()) for bucket in found]

    async def _readers(self, topic: Topic) -> list[wire.Reader]:
        found = await asyncio.to_thread(self._broker.lags.look, topic_id=topic.topic_id)
        lags = [lag._asdict() for lag in found]
        known = sorted((lag for lag in lags if lag["unread"] is not None), key=lambda lag: str(lag["group"]))
        return [wire.Reader(**{name: value for name, value in lag.items() if name != "topic"}) for lag in known]

    async def _ranges(self, topic: str) -> list[wire.QueueRange]:
        known = self._broker.names.topics.get(topic)
        if known is None:
            raise topic_unknown(topic)
        found = await asyncio.gather(*(self._broker.pulls.queue_range(topic, each) for each in range(known.queues)))
        return [
            wire.QueueRange(queue_id=number, begin_offset=each.begin, end_offset=each.end)
            for number, each in enumerate(found)
        ]


def _keep_of(change: wire.KeepChange) -> KeepChange:
    unread = change.unread or None
    if unread not in {None, "yes", "no", "default"}:
        raise Refused(Rule.REQUEST, "unknown value of keep_unread", value=unread, limit="yes, no, default")
    time_ms, size_bytes = validate.given(change, "time_ms", "size_bytes")
    return KeepChange(time_ms, size_bytes, unread)  # type: ignore[arg-type]  # one of those


def _settings_of(name: str) -> TopicSettings:
    if name == _MIXED:
        return MIXED
    if name not in MessageType.__members__:
        limit = ", ".join((*MessageType.__members__, _MIXED))
        raise Refused(Rule.REQUEST, "unknown message type", value=name, limit=limit)
    return TopicSettings(MessageType[name])
