"""Instants as operators write them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from broker_adapter.clock import SystemClock
from broker_adapter.limits import DELIVER_AT_MS_MAX
from dmq.cli.errors import refused, refusing
from dmq.units import parse_duration

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS_MIN = 100_000_000_000  # in 1973; a smaller number was meant as seconds
_RFC_3339 = "RFC 3339 with a time zone (2026-01-31T10:00:00Z)"
_EXPECTED = f"{_RFC_3339}, epoch milliseconds or +5m is expected"


class At(NamedTuple):
    """An instant."""

    epoch_ms: int


class After(NamedTuple):
    """So long from when the daemon hears of it; the clock of this host plays no part."""

    delay_ms: int


def parse_when(text: str, expected: str = _EXPECTED) -> At | After:
    """Return the instant or the distance that ``text`` means; raise ``ValueError`` with a sentence if it means none."""
    text = text.strip()
    if text.startswith("+"):
        return After(parse_duration(text[1:]))
    if text.isascii() and text.isdigit():
        return At(_checked_ms(int(text[:20])))
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(expected) from None
    if instant.tzinfo is None:
        raise ValueError(f"the time zone is missing: {expected}")
    # Rounded up: a message is never early, not even by the part of a millisecond that was asked for.
    return At(-((_EPOCH - instant) // timedelta(milliseconds=1)))


def _checked_ms(epoch_ms: int) -> int:
    if epoch_ms < _MS_MIN:
        raise ValueError("epoch milliseconds are expected, these look like seconds")
    if epoch_ms > DELIVER_AT_MS_MAX:
        raise ValueError("the time lies past the year 9999")
    return epoch_ms


def instant_ms(text: str | None, option: str) -> int | None:
    """Return the time that ``option`` means, ``-1h`` from now included; a usage error for one that is none."""
    if text is None:
        return None
    now_ms = SystemClock().now_ms()
    with refusing(option, text):
        if text.startswith("-"):
            return max(1, now_ms - parse_duration(text[1:]))
        instant = parse_when(text)
    return now_ms + instant.delay_ms if isinstance(instant, After) else instant.epoch_ms


def past_ms(text: str | None, option: str, now_ms: Callable[[], int]) -> int:
    """As ``instant_ms`` by another clock, for what is over; 0 for none."""
    if text is None:
        return 0
    if text.startswith("-"):
        with refusing(option, text):
            return max(1, now_ms() - parse_duration(text[1:]))
    return point_ms(text, option, besides="-1h for an hour ago, ")


def point_ms(text: str, option: str, *, besides: str = "") -> int:
    """Return the time that ``option`` means, which is no distance from now; ``besides`` is what else is allowed."""
    expected = f"{besides}{_RFC_3339} or epoch milliseconds is expected"
    with refusing(option, text):
        instant = parse_when(text, expected)
    if isinstance(instant, After):
        raise refused(expected, option, given=text)
    return instant.epoch_ms
