"""Instants as operators write them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from broker_adapter.limits import DELIVER_AT_MS_MAX
from dmq.units import parse_duration

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS_MIN = 100_000_000_000  # in 1973; a smaller number was meant as seconds
_EXPECTED = "RFC 3339 with a time zone (2026-01-31T10:00:00Z), epoch milliseconds or +5m is expected"


class At(NamedTuple):
    """An instant."""

    epoch_ms: int


class After(NamedTuple):
    """So long from when the daemon hears of it; the clock of this host plays no part."""

    delay_ms: int


def parse_when(text: str) -> At | After:
    """Return the instant or the distance that ``text`` means; raise ``ValueError`` with a sentence if it means none."""
    text = text.strip()
    if text.startswith("+"):
        return After(parse_duration(text[1:]))
    if text.isascii() and text.isdigit():
        return At(_checked_ms(int(text[:20]), text))
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(_EXPECTED) from None
    if instant.tzinfo is None:
        raise ValueError(f"the time zone is missing: {_EXPECTED}")
    # Rounded up: a message is never early, not even by the part of a millisecond that was asked for.
    return At(-((_EPOCH - instant) // timedelta(milliseconds=1)))


def _checked_ms(epoch_ms: int, text: str) -> int:
    if epoch_ms < _MS_MIN:
        raise ValueError(f"epoch milliseconds are expected, {text} looks like seconds")
    if epoch_ms > DELIVER_AT_MS_MAX:
        raise ValueError("the time lies past the year 9999")
    return epoch_ms
