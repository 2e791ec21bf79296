"""Parsing of times in options."""

from __future__ import annotations

from collections.abc import Callable

from broker_adapter.runtime.clock import SystemClock
from dmq.cli.output.errors import refused, refusing
from dmq.config.units import RFC_3339, After, parse_around, parse_duration, parse_when


def instant_ms(text: str | None, option: str) -> int | None:
    """Return the time of ``option``, also relative to now such as ``-1h``. Raise a usage error if it is invalid."""
    if text is None:
        return None
    now_ms = SystemClock().now_ms()
    with refusing(option, text):
        instant = parse_around(text)
    return max(1, now_ms + instant.delay_ms) if isinstance(instant, After) else instant.epoch_ms


def past_ms(text: str | None, option: str, now_ms: Callable[[], int]) -> int:
    """Like ``instant_ms``, but for past times, with another clock; 0 for none."""
    if text is None:
        return 0
    if text.startswith("-"):
        with refusing(option, text):
            return max(1, now_ms() - parse_duration(text[1:]))
    return point_ms(text, option, besides="-1h for an hour ago, ")


def point_ms(text: str, option: str, *, besides: str = "") -> int:
    """Return the absolute time of ``option``; ``besides`` describes other allowed forms."""
    expected = f"{besides}{RFC_3339} or epoch milliseconds is expected"
    with refusing(option, text):
        instant = parse_when(text, expected)
    if isinstance(instant, After):
        raise refused(expected, option, given=text)
    return instant.epoch_ms
