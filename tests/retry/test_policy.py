"""Retry policies attempt by attempt: RocketMQ's tables, where attempts end, and what is no policy."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

import pytest

from broker_adapter.contracts.limits import DELAY_LEVELS_MS, RETRY_STEPS_MS
from dmq.config.units import DELAY_LEVELS_DEFAULT, parse_delay_levels
from dmq.rocketmq_server.codec.delay import DELAY_LEVELS_MS_DEFAULT
from retry.policy import (
    SPOOL_STEPS_MS,
    DeadLetter,
    Exponential,
    Fixed,
    PolicyError,
    Reason,
    RetryAt,
    RetryPolicy,
    Table,
    decide,
    delay_ms,
    delays_ms,
    from_plain,
    to_plain,
)

NOW = 1_700_000_000_000
SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000

# Spelled out, not computed: a table that is computed the same way as the tested one proves nothing.
LEVELS = (
    *(1_000, 5_000, 10_000, 30_000, 60_000, 120_000, 180_000, 240_000, 300_000),
    *(360_000, 420_000, 480_000, 540_000, 600_000, 1_200_000, 1_800_000, 3_600_000, 7_200_000),
)
STEPS = (
    *(10_000, 30_000, 60_000, 120_000, 180_000, 240_000, 300_000, 360_000),
    *(420_000, 480_000, 540_000, 600_000, 1_200_000, 1_800_000, 3_600_000, 7_200_000),
)


class _Highest(Random):
    """Draws the largest number that a random source can."""

    def random(self) -> float:
        return 1 - 2**-53


def test_the_tables_are_rocketmqs() -> None:
    """18 delay levels, and the 16 delays of a consumer's retries, which begin at level 3."""
    assert (len(LEVELS), len(STEPS)) == (18, 16)
    assert DELAY_LEVELS_MS == LEVELS
    assert RETRY_STEPS_MS == STEPS
    assert SPOOL_STEPS_MS == (3_000, 5_000, 30_000, 60_000, 120_000, 300_000, 480_000, 600_000, 900_000, 1_800_000)


def test_everybody_has_the_same_levels() -> None:
    """What the sidecar uses, and what stands in the configuration as text, is the one table."""
    assert parse_delay_levels(DELAY_LEVELS_DEFAULT) == DELAY_LEVELS_MS
    assert DELAY_LEVELS_MS_DEFAULT == DELAY_LEVELS_MS


def test_the_default_policy_walks_all_intervals_and_then_ends() -> None:
    """17 attempts with the 16 delays between them; the failure of attempt 17 is a dead letter."""
    at_ms = NOW
    for attempt, step_ms in enumerate(STEPS, start=1):
        assert decide(RetryPolicy(), attempt, at_ms, Random(1), since_ms=NOW) == RetryAt(at_ms + step_ms)
        at_ms += step_ms
    assert at_ms - NOW == sum(STEPS)
    for attempt in (17, 18, 65_535):
        assert decide(RetryPolicy(), attempt, at_ms, Random(1), since_ms=NOW) == DeadLetter(Reason.EXHAUSTED)


def test_a_policy_of_one_attempt_has_no_retry() -> None:
    """The first delivery is attempt 1."""
    assert decide(RetryPolicy(max_attempts=1), 1, NOW, Random(1)) == DeadLetter(Reason.EXHAUSTED)
    assert decide(RetryPolicy(max_attempts=2), 1, NOW, Random(1)) == RetryAt(NOW + 10 * SECOND)


def test_the_last_step_of_a_table_stays() -> None:
    """A table may be shorter than the attempts."""
    policy = RetryPolicy(backoff=Table((5, 7)), max_attempts=100)
    assert [delay_ms(policy, attempt) for attempt in (1, 2, 3, 99)] == [5, 7, 7, 7]


def test_a_fixed_delay_is_the_same_after_each_attempt() -> None:
    """Zero is allowed: at once."""
    assert [delay_ms(RetryPolicy(backoff=Fixed(30)), attempt) for attempt in (1, 2, 99)] == [30, 30, 30]
    assert decide(RetryPolicy(backoff=Fixed(0)), 1, NOW, Random(1)) == RetryAt(NOW)


