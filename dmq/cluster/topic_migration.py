"""Topics that moved from a cluster to this broker since the last run, or back: no message is lost or duplicated.

After a move from the cluster to this broker, groups here do not receive messages that the cluster has. After a move to
the cluster, it does not receive messages that all groups have finished here. Each skipped message has a FILTERED event.
A group that starts later begins at the matching position: see ``Subscriptions``. The migration runs before any reader,
and is repeated after a crash. At its end the forwarder's settings record the new state.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import structlog

from dmq.broker import EmbeddedBroker
from dmq.broker.groups import GroupQueue, GroupSubscription, finished_by_all
from dmq.broker.io import Place
from dmq.broker.topics import FORWARDER_GROUP, Topic
from dmq.config.units import parse_topic_patterns
from dmq.store.schema.messages.record import QueuedMessage, encode_body
from dmq.store.writer.operations import IfKnown

log = structlog.get_logger("dmq.broker")

_TOGETHER = 64  # messages in one unit; each may be 4 MiB in memory while it is read


class MovedTopics:
    """The migration of moved topics. The event loop owns it. Call ``settle`` before any message is read or sent."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self._names = broker.names
        self._commits = broker.commits
        self._reader = broker.reader
        self._procedures = broker.procedures
        self._progress = broker.procedures.progress
        self._placement = broker.placement

    async def settle(self) -> None:
        """Migrate each moved topic, durable on return."""
        names = self._names
        forwarder = names.groups.get(FORWARDER_GROUP)
        if forwarder is None or forwarder.stay == str(names.stay):
            return
        await self._procedures.ended()  # these also move group positions
        before = parse_topic_patterns(forwarder.stay or "none")
        for topic in [each for each in names.topics.values() if not names.is_derived(each.name)]:
            if before.has(topic.name) != names.stay.has(topic.name):
                await self._move(topic)
        forwarder = forwarder._replace(stay=str(names.stay))
        done = self._commits.submit(names.plan_settings(forwarder))
        names.add_group(forwarder)
        await self._commits.committed(done)

    async def _move(self, topic: Topic) -> None:
        names, to_cluster = self._names, self._names.leaves(topic.name)
        readers = [group.group_id for group in await self._progress.readers_of(topic)]
        new = [each for each in readers if names.reads(each, topic.name)]
        old = [each for each in readers if each not in new]
        passed = 0
        for group_id in new:
            found = await self._progress.load(group_id, topic)
            for queue in found.queues:
                passed += await self._pass_over(found, queue, old)
        if not to_cluster:
            await self._empty_lane(topic)
        log.info("topic_moved", topic=topic.name, to="cluster" if to_cluster else "here", passed_over=passed)

    async def _pass_over(self, found: GroupSubscription, queue: GroupQueue, others: Sequence[int]) -> int:
        """Finish for a group the messages of a queue that all ``others`` have finished."""
        place = Place(queue.topic_id, queue.queue_id)
        there = await self._reader.run(partial(finished_by_all, place=place, groups=others, end=queue.end))
        if there is None:
            return 0
        offsets = [each for each in [*range(queue.floor, there.floor), *there.above] if not queue.is_finished(each)]
        for first in range(0, len(offsets), _TOGETHER):
            some = offsets[first : first + _TOGETHER]
            await self._commits.commit(found.passed_over(queue, some, await self._read(queue, some)))
        return len(offsets)

    async def _empty_lane(self, topic: Topic) -> None:
        """Move redriven letters of the forwarder into their topic, because they are no longer forwarded."""
        found = await self._progress.load(self._names.forwarder_id, topic)
        lane = found.lane
        if lane is None:
            return
        offsets = [each for each in range(lane.floor, lane.end) if not lane.is_finished(each)]
        for offset in offsets:
            (record,) = await self._read(lane, [offset])
            body = encode_body(
                record.message_id,
                record.tag.encode(),
                record.message_group.encode(),
                record.payload,
                record.not_after_ms,
            )
            now_ms = self._commits.store.clock.now_ms()
            accepted = self._placement.put(topic, record.message_id, record.message_group, body, 0, now_ms)
            left = found.passed_over(lane, [offset], [record])
            await self._commits.commit([accepted._replace(if_known=IfKnown.WRITE), *left])

    async def _read(self, queue: GroupQueue, offsets: Sequence[int]) -> list[QueuedMessage]:
        return await self._reader.messages([(queue, offset) for offset in offsets])
