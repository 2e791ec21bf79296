"""From broker values to wire messages. Pure."""

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
    """Return one OK entry per receipt, in order. Clients index the entries without looking at ids.

    Like the real server, an entry repeats the message id as transaction id, whatever the type. The offset of a message
    that waits is not known yet: 0. A message that was recalled is not stored again, and its entry is not OK: its sender
    would wait for it in vain.
    """
    response = wire.SendMessageResponse.FromString(_ONE_SENT)  # a third of the price of building it
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
    """Return the answer to an acknowledgement of which every entry is OK."""
    response = wire.AckMessageResponse.FromString(_all_acked(len(entries)))  # a third of the price of building it
    for answered, asked in zip(response.entries, entries, strict=True):
        answered.message_id = asked.message_id
        answered.receipt_handle = asked.receipt_handle
    return response


@lru_cache(maxsize=64)
def _all_acked(count: int) -> bytes:
    entries = [wire.AckMessageResultEntry(status=OK_STATUS)] * count
    return wire.AckMessageResponse(status=common_status([OK_STATUS] * count), entries=entries).SerializeToString()


def recall_response(receipt: RecallReceipt) -> wire.RecallMessageResponse:
    """Return the answer to a recall that took the message back, now or before."""
    status = OK_STATUS
    if receipt.repeated:
        status = wire.Status(code=wire.OK, message=f"recalled already, at {format_time(receipt.recalled_at_ms)}")
    return wire.RecallMessageResponse(status=status, message_id=receipt.message_id)


def send_refusal(messages: Sequence[wire.Message], refused: int, status: wire.Status) -> wire.SendMessageResponse:
    """Return the answer to a send of which the message at ``refused``, from 0 on, is bad: nothing was stored.

    The bad message carries its own code, the others 40000 with a text that names the bad one. If ``refused`` is the
    number of messages, the send was refused as a whole, and each message carries the reason. A send of more messages
    than a request may have is answered without entries: each would be fifty times as large as its message.
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
    """Make ``message``, which is empty, what a consumer gets: what was sent, and what the broker knows about it.

    ``topic`` is the one the consumer asked for: a dead letter carries the name of its new home, because clients
    acknowledge under the topic they see here. Raises ``google.protobuf.message.DecodeError`` for a damaged payload.
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
    """Make ``message`` one that was read by offset: as ``fill``, but there is no lease to tell of."""
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
    """Fill in what clients need to read a message: an encoding that they know, and a digest, or else Node fails."""
    system = message.system_properties
    if system.body_encoding not in {wire.IDENTITY, wire.GZIP}:
        system.body_encoding = wire.IDENTITY  # Python fails on any other
    _ensure_digest(system.body_digest, message.body)


def _tell_end(message: wire.Message, facts: DeadLetterFacts) -> None:
    """Say how a dead letter ended: in the protocol's field, which no client shows, and in properties, which all do."""
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
    """Keep a producer's MD5 or SHA1, so that the consumer checks end to end; else give an MD5 of what is stored.

    A CRC32 is always replaced: clients disagree on how to print it, and each checks it in its own way.
    """
    pattern = _DIGEST.get(digest.type)
    if pattern is None or pattern.fullmatch(digest.checksum) is None:
        digest.type = wire.MD5
        digest.checksum = hashlib.md5(body, usedforsecurity=False).hexdigest().upper()


def endpoints_of(host: str, port: int) -> wire.Endpoints:
    """Return one address as clients want it, with the scheme that fits the host."""
    try:
        scheme = wire.IPv6 if ipaddress.ip_address(host).version == 6 else wire.IPv4
    except ValueError:
        scheme = wire.DOMAIN_NAME
    return wire.Endpoints(scheme=scheme, addresses=[wire.Address(host=host, port=port)])


def route_queues(
    route: TopicRoute, topic: wire.Resource, broker_name: str, endpoints: wire.Endpoints
) -> list[wire.MessageQueue]:
    """Return every queue of a topic, readable and writable, at one master broker.

    Producers of the official clients look at the types before they send.
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
    """Return what every consumer of a group may read: any queue of the broker, or each queue for a FIFO group."""
    broker = wire.Broker(name=broker_name, id=0, endpoints=endpoints)
    return [
        wire.Assignment(
            message_queue=wire.MessageQueue(topic=topic, id=queue_id, permission=wire.READ_WRITE, broker=broker)
        )
        for queue_id in (range(route.queues) if is_fifo else (ANY_QUEUE,))
    ]
