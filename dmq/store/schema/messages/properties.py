"""Rows of indexed user properties: the places of all messages of a topic with a value of a property.

    property   "p" | topic 4 | digest of the name 8 | digest of the value 16 | place      value: index id, if pending
    start      "s" | part of a place before its number | topic 4 | digest of the name 8   value: number 8
    built      "b" | topic 4 | digest of the name 8                                       value: empty
    damaged    "d"                                                                        value: empty
    place      0 | scope 4 | sequence 8             pending
               1 | topic or lane 4 | queue 2 | offset 8   in a queue

The topic is the one that the message was sent to, also for retries and dead letters. A value of any length has a digest
(BLAKE2b) of a fixed one, so a key has at most 44 bytes.

A built row: each stored message with the property has a row. Without it, a start is the number from which on each
message of a scope or queue has one; ``NEVER`` if none is known. The daemon then adds the rows of the earlier messages.

All rows of the family follow from the stored messages. After damage the next opening removes them, and the daemon
builds them again. A search that meets damage adds the damaged row, which has this effect as well.

A pending message is found by its index row, so a change of its time changes no row here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache
from hashlib import blake2b
from typing import NamedTuple

from dmq.errors import StoreCorrupt
from dmq.store.schema.messages.record import (
    DELAYED_KINDS,
    QUEUED_HEADER_BYTES,
    WAITING_HEADER_BYTES,
    EntryKind,
    body_payload,
    decode_half_body,
    half_body_at,
    history_bytes,
)

PROPERTY, START, BUILT, DAMAGED = b"p", b"s", b"b", b"d"
FAMILY_RANGE = b"", b"\xff"
NEVER = 2**64 - 1
NAME_DIGEST_BYTES, VALUE_DIGEST_BYTES = 8, 16
_PENDING, _QUEUED = 0, 1
_SCOPE = struct.Struct(">BI")
_QUEUE = struct.Struct(">BIH")
_NUMBER = struct.Struct(">Q")
_VALUE_AT = 1 + 4 + NAME_DIGEST_BYTES
_PLACE_AT = _VALUE_AT + VALUE_DIGEST_BYTES
_RETRY = int(EntryKind.RETRY)


class PendingPlace(NamedTuple):
    """Place of a message on the timeline: the scope of its index row, and its sequence."""

    scope: int
    sequence: int


class QueuePlace(NamedTuple):
    """Place of a message in a queue of a topic or in a retry lane."""

    topic_id: int
    queue_id: int
    queue_offset: int


class PropertyRow(NamedTuple):
    """Decoded row of a property. ``index_id`` is the id in the index of a pending message, else empty."""

    topic_id: int
    name_digest: bytes
    value_digest: bytes
    place: PendingPlace | QueuePlace
    index_id: bytes


@lru_cache(maxsize=1024)
def name_digest(name: str) -> bytes:
    """Return the digest of a property's name in its keys."""
    return blake2b(name.encode(), digest_size=NAME_DIGEST_BYTES).digest()


def value_digest(value: str) -> bytes:
    """Return the digest of a property's value in its keys."""
    return blake2b(value.encode(), digest_size=VALUE_DIGEST_BYTES).digest()


def property_id(topic_id: int, name: str) -> bytes:
    """Return the part of all keys that names a property of a topic."""
    return topic_id.to_bytes(4, "big") + name_digest(name)


def property_range(topic_id: int, name: str) -> tuple[bytes, bytes]:
    """Return the range of all rows of a property of a topic."""
    return _range(PROPERTY + property_id(topic_id, name))


def value_range(topic_id: int, name: str, value: str) -> tuple[bytes, bytes]:
    """Return the range of the rows of one value of a property."""
    return _range(value_prefix(property_id(topic_id, name), value))


def value_prefix(of: bytes, value: str) -> bytes:
    """Return the start of the keys of a value; ``of`` is the ``property_id``."""
    return PROPERTY + of + value_digest(value)


def scope_place(scope: int) -> bytes:
    """Return the part of the places of a scope's pending messages before their number."""
    return _SCOPE.pack(_PENDING, scope)


def queue_place(topic_id: int, queue_id: int) -> bytes:
    """Return the part of the places of a queue before the offset."""
    return _QUEUE.pack(_QUEUED, topic_id, queue_id)


def start_key(place: bytes, of: bytes) -> bytes:
    """Return the key of the start of a property in a scope or queue; ``of`` is the ``property_id``."""
    return START + place + of


def starts_range(place: bytes) -> tuple[bytes, bytes]:
    """Return the range of the starts of all properties in a scope or queue."""
    return _range(START + place)


