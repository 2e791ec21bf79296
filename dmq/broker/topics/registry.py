"""Registry of topics, consumer groups and retry lanes: durable records with small numeric ids, all held in memory.

``dmq.store.schema.topics.names`` defines their rows. All of them share one sequence of ids, which are never reused, so
an id alone can be the scope of an index entry.

The retry topic of a group, ``%RETRY%<group>``, has one *lane* for each topic with failed messages of the group. A lane
is a queue log of its own, so that retries of one topic never block those of another. It is created at its first use.
If the consumers of a group pull and send back (``dmq.broker.classic.send_back``), the group has a topic of that name
with one queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from broker_adapter.contracts.errors import Overloaded, Refused, Rule
from broker_adapter.contracts.limits import GROUPS_MAX, TOPICS_MAX
from broker_adapter.contracts.message import MessageType
from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX, RETRY_PREFIX, dead_letter_topic, retry_topic
from dmq.config.units import ALL_TOPICS, TopicPatterns
from dmq.errors import StoreCorrupt
from dmq.store.schema import keys
from dmq.store.schema.keys import Family
from dmq.store.schema.topics import names as schema
from dmq.store.schema.topics.names import (
    AS_CONFIGURED,
    GROUPED,
    MIXED,
    NO_QUOTAS,
    Keep,
    NameKind,
    NameRecord,
    StoredGroupSettings,
    TopicQuotas,
    TopicSettings,
)
from dmq.store.writer.operations import Delete, Emit, IndexProperties, Op, Put
from dmq.store.writer.recount import Scanned
from dmq.trail.events import EventKind, name_event
from retry.policy import RetryPolicy

FORWARDER_GROUP = "dmq-forwarder"  # forwards messages to a cluster; closed to clients and operators
_DERIVED = (DEAD_LETTER_PREFIX, RETRY_PREFIX)
_ROWS_MAX = 10_000_000  # includes lanes and dead-letter queues, which do not count as topics


class Topic(NamedTuple):
    """Topic record. ``message_type`` is the only allowed type, ``None``: mixed.

    ``holds`` records whether it ever received messages with, or without, a message group. ``keep`` is its retention and
    ``quotas`` its quotas, as far as they are set. Due messages are held while it is paused, and above ``deliver_rate``
    messages a second. Messages are found by the values of ``index_properties``.
    """

    topic_id: int
    name: str
    queues: int
    created_at_ms: int
    holds: int = 0
    message_type: MessageType | None = None
    keep: Keep = AS_CONFIGURED
    paused_since_ms: int | None = None
    deliver_rate: int | None = None
    quotas: TopicQuotas = NO_QUOTAS
    index_properties: tuple[str, ...] = ()

    @property
    def is_fifo(self) -> bool:
        """Whether all messages have a message group: by the topic's type, or because all messages so far had one."""
        return self.message_type is MessageType.FIFO or self.holds == GROUPED

    def check_indexed(self, name: str) -> None:
        """Raise ``Refused`` if a user property is not indexed."""
        if name not in self.index_properties:
            known = f"indexed are {', '.join(self.index_properties)}" if self.index_properties else "none is"
            hint = f"'dmq topic set {self.name} --index-property {name}' adds it"
            raise Refused(Rule.REQUEST, f"the property is not indexed in the topic ({known}); {hint}", value=name)


class Group(NamedTuple):
    """Consumer group record. Fields after ``created_at_ms`` are ``None`` if they were not set.

    ``retries`` selects the place of retries of cluster topics: "here" or "cluster". ``stay`` is set for the forwarder
    only: the topics that the previous run kept local. A paused group gets no messages; ``deliver_rate`` is in messages
    a second.
    """

    group_id: int
    name: str
    created_at_ms: int
    policy: RetryPolicy | None = None
    is_fifo: bool | None = None
    retries: str | None = None
    stay: str | None = None
    paused_since_ms: int | None = None
    deliver_rate: int | None = None


