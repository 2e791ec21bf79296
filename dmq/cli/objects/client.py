"""``dmq client``: connected clients."""

from __future__ import annotations

from typing import Annotated

import typer

from broker_adapter.wire.plain import to_plain
from dmq.cli.nouns import noun
from dmq.cli.output import output as out
from dmq.cli.output.errors import CommandFailed
from dmq.cli.session.options import Session, with_reason, with_session, with_watch

app = noun("client")

ClientArgument = Annotated[str, typer.Argument(metavar="CLIENT_ID", help="Client id, as listed by 'dmq client ls'.")]

_OK = 20000


@app.command()
@with_watch
@with_session
def ls(
    session: Session,
    group: Annotated[str, typer.Option("--group", "-g", help="Only the consumers of this group.")] = "",
) -> None:
    """List the clients that were active in the last two minutes.

    A client without a telemetry stream works, but cannot receive commands. Most clients reopen the stream after a
    restart.
    """
    with session.connect() as client:
        found = client.clients(group)
        now_ms = client.now_ms()
    session.show_table(
        found,
        ("CLIENT", "KIND", "GROUP", "LANGUAGE", "VERSION", "SEEN", "STREAMS"),
        [
            (
                *(each.client_id, each.kind.lower().replace("_", " "), each.group, each.language, each.version),
                *(out.distance(min(each.last_seen_at_ms, now_ms), now_ms), str(each.streams)),
            )
            for each in found
        ],
        numbers=("STREAMS",),
        details=("VERSION", "LANGUAGE"),
    )


@app.command()
@with_session
def stack(session: Session, *, client: ClientArgument) -> None:
    """Show the thread stacks of a client.

    Java and Go clients answer; Python clients do not.
    """
    with session.connect() as connected:
        found = connected.client_stack(client)
    lines = [out.printable(line.expandtabs()) for line in found.splitlines()]
    session.show({"client_id": client, "stack": found}, lambda: typer.echo("\n".join(lines)))


@app.command()
@with_reason
def verify(
    session: Session,
    *,
    client: ClientArgument,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic of the message.")],
    message_id: Annotated[str, typer.Argument(metavar="MESSAGE_ID", help="Message id.")],
) -> None:
    """Check that a push consumer can consume a message.

    The listener of the consumer runs with all its effects; the broker ignores the result. Only Java
    clients answer.
    """
    with session.connect() as connected:
        answer = connected.verify(client, topic, message_id)
    if session.as_json:
        out.show_json(to_plain(answer))
    elif answer.code == _OK:
        typer.echo(out.printable(f"{client} consumed {message_id}"))
    if answer.code != _OK:
        why = f": {answer.text}" if answer.text else ""
        raise CommandFailed(f"{client} did not consume {message_id} ({answer.code} {answer.code_name}){why}")
