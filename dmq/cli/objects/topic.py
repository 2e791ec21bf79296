"""``dmq topic``: topics and their retention, rates and quotas."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli.bulk.confirm import confirm
from dmq.cli.nouns import noun
from dmq.cli.output import output as out
from dmq.cli.output.errors import CommandFailed, ExitCode, refusing
from dmq.cli.output.facts import flow_word, show_lags, shown_quota
from dmq.cli.session.options import DryRunOption, Session, TopicArgument, YesOption, with_reason, with_session
from dmq.config.units import format_duration, format_size, format_time, parse_duration, parse_size

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire

app = noun("topic")


class Type(StrEnum):
    """Message types that a topic accepts."""

    MIXED = "mixed"
    NORMAL = "normal"
    FIFO = "fifo"
    DELAY = "delay"
    TRANSACTION = "transaction"


TypeOption = Annotated[
    Type | None,
    typer.Option("--type", case_sensitive=False, help="Message type of the topic; mixed accepts all types."),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Remove the topic even if messages are pending or unread; they are lost.")
]

DeliverRateOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Maximum hand-over rate, in delayed messages per second, oldest first; 0: no limit.",
    ),
]

_AS_CONFIGURED = -1
MaxPendingOption = Annotated[
    str | None,
    typer.Option(
        "--max-pending",
        help="Maximum number of pending messages; further sends are refused. none: no limit; default: as configured.",
    ),
]
MaxPendingBytesOption = Annotated[
    str | None, typer.Option("--max-pending-bytes", help="Maximum bytes of pending messages: 512MiB, none, or default.")
]
SendRateOption = Annotated[
    str | None,
    typer.Option(
        "--send-rate",
        help="Maximum send rate, in messages per second; further sends are refused. A number, none, or default.",
    ),
]


class Unread(StrEnum):
    """Handling of messages past the retention bounds that a known group has not read."""

    YES = "yes"
    NO = "no"
    DEFAULT = "default"


KeepTimeOption = Annotated[
    str | None, typer.Option("--keep-time", help="Retention time: 72h, none, or default (as configured).")
]
KeepBytesOption = Annotated[
    str | None, typer.Option("--keep-bytes", help="Retention size: 10GiB, none, or default (as configured).")
]
KeepUnreadOption = Annotated[
    Unread | None,
    typer.Option("--keep-unread", help="yes: keep messages that a group has not read, at any age; no: remove them."),
]


def keep_change(time: str | None, size: str | None, unread: Unread | None) -> wire.KeepChange | None:
    """Return the retention change of the options; None if none is given. Raise a usage error for invalid values."""
    from dmq.admin import admin_v1 as wire

    if time is None and size is None and unread is None:
        return None
    return wire.KeepChange(
        time_ms=_number(time, parse_duration, "--keep-time"),
        size_bytes=_number(size, parse_size, "--keep-bytes"),
        unread=unread.value if unread is not None else "",
    )


def _number(text: str | None, parse: Callable[[str], int], option: str) -> int | None:
    if text is None:
        return None
    if text in {"none", "default"}:
        return 0 if text == "none" else _AS_CONFIGURED
    with refusing(option, text):
        number = parse(text)
        if not number:
            raise ValueError("nothing would be kept; none means without a bound")
    return number


def quota_of(text: str | None, parse: Callable[[str], int], option: str) -> int | None:
    """Return the value of a quota option. Raise a usage error if it is invalid."""
    if text is None:
        return None
    if text in {"none", "off", "default"}:
        return _AS_CONFIGURED if text == "default" else 0
    with refusing(option, text):
        return parse(text)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError("a whole number, none or default is expected")
    return int(text)


def quota_facts(topic: wire.Topic) -> list[tuple[str, str]]:
    """Return the facts of the quotas that limit a topic."""
    return [
        (each.quota.replace("_", " "), shown_quota(each) + ("" if each.is_set else " (default)"))
        for each in topic.quotas
    ]


def keep_facts(topic: wire.Topic) -> list[tuple[str, str]]:
    """Return the facts of a topic's retention and of its oldest message."""
    facts = [
        ("keep time", format_duration(topic.keep_time_ms) if topic.keep_time_ms else "no bound", "time"),
        ("keep bytes", format_size(topic.keep_bytes) if topic.keep_bytes else "no bound", "bytes"),
        ("keep unread", "yes" if topic.keep_unread else "no", "unread"),
    ]
    return [
        ("oldest", format_time(topic.oldest_at_ms) if topic.oldest_at_ms else "-"),
        *((name, value if key in topic.keep_own else f"{value} (default)") for name, value, key in facts),
    ]


def flow_facts(topic: wire.Topic) -> list[tuple[str, str]]:
    """Return the facts of a pause or a rate of a topic, and the number of held messages."""
    paused = [("paused", f"since {format_time(topic.paused_since_ms)}")] if topic.paused_since_ms else []
    rate = [("deliver rate", f"{topic.deliver_rate:,} a second at most")] if topic.deliver_rate else []
    held = [("held", f"{topic.held:,} of these")] if topic.held or paused or rate else []
    return [*held, *paused, *rate]


@app.command()
@with_session
def ls(session: Session) -> None:
    """List the topics with their type, queues, messages and quotas."""
    with session.connect() as client:
        topics = client.topics().topics
    if session.as_json:
        out.show_json([out.to_plain(topic) for topic in topics])
        return
    rows = [
        (
            *(topic.name, str(topic.queues), f"{topic.stored:,}", f"{topic.pending:,}", topic.type.lower()),
            *(flow_word(topic), "; ".join(f"{each.quota} {shown_quota(each)}" for each in topic.quotas)),
        )
        for topic in topics
    ]
    out.show_table(
        ("TOPIC", "QUEUES", "STORED", "PENDING", "TYPE", "STATE", "QUOTAS"),
        rows,
        numbers=("QUEUES", "STORED", "PENDING"),
        details=("QUEUES", "TYPE", "QUOTAS"),
    )