class Names:
    """All topics, groups and lanes. Only the event loop changes it; any thread may read it."""

    def __init__(self, source: Scanned, stay: TopicPatterns = ALL_TOPICS) -> None:
        """Load all records; ``stay`` selects the topics of this broker, and all others belong to a cluster."""
        self.stay = stay
        self.topics: dict[str, Topic] = {}
        self.groups: dict[str, Group] = {}
        self.topics_by_id: dict[int, Topic] = {}  # including lanes
        self.groups_by_id: dict[int, Group] = {}
        self.lanes: dict[tuple[int, int], Topic] = {}  # by (group id, topic id)
        self.slowed: dict[int, Topic] = {}  # topics that are paused or have a rate, by id
        self.limited: dict[int, Topic] = {}  # topics that have quotas of their own, by id
        self.paused: set[str] = set()  # groups
        self.rates: dict[str, int] = {}  # delivery rates by group
        self.removing: set[tuple[type[Topic | Group], str]] = set()  # under removal: their names are not free yet
        self._derived = 0  # number of retry topics and dead-letter queues, which do not count as topics
        self._next_id = 1
        for key, value in source.scan(Family.META, *keys.meta_range(keys.META_NAME), limit=_ROWS_MAX).rows:
            self._add(keys.meta_id(key), value)
        for key, value in source.scan(Family.META, *keys.meta_range(keys.META_HOLDS), limit=_ROWS_MAX).rows:
            self._hold(keys.meta_id(key), value)
        for key, value in source.scan(Family.META, *keys.meta_range(keys.META_SETTINGS), limit=_ROWS_MAX).rows:
            self._set(keys.meta_id(key), value)

    @property
    def forwarder_id(self) -> int:
        """Id of the group that forwards messages to a cluster; 0 if this store never forwarded."""
        found = self.groups.get(FORWARDER_GROUP)
        return found.group_id if found is not None else 0

    def leaves(self, topic: str) -> bool:
        """Return True if messages of a topic are forwarded to a cluster."""
        return not self.stay.has(topic) and not self.is_derived(topic)

    @staticmethod
    def is_derived(topic: str) -> bool:
        """Return True if a topic is a retry or dead-letter topic."""
        return topic.startswith(_DERIVED)

    def reads(self, group_id: int, topic: str) -> bool:
        """Return True if a group may read the queues of a topic here.

        Only the forwarder reads topics that are forwarded to a cluster; all other groups read only local topics.
        """
        return self.leaves(topic) == (group_id == self.forwarder_id)

    # -- topics -------------------------------------------------------------------------------------------------------

    def plan_topic(
        self, name: str, queues: int, now_ms: int, settings: TopicSettings = MIXED
    ) -> tuple[Topic, list[Op]]:
        """Return a new topic and its ops; call ``add_topic`` once they are submitted."""
        if len(self.topics) - self._derived >= TOPICS_MAX and not self.is_derived(name):
            raise Overloaded(f"topic {name!r} cannot be created: there are too many topics", limit=TOPICS_MAX)
        topic = Topic(self._next_id, name, queues, now_ms, 0, *settings)
        rows = _topic_rows(topic)[: 1 if settings == MIXED else 2]  # a new topic has no settings row to delete
        return topic, [*rows, Emit(name_event(EventKind.TOPIC_CREATED, topic.topic_id))]

    @staticmethod
    def plan_change(topic: Topic, said: str = "") -> list[Op]:
        """Return the ops of a topic's queues and settings; call ``add_topic`` once they are submitted.

        ``said`` describes the change in the audit trail.
        """
        return [*_topic_rows(topic), Emit(name_event(EventKind.TOPIC_CHANGED, topic.topic_id, said))]

    def add_topic(self, topic: Topic) -> None:
        """Register a topic."""
        self._derived += self.is_derived(topic.name) and topic.name not in self.topics
        self.change_topics([topic])
        self._next_id = max(self._next_id, topic.topic_id + 1)

    def plan_first(self, taken: Mapping[str, int]) -> tuple[list[Topic], list[Op]]:
        """Return the topics that receive their first message with, or without, a message group, and the ops to commit
        with it.

        ``taken`` maps topic names to the ``holds`` flags of the send. Call ``change_topics`` once the ops are
        submitted.
        """
        known = [(self.topics[name], holds) for name, holds in taken.items()]
        changed = [topic._replace(holds=topic.holds | holds) for topic, holds in known if holds & ~topic.holds]
        return changed, [
            Put(Family.META, keys.holds_key(each.topic_id), schema.encode_holds(each.holds)) for each in changed
        ]

    def change_topics(self, topics: Iterable[Topic]) -> None:
        """Register changed topics."""
        for topic in topics:
            self.topics[topic.name] = self.topics_by_id[topic.topic_id] = topic
            if topic.paused_since_ms is not None or topic.deliver_rate is not None:
                self.slowed[topic.topic_id] = topic
            else:
                self.slowed.pop(topic.topic_id, None)
            if topic.quotas != NO_QUOTAS:
                self.limited[topic.topic_id] = topic
            else:
                self.limited.pop(topic.topic_id, None)

    def dead_letters(self, group: Group, now_ms: int) -> tuple[Topic, list[Op]]:
        """Return the group's dead-letter queue, and the ops to commit with its first use."""
        name = dead_letter_topic(group.name)
        known = self.topics.get(name)
        if known is not None:
            return known, []
        topic = Topic(self._next_id, name, 1, now_ms)
        self.add_topic(topic)
        return topic, [
            Put(Family.META, keys.name_key(topic.topic_id), _record(topic)),
            Emit(name_event(EventKind.TOPIC_CREATED, topic.topic_id)),
        ]

    def lane(self, group: Group, topic_id: int, now_ms: int) -> tuple[Topic, list[Op]]:
        """Return the group's retry lane of a topic, and the ops to commit with its first use."""
        known = self.lanes.get((group.group_id, topic_id))
        if known is not None:
            return known, []
        lane = Topic(self._next_id, retry_topic(group.name), 1, now_ms)
        self._add_lane(lane, group.group_id, topic_id)
        record = NameRecord(NameKind.LANE, 1, now_ms, "", group.group_id, topic_id)
        return lane, [Put(Family.META, keys.name_key(lane.topic_id), schema.encode_name(record))]

    def _add_lane(self, lane: Topic, group_id: int, topic_id: int) -> None:
        self.lanes[group_id, topic_id] = self.topics_by_id[lane.topic_id] = lane
        self._next_id = max(self._next_id, lane.topic_id + 1)

    # -- groups -------------------------------------------------------------------------------------------------------

    def plan_group(self, name: str, now_ms: int) -> tuple[Group, list[Op]]:
        """Return a new group and its ops; call ``add_group`` once they are submitted."""
        if len(self.groups) >= GROUPS_MAX:
            raise Overloaded(f"group {name!r} cannot be created: there are too many groups", limit=GROUPS_MAX)
        group = Group(self._next_id, name, now_ms)
        return group, [
            Put(Family.META, keys.name_key(group.group_id), _record(group)),
            Emit(name_event(EventKind.GROUP_CREATED, group.group_id)),
        ]

    def plan_settings(self, group: Group, said: str = "") -> list[Op]:
        """As ``plan_change``, for a group; call ``add_group`` once the ops are submitted."""
        settings = StoredGroupSettings(*group[3:])
        return [
            Put(Family.META, keys.settings_key(group.group_id), schema.encode_group_settings(settings)),
            Emit(name_event(EventKind.GROUP_CHANGED, group.group_id, said)),
        ]

    def group_of_letters(self, name: str) -> Group | None:
        """Return the group of the dead letters under a name: the current group, else the last one of that name."""
        known = self.groups.get(name)
        if known is not None:
            return known
        removed = (group for group in self.groups_by_id.values() if group.name == name)
        return max(removed, key=lambda group: group.group_id, default=None)

    def is_left(self, topic: Topic) -> bool:
        """Return True if a topic is a retry or dead-letter topic without an existing group."""
        name = topic.name.removeprefix(DEAD_LETTER_PREFIX).removeprefix(RETRY_PREFIX)
        return name != topic.name and name not in self.groups

    def add_group(self, group: Group) -> None:
        """Register a group or its new settings."""
        self.groups[group.name] = self.groups_by_id[group.group_id] = group
        if group.paused_since_ms is not None:
            self.paused.add(group.name)
        else:
            self.paused.discard(group.name)
        if group.deliver_rate is not None:
            self.rates[group.name] = group.deliver_rate
        else:
            self.rates.pop(group.name, None)
        self._next_id = max(self._next_id, group.group_id + 1)

    # -- removal ------------------------------------------------------------------------------------------------------

    def plan_removal(self, found: Topic | Group) -> list[Op]:
        """Return the ops that remove a topic or a group; call ``forget`` once they are submitted.

        Its id keeps its name, for the audit trail and for its dead letters.
        """
        rows: list[Op] = []
        if isinstance(found, Topic):
            name_id, kind = found.topic_id, EventKind.TOPIC_REMOVED
            rows += [IndexProperties(name_id, ())] if found.index_properties else []
        else:
            name_id, kind = found.group_id, EventKind.GROUP_REMOVED
        rows += [Delete(Family.META, keys.settings_key(name_id)), Delete(Family.META, keys.holds_key(name_id))]
        record = _record(found, is_removed=True)
        return [Put(Family.META, keys.name_key(name_id), record), *rows, Emit(name_event(kind, name_id))]

    def forget(self, found: Topic | Group) -> None:
        """Hide a topic or a group from lookups by name; its name stays reserved until ``free_name``."""
        self.removing.add((type(found), found.name))
        if isinstance(found, Topic):
            self._derived -= self.is_derived(found.name) and found.name in self.topics
            self.topics.pop(found.name, None)
            self.slowed.pop(found.topic_id, None)
            self.limited.pop(found.topic_id, None)
        else:
            self.groups.pop(found.name, None)
            self.paused.discard(found.name)
            self.rates.pop(found.name, None)

    def free_name(self, found: Topic | Group) -> None:
        """Free the name of a removed topic or group, once no data of it is left."""
        self.removing.discard((type(found), found.name))

    def lanes_of(self, name_id: int) -> list[tuple[int, int]]:
        """Return the keys of the lanes of a topic or a group."""
        return [key for key in self.lanes if name_id in key]

    def drop_lane(self, key: tuple[int, int]) -> list[Op]:
        """Remove an empty lane and return the ops; its id is not reused."""
        lane = self.lanes.pop(key)
        del self.topics_by_id[lane.topic_id]
        record = NameRecord(NameKind.LANE, lane.queues, lane.created_at_ms, is_removed=True)
        return [Put(Family.META, keys.name_key(lane.topic_id), schema.encode_name(record))]

    # -- loading ------------------------------------------------------------------------------------------------------

    def _add(self, name_id: int, value: bytes) -> None:
        kind, queues, created_at_ms, name, group_id, topic_id, is_removed = schema.decode_name(name_id, value)
        if is_removed:
            self._next_id = max(self._next_id, name_id + 1)
            if kind is NameKind.TOPIC:
                self.topics_by_id[name_id] = Topic(name_id, name, queues, created_at_ms)
            elif kind is NameKind.GROUP:
                self.groups_by_id[name_id] = Group(name_id, name, created_at_ms)
        elif kind is NameKind.TOPIC:
            self.add_topic(Topic(name_id, name, queues, created_at_ms))
        elif kind is NameKind.GROUP:
            self.add_group(Group(name_id, name, created_at_ms))
        else:
            group = self.groups_by_id.get(group_id)  # created before its lanes, so it has a smaller id
            if group is None:
                raise StoreCorrupt(f"retry lane {name_id} belongs to group {group_id}, which has no record")
            self._add_lane(Topic(name_id, retry_topic(group.name), queues, created_at_ms), group_id, topic_id)

    def _hold(self, topic_id: int, value: bytes) -> None:
        topic, holds = self.topics_by_id.get(topic_id), schema.decode_holds(topic_id, value)
        if topic is None:
            raise StoreCorrupt(f"topic {topic_id} has messages but no record")
        self.topics[topic.name] = self.topics_by_id[topic_id] = topic._replace(holds=holds)

    def _set(self, name_id: int, value: bytes) -> None:
        topic = self.topics_by_id.get(name_id)
        if topic is None:
            self._set_group(name_id, value)
            return
        try:
            settings = schema.decode_topic_settings(value)
        except ValueError as error:
            raise StoreCorrupt(f"the settings of topic {name_id} cannot be read: {error}") from error
        self.add_topic(topic._replace(**settings._asdict()))

    def _set_group(self, group_id: int, value: bytes) -> None:
        group = self.groups_by_id.get(group_id)
        try:
            if group is None:
                raise ValueError("no such group")
            settings = schema.decode_group_settings(value)
            self.add_group(group._replace(**settings._asdict()))
        except ValueError as error:
            raise StoreCorrupt(f"the settings of group {group_id} cannot be read: {error}") from error


def _topic_rows(topic: Topic) -> list[Op]:
    settings = TopicSettings(*topic[5:])
    rows: list[Op] = [Put(Family.META, keys.name_key(topic.topic_id), _record(topic))]
    if settings != MIXED:
        rows.append(Put(Family.META, keys.settings_key(topic.topic_id), schema.encode_topic_settings(settings)))
    else:
        rows.append(Delete(Family.META, keys.settings_key(topic.topic_id)))
    return rows


def _record(found: Topic | Group, *, is_removed: bool = False) -> bytes:
    kind, queues = (NameKind.TOPIC, found.queues) if isinstance(found, Topic) else (NameKind.GROUP, 0)
    return schema.encode_name(NameRecord(kind, queues, found.created_at_ms, found.name, is_removed=is_removed))
