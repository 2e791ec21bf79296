"""Subscriptions of this run: loaded at first use, notified of appended messages, retired by operators."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final, Literal

from broker_adapter.contracts.errors import Overloaded, Refused, Rule
from broker_adapter.contracts.limits import SUBSCRIPTIONS_MAX
from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX
from broker_adapter.runtime.clock import moment
from dmq.broker.groups.group_queue import GroupQueue
from dmq.broker.groups.lease_timers import LeaseEnds
from dmq.broker.groups.message_groups import Remembered
from dmq.broker.groups.queue_front import finished_by_all
from dmq.broker.groups.settled_letters import Settled
from dmq.broker.groups.subscription import GroupSubscription, Readers, SubscribedQueue
from dmq.broker.io import LAG_MAX, Place
from dmq.broker.topics import BrokerPart, Group, SharedParts, Topic
from dmq.store.schema.keys import Family, reset_key, unpack_u64
from dmq.store.schema.messages.index import Receipt
from dmq.store.writer.operations import Appended, Emit, Op
from dmq.trail.events import subscribed_event

GroupStart = Literal["earliest", "latest"]
# Number of appended messages after which a queue's readers are checked again: most have moved little by then.
_RECHECK_MESSAGES: Final = 256


class Subscriptions(BrokerPart):
    """Registry and loader of subscriptions. It belongs to the event loop."""

    def __init__(
        self,
        shared: SharedParts,
        ends: LeaseEnds,
        *,
        group_start: GroupStart,
    ) -> None:
        super().__init__(shared)
        self.settled = Settled(self._reader)
        self._ends = ends
        self._group_start = group_start
        self._by_key: dict[tuple[int, int], GroupSubscription] = {}  # by group and topic
        self._readers: dict[int, set[int]] = {}  # groups by topic, of all subscriptions since the start of this run
        self._by_topic: dict[int, list[GroupSubscription]] = {}
        self._lanes: dict[int, GroupSubscription] = {}  # by lane
        self._retired: list[GroupSubscription] = []
        self._remembered = Remembered()
        self._shared = Readers()
        self._begins: dict[Place, int] = {}  # new begins of queues trimmed in this run, from the start of the removal

    # -- lookup -------------------------------------------------------------------------------------------------------

    def all(self) -> list[GroupSubscription]:
        """Return all subscriptions of this run, including those under load and the placeholders of held ones."""
        return list(self._by_key.values())

    def get(self, group_id: int, topic_id: int) -> GroupSubscription | None:
        """Return a subscription, loaded or not, or None if it does not exist."""
        return self._by_key.get((group_id, topic_id))

    def to(self, topic_id: int) -> list[GroupSubscription]:
        """Return the subscriptions to a topic that are loaded or under load."""
        return [found for found in self._by_topic.get(topic_id, ()) if not found.is_retired]

    def readers_of(self, topic_id: int) -> set[int]:
        """Return the ids of the groups that subscribed to a topic in this run."""
        return self._readers.get(topic_id, set())

    def has(self, group_name: str, topic_name: str) -> bool:
        """Return True if a subscription exists, loaded or under load."""
        group, topic = self._names.groups.get(group_name), self._names.topics.get(topic_name)
        return group is not None and topic is not None and (group.group_id, topic.topic_id) in self._by_key

    async def subscribe_known(self, group_name: str, topic_name: str) -> GroupSubscription:
        """As ``subscribe``, for a receipt handle: creates nothing, because a valid handle names an existing
        subscription.
        """
        if group_name not in self._names.groups or topic_name not in self._names.topics:
            raise _no_such_delivery(group_name, topic_name)
        return await self.subscribe(group_name, topic_name, is_known=True)

    async def subscribe(
        self, group_name: str, topic_name: str, *, is_known: bool = False, group_start: GroupStart | None = None
    ) -> GroupSubscription:
        """Return the loaded state of (group, topic); create it if it is missing, unless ``is_known``.

        A new subscription starts at ``group_start``, or as configured. Raise ``Overloaded`` if there are too many
        subscriptions.
        """
        await self._catalog.group(group_name)
        await self._catalog.topic(topic_name)
        while True:  # either may have been removed during an await
            group, topic = self._catalog.known_group(group_name), self._catalog.known_topic(topic_name)
            known = self._by_key.get((group.group_id, topic.topic_id))
            if known is None:
                break
            if known.is_loaded.is_set():
                return known
            await known.is_loaded.wait()  # then check again: the loading call may fail or be cancelled
        if len(self._by_key) >= SUBSCRIPTIONS_MAX and group.group_id != self._names.forwarder_id:
            raise Overloaded("too many groups receive from too many topics", limit=f"{SUBSCRIPTIONS_MAX} pairs")
        has_queues = self._names.reads(group.group_id, topic.name)
        found = GroupSubscription(
            group.group_id, topic, has_queues=has_queues, remembered=self._remembered, readers=self._shared
        )
        self._by_key[group.group_id, topic.topic_id] = found
        self._readers.setdefault(topic.topic_id, set()).add(group.group_id)
        self._by_topic.setdefault(topic.topic_id, []).append(found)  # from now on it is notified of new messages
        lane = self._names.lanes.get((group.group_id, topic.topic_id))
        if lane is not None:
            self._attach(found, lane)
        try:
            begun = await self._load(found, group_start or self._group_start, is_known=is_known)
        except BaseException:
            self._detach(found)
            found.is_loaded.set()
            raise
        # The unit is written even if this caller is cancelled: a second start by another caller would count it twice.
        begun.add_done_callback(partial(self._loaded, found))
        await self._commits.wait(begun)
        return found

    def _loaded(self, found: GroupSubscription, begun: asyncio.Future[list[Receipt]]) -> None:
        if begun.cancelled() or begun.exception() is not None:
            self._detach(found)
        else:
            for queue in found.all_queues:
                queue.look_at_again()
                for offset, lease in queue.leases.items():
                    self._ends.watch(queue, offset, lease)
        found.is_loaded.set()

    def _detach(self, found: GroupSubscription) -> None:
        for queue in found.all_queues:
            queue.count_apart()
        key = found.group_id, found.topic.topic_id
        if self._by_key.get(key) is found:  # and not its placeholder
            del self._by_key[key]
        if found in self._by_topic.get(found.topic.topic_id, ()):
            self._by_topic[found.topic.topic_id].remove(found)
        if found.lane is not None:
            self._lanes.pop(found.lane.topic_id, None)

    # -- retiring subscriptions: of a topic (no group id), of a group (no topic id), or one ---------------------------

    def retire(self, topic_id: int, group_id: int, *, is_held: bool) -> None:
        """Stop serving subscriptions. With ``is_held``, new subscribers wait until ``let_go``."""
        for key, found in self._by_key.items():
            if group_id in {0, key[0]} and topic_id in {0, key[1]} and not found.is_retired:
                found.retire()
                self._retired.append(found)
        if is_held:
            held = self._by_key[group_id, topic_id] = GroupSubscription(group_id, self._names.topics_by_id[topic_id])
            held.retire()  # a placeholder that is never returned to a caller

    async def retired(self, topic_id: int, group_id: int) -> None:
        """Return when retired subscriptions write nothing more, and all of their writes are durable."""
        for found in self._retired_of(topic_id, group_id):
            await found.is_loaded.wait()
            found.retire()  # again, to void the leases it was loaded with
        await self._commits.flush()

    def let_go(self, topic_id: int, group_id: int) -> None:
        """Forget retired subscriptions, so that new subscribers load the stored state."""
        for found in self._retired_of(topic_id, group_id):
            self._retired.remove(found)
            self._detach(found)
        held = self._by_key.pop((group_id, topic_id), None)
        if held is not None:
            held.is_loaded.set()
        if not topic_id:
            for groups in self._readers.values():
                groups.discard(group_id)
        if not group_id:
            self._readers.pop(topic_id, None)
            self._begins = {place: begin for place, begin in self._begins.items() if place.topic_id != topic_id}

    def _retired_of(self, topic_id: int, group_id: int) -> list[GroupSubscription]:
        return [
            found
            for found in self._retired
            if group_id in {0, found.group_id} and topic_id in {0, found.topic.topic_id}
        ]

    async def successor(self, found: GroupSubscription) -> GroupSubscription:
        """Return the replacement of a retired subscription; raise ``Refused`` if its topic or its group was removed."""
        group_name, topic_name = self._names.groups_by_id[found.group_id].name, found.topic.name
        group, topic = self._catalog.known_group(group_name), self._catalog.known_topic(topic_name)
        if group.group_id != found.group_id:
            raise Refused(Rule.GROUP_UNKNOWN, "it was removed and recreated", value=group_name)
        if topic.topic_id != found.topic.topic_id:
            raise Refused(Rule.TOPIC_UNKNOWN, "it was removed and recreated", value=topic_name)
        return await self.subscribe(group_name, topic_name)

    async def _load(
        self, found: GroupSubscription, group_start: GroupStart, *, is_known: bool
    ) -> asyncio.Future[list[Receipt]]:
        """Read the stored state of a subscription; return the future of its first unit, which is submitted."""
        ops: list[Op] = []
        (reset,) = await self._reader.values(Family.META, [reset_key(found.group_id, found.topic.topic_id)])
        found.reset_epoch = unpack_u64(reset) if reset is not None else 0
        queues = found.all_queues
        if found.topic.name.startswith(DEAD_LETTER_PREFIX):
            await self.settled.load(found.topic.topic_id)
        progress = await self._reader.progress(queues)
        if is_known and not any(rows for rows, _, _ in progress):
            raise _no_such_delivery(self._names.groups_by_id[found.group_id].name, found.topic.name)
        for queue, (rows, begin, end) in zip(queues, progress, strict=True):
            queue.end = max(queue.end, end)
            begin = max(begin, self._begins.get(Place(queue.topic_id, queue.queue_id), 0))  # noqa: PLW2901
            if rows:
                queue.load(rows, moment(self._clock))
                ops += queue.skip_to(begin)
            else:
                ops += await self._begin(found, queue, begin, group_start)
        # Also without ops: once this unit is durable, so are all messages below the ends read.
        return self._commits.submit(ops)

    async def _begin(
        self, found: GroupSubscription, queue: SubscribedQueue, begin: int, group_start: GroupStart
    ) -> list[Op]:
        """Start a group on a queue. A retry lane belongs to its group from the start and therefore makes no event.

        Local groups skip messages that went to a cluster. The forwarder skips messages that all local groups have
        finished.
        """
        if queue is found.lane:
            return queue.start_at(begin)
        forwarder_id = self._names.forwarder_id
        is_late = group_start == "latest" and found.group_id != forwarder_id
        offset, above = queue.end if is_late else begin, list[int]()
        if forwarder_id and not is_late:
            is_forwarder = found.group_id == forwarder_id
            others = [each.group_id for each in self._names.groups.values() if each.group_id != forwarder_id]
            groups, place = others if is_forwarder else [forwarder_id], Place(queue.topic_id, queue.queue_id)
            there = await self._reader.run(partial(finished_by_all, place=place, groups=groups, end=queue.end))
            if there is not None:
                offset = max(begin, there.floor)
                above = [each for each in there.above if each > offset]
        event = subscribed_event(queue.topic_id, queue.group_id, queue.queue_id, offset)
        ops = [*queue.start_at(offset), Emit(event, offset)]
        if above:
            records = await self._reader.messages([(queue, each) for each in above])
            ops += found.passed_over(queue, above, records)
        return ops

    def lane(self, found: GroupSubscription) -> tuple[SubscribedQueue, list[Op]]:
        """Return the retry lane of a loaded subscription, and the ops to commit with its first use."""
        if found.lane is not None:
            return found.lane, []
        group = self._names.groups_by_id[found.group_id]
        lane, ops = self._names.lane(group, found.topic.topic_id, self._clock.now_ms())
        queue = self._attach(found, lane)
        return queue, [*ops, *queue.start_at(0)]

    def lane_id(self, group: Group, topic: Topic) -> tuple[int, list[Op]]:
        """As ``lane``, but return the topic id of the lane; the group need not be subscribed to the topic."""
        found = self._by_key.get((group.group_id, topic.topic_id))
        if found is not None and not found.is_retired:
            queue, ops = self.lane(found)
            return queue.topic_id, ops
        lane, ops = self._names.lane(group, topic.topic_id, self._clock.now_ms())
        start = GroupQueue(group.group_id, lane.topic_id, 0).start_at(0)
        return lane.topic_id, [*ops, *start] if ops else []

    def _attach(self, found: GroupSubscription, lane: Topic) -> SubscribedQueue:
        self._lanes[lane.topic_id] = found
        return found.attach(lane.topic_id)

    def shortened(self, place: Place, begin: int) -> None:
        """Record the new begin of a queue for subscriptions under load."""
        self._begins[place] = begin

    def on_appended(self, appended: Appended) -> None:
        """Update the ends of queues after an append and wake waiting receives."""
        shared = self._shared
        waiting: dict[GroupSubscription, None] = {}
        for place, growth in appended.items():
            end = shared.known_end(place)
            if end is None:
                self._reader.recent.forget(place)
                continue
            end.offset = max(end.offset, growth.end)
            if growth.first >= end.recheck_at:
                end.recheck_at = growth.end + _RECHECK_MESSAGES
                end.is_recent_read = self._is_near_read(place, growth.first)
            if end.is_recent_read:
                self._reader.recent.keep(place, growth)
            else:
                self._reader.recent.forget(place)
            waiting.update(dict.fromkeys(self._waiting(place[0])))
        for found in waiting:
            found.wake_next()  # one is enough: a receive that leaves messages wakes the next

    def _waiting(self, topic_id: int) -> list[GroupSubscription]:
        """Return the subscriptions with waiting receives that a topic or a lane wakes."""
        lane = self._lanes.get(topic_id)
        return [lane] if lane is not None else self._shared.waiting(topic_id)

    def _is_near_read(self, place: tuple[int, int], offset: int) -> bool:
        """Return True if a group is near enough to an offset of a queue to read it from the tail cache."""
        lane = self._lanes.get(place[0])
        readers = [lane] if lane is not None else self._by_topic.get(place[0], ())
        queues = (found.queue_at(*place) for found in readers)
        return any(queue is not None and offset - queue.cursor <= LAG_MAX for queue in queues)


def _no_such_delivery(group_name: str, topic_name: str) -> Refused:
    return Refused(Rule.RECEIPT_HANDLE, "no such delivery", value=f"{group_name}, {topic_name}")
