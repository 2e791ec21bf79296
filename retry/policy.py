"""Retry policies: when a failed message is tried again, and when it becomes a dead letter. Values and one pure
function.

Attempts are counted from 1: attempt 1 is the first delivery, so a policy with ``max_attempts`` 17 allows 16 retries.
``Table``, ``Exponential`` and ``Fixed`` define the delay after a failed attempt. Jitter only adds to it: a policy's
delay is a lower bound ("not earlier"), not a mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from random import Random

from broker_adapter.contracts import limits

_SECOND_MS, _HOUR_MS = 1_000, 3_600_000

DELAY_LEVELS_MS, RETRY_STEPS_MS = limits.DELAY_LEVELS_MS, limits.RETRY_STEPS_MS  # same as RocketMQ
# A producer's spool: 3, 5, 30, 60, 120, 300, 480, 600, 900, 1800 s.
SPOOL_STEPS_MS = tuple(seconds * _SECOND_MS for seconds in (3, 5, 30, 60, 120, 300, 480, 600, 900, 1800))

MAX_ATTEMPTS_DEFAULT = len(RETRY_STEPS_MS) + 1
MAX_ATTEMPTS_LIMIT = 1_000  # two bytes on disk; larger values are assumed to be mistakes
DELAY_MS_LIMIT = 366 * 24 * _HOUR_MS
MAX_AGE_MS_LIMIT = 10 * DELAY_MS_LIMIT
STEPS_LIMIT = 256

# Fields of the stored form; a policy has one of them.
_BACKOFFS = ("table_ms", "fixed_ms", "exponential")


class PolicyError(ValueError):
    """An invalid policy. The text names the field, the value and the bound."""


def _check(name: str, value: float, least: float, most: float, unit: str) -> None:
    if not least <= value <= most:  # NaN is outside as well
        raise PolicyError(f"{name} is {value!r:.60}, allowed is {least} to {most} {unit}".rstrip())


class Reason(IntEnum):
    """Reason of a dead letter. The numbers are on disk and in the audit trail: a number is never reused."""

    EXHAUSTED = 1  # all attempts that its group's policy allows failed
    TOO_OLD = 2  # its next attempt would exceed the policy's maximum age
    FORWARDED = 3  # its consumer gave it up
    SENT_BACK = 4  # sent back with delay level -1
    OPERATOR = 5  # an operator ended its retries
    REFUSED = 6  # its destination cluster refuses it permanently
    TOO_LATE = 7  # its expiry, set by its sender, has passed


@dataclass(frozen=True, slots=True)
class Table:
    """Delays from a table: ``steps_ms[n - 1]`` after attempt n. The last step repeats."""

    steps_ms: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.steps_ms) <= STEPS_LIMIT:
            raise PolicyError(f"a table has 1 to {STEPS_LIMIT} steps, not {len(self.steps_ms)}")
        for number, step_ms in enumerate(self.steps_ms, start=1):
            _check(f"step {number} of the table", step_ms, 0, DELAY_MS_LIMIT, "ms")


@dataclass(frozen=True, slots=True)
class Exponential:
    """Exponential delays: ``initial_ms * multiplier ** (n - 1)`` after attempt n, at most ``max_ms``."""

    initial_ms: int
    max_ms: int
    multiplier: float = 2.0

    def __post_init__(self) -> None:
        _check("initial", self.initial_ms, 1, DELAY_MS_LIMIT, "ms")
        _check("max", self.max_ms, self.initial_ms, DELAY_MS_LIMIT, "ms")
        _check("multiplier", self.multiplier, 1, 100, "")


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same delay after every attempt."""

    delay_ms: int

    def __post_init__(self) -> None:
        _check("delay", self.delay_ms, 0, DELAY_MS_LIMIT, "ms")


Backoff = Table | Exponential | Fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Maximum number of attempts and the delays between them. ``jitter`` 0.2 adds up to a fifth of each delay.

    ``max_age_ms`` counts from when the message first became visible to its group; ``None``: no maximum age.
    """

    backoff: Backoff = field(default=Table(RETRY_STEPS_MS))
    max_attempts: int = MAX_ATTEMPTS_DEFAULT
    jitter: float = 0.0
    max_age_ms: int | None = None

    def __post_init__(self) -> None:
        _check("max_attempts", self.max_attempts, 1, MAX_ATTEMPTS_LIMIT, "")
        _check("jitter", self.jitter, 0, 1, "")
        if self.max_age_ms is not None:
            _check("max_age", self.max_age_ms, 1, MAX_AGE_MS_LIMIT, "ms")


# Not tuples: as tuples RetryAt(1) would be equal to DeadLetter(Reason.EXHAUSTED).
@dataclass(frozen=True, slots=True)
class RetryAt:
    """Try again, not before ``at_ms``."""

    at_ms: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Make no further attempt."""

    reason: Reason


