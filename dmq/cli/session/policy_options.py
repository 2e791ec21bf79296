"""Options of a retry policy: the number of attempts, and the delays between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from dmq.cli.output.errors import refused, refusing
from dmq.config.units import format_duration, parse_duration
from retry.policy import (
    DELAY_MS_LIMIT,
    MAX_AGE_MS_LIMIT,
    MAX_ATTEMPTS_LIMIT,
    Backoff,
    Exponential,
    Fixed,
    RetryPolicy,
    Table,
)

NO_MAX_AGE = "none"

TableOption = Annotated[
    str | None,
    typer.Option(
        "--table", metavar="DURATIONS", help="Delay after each attempt, such as '10s 30s 1m'; the last one repeats."
    ),
]
ExponentialOption = Annotated[
    str | None,
    typer.Option(
        "--exponential", metavar="FIRST..MAX", help="Exponential delays, from the first to the longest, such as 5s..2h."
    ),
]
MultiplierOption = Annotated[
    float | None,
    typer.Option("--multiplier", metavar="NUMBER", help="Growth factor of --exponential.  [default: 2]"),
]
FixedOption = Annotated[
    str | None, typer.Option("--fixed", metavar="DURATION", help="The same delay after each attempt.")
]
MaxAttemptsOption = Annotated[
    int | None,
    typer.Option(
        "--max-attempts",
        metavar="N",
        help=f"Total number of attempts, including the first; at most {MAX_ATTEMPTS_LIMIT}.",
    ),
]
JitterOption = Annotated[
    float | None,
    typer.Option(
        "--jitter", metavar="SHARE", help="Maximum random addition to each delay, as a fraction: 0.2 adds up to 20%."
    ),
]
MaxAgeOption = Annotated[
    str | None,
    typer.Option(
        "--max-age",
        metavar="DURATION",
        help="Maximum time from the first delivery to the last attempt; none: no limit.",
    ),
]


def policy_of(
    *,
    table: str | None = None,
    exponential: str | None = None,
    multiplier: float | None = None,
    fixed: str | None = None,
    max_attempts: int | None = None,
    jitter: float | None = None,
    max_age: str | None = None,
    base: RetryPolicy | None = None,
) -> RetryPolicy | None:
    """Return ``base`` (by default the default policy) with the options applied; None if no option is given.

    Raise ``typer.BadParameter``, which names the option, for an invalid value and for options that exclude each other.
    """
    if all(given is None for given in (table, exponential, multiplier, fixed, max_attempts, jitter, max_age)):
        return None
    policy = base or RetryPolicy()
    policy = replace(policy, backoff=_backoff_of(policy.backoff, table, exponential, multiplier, fixed))
    if max_attempts is not None:
        with refusing("--max-attempts", max_attempts):
            policy = replace(policy, max_attempts=max_attempts)
    if jitter is not None:
        with refusing("--jitter", jitter):
            policy = replace(policy, jitter=jitter)
    if max_age is not None:
        with refusing("--max-age", max_age):
            max_age_ms = None if max_age == NO_MAX_AGE else _delay_ms("--max-age", max_age, MAX_AGE_MS_LIMIT)
            policy = replace(policy, max_age_ms=max_age_ms)
    return policy


def _backoff_of(
    base: Backoff, table: str | None, exponential: str | None, multiplier: float | None, fixed: str | None
) -> Backoff:
    options = {"--table": table, "--exponential": exponential, "--fixed": fixed}
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise refused("give one of them only", *given)
    if table is not None:
        with refusing("--table", table):
            base = Table(tuple(_delay_ms("--table", step) for step in table.replace(",", " ").split()))
    elif fixed is not None:
        with refusing("--fixed", fixed):
            base = Fixed(_delay_ms("--fixed", fixed))
    elif exponential is not None:
        with refusing("--exponential", exponential):
            base = _exponential_of(exponential, base)
    if multiplier is None:
        return base
    if not isinstance(base, Exponential):
        raise refused("a multiplier goes with --exponential only", "--multiplier", *given)
    with refusing("--multiplier", multiplier):
        return replace(base, multiplier=multiplier)


def _exponential_of(text: str, base: Backoff) -> Exponential:
    first, separator, most = text.partition("..")
    if not separator:
        raise ValueError("the first delay and the longest one are expected, such as 5s..2h")
    first_ms, most_ms = (_delay_ms("--exponential", each) for each in (first, most))
    if first_ms > most_ms:
        raise ValueError("the first delay is longer than the longest one")
    if isinstance(base, Exponential):
        return replace(base, initial_ms=first_ms, max_ms=most_ms)
    return Exponential(first_ms, most_ms)


def _delay_ms(option: str, text: str, most_ms: int = DELAY_MS_LIMIT) -> int:
    with refusing(option, text):
        duration_ms = parse_duration(text)
        if duration_ms > most_ms:
            raise ValueError(f"at most {format_duration(most_ms)} is allowed")
    return duration_ms
