"""``dmq topic``: topics."""

from __future__ import annotations

import typer

from dmq.cli import output as out
from dmq.cli.options import AddressOption, OutputOption, TimeoutOption, session_of


def ls(
    ctx: typer.Context,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """List the topics: queues, messages in them, messages that wait for their delivery time."""
    session = session_of(ctx, address, output, timeout)
    with session.connect() as client:
        topics = client.topics().topics
    if session.as_json:
        out.show_json([out.to_plain(topic) for topic in topics])
        return
    out.show_table(
        ("TOPIC", "QUEUES", "STORED", "PENDING"),
        [(topic.name, str(topic.queues), f"{topic.stored:,}", f"{topic.pending:,}") for topic in topics],
        numbers=("QUEUES", "STORED", "PENDING"),
    )
