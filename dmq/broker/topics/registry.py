"""Topics, consumer groups and retry lanes: durable records with small numeric ids, held whole in memory.

Their rows are drawn in ``dmq.store.schema.names``. Ids are shared by all of them and never used again, so an id alone
can be the scope of an index entry.

The retry topic of a group, ``%RETRY%<group>``, has one *lane* per topic the group fails messages of: a queue log of its
own, so that the retries of one topic never stand in front of those of another. A lane is made when it is first needed.
A group whose consumers pull and send back (``dmq.broker.classic.send_back``) has a topic of that name, with one queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from broker_adapter.contracts.errors import Overloaded
from broker_adapter.contracts.limits import GROUPS_MAX, TOPICS_MAX
from broker_adapter.contracts.message import MessageType
from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX, RETRY_PREFIX, dead_letter_topic, retry_topic
from dmq.config.units import ALL_TOPICS, TopicPatterns
from dmq.errors import StoreCorrupt
from dmq.store.engines.engine import Rows
from dmq.store.schema import keys
from dmq.store.schema import names as schema
from dmq.store.schema.keys import Family
from dmq.store.schema.names import (
    AS_CONFIGURED,
    GROUPED,
    MIXED,
    NO_QUOTAS,
    GroupSettings,
    Keep,
    NameKind,
    NameRecord,
    TopicQuotas,
    TopicSettings,
)
from dmq.store.writer.operations import Delete, Emit, Op, Put
from dmq.trail.events import EventKind, name_event
from retry.policy import RetryPolicy

FORWARDER_GROUP = "dmq-forwarder"  # reads every topic in front of a cluster; no client's and no operator's
_DERIVED = (DEAD_LETTER_PREFIX, RETRY_PREFIX)
_ROWS_MAX = 10_000_000  # lanes and dead-letter queues come with groups that fail, and are not counted as topics


class Topic(NamedTuple):
    """A topic. ``message_type`` is the only one it takes, ``None``: it is mixed. ``holds`` says what it ever took.

    ``keep`` is how long it keeps what is in its queues, as far as that was said. What falls due is held while it is
    paused, and above ``deliver_rate`` messages a second. ``quotas`` are its own, as far as they were said.
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

    @property
    def is_fifo(self) -> bool:
        """Whether it takes nothing without a message group, or every message so far, and there were some, has one."""
        return self.message_type is MessageType.FIFO or self.holds == GROUPED


