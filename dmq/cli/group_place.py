"""``dmq group create|reset|rm``: groups as objects, and their place in topics."""

from __future__ import annotations

from typing import Annotated

import typer

from dmq.cli import output as out
from dmq.cli.confirm import confirm
from dmq.cli.group import GroupArgument
from dmq.cli.options import AddressOption, OutputOption, TimeoutOption, session_of
from dmq.cli.times import At, parse_when
from dmq.cli.topic import TopicArgument, YesOption

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
    yes: YesOption = False,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Remove a group: its settings, its place in every topic, its retries. Its dead letters stay.

    A removal that was begun goes on by itself, also after a restart.
    """
    session = session_of(ctx, address, output, timeout)
    if force:
        confirm(f"group {group} will lose its place and its retries", yes=yes)
    with session.connect() as client:
        client.remove_group(group, force=force)
    if session.as_json:
        out.show_json({"group": group, "removed": True})
    else:
        out.show_facts([("removed", group)])


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