def test_exponential_delays_grow_to_their_maximum() -> None:
    """The powers of the multiplier, rounded to milliseconds; far attempts do not overflow."""
    doubled = RetryPolicy(backoff=Exponential(5 * SECOND, 2 * HOUR))
    assert [delay_ms(doubled, attempt) for attempt in range(1, 13)] == [
        *(5_000, 10_000, 20_000, 40_000, 80_000, 160_000, 320_000, 640_000),
        *(1_280_000, 2_560_000, 5_120_000, 7_200_000),
    ]
    assert delay_ms(doubled, 65_535) == 2 * HOUR
    assert [delay_ms(RetryPolicy(backoff=Exponential(10, 1000, 1.25)), n) for n in (1, 2, 3, 4)] == [10, 12, 16, 20]
    assert delay_ms(RetryPolicy(backoff=Exponential(10, 1000, 1)), 65_535) == 10
    assert delay_ms(RetryPolicy(backoff=Exponential(10, 10, 100)), 65_535) == 10


def test_attempts_are_counted_from_one() -> None:
    """A caller who counts from zero is told, where it would have got the longest delay of the table."""
    with pytest.raises(AssertionError, match="from 1"):
        decide(RetryPolicy(), 0, NOW, Random(1))


def test_jitter_adds_at_most_its_share() -> None:
    """From nothing to just below a fifth, rounded down; none at all unless it is asked for."""
    policy = RetryPolicy(backoff=Fixed(1003), jitter=0.2)
    drawn = [decide(policy, 1, NOW, Random(seed)) for seed in range(200)]
    waits_ms = [outcome.at_ms - NOW for outcome in drawn if isinstance(outcome, RetryAt)]
    assert len(waits_ms) == 200
    assert 1003 <= min(waits_ms) < 1020
    assert 1180 < max(waits_ms) <= 1003 + 200
    assert decide(policy, 1, NOW, _Highest()) == RetryAt(NOW + 1203)
    assert decide(RetryPolicy(backoff=Fixed(1003)), 1, NOW, _Highest()) == RetryAt(NOW + 1003)


def test_a_message_can_be_too_old_for_its_next_attempt() -> None:
    """Exactly at its maximum age it is not; without a known first delivery none is; exhausted beats too old."""
    policy = RetryPolicy(backoff=Fixed(HOUR), max_attempts=3, max_age_ms=DAY)
    for since_ms, expected in (
        (NOW + HOUR - DAY, RetryAt(NOW + HOUR)),
        (NOW + HOUR - DAY - 1, DeadLetter(Reason.TOO_OLD)),
        (None, RetryAt(NOW + HOUR)),
    ):
        assert decide(policy, 2, NOW, Random(1), since_ms=since_ms) == expected
    assert decide(policy, 3, NOW, Random(1), since_ms=NOW - 9 * DAY) == DeadLetter(Reason.EXHAUSTED)
    assert decide(RetryPolicy(), 2, NOW, Random(1), since_ms=0) == RetryAt(NOW + 30 * SECOND)


def test_jitter_counts_for_the_age() -> None:
    """The attempt would come that late, whatever made it so."""
    policy = RetryPolicy(backoff=Fixed(1000), jitter=1.0, max_age_ms=1500)
    assert decide(policy, 1, NOW, _Highest(), since_ms=NOW) == DeadLetter(Reason.TOO_OLD)


