"""``dmq topic``: topics."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli import output as out
from dmq.cli.confirm import confirm
from dmq.cli.errors import CommandFailed, ExitCode
from dmq.cli.keep_options import KeepBytesOption, KeepTimeOption, KeepUnreadOption, keep_change, keep_facts
from dmq.cli.options import AddressOption, OutputOption, Session, TimeoutOption, session_of

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire


class Type(StrEnum):
    """Which messages a topic takes."""

    MIXED = "mixed"
    NORMAL = "normal"
    FIFO = "fifo"
    DELAY = "delay"
    TRANSACTION = "transaction"


TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")]
TypeOption = Annotated[
    Type | None, typer.Option("--type", case_sensitive=False, help="The only type of message it takes; mixed: all.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Also if messages wait or are unread: they are lost.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def ls(
    ctx: typer.Context,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """List the topics: their type, queues, messages in them, messages that wait for their delivery time."""
    session = session_of(ctx, address, output, timeout)
    with session.connect() as client:
        topics = client.topics().topics
    if session.as_json:
        out.show_json([out.to_plain(topic) for topic in topics])
        return
    out.show_table(
        ("TOPIC", "QUEUES", "STORED", "PENDING", "TYPE"),
        [
            (topic.name, str(topic.queues), f"{topic.stored:,}", f"{topic.pending:,}", topic.type.lower())
            for topic in topics
        ],
        numbers=("QUEUES", "STORED", "PENDING"),
    )


def show(
    ctx: typer.Context,
    *,
    topic: TopicArgument,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Show a topic: its type and queues, what is in it, and how much of that each group has not finished."""
    session = session_of(ctx, address, output, timeout)
    with session.connect() as client:
        found = client.topic(topic)
    _show(session, found)


def create(
    ctx: typer.Context,
    *,
    topic: TopicArgument,
    type_: TypeOption = None,
    queues: Annotated[int, typer.Option("--queues", min=0, help="How many.  [default: queues_per_topic]")] = 0,
    keep_time: KeepTimeOption = None,
    keep_bytes: KeepBytesOption = None,
    keep_unread: KeepUnreadOption = None,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Make a topic. It is an error if there is one of that name."""
    keep = keep_change(keep_time, keep_bytes, keep_unread)
    session = session_of(ctx, address, output, timeout)
    with session.connect() as client:
        made = client.create_topic(topic, queues=queues, type_=type_.name if type_ is not None else "", keep=keep)
    _show(session, made)


def set_(
    ctx: typer.Context,
    *,
    topic: TopicArgument,
    type_: TypeOption = None,
    queues: Annotated[int, typer.Option("--queues", min=0, help="More than there are.")] = 0,
    keep_time: KeepTimeOption = None,
    keep_bytes: KeepBytesOption = None,
    keep_unread: KeepUnreadOption = None,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Change a topic, and print what counts now. What is not given stays, and what is in it already too."""
    keep = keep_change(keep_time, keep_bytes, keep_unread)
    if type_ is None and not queues and keep is None:
        raise CommandFailed("say what to change; see 'dmq topic set --help'", ExitCode.USAGE)
    session = session_of(ctx, address, output, timeout)
    with session.connect() as client:
        changed = client.set_topic(topic, queues=queues, type_=type_.name if type_ is not None else "", keep=keep)
    _show(session, changed)


def rm(
    ctx: typer.Context,
    *,
    topic: TopicArgument,
    force: ForceOption = False,
    yes: YesOption = False,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Remove a topic and the place of every group in it; refused while messages wait or are unread.

    Dead letters that came of it stay. A removal that was begun goes on by itself, also after a restart.
    """
    session = session_of(ctx, address, output, timeout)
    if force:
        confirm(f"topic {topic} and all its messages will be lost", yes=yes)
    with session.connect() as client:
        client.remove_topic(topic, force=force)
    if session.as_json:
        out.show_json({"topic": topic, "removed": True})
    else:
        out.show_facts([("removed", topic)])


def _show(session: Session, topic: wire.Topic) -> None:
    if session.as_json:
        out.show_json(out.to_plain(topic))
        return
    out.show_facts(
        [
            ("topic", topic.name),
            ("type", topic.type.lower()),
            ("queues", str(topic.queues)),
            ("stored", f"{topic.stored:,}"),
            ("pending", f"{topic.pending:,}"),
            *keep_facts(topic),
            *((f"queue {each.queue_id}", f"{each.begin_offset:,} to {each.end_offset:,}") for each in topic.ranges),
            *((f"unread by {reader.group}", f"{reader.unread:,}") for reader in topic.readers),
        ]
    )
