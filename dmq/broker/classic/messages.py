"""Conversion of messages between classic clients and the broker's queues, which store the gRPC wire format. Pure.

RocketMQ's own properties (``Outgoing.system``) are stored among the user properties under their names, as in RocketMQ.
They are separated when a message is read. The number of earlier failures is stored in ``delivery_attempt``, which
counts deliveries from 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from google.protobuf.message import DecodeError

from broker_adapter.contracts import limits
from broker_adapter.contracts.classic import MessageQueue, Outgoing, ReceivedMessage
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Envelope, Message
from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX, RETRY_PREFIX
from broker_adapter.remoting import SYSTEM_PROPERTIES
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import encode, message_of

BROKER = "embedded"  # name of the only broker
RETRY_TOPIC, ORIGIN_MESSAGE_ID = "RETRY_TOPIC", "ORIGIN_MESSAGE_ID"
PRODUCER_GROUP = "PGROUP"  # of a half message: producer group to check
CHECK_AFTER_S = "CHECK_IMMUNITY_TIME_IN_SECONDS"  # of a half message: delay of the first check


def envelope_of(outgoing: Outgoing, queue: MessageQueue, deliver_at_ms: int, **system: str) -> Envelope:
    """Return a message as stored in ``queue``, due at ``deliver_at_ms`` (0: not delayed).

    ``system`` adds properties to its own. Raise ``Refused(MESSAGE_CORRUPTED)`` if it is too large or has no id,
    ``Refused(DELIVERY_TIME)`` for an invalid delivery time.
    """
    message = outgoing.message
    _check(message, queue, deliver_at_ms)
    properties = {**message.properties, **outgoing.system, **system}
    origin = properties.pop(RETRY_TOPIC, message.topic) if queue.topic.startswith(RETRY_PREFIX) else message.topic
    envelope = encode(replace(message, topic=origin, properties=properties, deliver_at_ms=deliver_at_ms))
    payload = envelope.payload
    if outgoing.attempts_failed or outgoing.is_half:
        sent = wire.Message.FromString(payload)
        if outgoing.attempts_failed:
            sent.system_properties.delivery_attempt = outgoing.attempts_failed + 1
        sent.system_properties.queue_id = queue.queue_id  # target queue of a half message
        payload = sent.SerializeToString()
    return envelope._replace(
        topic=queue.topic, payload=payload, queue_id=queue.queue_id, is_relative=outgoing.delay_level > 0
    )


def _check(message: Message, queue: MessageQueue, deliver_at_ms: int) -> None:
    sizes = {
        "the message id": (len(message.message_id.encode()), limits.MESSAGE_ID_BYTES_MAX),
        "the tag": (len(message.tag.encode()), limits.PROPERTIES_BYTES_MAX),
        "the message group": (len(message.message_group.encode()), limits.MESSAGE_GROUP_BYTES_MAX),
        "the body": (len(message.body), limits.BODY_BYTES_MAX),
    }
    for what, (size, size_max) in sizes.items():
        if size > size_max:
            raise Refused(Rule.MESSAGE_CORRUPTED, f"{what} is too large", value=size, limit=f"{size_max} bytes")
    if not message.message_id:
        raise Refused(Rule.MESSAGE_CORRUPTED, "it has no message id")
    if message.topic != queue.topic and not queue.topic.startswith(RETRY_PREFIX):
        raise Refused(Rule.REQUEST, f"the queue is one of topic {queue.topic!r}", value=message.topic)
    if not 0 <= deliver_at_ms <= limits.DELIVER_AT_MS_MAX:
        raise Refused(Rule.DELIVERY_TIME, "it is outside the years 1970 to 9999", value=deliver_at_ms)


def received_of(
    payload: bytes, message_id: str, queue: MessageQueue, queue_offset: int, stored_at_ms: int, attempts_failed: int = 0
) -> ReceivedMessage:
    """Return a message for a consumer; ``message_id`` and ``attempts_failed`` apply if the payload has none."""
    message, unreadable = Message(topic=queue.topic, message_id=message_id, body=b""), ""
    system: Mapping[str, str] = {}
    try:
        sent = wire.Message.FromString(payload)
    except DecodeError as error:
        unreadable = f"it is not a message: {error}"
    else:
        message, system = _taken_apart(message_of(sent), queue)
        attempts_failed = max(sent.system_properties.delivery_attempt - 1, attempts_failed)
    return ReceivedMessage(
        message=message,
        queue=queue,
        queue_offset=queue_offset,
        stored_at_ms=stored_at_ms,
        attempts_failed=attempts_failed,
        size_bytes=len(payload),
        system=system,
        unreadable=unreadable,
    )


def _taken_apart(message: Message, queue: MessageQueue) -> tuple[Message, Mapping[str, str]]:
    """Return a message without RocketMQ's own properties, and these properties."""
    properties = message.properties
    system = {name: value for name, value in properties.items() if name in SYSTEM_PROPERTIES}
    if system:
        own = {name: value for name, value in properties.items() if name not in system}
        message = replace(message, properties=own)
    if queue.topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX)):
        system |= {RETRY_TOPIC: message.topic, ORIGIN_MESSAGE_ID: message.message_id}
    return message, system
