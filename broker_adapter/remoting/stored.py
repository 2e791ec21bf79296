"""Messages as a classic broker stores and sends them. Pure.

    size 4 | magic 4 | crc of the body 4 | queue 4 | flag 4 | queue offset 8 | log offset 8 | bits 4 | born 8 |
    born host | stored 8 | stored host | attempts failed 4 | offset of the half message 8 | body length 4 | body |
    topic length 1 (2 in the second form) | topic | properties length 2 | properties

A host is an address of 4 or 16 bytes and a port of 4. Properties are ``name \\x01 value \\x02``. Several messages
follow on each other without anything in between.
"""

from __future__ import annotations

import ipaddress
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from broker_adapter.limits import BODY_BYTES_MAX
from broker_adapter.message import Message
from broker_adapter.remoting.frames import FrameBroken

_HEAD = struct.Struct(">iIIiiqqiq")  # up to the time of its birth
_SECOND = struct.Struct(">iq")
_PORT_BYTES = 4
_SIZE = struct.Struct(">i")
_LONG = struct.Struct(">q")
_MAGICS = {0xDAA320A7: 1, 0xDAA320AB: 2}  # and how many bytes the length of the topic has
_COMPRESSED, _BORN_V6, _STORED_V6, _BATCH = 1, 16, 32, 64 | 128  # bits
_COMPRESSIONS = {0: "zlib", 1: "LZ4", 2: "ZSTD", 3: "zlib"}
_DEFLATE_OR_GZIP = 47  # of zlib: tell which by the first bytes; clients of the gRPC protocol call both GZIP
_CRC_BITS = 0x7FFFFFFF

MESSAGE_ID = "UNIQ_KEY"
_KEYS, _TAGS, _MESSAGE_GROUP = "KEYS", "TAGS", "__SHARDINGKEY"
_BORN_HOST, _BORN_AT = "__BORNHOST", "BORN_TIMESTAMP"
# What is no property of its sender's: the names RocketMQ keeps for itself.
SYSTEM_PROPERTIES = frozenset(
    {
        *(MESSAGE_ID, _KEYS, _TAGS, _MESSAGE_GROUP, _BORN_HOST, _BORN_AT, "WAIT", "DELAY", "RETRY_TOPIC", "REAL_TOPIC"),
        *("REAL_QID", "TRAN_MSG", "PGROUP", "MIN_OFFSET", "MAX_OFFSET", "BUYER_ID", "ORIGIN_MESSAGE_ID"),
        *("TRANSFER_FLAG", "CORRECTION_FLAG", "MQ2_FLAG", "RECONSUME_TIME", "MAX_RECONSUME_TIMES", "MSG_REGION"),
        *("TRACE_ON", "CONSUME_START_TIME", "POP_CK", "POP_CK_OFFSET", "1ST_POP_TIME", "EXTEND_UNIQ_INFO"),
        *("TRAN_PREPARED_QUEUE_OFFSET", "TRANSACTION_CHECK_TIMES", "CHECK_IMMUNITY_TIME_IN_SECONDS", "DUP_INFO"),
        *("__transactionId__", "INSTANCE_ID", "CORRELATION_ID", "REPLY_TO_CLIENT", "TTL", "ARRIVE_TIME"),
        *("PUSH_REPLY_TIME", "CLUSTER", "MSG_TYPE", "INNER_NUM", "INNER_BASE", "INNER_MULTI_DISPATCH"),
        *("INNER_MULTI_QUEUE_OFFSET", "TIMER_DELAY_MS", "TIMER_DELAY_SEC", "TIMER_DELIVER_MS", "TIMER_OUT_MS"),
        *("TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS", "TIMER_ROLL_TIMES", "TIMER_DEL_UNIQKEY", "TIMER_DEL_MS"),
        *("__STARTDELIVERTIME", "DLQ_ORIGIN_TOPIC", "DLQ_ORIGIN_MESSAGE_ID", "__CRC32#"),
    }
)


class StoredMessage(NamedTuple):
    """One message of a queue. ``properties`` are all of them, RocketMQ's own too."""

    topic: str
    queue_id: int
    queue_offset: int
    message_id: str  # as its client made it; the broker's own if it made none
    stored_at_ms: int
    born_at_ms: int
    born_host: str
    attempts_failed: int
    body: bytes
    properties: Mapping[str, str]


