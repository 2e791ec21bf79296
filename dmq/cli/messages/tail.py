"""``dmq tail``: new messages of a topic, as they become visible."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from broker_adapter.wire.plain import to_plain
from dmq.cli.nouns import single
from dmq.cli.output import output as out
from dmq.cli.output.facts import masking_of
from dmq.cli.output.watch import Outage, wait
from dmq.cli.session.options import Session, TopicArgument, UnmaskedOption, with_session
from dmq.config.units import format_time

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire
    from dmq.admin.client import AdminClient

app = single()

_POLL_S = 0.5
_RETRY_S = 1.0
_PAGE = 100  # messages of one queue in one call


class TailFilter(NamedTuple):
    """Messages to print: those with the tag and the key; an empty one stands for any."""

    tag: str = ""
    key: str = ""

    def has(self, message: wire.PeekedMessage) -> bool:
        """Return True if the message is printed."""
        content = message.content
        return (not self.tag or content.tag == self.tag) and (not self.key or self.key in content.keys)


class TailPosition:
    """Position in the queues of a topic. It starts at their ends, and holds no lease and nothing in the daemon."""

    def __init__(self, topic: str, *, with_body: bool, unmasked: bool = False) -> None:
        self._topic = topic
        self._with_body = with_body
        self._unmasked = unmasked
        self._offsets: dict[int, int] | None = None
        self.is_at_end = True

    def read(self, client: AdminClient) -> list[wire.PeekedMessage]:
        """Return the next messages by storage time, at most a page of each queue.

        If the daemon fails, the position is unchanged: the next call returns the same messages.
        """
        ranges = client.count(self._topic).queues
        if self._offsets is None:
            self._offsets = {each.queue_id: each.end_offset for each in ranges}
            return []
        offsets = dict[int, int]()
        found: list[wire.PeekedMessage] = []
        is_at_end = True
        for each in ranges:
            at = self._checked(each, self._offsets.get(each.queue_id, each.begin_offset))
            if at < each.end_offset:
                page = self._page(client, each.queue_id, at)
                found += page.messages
                at = page.next_offset
            offsets[each.queue_id] = at
            is_at_end &= at >= each.end_offset
        self._offsets, self.is_at_end = offsets, is_at_end
        return sorted(found, key=lambda message: message.stored_at_ms)

    def _checked(self, found: wire.QueueRange, at: int) -> int:
        """Return the offset, or the first one of the queue if the queue does not have it."""
        if found.begin_offset <= at <= found.end_offset:
            return at
        if at < found.begin_offset:
            removed = out.counted(found.begin_offset - at, "message")
            out.note(f"queue {found.queue_id}: retention removed {removed} before they were read")
        else:
            out.note(f"queue {found.queue_id}: the topic was created again, or its store restored")
        return found.begin_offset

    def _page(self, client: AdminClient, queue_id: int, at: int) -> wire.PeekMessagesResponse:
        from dmq.admin.client import CallRefused

        try:
            return client.peek(
                self._topic, queue_id, at, limit=_PAGE, with_body=self._with_body, unmasked=self._unmasked
            )
        except CallRefused:
            begin = next(each.begin_offset for each in client.count(self._topic).queues if each.queue_id == queue_id)
            if begin <= at:
                raise
            from dmq.admin import admin_v1 as wire

            return wire.PeekMessagesResponse(next_offset=at)  # removed since they were counted


@app.command()
@with_session
def tail(
    session: Session,
    *,
    topic: TopicArgument,
    tag: Annotated[str, typer.Option(metavar="TAG", help="Only messages with this tag.")] = "",
    key: Annotated[str, typer.Option(metavar="KEY", help="Only messages with this key.")] = "",
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, help="End after this number of messages.  [default: no end]")
    ] = None,
    body: Annotated[bool, typer.Option("--body", help="Include bodies (base64 in JSON).")] = False,
    unmasked: UnmaskedOption = False,
) -> None:
    """Print new messages of a topic as they become visible.

    A message without a delay is visible at once, a delayed one at its delivery time; 'dmq msg ls' lists those that
    are pending. The command takes no lease, so consumers get the same messages. It continues after a restart of the
    daemon, without a gap. Ctrl-C ends it. With -o json, each message is one line.
    """
    chosen, position, outage = TailFilter(tag, key), TailPosition(topic, with_body=body, unmasked=unmasked), Outage()
    printed = 0
    with suppress(KeyboardInterrupt):
        while True:
            with outage, session.connect() as client:
                while True:
                    found = position.read(client)
                    outage.answered()
                    for message in filter(chosen.has, found):
                        typer.echo(_json(message) if session.as_json else _line(message))
                        printed += 1
                        if printed == limit:
                            return
                    if position.is_at_end:
                        wait(_POLL_S)
            wait(_RETRY_S)


def _json(message: wire.PeekedMessage) -> str:
    # Escaped as ASCII: exact, independent of the terminal and its encoding.
    return json.dumps(to_plain(message), separators=(",", ":"))


def _line(message: wire.PeekedMessage) -> str:
    """Return a line of text; lateness and size are left out if the terminal is too narrow."""
    from rich.cells import cell_len

    content = message.content
    is_readable = message.HasField("content")
    place = f"{message.queue_id}/{message.queue_offset}"
    tag = content.tag if is_readable else "CANNOT BE READ"
    parts = (format_time(message.stored_at_ms)[11:], message.message_id, place, tag, " ".join(content.keys))
    body = out.body_text(content.body) if content.HasField("body") else masking_of(content)
    line = "  ".join(filter(None, (*parts, body)))
    columns = out.terminal_columns()
    late = f"{out.about(message.stored_at_ms - message.deliver_at_ms)} late" if message.deliver_at_ms else ""
    for detail in (late, f"{content.body_bytes} B" if is_readable else ""):
        if detail and (columns is None or cell_len(line) + 2 + len(detail) <= columns):
            line += f"  {detail}"
    return out.printable(line)
