"""Topics, groups and lanes of a store of which some records may be lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from broker_adapter.contracts.message import unpack_id
from broker_adapter.contracts.topics import RETRY_PREFIX
from dmq.broker.topics.registry import Names, Topic
from dmq.errors import StoreCorrupt
from dmq.store.engines.engine import Rows
from dmq.store.schema import keys
from dmq.store.schema.keys import Family
from dmq.store.writer.operations import Op, Put

NAME_LETTERS = (keys.META_NAME, keys.META_SETTINGS, keys.META_HOLDS)


class Readable(Protocol):
    """What gives rows in order, as far as they can be read."""

    def rows(self, family: Family, start: bytes = ..., stop: bytes = ...) -> Iterator[tuple[bytes, bytes]]:
        """Give the rows of a range."""
        ...


class KnownNames(Names):
    """As ``Names``, but a record that cannot be read is told and passed over."""

    def __init__(self, source: Readable, tell: Callable[[bytes, str], None]) -> None:
        """``tell`` is called with the key of each bad row and what is wrong with it."""
        self._tell = tell
        self.rows: list[tuple[bytes, bytes]] = []  # those that are good
        super().__init__(_Scan(source))

    def has(self, name_id: int) -> bool:
        """Whether a topic, group or lane has a record."""
        return name_id in self.topics_by_id or name_id in self.groups_by_id

    def is_live(self, topic_id: int) -> bool:
        """Whether a topic is there and not removed, or a lane is."""
        topic = self.topics_by_id.get(topic_id)
        return topic is not None and (topic.name.startswith(RETRY_PREFIX) or self.topics.get(topic.name) is topic)

    def new_topic(self, topic_id: int, name: str, queues: int, now_ms: int) -> Put:
        """Make a topic known under an id of before; return its record."""
        topic = Topic(topic_id, name, queues, now_ms)
        self.add_topic(topic)
        return _record(self.plan_change(topic))

    def new_group(self, group_id: int, name: str, now_ms: int) -> Put:
        """As ``new_topic``, of a group."""
        following, self._next_id = self._next_id, group_id
        group, ops = self.plan_group(name, now_ms)
        self.add_group(group)
        self._next_id = max(following, group_id + 1)
        return _record(ops)

    def new_lane(self, lane_id: int, group_id: int, topic_id: int, now_ms: int) -> Put:
        """As ``new_topic``, of the lane of a group that is known for a topic that is."""
        following, self._next_id = self._next_id, lane_id
        self.lanes.pop((group_id, topic_id), None)
        _, ops = self.lane(self.groups_by_id[group_id], topic_id, now_ms)
        self._next_id = max(following, lane_id + 1)
        return _record(ops)

    def _add(self, name_id: int, value: bytes) -> None:
        self._try(keys.name_key(name_id), value, super()._add)

    def _hold(self, topic_id: int, value: bytes) -> None:
        self._try(keys.holds_key(topic_id), value, super()._hold)

    def _set(self, name_id: int, value: bytes) -> None:
        self._try(keys.settings_key(name_id), value, super()._set)

    def _try(self, key: bytes, value: bytes, read: Callable[[int, bytes], None]) -> None:
        try:
            read(keys.meta_id(key), value)
        except StoreCorrupt as error:
            self._tell(key, str(error))
        else:
            self.rows.append((key, value))


def shown_id(packed: bytes) -> str:
    """Return a packed message id as clients know it, as far as it can be told."""
    try:
        return unpack_id(packed)
    except ValueError:
        return packed.hex()


def _record(ops: list[Op]) -> Put:
    (record,) = [op for op in ops if isinstance(op, Put) and op.key[:1] == keys.META_NAME]
    return record


class _Scan:
    """The rows as ``Names`` asks for them."""

    def __init__(self, source: Readable) -> None:
        self._source = source

    def scan(self, family: Family, start: bytes, stop: bytes, *, limit: int) -> Rows:
        del limit  # it is above what there can be
        return Rows(list(self._source.rows(family, start, stop)), True)
