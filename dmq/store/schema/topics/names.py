"""Rows of topics, consumer groups and retry lanes. Their ids come from one number space and are never reused.

    record     version 1 | kind 1 | queues 2 | created_at_ms 8 | name
                                                               | group id 4 | topic id 4      of a retry lane
               version 1 | 4 | queues 2 | created_at_ms 8 | kind 1 | name    of a removed name, which is kept
    settings   version 1 | JSON: policy, is_fifo, retries, stay,         of a group, under a separate key; unset fields
                                 paused_since_ms, deliver_rate           after is_fifo are left out
               version 1 | JSON: type, keep_time_ms, keep_bytes, keep_unread,   of a topic, under the same key;
                                 paused_since_ms, deliver_rate,          no type: mixed; unset fields are left out
                                 max_pending, max_pending_bytes, send_rate,
                                 index_properties
    holds      bits 1: PLAIN, GROUPED                                    of a topic, under a separate key

A lane is identified by its group and topic, and its record has no name. The record of a removed lane has an empty name.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from broker_adapter.contracts.message import MessageType
from dmq.errors import StoreCorrupt
from retry.policy import RetryPolicy, from_plain, to_plain

VERSION = 1
PLAIN, GROUPED = 1, 2
_RECORD = struct.Struct(">BBHQ")
_LANE = struct.Struct(">II")
_KEEP_KEYS = ("keep_time_ms", "keep_bytes", "keep_unread")
_FLOW_KEYS = ("paused_since_ms", "deliver_rate")
_QUOTA_KEYS = ("max_pending", "max_pending_bytes", "send_rate")
_INDEX_KEY = "index_properties"
_LATER_KEYS = ("retries", "stay", "paused_since_ms", "deliver_rate")


class NameKind(IntEnum):
    """Kind of a named object."""

    TOPIC = 1
    GROUP = 2
    LANE = 3
    REMOVED = 4  # precedes the kind of the removed object


class NameRecord(NamedTuple):
    """Stored record of a topic, a group or a lane."""

    kind: NameKind  # never REMOVED
    queues: int
    created_at_ms: int
    name: str = ""
    group_id: int = 0  # of a lane, until it is removed
    topic_id: int = 0
    is_removed: bool = False


class Keep(NamedTuple):
    """Retention of a topic's queues. A field that is ``None`` uses the configured value.

    A message is removed once it is older than ``time_ms``, or while the topic is larger than ``size_bytes``; 0 is no
    bound. If ``unread`` is set, messages not yet read by a known group are kept nevertheless.
    """

    time_ms: int | None = None
    size_bytes: int | None = None
    unread: bool | None = None

    def over(self, other: Keep) -> Keep:
        """Return this retention with unset fields filled from ``other``."""
        return Keep(
            self.time_ms if self.time_ms is not None else other.time_ms,
            self.size_bytes if self.size_bytes is not None else other.size_bytes,
            self.unread if self.unread is not None else other.unread,
        )

    @property
    def bounds(self) -> bool:
        """Whether age or size limits are set, so that messages can be removed."""
        return bool(self.time_ms or self.size_bytes)


KEEP_ALL = Keep(0, 0, unread=True)  # default of a dead-letter queue


AS_CONFIGURED = Keep()


class TopicQuotas(NamedTuple):
    """Send quotas of a topic. A field that is ``None`` uses the configured value; 0 is no bound.

    ``max_pending`` bounds messages that await their delivery time or the end of their transaction.
    ``max_pending_bytes`` bounds their total size. ``send_rate`` is in messages per second.
    """

    max_pending: int | None = None
    max_pending_bytes: int | None = None
    send_rate: int | None = None

    def over(self, other: TopicQuotas) -> TopicQuotas:
        """Return these quotas with unset fields filled from ``other``."""
        said = (own if own is not None else theirs for own, theirs in zip(self, other, strict=True))
        return TopicQuotas(*said)


NO_QUOTAS = TopicQuotas()


class TopicSettings(NamedTuple):
    """Settings of a topic. ``message_type`` is the only accepted type; ``None`` accepts all types.

    ``deliver_rate`` is the limit of delayed messages delivered per second; ``None`` is no limit. ``index_properties``
    are the names of the indexed user properties, sorted.
    """

    message_type: MessageType | None = None
    keep: Keep = AS_CONFIGURED
    paused_since_ms: int | None = None
    deliver_rate: int | None = None
    quotas: TopicQuotas = NO_QUOTAS
    index_properties: tuple[str, ...] = ()


MIXED = TopicSettings()


def encode_name(record: NameRecord) -> bytes:
    """Return the value of a name's record."""
    kind, rest = record.kind, record.name.encode()
    if record.is_removed:
        kind, rest = NameKind.REMOVED, bytes((kind,)) + rest
    elif kind is NameKind.LANE:
        rest = _LANE.pack(record.group_id, record.topic_id)
    return _RECORD.pack(VERSION, kind, record.queues, record.created_at_ms) + rest


