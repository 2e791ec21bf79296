"""``dmq group``: consumer groups, their retry policies, and their positions in topics."""

from __future__ import annotations

from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli.bulk.engine import is_confirmed
from dmq.cli.nouns import noun
from dmq.cli.output import output as out
from dmq.cli.output.errors import CommandFailed, ExitCode, refused
from dmq.cli.output.facts import flow_word, show_lags, shown_age, unread_fact
from dmq.cli.output.times import point_ms
from dmq.cli.session.options import (
    Consent,
    GroupArgument,
    Session,
    TopicArgument,
    with_reason,
    with_session,
    with_watch,
)
from dmq.cli.session.policy_options import PolicyOptions
from dmq.config.units import format_duration, format_time
from retry.policy import RetryPolicy, delay_ms

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire
    from dmq.admin.client import AdminClient

app = noun("group")

_SPANS_SHOWN = 32
_APPLIES = "sent to connected clients; Python clients keep the earlier delays for up to 5 minutes"
_RETRIES = {"here": "kept here", "cluster": "the cluster's"}


class Retries(StrEnum):
    """Place of the retries of a cluster's topics."""

    HERE = "here"
    CLUSTER = "cluster"


@app.command()
@with_watch
@with_session
def ls(session: Session) -> None:
    """List the consumer groups with their lag, retries and policy.

    Each row also contains the age of the oldest unread message, the dead letters, the leases and the delivery
    order.
    """
    with session.connect() as client:
        groups = client.groups()
    session.show_table(
        groups,
        ("GROUP", "STATE", "UNREAD", "OLDEST", "RETRYING", "DEAD", "LEASED", "POLICY", "ORDER", "RETRIES"),
        [
            (
                *(group.name, flow_word(group)),
                f"{group.unread_messages:,}" if group.HasField("unread_messages") else "-",
                shown_age(group, group.unread_messages),
                *(f"{count:,}" for count in (group.waiting, group.dead, group.leased)),
                *("default" if group.is_default_policy else "set", "fifo" if group.is_fifo else ""),
                group.retries_in_force or group.retries,
            )
            for group in groups
        ],
        numbers=("UNREAD", "OLDEST", "RETRYING", "DEAD", "LEASED"),
        details=("POLICY", "ORDER", "RETRIES"),
    )


@app.command()
@with_session
def show(session: Session, *, group: GroupArgument) -> None:
    """Show a group: retries, dead letters, policy in force and lag."""
    with session.connect() as client:
        found = client.group(group)
        now_ms = client.now_ms()
    session.show_facts(
        found,
        [
            ("group", found.name),
            ("created at", out.when(found.created_at_ms, now_ms)),
            ("unread", unread_fact(found)),
            ("retrying", f"{found.waiting:,}"),
            ("dead letters", f"{found.dead:,} without an outcome"),
            ("leased", f"{found.leased:,}"),
            *_paused_facts(found),
            *_rate_facts(found),
            *_policy_facts(found),
        ],
    )
    if not session.as_json:
        show_lags("TOPIC", [(lag.topic, lag) for lag in found.lags])


@app.command()
@with_reason
def pause(session: Session, *, group: GroupArgument) -> None:
    """Pause a group: it gets no messages until it is resumed.

    The pause survives restarts, and consumers stay connected. Messages that were delivered before can be
    acknowledged. Retries that become due wait as well. The pause does not apply to clients that read by offset.
    """
    _set_paused(session, group, is_paused=True)


@app.command()
@with_reason
def resume(session: Session, *, group: GroupArgument) -> None:
    """Resume a consumer group at an increasing delivery rate.

    The rate is 100 messages in the first second and doubles every second.
    """
    _set_paused(session, group, is_paused=False)


@app.command("set")
@with_reason
def set_(
    session: Session,
    *,
    group: GroupArgument,
    deliver_rate: Annotated[
        int,
        typer.Option(min=0, help="Maximum delivery rate, in messages per second; 0: no limit."),
    ],
) -> None:
    """Set the delivery rate of a group and print the result.

    Messages above the rate remain in the queues. The rate applies at once and survives restarts. It does not apply
    to clients that read by offset.
    """
    with session.connect() as client:
        changed = client.set_group(group, deliver_rate=deliver_rate)
    session.show_facts(changed, [("group", changed.name), *(_rate_facts(changed) or [("deliver rate", "no limit")])])


def _rate_facts(group: wire.Group) -> list[tuple[str, str]]:
    return [("deliver rate", f"{group.deliver_rate:,} a second at most")] if group.deliver_rate else []


def _set_paused(session: Session, group: str, *, is_paused: bool) -> None:
    with session.connect() as client:
        changed = client.set_group(group, is_paused=is_paused)
    session.show_facts(changed, [("group", changed.name), *(_paused_facts(changed) or [("paused", "no")])])