class UnreadableMessage(NamedTuple):
    """One that is there and cannot be read; what lies around it can."""

    queue_offset: int
    stored_at_ms: int
    why: str


def decode_messages(content: bytes) -> Iterator[StoredMessage | UnreadableMessage]:
    """Give the messages that ``content`` consists of. ``FrameBroken`` where it cannot be seen where the next begins."""
    at = 0
    while at < len(content):
        if at + _SIZE.size > len(content):
            raise FrameBroken(f"half a message: {len(content) - at} bytes at the end")
        (size,) = _SIZE.unpack_from(content, at)
        if not _HEAD.size <= size <= len(content) - at:
            raise FrameBroken(f"a message of {size} bytes, of which {len(content) - at} are there")
        yield _decode(content[at : at + size])
        at += size


def to_message(stored: StoredMessage) -> Message:
    """Return it in the message model, without what RocketMQ added."""
    properties = stored.properties
    return Message(
        topic=stored.topic,
        message_id=stored.message_id,
        body=stored.body,
        tag=properties.get(_TAGS, ""),
        keys=tuple(properties.get(_KEYS, "").split()),
        properties={name: value for name, value in properties.items() if name not in SYSTEM_PROPERTIES},
        message_group=properties.get(_MESSAGE_GROUP, ""),
        born_at_ms=max(0, stored.born_at_ms),
        born_host=properties.get(_BORN_HOST) or stored.born_host,
    )


def _decode(raw: bytes) -> StoredMessage | UnreadableMessage:
    """Read one message; ``FrameBroken`` if not even its place can be read."""
    _, magic, crc, queue_id, _, queue_offset, log_offset, bits, born_at_ms = _HEAD.unpack_from(raw)
    if magic not in _MAGICS:
        raise FrameBroken(f"a message does not begin as one: magic {magic:#010x}")
    stored_at_ms = 0
    try:
        born_host, at = _host(raw, _HEAD.size, is_v6=bool(bits & _BORN_V6))
        (stored_at_ms,) = _LONG.unpack_from(raw, at)
        at += _LONG.size
        host = raw[at : at + (16 if bits & _STORED_V6 else 4) + _PORT_BYTES]
        at += len(host)
        attempts_failed, _ = _SECOND.unpack_from(raw, at)
        body, at = _part(raw, at + _SECOND.size, ">i")
        topic, at = _part(raw, at, ">B" if _MAGICS[magic] == 1 else ">H")
        text, at = _part(raw, at, ">H")
        if at != len(raw):
            raise ValueError(f"{len(raw) - at} bytes are left behind its properties")
        if bits & _BATCH:
            raise ValueError("it is a batch in one message, which is not read")
        if zlib.crc32(body) & _CRC_BITS != crc:
            raise ValueError("its body is damaged: the checksum differs")
        properties = _properties(text.decode())
        return StoredMessage(
            topic.decode(),
            queue_id,
            queue_offset,
            properties.get(MESSAGE_ID) or (host + _LONG.pack(log_offset)).hex().upper(),
            stored_at_ms,
            born_at_ms,
            born_host,
            attempts_failed,
            _unpacked(body, bits),
            properties,
        )
    except (struct.error, ValueError, zlib.error) as error:
        return UnreadableMessage(queue_offset, stored_at_ms, str(error))


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


def _properties(text: str) -> dict[str, str]:
    pairs = (each.split("\x01", 1) for each in text.split("\x02") if each)
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def _unpacked(body: bytes, bits: int) -> bytes:
    if not bits & _COMPRESSED:
        return body
    kind = bits >> 8 & 7
    if _COMPRESSIONS.get(kind) != "zlib":
        raise ValueError(f"its body is compressed with {_COMPRESSIONS.get(kind, f'method {kind}')}, which is not read")
    unpacking = zlib.decompressobj(_DEFLATE_OR_GZIP)
    unpacked = unpacking.decompress(body, BODY_BYTES_MAX + 1)
    if len(unpacked) > BODY_BYTES_MAX:
        raise ValueError(f"its body has more than {BODY_BYTES_MAX} bytes once it is unpacked")
    if not unpacking.eof:
        raise ValueError("its compressed body ends in the middle")
    return unpacked
