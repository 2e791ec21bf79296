"""Topics, groups and lanes of a store that may have lost some of their records."""

from __future__ import annotations

from collections.abc import Callable

from broker_adapter.contracts.message import unpack_id
from broker_adapter.contracts.topics import RETRY_PREFIX
from dmq.broker.topics import Names, Topic
from dmq.errors import StoreCorrupt
from dmq.recovery.reading.look import Look
from dmq.store.engines.engine import Rows
from dmq.store.schema import keys
from dmq.store.schema.keys import Family
from dmq.store.writer.operations import Op, Put

NAME_LETTERS = (keys.META_NAME, keys.META_SETTINGS, keys.META_HOLDS)


class KnownNames(Names):
    """Variant of ``Names`` that reports and skips unreadable records."""

    def __init__(self, source: Look, tell: Callable[[bytes, str], None]) -> None:
        """Read the names; ``tell`` is called with the key and the error of each bad row."""
        self._tell = tell
        self.rows: list[tuple[bytes, bytes]] = []  # readable records
        super().__init__(_Scan(source))

    def has(self, name_id: int) -> bool:
        """Whether a topic, group or lane has a record."""
        return name_id in self.topics_by_id or name_id in self.groups_by_id

    def is_live(self, topic_id: int) -> bool:
        """Whether a topic exists and is not removed, or a lane exists."""
        topic = self.topics_by_id.get(topic_id)
        return topic is not None and (topic.name.startswith(RETRY_PREFIX) or self.topics.get(topic.name) is topic)

    def new_topic(self, topic_id: int, name: str, queues: int, now_ms: int) -> Put:
        """Add a topic with an existing id; return its record."""
        topic = Topic(topic_id, name, queues, now_ms)
        self.add_topic(topic)
        return _record(self.plan_change(topic))

    def new_group(self, group_id: int, name: str, now_ms: int) -> Put:
        """Add a group with an existing id; return its record."""
        following, self._next_id = self._next_id, group_id
        group, ops = self.plan_group(name, now_ms)
        self.add_group(group)
        self._next_id = max(following, group_id + 1)
        return _record(ops)

    def new_lane(self, lane_id: int, group_id: int, topic_id: int, now_ms: int) -> Put:
        """Add a retry lane with an existing id, for a known group and topic; return its record."""
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
    """Return a packed message id in the form that clients use, or in hex if it cannot be unpacked."""
    try:
        return unpack_id(packed)
    except ValueError:
        return packed.hex()


def _record(ops: list[Op]) -> Put:
    (record,) = [op for op in ops if isinstance(op, Put) and op.key[:1] == keys.META_NAME]
    return record


class _Scan:
    """Rows in the form that ``Names`` reads."""

    def __init__(self, source: Look) -> None:
        self._source = source

    def scan(self, family: Family, start: bytes, stop: bytes, *, limit: int) -> Rows:
        del limit  # the limit is above the possible number of rows
        return Rows(list(self._source.rows(family, start, stop)), True)
