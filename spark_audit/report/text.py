"""Text formats of numbers, times and durations (separators, units, UTC), and printable names."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from spark_audit.stops import Stop

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s"))
# Control characters, lone surrogates, and characters that change text direction: shown by number, without effect.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)


def visible(text: str) -> str:
    r"""Return ``text`` with every invisible or direction-changing character as ``\u....``."""
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def shortened(text: object, length_max: int) -> str:
    """Return ``text`` in printable form, cut in the middle to at most ``length_max`` characters."""
    seen = visible(str(text))
    if len(seen) <= length_max:
        return seen
    head = (length_max - 1) * 2 // 3
    return f"{seen[:head]}…{seen[len(seen) - (length_max - 1 - head) :]}"


def count(value: int) -> str:
    """Return a whole number with thousands separators."""
    return f"{value:,}"


def plural(value: int, one: str, many: str = "") -> str:
    """Return the number and the noun in singular or plural."""
    return f"{count(value)} {one if value == 1 else many or one + 's'}"


def utc(at_ms: int | None) -> str:
    """Return a time as ``2026-11-21 09:10:00.123 UTC``, without milliseconds if they are 0."""
    if at_ms is None:
        return "unknown"
    at = moment(at_ms)
    if at is None:
        return f"{count(at_ms)} ms since 1970"
    thousandths = f".{at_ms % 1000:03}" if at_ms % 1000 else ""
    return f"{at:%Y-%m-%d %H:%M:%S}{thousandths} UTC"


def minute(at_ms: int) -> str:
    """Return a time as ``2026-11-21 09:10``, for ranges that name UTC once."""
    at = moment(at_ms)
    return f"{at_ms} ms" if at is None else f"{at:%Y-%m-%d %H:%M}" + (f":{at:%S}" if at.second else "")


def span(from_ms: int, to_ms: int) -> str:
    """Return a time range, with the date once if both ends share it."""
    start, end = minute(from_ms), minute(to_ms)
    if start[:10] == end[:10] and " " in end:
        end = end.partition(" ")[2]
    return f"{start} to {end} UTC"


def downtime(stop: Stop) -> str:
    """Return a stop as ``down 2026-11-28 11:43:50 to 11:45:11 UTC``."""
    after_kill = ", counted from its last event before a kill" if stop.is_killed else ""
    return f"down {span(stop.from_ms // 1000 * 1000, stop.to_ms // 1000 * 1000)}{after_kill}"


def moment(at_ms: int) -> datetime | None:
    """Return a time as a date; None if it is outside the range of ``datetime``."""
    try:
        return _EPOCH + timedelta(milliseconds=at_ms)
    except OverflowError:
        return None


def duration(value_ms: float | None) -> str:
    """Return a duration with at most two units: ``340 ms``, ``1.25 s``, ``2 min 5 s``, ``3 d 4 h``."""
    if value_ms is None:
        return "none"
    if value_ms < 0:
        return f"-{duration(-value_ms)}"
    if value_ms < 1000:
        return f"{value_ms:.3g} ms"
    if value_ms < 60_000:
        return f"{int(value_ms) / 1000:.3g} s"
    for (unit_ms, unit), (next_ms, next_unit) in pairwise(_UNITS):
        if value_ms >= unit_ms:
            whole, rest = divmod(int(value_ms), unit_ms)
            rest //= next_ms
            return f"{count(whole)} {unit}" + (f" {rest} {next_unit}" if rest else "")
    raise AssertionError("a minute or more has a unit")


def share(part: int, whole: int) -> str:
    """Return a percentage. It is rounded to 0 or 100 only if it is exactly that."""
    if not whole or not part:
        return "0 %"
    if part == whole:
        return "100 %"
    per_cent = 100 * part / whole
    if per_cent < 0.01:
        return "< 0.01 %"
    if per_cent > 99.99:
        return "> 99.99 %"
    return f"{per_cent:.2f} %" if per_cent < 10 or per_cent > 99 else f"{per_cent:.1f} %"
