"""Conversion of messages between the gRPC protocol of ``PopBroker`` and classic brokers. Pure."""

from __future__ import annotations

from dataclasses import replace

from google.protobuf.message import DecodeError

from broker_adapter.contracts.classic import QueueReceipt, ReceivedMessage
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import BodyEncoding, Delivery, Envelope, Message, SendReceipt
from broker_adapter.leasing.handles import recall_handle
from broker_adapter.leasing.leases import HeldDelivery
from broker_adapter.remoting import DELIVER_AT_MS, unpack
from broker_adapter.wire.mapping import decode, encode


def message_of(envelope: Envelope) -> Message:
    """Return the message of an envelope for a classic broker, with the uncompressed body.

    ``Refused(MESSAGE_CORRUPTED)`` for an invalid payload, or a body that cannot be decompressed.
    """
    try:
        message = decode(envelope.payload)
        body = unpack(message.body, 0) if message.body_encoding is BodyEncoding.GZIP else message.body
    except (DecodeError, ValueError) as error:
        raise Refused(Rule.MESSAGE_CORRUPTED, str(error), value=envelope.message_id) from None
    return replace(
        message,
        topic=envelope.topic,
        message_id=envelope.message_id,
        body=body,
        body_encoding=BodyEncoding.IDENTITY,
        message_group=envelope.message_group,
        deliver_at_ms=envelope.deliver_at_ms,
    )


def send_receipt(receipt: QueueReceipt, message_id: str, queue_id: int) -> SendReceipt:
    """Return a classic broker's receipt as a receipt of ``PopBroker.send``; ``queue_id`` is the clients' number."""
    return SendReceipt(message_id, queue_id, receipt.queue_offset, recall_handle=recall_handle(receipt.recall_handle))


def delivery_of(held: HeldDelivery, queue_id: int, invisible_ms: int) -> Delivery:
    """Return the delivery of a leased message."""
    received = held.received
    message = received.message
    return Delivery(
        held.topic,
        message.message_id,
        encode(message).payload,
        queue_id,
        received.queue_offset,
        str(held.handle),
        held.failed + 1,
        invisible_ms,
        received.stored_at_ms,
        message.deliver_at_ms or _deliver_at_ms(received),
        message_group=message.message_group,
    )


def _deliver_at_ms(received: ReceivedMessage) -> int:
    """Return the delivery time that a broker's timer left in the message."""
    text = received.system.get(DELIVER_AT_MS, "")
    return int(text) if text.isascii() and text.isdigit() else 0
