"""Occurrence times of a recurring message by its rule, each strictly later than the previous one. Pure.

A rule is an interval, counted from its start, or a cron expression of five fields in a time zone:

    minute 0-59, hour 0-23, day of the month 1-31, month 1-12 or jan-dec, day of the week 0-7 or sun-sat (0 and 7: sun)

Each field is ``*``, a number, a range ``a-b``, either of them with a step ``/n``, or a list of these. An alias such as
``@daily`` replaces all fields. If both day fields are restricted, a match of either is enough, as in cron.

Around a clock change, a rule with an hour field that begins with ``*`` applies to the hours that exist. It skips hours
that are left out, and occurs in both copies of a repeated hour. Every other rule means a time of day. A time that is
left out occurs when the clock has jumped over it; a repeated time occurs only the first time.

A search ends after ``YEARS_MAX`` years: the rarest date, 29 February, is never further away.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, time, timedelta, tzinfo
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple
from zoneinfo import ZoneInfo

from broker_adapter.contracts.limits import DELIVER_AT_MS_MAX
from dmq.store.schema.messages.recurring import CatchUp, RecurrenceRule, ScheduleProgress

EVERY_MS_MIN = 1_000
JITTER_MS_MAX = 86_400_000
MISSED_AFTER_MS = 60_000  # lateness from which ``CatchUp.SKIP`` skips an occurrence
CRON_CHARS_MAX = 256
YEARS_MAX = 9
ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_ITEM = re.compile(r"(\*|\w+)(?:-(\w+))?(?:/(\d+))?", re.ASCII)
_DAY = timedelta(days=1)
_ALLOWED = "five fields (minute hour day month weekday) of *, numbers, a-b, /n and lists, or an alias such as @daily"


class RuleError(ValueError):
    """Invalid rule; the text names the error and the allowed values."""


class _Field(NamedTuple):
    name: str
    least: int
    most: int
    words: tuple[str, ...] = ()  # names of the numbers, from ``least`` on


_FIELDS = (
    _Field("minute", 0, 59),
    _Field("hour", 0, 23),
    _Field("day of the month", 1, 31),
    _Field("month", 1, 12, _MONTHS),
    _Field("day of the week", 0, 7, _DAYS),
)


class Cron(NamedTuple):
    """Parsed cron expression: the numbers of each field, whether the hour begins with ``*``, and whether either day
    suffices.
    """

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: tuple[int, ...]
    months: tuple[int, ...]
    weekdays: tuple[int, ...]  # 0: Sunday
    is_hourly: bool
    either_day: bool


@lru_cache(maxsize=1024)
def read_cron(text: str) -> Cron:
    """Parse a cron expression; raise ``RuleError`` with the invalid field and its allowed values."""
    if len(text) > CRON_CHARS_MAX:
        raise RuleError(f"a cron expression has at most {CRON_CHARS_MAX} characters, this one {len(text)}")
    expanded = ALIASES.get(text.strip().lower(), text)
    if expanded.startswith("@"):
        raise RuleError(f"unknown alias {text!r}; allowed: {', '.join(ALIASES)}")
    parts = expanded.lower().split()
    if len(parts) != len(_FIELDS):
        count = "1 field" if len(parts) == 1 else f"{len(parts)} fields"
        raise RuleError(f"the cron expression {text!r} has {count}; expected are {_ALLOWED}")
    minutes, hours, days, months, weekdays = (_numbers(part, field) for part, field in zip(parts, _FIELDS, strict=True))
    either_day = not parts[2].startswith("*") and not parts[4].startswith("*")
    weekdays = tuple(sorted({day % 7 for day in weekdays}))
    return Cron(minutes, hours, days, months, weekdays, parts[1].startswith("*"), either_day)


def _numbers(part: str, field: _Field) -> tuple[int, ...]:
    found: set[int] = set()
    for item in part.split(","):
        match = _ITEM.fullmatch(item)
        if match is None:
            raise _bad(item, field)
        first, last, step = match.groups()
        if first == "*":
            low, high = field.least, field.most
            if last is not None:
                raise _bad(item, field)
        else:
            low = _number(first, item, field)
            high = _number(last, item, field) if last is not None else (field.most if step else low)
        if low > high or (step is not None and not 1 <= int(step[:9]) <= field.most):
            raise _bad(item, field)
        found.update(range(low, high + 1, int(step or 1)))
    return tuple(sorted(found))


def _number(text: str, item: str, field: _Field) -> int:
    if text in field.words:
        return field.least + field.words.index(text)
    if not (text.isascii() and text.isdigit() and len(text) <= 2) or not field.least <= int(text) <= field.most:
        raise _bad(item, field)
    return int(text)


def _bad(item: str, field: _Field) -> RuleError:
    words = f" or {field.words[0]} to {field.words[-1]}" if field.words else ""
    allowed = f"*, {field.least} to {field.most}{words}, a-b, /n and lists of these"
    return RuleError(f"invalid {field.name} {item!r}; allowed: {allowed}")


@lru_cache(maxsize=256)
def zone_of(name: str) -> tzinfo:
    """Return a time zone by its IANA name, UTC for an empty name; raise ``RuleError`` if this host has no such zone."""
    if name in {"", "UTC"}:
        return UTC
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, LookupError) as error:
        why = f"the time zone {name[:80]!r} is not known on this host"
        raise RuleError(f"{why}; expected an IANA name such as Europe/Berlin, or UTC") from error


# -- instants ----------------------------------------------------------------------------------------------------------


def next_time(schedule: RecurrenceRule, after_ms: int) -> int | None:
    """Return the first time of a rule after ``after_ms`` in epoch ms; None if there is none within ``YEARS_MAX`` years.

    Raise ``RuleError`` if this host cannot evaluate the rule. The caller applies the ``count`` limit.
    """
    after_ms = max(after_ms, schedule.start_ms - 1)
    if schedule.every_ms:
        begin_ms = schedule.start_ms or schedule.created_at_ms + schedule.every_ms
        steps = max(0, (after_ms - begin_ms) // schedule.every_ms + 1)
        found: int | None = begin_ms + steps * schedule.every_ms
    else:
        found = _next_of_cron(read_cron(schedule.cron), zone_of(schedule.zone), after_ms)
    if found is None or found > (schedule.end_ms or DELIVER_AT_MS_MAX):
        return None
    return found


def last_time(schedule: RecurrenceRule, first_ms: int, until_ms: int) -> int:
    """Return the last time of a rule up to ``until_ms``, or ``first_ms``, a time of the rule, if none is later."""
    if schedule.every_ms:
        until_ms = min(until_ms, schedule.end_ms or until_ms)
        return first_ms + max(0, until_ms - first_ms) // schedule.every_ms * schedule.every_ms
    span_ms = 60_000
    low: int | None = None
    while low is None:  # look back twice as far each time until a time is found
        from_ms = max(first_ms, until_ms - span_ms)
        low = first_ms if from_ms == first_ms else _until(schedule, from_ms, until_ms)
        span_ms *= 2
    high = max(low, until_ms) + 1
    while high - low > 1:  # there is a time in [low, high), and none from high on
        middle = (low + high) // 2
        found = _until(schedule, middle, until_ms)
        low, high = (low, middle) if found is None else (found, high)
    return low


def _until(schedule: RecurrenceRule, from_ms: int, until_ms: int) -> int | None:
    found = next_time(schedule, from_ms - 1)
    return found if found is not None and found <= until_ms else None


def due_ms(schedule: RecurrenceRule, name: str, at_ms: int) -> int:
    """Return the due time of the occurrence at ``at_ms``: up to the jitter later, and always the same.

    It is never later than the rule's next time, however long the jitter is, so occurrences keep their order.
    """
    jitter_ms = schedule.jitter_ms
    if not jitter_ms:
        return at_ms
    with suppress(RuleError):  # a time zone unknown on this host
        following = next_time(schedule, at_ms)
        jitter_ms = jitter_ms if following is None else min(jitter_ms, following - at_ms)
    digest = blake2b(f"{name}/{at_ms}".encode(), digest_size=8).digest()
    return at_ms + int.from_bytes(digest, "big") % (jitter_ms + 1)


class RuleTurn(NamedTuple):
    """Occurrences to send now, as times of the rule, and the time of the next one; ``None``: the schedule has ended."""

    times: tuple[int, ...]
    next_ms: int | None


def turn(schedule: RecurrenceRule, name: str, progress: ScheduleProgress, now_ms: int, at_most: int) -> RuleTurn:
    """Return the occurrences of a due schedule to send now, at most ``at_most``.

    Raise ``RuleError`` as ``next_time``.
    """
    first_ms = progress.next_ms
    left = schedule.count - progress.occurrences if schedule.count else at_most
    times = [first_ms]
    if schedule.catch_up is CatchUp.ALL:
        following = next_time(schedule, first_ms)
        while len(times) < min(at_most, left) and following is not None and due_ms(schedule, name, following) <= now_ms:
            times.append(following)
            following = next_time(schedule, following)
    else:
        times[0] = last_time(schedule, first_ms, now_ms)
        if due_ms(schedule, name, times[0]) > now_ms:  # the previous one is due no later than this time
            times[0] = last_time(schedule, first_ms, times[0] - 1)
        following = next_time(schedule, times[0])
        if schedule.catch_up is CatchUp.SKIP and now_ms - due_ms(schedule, name, times[0]) > MISSED_AFTER_MS:
            times = []
    is_over = bool(schedule.count) and progress.occurrences + len(times) >= schedule.count
    return RuleTurn(tuple(times), None if is_over else following)


# -- the calendar ------------------------------------------------------------------------------------------------------


def _next_of_cron(cron: Cron, zone: tzinfo, after_ms: int) -> int | None:
    after = datetime.fromtimestamp(after_ms // 1000, UTC)
    if after.year > 9998 - YEARS_MAX:  # beyond the range of ``datetime``
        return None
    local = after.astimezone(zone).replace(tzinfo=None, fold=0)
    best: int | None = None
    begin = local - _turned_back(after, zone) if cron.is_hourly else local
    for wanted in _wall_times(cron, begin.replace(second=0)):
        for instant in _instants(wanted, zone, is_hourly=cron.is_hourly):
            at_ms = round(instant.timestamp()) * 1000
            if at_ms > after_ms and (best is None or at_ms < best):
                best = at_ms
        if best is not None and wanted > local:
            break
    return best


def _turned_back(after: datetime, zone: tzinfo) -> timedelta:
    """Return how far the clock is set back within the next day: wall times of that span occur again."""
    now, then = after.astimezone(zone).utcoffset(), (after + _DAY).astimezone(zone).utcoffset()
    assert now is not None and then is not None
    return max(timedelta(0), now - then)


def _instants(wanted: datetime, zone: tzinfo, *, is_hourly: bool) -> Iterator[datetime]:
    """Yield the instants at which a clock of the zone shows ``wanted``: one, or as in the module docstring."""
    first = wanted.replace(tzinfo=zone).astimezone(UTC)
    if first.astimezone(zone).replace(tzinfo=None, fold=0) != wanted:  # left out
        if not is_hourly:
            yield _end_of_gap(wanted, zone)
        return
    yield first
    second = wanted.replace(tzinfo=zone, fold=1).astimezone(UTC)
    if is_hourly and second != first:
        yield second


def _end_of_gap(wanted: datetime, zone: tzinfo) -> datetime:
    """Return the instant at which the clock jumps over ``wanted``, to the second."""
    low = wanted.replace(tzinfo=zone, fold=1).astimezone(UTC)  # with the offset after the jump: an instant before it
    high = wanted.replace(tzinfo=zone).astimezone(UTC)  # with the offset before the jump: an instant after it
    while high - low > timedelta(seconds=1):
        middle = (low + (high - low) / 2).replace(microsecond=0)
        is_behind = middle.astimezone(zone).replace(tzinfo=None) > wanted
        low, high = (low, middle) if is_behind else (middle, high)
    return high


def _wall_times(cron: Cron, begin: datetime) -> Iterator[datetime]:
    """Yield the wall times of a cron expression from ``begin`` on, in order."""
    for days in range(366 * YEARS_MAX):
        day = begin.date() + timedelta(days)
        is_date, is_weekday = day.day in cron.days, day.isoweekday() % 7 in cron.weekdays
        is_day = is_date or is_weekday if cron.either_day else is_date and is_weekday
        if not is_day or day.month not in cron.months:
            continue
        for hour in cron.hours if days else (each for each in cron.hours if each >= begin.hour):
            for minute in cron.minutes:
                at = datetime.combine(day, time(hour, minute))
                if at >= begin:
                    yield at
