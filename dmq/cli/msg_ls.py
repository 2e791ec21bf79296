"""``dmq msg ls``: what a topic holds, in its queues and on the timeline; looking changes nothing."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli import output as out
from dmq.cli.options import AddressOption, OutputOption, TimeoutOption, session_of
from dmq.cli.progress import Progress
from dmq.cli.spool_options import instant_ms

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire

_LIMIT_MAX = 10_000
_PAGE = 100
_TIMES = "RFC 3339, epoch milliseconds, +5m or -1h from now"


class State(StrEnum):
    """Where messages are: on the timeline until their time, or in a queue."""

    WAITING = "waiting"
    READY = "ready"


def ls(
    ctx: typer.Context,
    *,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")],
    state: Annotated[State | None, typer.Option(help="Only those that wait for their time, or are in queues.")] = None,
    due_after: Annotated[str | None, typer.Option(metavar="TIME", help=f"Due then or later: {_TIMES}.")] = None,
    due_before: Annotated[str | None, typer.Option(metavar="TIME", help="Due before.")] = None,
    key: Annotated[str, typer.Option(metavar="KEY", help="Those with this lookup word.")] = "",
    tag: Annotated[str, typer.Option(metavar="TAG", help="Those with this filter word.")] = "",
    newest: Annotated[bool, typer.Option("--newest", help="What is due or was stored last comes first.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=_LIMIT_MAX, help="How many at most.")] = 20,
    after: Annotated[str, typer.Option(metavar="CURSOR", help="Go on behind a list that said so.")] = "",
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """List the messages of a topic: what is in its queues, acknowledged or not, then what waits, the next one first.

    Due is a message without a delivery time when it was stored. The daemon looks at a bounded number of messages at a
    time, so a list that finds little takes a while and holds up nobody.
    """
    session = session_of(ctx, address, output, timeout)
    from dmq.admin import admin_v1 as wire

    states = {State.WAITING: wire.WAITING, State.READY: wire.QUEUED}
    request = wire.ListMessagesRequest(
        topic=topic,
        state=states[state] if state is not None else None,
        due_after_ms=instant_ms(due_after, "--due-after") or 0,
        due_before_ms=instant_ms(due_before, "--due-before") or 0,
        key=key,
        tag=tag,
        newest_first=newest,
        token=after,
    )
    found: list[wire.ListedMessage] = []
    with session.connect() as client, Progress(f"messages of {topic}", quiet=session.as_json) as progress:
        while True:
            request.limit = min(_PAGE, limit - len(found))
            page = client.messages(request)
            found += page.messages
            request.token = page.next_token
            progress.show(f"{len(found):,} found", done=len(found), of=limit)
            if len(found) >= limit or not page.next_token:
                break
    if session.as_json:
        out.show_json({"messages": [out.to_plain(each) for each in found], "next": request.token or None})
        return
    headings = ("STATE", "DUE", "STORED", "MESSAGE ID", "QUEUE", "OFFSET", "TAG", "KEYS", "BYTES")
    out.show_table(headings, [_row(each) for each in found], numbers=("QUEUE", "OFFSET", "BYTES"))
    if request.token:
        typer.echo(f"dmq: there may be more: --after {request.token}", err=True)


def _row(message: wire.ListedMessage) -> tuple[str, ...]:
    content = message.content if message.HasField("content") else None
    is_ready = message.queue_id >= 0
    return (
        State.READY if is_ready else State.WAITING,
        out.when(message.deliver_at_ms),
        out.when(message.stored_at_ms),
        message.message_id,
        str(message.queue_id) if is_ready else "",
        str(message.queue_offset) if is_ready else "",
        content.tag if content is not None else "",
        " ".join(content.keys) if content is not None else "",
        f"{content.body_bytes}" if content is not None else "cannot be read",
    )
