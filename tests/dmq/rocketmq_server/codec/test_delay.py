"""When a message is due: RocketMQ's precedence and clamping, and no input that gets an exception of another kind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.limits import DELIVER_AT_MS_MAX
from broker_adapter.wire.mapping import NOT_AFTER_MS, not_after_of
from dmq.rocketmq_server.codec.delay import (
    DELAY_LEVELS_MS_DEFAULT,
    DELAY_PROPERTIES,
    check_not_after,
    deliver_at_ms,
    timestamp_ms,
)

NOW = 1_700_000_000_000
HOUR = 3_600_000


def due(
    properties: dict[str, str], timestamp: int | None = None, levels_ms: tuple[int, ...] = DELAY_LEVELS_MS_DEFAULT
) -> int | None:
    return deliver_at_ms(timestamp, properties, now_ms=NOW, levels_ms=levels_ms, delay_max_ms=None)


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({}, None),
        ({"mine": "17"}, None),
        ({"DELAY": "1"}, NOW + 1000),
        ({"DELAY": "3"}, NOW + 10_000),
        ({"DELAY": "18"}, NOW + 2 * HOUR),
        ({"DELAY": "19"}, NOW + 2 * HOUR),
        ({"DELAY": "99999999999999999999"}, NOW + 2 * HOUR),
        ({"DELAY": "0"}, None),
        ({"DELAY": "-3"}, None),
        ({"DELAY": "+2"}, NOW + 5000),
        ({"TIMER_DELAY_SEC": "7"}, NOW + 7000),
        ({"TIMER_DELAY_MS": "7"}, NOW + 7),
        ({"TIMER_DELAY_MS": "-7"}, NOW),
        ({"TIMER_DELAY_SEC": "-99999999999999999999"}, NOW),
        ({"TIMER_DELIVER_MS": str(NOW + 7)}, NOW + 7),
        ({"TIMER_DELIVER_MS": "0"}, 0),
        ({"DELAY": "1", "TIMER_DELAY_SEC": "60", "TIMER_DELAY_MS": "5", "TIMER_DELIVER_MS": "5"}, NOW + 1000),
        ({"DELAY": "0", "TIMER_DELAY_SEC": "60", "TIMER_DELAY_MS": "5", "TIMER_DELIVER_MS": "5"}, NOW + 60_000),
        ({"TIMER_DELAY_MS": "5", "TIMER_DELIVER_MS": str(NOW)}, NOW + 5),
    ],
)
def test_properties_decide_in_rocketmqs_order(properties: dict[str, str], expected: int | None) -> None:
    """Level > seconds > milliseconds > absolute time; a level is clamped to the table and below 1 is none."""
    assert due(properties) == expected


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({}, NOW + 5),
        ({"DELAY": "2"}, NOW + 5000),
        ({"TIMER_DELAY_SEC": "1"}, NOW + 1000),
        ({"TIMER_DELAY_MS": "1"}, NOW + 1),
        ({"TIMER_DELIVER_MS": str(NOW + 9)}, NOW + 5),
    ],
)
def test_the_protocols_timestamp_ranks_as_the_absolute_property(properties: dict[str, str], expected: int) -> None:
    """RocketMQ's proxy writes the timestamp into TIMER_DELIVER_MS, so relative delays beat it and it beats that one."""
    assert due(properties, NOW + 5) == expected


def test_the_level_table_is_configurable() -> None:
    """A shorter table moves the clamp with it."""
    assert due({"DELAY": "3"}, levels_ms=(10, 20)) == NOW + 20


@pytest.mark.parametrize("name", DELAY_PROPERTIES)
@pytest.mark.parametrize("value", ["", " ", "abc", "1.5", "0x10", "1 ", "1_0", "\u0661", "9" * 21, "9" * 5000, "--1"])
def test_a_fraction_is_refused_by_name_and_value(name: str, value: str) -> None:
    """Also when another property would win: a typing error is never silent."""
    with pytest.raises(Refused, match=name) as caught:
        due({"TIMER_DELAY_SEC": "1", name: value}, NOW)
    assert caught.value.rule is Rule.DELIVERY_TIME
    assert caught.value.value == value


@pytest.mark.parametrize(
    "properties",
    [
        {"TIMER_DELIVER_MS": str(DELIVER_AT_MS_MAX + 1)},
        {"TIMER_DELIVER_MS": "-1"},
        {"TIMER_DELAY_MS": str(DELIVER_AT_MS_MAX)},
        {"TIMER_DELAY_SEC": "99999999999999999999"},
    ],
)
def test_times_outside_1970_to_9999_are_refused(properties: dict[str, str]) -> None:
    """Every way to ask for them ends in the same rule."""
    with pytest.raises(Refused) as caught:
        due(properties)
    assert caught.value.rule is Rule.DELIVERY_TIME


