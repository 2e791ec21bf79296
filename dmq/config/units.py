"""Text formats of durations, sizes, times, addresses and delay level tables. Loads no library.

All functions are pure and convert between text and numbers, with the unit in the name. Invalid text raises
``ValueError`` with a sentence about the expected format.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from broker_adapter.contracts.limits import DELIVER_AT_MS_MAX

# Apache RocketMQ's `messageDelayLevel` default.
DELAY_LEVELS_DEFAULT = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
DELAY_LEVELS_MAX = 255  # the stored record has one byte for a level
DURATION_MS_MAX = 3_650_000 * 86_400_000  # 10 000 years; beyond it a sum of times leaves the calendar

_UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
_UNITS_BYTES = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
_DURATION = re.compile(r"(?:[0-9]+(?:ms|[smhd]))+")
_DURATION_PART = re.compile(r"([0-9]+)(ms|[smhd])")
_SIZE = re.compile(r"([0-9]+) ?([KMGT]iB|B)")
_DIGITS = re.compile(r"[0-9]+")
_NUMBER_CHARS_MAX = 18
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_INSTANT_MS_MIN = 100_000_000_000  # in 1973; a smaller number is probably in seconds
RFC_3339 = "RFC 3339 with a time zone (2026-01-31T10:00:00Z)"
_INSTANT = f"{RFC_3339}, epoch milliseconds or +5m is expected"
_TOPIC_PATTERN = re.compile(r"[|a-zA-Z0-9_-]{1,127}\*?|\*")


def parse_duration(text: str) -> int:
    """Return the milliseconds of ``500ms``, ``15m``, ``1h30m``; a number needs a unit, except 0."""
    text = text.strip()
    if text == "0":
        return 0
    if _DIGITS.fullmatch(text):
        number = text if len(text) <= _NUMBER_CHARS_MAX else f"{text[:_NUMBER_CHARS_MAX]}..."
        raise ValueError(f"a duration needs a unit: {number}ms, {number}s or {number}m")
    if not _DURATION.fullmatch(text):
        raise ValueError("a duration is expected, such as 500ms, 10s, 15m, 1h30m or 2d")
    parts = _DURATION_PART.findall(text)
    if any(len(number) > _NUMBER_CHARS_MAX for number, _ in parts):
        raise ValueError(f"the duration is longer than {format_duration(DURATION_MS_MAX)}")
    duration_ms = sum(int(number) * _UNITS_MS[unit] for number, unit in parts)
    if duration_ms > DURATION_MS_MAX:
        raise ValueError(f"the duration is longer than {format_duration(DURATION_MS_MAX)}")
    return duration_ms


def parse_sent_duration(text: str) -> int:
    """Like ``parse_duration``, for durations sent by programs: a number without a unit is in milliseconds."""
    number = text.strip()
    return parse_duration(f"{number}ms" if _DIGITS.fullmatch(number) else text)


def format_duration(duration_ms: int) -> str:
    """Undo ``parse_duration`` exactly: ``90000`` is ``1m30s``."""
    if duration_ms == 0:
        return "0s"
    text = ""
    rest = duration_ms
    for unit, unit_ms in _UNITS_MS.items():
        count, rest = divmod(rest, unit_ms)
        if count:
            text += f"{count}{unit}"
    return text


class At(NamedTuple):
    """Absolute time."""

    epoch_ms: int


class After(NamedTuple):
    """Distance from the time at which the daemon receives it, independent of the sender's clock. Negative:
    before that.
    """

    delay_ms: int


def parse_when(text: str, expected: str = _INSTANT, *, distance: Callable[[str], int] = parse_duration) -> At | After:
    """Return the absolute or relative time of ``text``. Raise ``ValueError`` with a sentence if it is invalid."""
    text = text.strip()
    if text.startswith("+"):
        return After(distance(text[1:]))
    if text.isascii() and text.isdigit():
        return At(_checked_ms(int(text[:20])))
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(expected) from None
    if instant.tzinfo is None:
        raise ValueError(f"the time zone is missing: {expected}")
    # Rounded up: a message is never early, not even by a fraction of a millisecond.
    return At(-((_EPOCH - instant) // timedelta(milliseconds=1)))


def parse_around(text: str, *, distance: Callable[[str], int] = parse_duration) -> At | After:
    """Like ``parse_when``, but also accept past times such as ``-1h``."""
    text = text.strip()
    return After(-distance(text[1:])) if text.startswith("-") else parse_when(text, distance=distance)


def parse_sent_around(text: str) -> At | After:
    """Like ``parse_around``, for times sent by programs: see ``parse_sent_duration``."""
    return parse_around(text, distance=parse_sent_duration)


def _checked_ms(epoch_ms: int) -> int:
    if epoch_ms < _INSTANT_MS_MIN:
        raise ValueError("expected epoch milliseconds; the value looks like seconds")
    if epoch_ms > DELIVER_AT_MS_MAX:
        raise ValueError("the time is after the year 9999")
    return epoch_ms


def parse_delay_levels(text: str) -> tuple[int, ...]:
    """Return the milliseconds of each delay level, level 1 first, of a table such as ``1s 5s 10s``."""
    entries = text.split()
    if not 1 <= len(entries) <= DELAY_LEVELS_MAX:
        raise ValueError(f"1 to {DELAY_LEVELS_MAX} durations separated by spaces are expected, such as '1s 5s 10s'")
    return tuple(parse_duration(entry) for entry in entries)


def format_delay_levels(levels_ms: tuple[int, ...]) -> str:
    """Undo ``parse_delay_levels``."""
    return " ".join(format_duration(level_ms) for level_ms in levels_ms)


def parse_size(text: str) -> int:
    """Return the bytes of ``64MiB`` or of a plain number of bytes."""
    text = text.strip()
    match = _SIZE.fullmatch(text if not _DIGITS.fullmatch(text) else text + "B")
    if match is None or len(match[1]) > _NUMBER_CHARS_MAX:
        raise ValueError("a size is expected, such as 512KiB, 64MiB, 1GiB or a number of bytes")
    return int(match[1]) * _UNITS_BYTES[match[2]]


def format_size(size_bytes: int) -> str:
    """Return the size in the largest unit with at least one whole, with one decimal if it is not whole."""
    for unit, unit_bytes in _UNITS_BYTES.items():
        if size_bytes >= unit_bytes:
            whole = size_bytes % unit_bytes == 0
            return f"{size_bytes // unit_bytes}{unit}" if whole else f"{size_bytes / unit_bytes:.1f}{unit}"
    return "0B"


class Address(NamedTuple):
    """Address to listen on or to connect to. An IPv6 host has brackets only in text. Port 0: any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Return the address of ``host:port`` or ``[IPv6]:port``."""
    host, _, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        readable = ":" in host
    else:
        readable = ":" not in host
    readable = readable and bool(host) and not any(char.isspace() or char in "[]/" for char in host)
    if not readable or not _DIGITS.fullmatch(port) or len(port) > 5 or int(port) > 65535:
        raise ValueError("host:port is expected, such as 127.0.0.1:8081 or [::1]:8081")
    return Address(host, int(port))


def is_loopback(host: str) -> bool:
    """Return True if ``host`` is reachable only from this host; False for every name except ``localhost``."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class TopicPatterns(NamedTuple):
    """Set of topics, by names and by prefixes of names."""

    names: frozenset[str] = frozenset()
    prefixes: tuple[str, ...] = ()

    def has(self, topic: str) -> bool:
        """Return True if the set contains the topic."""
        return topic in self.names or topic.startswith(self.prefixes)

    def __str__(self) -> str:
        return ";".join([*sorted(self.names), *(f"{prefix}*" for prefix in self.prefixes)]) or "none"


def parse_topic_patterns(text: str) -> TopicPatterns:
    """Return the topics of ``orders;bills*``; a comma is also a separator. ``none`` stands for no topic."""
    if text.strip() == "none":
        return TopicPatterns()
    patterns = [each.strip() for each in text.replace(",", ";").split(";")]
    for each in patterns:
        if not _TOPIC_PATTERN.fullmatch(each):
            raise ValueError(
                f"{each!r:.80} is not a topic pattern; expected topic names or prefixes, for example orders;bills*"
            )
    prefixes = sorted({each[:-1] for each in patterns if each.endswith("*")})
    return TopicPatterns(frozenset(each for each in patterns if not each.endswith("*")), tuple(prefixes))


ALL_TOPICS = TopicPatterns(prefixes=("",))


def format_time(epoch_ms: int) -> str:
    """Return a time as RFC 3339 in UTC with milliseconds: ``2026-01-31T10:00:00.250Z``; years 1970 to 9999."""
    seconds, ms = divmod(epoch_ms, 1000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{ms:03d}Z"
