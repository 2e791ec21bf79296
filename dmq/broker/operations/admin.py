"""Administration of topics and groups: create, change, remove, reset. All calls are durable on return."""

from __future__ import annotations

from typing import NamedTuple

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.limits import QUEUES_PER_TOPIC_MAX
from broker_adapter.contracts.message import MessageType
from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX, dead_letter_topic, retry_topic
from dmq.broker.groups import GroupQueue, Subscriptions
from dmq.broker.io import Place, begin_of, offset_stored_at
from dmq.broker.operations.dead_letters import DeadLetters
from dmq.broker.operations.index_builds import IndexBuilds
from dmq.broker.operations.lag import Lags
from dmq.broker.operations.message_states import GroupStates
from dmq.broker.operations.removal_jobs import Procedures
from dmq.broker.operations.retention import Retention
from dmq.broker.schedules import Schedules
from dmq.broker.topics import (
    FLOW_STAYS,
    INDEX_STAYS,
    KEEP_STAYS,
    QUOTAS_STAY,
    BrokerPart,
    FlowChange,
    Group,
    IndexChange,
    KeepChange,
    QuotaChange,
    ScheduleLimits,
    SharedParts,
    Topic,
    check_not_forwarder,
)
from dmq.broker.transactions import GIVEN_UP_GROUP
from dmq.store import Store
from dmq.store.schema.keys import half_scope
from dmq.store.schema.topics.names import AS_CONFIGURED, GROUPED, TopicSettings
from dmq.store.writer.operations import Emit, IndexProperties
from dmq.trail.events import subscribed_event

BEGIN, END = -1, -2  # reset targets other than a time


class GroupBacklog(NamedTuple):
    """Number of messages of a topic that one of its groups has not finished."""

    group: str
    unread: int


class Unfinished(NamedTuple):
    """Number of messages of one topic that a group has not finished."""

    topic: str
    unread: int


