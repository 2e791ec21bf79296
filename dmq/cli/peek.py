"""``dmq msg peek`` and ``dmq msg count``: what lies in the queues of a topic; looking changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli import output as out
from dmq.cli.errors import CommandFailed, ExitCode
from dmq.cli.options import AddressOption, OutputOption, TimeoutOption, session_of

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire
    from dmq.admin.client import AdminClient

_PAGE = 100
_TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")]


def count(
    ctx: typer.Context,
    *,
    topic: _TopicArgument,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Count the messages in the queues of a topic, acknowledged ones included, and those that wait for their time."""
    session = session_of(ctx, address, output, timeout)
    with session.connect() as client:
        found = client.count(topic)
    total = sum(each.end_offset - each.begin_offset for each in found.queues)
    if session.as_json:
        out.show_json({**out.to_plain(found), "messages": total})
        return
    rows = [
        (str(each.queue_id), *(f"{number:,}" for number in _range(each)), f"{each.end_offset - each.begin_offset:,}")
        for each in found.queues
    ]
    numbers = ("QUEUE", "BEGIN", "END", "MESSAGES")
    out.show_table(numbers, rows, numbers=numbers)
    typer.echo(f"{total:,} in queues, {found.pending:,} wait for their time")


def peek(
    ctx: typer.Context,
    *,
    topic: _TopicArgument,
    queue: Annotated[
        int | None, typer.Option(min=0, help="Only this queue; else one after the other, from the first.")
    ] = None,
    offset: Annotated[
        int | None, typer.Option(min=0, help="From this offset of the queue on; else from where it begins.")
    ] = None,
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="How many at most.")] = 10,
    body: Annotated[bool, typer.Option("--body", help="Show bodies as well (base64 in JSON).")] = False,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Show messages as they lie in the queues of a topic. No consumer notices."""
    if offset is not None and queue is None:
        raise typer.BadParameter("an offset is one of a queue: give --queue too", param_hint="--offset")
    session = session_of(ctx, address, output, timeout)
    with session.connect() as client:
        ranges = client.count(topic).queues
        if queue is not None and queue >= len(ranges):
            text = f"topic {topic} has the queues 0 to {len(ranges) - 1}, and no queue {queue}"
            raise CommandFailed(out.printable(text), ExitCode.NOT_FOUND)
        found: list[wire.PeekedMessage] = []
        for each in ranges if queue is None else (ranges[queue],):
            start = each.begin_offset if offset is None else offset
            found += _messages(client, topic, each, start, number - len(found), with_body=body)
            if len(found) >= number:
                break
    if session.as_json:
        out.show_json([out.to_plain(each) for each in found])
        return
    headings = ("QUEUE", "OFFSET", "STORED", "MESSAGE ID", "TAG", "KEYS", "BYTES")
    rows = [_row(each) for each in found]
    if body:
        rows = [(*row, out.body_text(each.content.body)) for row, each in zip(rows, found, strict=True)]
    out.show_table((*headings, "BODY") if body else headings, rows, numbers=("QUEUE", "OFFSET", "BYTES"))


def _messages(
    client: AdminClient, topic: str, within: wire.QueueRange, offset: int, number: int, *, with_body: bool
) -> list[wire.PeekedMessage]:
    """Return up to ``number`` messages from ``offset`` on; an offset outside the queue is the daemon's to refuse."""
    found: list[wire.PeekedMessage] = []
    while True:
        limit = min(_PAGE, number - len(found))
        page = client.peek(topic, within.queue_id, offset, limit=limit, with_body=with_body)
        found += page.messages
        offset = page.next_offset
        if len(found) >= number or offset >= within.end_offset:
            return found


def _range(queue: wire.QueueRange) -> tuple[int, int]:
    return queue.begin_offset, queue.end_offset


def _row(message: wire.PeekedMessage) -> tuple[str, ...]:
    content = message.content if message.HasField("content") else None
    return (
        str(message.queue_id),
        str(message.queue_offset),
        out.when(message.stored_at_ms),
        message.message_id,
        content.tag if content is not None else "",
        " ".join(content.keys) if content is not None else "",
        f"{content.body_bytes}" if content is not None else "cannot be read",
    )
