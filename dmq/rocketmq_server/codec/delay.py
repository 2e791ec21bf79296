"""Delivery time of a message: the delivery timestamp and four user properties, with RocketMQ's precedence. Pure.

===================  ============================  ==========================================
``DELAY``            a delay level, from 1         beats the others; above the last: the last; below 1: no level
``TIMER_DELAY_SEC``  seconds from now              beats the two below
``TIMER_DELAY_MS``   milliseconds from now         beats the one below
``TIMER_DELIVER_MS`` epoch milliseconds            the delivery timestamp of the protocol replaces it
===================  ============================  ==========================================

A fifth property, ``DMQ_NOT_AFTER_MS`` (epoch milliseconds), is the expiry of the message: see ``check_not_after``.

RocketMQ reserves these names for its classic clients. This server accepts them from all clients. A client in any
language can use levels and *relative* delays, which do not depend on its own clock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.limits import DELAY_LEVELS_MS, DELIVER_AT_MS_MAX
from broker_adapter.wire.mapping import NOT_AFTER_MS, not_after_of

LEVEL = "DELAY"
DELAY_SEC = "TIMER_DELAY_SEC"
DELAY_MS = "TIMER_DELAY_MS"
DELIVER_MS = "TIMER_DELIVER_MS"
DELAY_PROPERTIES = (LEVEL, DELAY_SEC, DELAY_MS, DELIVER_MS)

DELAY_LEVELS_MS_DEFAULT = DELAY_LEVELS_MS

_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,20}")
_LATEST = "9999-12-31T23:59:59.999Z"


def timestamp_ms(seconds: int, nanos: int) -> int:
    """Return a protobuf Timestamp as epoch milliseconds, rounded up so that no message is early.

    Any two integers are valid input. A time outside [1970, 9999] and invalid nanos raise ``Refused(DELIVERY_TIME)``.
    """
    if not 0 <= nanos < 1_000_000_000:
        raise Refused(Rule.DELIVERY_TIME, "the nanos of delivery_timestamp are out of range", value=nanos)
    return _checked_ms("delivery_timestamp", seconds * 1000 - (-nanos // 1_000_000), f"{seconds} seconds")


def deliver_at_ms(
    timestamp: int | None,
    properties: Mapping[str, str],
    *,
    now_ms: int,
    levels_ms: tuple[int, ...],
    delay_max_ms: int | None,
) -> int | None:
    """Return the delivery time (epoch ms, possibly past), or ``None`` for a message that is not delayed.

    ``timestamp`` is the protocol's delivery timestamp in ms. Raises ``Refused(DELIVERY_TIME)`` with the property and
    the value that cannot be read, is out of range, or exceeds ``delay_max_ms``. All four properties must be valid
    numbers, also those that another one overrides.
    """
    numbers = {name: _number(name, properties[name]) for name in DELAY_PROPERTIES if name in properties}
    level = numbers.get(LEVEL, 0)
    if level > 0:
        due_ms, given = now_ms + levels_ms[min(level, len(levels_ms)) - 1], LEVEL
    elif DELAY_SEC in numbers:
        due_ms, given = now_ms + max(0, numbers[DELAY_SEC]) * 1000, DELAY_SEC
    elif DELAY_MS in numbers:
        due_ms, given = now_ms + max(0, numbers[DELAY_MS]), DELAY_MS
    elif timestamp is not None:
        due_ms, given = timestamp, "delivery_timestamp"
    elif DELIVER_MS in numbers:
        due_ms, given = numbers[DELIVER_MS], DELIVER_MS
    else:
        return None
    _checked_ms(given, due_ms, properties.get(given, due_ms))
    if delay_max_ms is not None and due_ms - now_ms > delay_max_ms:
        told = f"the max delay time of message is too large, max is {delay_max_ms}"
        why = f"{told}: {given} lies {due_ms - now_ms} ms ahead"
        raise Refused(Rule.DELIVERY_TIME, why, value=properties.get(given, due_ms), limit=f"{delay_max_ms} ms")
    return due_ms


def check_not_after(properties: Mapping[str, str], due_ms: int | None, now_ms: int) -> None:
    """Check the expiry of a message, if it has one.

    Raises ``Refused(DELIVERY_TIME)`` for an invalid time, and for an expiry that is not after the delivery time and
    now.
    """
    if NOT_AFTER_MS not in properties:
        return
    text, not_after_ms = properties[NOT_AFTER_MS], not_after_of(properties)
    if not not_after_ms:
        why = f"property {NOT_AFTER_MS} is not a time in epoch milliseconds of at most 15 digits"
        raise Refused(Rule.DELIVERY_TIME, why, value=text)
    if not_after_ms <= max(due_ms or 0, now_ms):
        when = "its delivery time" if due_ms is not None and due_ms > now_ms else "now"
        why = f"{NOT_AFTER_MS} is not after {when}: no consumer would get the message"
        raise Refused(Rule.DELIVERY_TIME, why, value=text)


def is_relative(properties: Mapping[str, str]) -> bool:
    """Return True if the properties, already accepted by ``deliver_at_ms``, give a delay relative to the send."""
    return int(properties.get(LEVEL, "0")) > 0 or DELAY_SEC in properties or DELAY_MS in properties


def _number(name: str, text: str) -> int:
    if _WHOLE_NUMBER.fullmatch(text) is None:
        raise Refused(Rule.DELIVERY_TIME, f"property {name} is not a whole number of at most 20 digits", value=text)
    return int(text)


def _checked_ms(name: str, due_ms: int, value: object) -> int:
    if due_ms > DELIVER_AT_MS_MAX:
        raise Refused(Rule.DELIVERY_TIME, f"{name} is after the year 9999{_hint(due_ms)}", value=value, limit=_LATEST)
    if due_ms < 0:
        raise Refused(Rule.DELIVERY_TIME, f"{name} is before 1970", value=value)
    return due_ms


def _hint(due_ms: int) -> str:
    """Return a hint if the value looks like milliseconds in a field of seconds."""
    as_seconds = due_ms // 1_000_000
    if not 946_684_800 <= as_seconds < 4_102_444_800:  # as milliseconds, not a date of 2000 to 2099
        return ""
    meant = datetime.fromtimestamp(as_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f" (milliseconds given for seconds? they would mean {meant})"