def _paused_facts(group: wire.Group) -> list[tuple[str, str]]:
    return [("paused", f"since {format_time(group.paused_since_ms)}")] if group.paused_since_ms else []


@app.command()
@with_reason
def set_policy(
    session: Session,
    *,
    group: GroupArgument,
    options: PolicyOptions,
    fifo: Annotated[
        bool | None, typer.Option("--fifo/--no-fifo", help="Whether clients consume in the order of the queue.")
    ] = None,
    retries: Annotated[
        Retries | None,
        typer.Option(
            help="In front of a cluster: where failed messages of its topics are retried, here or in the cluster."
        ),
    ] = None,
    default: Annotated[bool, typer.Option("--default", help="Return to the default policy of the daemon.")] = False,
) -> None:
    """Change the retry policy of a group and print the result.

    Settings without an option are unchanged. A group that does not exist is created. Waiting retries keep their
    times; the new policy applies from their next failure. Connected clients receive the policy at once; Python
    clients use the earlier delays for up to five minutes. 'dmq backoff show' accepts the same options and changes
    nothing.
    """

    with session.connect() as client:
        if options.are_given and default:
            raise refused("give a policy or --default, not both", "--default")
        if not options.are_given and not default and fifo is None and retries is None:
            raise CommandFailed("no change is given; see 'dmq group set-policy --help'", ExitCode.USAGE)
        policy = options.applied_to(_policy_now(client, group)) if options.are_given else None
        from dmq.admin.requests.mapping import wire_policy

        changed = client.set_group(
            group,
            policy=None if policy is None else wire_policy(policy),
            reset_policy=default,
            is_fifo=fifo,
            retries=retries or "",
        )
    session.show_facts(changed, [("group", changed.name), *_policy_facts(changed)])
    if (policy is not None or default) and not session.as_json:
        out.note(_APPLIES)


def _policy_now(client: AdminClient, group: str) -> RetryPolicy | None:
    from dmq.admin.client import NotFound
    from dmq.admin.requests.mapping import policy_of as read

    try:
        return read(client.group(group).policy)
    except NotFound:
        return None


def _policy_facts(group: wire.Group) -> list[tuple[str, str]]:
    from dmq.admin.requests.mapping import policy_of as read

    policy = read(group.policy)
    max_age = f", none later than {format_duration(policy.max_age_ms)}" if policy.max_age_ms is not None else ""
    attempts = f"{policy.max_attempts} attempt{'s' if policy.max_attempts > 1 else ''}{max_age}"
    jitter = f" and up to {policy.jitter:g} of it more" if policy.jitter and policy.max_attempts > 1 else ""
    order = "kept (fifo)" if group.is_fifo else "not kept"
    return [
        ("policy", f"{attempts}, {'the default' if group.is_default_policy else 'set by an operator'}"),
        ("delay after", _delays(policy) + jitter),
        ("order", f"{order}, {'set by an operator' if group.is_fifo_set else 'by the type of its topics'}"),
        *_retries_facts(group),
    ]


def _retries_facts(group: wire.Group) -> list[tuple[str, str]]:
    in_force = group.retries_in_force or group.retries
    if not in_force:
        return []
    if group.retries == in_force:
        source = "set by an operator"
    else:
        source = "as the group is fifo" if group.is_fifo else "by the configuration"
    return [("retries", f"{_RETRIES[in_force]}, {source}")]


def _delays(policy: RetryPolicy) -> str:
    """Return the delay after each attempt except the last; equal neighbours are merged."""
    if policy.max_attempts == 1:
        return "none: the first failure is the last"
    texts = []
    for wait_ms, run in groupby(range(1, policy.max_attempts), key=lambda attempt: delay_ms(policy, attempt)):
        numbers = list(run)
        span = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        texts.append(f"{span}: {format_duration(wait_ms)}")
    shown = texts if len(texts) <= _SPANS_SHOWN else [*texts[: _SPANS_SHOWN - 2], "...", texts[-1]]
    return ", ".join(shown)


class DeadLetterHandling(StrEnum):
    """Handling of the dead letters of a removed group."""

    KEEP = "keep"
    REMOVE = "remove"


@app.command()
@with_reason
def create(session: Session, *, group: GroupArgument) -> None:
    """Create a group with the default policy; fail if it exists."""
    with session.connect() as client:
        made = client.create_group(group)
    session.show_facts(made, [("group", made.name)])


