"""``dmq backoff``: the attempts of a retry policy. Needs a daemon only for the policy of a group."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Annotated, NamedTuple

import typer

from broker_adapter.contracts.limits import DELIVER_AT_MS_MAX
from dmq.cli.nouns import noun
from dmq.cli.output.errors import refused, refusing
from dmq.cli.session.options import Session, with_session
from dmq.cli.session.policy_options import PolicyOptions
from dmq.config.units import At, format_duration, format_time, parse_duration, parse_when
from retry.policy import DeadLetter, Reason, RetryPolicy, decide, to_plain

app = noun("backoff")

GroupOption = Annotated[
    str, typer.Option("--group", metavar="GROUP", help="Start from the policy of this consumer group of a daemon.")
]


class _Attempt(NamedTuple):
    """Attempt, and the delay from its failure to the next attempt; None for the last one."""

    number: int
    at_ms: int
    delay_ms: int | None


class _Run(NamedTuple):
    """All attempts of a message that always fails, and the reason of its death."""

    attempts: Sequence[_Attempt]
    reason: Reason
    dead_at_ms: int


@app.command()
@with_session
def show(
    session: Session,
    *,
    group: GroupOption = "",
    options: PolicyOptions,
) -> None:
    """Show the attempts of a retry policy and the delays between them.

    Without options, the command shows the default policy. With --group, it shows the policy of that group, changed
    by the other options. The times are the earliest possible: they contain neither jitter nor the duration of
    the attempts.
    """
    policy = options.applied_to(_policy_of_group(session, group))
    run = _run(replace(policy, jitter=0.0), 0, 0, Random(0))
    plain = {
        "policy": to_plain(policy),
        "attempts": [
            {
                "attempt": attempt.number,
                "since_first_ms": attempt.at_ms,
                "delay_ms": attempt.delay_ms,
                "delay_max_ms": _with_jitter(attempt.delay_ms, policy),
            }
            for attempt in run.attempts
        ],
        "dead_letter": {"reason": run.reason.name, "since_first_ms": run.dead_at_ms},
    }
    headings = ("ATTEMPT", "SINCE FIRST", "DELAY AFTER", "WITH JITTER")
    rows = [
        (
            str(attempt.number),
            format_duration(attempt.at_ms),
            _duration(attempt.delay_ms),
            _duration(_with_jitter(attempt.delay_ms, policy), "up to "),
        )
        for attempt in run.attempts
    ]
    columns = len(headings) if policy.jitter else len(headings) - 1
    session.show_table(plain, headings[:columns], [row[:columns] for row in rows], numbers=headings)
    if not session.as_json:
        typer.echo(f"dead letter {format_duration(run.dead_at_ms)} after the first delivery: {_why(run, policy)}")


@app.command()
@with_session
def simulate(
    session: Session,
    *,
    group: GroupOption = "",
    options: PolicyOptions,
    start: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Time of the first delivery: RFC 3339, epoch milliseconds, or +5m.  [default: now]"
        ),
    ] = None,
    processing: Annotated[str, typer.Option(metavar="DURATION", help="Duration of each failed attempt.")] = "0s",
    seed: Annotated[int | None, typer.Option(help="Seed of the jitter, to repeat a result.  [default: random]")] = None,
) -> None:
    """Show the attempt times of a message that always fails.

    The last line shows when the message becomes a dead letter, and why. Without options, the default policy
    applies, from now on. With --group, the policy of that group applies, changed by the other options.
    """
    policy = options.applied_to(_policy_of_group(session, group))
    start_ms, processing_ms = _start_ms(start), _processing_ms(processing)
    seed = secrets.randbelow(1_000_000) if seed is None else seed
    run = _run(policy, start_ms, processing_ms, Random(seed))
    if run.dead_at_ms > DELIVER_AT_MS_MAX:
        raise refused("the attempts would continue past the year 9999", "--start", "--processing")
    given = {"policy": to_plain(policy), "start_ms": start_ms, "processing_ms": processing_ms, "seed": seed}
    if policy.jitter and not session.as_json:
        typer.echo(f"jitter drawn with --seed {seed}")
    session.show_table(
        given | _simulated_plain(run, start_ms),
        ("ATTEMPT", "TIME", "SINCE FIRST", "DELAY AFTER"),
        [
            (
                str(attempt.number),
                format_time(attempt.at_ms),
                format_duration(attempt.at_ms - start_ms),
                _duration(attempt.delay_ms),
            )
            for attempt in run.attempts
        ],
        numbers=("ATTEMPT", "SINCE FIRST", "DELAY AFTER"),
    )
    if not session.as_json:
        dead = f"{format_time(run.dead_at_ms)}, {format_duration(run.dead_at_ms - start_ms)}"
        typer.echo(f"dead letter at {dead} after the first delivery: {_why(run, policy)}")


def _policy_of_group(session: Session, group: str) -> RetryPolicy | None:
    if not group:
        return None
    from dmq.admin.requests.mapping import policy_of as policy_from_wire

    with session.connect() as client:
        return policy_from_wire(client.group(group).policy)


def _simulated_plain(run: _Run, start_ms: int) -> dict[str, object]:
    return {
        "attempts": [
            {
                "attempt": attempt.number,
                "at_ms": attempt.at_ms,
                "since_first_ms": attempt.at_ms - start_ms,
                "delay_ms": attempt.delay_ms,
            }
            for attempt in run.attempts
        ],
        "dead_letter": {
            "reason": run.reason.name,
            "at_ms": run.dead_at_ms,
            "since_first_ms": run.dead_at_ms - start_ms,
        },
    }


def _run(policy: RetryPolicy, start_ms: int, processing_ms: int, rng: Random) -> _Run:
    attempts: list[_Attempt] = []
    at_ms = start_ms
    while True:
        number, failed_at_ms = len(attempts) + 1, at_ms + processing_ms
        outcome = decide(policy, number, failed_at_ms, rng, since_ms=start_ms)
        if isinstance(outcome, DeadLetter):
            attempts.append(_Attempt(number, at_ms, None))
            return _Run(attempts, outcome.reason, failed_at_ms)
        attempts.append(_Attempt(number, at_ms, outcome.at_ms - failed_at_ms))
        at_ms = outcome.at_ms


def _with_jitter(delay_ms: int | None, policy: RetryPolicy) -> int | None:
    return None if delay_ms is None else delay_ms + int(delay_ms * policy.jitter)


def _duration(delay_ms: int | None, before: str = "") -> str:
    return "" if delay_ms is None else before + format_duration(delay_ms)


def _why(run: _Run, policy: RetryPolicy) -> str:
    last = len(run.attempts)
    if run.reason is Reason.TOO_OLD and policy.max_age_ms is not None:
        return f"too old, attempt {last + 1} would come more than {format_duration(policy.max_age_ms)} after it"
    return f"exhausted after {last} attempt{'s' if last > 1 else ''}"


def _start_ms(text: str | None) -> int:
    from broker_adapter.runtime.clock import SystemClock

    if text is None:
        return SystemClock().now_ms()
    with refusing("--start", text):
        when = parse_when(text)
        if isinstance(when, At) and when.epoch_ms < 0:
            raise ValueError("the time is before 1970")
    return when.epoch_ms if isinstance(when, At) else SystemClock().now_ms() + when.delay_ms


def _processing_ms(text: str) -> int:
    with refusing("--processing", text):
        return parse_duration(text)