def test_outcomes_are_distinguished() -> None:
    """An outcome is never equal to one of another kind, as tuples of the same number would be."""
    retry: object = RetryAt(1)
    assert retry != DeadLetter(Reason.EXHAUSTED)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (RetryPolicy(), STEPS),
        (RetryPolicy(max_attempts=3), (10_000, 30_000)),
        (RetryPolicy(max_attempts=1), (10_000,)),
        (RetryPolicy(backoff=Exponential(1000, 4000), max_attempts=5), (1000, 2000, 4000, 4000)),
        (RetryPolicy(backoff=Fixed(7), max_attempts=1000), (7,) * 256),
    ],
)
def test_delays_for_clients(policy: RetryPolicy, expected: tuple[int, ...]) -> None:
    """One per retry; a client that indexes the table finds an entry in it, and never more than 256."""
    assert delays_ms(policy) == expected


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Table(()), "1 to 256 steps, not 0"),
        (lambda: Table((1,) * 257), "1 to 256 steps, not 257"),
        (lambda: Table((1, -1)), r"step 2 of the table is -1, allowed is 0 to 31622400000 ms"),
        (lambda: Table((366 * DAY + 1,)), "step 1 of the table is 31622400001, allowed"),
        (lambda: Fixed(-1), "delay is -1"),
        (lambda: Fixed(366 * DAY + 1), "delay is 31622400001"),
        (lambda: Exponential(0, 10), "initial is 0, allowed is 1 to"),
        (lambda: Exponential(10, 9), "max is 9, allowed is 10 to"),
        (lambda: Exponential(1, 366 * DAY + 1), "max is 31622400001"),
        (lambda: Exponential(1, 9, 0.99), "multiplier is 0.99, allowed is 1 to 100$"),
        (lambda: Exponential(1, 9, 101), "multiplier is 101"),
        (lambda: Exponential(1, 9, float("nan")), "multiplier is nan"),
        (lambda: RetryPolicy(max_attempts=0), "max_attempts is 0, allowed is 1 to 1000$"),
        (lambda: RetryPolicy(max_attempts=1001), "max_attempts is 1001"),
        (lambda: RetryPolicy(jitter=-0.1), "jitter is -0.1, allowed is 0 to 1$"),
        (lambda: RetryPolicy(jitter=1.01), "jitter is 1.01"),
        (lambda: RetryPolicy(jitter=float("nan")), "jitter is nan"),
        (lambda: RetryPolicy(max_age_ms=0), "max_age is 0, allowed is 1 to 316224000000 ms"),
        (lambda: RetryPolicy(max_age_ms=3660 * DAY + 1), "max_age is 316224000001"),
    ],
)
def test_bounds(make: Callable[[], object], why: str) -> None:
    """Just outside is refused, with the field, the exact value and the bound."""
    with pytest.raises(PolicyError, match=why):
        make()


def test_values_just_inside_the_bounds_are_a_policy() -> None:
    """The largest and the smallest of everything."""
    RetryPolicy(backoff=Table((366 * DAY,) * 256), max_attempts=1000, jitter=1.0, max_age_ms=3660 * DAY)
    RetryPolicy(backoff=Table((0,)), max_attempts=1, jitter=0.0, max_age_ms=1)
    RetryPolicy(backoff=Exponential(1, 366 * DAY, 100))
    RetryPolicy(backoff=Exponential(366 * DAY, 366 * DAY, 1))
    RetryPolicy(backoff=Fixed(366 * DAY))


@pytest.mark.parametrize(
    ("policy", "plain"),
    [
        (RetryPolicy(), {"max_attempts": 17, "jitter": 0.0, "table_ms": list(STEPS)}),
        (RetryPolicy(backoff=Fixed(5), max_attempts=2), {"max_attempts": 2, "jitter": 0.0, "fixed_ms": 5}),
        (
            RetryPolicy(backoff=Exponential(1, 9, 1.5), jitter=0.25, max_age_ms=8),
            {
                "max_attempts": 17,
                "jitter": 0.25,
                "exponential": {"initial_ms": 1, "max_ms": 9, "multiplier": 1.5},
                "max_age_ms": 8,
            },
        ),
    ],
)
def test_the_stored_form(policy: RetryPolicy, plain: dict[str, object]) -> None:
    """Its names are a promise to stores written before, and it is JSON."""
    assert to_plain(policy) == plain
    assert from_plain(json.loads(json.dumps(plain))) == policy


def test_an_omitted_field_has_its_default() -> None:
    """Of the policy and of an exponential backoff; an absent maximum age may be written as null."""
    assert from_plain({}) == RetryPolicy()
    assert from_plain({"max_age_ms": None}) == RetryPolicy()
    assert from_plain({"exponential": {"initial_ms": 1, "max_ms": 4}}).backoff == Exponential(1, 4, 2.0)
    assert from_plain({"jitter": 1, "table_ms": (1, 2)}) == RetryPolicy(backoff=Table((1, 2)), jitter=1.0)


