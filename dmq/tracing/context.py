"""The W3C trace context of a stored message.

A producer sends it in the protocol's field ``trace_context`` or in the user property ``traceparent``. The wire message
is stored as it was sent, so the context survives restarts, retries, dead letters and redrives.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from broker_adapter.contracts.schedules import SCHEDULE
from broker_adapter.wire import rocketmq_v2 as wire
from retry.dead_letter import PARENT_MESSAGE_ID

PROPERTY: Final = "traceparent"
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_CHARS: Final = 55  # of version 00
# The head of the field or of the property in a wire message. Both searches together take 0.1 us per KiB; to parse the
# message takes 2 us and more.
_FIELD: Final = b"\x92\x01" + bytes((_CHARS,)) + b"00-"
_ENTRY: Final = b"\n" + bytes((len(PROPERTY),)) + PROPERTY.encode() + b"\x12" + bytes((_CHARS,)) + b"00-"
_HEAD_CHARS: Final = 3  # of the text, in both heads
_SAMPLED_DIGITS: Final = frozenset(bytes((digit,)) for digit in b"13579bdf")  # last digits of flags with bit 01


class TracedMessage(NamedTuple):
    """Trace of a message with a sampled context: its trace and the producer's span, as numbers."""

    trace_id: int
    span_id: int
    parent_message_id: str = ""  # of a redriven message: its dead letter


class TracedDelivery(NamedTuple):
    """Delivery of a traced message; it began at ``start_ms``, or in an earlier run of the daemon if that is 0."""

    message: TracedMessage
    start_ms: int


def may_be_traced(value: bytes) -> bool:
    """Return False if the wire message in ``value`` has no sampled trace context; True needs ``traced``."""
    return _is_sampled(value, _FIELD) or _is_sampled(value, _ENTRY)


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
    text = message.system_properties.trace_context or properties.get(PROPERTY, "")
    parts = _TRACEPARENT.fullmatch(text)
    if parts is None or SCHEDULE in properties or not int(text[-2:], 16) & 1:
        return None
    trace_id, span_id = (int(each, 16) for each in parts.groups())
    if not trace_id or not span_id:
        return None
    return TracedMessage(trace_id, span_id, properties.get(PARENT_MESSAGE_ID, ""))


def _is_sampled(value: bytes, head: bytes) -> bool:
    at = value.find(head)
    if at < 0:
        return False
    flags_end = at + len(head) - _HEAD_CHARS + _CHARS
    return value[flags_end - 1 : flags_end] in _SAMPLED_DIGITS
