"""Messages in the *inner topic* of a cluster, which a daemon reads and forwards when they are due.

A producer that cannot connect to the daemon sends to the inner topic instead, and states the target and time in user
properties. A producer that cannot set properties sends a JSON object as body. Examples in other
languages: docs/how-to/rocketmq-cluster.md.

    property              JSON              value
    DMQ_TOPIC             topic             the target topic
    DMQ_DELIVER_AT_MS     deliver_at_ms     delivery time, epoch milliseconds
    DMQ_DELAY_MS          delay_ms          or delay from the store time in the cluster
    DMQ_DELAY_LEVEL       delay_level       or a delay level, from 1
                          body, text        the body in base64, or as text
                          tag, keys, properties, message_group

Without a time the message is forwarded at once. Pure.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.limits import BODY_BYTES_MAX, DELIVER_AT_MS_MAX
from broker_adapter.contracts.message import Message
from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX, RETRY_PREFIX, check_topic
from broker_adapter.wire import rocketmq_v2 as wire

INNER_TOPIC = "dmq_inner_topic"
INNER_GROUP = "dmq_inner_group"
TOPIC = "DMQ_TOPIC"
DELIVER_AT_MS = "DMQ_DELIVER_AT_MS"
DELAY_MS = "DMQ_DELAY_MS"
DELAY_LEVEL = "DMQ_DELAY_LEVEL"
_TIMES = {DELIVER_AT_MS: "deliver_at_ms", DELAY_MS: "delay_ms", DELAY_LEVEL: "delay_level"}
_FIELDS = frozenset({"topic", *_TIMES.values(), "body", "text", "tag", "keys", "properties", "message_group"})
_DIGITS_MAX = 15
_SHOWN_CHARS = 60


class Wrapped(NamedTuple):
    """Message from an inner topic, with its target and time. All three times 0: forward at once."""

    topic: str
    message: wire.Message
    deliver_at_ms: int = 0
    delay_ms: int = 0
    delay_level: int = 0


def wrap(message: Message, deliver_at_ms: int, *, inner_topic: str = INNER_TOPIC) -> Message:
    """Return ``message`` in its form for the inner topic; it keeps its id for deduplication.

    ``Refused`` for an invalid target topic, or a time after the year 9999.
    """
    _check_topic(message.topic, inner_topic)
    if not 0 <= deliver_at_ms <= DELIVER_AT_MS_MAX:
        raise Refused(Rule.DELIVERY_TIME, "deliver_at_ms is outside the years 1970 to 9999", value=deliver_at_ms)
    properties = {**message.properties, TOPIC: message.topic, DELIVER_AT_MS: str(deliver_at_ms)}
    return replace(message, topic=inner_topic, deliver_at_ms=0, properties=properties)


def unwrap(payload: bytes, inner_topic: str = INNER_TOPIC) -> Wrapped:
    """Return the original message of ``wrap``, or of a JSON body; ``Refused`` with the reason if it is invalid.

    ``payload`` must be a valid serialized message of the inner topic.
    """
    message = wire.Message.FromString(payload)
    if TOPIC in message.user_properties:
        wrapped = _of_properties(message)
    elif message.body.lstrip()[:1] == b"{":
        wrapped = _of_json(message)
    else:
        why = f"it has no property {TOPIC}, and its body is not a JSON object"
        raise Refused(Rule.MESSAGE_CORRUPTED, why, value=_shown(message.body))
    _check_topic(wrapped.topic, inner_topic)
    wrapped.message.topic.Clear()
    wrapped.message.topic.name = wrapped.topic
    wrapped.message.system_properties.ClearField("delivery_timestamp")
    return wrapped


def _of_properties(message: wire.Message) -> Wrapped:
    properties = message.user_properties
    topic = properties.pop(TOPIC)
    times = {field: _number(name, properties.pop(name)) for name, field in _TIMES.items() if name in properties}
    return Wrapped(topic, message, **_one(times))


def _of_json(message: wire.Message) -> Wrapped:
    found = _object(message.body)
    if unknown := sorted(found.keys() - _FIELDS):
        raise _wrong(f"unknown field; allowed: {', '.join(sorted(_FIELDS))}", unknown[0])
    times = {field: _number(field, found[field]) for field in _TIMES.values() if field in found}
    message.body = _body(found)
    system = message.system_properties
    if tag := _text(found, "tag"):
        system.tag = tag
    if message_group := _text(found, "message_group"):
        system.message_group = message_group
    keys = found.get("keys", [])
    if not isinstance(keys, list) or not all(isinstance(each, str) for each in keys):
        raise _wrong("keys is not a list of strings", keys)
    system.keys.extend(keys)
    for name, value in _texts(found).items():
        message.user_properties[name] = value
    return Wrapped(_text(found, "topic"), message, **_one(times))


def _object(body: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) < len(pairs):
            raise ValueError("duplicate name")
        return dict(pairs)

    try:
        found = json.loads(body, object_pairs_hook=once)
        json.dumps(found, ensure_ascii=False).encode()  # JSON can hold a lone surrogate, no message can
    except (ValueError, RecursionError) as error:
        raise _wrong(f"the body is not readable JSON: {error}", _shown(body)) from None
    assert isinstance(found, dict), "it began with a brace"
    return found


def _body(found: Mapping[str, Any]) -> bytes:
    if ("body" in found) == ("text" in found):
        raise _wrong("either body (base64) or text is required", sorted({"body", "text"} & found.keys()))
    if "text" in found:
        body = _text(found, "text").encode()
    else:
        try:
            body = binascii.a2b_base64(_text(found, "body"), strict_mode=True)
        except (binascii.Error, ValueError) as error:
            raise _wrong(f"body is not base64: {error}", str(found["body"])[:_SHOWN_CHARS]) from None
    if not body or len(body) > BODY_BYTES_MAX:
        raise Refused(Rule.BODY_SIZE, f"the body has 1 to {BODY_BYTES_MAX} bytes", value=len(body))
    return body


def _texts(found: Mapping[str, Any]) -> Mapping[str, str]:
    properties = found.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(each, str) for each in properties.values()):
        raise _wrong("properties is not an object of strings", _shown(repr(properties).encode()))
    return properties


def _text(found: Mapping[str, Any], name: str) -> str:
    value = found.get(name, "")
    if not isinstance(value, str):
        raise _wrong(f"{name} is not a string", _shown(repr(value).encode()))
    return value


def _number(name: str, value: object) -> int:
    text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if not (text.isascii() and text.isdigit()) or len(text) > _DIGITS_MAX or int(text) > DELIVER_AT_MS_MAX:
        why = f"{name} is not a whole number from 0 to {DELIVER_AT_MS_MAX}"
        raise Refused(Rule.DELIVERY_TIME, why, value=str(value)[:_SHOWN_CHARS])
    return int(text)


def _one(times: dict[str, int]) -> dict[str, int]:
    if len(times) > 1:
        raise Refused(Rule.DELIVERY_TIME, "more than one delivery time", value=", ".join(sorted(times)))
    return times


def _check_topic(topic: str, inner_topic: str) -> None:
    check_topic(topic)
    if topic == inner_topic or topic.startswith((DEAD_LETTER_PREFIX, RETRY_PREFIX)):
        why = "the target cannot be the inner topic, a retry topic or a dead-letter topic"
        raise Refused(Rule.TOPIC, why, value=topic)


def _wrong(why: str, value: object) -> Refused:
    return Refused(Rule.MESSAGE_CORRUPTED, why, value=value)


def _shown(body: bytes) -> str:
    return body[:_SHOWN_CHARS].decode(errors="replace")
