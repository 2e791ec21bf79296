"""Between wire messages and the message model. Pure.

A broker stores the wire message as it came; only what the broker itself decided is changed: the message type, the
delivery timestamp, and the properties that asked for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from broker_adapter.contracts.limits import DELIVER_AT_MS_MAX
from broker_adapter.contracts.message import BodyEncoding, Envelope, Message
from broker_adapter.contracts.own_keys import OWN_KEY, keeps_first, own_key_of
from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX, RETRY_PREFIX
from broker_adapter.wire import rocketmq_v2 as wire

NOT_AFTER_MS = "DMQ_NOT_AFTER_MS"  # user property: epoch milliseconds after which nobody is to get the message
_DIGITS_MAX = 15

__all__ = [
    "decode",
    "encode",
    "epoch_ms",
    "full_name",
    "message_of",
    "resource_of",
    "set_duration",
    "set_timestamp",
    "to_envelope",
]


def full_name(resource: wire.Resource) -> str:
    """Return the one name a broker knows a topic or group by: a client's namespace becomes a prefix, as in RocketMQ.

    In the name of a retry or dead-letter topic it goes where the group's name begins: ``%DLQ%namespace%group``. A
    namespace alone names nothing: the result is empty.
    """
    namespace, name = resource.resource_namespace, resource.name
    if not namespace or not name:
        return name
    for prefix in (RETRY_PREFIX, DEAD_LETTER_PREFIX):
        if name.startswith(prefix):
            return f"{prefix}{namespace}%{name.removeprefix(prefix)}"
    return f"{namespace}%{name}"


def resource_of(name: str) -> wire.Resource:
    """Return ``name`` as clients without a namespace see it."""
    return wire.Resource(name=name)


def set_timestamp(timestamp: wire.Timestamp, epoch_ms: int) -> None:
    """Write ``epoch_ms`` (never negative) into ``timestamp``."""
    seconds, ms = divmod(epoch_ms, 1000)
    timestamp.seconds = seconds
    timestamp.nanos = ms * 1_000_000


def set_duration(duration: wire.Duration, length_ms: int) -> None:
    """Write ``length_ms`` (never negative) into ``duration``."""
    seconds, ms = divmod(length_ms, 1000)
    duration.seconds = seconds
    duration.nanos = ms * 1_000_000


def to_envelope(
    message: wire.Message, *, deliver_at_ms: int | None = None, consumed: Iterable[str] = (), topic: str = ""
) -> Envelope:
    """Return ``message`` ready for a broker; ``message`` itself is changed to what will be stored.

    ``deliver_at_ms`` is ``None`` for a message that is not delayed. ``consumed`` names user properties to drop,
    ``topic`` is its full name, where that is known. What the message says it is (``message_type``) gives way to what it
    is.
    """
    system = message.system_properties
    message_group = system.message_group
    if deliver_at_ms is None:
        actual = wire.FIFO if message_group else wire.NORMAL
    else:
        actual = wire.DELAY
        set_timestamp(system.delivery_timestamp, deliver_at_ms)
    if system.message_type != actual:
        system.message_type = actual
    for name in consumed:
        message.user_properties.pop(name, None)
    envelope = Envelope(
        topic or full_name(message.topic),
        system.message_id,
        message.SerializeToString(),
        system.tag,
        message_group,
        deliver_at_ms or 0,
    )
    return with_wishes(envelope, message.user_properties) if message.user_properties else envelope


def with_wishes(envelope: Envelope, properties: Mapping[str, str]) -> Envelope:
    """Return ``envelope`` with what these user properties of its message ask of a broker, but for its delay."""
    if NOT_AFTER_MS not in properties and OWN_KEY not in properties:
        return envelope
    own_key = own_key_of(properties)
    return envelope._replace(
        not_after_ms=not_after_of(properties),
        own_key=own_key,
        keeps_first=bool(own_key) and keeps_first(properties),
    )


def not_after_of(properties: Mapping[str, str]) -> int:
    """Return after which time (epoch ms) a message with these user properties is not to be delivered; 0: none.

    What is no such time counts as none: who takes messages in refuses it.
    """
    text = properties.get(NOT_AFTER_MS, "")
    is_time = text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX
    return min(int(text), DELIVER_AT_MS_MAX) if is_time else 0


def encode(message: Message) -> Envelope:
    """Return ``message`` as an envelope with its wire bytes."""
    sent = wire.Message(
        topic=wire.Resource(name=message.topic), user_properties=dict(message.properties), body=message.body
    )
    system = sent.system_properties
    system.message_id = message.message_id
    system.keys.extend(message.keys)
    system.body_encoding = wire.GZIP if message.body_encoding is BodyEncoding.GZIP else wire.IDENTITY
    system.born_host = message.born_host
    set_timestamp(system.born_timestamp, message.born_at_ms)
    if message.tag:
        system.tag = message.tag
    if message.message_group:
        system.message_group = message.message_group
    return to_envelope(sent, deliver_at_ms=message.deliver_at_ms or None)


def decode(payload: bytes) -> Message:
    """Undo ``encode``, for the payload of an envelope or a delivery from any client.

    Raises ``google.protobuf.message.DecodeError`` for bytes that are no message.
    """
    return message_of(wire.Message.FromString(payload))


def message_of(sent: wire.Message) -> Message:
    """As ``decode``, of a wire message that is parsed already."""
    system = sent.system_properties
    return Message(
        topic=full_name(sent.topic),
        message_id=system.message_id,
        body=sent.body,
        tag=system.tag,
        keys=tuple(system.keys),
        properties=dict(sent.user_properties),
        message_group=system.message_group,
        deliver_at_ms=epoch_ms(system.delivery_timestamp),
        body_encoding=BodyEncoding.GZIP if system.body_encoding == wire.GZIP else BodyEncoding.IDENTITY,
        born_at_ms=epoch_ms(system.born_timestamp),
        born_host=system.born_host,
    )


def epoch_ms(timestamp: wire.Timestamp) -> int:
    """Return a timestamp in epoch milliseconds; 0 for one that is not there."""
    return timestamp.seconds * 1000 + timestamp.nanos // 1_000_000
