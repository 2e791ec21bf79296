"""``dmq client``: the clients that are connected."""

from __future__ import annotations

from typing import Annotated

import typer

from dmq.cli import output as out
from dmq.cli.errors import CommandFailed
from dmq.cli.options import AddressOption, OutputOption, TimeoutOption, session_of

ClientArgument = Annotated[str, typer.Argument(metavar="CLIENT_ID", help="The client, as 'dmq client ls' shows it.")]

_OK = 20000


def ls(
    ctx: typer.Context,
    group: Annotated[str, typer.Option("--group", "-g", help="Only the consumers of this group.")] = "",
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """List the clients that showed a sign of life within the last two minutes.

    One without a telemetry stream works, and cannot be asked anything; most open theirs again after a restart.
    """
    session = session_of(ctx, address, output, timeout)
    with session.connect() as client:
        found = client.clients(group)
        now_ms = client.status().now_ms
    if session.as_json:
        out.show_json([out.to_plain(each) for each in found])
        return
    out.show_table(
        ("CLIENT", "KIND", "GROUP", "LANGUAGE", "VERSION", "SEEN", "STREAMS"),
        [
            (
                *(each.client_id, each.kind.lower().replace("_", " "), each.group, each.language, each.version),
                *(f"{out.about(max(0, now_ms - each.last_seen_at_ms))} ago", str(each.streams)),
            )
            for each in found
        ],
        numbers=("STREAMS",),
    )


def stack(
    ctx: typer.Context,
    *,
    client: ClientArgument,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Show what the threads of a client do at the moment. Java and Go clients answer; Python's does not."""
    session = session_of(ctx, address, output, timeout)
    with session.connect() as connected:
        found = connected.client_stack(client)
    if session.as_json:
        out.show_json({"client_id": client, "stack": found})
    else:
        typer.echo("\n".join(out.printable(line.expandtabs()) for line in found.splitlines()))


def verify(
    ctx: typer.Context,
    *,
    client: ClientArgument,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic of the message.")],
    message_id: Annotated[str, typer.Argument(metavar="MESSAGE_ID", help="The message.")],
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Have a push consumer consume a message once, to see whether it can.

    Its listener runs with all it does; for the broker nothing changes, whatever comes of it. Java clients answer.
    """
    session = session_of(ctx, address, output, timeout)
    with session.connect() as connected:
        answer = connected.verify(client, topic, message_id)
    if session.as_json:
        out.show_json(out.to_plain(answer))
    elif answer.code == _OK:
        typer.echo(f"{client} consumed {message_id}")
    if answer.code != _OK:
        why = f": {answer.text}" if answer.text else ""
        raise CommandFailed(f"{client} did not consume {message_id} ({answer.code} {answer.code_name}){why}")
