"""Options of a retry policy: the number of attempts, and the delays between them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated

import typer

from dmq.cli.output.errors import refused, refusing
from dmq.cli.session.options import OptionGroup
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions(OptionGroup):
    """Options of a retry policy."""

    table: Annotated[
        str | None,
        typer.Option(metavar="DURATIONS", help="Delay after each attempt, such as '10s 30s 1m'; the last one repeats."),
    ] = None
    exponential: Annotated[
        str | None,
        typer.Option(metavar="FIRST..MAX", help="Exponential delays, from the first to the longest, such as 5s..2h."),
    ] = None
    multiplier: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="Growth factor of --exponential.  [default: 2]")
    ] = None
    fixed: Annotated[str | None, typer.Option(metavar="DURATION", help="The same delay after each attempt.")] = None
    max_attempts: Annotated[
        int | None,
        typer.Option(metavar="N", help=f"Total number of attempts, including the first; at most {MAX_ATTEMPTS_LIMIT}."),
    ] = None
    jitter: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Maximum random addition to each delay, as a fraction: 0.2 adds up to 20%."),
    ] = None
    max_age: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="Maximum time from the first delivery to the last attempt; none: no limit."
        ),
    ] = None

    @property
    def are_given(self) -> bool:
        """True if an option is given."""
        return any(getattr(self, each.name) is not None for each in fields(self))

    def applied_to(self, base: RetryPolicy | None) -> RetryPolicy:
        """Return ``base`` (by default the default policy) with the options applied.

        Raise ``typer.BadParameter``, which names the option, for an invalid value and for options that exclude each
        other.
        """
        policy = base or RetryPolicy()
        policy = replace(policy, backoff=_backoff_of(policy.backoff, self))
        if self.max_attempts is not None:
            with refusing("--max-attempts", self.max_attempts):
                policy = replace(policy, max_attempts=self.max_attempts)
        if self.jitter is not None:
            with refusing("--jitter", self.jitter):
                policy = replace(policy, jitter=self.jitter)
        if self.max_age is not None:
            with refusing("--max-age", self.max_age):
                max_age_ms = (
                    None if self.max_age == NO_MAX_AGE else _delay_ms("--max-age", self.max_age, MAX_AGE_MS_LIMIT)
                )
                policy = replace(policy, max_age_ms=max_age_ms)
        return policy


def _backoff_of(base: Backoff, given_options: PolicyOptions) -> Backoff:
    table, exponential, fixed = given_options.table, given_options.exponential, given_options.fixed
    multiplier = given_options.multiplier
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