def test_the_last_instant_is_fine() -> None:
    """9999-12-31T23:59:59.999Z can be asked for in every absolute way."""
    assert due({"TIMER_DELIVER_MS": str(DELIVER_AT_MS_MAX)}) == DELIVER_AT_MS_MAX
    assert timestamp_ms(DELIVER_AT_MS_MAX // 1000, 999_000_000) == DELIVER_AT_MS_MAX


def test_a_configured_maximum_is_the_limit_named() -> None:
    """Exactly the maximum passes, one millisecond more does not, and the refusal names both."""
    properties = {"TIMER_DELAY_MS": "1000"}
    assert deliver_at_ms(None, properties, now_ms=NOW, levels_ms=(1,), delay_max_ms=1000) == NOW + 1000
    with pytest.raises(Refused, match=r"TIMER_DELAY_MS lies 1000 ms ahead, got '1000', limit 999 ms"):
        deliver_at_ms(None, properties, now_ms=NOW, levels_ms=(1,), delay_max_ms=999)


def test_fractions_of_a_millisecond_round_up() -> None:
    """Rounding down would deliver early."""
    assert timestamp_ms(5, 0) == 5000
    assert timestamp_ms(5, 1) == 5001
    assert timestamp_ms(5, 1_000_000) == 5001
    assert timestamp_ms(5, 999_999_999) == 6000


def test_milliseconds_given_for_seconds_are_explained() -> None:
    """The year 57000 is what the Python client makes of them; the text says what was probably meant."""
    with pytest.raises(Refused, match=r"milliseconds given for seconds.*2023-11-14T22:13:20Z"):
        timestamp_ms(NOW, 0)


def unless_refused(decide: Callable[[], int | None]) -> int | None:
    """Return the decision; a refusal must be by the one rule, and any other exception is a failure."""
    try:
        return decide()
    except Refused as error:
        if error.rule is not Rule.DELIVERY_TIME or not str(error):
            raise
        return None


@given(
    seconds=st.integers(-(2**63), 2**63 - 1),
    nanos=st.integers(-(2**31), 2**31 - 1),
    now_ms=st.integers(0, DELIVER_AT_MS_MAX),
    delay_max_ms=st.none() | st.integers(0, 2**63),
)
def test_no_timestamp_does_worse_than_being_refused(
    seconds: int, nanos: int, now_ms: int, delay_max_ms: int | None
) -> None:
    """Any two integers the wire can carry give a time in range that is not early, or a refusal."""

    def decide() -> int | None:
        given_ms = timestamp_ms(seconds, nanos)
        return deliver_at_ms(given_ms, {}, now_ms=now_ms, levels_ms=(1,), delay_max_ms=delay_max_ms)

    at_ms = unless_refused(decide)
    if at_ms is not None:
        assert 0 <= at_ms <= DELIVER_AT_MS_MAX
        assert 0 <= at_ms * 1_000_000 - (seconds * 1_000_000_000 + nanos) < 1_000_000


@given(st.dictionaries(st.sampled_from(DELAY_PROPERTIES), st.text(max_size=30) | st.integers().map(str)))
def test_no_property_does_worse_than_being_refused(properties: dict[str, str]) -> None:
    """Whatever text the properties hold."""
    at_ms = unless_refused(lambda: due(properties))
    assert at_ms is None or 0 <= at_ms <= DELIVER_AT_MS_MAX


@pytest.mark.parametrize("text", ["", "soon", "-5", "+5", "1.5", "\u0661", "9" * 16, "0"])
def test_an_invalid_time_is_refused_and_never_skipped(text: str) -> None:
    """What a send would take for no time at all would be delivered late."""
    with pytest.raises(Refused, match=NOT_AFTER_MS) as caught:
        check_not_after({NOT_AFTER_MS: text}, None, NOW)
    assert caught.value.rule is Rule.DELIVERY_TIME
    assert not not_after_of({NOT_AFTER_MS: text})


def test_a_time_too_late_for_any_delivery_is_refused() -> None:
    """It has passed, or it is not after the delivery time; a millisecond later it is taken."""
    for due_ms, earliest_ms in ((None, NOW + 1), (NOW - 5, NOW + 1), (NOW + HOUR, NOW + HOUR + 1)):
        check_not_after({NOT_AFTER_MS: str(earliest_ms)}, due_ms, NOW)
        with pytest.raises(Refused, match="no consumer would get the message"):
            check_not_after({NOT_AFTER_MS: str(earliest_ms - 1)}, due_ms, NOW)
    check_not_after({}, NOW, NOW)
