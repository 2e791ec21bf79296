"""Send requests as fields and bodies of the protocol, and their answers. Pure.

A batch is one body. Each message in it is ``size 4 | 0 4 | 0 4 | flag 4 | body length 4 | body | properties length 2 |
properties``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from broker_adapter.contracts.classic import Outgoing, QueueReceipt, ReceivedMessage, SendStatus
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.limits import BODY_BYTES_MAX
from broker_adapter.contracts.message import BodyEncoding
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.remoting.protocol import properties as known
from broker_adapter.remoting.protocol.codes import Operation, Result
from broker_adapter.remoting.protocol.frames import FrameBroken, RemotingFrame, number_of
from broker_adapter.remoting.protocol.ids import decode_offset_id
from broker_adapter.remoting.protocol.packing import COMPRESS_FROM_BYTES, Compression, method_bits, pack

STORED: Mapping[int, SendStatus] = {
    Result.OK: SendStatus.STORED,
    Result.FLUSH_TIMEOUT: SendStatus.FLUSH_TIMEOUT,
    Result.NO_REPLICA: SendStatus.NO_REPLICA,
    Result.REPLICA_TIMEOUT: SendStatus.REPLICA_TIMEOUT,
}
_COMPRESSED, _HALF = 1, 4  # bits of a message
_TEMPLATE_TOPIC, _TEMPLATE_QUEUES = "TBW102", "4"  # template of an auto-created topic, if the broker allows it
_ITEM = struct.Struct(">iiiii")
_ITEM_BYTES_MIN = _ITEM.size + 2


class Send(NamedTuple):
    """Request to store messages. ``has_delivery_time``: the broker must support delivery times."""

    operation: Operation
    fields: Mapping[str, str]
    body: bytes
    has_delivery_time: bool


def send_one(
    group: str,
    queue: MessageQueue,
    outgoing: Outgoing,
    *,
    message_id: str,
    now_ms: int,
    compression: Compression | None = Compression.ZLIB,
) -> Send:
    """Return the request that stores one message; its body is compressed from 4 KiB (RocketMQ's default).

    ``Refused`` with ``BODY_EMPTY``, ``BODY_SIZE``, ``PROPERTY_KEY`` or ``PROPERTIES_SIZE``.
    """
    message = outgoing.message
    properties = _properties(group, outgoing, message_id)
    body, bits = _checked(message.body), _HALF * outgoing.is_half
    if message.body_encoding is BodyEncoding.GZIP:
        bits |= _COMPRESSED  # without method bits, like RocketMQ 5's proxy: consumers detect the method
    elif compression is not None and len(body) >= COMPRESS_FROM_BYTES:
        packed = pack(body, compression)
        if len(packed) < len(body):
            body, bits = packed, bits | _COMPRESSED | method_bits(compression)
    fields = _fields(group, queue, properties, now_ms=message.born_at_ms or now_ms, bits=bits)
    fields["j"] = str(outgoing.attempts_failed)
    if outgoing.attempts_max is not None:
        fields["l"] = str(outgoing.attempts_max)
    return Send(Operation.SEND, fields, body, known.DELIVER_AT_MS in properties)


def send_batch(
    group: str, queue: MessageQueue, batch: Sequence[Outgoing], *, message_ids: Sequence[str], now_ms: int
) -> Send:
    """Return the request that stores several messages. Raises the errors of ``send_one``.

    ``Refused(REQUEST)`` for a batch with delayed, compressed or half messages, or with several topics.
    """
    items, topics = bytearray(), {each.message.topic for each in batch}
    for outgoing, message_id in zip(batch, message_ids, strict=True):
        properties = _properties(group, outgoing, message_id)
        is_delayed = known.DELIVER_AT_MS in properties or known.DELAY_LEVEL in properties
        if is_delayed or outgoing.is_half or outgoing.message.body_encoding is BodyEncoding.GZIP or len(topics) > 1:
            why = "a batch cannot have messages of several topics, or delayed, compressed or half messages"
            raise Refused(Rule.REQUEST, why, value=message_id)
        items += encode_item(_checked(outgoing.message.body), known.encode_properties(properties))
    fields = _fields(group, queue, {"WAIT": "true"}, now_ms=now_ms, bits=0)
    return Send(Operation.SEND_BATCH, {**fields, "j": "0", "m": "true"}, _checked(bytes(items)), False)


def encode_item(body: bytes, properties: bytes) -> bytes:
    """Return the bytes of one message of a batch."""
    size = _ITEM_BYTES_MIN + len(body) + len(properties)
    return _ITEM.pack(size, 0, 0, 0, len(body)) + body + struct.pack(">h", len(properties)) + properties


def decode_batch(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield body and properties of each message of a batch; raise ``FrameBroken`` at invalid content."""
    at = 0
    while at < len(content):
        try:
            size, _, _, _, body_bytes = _ITEM.unpack_from(content, at)
            behind = at + _ITEM.size + body_bytes
            (text_bytes,) = struct.unpack_from(">h", content, behind)
        except struct.error as error:
            raise FrameBroken(f"a batch ends in the middle of a message: {error}") from None
        end = at + size
        if min(body_bytes, text_bytes) < 0 or behind + 2 + text_bytes != end or end > len(content):
            raise FrameBroken(f"a message of {size} bytes in a batch does not fit together")
        yield content[at + _ITEM.size : behind], content[behind + 2 : end]
        at = end


def send_back_fields(
    group: str, received: ReceivedMessage, *, delay_level: int, attempts_max: int
) -> Mapping[str, str]:
    """Return the fields that return a message to its broker. ``Refused(MESSAGE_ID)`` if it has no offset id."""
    return {
        "offset": str(decode_offset_id(received.offset_id).log_offset),
        "group": group,
        "delayLevel": str(delay_level),
        "originMsgId": received.message.message_id,
        "originTopic": received.message.topic,
        "unitMode": "false",
        "maxReconsumeTimes": str(attempts_max),
        "bname": received.queue.broker,
    }


def receipt_of(answer: RemotingFrame, queue: MessageQueue, message_id: str, address: str) -> QueueReceipt:
    """Return the receipt of a stored send from its answer."""
    fields = answer.fields
    return QueueReceipt(
        status=STORED[answer.code],
        message_id=message_id,
        queue=queue._replace(queue_id=number_of(answer, "queueId", address)),
        queue_offset=number_of(answer, "queueOffset", address),
        offset_id=fields.get("msgId", ""),
        transaction_id=fields.get("transactionId", "") or message_id,
        recall_handle=fields.get("recallHandle", ""),
    )


def _properties(group: str, outgoing: Outgoing, message_id: str) -> dict[str, str]:
    properties = {**known.of_message(outgoing.message, message_id), **outgoing.system}
    if outgoing.delay_level:
        properties[known.DELAY_LEVEL] = str(outgoing.delay_level)
    elif outgoing.message.deliver_at_ms:
        properties[known.DELIVER_AT_MS] = str(outgoing.message.deliver_at_ms)
    if outgoing.is_half:
        properties |= {known.IS_HALF: "true", known.PRODUCER_GROUP: group}
    return properties


def _fields(
    group: str, queue: MessageQueue, properties: Mapping[str, str], *, now_ms: int, bits: int
) -> dict[str, str]:
    return {
        "a": group,
        "b": queue.topic,
        "c": _TEMPLATE_TOPIC,
        "d": _TEMPLATE_QUEUES,
        "e": str(queue.queue_id),
        "f": str(bits),
        "g": str(now_ms),
        "h": "0",
        "i": known.encode_properties(properties).decode(),
        "k": "false",
        "m": "false",
        "n": queue.broker,
    }


def _checked(body: bytes) -> bytes:
    if not body:
        raise Refused(Rule.BODY_EMPTY, "the message body is empty; at least 1 byte is required")
    if len(body) > BODY_BYTES_MAX:
        raise Refused(Rule.BODY_SIZE, "the body", value=len(body), limit=f"{BODY_BYTES_MAX} bytes")
    return body
