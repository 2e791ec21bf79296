"""The W3C trace context of a stored message.

A producer sends it in the protocol's field ``trace_context`` or in the user property ``traceparent``. The wire message
is stored as it was sent, so the context survives restarts, retries, dead letters and redrives.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from broker_adapter.contracts.schedules import SCHEDULE
from broker_adapter.runtime.trace_context import TRACEPARENT
from broker_adapter.wire import rocketmq_v2 as wire
from retry.dead_letter import PARENT_MESSAGE_ID

_TEXT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_CHARS: Final = 55  # of version 00
# Heads of the field and of the property in a wire message, up to the first characters of the text.
_FIELD: Final = b"\x92\x01" + bytes((_CHARS,)) + b"00-"
_ENTRY: Final = b"\n" + bytes((len(TRACEPARENT),)) + TRACEPARENT.encode() + b"\x12" + bytes((_CHARS,)) + b"00-"
_HEAD_CHARS: Final = 3
_SAMPLED_DIGITS: Final = frozenset(b"13579bdf")  # last digits of flags with bit 01
_VARINT_MAX: Final = 0x7F  # of one byte
# Tags of the wire message's fields. It is stored as protobuf writes it: in this order, and the body last.
_PROPERTY_TAG, _SYSTEM_TAG, _BODY_TAG = 0x12, 0x1A, 0x22


class TracedMessage(NamedTuple):
    """Trace of a message with a sampled context: its trace and the producer's span, as numbers."""

    trace_id: int
    span_id: int
    parent_message_id: str = ""  # of a redriven message: its dead letter


class TracedDelivery(NamedTuple):
    """Delivery of a traced message; it began at ``start_ms``, or in an earlier run of the daemon if that is 0."""

    message: TracedMessage
    start_ms: int


def is_traceparent(text: str) -> bool:
    """Return True for a W3C trace context of version 00, sampled or not."""
    return _TEXT.fullmatch(text) is not None


def may_be_traced(payload: bytes) -> bool:
    """Return False if a wire message has no sampled trace context; True needs ``traced``.

    It looks at the fields before the body, in less than the time of a parse.
    """
    is_sampled, at = False, 0
    try:
        while (tag := payload[at]) != _BODY_TAG:
            size, at = payload[at + 1], at + 2
            if size > _VARINT_MAX:
                size, at = _varint(payload, at - 1)
            if tag == _PROPERTY_TAG:
                is_sampled = is_sampled or (payload.startswith(_ENTRY, at) and _has_flag(payload, at + len(_ENTRY)))
            elif tag == _SYSTEM_TAG:
                found = payload.find(_FIELD, at, at + size)
                return is_sampled if found < 0 else _has_flag(payload, found + len(_FIELD))
            at += size
    except IndexError:  # the end of a message without a body, or damage
        return is_sampled
    return is_sampled


def traced(payload: bytes) -> TracedMessage | None:
    """Return the trace of a wire message; None without a sampled context.

    An occurrence of a schedule has none: the trace of a schedule would never end.
    """
    if not may_be_traced(payload):
        return None
    try:
        message = wire.Message.FromString(payload)
    except DecodeError:
        return None
    properties = message.user_properties
    text = message.system_properties.trace_context or properties.get(TRACEPARENT, "")
    parts = _TEXT.fullmatch(text)
    if parts is None or SCHEDULE in properties or not int(text[-2:], 16) & 1:
        return None
    trace_id, span_id = (int(each, 16) for each in parts.groups())
    if not trace_id or not span_id:
        return None
    return TracedMessage(trace_id, span_id, properties.get(PARENT_MESSAGE_ID, ""))


def _has_flag(payload: bytes, at: int) -> bool:
    """Return True if the text with a head that ends at ``at`` has the flag of a sampled trace."""
    return payload[at + _CHARS - _HEAD_CHARS - 1] in _SAMPLED_DIGITS


def _varint(payload: bytes, at: int) -> tuple[int, int]:
    """Return a length of several bytes, and the offset after it."""
    value = 0
    for shift in range(0, 35, 7):
        byte = payload[at]
        value |= (byte & _VARINT_MAX) << shift
        at += 1
        if byte <= _VARINT_MAX:
            return value, at
    raise IndexError("no length has more than five bytes")
