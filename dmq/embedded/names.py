"""Topics and consumer groups: durable records with small numeric ids, held whole in memory (their number is bounded).

    record     version 1 | kind 1 | queues 2 | created_at_ms 8 | name

Ids are shared by topics and groups and never used again, so an id alone can be the scope of an index entry.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from broker_adapter.errors import Overloaded
from broker_adapter.limits import GROUPS_MAX, TOPICS_MAX
from dmq.audit.events import EventKind, name_event
from dmq.errors import StoreCorrupt
from dmq.store.keys import name_key, name_range
from dmq.store.ops import Emit, Family, Op, Put
from dmq.store.store import Store

_RECORD = struct.Struct(">BBHQ")
_VERSION = 1


class _Kind(IntEnum):
    TOPIC = 1
    GROUP = 2


class Topic(NamedTuple):
    """A topic of the mixed type: it takes normal, FIFO and delayed messages."""

    topic_id: int
    name: str
    queues: int
    created_at_ms: int


class Group(NamedTuple):
    """A consumer group."""

    group_id: int
    name: str
    created_at_ms: int


class Names:
    """All topics and groups. Changed by the event loop only; read from any thread."""

    def __init__(self, store: Store) -> None:
        self.topics: dict[str, Topic] = {}
        self.groups: dict[str, Group] = {}
        self.topics_by_id: dict[int, Topic] = {}
        self._next_id = 1
        for key, value in store.scan(Family.META, *name_range(), limit=TOPICS_MAX + GROUPS_MAX).rows:
            self._add(int.from_bytes(key[1:5], "big"), value)

    def plan_topic(self, name: str, queues: int, now_ms: int) -> tuple[Topic, list[Op]]:
        """Return a new topic and the ops that make it durable; ``add_topic`` it once they are submitted."""
        if len(self.topics) >= TOPICS_MAX:
            raise Overloaded(f"topic {name!r} cannot be created: there are too many topics", limit=TOPICS_MAX)
        topic = Topic(self._next_id, name, queues, now_ms)
        record = _RECORD.pack(_VERSION, _Kind.TOPIC, queues, now_ms) + name.encode()
        return topic, [
            Put(Family.META, name_key(topic.topic_id), record),
            Emit(name_event(EventKind.TOPIC_CREATED, topic.topic_id)),
        ]

    def add_topic(self, topic: Topic) -> None:
        """Make a topic known."""
        self.topics[topic.name] = self.topics_by_id[topic.topic_id] = topic
        self._next_id = max(self._next_id, topic.topic_id + 1)

    def plan_group(self, name: str, now_ms: int) -> tuple[Group, list[Op]]:
        """Return a new group and the ops that make it durable; ``add_group`` it once they are submitted."""
        if len(self.groups) >= GROUPS_MAX:
            raise Overloaded(f"group {name!r} cannot be created: there are too many groups", limit=GROUPS_MAX)
        group = Group(self._next_id, name, now_ms)
        record = _RECORD.pack(_VERSION, _Kind.GROUP, 0, now_ms) + name.encode()
        return group, [
            Put(Family.META, name_key(group.group_id), record),
            Emit(name_event(EventKind.GROUP_CREATED, group.group_id)),
        ]

    def add_group(self, group: Group) -> None:
        """Make a group known."""
        self.groups[group.name] = group
        self._next_id = max(self._next_id, group.group_id + 1)

    def _add(self, name_id: int, value: bytes) -> None:
        if len(value) < _RECORD.size or value[0] != _VERSION:
            raise StoreCorrupt(f"the record of name {name_id} cannot be read")
        _, kind, queues, created_at_ms = _RECORD.unpack_from(value)
        name = value[_RECORD.size :].decode()
        if kind == _Kind.TOPIC:
            self.add_topic(Topic(name_id, name, queues, created_at_ms))
        elif kind == _Kind.GROUP:
            self.add_group(Group(name_id, name, created_at_ms))
        else:
            raise StoreCorrupt(f"the record of name {name_id} is of an unknown kind {kind}")
