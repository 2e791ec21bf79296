"""Conversion of deliveries for consumers. Pure."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from broker_adapter.contracts.classic import Filter, MessageQueue, ReceivedMessage
from broker_adapter.contracts.message import Delivery, Message
from broker_adapter.wire.mapping import decode


def received_of(delivery: Delivery, broker: str) -> ReceivedMessage:
    """Return the message for a handler; ``broker`` is the name of the owner of the queues."""
    message, unreadable = Message(delivery.topic, b"", message_id=delivery.message_id), ""
    try:
        message = decode(delivery.payload)
    except DecodeError as error:
        unreadable = f"it is not a message: {error}"
    earlier = delivery.dead_letter.attempts if delivery.dead_letter is not None else 0
    return ReceivedMessage(
        message=message,
        queue=MessageQueue(delivery.topic, broker, delivery.queue_id),
        queue_offset=delivery.queue_offset,
        stored_at_ms=delivery.stored_at_ms,
        attempts_failed=max(delivery.delivery_attempt - 1, earlier),
        size_bytes=len(delivery.payload),
        unreadable=unreadable,
    )


def tags_of(wanted: Filter) -> frozenset[str]:
    """Return the tags of a filter; empty for all tags and for an SQL expression."""
    tags = frozenset(tag for part in wanted.expression.split("||") if (tag := part.strip()))
    return frozenset() if wanted.is_sql or tags == {"*"} else tags
