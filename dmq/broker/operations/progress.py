"""Stored progress of groups on topics, for operator calls on groups and topics that no client uses now."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from dmq.broker.groups import GroupSubscription, Subscriptions
from dmq.broker.io import Reader
from dmq.broker.topics import Group, Names, Topic
from dmq.store import Store
from dmq.store.schema.keys import Family
from dmq.store.schema.topics.group import group_queue_range

_PAIRS_PER_LOOK = 64


class ProgressReader:
    """Reader of stored progress. It belongs to the event loop."""

    def __init__(self, names: Names, reader: Reader, subscriptions: Subscriptions) -> None:
        self._names = names
        self._reader = reader
        self._subscriptions = subscriptions

    async def readers_of(self, topic: Topic, among: Sequence[Group] = ()) -> list[Group]:
        """Return the groups with progress on a topic, of ``among`` or of all groups; one seek per group."""
        groups = among or [*self._names.groups_by_id.values()]
        found = await self._have_rows([(group.group_id, topic.topic_id) for group in groups])
        return [group for group, is_there in zip(groups, found, strict=True) if is_there]

    async def topics_of(self, group: Group) -> list[Topic]:
        """Return the topics on which a group has progress; one seek per known topic."""
        lanes = {lane.topic_id for lane in self._names.lanes.values()}
        topics = [each for each in self._names.topics_by_id.values() if each.topic_id not in lanes]
        found = await self._have_rows([(group.group_id, topic.topic_id) for topic in topics])
        return [topic for topic, is_there in zip(topics, found, strict=True) if is_there]

    def failed_of(self, group: Group) -> list[Topic]:
        """Return the topics with messages that a group has failed on this broker."""
        topics = self._names.topics_by_id
        return [topics[topic_id] for group_id, topic_id in self._names.lanes if group_id == group.group_id]

    async def _have_rows(self, pairs: Sequence[tuple[int, int]]) -> list[bool]:
        found: list[bool] = []
        while len(found) < len(pairs):  # in small batches: the same thread reads messages for consumers
            found += await self._reader.run(partial(_have_rows, pairs[len(found) : len(found) + _PAIRS_PER_LOOK]))
        return found

    async def unread(self, group: Group, topic: Topic) -> int:
        """Return the number of messages of a topic that a group has not finished, including its visible retries.

        If the group does not read the topic's queues, only its retries count.
        """
        found = self._subscriptions.get(group.group_id, topic.topic_id)
        if found is None or not found.is_loaded.is_set():
            found = await self.load(group.group_id, topic)
        has_queues = self._names.reads(group.group_id, topic.name) and group in await self.readers_of(topic, [group])
        queues = found.queues if has_queues else []
        return sum(each.end - each.finished_count for each in [*queues, *([found.lane] if found.lane else [])])

    async def load(self, group_id: int, topic: Topic) -> GroupSubscription:
        """Return a private copy of the stored progress of a group on a topic."""
        found = GroupSubscription(group_id, topic)
        lane = self._names.lanes.get((group_id, topic.topic_id))
        if lane is not None:
            found.attach(lane.topic_id)
        queues = found.all_queues
        for queue, (rows, begin, end) in zip(queues, await self._reader.progress(queues), strict=True):
            queue.end = end
            queue.load(rows)
            queue.skip_later(begin)
        return found


def _have_rows(pairs: Sequence[tuple[int, int]], store: Store) -> list[bool]:
    """Return for each (group, topic) pair whether progress of the group on the topic is stored."""
    return [
        bool(
            store.scan(Family.GROUP, group_queue_range(*pair, 0)[0], group_queue_range(*pair, 0xFFFF)[1], limit=1).rows
        )
        for pair in pairs
    ]