@pytest.mark.parametrize(
    ("plain", "why"),
    [
        ({"max_attempt": 3}, "a policy has no field 'max_attempt'"),
        ({1: 2, "x": 3}, "a policy has no field 1"),
        ([], "a policy is .., an object is expected"),
        ("table_ms", "a policy is 'table_ms', an object is expected"),
        (None, "a policy is None, an object is expected"),
        ({"max_attempts": "17"}, "max_attempts is '17', a whole number is expected"),
        ({"max_attempts": 17.0}, "max_attempts is 17.0, a whole number is expected"),
        ({"max_attempts": True}, "max_attempts is True, a whole number is expected"),
        ({"max_attempts": None}, "max_attempts is None, a whole number is expected"),
        ({"max_attempts": -1}, "max_attempts is -1, allowed"),
        ({"max_attempts": 10**400}, "max_attempts is 10{59}, allowed"),
        ({"max_attempts": "x" * 10_000}, "max_attempts is 'x{59}, a whole"),
        ({"jitter": "0.2"}, "jitter is '0.2', a number is expected"),
        ({"jitter": False}, "jitter is False, a number is expected"),
        ({"jitter": None}, "jitter is None, a number is expected"),
        ({"jitter": float("nan")}, "jitter is nan, allowed"),
        ({"jitter": float("inf")}, "jitter is inf, allowed"),
        ({"jitter": 10**400}, "jitter is 10{59}, allowed"),
        ({"max_age_ms": "3d"}, "max_age_ms is '3d', a whole number is expected"),
        ({"max_age_ms": False}, "max_age_ms is False, a whole number is expected"),
        ({"max_age_ms": 0}, "max_age is 0, allowed"),
        ({"table_ms": "1s 5s"}, "table_ms is '1s 5s', a list is expected"),
        ({"table_ms": 5}, "table_ms is 5, a list is expected"),
        ({"table_ms": None}, "table_ms is None, a list is expected"),
        ({"table_ms": {"1": 2}}, "table_ms is {'1': 2}, a list is expected"),
        ({"table_ms": [1, "2"]}, "step 2 of table_ms is '2', a whole number is expected"),
        ({"table_ms": [True]}, "step 1 of table_ms is True, a whole number is expected"),
        ({"table_ms": [1.5]}, "step 1 of table_ms is 1.5, a whole number is expected"),
        ({"table_ms": [1, -2]}, "step 2 of the table is -2, allowed"),
        ({"table_ms": []}, "1 to 256 steps, not 0"),
        ({"table_ms": [1] * 257}, "1 to 256 steps, not 257"),
        ({"fixed_ms": "5"}, "fixed_ms is '5', a whole number is expected"),
        ({"fixed_ms": True}, "fixed_ms is True, a whole number is expected"),
        ({"fixed_ms": -5}, "delay is -5, allowed"),
        ({"exponential": [1, 2]}, r"exponential is \[1, 2\], an object is expected"),
        ({"exponential": {"initial_ms": 1}}, "max_ms of exponential is None, a whole number is expected"),
        ({"exponential": {"max_ms": 1}}, "initial_ms of exponential is None, a whole number is expected"),
        ({"exponential": {"initial_ms": 1, "max_ms": 2, "multiplyer": 3}}, "exponential has no field 'multiplyer'"),
        ({"exponential": {"initial_ms": 1, "max_ms": 2, "multiplier": "2"}}, "multiplier of exponential is '2'"),
        ({"exponential": {"initial_ms": 1, "max_ms": 2, "multiplier": 10**400}}, "multiplier is 10{59}, allowed"),
        ({"exponential": {"initial_ms": 5, "max_ms": 2}}, "max is 2, allowed is 5 to"),
        ({"table_ms": [1], "fixed_ms": 1}, "one backoff, not table_ms and fixed_ms"),
    ],
)
def test_junk_is_refused_with_the_field_and_the_value(plain: dict[str, object], why: str) -> None:
    """Every wrong kind of JSON value, at every place; a long value is cut."""
    with pytest.raises(PolicyError, match=why) as caught:
        from_plain(plain)
    assert len(str(caught.value)) < 150


def test_reasons_keep_their_numbers() -> None:
    """They are on disk."""
    assert {reason.name: int(reason) for reason in Reason} == {
        "EXHAUSTED": 1,
        "TOO_OLD": 2,
        "FORWARDED": 3,
        "SENT_BACK": 4,
        "REFUSED": 6,
        "OPERATOR": 5,
        "TOO_LATE": 7,
    }
