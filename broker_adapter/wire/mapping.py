"""Conversion between wire messages and the message model. Pure.

A broker stores the wire message as received, except for its own decisions: the message type, the delivery timestamp,
and the properties that requested it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from broker_adapter.contracts.limits import DELIVER_AT_MS_MAX
from broker_adapter.contracts.message import BodyEncoding, Envelope, Message
from broker_adapter.contracts.own_keys import OWN_KEY, keeps_first, own_key_of
from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX, RETRY_PREFIX
from broker_adapter.wire import rocketmq_v2 as wire

NOT_AFTER_MS = "DMQ_NOT_AFTER_MS"  # user property: expiry of the message, epoch milliseconds
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
    """Return the broker's name of a topic or group: a client's namespace becomes a prefix, as in RocketMQ.

    In a retry or dead-letter topic the namespace precedes the group's name: ``%DLQ%namespace%group``. The result is
    empty for a namespace without a name.
    """
    namespace, name = resource.resource_namespace, resource.name
    if not namespace or not name:
        return name
    for prefix in (RETRY_PREFIX, DEAD_LETTER_PREFIX):
        if name.startswith(prefix):
            return f"{prefix}{namespace}%{name.removeprefix(prefix)}"
    return f"{namespace}%{name}"


def resource_of(name: str) -> wire.Resource:
    """Return the wire form of ``name`` for clients without a namespace."""
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
    """Return the envelope of ``message`` for a broker; ``message`` itself is changed to its stored form.

    ``deliver_at_ms`` is ``None`` for a message without a delay. ``consumed`` are user properties to drop. ``topic`` is
    the full name of the topic if known. The actual type of the message replaces its declared ``message_type``.
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
    """Return ``envelope`` with the options that these user properties request from a broker, except the delay."""
    if NOT_AFTER_MS not in properties and OWN_KEY not in properties:
        return envelope
    own_key = own_key_of(properties)
    return envelope._replace(
        not_after_ms=not_after_of(properties),
        own_key=own_key,
        keeps_first=bool(own_key) and keeps_first(properties),
    )


def not_after_of(properties: Mapping[str, str]) -> int:
    """Return the expiry (epoch ms) of a message with these user properties; 0: none.

    An invalid time counts as none: it is refused when a message is accepted.
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
    """Return the message of a payload of an envelope or a delivery, from any client.

    Raises ``google.protobuf.message.DecodeError`` for invalid bytes.
    """
    return message_of(wire.Message.FromString(payload))


def message_of(sent: wire.Message) -> Message:
    """Return the message of a parsed wire message."""
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
    """Return a timestamp in epoch milliseconds; 0 if it is not set."""
    return timestamp.seconds * 1000 + timestamp.nanos // 1_000_000