@app.command()
@with_session
def show(session: Session, *, topic: TopicArgument) -> None:
    """Show a topic: type, queues, messages, and the lag of each group."""
    with session.connect() as client:
        found = client.topic(topic)
    _show(session, found)


@app.command()
@with_reason
def create(
    session: Session,
    *,
    topic: TopicArgument,
    type_: TypeOption = None,
    queues: Annotated[
        int | None, typer.Option(min=1, help="Number of queues.  [default: as configured, queues_per_topic]")
    ] = None,
    keep_time: KeepTimeOption = None,
    keep_bytes: KeepBytesOption = None,
    keep_unread: KeepUnreadOption = None,
) -> None:
    """Create a topic; fail if it exists."""
    keep = keep_change(keep_time, keep_bytes, keep_unread)
    with session.connect() as client:
        made = client.create_topic(topic, queues=queues or 0, type_=type_.name if type_ is not None else "", keep=keep)
    _show(session, made)


@app.command("set")
@with_reason
def set_(
    session: Session,
    *,
    topic: TopicArgument,
    type_: TypeOption = None,
    queues: Annotated[
        int | None, typer.Option(min=1, help="New number of queues, at least the present number.  [default: unchanged]")
    ] = None,
    keep_time: KeepTimeOption = None,
    keep_bytes: KeepBytesOption = None,
    keep_unread: KeepUnreadOption = None,
    deliver_rate: DeliverRateOption = None,
    max_pending: MaxPendingOption = None,
    max_pending_bytes: MaxPendingBytesOption = None,
    send_rate: SendRateOption = None,
) -> None:
    """Change the settings of a topic and print the result.

    Settings without an option are unchanged.
    """
    keep = keep_change(keep_time, keep_bytes, keep_unread)
    limits = (
        quota_of(max_pending, _count, "--max-pending"),
        quota_of(max_pending_bytes, parse_size, "--max-pending-bytes"),
        quota_of(send_rate, _count, "--send-rate"),
    )
    if type_ is None and not queues and all(each is None for each in (keep, deliver_rate, *limits)):
        raise CommandFailed("no change is given; see 'dmq topic set --help'", ExitCode.USAGE)
    type_name = type_.name if type_ is not None else ""
    with session.connect() as client:
        changed = client.set_topic(
            topic,
            queues=queues or 0,
            type_=type_name,
            keep=keep,
            deliver_rate=deliver_rate,
            max_pending=limits[0],
            max_pending_bytes=limits[1],
            send_rate=limits[2],
        )
    _show(session, changed)


@app.command()
@with_reason
def pause(session: Session, *, topic: TopicArgument) -> None:
    """Hold the due delayed messages of a topic until it is resumed.

    The pause survives restarts, and no message is lost. Messages can still be sent and recalled. Queued messages
    and messages without a delay are delivered; 'dmq group pause' stops the delivery to a group.
    """
    with session.connect() as client:
        changed = client.set_topic(topic, is_paused=True)
    _show(session, changed)


@app.command()
@with_reason
def resume(session: Session, *, topic: TopicArgument) -> None:
    """Release the held messages of a topic, oldest first.

    The rate is 100 messages in the first second and doubles every second, up to the delivery rate of the topic, if
    it has one.
    """
    with session.connect() as client:
        changed = client.set_topic(topic, is_paused=False)
    _show(session, changed)


@app.command()
@with_reason
def rm(
    session: Session,
    *,
    topic: TopicArgument,
    force: ForceOption = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> None:
    """Remove a topic and the position of every group in it.

    The removal is refused while messages are pending or unread. The command shows the losses and asks for
    confirmation. The dead letters remain. A removal that has begun is completed, also after a restart.
    """
    with session.connect() as client:
        if dry_run or not yes:
            found = client.topic(topic)
            needs_force = bool(found.pending or (found.stored and not found.readers))
            needs_force = needs_force or any(each.unread for each in found.readers)
            if dry_run:
                _show_lost(session, found, needs_force=needs_force)
                return
            if (found.stored or found.pending) and (force or not needs_force):  # else it is refused, without a prompt
                confirm(_lost(found), yes=False)
        client.remove_topic(topic, force=force)
    if session.as_json:
        out.show_json({"topic": topic, "removed": True})
    else:
        out.show_facts([("removed", topic)])


def _lost(topic: wire.Topic) -> str:
    unread = "".join(f", {each.unread:,} unread by group {each.group}" for each in topic.readers if each.unread)
    stored = f"{topic.stored:,} message{'' if topic.stored == 1 else 's'} in its queues"
    return f"topic {topic.name} would be removed: {stored}{unread}, {topic.pending:,} pending"


def _show_lost(session: Session, topic: wire.Topic, *, needs_force: bool) -> None:
    if session.as_json:
        facts = {"topic": topic.name, "stored": topic.stored, "pending": topic.pending}
        unread = {each.group: each.unread for each in topic.readers}
        out.show_json({**facts, "unread": unread, "needs_force": needs_force, "is_dry_run": True})
    else:
        typer.echo(out.printable(_lost(topic) + ("; it needs --force" if needs_force else "")))


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
            *flow_facts(topic),
            *quota_facts(topic),
            *keep_facts(topic),
            *((f"queue {each.queue_id}", f"{each.begin_offset:,} to {each.end_offset:,}") for each in topic.ranges),
        ]
    )
    show_lags("GROUP", [(reader.group, reader) for reader in topic.readers])
