"""``dmq group``: consumer groups and their retry policies."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli import output as out
from dmq.cli.errors import CommandFailed, ExitCode
from dmq.cli.options import AddressOption, OutputOption, TimeoutOption, session_of
from dmq.cli.policy_options import (
    ExponentialOption,
    FixedOption,
    JitterOption,
    MaxAgeOption,
    MaxAttemptsOption,
    MultiplierOption,
    TableOption,
    policy_of,
)
from dmq.units import format_duration
from retry.policy import RetryPolicy, delay_ms

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire
    from dmq.admin.client import AdminClient

GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The consumer group.")]

_SPANS_SHOWN = 32


def ls(
    ctx: typer.Context,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """List the consumer groups: retries that wait, dead letters, messages out on a lease, policy, order."""
    session = session_of(ctx, address, output, timeout)
    with session.connect() as client:
        groups = client.groups()
    if session.as_json:
        out.show_json([out.to_plain(group) for group in groups])
        return
    out.show_table(
        ("GROUP", "WAITING", "DEAD", "LEASED", "POLICY", "ORDER"),
        [
            (
                *(group.name, f"{group.waiting:,}", f"{group.dead:,}", f"{group.leased:,}"),
                *("default" if group.is_default_policy else "set", "fifo" if group.is_fifo else ""),
            )
            for group in groups
        ],
        numbers=("WAITING", "DEAD", "LEASED"),
    )


def show(
    ctx: typer.Context,
    *,
    group: GroupArgument,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Show a consumer group: what waits, what is dead, and the retry policy that counts."""
    session = session_of(ctx, address, output, timeout)
    with session.connect() as client:
        found = client.group(group)
        now_ms = client.status().now_ms
    if session.as_json:
        out.show_json(out.to_plain(found))
        return
    out.show_facts(
        [
            ("group", found.name),
            ("created at", out.when(found.created_at_ms, now_ms)),
            ("waiting", f"{found.waiting:,}"),
            ("dead", f"{found.dead:,}"),
            ("leased", f"{found.leased:,}"),
            *_policy_facts(found),
        ]
    )


def set_policy(
    ctx: typer.Context,
    *,
    group: GroupArgument,
    table: TableOption = None,
    exponential: ExponentialOption = None,
    multiplier: MultiplierOption = None,
    fixed: FixedOption = None,
    max_attempts: MaxAttemptsOption = None,
    jitter: JitterOption = None,
    max_age: MaxAgeOption = None,
    fifo: Annotated[
        bool | None, typer.Option("--fifo/--no-fifo", help="Whether its clients are told to keep the order.")
    ] = None,
    default: Annotated[bool, typer.Option("--default", help="Go back to the daemon's default policy.")] = False,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Change how a group's failed messages are tried again, and print the policy that counts now.

    What is not given stays as it is; the group is made if nobody knows it. Retries that wait already keep their time,
    their next failure goes by the new policy. 'dmq backoff show' takes the same options and changes nothing.
    """
    session = session_of(ctx, address, output, timeout)

    def policy_from(base: RetryPolicy | None) -> RetryPolicy | None:
        return policy_of(
            table=table,
            exponential=exponential,
            multiplier=multiplier,
            fixed=fixed,
            max_attempts=max_attempts,
            jitter=jitter,
            max_age=max_age,
            base=base,
        )

    with session.connect() as client:
        options = (table, exponential, multiplier, fixed, max_attempts, jitter, max_age)
        is_policy = any(option is not None for option in options)
        if is_policy and default:
            raise typer.BadParameter("give a policy, or --default: not both", param_hint="--default")
        if not is_policy and not default and fifo is None:
            raise CommandFailed("say what to change; see 'dmq group set-policy --help'", ExitCode.USAGE)
        policy = policy_from(_policy_now(client, group)) if is_policy else None
        from dmq.admin.mapping import wire_policy

        changed = client.set_group(
            group, policy=None if policy is None else wire_policy(policy), reset_policy=default, is_fifo=fifo
        )
    if session.as_json:
        out.show_json(out.to_plain(changed))
    else:
        out.show_facts([("group", changed.name), *_policy_facts(changed)])


def _policy_now(client: AdminClient, group: str) -> RetryPolicy | None:
    from dmq.admin.client import NotFound
    from dmq.admin.mapping import policy_of as read

    try:
        return read(client.group(group).policy)
    except NotFound:
        return None


def _policy_facts(group: wire.Group) -> list[tuple[str, str]]:
    from dmq.admin.mapping import policy_of as read

    policy = read(group.policy)
    max_age = f", none later than {format_duration(policy.max_age_ms)}" if policy.max_age_ms is not None else ""
    attempts = f"{policy.max_attempts} attempt{'s' if policy.max_attempts > 1 else ''}{max_age}"
    jitter = f" and up to {policy.jitter:g} of it more" if policy.jitter and policy.max_attempts > 1 else ""
    order = "kept (fifo)" if group.is_fifo else "not kept"
    return [
        ("policy", f"{attempts}, {'the default' if group.is_default_policy else 'set by an operator'}"),
        ("delay after", _delays(policy) + jitter),
        ("order", f"{order}, {'set by an operator' if group.is_fifo_set else 'as its topics are'}"),
    ]


def _delays(policy: RetryPolicy) -> str:
    """Return the delay after each attempt that is followed by another one; equal neighbours are one."""
    if policy.max_attempts == 1:
        return "none: the first failure is the last"
    texts = []
    for wait_ms, run in groupby(range(1, policy.max_attempts), key=lambda attempt: delay_ms(policy, attempt)):
        numbers = list(run)
        span = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        texts.append(f"{span}: {format_duration(wait_ms)}")
    shown = texts if len(texts) <= _SPANS_SHOWN else [*texts[: _SPANS_SHOWN - 2], "...", texts[-1]]
    return ", ".join(shown)