class Operator(BrokerPart):
    """Operator calls on topics and groups. It belongs to the event loop."""

    def __init__(
        self,
        shared: SharedParts,
        *,
        subscriptions: Subscriptions,
        procedures: Procedures,
        dead_letters: DeadLetters,
        retention: Retention,
        index_builds: IndexBuilds,
        limits: ScheduleLimits,
    ) -> None:
        super().__init__(shared)
        self._subscriptions = subscriptions
        self._progress = procedures.progress
        self.group_states = GroupStates(shared, subscriptions, self._progress)
        self._settled = subscriptions.settled
        self._procedures = procedures
        self._dead_letters = dead_letters
        self._retention = retention
        self._index_builds = index_builds
        self.schedules = Schedules(shared, limits)
        self.lags = Lags(self._store, self._names, subscriptions)

    # -- topics -------------------------------------------------------------------------------------------------------

    async def create_topic(
        self, name: str, *, queues: int, message_type: MessageType | None, keep: KeepChange = KEEP_STAYS
    ) -> None:
        """Create a topic; ``queues`` 0 applies the configured number."""
        if name in self._names.topics:
            raise Refused(Rule.REQUEST, "the topic exists already", value=name)
        if name.startswith(DEAD_LETTER_PREFIX):
            raise Refused(Rule.TOPIC, "dead-letter queues are created when they are needed", value=name)
        _check_queues(queues, 0)
        await self._catalog.make_topic(name, queues, TopicSettings(message_type, keep.applied_to(AS_CONFIGURED)))
        self._retention.look_again()

    async def set_topic(
        self,
        name: str,
        *,
        queues: int = 0,
        settings: TopicSettings | None = None,
        keep: KeepChange = KEEP_STAYS,
        flow: FlowChange = FLOW_STAYS,
        quotas: QuotaChange = QUOTAS_STAY,
        index: IndexChange = INDEX_STAYS,
    ) -> None:
        """Change a topic. ``queues`` 0 and ``settings`` None leave these unchanged; of ``settings``, only the type is
        used.

        Queues can only be added. All readers of the topic start at the beginning of a new queue, regardless of
        configuration.
        """
        topic = self._catalog.known_topic(name)
        if topic.name.startswith(DEAD_LETTER_PREFIX) and (queues or settings is not None):
            raise Refused(Rule.TOPIC, "only the retention of a dead-letter queue can be changed", value=name)
        if self._names.is_derived(name):
            _check_derived(name, flow, quotas, index)
        _check_queues(queues, topic.queues)
        groups = await self._progress.readers_of(topic) if queues > topic.queues else []
        while loading := [each for each in self._subscriptions.to(topic.topic_id) if not each.is_loaded.is_set()]:
            await loading[0].is_loaded.wait()
        topic = self._catalog.known_topic(name)  # no await from here on
        _check_queues(queues, topic.queues)
        if queues > topic.queues and topic.holds & GROUPED:
            why = "it contains messages of message groups, which would lose their order"
            raise Refused(Rule.REQUEST, why, value=queues, limit=f"{topic.queues} queues")
        changed = topic._replace(queues=max(queues, topic.queues))
        if settings is not None:
            self.schedules.check_type(topic, settings.message_type)
            changed = changed._replace(message_type=settings.message_type)
        changed = changed._replace(keep=keep.applied_to(changed.keep))
        changed = flow.applied_to(changed, self._commits.store.clock.now_ms())
        changed = changed._replace(quotas=quotas.applied_to(changed.quotas))
        changed = changed._replace(index_properties=index.applied_to(changed.index_properties))
        told = filter(None, (flow.said(), quotas.said(), index.said()))
        ops = self._names.plan_change(changed, " ".join(told))
        if changed.index_properties != topic.index_properties:
            ops.append(IndexProperties(topic.topic_id, changed.index_properties))
        group_ids = {group.group_id for group in groups if group.name in self._names.groups}
        loaded = self._subscriptions.to(topic.topic_id)
        for group_id in sorted(group_ids | {found.group_id for found in loaded if found.has_queues}):
            for queue_id in range(topic.queues, changed.queues):
                event = subscribed_event(topic.topic_id, group_id, queue_id, 0)
                ops += [*GroupQueue(group_id, topic.topic_id, queue_id).start_at(0), Emit(event, 0)]
        done = self._commits.submit(ops)
        self._names.add_topic(changed)
        if changed.index_properties != topic.index_properties:
            self._index_builds.change(topic, changed)
        for found in loaded:
            found.grow(changed)
        await self._commits.committed(done)
        self._retention.look_again()
        if flow != FLOW_STAYS:
            self._commits.store.marks.wake()

    async def remove_topic(self, name: str, *, is_forced: bool) -> None:
        """Remove a topic with its stored and pending messages; unless forced, refuse if any message would be lost."""
        topic = self._catalog.known_topic(name)
        if self._names.is_derived(name) and not self._names.is_left(topic):
            raise Refused(
                Rule.TOPIC,
                "retry and dead-letter topics are removed with 'dead purge', or with their group",
                value=name,
            )
        if name.startswith(DEAD_LETTER_PREFIX):
            await self._remove_letters(topic, is_forced=is_forced)
            return
        self.schedules.check_none(topic)
        if not is_forced:
            await self._check_empty(topic)
            topic = self._catalog.known_topic(name)
            self.schedules.check_none(topic)
            self._names.forget(topic)  # the second check finds messages sent since the first; no more can follow
            try:
                await self._commits.flush()
                await self._check_empty(topic)
            except BaseException:
                self._names.add_topic(topic)
                self._names.free_name(topic)
                raise
        if is_forced:
            topic = self._catalog.known_topic(name)
            self.schedules.check_none(topic)
        await self._procedures.remove(topic)

    async def _remove_letters(self, topic: Topic, *, is_forced: bool) -> None:
        """Remove the dead-letter queue of a removed group, with the outcomes of its letters."""
        left = 0 if is_forced else await self._letters_left(topic)
        if left:
            why = f"{left} dead letters have no outcome; 'dmq dead purge' gives each one, --force loses them"
            raise Refused(Rule.REQUEST, why, value=topic.name)
        topic = self._catalog.known_topic(topic.name)  # nothing is awaited from here on
        if not self._names.is_left(topic):
            raise Refused(Rule.TOPIC, "its group was recreated", value=topic.name)
        self._check_no_job(topic.name.removeprefix(DEAD_LETTER_PREFIX))
        await self._procedures.remove(topic)

    async def _letters_left(self, topic: Topic) -> int:
        settled = await self._settled.load(topic.topic_id)
        return await self._reader.end(topic.topic_id, 0) - settled.finished_count

    def _check_no_job(self, group: str) -> None:
        if self._dead_letters.is_at_work(group):
            raise Refused(Rule.REQUEST, "a job on the dead letters of the group is running; stop it first", value=group)

    async def _check_empty(self, topic: Topic) -> None:
        waiting, readings = await self.waiting(topic), await self.readings(topic)
        facts = [f"{waiting} wait for their time"] if waiting else []
        facts += [f"{each.unread} are unread by group {each.group!r}" for each in readings if each.unread]
        stored = await self.stored(topic) if not readings else 0
        facts += [f"{stored} are stored and no group reads them"] if stored else []
        if facts:
            raise Refused(Rule.REQUEST, f"the topic holds messages: {', '.join(facts)}; --force loses them")

    async def waiting(self, topic: Topic) -> int:
        """Return the number of pending messages and half messages of a topic."""
        pending = await self._reader.figures()
        return pending.get(topic.topic_id, 0) + pending.get(half_scope(topic.topic_id), 0)

    async def readings(self, topic: Topic) -> list[GroupBacklog]:
        """Return the groups that read a topic, with their unread counts, sorted by name."""
        groups = sorted(await self._progress.readers_of(topic), key=lambda group: group.name)
        return [
            GroupBacklog(group.name, await self._progress.unread(group, topic))
            for group in groups
            if group.name in self._names.groups and self._names.reads(group.group_id, topic.name)
        ]

    async def stored(self, topic: Topic) -> int:
        """Return the number of messages stored in the queues of a topic."""
        return await self._reader.count(topic.topic_id, topic.queues)

    # -- groups -------------------------------------------------------------------------------------------------------

    async def create_group(self, name: str) -> None:
        """Create a group with the default retry policy."""
        if name in self._names.groups:
            raise Refused(Rule.REQUEST, "the consumer group exists already", value=name)
        await self._catalog.make_group(name)

    async def unread(self, group: Group) -> list[Unfinished]:
        """Return a group's unfinished messages by topic, including its visible retries."""
        found = {*await self._progress.topics_of(group), *self._progress.failed_of(group)}
        topics = sorted(found, key=lambda topic: topic.name)
        unread = [Unfinished(topic.name, await self._progress.unread(group, topic)) for topic in topics]
        return [each for each in unread if each.unread]

    async def remove_group(self, name: str, *, is_forced: bool, with_dead_letters: bool = False) -> None:
        """Remove a group with its settings, progress and retries; unless forced, refuse if it has unread messages.

        Its dead-letter queue stays under its name, unless ``with_dead_letters``. In that case all letters are removed,
        including those of earlier groups of the same name.
        """
        group = self._catalog.known_group(name)
        check_not_forwarder(name)
        if name == GIVEN_UP_GROUP:
            raise Refused(Rule.GROUP, "this group is reserved for unresolved transactions", value=name)
        if not is_forced:
            facts = []
            waiting = (await self._reader.figures()).get(group.group_id, 0)
            sent_back = self._names.topics.get(retry_topic(name))
            waiting += await self.waiting(sent_back) if sent_back is not None else 0
            facts += [f"{waiting} retries wait"] if waiting else []
            facts += [f"{each.unread} of topic {each.topic!r} are unread" for each in await self.unread(group)]
            if facts:
                why = f"the group still has work: {', '.join(facts)}; --force gives that up"
                raise Refused(Rule.REQUEST, why)
        group = self._catalog.known_group(name)  # nothing is awaited from here on
        letters = self._names.topics.get(dead_letter_topic(name)) if with_dead_letters else None
        if letters is not None:
            self._check_no_job(name)
        retries = self._names.topics.get(retry_topic(name))
        await self._procedures.remove(group, *(topic for topic in (letters, retries) if topic is not None))

    async def reset_group(self, group_name: str, topic_name: str, to: int) -> tuple[int, ...]:
        """Reset a group to the beginning, the end, or the first message stored at or after a time.

        ``to`` is ``BEGIN``, ``END`` or epoch ms. Return the new offset of each queue. The reset does not affect the
        group's retries, pending or visible.
        """
        check_not_forwarder(group_name)
        group, topic = self._catalog.known_group(group_name), self._catalog.known_topic(topic_name)
        if not self._names.reads(group.group_id, topic_name):
            why = f"topic {topic_name!r} is the cluster's, and so is how far a group is with it: reset it there"
            raise Refused(Rule.TOPIC, why, value=group_name)
        if not await self._progress.readers_of(topic, [group]):
            raise Refused(Rule.NOT_FOUND, f"the group has never read topic {topic_name!r}", value=group_name)
        reader = self._reader
        ends = [await reader.end(topic.topic_id, queue_id) for queue_id in range(topic.queues)]
        first = [
            end if to == END else await self._offset_at(topic, queue_id, end, to) for queue_id, end in enumerate(ends)
        ]
        await self._procedures.reset(
            self._catalog.known_topic(topic_name), self._catalog.known_group(group_name), first, ends
        )
        return tuple(first)

    async def _offset_at(self, topic: Topic, queue_id: int, end: int, at_ms: int) -> int:
        """Return the first stored offset, or the first one stored at or after a time."""
        place = Place(topic.topic_id, queue_id)

        def find(store: Store) -> int:
            begin = begin_of(store, place, 0, end)
            return begin if at_ms == BEGIN else offset_stored_at(store, place, begin, end, at_ms)

        return await self._reader.run(find)


def _check_queues(queues: int, least: int) -> None:
    if queues and not max(1, least) <= queues <= QUEUES_PER_TOPIC_MAX:
        limit = f"{max(1, least)} to {QUEUES_PER_TOPIC_MAX}"
        raise Refused(
            Rule.REQUEST, "the number of queues is out of range (queues cannot be removed)", value=queues, limit=limit
        )


def _check_derived(name: str, flow: FlowChange, quotas: QuotaChange, index: IndexChange) -> None:
    """Raise ``Refused(TOPIC)`` for a change that a retry or dead-letter topic cannot have."""
    if flow != FLOW_STAYS:
        raise Refused(Rule.TOPIC, "a retry or dead-letter topic cannot be paused; pause its group", value=name)
    if quotas != QUOTAS_STAY:
        raise Refused(Rule.TOPIC, "a retry or dead-letter topic has no quotas", value=name)
    if index != INDEX_STAYS:
        why = "retries and dead letters are indexed with the topic that their messages were sent to"
        raise Refused(Rule.TOPIC, why, value=name)