def delay_ms(policy: RetryPolicy, attempt: int) -> int:
    """Return the milliseconds to wait after failed ``attempt`` (from 1), without jitter."""
    assert attempt >= 1, "attempts are counted from 1"
    match policy.backoff:
        case Table(steps_ms):
            return steps_ms[min(attempt, len(steps_ms)) - 1]
        case Fixed(fixed_ms):
            return fixed_ms
        case Exponential(initial_ms, max_ms, multiplier):
            try:
                return min(max_ms, round(initial_ms * float(multiplier) ** (attempt - 1)))
            except OverflowError:  # the power, or rounding infinity
                return max_ms


def delays_ms(policy: RetryPolicy) -> tuple[int, ...]:
    """Return the delay after each attempt that is followed by another, at most ``STEPS_LIMIT`` delays; never empty.

    Clients receive these delays. A client that needs a later one repeats the last.
    """
    return tuple(delay_ms(policy, attempt) for attempt in range(1, max(2, min(policy.max_attempts, STEPS_LIMIT + 1))))


def decide(
    policy: RetryPolicy, attempt: int, now_ms: int, rng: Random, *, since_ms: int | None = None
) -> RetryAt | DeadLetter:
    """Return the outcome of failed ``attempt`` (from 1) at ``now_ms``.

    ``since_ms`` is when the message first became visible; without it the maximum age does not apply.
    """
    if attempt >= policy.max_attempts:
        return DeadLetter(Reason.EXHAUSTED)
    wait_ms = delay_ms(policy, attempt)
    wait_ms += int(wait_ms * policy.jitter * rng.random())  # rounded down: never more than its share
    at_ms = now_ms + wait_ms
    if policy.max_age_ms is not None and since_ms is not None and at_ms - since_ms > policy.max_age_ms:
        return DeadLetter(Reason.TOO_OLD)
    return RetryAt(at_ms)


def to_plain(policy: RetryPolicy) -> dict[str, object]:
    """Return ``policy`` as JSON values; ``from_plain`` is the inverse."""
    plain: dict[str, object] = {"max_attempts": policy.max_attempts, "jitter": policy.jitter}
    match policy.backoff:
        case Table(steps_ms):
            plain["table_ms"] = list(steps_ms)
        case Fixed(fixed_ms):
            plain["fixed_ms"] = fixed_ms
        case Exponential(initial_ms, max_ms, multiplier):
            plain["exponential"] = {"initial_ms": initial_ms, "max_ms": max_ms, "multiplier": multiplier}
    if policy.max_age_ms is not None:
        plain["max_age_ms"] = policy.max_age_ms
    return plain


def from_plain(plain: Mapping[str, object]) -> RetryPolicy:
    """Parse a policy from JSON values; missing fields get their defaults. Raise ``PolicyError`` if it is invalid."""
    _check_fields("a policy", plain, {"max_attempts", "jitter", "max_age_ms", *_BACKOFFS})
    max_age = plain.get("max_age_ms")
    return RetryPolicy(
        backoff=_backoff_of(plain),
        max_attempts=_whole("max_attempts", plain.get("max_attempts", MAX_ATTEMPTS_DEFAULT)),
        jitter=_number("jitter", plain.get("jitter", 0.0)),
        max_age_ms=None if max_age is None else _whole("max_age_ms", max_age),
    )


def _backoff_of(plain: Mapping[str, object]) -> Backoff:
    given = [name for name in _BACKOFFS if name in plain]
    if not given:
        return Table(RETRY_STEPS_MS)
    if len(given) > 1:
        raise PolicyError(f"a policy has one backoff, not {' and '.join(given)}")
    name, value = given[0], plain[given[0]]
    if name == "fixed_ms":
        return Fixed(_whole(name, value))
    if name == "exponential":
        return _exponential_of(value)
    if not isinstance(value, list | tuple):
        raise PolicyError(f"table_ms is {value!r:.60}, a list is expected")
    return Table(tuple(_whole(f"step {number} of table_ms", step) for number, step in enumerate(value, start=1)))


def _exponential_of(value: object) -> Exponential:
    fields = _check_fields("exponential", value, {"initial_ms", "max_ms", "multiplier"})
    return Exponential(
        initial_ms=_whole("initial_ms of exponential", fields.get("initial_ms")),
        max_ms=_whole("max_ms of exponential", fields.get("max_ms")),
        multiplier=_number("multiplier of exponential", fields.get("multiplier", 2.0)),
    )


def _check_fields(name: str, value: object, known: set[str]) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise PolicyError(f"{name} is {value!r:.60}, an object is expected")
    for field_name in value:
        if field_name not in known:  # a misspelt field must not be ignored silently
            raise PolicyError(f"{name} has no field {field_name!r:.60}")
    return value


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise PolicyError(f"{name} is {value!r:.60}, a whole number is expected")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PolicyError(f"{name} is {value!r:.60}, a number is expected")
    return value  # an int stays an int: JSON allows values that no float can hold