def decode_name(name_id: int, value: bytes) -> NameRecord:
    """Decode the record of a name; raise ``StoreCorrupt``, with the id in its text, if it is invalid."""
    if len(value) < _RECORD.size or value[0] != VERSION:
        raise StoreCorrupt(f"the record of name {name_id} cannot be read")
    _, kind, queues, created_at_ms = _RECORD.unpack_from(value)
    rest = value[_RECORD.size :]
    is_removed = kind == NameKind.REMOVED and bool(rest)
    if is_removed:
        kind, rest = rest[0], rest[1:]
    try:
        if kind == NameKind.LANE and not is_removed and len(rest) == _LANE.size:
            return NameRecord(NameKind.LANE, queues, created_at_ms, "", *_LANE.unpack(rest))
        if kind in {NameKind.TOPIC, NameKind.GROUP} or (kind == NameKind.LANE and is_removed):
            return NameRecord(NameKind(kind), queues, created_at_ms, rest.decode(), is_removed=is_removed)
    except UnicodeDecodeError as error:
        raise StoreCorrupt(f"the record of name {name_id} cannot be read: {error}") from error
    raise StoreCorrupt(f"the record of name {name_id} is of an unknown kind {kind}")


def encode_topic_settings(settings: TopicSettings) -> bytes:
    """Return the value of a topic's settings row: a version and JSON without unset fields."""
    plain: dict[str, object] = {"type": settings.message_type.name} if settings.message_type is not None else {}
    flow = settings.paused_since_ms, settings.deliver_rate
    said = zip((*_KEEP_KEYS, *_FLOW_KEYS, *_QUOTA_KEYS), (*settings.keep, *flow, *settings.quotas), strict=True)
    plain |= {key: value for key, value in said if value is not None}
    plain |= {_INDEX_KEY: settings.index_properties} if settings.index_properties else {}
    return bytes((VERSION,)) + json.dumps(plain).encode()


def has_index_properties(value: bytes) -> bool:
    """Return False if a settings row, of a topic or a group, certainly has no indexed properties."""
    return f'"{_INDEX_KEY}"'.encode() in value  # within a JSON string the quotes have backslashes


def decode_topic_settings(value: bytes) -> TopicSettings:
    """Decode a topic's settings row; raise ``ValueError`` if it is invalid."""
    plain = _settings(value)
    if not isinstance(plain, Mapping) or plain.get("type", "NORMAL") not in MessageType.__members__:
        raise ValueError("no such message type")
    keep = Keep(*(plain.get(key) for key in _KEEP_KEYS))
    if type(keep.unread) not in {bool, type(None)} or not all(_is_bound(each) for each in keep[:2]):
        raise ValueError("no such retention")
    flow = [plain.get(key) for key in _FLOW_KEYS]
    quotas = TopicQuotas(*(plain.get(key) for key in _QUOTA_KEYS))
    if not all(map(_is_bound, (*flow, *quotas))):
        raise ValueError("no such pause, rate or quota")
    indexed = plain.get(_INDEX_KEY, [])
    if not isinstance(indexed, list) or not all(isinstance(name, str) for name in indexed):
        raise ValueError("no such indexed properties")
    message_type = MessageType[plain["type"]] if "type" in plain else None
    return TopicSettings(message_type, keep, flow[0], flow[1], quotas, tuple(indexed))


def _is_bound(value: object) -> bool:
    return value is None or (type(value) is int and value >= 0)


class StoredGroupSettings(NamedTuple):
    """Settings of a group; ``None`` is unset.

    ``stay`` is used only by the forwarder: the topics excluded from forwarding in the last run, as configured.
    """

    policy: RetryPolicy | None = None
    is_fifo: bool | None = None
    retries: str | None = None  # in front of a cluster: "here" or "cluster"
    stay: str | None = None
    paused_since_ms: int | None = None
    deliver_rate: int | None = None  # messages handed out per second


def encode_group_settings(settings: StoredGroupSettings) -> bytes:
    """Return the value of a group's settings row."""
    policy = settings.policy
    plain = {"policy": to_plain(policy) if policy is not None else None, "is_fifo": settings.is_fifo}
    plain |= {key: value for key, value in settings._asdict().items() if key in _LATER_KEYS and value is not None}
    return bytes((VERSION,)) + json.dumps(plain).encode()


def decode_group_settings(value: bytes) -> StoredGroupSettings:
    """Decode a group's settings row; raise ``ValueError`` if it is invalid."""
    try:
        plain = _settings(value)
        policy = from_plain(plain["policy"]) if plain["policy"] is not None else None
        return StoredGroupSettings(policy, plain["is_fifo"], *(plain.get(key) for key in _LATER_KEYS))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(str(error)) from error


def _settings(value: bytes) -> Any:  # noqa: ANN401 - whatever JSON is there
    if value[:1] != bytes((VERSION,)):
        raise ValueError("unknown version")
    return json.loads(value[1:])


def encode_holds(holds: int) -> bytes:
    """Encode the kinds of messages that a topic has accepted, as bits."""
    return bytes((holds,))


def decode_holds(topic_id: int, value: bytes) -> int:
    """Decode the kinds of messages that a topic has accepted; raise ``StoreCorrupt``, with the id, if invalid."""
    if len(value) != 1:
        raise StoreCorrupt(f"what topic {topic_id} holds cannot be read")
    return value[0]
