"""Message format in which a classic broker stores and sends messages. Pure.

    size 4 | magic 4 | crc of the body 4 | queue 4 | flag 4 | queue offset 8 | log offset 8 | bits 4 | born 8 |
    born host | stored 8 | stored host | attempts failed 4 | offset of the half message 8 | body length 4 | body |
    topic length 1 (2 in the second form) | topic | properties length 2 | properties

A host is an address of 4 or 16 bytes and a port of 4 bytes. Consecutive messages have no separator.
"""

from __future__ import annotations

import ipaddress
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from broker_adapter.contracts.message import Message
from broker_adapter.remoting.protocol import properties as known
from broker_adapter.remoting.protocol.frames import FrameBroken
from broker_adapter.remoting.protocol.ids import encode_offset_id
from broker_adapter.remoting.protocol.packing import unpack

_HEAD = struct.Struct(">iIIiiqqiq")  # up to born_at_ms
_SECOND = struct.Struct(">iq")
_PORT_BYTES = 4
_SIZE = struct.Struct(">i")
_LONG = struct.Struct(">q")
_MAGICS = {0xDAA320A7: 1, 0xDAA320AB: 2}  # size of the topic length field, in bytes
_COMPRESSED, _BORN_V6, _STORED_V6, _BATCH = 1, 16, 32, 64 | 128  # bits
_CRC_BITS = 0x7FFFFFFF


class StoredMessage(NamedTuple):
    """Message of a queue. ``properties`` includes RocketMQ's system properties."""

    topic: str
    queue_id: int
    queue_offset: int
    message_id: str  # unique key of its client, or else the offset id
    stored_at_ms: int
    born_at_ms: int
    born_host: str
    attempts_failed: int
    body: bytes
    properties: Mapping[str, str]
    offset_id: str = ""  # the broker's own id: address and offset in its log
    size_bytes: int = 0


class UnreadableMessage(NamedTuple):
    """Message that cannot be decoded; its neighbours can."""

    queue_offset: int
    stored_at_ms: int
    why: str
    offset_id: str = ""


def decode_messages(content: bytes) -> Iterator[StoredMessage | UnreadableMessage]:
    """Yield the messages in ``content``. ``FrameBroken`` if the start of the next message cannot be found."""
    at = 0
    while at < len(content):
        if at + _SIZE.size > len(content):
            raise FrameBroken(f"truncated message: {len(content) - at} bytes at the end")
        (size,) = _SIZE.unpack_from(content, at)
        if not _HEAD.size <= size <= len(content) - at:
            raise FrameBroken(f"truncated message: {len(content) - at} of {size} bytes")
        yield _decode(content[at : at + size])
        at += size


def to_message(stored: StoredMessage) -> Message:
    """Return a stored message in the message model, without RocketMQ's system properties."""
    return known.to_message(
        stored.topic,
        stored.body,
        stored.properties,
        message_id=stored.message_id,
        born_at_ms=stored.born_at_ms,
        born_host=stored.born_host,
    )


def _decode(raw: bytes) -> StoredMessage | UnreadableMessage:
    """Decode one message; raise ``FrameBroken`` if not even its offset can be read."""
    _, magic, crc, queue_id, _, queue_offset, log_offset, bits, born_at_ms = _HEAD.unpack_from(raw)
    if magic not in _MAGICS:
        raise FrameBroken(f"not a message: magic {magic:#010x}")
    stored_at_ms, offset_id = 0, ""
    try:
        born_host, at = _host(raw, _HEAD.size, is_v6=bool(bits & _BORN_V6))
        (stored_at_ms,) = _LONG.unpack_from(raw, at)
        at += _LONG.size
        host = raw[at : at + (16 if bits & _STORED_V6 else 4) + _PORT_BYTES]
        at += len(host)
        offset_id = encode_offset_id(host, log_offset)
        attempts_failed, _ = _SECOND.unpack_from(raw, at)
        body, at = _part(raw, at + _SECOND.size, ">i")
        topic, at = _part(raw, at, ">B" if _MAGICS[magic] == 1 else ">H")
        text, at = _part(raw, at, ">H")
        if at != len(raw):
            raise ValueError(f"{len(raw) - at} bytes follow its properties")
        if bits & _BATCH:
            raise ValueError("it is a batch in one message, which is not supported")
        if zlib.crc32(body) & _CRC_BITS != crc:
            raise ValueError("its body is damaged: the checksum differs")
        properties = known.decode_properties(text)
        return StoredMessage(
            topic.decode(),
            queue_id,
            queue_offset,
            properties.get(known.MESSAGE_ID) or offset_id,
            stored_at_ms,
            born_at_ms,
            born_host,
            attempts_failed,
            unpack(body, bits) if bits & _COMPRESSED else body,
            properties,
            offset_id,
            len(raw),
        )
    except (struct.error, ValueError) as error:
        return UnreadableMessage(queue_offset, stored_at_ms, str(error), offset_id)


def _host(raw: bytes, at: int, *, is_v6: bool) -> tuple[str, int]:
    size = 16 if is_v6 else 4
    address = ipaddress.ip_address(raw[at : at + size])
    (port,) = _SIZE.unpack_from(raw, at + size)
    return (f"[{address}]:{port}" if is_v6 else f"{address}:{port}"), at + size + _PORT_BYTES


def _part(raw: bytes, at: int, length: str) -> tuple[bytes, int]:
    (size,) = struct.unpack_from(length, raw, at)
    begin = at + struct.calcsize(length)
    if size < 0 or begin + size > len(raw):
        raise ValueError(f"a part of {size} bytes does not fit into a message of {len(raw)}")
    return raw[begin : begin + size], begin + size
