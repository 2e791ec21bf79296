"""Every retry policy: delays stay in their bounds, jitter only adds, attempts end, the stored form is the policy."""

from __future__ import annotations

import json
from contextlib import suppress
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker_adapter.contracts.limits import DELAY_LEVELS_MS
from retry.flow import ComeBack, GivenUp, LeaseExpired, Nacked, SentBack, after_failure
from retry.policy import (
    DELAY_MS_LIMIT,
    MAX_AGE_MS_LIMIT,
    MAX_ATTEMPTS_LIMIT,
    STEPS_LIMIT,
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

pytestmark = pytest.mark.property
NOW = 1_700_000_000_000
delays = st.integers(0, DELAY_MS_LIMIT)
exponentials = st.tuples(
    st.integers(1, DELAY_MS_LIMIT), st.integers(1, DELAY_MS_LIMIT), st.floats(1, 100) | st.integers(1, 100)
).map(lambda drawn: Exponential(min(drawn[:2]), max(drawn[:2]), drawn[2]))
tables = st.lists(delays, min_size=1, max_size=STEPS_LIMIT).map(lambda steps_ms: Table(tuple(steps_ms)))
policies = st.builds(
    RetryPolicy,
    backoff=tables | exponentials | delays.map(Fixed),
    max_attempts=st.integers(1, MAX_ATTEMPTS_LIMIT),
    jitter=st.floats(0, 1),
    max_age_ms=st.none() | st.integers(1, MAX_AGE_MS_LIMIT),
)
attempts = st.integers(1, 2**16 - 1)
seeds = st.integers(0, 2**32).map(Random)
failures = st.one_of(
    st.builds(Nacked, st.integers(0, 2 * NOW)),
    st.just(LeaseExpired()),
    st.builds(SentBack, st.integers(-(2**31), 2**31 - 1)),
    st.just(GivenUp()),
)
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = ("max_attempts", "jitter", "max_age_ms", "table_ms", "fixed_ms", "exponential")


@given(exponentials, attempts)
@example(Exponential(1, DELAY_MS_LIMIT, 100), 2**16 - 1)
@example(Exponential(1, DELAY_MS_LIMIT, 1 + 2**-52), 2**16 - 1)
@example(Exponential(DELAY_MS_LIMIT, DELAY_MS_LIMIT, 100.0), 155)
def test_exponential_delays_stay_in_their_bounds_and_never_shrink(backoff: Exponential, attempt: int) -> None:
    """No attempt is far enough to overflow, and none waits less than the one before it."""
    policy = RetryPolicy(backoff=backoff)
    wait_ms = delay_ms(policy, attempt)
    assert isinstance(wait_ms, int)
    assert backoff.initial_ms <= wait_ms <= backoff.max_ms
    assert wait_ms <= delay_ms(policy, attempt + 1)


@given(policies, attempts, seeds)
def test_jitter_only_adds_and_at_most_its_share(policy: RetryPolicy, attempt: int, rng: Random) -> None:
    """A delay is a promise: not earlier."""
    match decide(policy, attempt, NOW, rng):
        case RetryAt(at_ms):
            wait_ms = delay_ms(policy, attempt)
            assert 0 <= at_ms - NOW - wait_ms <= wait_ms * policy.jitter
        case DeadLetter(reason):
            assert reason is Reason.EXHAUSTED


@given(policies, attempts, seeds, st.integers(0, 2 * MAX_AGE_MS_LIMIT))
def test_no_attempt_comes_after_the_last_one_or_too_late(
    policy: RetryPolicy, attempt: int, rng: Random, age_ms: int
) -> None:
    """The maximum of attempts and the maximum age hold for every outcome, and nothing else ends a message."""
    since_ms = NOW - age_ms
    outcome = decide(policy, attempt, NOW, rng, since_ms=since_ms)
    assert (outcome == DeadLetter(Reason.EXHAUSTED)) == (attempt >= policy.max_attempts)
    if policy.max_age_ms is None:
        assert outcome != DeadLetter(Reason.TOO_OLD)
    elif isinstance(outcome, RetryAt):
        assert outcome.at_ms - since_ms <= policy.max_age_ms
    elif outcome.reason is Reason.TOO_OLD:
        longest_ms = delay_ms(policy, attempt) * (1 + policy.jitter)
        assert age_ms + longest_ms > policy.max_age_ms


@given(policies)
def test_clients_get_the_delays(policy: RetryPolicy) -> None:
    """One entry for each retry, at least one, never more than a table may have."""
    told = delays_ms(policy)
    assert len(told) == min(max(1, policy.max_attempts - 1), STEPS_LIMIT)
    assert all(wait_ms == delay_ms(policy, attempt) for attempt, wait_ms in enumerate(told, start=1))


@given(policies)
def test_a_policy_survives_the_way_there_and_back(policy: RetryPolicy) -> None:
    """Through JSON, exactly."""
    assert from_plain(json.loads(json.dumps(to_plain(policy)))) == policy


@given(junk | st.dictionaries(st.sampled_from(FIELDS), junk, min_size=1))
@example({"exponential": {"initial_ms": 10**4000, "max_ms": 1}})
def test_junk_is_a_policy_or_a_policy_error(plain: dict[str, object]) -> None:
    """Whatever JSON is read: no other exception, and what is taken for a policy is one."""
    with suppress(PolicyError):
        policy = from_plain(plain)
        assert from_plain(to_plain(policy)) == policy


@given(policies, failures, attempts, seeds, st.none() | st.integers(0, 2 * MAX_AGE_MS_LIMIT))
def test_every_failure_has_an_outcome_within_the_policy(
    policy: RetryPolicy,
    failure: Nacked | LeaseExpired | SentBack | GivenUp,
    attempt: int,
    rng: Random,
    age_ms: int | None,
) -> None:
    """No message comes back after its last attempt, too old, in the past, or before its consumer wants it."""
    since_ms = None if age_ms is None else NOW - age_ms
    outcome = after_failure(policy, failure, attempt, NOW, rng, since_ms=since_ms, levels_ms=DELAY_LEVELS_MS)
    if isinstance(outcome, DeadLetter):
        return
    assert attempt < policy.max_attempts
    assert isinstance(outcome, ComeBack) == isinstance(failure, LeaseExpired)
    at_ms = outcome.at_ms if isinstance(outcome, RetryAt) else NOW
    assert at_ms >= NOW
    if isinstance(failure, Nacked):
        assert at_ms >= failure.not_before_ms
    if policy.max_age_ms is not None and since_ms is not None:
        assert at_ms - since_ms <= policy.max_age_ms
