"""Conversion of broker values to wire messages. Pure."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Sequence
from functools import lru_cache

from broker_adapter.contracts.adapter import PulledMessage, TopicRoute
from broker_adapter.contracts.limits import MESSAGES_PER_SEND_MAX
from broker_adapter.contracts.message import DeadLetterFacts, Delivery, RecallReceipt, SendReceipt
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import set_duration, set_timestamp
from dmq.config.units import format_time
from dmq.rocketmq_server.codec.codes import OK_STATUS, common_status
from retry import dead_letter

_DIGEST = {wire.MD5: re.compile(r"[0-9A-F]{32}"), wire.SHA1: re.compile(r"[0-9A-F]{40}")}

_ONE_SENT = wire.SendMessageResponse(
    status=OK_STATUS, entries=[wire.SendResultEntry(status=OK_STATUS)]
).SerializeToString()

ANY_QUEUE = -1


def send_response(receipts: Sequence[SendReceipt]) -> wire.SendMessageResponse:
    """Return one OK entry per receipt, in order. Clients index the entries and ignore the ids.

    Like the real server, an entry repeats the message id as transaction id for every message type. The offset of a
    pending message is not known yet and is 0. A recalled message is not stored again. Its entry is not OK, because the
    sender would wait for a delivery that never comes.
    """
    response = wire.SendMessageResponse.FromString(_ONE_SENT)  # a third of the cost of building it
    entries = response.entries
    for _ in range(len(receipts) - 1):
        entries.append(entries[0])
    for entry, receipt in zip(entries, receipts, strict=True):
        entry.message_id = entry.transaction_id = receipt.message_id
        if receipt.queue_offset > 0:
            entry.offset = receipt.queue_offset
        if receipt.recall_handle:
            entry.recall_handle = receipt.recall_handle
        elif receipt.recalled_at_ms:
            why = (
                f"a message with this id was recalled at {format_time(receipt.recalled_at_ms)}: send it under a new one"
            )
            entry.status.CopyFrom(wire.Status(code=wire.ILLEGAL_MESSAGE_ID, message=f"illegal message id: {why}"))
            response.status.Clear()
    if not response.status.code:
        response.status.CopyFrom(common_status([entry.status for entry in entries]))
    return response


def ack_response(entries: Sequence[wire.AckMessageEntry]) -> wire.AckMessageResponse:
    """Return the answer to an acknowledgement with all entries OK."""
    response = wire.AckMessageResponse.FromString(_all_acked(len(entries)))  # a third of the cost of building it
    for answered, asked in zip(response.entries, entries, strict=True):
        answered.message_id = asked.message_id
        answered.receipt_handle = asked.receipt_handle
    return response


@lru_cache(maxsize=64)
def _all_acked(count: int) -> bytes:
    entries = [wire.AckMessageResultEntry(status=OK_STATUS)] * count
    return wire.AckMessageResponse(status=common_status([OK_STATUS] * count), entries=entries).SerializeToString()


def recall_response(receipt: RecallReceipt) -> wire.RecallMessageResponse:
    """Return the answer to a recall that withdrew the message, now or earlier."""
    status = OK_STATUS
    if receipt.repeated:
        status = wire.Status(code=wire.OK, message=f"recalled already, at {format_time(receipt.recalled_at_ms)}")
    return wire.RecallMessageResponse(status=status, message_id=receipt.message_id)


def send_refusal(messages: Sequence[wire.Message], refused: int, status: wire.Status) -> wire.SendMessageResponse:
    """Return the answer to a send that stored nothing because the message at index ``refused`` (from 0) is invalid.

    The invalid message carries its own code. The others carry 40000 with a text that names the invalid one. If
    ``refused`` equals the number of messages, the whole send was refused, and each message carries the reason. A send
    with too many messages is answered without entries, because each entry would be fifty times as large as its message.
    """
    if len(messages) > MESSAGES_PER_SEND_MAX:
        return wire.SendMessageResponse(status=status)
    why = f"not stored: message {refused + 1} of {len(messages)} in this request was refused"
    bystander = wire.Status(code=wire.BAD_REQUEST, message=why) if refused < len(messages) else status
    entries = [
        wire.SendResultEntry(
            status=status if position == refused else bystander, message_id=message.system_properties.message_id
        )
        for position, message in enumerate(messages)
    ]
    return wire.SendMessageResponse(status=status, entries=entries)


def fill(message: wire.Message, delivery: Delivery, topic: wire.Resource, store_host: str) -> None:
    """Fill the empty ``message`` for a consumer: the message as sent, plus the broker's delivery fields.

    ``topic`` is the topic that the consumer requested. A dead letter carries the name of its dead-letter topic, because
    clients acknowledge under the topic in the message. Raises ``google.protobuf.message.DecodeError`` for a damaged
    payload.
    """
    message.MergeFromString(delivery.payload)
    if message.topic != topic:
        message.topic.CopyFrom(topic)
    system = message.system_properties
    system.message_id = delivery.message_id
    system.receipt_handle = delivery.receipt_handle
    system.queue_id = delivery.queue_id
    system.queue_offset = delivery.queue_offset
    system.delivery_attempt = max(1, delivery.delivery_attempt)  # Java throws on 0
    system.store_host = store_host
    set_timestamp(system.store_timestamp, delivery.stored_at_ms)
    set_duration(system.invisible_duration, delivery.invisible_ms)
    if delivery.deliver_at_ms:
        system.message_type = wire.DELAY
        set_timestamp(system.delivery_timestamp, delivery.deliver_at_ms)
    elif system.message_type == wire.MESSAGE_TYPE_UNSPECIFIED:
        system.message_type = wire.FIFO if system.message_group else wire.NORMAL
    make_readable(message)
    if delivery.dead_letter is not None:
        _tell_end(message, delivery.dead_letter)


def fill_pulled(message: wire.Message, pulled: PulledMessage, topic: wire.Resource, store_host: str) -> None:
    """Fill ``message`` with a message that was read by offset: as ``fill``, but without the lease fields."""
    as_delivery = Delivery(
        "",
        pulled.message_id,
        pulled.payload,
        pulled.queue_id,
        pulled.queue_offset,
        receipt_handle="",
        delivery_attempt=1,
        invisible_ms=0,
        stored_at_ms=pulled.stored_at_ms,
        deliver_at_ms=pulled.deliver_at_ms,
        dead_letter=pulled.dead_letter,
    )
    fill(message, as_delivery, topic, store_host)
    message.system_properties.ClearField("receipt_handle")
    message.system_properties.ClearField("invisible_duration")


def make_readable(message: wire.Message) -> None:
    """Set the fields that clients need to read a message: a known encoding, and a digest, without which Node fails."""
    system = message.system_properties
    if system.body_encoding not in {wire.IDENTITY, wire.GZIP}:
        system.body_encoding = wire.IDENTITY  # Python fails on any other
    _ensure_digest(system.body_digest, message.body)


def _tell_end(message: wire.Message, facts: DeadLetterFacts) -> None:
    """Set the dead-letter facts: in the protocol's field, which no client exposes, and in properties, which all clients
    do.
    """
    origin = message.system_properties.dead_letter_queue
    origin.topic = facts.origin_topic
    origin.message_id = facts.origin_message_id
    properties = message.user_properties
    properties[dead_letter.ORIGIN_TOPIC] = facts.origin_topic
    properties[dead_letter.ORIGIN_MESSAGE_ID] = facts.origin_message_id
    properties[dead_letter.ATTEMPTS] = str(facts.attempts)
    properties[dead_letter.REASON] = facts.reason
    properties[dead_letter.FIRST_FAILED_AT] = str(facts.first_failed_at_ms)
    properties[dead_letter.LAST_FAILED_AT] = str(facts.last_failed_at_ms)


def _ensure_digest(digest: wire.Digest, body: bytes) -> None:
    """Keep a producer's MD5 or SHA1 for an end-to-end check by the consumer; else set the MD5 of the stored body.

    A CRC32 is always replaced: clients disagree on its text format, and each checks it in its own way.
    """
    pattern = _DIGEST.get(digest.type)
    if pattern is None or pattern.fullmatch(digest.checksum) is None:
        digest.type = wire.MD5
        digest.checksum = hashlib.md5(body, usedforsecurity=False).hexdigest().upper()


def endpoints_of(host: str, port: int) -> wire.Endpoints:
    """Return one address in the form that clients expect, with the scheme that fits the host."""
    try:
        scheme = wire.IPv6 if ipaddress.ip_address(host).version == 6 else wire.IPv4
    except ValueError:
        scheme = wire.DOMAIN_NAME
    return wire.Endpoints(scheme=scheme, addresses=[wire.Address(host=host, port=port)])


def route_queues(
    route: TopicRoute, topic: wire.Resource, broker_name: str, endpoints: wire.Endpoints
) -> list[wire.MessageQueue]:
    """Return every queue of a topic, readable and writable, at one master broker.

    Producers of the official clients check the message types before they send.
    """
    broker = wire.Broker(name=broker_name, id=0, endpoints=endpoints)
    types = [each.name for each in route.types]
    return [
        wire.MessageQueue(
            topic=topic, id=queue_id, permission=wire.READ_WRITE, broker=broker, accept_message_types=types
        )
        for queue_id in range(route.queues)
    ]


def assignments(
    route: TopicRoute, topic: wire.Resource, broker_name: str, endpoints: wire.Endpoints, *, is_fifo: bool
) -> list[wire.Assignment]:
    """Return the assignments of every consumer in a group: any queue of the broker, or each queue for a FIFO group."""
    broker = wire.Broker(name=broker_name, id=0, endpoints=endpoints)
    return [
        wire.Assignment(
            message_queue=wire.MessageQueue(topic=topic, id=queue_id, permission=wire.READ_WRITE, broker=broker)
        )
        for queue_id in (range(route.queues) if is_fifo else (ANY_QUEUE,))
    ]
