"""What follows on a failed delivery, for every kind of failure and every end of its attempts."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from broker_adapter.contracts.limits import DELAY_LEVELS_MS
from retry.flow import ComeBack, Failure, GivenUp, LeaseExpired, Nacked, Outcome, SentBack, after_failure
from retry.policy import DeadLetter, Fixed, Reason, RetryAt, RetryPolicy

NOW = 1_700_000_000_000
HOUR, DAY = 3_600_000, 86_400_000
POLICY = RetryPolicy(backoff=Fixed(HOUR), max_attempts=3, max_age_ms=DAY)

EXHAUSTED, TOO_OLD = DeadLetter(Reason.EXHAUSTED), DeadLetter(Reason.TOO_OLD)
FORWARDED, SENT_BACK = DeadLetter(Reason.FORWARDED), DeadLetter(Reason.SENT_BACK)


def after(
    failure: Failure, attempt: int, since_ms: int | None, levels_ms: tuple[int, ...] = DELAY_LEVELS_MS
) -> Outcome:
    return after_failure(POLICY, failure, attempt, NOW, Random(1), since_ms=since_ms, levels_ms=levels_ms)


@pytest.mark.parametrize(
    ("failure", "in_time", "too_old", "at_maximum"),
    [
        (Nacked(), RetryAt(NOW + HOUR), TOO_OLD, EXHAUSTED),
        (Nacked(NOW + HOUR - 1), RetryAt(NOW + HOUR), TOO_OLD, EXHAUSTED),
        (Nacked(NOW + HOUR + 1), RetryAt(NOW + HOUR + 1), TOO_OLD, EXHAUSTED),
        (Nacked(NOW + DAY + 1), TOO_OLD, TOO_OLD, EXHAUSTED),
        (LeaseExpired(), ComeBack(), TOO_OLD, EXHAUSTED),
        (SentBack(-1), SENT_BACK, SENT_BACK, SENT_BACK),
        (SentBack(-7), SENT_BACK, SENT_BACK, SENT_BACK),
        (SentBack(0), RetryAt(NOW + HOUR), TOO_OLD, EXHAUSTED),
        (SentBack(1), RetryAt(NOW + 1_000), TOO_OLD, EXHAUSTED),
        (SentBack(3), RetryAt(NOW + 10_000), TOO_OLD, EXHAUSTED),
        (SentBack(18), RetryAt(NOW + 2 * HOUR), TOO_OLD, EXHAUSTED),
        (SentBack(99), RetryAt(NOW + 2 * HOUR), TOO_OLD, EXHAUSTED),
        (GivenUp(), FORWARDED, FORWARDED, FORWARDED),
    ],
)
def test_every_failure_has_its_outcome(
    failure: Failure, in_time: Outcome, too_old: Outcome, at_maximum: Outcome
) -> None:
    """Below the maximum of attempts, too old for another one, and at (or above) the maximum, whatever its age."""
    assert after(failure, 1, NOW) == in_time
    assert after(failure, 2, NOW) == in_time
    assert after(failure, 2, NOW - DAY - 1) == too_old
    for attempt in (3, 4):
        for since_ms in (None, NOW, NOW - DAY - 1):
            assert after(failure, attempt, since_ms) == at_maximum


@pytest.mark.parametrize(
    ("failure", "wait_ms", "outcome"),
    [
        (Nacked(), HOUR, RetryAt(NOW + HOUR)),
        (Nacked(NOW + 5 * HOUR), 5 * HOUR, RetryAt(NOW + 5 * HOUR)),
        (LeaseExpired(), 0, ComeBack()),
        (SentBack(0), HOUR, RetryAt(NOW + HOUR)),
        (SentBack(1), 1_000, RetryAt(NOW + 1_000)),
        (SentBack(18), 2 * HOUR, RetryAt(NOW + 2 * HOUR)),
    ],
)
def test_age_is_that_of_the_next_attempt(failure: Failure, wait_ms: int, outcome: Outcome) -> None:
    """Exactly at the maximum age there is another attempt, a millisecond later there is none."""
    assert after(failure, 1, NOW + wait_ms - DAY) == outcome
    assert after(failure, 1, NOW + wait_ms - DAY - 1) == TOO_OLD


@pytest.mark.parametrize("failure", [Nacked(), LeaseExpired(), SentBack(0), SentBack(1)])
def test_without_a_first_delivery_nothing_is_too_old(failure: Failure) -> None:
    """An unknown age is no age."""
    assert after(failure, 2, None) == after(failure, 2, NOW)


def test_a_level_without_a_table_is_the_policys_time() -> None:
    """Who keeps no delay levels still keeps the message."""
    assert after(SentBack(5), 1, NOW, levels_ms=()) == RetryAt(NOW + HOUR)


def test_jitter_is_the_policys_alone() -> None:
    """It is added to the policy's delays, not to a level and not to what a consumer asked for."""
    policy = RetryPolicy(backoff=Fixed(HOUR), jitter=1.0)
    nacked = after_failure(policy, Nacked(), 1, NOW, Random(1))
    assert isinstance(nacked, RetryAt)
    assert nacked.at_ms > NOW + HOUR
    assert after_failure(policy, Nacked(NOW + DAY), 1, NOW, Random(1)) == RetryAt(NOW + DAY)
    assert after_failure(policy, SentBack(2), 1, NOW, Random(1), levels_ms=DELAY_LEVELS_MS) == RetryAt(NOW + 5_000)


def test_kinds_are_distinguished() -> None:
    """Failures and outcomes without fields are not equal to each other, and true, as empty tuples would not be."""
    kinds: list[object] = [LeaseExpired(), GivenUp(), ComeBack()]
    assert [kinds.index(kind) for kind in kinds] == [0, 1, 2]
    assert all(kinds)
    number: list[object] = [Nacked(1), SentBack(1), RetryAt(1), EXHAUSTED]
    assert [number.index(kind) for kind in number] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("failure", "at_ms"),
    [(Nacked(), NOW + HOUR), (LeaseExpired(), NOW), (SentBack(0), NOW + HOUR), (SentBack(1), NOW + 1_000)],
)
def test_an_expired_message_is_not_retried_late(failure: Failure, at_ms: int) -> None:
    """In the last millisecond it is; one that nobody tried yet is dead as well once its time has passed."""
    policy = replace(POLICY, max_age_ms=None)

    def outcome(not_after_ms: int, attempt: int = 1) -> Outcome:
        return after_failure(
            policy, failure, attempt, NOW, Random(1), not_after_ms=not_after_ms, levels_ms=DELAY_LEVELS_MS
        )

    assert not isinstance(outcome(at_ms), DeadLetter)
    assert outcome(at_ms - 1) == DeadLetter(Reason.TOO_LATE)
    assert outcome(NOW - 1, attempt=0) == DeadLetter(Reason.TOO_LATE)


def test_the_group_that_gave_it_up_is_believed_at_any_time() -> None:
    """The reason is what somebody said, if somebody said one."""
    assert after_failure(POLICY, GivenUp(), 1, NOW, Random(1), not_after_ms=NOW - 1) == FORWARDED
    assert after_failure(POLICY, SentBack(-1), 1, NOW, Random(1), not_after_ms=NOW - 1) == SENT_BACK