@app.command()
@with_reason
def rm(
    session: Session,
    *,
    group: GroupArgument,
    force: Annotated[
        bool, typer.Option("--force", help="Remove the group even if it has unread messages or retries.")
    ] = False,
    dead_letters: Annotated[
        DeadLetterHandling,
        typer.Option("--dead-letters", help="Keep or remove the dead letters of the group."),
    ] = DeadLetterHandling.KEEP,
    consent: Consent,
) -> None:
    """Remove a group with its settings, positions and retries.

    The command shows the losses and asks for confirmation. The dead letters remain under the name of the group:
    'dmq dead groups' lists them, and 'dmq dead ls', 'show', 'redrive' and 'purge' accept the name. 'dmq topic rm
    %DLQ%GROUP' removes their topic. With '--dead-letters remove' they are removed with the group. A removal that
    has begun is completed, also after a restart.
    """
    removes = dead_letters is DeadLetterHandling.REMOVE
    with session.connect() as client:
        found = client.group(group, with_unread=True)
        losses = _losses(found, removes=removes)
        needs_force = bool(found.unread or found.waiting)
        text = f"group {group} would be removed: {', '.join(losses) or 'nothing is lost'}"
        plain = {"group": group, "waiting": found.waiting, "leased": found.leased, "dead": found.dead}
        plain |= {"unread": {each.topic: each.unread for each in found.unread}, "needs_force": needs_force}
        asks = bool(losses) and (force or not needs_force)  # otherwise the daemon refuses it, without a prompt
        would = text + "; it needs --force" * (needs_force and consent.dry_run)
        if not is_confirmed(session, would, plain | {"is_dry_run": True}, consent, asks=asks):
            return
        client.remove_group(group, force=force, with_dead_letters=removes)
    fate, kept = ("removed", 0) if removes else ("kept", found.dead)
    facts = [("removed", group), ("dead letters", f"{found.dead:,} {fate}" if found.dead else "")]
    session.show_facts({"group": group, "removed": True, "dead_letters": fate, "dead": kept}, facts)


def _losses(group: wire.Group, *, removes: bool) -> list[str]:
    """Describe the contents of a group and the effect of its removal on each."""
    facts = [f"{each.unread:,} of topic {each.topic} unread" for each in group.unread]
    facts += [f"{group.leased:,} of these handed out or hidden"] if group.leased else []
    facts += [f"{group.waiting:,} retries wait"] if group.waiting else []
    stay = "are given up" if removes else "stay under its name"
    return facts + ([f"{group.dead:,} dead letters {stay}"] if group.dead else [])


@app.command()
@with_reason
def reset(
    session: Session,
    *,
    group: GroupArgument,
    topic: TopicArgument,
    to: Annotated[
        str, typer.Option("--to", help="begin, end, or a time such as 2026-01-31T10:00:00Z or epoch milliseconds.")
    ],
    consent: Consent,
) -> None:
    """Move the position of a group in a topic.

    The command shows the unread messages and asks for confirmation. Skipped messages count as consumed; messages
    after the new position are delivered again. Retries are not affected.
    """
    from dmq.admin import admin_v1 as wire

    request = wire.ResetGroupRequest(group=group, topic=topic)
    to = {"beginning": "begin"}.get(to, to)
    match to:
        case "begin":
            request.begin = True
        case "end":
            request.end = True
        case _:
            request.at_ms = point_ms(to, "--to", besides="begin, end, ")
    with session.connect() as client:
        if not _is_wanted(session, client, topic, group, to, consent):
            return
        offsets = list(client.reset_group(request))
    numbers = ("QUEUE", "OFFSET")
    rows = [(str(queue), f"{offset:,}") for queue, offset in enumerate(offsets)]
    session.show_table({"group": group, "topic": topic, "offsets": offsets}, numbers, rows, numbers=numbers)


def _is_wanted(session: Session, client: AdminClient, name: str, group: str, to: str, consent: Consent) -> bool:
    """Confirm the reset of a group and return True; for a dry run show its effect and return False."""
    if consent.yes and not consent.dry_run:
        return True
    topic = client.topic(name)
    unread = next((each.unread for each in topic.readers if each.group == group), None)
    if unread is None:
        if consent.dry_run:
            raise CommandFailed(f"group {group} has never read topic {topic.name}", ExitCode.NOT_FOUND)
        return True  # the daemon refuses it
    then = {
        "begin": "all of them would come",
        "end": "these would be skipped",
    }.get(to, "those that were stored before would be skipped, and the others come")
    unread_text = f"{unread:,} of the {topic.stored:,} messages of topic {topic.name} are unread by group {group}"
    plain = {"group": group, "topic": topic.name, "stored": topic.stored, "unread": unread, "is_dry_run": True}
    asks = {"begin": topic.stored > unread, "end": bool(unread)}.get(to, bool(topic.stored))  # else nothing changes
    return is_confirmed(session, f"{unread_text}; from {to} on, {then}", plain, consent, asks=asks)