class Group(NamedTuple):
    """A consumer group. What follows on ``created_at_ms`` is ``None`` where it was not set.

    ``retries`` says who keeps what it fails of a cluster's topics: "here" or "cluster". ``stay`` is of the forwarder:
    the topics that the run before kept from it. A group that is paused gets nothing, and one with a ``deliver_rate``
    so many messages a second.
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


class Scanned(Protocol):
    """What gives the rows of a store: an open one, or what can be read of one."""

    def scan(self, family: Family, start: bytes, stop: bytes, *, limit: int) -> Rows:
        """As ``Engine.scan``."""
        ...


class Names:
    """All topics, groups and lanes. Changed by the event loop only; read from any thread."""

    def __init__(self, source: Scanned, stay: TopicPatterns = ALL_TOPICS) -> None:
        """``stay``: the topics that belong to this broker; all others are a cluster's, which it stands in front of."""
        self.stay = stay
        self.topics: dict[str, Topic] = {}
        self.groups: dict[str, Group] = {}
        self.topics_by_id: dict[int, Topic] = {}  # lanes too
        self.groups_by_id: dict[int, Group] = {}
        self.lanes: dict[tuple[int, int], Topic] = {}  # by (group id, topic id)
        self.slowed: dict[int, Topic] = {}  # topics that are paused or have a rate, by id
        self.limited: dict[int, Topic] = {}  # topics that have quotas of their own, by id
        self.paused: set[str] = set()  # groups
        self.rates: dict[str, int] = {}  # of groups that have one
        self.removing: set[tuple[type[Topic | Group], str]] = set()  # on their way out: their names are not free yet
        self._derived = 0  # retry topics and dead-letter queues, which are not counted as topics
        self._next_id = 1
        for key, value in source.scan(Family.META, *keys.meta_range(keys.META_NAME), limit=_ROWS_MAX).rows:
            self._add(keys.meta_id(key), value)
        for key, value in source.scan(Family.META, *keys.meta_range(keys.META_HOLDS), limit=_ROWS_MAX).rows:
            self._hold(keys.meta_id(key), value)
        for key, value in source.scan(Family.META, *keys.meta_range(keys.META_SETTINGS), limit=_ROWS_MAX).rows:
            self._set(keys.meta_id(key), value)

    @property
    def forwarder_id(self) -> int:
        """The id of the group that takes messages to a cluster; 0 in a store that never stood before one."""
        found = self.groups.get(FORWARDER_GROUP)
        return found.group_id if found is not None else 0

    def leaves(self, topic: str) -> bool:
        """Say whether what is sent to a topic leaves for a cluster."""
        return not self.stay.has(topic) and not self.is_derived(topic)

    @staticmethod
    def is_derived(topic: str) -> bool:
        """Say whether a topic is one of retries or of dead letters."""
        return topic.startswith(_DERIVED)

    def reads(self, group_id: int, topic: str) -> bool:
        """Say whether a group is to read the queues of a topic here: the forwarder if it leaves, else all others."""
        return self.leaves(topic) == (group_id == self.forwarder_id)

    # -- topics -------------------------------------------------------------------------------------------------------

    def plan_topic(
        self, name: str, queues: int, now_ms: int, settings: TopicSettings = MIXED
    ) -> tuple[Topic, list[Op]]:
        """Return a new topic and the ops that make it durable; ``add_topic`` it once they are submitted."""
        if len(self.topics) - self._derived >= TOPICS_MAX and not self.is_derived(name):
            raise Overloaded(f"topic {name!r} cannot be created: there are too many topics", limit=TOPICS_MAX)
        topic = Topic(self._next_id, name, queues, now_ms, 0, *settings)
        rows = _topic_rows(topic)[: 1 if settings == MIXED else 2]  # there are no settings to take away
        return topic, [*rows, Emit(name_event(EventKind.TOPIC_CREATED, topic.topic_id))]

    @staticmethod
    def plan_change(topic: Topic, said: str = "") -> list[Op]:
        """Return the ops that make a topic's queues and settings durable; ``add_topic`` it once they are submitted.

        ``said`` is what the trail says of the change.
        """
        return [*_topic_rows(topic), Emit(name_event(EventKind.TOPIC_CHANGED, topic.topic_id, said))]

    def add_topic(self, topic: Topic) -> None:
        """Make a topic known."""
        self._derived += self.is_derived(topic.name) and topic.name not in self.topics
        self.change_topics([topic])
        self._next_id = max(self._next_id, topic.topic_id + 1)

    def plan_first(self, taken: Mapping[str, int]) -> tuple[list[Topic], list[Op]]:
        """Return topics, and the ops that ride with a send, if it is the first with, or without, a message group there.

        ``taken`` says what the send holds, by topic name; ``change_topics`` once it is submitted.
        """
        known = [(self.topics[name], holds) for name, holds in taken.items()]
        changed = [topic._replace(holds=topic.holds | holds) for topic, holds in known if holds & ~topic.holds]
        return changed, [
            Put(Family.META, keys.holds_key(each.topic_id), schema.encode_holds(each.holds)) for each in changed
        ]

    def change_topics(self, topics: Iterable[Topic]) -> None:
        """Make known what is changed of topics."""
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
        """Return the group's dead-letter queue, and the ops that must ride with its first use."""
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
        """Return where the group's retries of a topic go, and the ops that must ride with its first use."""
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
        """Return a new group and the ops that make it durable; ``add_group`` it once they are submitted."""
        if len(self.groups) >= GROUPS_MAX:
            raise Overloaded(f"group {name!r} cannot be created: there are too many groups", limit=GROUPS_MAX)
        group = Group(self._next_id, name, now_ms)
        return group, [
            Put(Family.META, keys.name_key(group.group_id), _record(group)),
            Emit(name_event(EventKind.GROUP_CREATED, group.group_id)),
        ]

    def plan_settings(self, group: Group, said: str = "") -> list[Op]:
        """As ``plan_change``, of a group; ``add_group`` it once they are submitted."""
        settings = GroupSettings(*group[3:])
        return [
            Put(Family.META, keys.settings_key(group.group_id), schema.encode_group_settings(settings)),
            Emit(name_event(EventKind.GROUP_CHANGED, group.group_id, said)),
        ]

    def group_of_letters(self, name: str) -> Group | None:
        """Return whose dead letters lie under a name: the group that has it, else the last one that had it."""
        known = self.groups.get(name)
        if known is not None:
            return known
        removed = (group for group in self.groups_by_id.values() if group.name == name)
        return max(removed, key=lambda group: group.group_id, default=None)

    def is_left(self, topic: Topic) -> bool:
        """Say whether a topic is one of retries or of dead letters whose group is gone, or never was."""
        name = topic.name.removeprefix(DEAD_LETTER_PREFIX).removeprefix(RETRY_PREFIX)
        return name != topic.name and name not in self.groups

    def add_group(self, group: Group) -> None:
        """Make a group, or its new settings, known."""
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
        """Return the ops by which a topic or a group ceases to be known; ``forget`` it once they are submitted.

        Its id keeps its name, for the audit trail and for dead letters that came of it.
        """
        if isinstance(found, Topic):
            name_id, kind = found.topic_id, EventKind.TOPIC_REMOVED
        else:
            name_id, kind = found.group_id, EventKind.GROUP_REMOVED
        rows = [Delete(Family.META, keys.settings_key(name_id)), Delete(Family.META, keys.holds_key(name_id))]
        record = _record(found, is_removed=True)
        return [Put(Family.META, keys.name_key(name_id), record), *rows, Emit(name_event(kind, name_id))]

    def forget(self, found: Topic | Group) -> None:
        """Hide a topic or a group from look-ups by name, and keep its name taken until ``free_name``."""
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
        """Let a name be taken again: nothing is left of who had it."""
        self.removing.discard((type(found), found.name))

    def lanes_of(self, name_id: int) -> list[tuple[int, int]]:
        """Return the keys of the lanes that belong to a topic or a group."""
        return [key for key in self.lanes if name_id in key]

    def drop_lane(self, key: tuple[int, int]) -> list[Op]:
        """Forget a lane that is empty, and return the ops that do so; its id is not used again."""
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
            group = self.groups_by_id.get(group_id)  # made before its lanes, so it has a smaller id
            if group is None:
                raise StoreCorrupt(f"retry lane {name_id} belongs to group {group_id}, which has no record")
            self._add_lane(Topic(name_id, retry_topic(group.name), queues, created_at_ms), group_id, topic_id)

    def _hold(self, topic_id: int, value: bytes) -> None:
        topic, holds = self.topics_by_id.get(topic_id), schema.decode_holds(topic_id, value)
        if topic is None:
            raise StoreCorrupt(f"topic {topic_id} holds messages and has no record")
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
    settings = TopicSettings(topic.message_type, topic.keep, topic.paused_since_ms, topic.deliver_rate, topic.quotas)
    rows: list[Op] = [Put(Family.META, keys.name_key(topic.topic_id), _record(topic))]
    if settings != MIXED:
        rows.append(Put(Family.META, keys.settings_key(topic.topic_id), schema.encode_topic_settings(settings)))
    else:
        rows.append(Delete(Family.META, keys.settings_key(topic.topic_id)))
    return rows


def _record(found: Topic | Group, *, is_removed: bool = False) -> bytes:
    kind, queues = (NameKind.TOPIC, found.queues) if isinstance(found, Topic) else (NameKind.GROUP, 0)
    return schema.encode_name(NameRecord(kind, queues, found.created_at_ms, found.name, is_removed=is_removed))
