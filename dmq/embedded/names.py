"""Topics, consumer groups and retry lanes: durable records with small numeric ids, held whole in memory.

    record     version 1 | kind 1 | queues 2 | created_at_ms 8 | name
                                                               | group id 4 | topic id 4      of a retry lane
               version 1 | 4 | queues 2 | created_at_ms 8 | kind 1 | name    of what was removed: its name outlives it
    settings   version 1 | JSON: policy, is_fifo               of a group, under a key of its own
               version 1 | JSON (``topic_settings``)           of a topic, the same; without it the topic is mixed
    holds      bits 1: PLAIN, GROUPED                          of a topic, under a key of its own

Ids are shared by all of them and never used again, so an id alone can be the scope of an index entry.

The retry topic of a group, ``%RETRY%<group>``, has one *lane* per topic the group fails messages of: a queue log of its
own, so that the retries of one topic never stand in front of those of another. A lane is made when it is first needed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import NamedTuple

from broker_adapter.errors import Overloaded
from broker_adapter.limits import GROUPS_MAX, TOPICS_MAX
from broker_adapter.message import MessageType
from broker_adapter.topics import DEAD_LETTER_PREFIX, dead_letter_topic, retry_topic
from dmq.audit.events import EventKind, name_event
from dmq.embedded.topic_settings import AS_CONFIGURED, MIXED, Keep, TopicSettings, decode_settings, encode_settings
from dmq.errors import StoreCorrupt
from dmq.store.keys import holds_key, holds_range, name_key, name_range, settings_key, settings_range
from dmq.store.ops import Delete, Emit, Family, Op, Put
from dmq.store.store import Store
from retry.policy import PolicyError, RetryPolicy, from_plain, to_plain

_ROWS_MAX = 10_000_000  # lanes and dead-letter queues come with groups that fail, and are not counted as topics
PLAIN, GROUPED = 1, 2
_LANE = struct.Struct(">II")
_RECORD = struct.Struct(">BBHQ")
_VERSION = 1


class _Kind(IntEnum):
    TOPIC = 1
    GROUP = 2
    LANE = 3
    REMOVED = 4


class Topic(NamedTuple):
    """A topic. ``message_type`` is the only one it takes, ``None``: it is mixed. ``holds`` says what it ever took.

    ``keep`` is how long it keeps what is in its queues, as far as that was said.
    """

    topic_id: int
    name: str
    queues: int
    created_at_ms: int
    holds: int = 0
    message_type: MessageType | None = None
    keep: Keep = AS_CONFIGURED

    @property
    def is_fifo(self) -> bool:
        """Whether it takes nothing without a message group, or every message so far, and there were some, has one."""
        return self.message_type is MessageType.FIFO or self.holds == GROUPED


class Group(NamedTuple):
    """A consumer group. ``policy`` and ``is_fifo`` are ``None`` where they were not set."""

    group_id: int
    name: str
    created_at_ms: int
    policy: RetryPolicy | None = None
    is_fifo: bool | None = None


class Names:
    """All topics, groups and lanes. Changed by the event loop only; read from any thread."""

    def __init__(self, store: Store) -> None:
        self.topics: dict[str, Topic] = {}
        self.groups: dict[str, Group] = {}
        self.topics_by_id: dict[int, Topic] = {}  # lanes too
        self.groups_by_id: dict[int, Group] = {}
        self.lanes: dict[tuple[int, int], Topic] = {}  # by (group id, topic id)
        self.removing: set[tuple[type[Topic | Group], str]] = set()  # on their way out: their names are not free yet
        self._derived = 0  # dead-letter queues, which are not counted as topics
        self._next_id = 1
        for key, value in store.scan(Family.META, *name_range(), limit=_ROWS_MAX).rows:
            self._add(int.from_bytes(key[1:5], "big"), value)
        for key, value in store.scan(Family.META, *holds_range(), limit=_ROWS_MAX).rows:
            topic = self.topics_by_id.get(int.from_bytes(key[1:5], "big"))
            if topic is None or len(value) != 1:
                raise StoreCorrupt(f"what topic {key[1:5].hex()} holds cannot be read")
            self.topics[topic.name] = self.topics_by_id[topic.topic_id] = topic._replace(holds=value[0])
        for key, value in store.scan(Family.META, *settings_range(), limit=_ROWS_MAX).rows:
            self._set(int.from_bytes(key[1:5], "big"), value)

    # -- topics -------------------------------------------------------------------------------------------------------

    def plan_topic(
        self, name: str, queues: int, now_ms: int, settings: TopicSettings = MIXED
    ) -> tuple[Topic, list[Op]]:
        """Return a new topic and the ops that make it durable; ``add_topic`` it once they are submitted."""
        if len(self.topics) - self._derived >= TOPICS_MAX:
            raise Overloaded(f"topic {name!r} cannot be created: there are too many topics", limit=TOPICS_MAX)
        topic = Topic(self._next_id, name, queues, now_ms, 0, *settings)
        rows = _topic_rows(topic)[: 1 if settings == MIXED else 2]  # there are no settings to take away
        return topic, [*rows, Emit(name_event(EventKind.TOPIC_CREATED, topic.topic_id))]

    @staticmethod
    def plan_change(topic: Topic) -> list[Op]:
        """Return the ops that make a topic's queues and settings durable; ``add_topic`` it once they are submitted."""
        return [*_topic_rows(topic), Emit(name_event(EventKind.TOPIC_CHANGED, topic.topic_id))]

    def add_topic(self, topic: Topic) -> None:
        """Make a topic known."""
        self._derived += topic.name.startswith(DEAD_LETTER_PREFIX) and topic.name not in self.topics
        self.topics[topic.name] = self.topics_by_id[topic.topic_id] = topic
        self._next_id = max(self._next_id, topic.topic_id + 1)

    def plan_first(self, taken: Mapping[str, int]) -> tuple[list[Topic], list[Op]]:
        """Return topics, and the ops that ride with a send, if it is the first with, or without, a message group there.

        ``taken`` says what the send holds, by topic name; ``change_topics`` once it is submitted.
        """
        known = [(self.topics[name], holds) for name, holds in taken.items()]
        changed = [topic._replace(holds=topic.holds | holds) for topic, holds in known if holds & ~topic.holds]
        return changed, [Put(Family.META, holds_key(each.topic_id), bytes((each.holds,))) for each in changed]

    def change_topics(self, topics: Iterable[Topic]) -> None:
        """Make known what topics hold now."""
        for topic in topics:
            self.topics[topic.name] = self.topics_by_id[topic.topic_id] = topic

    def dead_letters(self, group: Group, now_ms: int) -> tuple[Topic, list[Op]]:
        """Return the group's dead-letter queue, and the ops that must ride with its first use."""
        name = dead_letter_topic(group.name)
        known = self.topics.get(name)
        if known is not None:
            return known, []
        topic = Topic(self._next_id, name, 1, now_ms)
        self.add_topic(topic)
        return topic, [
            Put(Family.META, name_key(topic.topic_id), _encode(_Kind.TOPIC, 1, now_ms, name.encode())),
            Emit(name_event(EventKind.TOPIC_CREATED, topic.topic_id)),
        ]

    def lane(self, group: Group, topic_id: int, now_ms: int) -> tuple[Topic, list[Op]]:
        """Return where the group's retries of a topic go, and the ops that must ride with its first use."""
        known = self.lanes.get((group.group_id, topic_id))
        if known is not None:
            return known, []
        lane = Topic(self._next_id, retry_topic(group.name), 1, now_ms)
        self._add_lane(lane, group.group_id, topic_id)
        record = _encode(_Kind.LANE, 1, now_ms, _LANE.pack(group.group_id, topic_id))
        return lane, [Put(Family.META, name_key(lane.topic_id), record)]

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
            Put(Family.META, name_key(group.group_id), _encode(_Kind.GROUP, 0, now_ms, name.encode())),
            Emit(name_event(EventKind.GROUP_CREATED, group.group_id)),
        ]

    def plan_settings(self, group: Group) -> list[Op]:
        """Return the ops that make the group's settings durable; ``add_group`` it once they are submitted."""
        plain = {"policy": to_plain(group.policy) if group.policy is not None else None, "is_fifo": group.is_fifo}
        value = bytes((_VERSION,)) + json.dumps(plain).encode()
        return [
            Put(Family.META, settings_key(group.group_id), value),
            Emit(name_event(EventKind.GROUP_CHANGED, group.group_id)),
        ]

    def group_of_letters(self, name: str) -> Group | None:
        """Return whose dead letters lie under a name: the group that has it, else the last one that had it."""
        known = self.groups.get(name)
        if known is not None:
            return known
        removed = (group for group in self.groups_by_id.values() if group.name == name)
        return max(removed, key=lambda group: group.group_id, default=None)

    def is_left(self, topic: Topic) -> bool:
        """Say whether a topic is a dead-letter queue whose group is gone, or never was."""
        name = topic.name.removeprefix(DEAD_LETTER_PREFIX)
        return name != topic.name and name not in self.groups

    def add_group(self, group: Group) -> None:
        """Make a group, or its new settings, known."""
        self.groups[group.name] = self.groups_by_id[group.group_id] = group
        self._next_id = max(self._next_id, group.group_id + 1)

    # -- removing -----------------------------------------------------------------------------------------------------

    def plan_removal(self, found: Topic | Group) -> list[Op]:
        """Return the ops by which a topic or a group ceases to be known; ``forget`` it once they are submitted.

        Its id keeps its name, for the audit trail and for dead letters that came of it.
        """
        if isinstance(found, Topic):
            name_id, record = found.topic_id, _removed(_Kind.TOPIC, found.queues, found.created_at_ms, found.name)
            event = name_event(EventKind.TOPIC_REMOVED, name_id)
        else:
            name_id, record = found.group_id, _removed(_Kind.GROUP, 0, found.created_at_ms, found.name)
            event = name_event(EventKind.GROUP_REMOVED, name_id)
        rows = [Delete(Family.META, settings_key(name_id)), Delete(Family.META, holds_key(name_id))]
        return [Put(Family.META, name_key(name_id), record), *rows, Emit(event)]

    def forget(self, found: Topic | Group) -> None:
        """Hide a topic or a group from look-ups by name, and keep its name taken until ``free_name``."""
        self.removing.add((type(found), found.name))
        if isinstance(found, Topic):
            self._derived -= found.name.startswith(DEAD_LETTER_PREFIX) and found.name in self.topics
            self.topics.pop(found.name, None)
        else:
            self.groups.pop(found.name, None)

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
        record = _removed(_Kind.LANE, lane.queues, lane.created_at_ms, "")
        return [Put(Family.META, name_key(lane.topic_id), record)]

    # -- reading ------------------------------------------------------------------------------------------------------

    def _add(self, name_id: int, value: bytes) -> None:
        if len(value) < _RECORD.size or value[0] != _VERSION:
            raise StoreCorrupt(f"the record of name {name_id} cannot be read")
        _, kind, queues, created_at_ms = _RECORD.unpack_from(value)
        rest = value[_RECORD.size :]
        if kind == _Kind.TOPIC:
            self.add_topic(Topic(name_id, rest.decode(), queues, created_at_ms))
        elif kind == _Kind.GROUP:
            self.add_group(Group(name_id, rest.decode(), created_at_ms))
        elif kind == _Kind.LANE and len(rest) == _LANE.size:
            group_id, topic_id = _LANE.unpack(rest)
            group = self.groups_by_id.get(group_id)  # made before its lanes, so it has a smaller id
            if group is None:
                raise StoreCorrupt(f"retry lane {name_id} belongs to group {group_id}, which has no record")
            self._add_lane(Topic(name_id, retry_topic(group.name), queues, created_at_ms), group_id, topic_id)
        elif kind == _Kind.REMOVED and rest:
            self._next_id = max(self._next_id, name_id + 1)
            if rest[0] == _Kind.TOPIC:
                self.topics_by_id[name_id] = Topic(name_id, rest[1:].decode(), queues, created_at_ms)
            elif rest[0] == _Kind.GROUP:
                self.groups_by_id[name_id] = Group(name_id, rest[1:].decode(), created_at_ms)
        else:
            raise StoreCorrupt(f"the record of name {name_id} is of an unknown kind {kind}")

    def _set(self, name_id: int, value: bytes) -> None:
        topic = self.topics_by_id.get(name_id)
        if topic is None:
            self._set_group(name_id, value)
            return
        try:
            settings = decode_settings(value)
        except ValueError as error:
            raise StoreCorrupt(f"the settings of topic {name_id} cannot be read: {error}") from error
        self.add_topic(topic._replace(**settings._asdict()))

    def _set_group(self, group_id: int, value: bytes) -> None:
        group = self.groups_by_id.get(group_id)
        try:
            if group is None or value[:1] != bytes((_VERSION,)):
                raise ValueError("no such group" if group is None else "unknown version")
            plain = json.loads(value[1:])
            policy = from_plain(plain["policy"]) if plain["policy"] is not None else None
            self.groups[group.name] = self.groups_by_id[group_id] = group._replace(
                policy=policy, is_fifo=plain["is_fifo"]
            )
        except (ValueError, KeyError, TypeError, PolicyError) as error:
            raise StoreCorrupt(f"the settings of group {group_id} cannot be read: {error}") from error


def _topic_rows(topic: Topic) -> list[Op]:
    settings = TopicSettings(topic.message_type, topic.keep)
    record = _encode(_Kind.TOPIC, topic.queues, topic.created_at_ms, topic.name.encode())
    rows: list[Op] = [Put(Family.META, name_key(topic.topic_id), record)]
    if settings != MIXED:
        rows.append(Put(Family.META, settings_key(topic.topic_id), encode_settings(settings)))
    else:
        rows.append(Delete(Family.META, settings_key(topic.topic_id)))
    return rows


def _removed(kind: _Kind, queues: int, created_at_ms: int, name: str) -> bytes:
    return _encode(_Kind.REMOVED, queues, created_at_ms, bytes((kind,)) + name.encode())


def _encode(kind: _Kind, queues: int, created_at_ms: int, rest: bytes) -> bytes:
    return _RECORD.pack(_VERSION, kind, queues, created_at_ms) + rest
