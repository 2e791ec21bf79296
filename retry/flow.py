"""Outcome of a failed delivery: one pure function of (policy, failure, attempt, time).

    failure                                       outcome
    Nacked        the consumer reports a failure  RetryAt the policy's time, at least the consumer's; or DeadLetter
    LeaseExpired  no answer from the consumer     ComeBack now (the lease was the wait); or DeadLetter
    SentBack      with a delay level              -1 DeadLetter, 0 the policy's time, n that level's; or DeadLetter
    Forwarded     given up by its consumer        DeadLetter
    Unwanted      refused by its destination      DeadLetter

A message with an expiry is a DeadLetter if its next attempt would come after the expiry.

The owner of the messages turns an outcome into one atomic write. This module does not depend on how they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from retry.policy import DeadLetter, Reason, RetryAt, RetryPolicy, decide


@dataclass(frozen=True, slots=True)
class Nacked:
    """A push consumer failed and requests the message again, not before ``not_before_ms``."""

    not_before_ms: int = 0


@dataclass(frozen=True, slots=True)
class LeaseExpired:
    """A lease expired without an acknowledgement."""


@dataclass(frozen=True, slots=True)
class SentBack:
    """A consumer returned the message with a delay level: -1 no retry, 0 the delay of the policy, from 1 that level."""

    delay_level: int


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The consumer gave up on the message: no further attempt."""


@dataclass(frozen=True, slots=True)
class Unwanted:
    """The destination refuses the message permanently, with ``code`` and ``why``."""

    code: int
    why: str


@dataclass(frozen=True, slots=True)
class ComeBack:
    """Make the message available again at once, with the next attempt number."""


Failure = Nacked | LeaseExpired | SentBack | GivenUp | Unwanted
Outcome = RetryAt | ComeBack | DeadLetter


def after_failure(
    policy: RetryPolicy,
    failure: Failure,
    attempt: int,
    now_ms: int,
    rng: Random,
    *,
    since_ms: int | None = None,
    not_after_ms: int = 0,
    levels_ms: Sequence[int] = (),
) -> Outcome:
    """Return the outcome of ``failure`` of delivery ``attempt`` (from 1; 0 if there was none).

    ``since_ms`` is when the message first became visible. ``not_after_ms`` is its expiry (0: none). ``levels_ms`` are
    the delay levels in milliseconds, level 1 first.
    """
    if isinstance(failure, GivenUp):
        return DeadLetter(Reason.FORWARDED)
    if isinstance(failure, Unwanted):
        return DeadLetter(Reason.REFUSED)
    if isinstance(failure, SentBack) and failure.delay_level < 0:
        return DeadLetter(Reason.SENT_BACK)
    if not_after_ms and now_ms > not_after_ms:
        return DeadLetter(Reason.TOO_LATE)
    outcome = _of_policy(policy, failure, attempt, now_ms, rng, since_ms=since_ms, levels_ms=levels_ms)
    if not_after_ms and isinstance(outcome, RetryAt) and outcome.at_ms > not_after_ms:
        return DeadLetter(Reason.TOO_LATE)
    return outcome


def _of_policy(
    policy: RetryPolicy,
    failure: Nacked | LeaseExpired | SentBack,
    attempt: int,
    now_ms: int,
    rng: Random,
    *,
    since_ms: int | None,
    levels_ms: Sequence[int],
) -> Outcome:
    outcome = decide(policy, attempt, now_ms, rng, since_ms=since_ms)
    if isinstance(outcome, DeadLetter) and outcome.reason is Reason.EXHAUSTED:
        return outcome
    match failure:
        case LeaseExpired():
            # The retry is immediate, so its age at the retry is its age now.
            return DeadLetter(Reason.TOO_OLD) if _is_too_old(policy, now_ms, since_ms) else ComeBack()
        case SentBack(level) if level > 0 and levels_ms:
            at_ms = now_ms + levels_ms[min(level, len(levels_ms)) - 1]
        case Nacked(not_before_ms) if isinstance(outcome, RetryAt):
            at_ms = max(outcome.at_ms, not_before_ms)
        case _:
            return outcome
    return DeadLetter(Reason.TOO_OLD) if _is_too_old(policy, at_ms, since_ms) else RetryAt(at_ms)


def _is_too_old(policy: RetryPolicy, at_ms: int, since_ms: int | None) -> bool:
    return policy.max_age_ms is not None and since_ms is not None and at_ms - since_ms > policy.max_age_ms
