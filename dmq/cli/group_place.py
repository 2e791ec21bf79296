"""``dmq group create|reset|rm``: groups as objects, and their place in topics."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli import output as out
from dmq.cli.confirm import confirm
from dmq.cli.group import GroupArgument
from dmq.cli.options import AddressOption, OutputOption, TimeoutOption, session_of
from dmq.cli.times import At, parse_when
from dmq.cli.topic import TopicArgument, YesOption

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire


class DeadLetters(StrEnum):
    """What becomes of the dead letters of a group that is removed."""

    KEEP = "keep"
    REMOVE = "remove"


ForceOption = Annotated[bool, typer.Option("--force", help="Also if it has something unread, or retries that wait.")]


def create(
    ctx: typer.Context,
    *,
    group: GroupArgument,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Make a consumer group with the default policy. It is an error if there is one of that name."""
    session = session_of(ctx, address, output, timeout)
    with session.connect() as client:
        made = client.create_group(group)
    if session.as_json:
        out.show_json(out.to_plain(made))
    else:
        out.show_facts([("group", made.name)])


def rm(
    ctx: typer.Context,
    *,
    group: GroupArgument,
    force: ForceOption = False,
    dead_letters: Annotated[
        DeadLetters,
        typer.Option("--dead-letters", help="Keep them under the name of the group, or give them up with it."),
    ] = DeadLetters.KEEP,
    yes: YesOption = False,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Remove a group: its settings, its place in every topic, its retries. Says what lies in it, and asks.

    Its dead letters stay under its name: 'dmq dead groups' lists it, 'dead ls', 'show', 'redrive' and 'purge' take it,
    and 'dmq topic rm %DLQ%GROUP' removes their topic in the end. With '--dead-letters remove' they go at once. A
    removal that was begun goes on by itself, also after a restart.
    """
    session = session_of(ctx, address, output, timeout)
    removes = dead_letters is DeadLetters.REMOVE
    with session.connect() as client:
        found = client.group(group, with_unread=True)
        lying = _lying(found, removes=removes)
        is_done = not (found.unread or found.waiting)  # else it is refused without --force, and nobody is asked
        if lying and (force or is_done):
            confirm(f"group {group} will be removed: {', '.join(lying)}", yes=yes)
        client.remove_group(group, force=force, with_dead_letters=removes)
    if session.as_json:
        kept = 0 if removes else found.dead
        out.show_json({"group": group, "removed": True, "dead_letters": "removed" if removes else "kept", "dead": kept})
    else:
        facts = [("removed", group)]
        if found.dead:
            facts.append(("dead letters", f"{found.dead:,} {'removed' if removes else 'kept'}"))
        out.show_facts(facts)


def _lying(group: wire.Group, *, removes: bool) -> list[str]:
    """Say what lies in a group, and what becomes of it."""
    facts = [f"{each.unread:,} of topic {each.topic} unread" for each in group.unread]
    facts += [f"{group.leased:,} of these handed out or hidden"] if group.leased else []
    facts += [f"{group.waiting:,} retries wait"] if group.waiting else []
    stay = "are given up" if removes else "stay under its name"
    return facts + ([f"{group.dead:,} dead letters {stay}"] if group.dead else [])


def reset(
    ctx: typer.Context,
    *,
    group: GroupArgument,
    topic: TopicArgument,
    to: Annotated[str, typer.Option("--to", help="begin, end, or a time: 2026-01-31T10:00:00Z, epoch milliseconds.")],
    yes: YesOption = False,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Let a group go on from the beginning of a topic, its end, or what was stored from a time on.

    What it skips is finished for it; what it gets again is delivered anew. Retries come all the same.
    """
    from dmq.admin import admin_v1 as wire

    request = wire.ResetGroupRequest(group=group, topic=topic)
    match to:
        case "begin":
            request.begin = True
        case "end":
            request.end = True
        case _:
            request.at_ms = _time_of(to)
    session = session_of(ctx, address, output, timeout)
    confirm(f"group {group} will go on from {to} of topic {topic}", yes=yes)
    with session.connect() as client:
        offsets = list(client.reset_group(request))
    if session.as_json:
        out.show_json({"group": group, "topic": topic, "offsets": offsets})
    else:
        out.show_table(
            ("QUEUE", "OFFSET"),
            [(str(queue), f"{offset:,}") for queue, offset in enumerate(offsets)],
            numbers=("QUEUE", "OFFSET"),
        )


def _time_of(text: str) -> int:
    try:
        when = parse_when(text)
    except ValueError as error:
        raise typer.BadParameter(f"begin, end, or a time: {error}", param_hint="--to") from error
    if not isinstance(when, At):
        raise typer.BadParameter("a time that is over is expected", param_hint="--to")
    return when.epoch_ms