def split_start(key: bytes) -> tuple[bytes, bytes]:
    """Return the place and the ``property_id`` in the key of a start; raise ``StoreCorrupt`` if it is invalid."""
    sizes = {_PENDING: _SCOPE.size, _QUEUED: _QUEUE.size}
    at = 1 + sizes.get(key[1] if len(key) > 1 else -1, len(key))
    if len(key) != at + 4 + NAME_DIGEST_BYTES:
        raise StoreCorrupt(f"the start of a property under a key of {len(key)} bytes")
    return key[1:at], key[at:]


def built_key(of: bytes) -> bytes:
    """Return the key of the built row of a property; ``of`` is the ``property_id``."""
    return BUILT + of


def split_built(key: bytes) -> bytes:
    """Return the ``property_id`` in the key of a built row; raise ``StoreCorrupt`` if it is invalid."""
    if len(key) != 1 + 4 + NAME_DIGEST_BYTES:
        raise StoreCorrupt(f"the built row of a property under a key of {len(key)} bytes")
    return key[1:]


def decode_property(key: bytes, value: bytes) -> PropertyRow:
    """Decode a row of a property; raise ``StoreCorrupt`` if it is invalid."""
    kind, rest = key[_PLACE_AT] if len(key) > _PLACE_AT else -1, key[_PLACE_AT:]
    place: PendingPlace | QueuePlace
    if kind == _PENDING and len(rest) == _SCOPE.size + 8 and value:
        place = PendingPlace(_SCOPE.unpack_from(rest)[1], *_NUMBER.unpack_from(rest, _SCOPE.size))
    elif kind == _QUEUED and len(rest) == _QUEUE.size + 8 and not value:
        place = QueuePlace(*_QUEUE.unpack_from(rest)[1:], *_NUMBER.unpack_from(rest, _QUEUE.size))
    else:
        raise StoreCorrupt(f"the row of a property under a key of {len(key)} bytes, with a value of {len(value)}")
    topic_id = int.from_bytes(key[1:5], "big")
    return PropertyRow(topic_id, key[5:_VALUE_AT], key[_VALUE_AT:_PLACE_AT], place, value)


def row_key(of: bytes, value: str, place: bytes, number: int) -> bytes:
    """Return the key of the row of a message; ``number`` is its sequence or its offset."""
    return value_prefix(of, value) + place + _NUMBER.pack(number)


# -- properties of stored messages ------------------------------------------------------------------------------------


def topic_of_queued(topic_id: int, value: bytes) -> int:
    """Return the topic that a message was sent to, from its value in a queue of ``topic_id``."""
    if len(value) >= QUEUED_HEADER_BYTES + 4 and value[1]:  # a history starts with that topic
        return int.from_bytes(value[QUEUED_HEADER_BYTES : QUEUED_HEADER_BYTES + 4], "big")
    return topic_id


def topic_of_waiting(value: bytes) -> int:
    """Return the topic that a pending message was sent to."""
    at = WAITING_HEADER_BYTES if value[1] == _RETRY else 4
    return int.from_bytes(value[at : at + 4], "big")


def properties_of_queued(value: bytes) -> Mapping[str, str]:
    """Return the user properties of a message in a queue."""
    at = QUEUED_HEADER_BYTES
    return user_properties(body_payload(value[at + history_bytes(value, at) if value[1] else at :]))


def properties_of_waiting(value: bytes, half_body: bytes | None) -> Mapping[str, str]:
    """Return the user properties of a pending message. ``half_body`` is the separate body of a half message."""
    kind = value[1]
    if kind in DELAYED_KINDS:
        body = value[WAITING_HEADER_BYTES:]
    elif kind == _RETRY:
        body = value[WAITING_HEADER_BYTES + history_bytes(value, WAITING_HEADER_BYTES) :]
    elif kind == EntryKind.WHOLE_HALF:
        body = value[half_body_at(kind) :]
    elif kind == EntryKind.TRANSACTION and half_body:
        body = decode_half_body(half_body)
    else:  # the message of a schedule is another row
        return {}
    return user_properties(body_payload(body))


def user_properties(payload: bytes) -> Mapping[str, str]:
    """Return the user properties of a wire message; none if it cannot be read."""
    return _reader()(payload)


def present(indexed: Iterable[tuple[str, bytes]], properties: Mapping[str, str]) -> list[tuple[bytes, str]]:
    """Return ``property_id`` and value of the indexed properties that a message has."""
    return [(of, value) for name, of in indexed if (value := properties.get(name)) is not None]


@cache
def _reader() -> Callable[[bytes], Mapping[str, str]]:
    # Imported only for an indexed topic: a local store in an application never loads protobuf.
    from google.protobuf.message import DecodeError

    from broker_adapter.wire.rocketmq_v2 import Message

    def read(payload: bytes) -> Mapping[str, str]:
        try:
            return Message.FromString(payload).user_properties
        except DecodeError:
            return {}

    return read


def _range(prefix: bytes) -> tuple[bytes, bytes]:
    return prefix, (int.from_bytes(prefix, "big") + 1).to_bytes(len(prefix), "big")
