"""When a recurring message is due: rules, what is no rule, changes of clocks, and what it costs to ask."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from unittest.mock import patch
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import EFFORT

from dmq.broker.schedules import cron as cron_rules
from dmq.broker.schedules.cron import (
    ALIASES,
    JITTER_MS_MAX,
    MISSED_AFTER_MS,
    RuleError,
    due_ms,
    last_time,
    next_time,
    read_cron,
    turn,
    zone_of,
)
from dmq.store.schema.messages.recurring import CatchUp, Phase, RecurrenceRule, ScheduleProgress

BERLIN = "Europe/Berlin"
NOW = 1_790_000_000_000
ZONES = (
    "UTC",
    BERLIN,
    "America/New_York",
    "Australia/Lord_Howe",
    "Pacific/Apia",
    "Asia/Kathmandu",
    "Africa/Casablanca",
)


def at(text: str, zone: str = BERLIN) -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp() * 1000)


def times(cron: str, after_ms: int, number: int, zone: str = BERLIN) -> list[str]:
    """The next times of a rule, as its zone shows them."""
    schedule, found = RecurrenceRule(1, cron=cron, zone=zone), []
    for _ in range(number):
        following = next_time(schedule, after_ms)
        assert following is not None
        after_ms = following
        found.append(datetime.fromtimestamp(following / 1000, ZoneInfo(zone)).strftime("%m-%d %H:%M %z"))
    return found


@pytest.mark.parametrize(
    ("cron", "expected"),
    [
        ("30 2 * * *", ["03-29 03:00 +0200", "03-30 02:30 +0200"]),  # jumped over: when the clock has done so
        ("*/20 2 * * *", ["03-29 03:00 +0200", "03-30 02:00 +0200"]),  # once, however many are left out
        ("0 2-3 * * *", ["03-29 03:00 +0200", "03-30 02:00 +0200"]),
        ("30 * * * *", ["03-29 00:30 +0100", "03-29 01:30 +0100", "03-29 03:30 +0200"]),
        ("30 */2 * * *", ["03-29 00:30 +0100", "03-29 04:30 +0200"]),
    ],
)
def test_a_time_that_does_not_exist(cron: str, expected: list[str]) -> None:
    """What means a time of the day happens when the clock has jumped; what goes by hours follows those there are."""
    assert times(cron, at("2026-03-29 00:00"), len(expected)) == expected


@pytest.mark.parametrize(
    ("cron", "expected"),
    [
        ("30 2 * * *", ["10-25 02:30 +0200", "10-26 02:30 +0100"]),
        ("0,30 2 * * *", ["10-25 02:00 +0200", "10-25 02:30 +0200", "10-26 02:00 +0100"]),
        (
            "30 * * * *",
            ["10-25 00:30 +0200", "10-25 01:30 +0200", "10-25 02:30 +0200", "10-25 02:30 +0100", "10-25 03:30 +0100"],
        ),
    ],
)
def test_a_time_that_happens_twice(cron: str, expected: list[str]) -> None:
    """What means a time of the day happens the first time only; what goes by hours happens in each of them."""
    assert times(cron, at("2026-10-25 00:00"), len(expected)) == expected


@pytest.mark.parametrize(
    ("cron", "expected"),
    [
        ("0 0 * * 0", ["11-01 00:00 +0000", "11-08 00:00 +0000"]),
        ("0 0 * * 7", ["11-01 00:00 +0000"]),
        ("0 0 * * sat-sun", None),
        ("0 0 * * 6-7", ["10-31 00:00 +0000", "11-01 00:00 +0000"]),
        ("0 0 13 * fri", ["10-30 00:00 +0000", "11-06 00:00 +0000", "11-13 00:00 +0000", "11-20 00:00 +0000"]),
        ("0 0 1 jan *", ["01-01 00:00 +0000"]),
        ("@monthly", ["11-01 00:00 +0000"]),
        ("5,10-20/5 0 29 2 *", ["02-29 00:05 +0000", "02-29 00:10 +0000"]),
    ],
)
def test_a_rule_is_read_as_cron_reads_it(cron: str, expected: list[str] | None) -> None:
    """Weekdays are counted from Sunday, and either of two restricted days is enough."""
    if expected is None:
        with pytest.raises(RuleError, match="invalid day of the week 'sat-sun'"):
            read_cron(cron)
    else:
        assert times(cron, at("2026-10-27 00:00", "UTC"), len(expected), "UTC") == expected


@pytest.mark.parametrize(
    ("cron", "text"),
    [
        ("", "has 0 fields"),
        ("* * * *", "has 4 fields; expected are five fields"),
        ("* * * * * *", "has 6 fields"),
        ("60 * * * *", "invalid minute '60'; allowed: *, 0 to 59"),
        ("* 24 * * *", "invalid hour '24'"),
        ("* * 0 * *", "invalid day of the month '0'; allowed: *, 1 to 31"),
        ("* * * 13 *", "invalid month '13'; allowed: *, 1 to 12 or jan to dec"),
        ("* * * * mo", "invalid day of the week 'mo'; allowed: *, 0 to 7 or sun to sat"),
        ("*/0 * * * *", "invalid minute"),
        ("9-1 * * * *", "invalid minute"),
        ("*-3 * * * *", "invalid minute"),
        ("1,,2 * * * *", "invalid minute ''"),
        ("\u0661 * * * *", "invalid minute"),
        ("1/99999999999999999999 * * * *", "invalid minute"),
        ("@reboot", "unknown alias '@reboot'; allowed: @yearly"),
        ("*" * 257, "at most 256 characters, this one 257"),
    ],
)
def test_an_invalid_rule_is_answered_with_the_valid_form(cron: str, text: str) -> None:
    """Which field, what was given, what is allowed."""
    with pytest.raises(RuleError) as caught:
        read_cron(cron)
    assert text in str(caught.value)


@pytest.mark.parametrize("zone", ["Nowhere/X", "../../etc/passwd", "/etc/passwd", "\0", "x" * 5_000, "Europe"])
def test_an_unknown_zone_is_reported(zone: str) -> None:
    """And no file is read but those of the database."""
    with pytest.raises(RuleError, match="is not known on this host"):
        zone_of(zone)


@pytest.mark.parametrize("cron", ["0 0 30 2 *", "0 0 31 4,6,9,11 *", "* * 31 2 *"])
@pytest.mark.parametrize("zone", ["", BERLIN])
def test_a_rule_that_never_occurs_costs_little(cron: str, zone: str) -> None:
    """The search looks at each day of a few years once, and at no minute."""
    with patch.object(cron_rules, "YEARS_MAX", 0):
        assert next_time(RecurrenceRule(1, cron="* * * * *", zone=zone), NOW) is None
    with patch.object(cron_rules, "time", None):  # makes a time of the day
        assert next_time(RecurrenceRule(1, cron=cron, zone=zone), NOW) is None


def test_the_rarest_date_is_found() -> None:
    """29 February, over a year that is none of its own."""
    assert times("0 0 29 2 *", at("2096-03-01 00:00", "UTC"), 1, "UTC") == ["02-29 00:00 +0000"]
    assert next_time(RecurrenceRule(1, cron="* * * * *"), 253_402_300_000_000) is None
    assert next_time(RecurrenceRule(1, 1_000), 253_402_300_799_999) is None


CRONS = st.builds(
    "{} {} {} {} {}".format,
    st.sampled_from(["*", "*/7", "0", "30", "0,59", "15-20"]),
    st.sampled_from(["*", "*/2", "2", "1-3", "0,23"]),
    st.sampled_from(["*", "1", "29-31", "*/10"]),
    st.sampled_from(["*", "3", "10,11", "2"]),
    st.sampled_from(["*", "0", "mon-fri", "6,7"]),
)
INSTANTS = st.one_of(
    st.integers(0, 4_000_000_000_000),
    st.sampled_from([at("2026-03-29 00:00"), at("2026-10-25 00:00"), at("2011-12-29 20:00", "Pacific/Apia")]).flatmap(
        lambda near: st.integers(near - 86_400_000, near + 86_400_000)
    ),
)


@settings(max_examples=150 * EFFORT)
@given(cron=st.one_of(CRONS, st.sampled_from(sorted(ALIASES))), zone=st.sampled_from(ZONES), after_ms=INSTANTS)
def test_times_increase_and_are_those_of_the_rule(cron: str, zone: str, after_ms: int) -> None:
    """Strictly, none is left out by asking from elsewhere, and the clock shows what the rule says, or has jumped."""
    schedule, read = RecurrenceRule(1, cron=cron, zone=zone), read_cron(cron)
    first = next_time(schedule, after_ms)
    if first is None:
        return
    assert first > after_ms
    second = next_time(schedule, first)
    assert second is None or second > first
    assert next_time(schedule, (after_ms + first) // 2 if first - after_ms > 1 else after_ms) == first
    shown = datetime.fromtimestamp(first / 1000, UTC).astimezone(ZoneInfo(zone))
    before = (shown.astimezone(UTC) - timedelta(seconds=1)).astimezone(ZoneInfo(zone))
    jumped = before.utcoffset() != shown.utcoffset()
    assert jumped or (shown.minute in read.minutes and shown.hour in read.hours and shown.month in read.months)
    assert shown.second == 0


@settings(max_examples=100 * EFFORT)
@given(
    every_ms=st.one_of(st.none(), st.integers(1_000, 10**9)),
    cron=CRONS,
    zone=st.sampled_from(ZONES),
    span_ms=st.integers(0, 3 * 86_400_000),
    after_ms=INSTANTS,
)
def test_the_last_time_is_found_without_walking(
    every_ms: int | None, cron: str, zone: str, span_ms: int, after_ms: int
) -> None:
    """It is the one that walking finds."""
    schedule = (
        RecurrenceRule(1, every_ms, created_at_ms=after_ms) if every_ms else RecurrenceRule(1, cron=cron, zone=zone)
    )
    first = next_time(schedule, after_ms)
    if first is None:
        return
    until_ms, last = first + span_ms, first
    for _ in range(300):
        following = next_time(schedule, last)
        if following is None or following > until_ms:
            assert last_time(schedule, first, until_ms) == last
            return
        last = following
    assert last_time(schedule, first, until_ms) > last


@settings(max_examples=200 * EFFORT)
@given(
    every_ms=st.integers(1_000, 100_000),
    jitter_ms=st.integers(0, 100_000),
    late_ms=st.integers(0, 1_000_000),
    at_most=st.integers(1, 70),
    count=st.integers(0, 10),
    catch_up=st.sampled_from(CatchUp),
)
def test_a_turn_sends_the_occurrences_of_its_policy(
    every_ms: int, jitter_ms: int, late_ms: int, at_most: int, count: int, catch_up: CatchUp
) -> None:
    """In order, nothing early, no more than is allowed; what follows lies behind it."""
    jitter_ms = min(jitter_ms, every_ms)
    schedule = RecurrenceRule(1, every_ms, count=count, jitter_ms=jitter_ms, catch_up=catch_up, created_at_ms=NOW)
    first = NOW + every_ms
    now_ms = due_ms(schedule, "s", first) + late_ms
    found = turn(schedule, "s", ScheduleProgress(Phase.WAITING, 0, 0, first), now_ms, at_most)
    assert list(found.times) == sorted(set(found.times))
    assert all(each <= due_ms(schedule, "s", each) <= min(now_ms, each + jitter_ms) for each in found.times)
    assert len(found.times) <= (1 if catch_up is not CatchUp.ALL else min(at_most, count or at_most))
    assert (found.next_ms is None) == (len(found.times) == count > 0)
    if catch_up is CatchUp.ALL:
        assert found.times[0] == first
    elif found.times:
        late = now_ms - due_ms(schedule, "s", found.times[0])
        assert catch_up is CatchUp.ONE or late <= MISSED_AFTER_MS
    else:
        assert catch_up is CatchUp.SKIP
        assert late_ms > MISSED_AFTER_MS
    if found.next_ms is not None:
        assert found.next_ms > max((first - 1, *found.times))


def test_jitter_is_spread() -> None:
    """Over all of it, by the name: schedules of one time do not come together."""
    schedule = RecurrenceRule(1, cron="@daily", jitter_ms=JITTER_MS_MAX)
    at_ms = next_time(schedule, NOW) or 0
    found = {due_ms(schedule, f"s-{number}", at_ms) - at_ms for number in range(100)}
    assert len(found) == 100
    assert max(found) - min(found) > JITTER_MS_MAX // 2


@pytest.mark.parametrize("catch_up", list(CatchUp))
@pytest.mark.parametrize("cron", ["* * * * *", "*/7 9-10 * * *"])
def test_a_jitter_longer_than_the_spacing_skips_nothing(cron: str, catch_up: CatchUp) -> None:
    """A daemon that is never down sends every occurrence, once, when it is due, and not after the rule's next time."""
    schedule = RecurrenceRule(1, cron=cron, jitter_ms=3_600_000, catch_up=catch_up, created_at_ms=NOW)
    progress = ScheduleProgress(Phase.WAITING, 0, 0, next_time(schedule, NOW) or 0)
    now_ms, until_ms = NOW, NOW + 86_400_000
    sent: list[int] = []
    while progress.next_ms < until_ms:
        assert due_ms(schedule, "s", progress.next_ms) >= now_ms
        now_ms = due_ms(schedule, "s", progress.next_ms)
        found = turn(schedule, "s", progress, now_ms, 64)
        sent += found.times
        assert found.times == (progress.next_ms,)
        progress = progress._replace(next_ms=found.next_ms or 0, occurrences=progress.occurrences + 1)
        assert now_ms <= progress.next_ms
    assert list(_times(schedule, until_ms)) == sent


@pytest.mark.parametrize("late_ms", [0, 90_000, 3_599_000])
def test_catching_up_once_sends_one_message_with_any_jitter(late_ms: int) -> None:
    """After a downtime the last occurrence that is due by now is sent, and what follows is not due yet."""
    schedule = RecurrenceRule(1, cron="* * * * *", jitter_ms=600_000, catch_up=CatchUp.ONE, created_at_ms=NOW)
    first = next_time(schedule, NOW) or 0
    now_ms = due_ms(schedule, "s", first) + late_ms
    found = turn(schedule, "s", ScheduleProgress(Phase.WAITING, 0, 0, first), now_ms, 64)
    assert len(found.times) == 1
    assert due_ms(schedule, "s", found.times[0]) <= now_ms < due_ms(schedule, "s", found.next_ms or 0)


def _times(schedule: RecurrenceRule, until_ms: int) -> Iterator[int]:
    found = next_time(schedule, NOW)
    while found is not None and found < until_ms:
        yield found
        found = next_time(schedule, found)
