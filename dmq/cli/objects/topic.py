"""``dmq topic``: topics and their retention, rates and quotas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli.bulk.engine import is_confirmed
from dmq.cli.nouns import noun
from dmq.cli.output import output as out
from dmq.cli.output.errors import CommandFailed, ExitCode, refusing
from dmq.cli.output.facts import flow_word, show_lags, shown_quota
from dmq.cli.session.options import (
    Consent,
    OptionGroup,
    Session,
    TopicArgument,
    with_reason,
    with_session,
    with_watch,
)
from dmq.config.units import format_duration, format_size, format_time, parse_duration, parse_size

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire
    from dmq.admin.client import AdminClient

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
_AS_CONFIGURED = -1


class Unread(StrEnum):
    """Handling of messages past the retention bounds that a known group has not read."""

    YES = "yes"
    NO = "no"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOptions(OptionGroup):
    """Options of the retention of a topic."""

    keep_time: Annotated[str | None, typer.Option(help="Retention time: 72h, none, or default (as configured).")] = None
    keep_bytes: Annotated[str | None, typer.Option(help="Retention size: 10GiB, none, or default (as configured).")] = (
        None
    )
    keep_unread: Annotated[
        Unread | None,
        typer.Option(help="yes: keep messages that a group has not read, at any age; no: remove them."),
    ] = None

    def change(self) -> wire.KeepChange | None:
        """Return the retention change; None if no option is given. Raise a usage error for invalid values."""
        from dmq.admin import admin_v1 as wire

        if self.keep_time is None and self.keep_bytes is None and self.keep_unread is None:
            return None
        return wire.KeepChange(
            time_ms=_number(self.keep_time, parse_duration, "--keep-time"),
            size_bytes=_number(self.keep_bytes, parse_size, "--keep-bytes"),
            unread=self.keep_unread.value if self.keep_unread is not None else "",
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
@with_watch
@with_session
def ls(session: Session) -> None:
    """List the topics with their type, queues, messages and quotas."""
    with session.connect() as client:
        topics = client.topics()
    rows = [
        (
            *(topic.name, str(topic.queues), f"{topic.stored:,}", f"{topic.pending:,}", topic.type.lower()),
            *(flow_word(topic), "; ".join(f"{each.quota} {shown_quota(each)}" for each in topic.quotas)),
        )
        for topic in topics
    ]
    session.show_table(
        topics,
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
    keep_options: KeepOptions,
) -> None:
    """Create a topic; fail if it exists."""
    keep = keep_options.change()
    with session.connect() as client:
        made = client.create_topic(topic, queues=queues or 0, type=type_.name if type_ is not None else "", keep=keep)
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
    keep_options: KeepOptions,
    deliver_rate: Annotated[
        int | None,
        typer.Option(min=0, help="Maximum number of delayed messages delivered per second, oldest first; 0: no limit."),
    ] = None,
    max_pending: Annotated[
        str | None,
        typer.Option(
            help="Maximum number of pending messages; further sends are refused. "
            "none: no limit; default: as configured."
        ),
    ] = None,
    max_pending_bytes: Annotated[
        str | None, typer.Option(help="Maximum bytes of pending messages: 512MiB, none, or default.")
    ] = None,
    send_rate: Annotated[
        str | None,
        typer.Option(
            help="Maximum send rate, in messages per second; further sends are refused. A number, none, or default."
        ),
    ] = None,
    index_property: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Index a user property, so that 'dmq find NAME=VALUE' finds messages. Earlier messages are added in "
            "the background. May be repeated; at most 8 for a topic.",
        ),
    ] = None,
    no_index_property: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Remove the index of a user property. May be repeated."),
    ] = None,
) -> None:
    """Change the settings of a topic and print the result.

    Settings without an option are unchanged.
    """
    keep = keep_options.change()
    limits = (
        quota_of(max_pending, _count, "--max-pending"),
        quota_of(max_pending_bytes, parse_size, "--max-pending-bytes"),
        quota_of(send_rate, _count, "--send-rate"),
    )
    others = keep, deliver_rate, *limits, index_property, no_index_property
    if type_ is None and not queues and all(each is None for each in others):
        raise CommandFailed("no change is given; see 'dmq topic set --help'", ExitCode.USAGE)
    type_name = type_.name if type_ is not None else ""
    with session.connect() as client:
        changed = client.set_topic(
            topic,
            queues=queues or 0,
            type=type_name,
            keep=keep,
            deliver_rate=deliver_rate,
            max_pending=limits[0],
            max_pending_bytes=limits[1],
            send_rate=limits[2],
            index_properties=index_property or (),
            no_index_properties=no_index_property or (),
        )
    _show(session, changed)


@app.command()
@with_reason
def pause(session: Session, *, topic: TopicArgument) -> None:
    """Hold delayed messages that become due, until the topic is resumed.

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
    force: Annotated[
        bool, typer.Option("--force", help="Remove the topic even if messages are pending or unread; they are lost.")
    ] = False,
    consent: Consent,
) -> None:
    """Remove a topic and the position of every group in it.

    The removal is refused while messages are pending or unread. The command shows the losses and asks for
    confirmation. The dead letters remain. A removal that has begun is completed, also after a restart.
    """
    with session.connect() as client:
        if not _is_wanted(session, client, topic, consent, force=force):
            return
        client.remove_topic(topic, force=force)
    session.show_facts({"topic": topic, "removed": True}, [("removed", topic)])


def _is_wanted(session: Session, client: AdminClient, name: str, consent: Consent, *, force: bool) -> bool:
    """Confirm the removal of a topic and return True; for a dry run show its effect and return False."""
    if consent.yes and not consent.dry_run:
        return True
    topic = client.topic(name)
    needs_force = bool(topic.pending or (topic.stored and not topic.readers))
    needs_force = needs_force or any(each.unread for each in topic.readers)
    unread = "".join(f", {each.unread:,} unread by group {each.group}" for each in topic.readers if each.unread)
    stored = f"{out.counted(topic.stored, 'message')} in its queues"
    text = f"topic {topic.name} would be removed: {stored}{unread}, {topic.pending:,} pending"
    plain = {"topic": topic.name, "stored": topic.stored, "pending": topic.pending}
    plain |= {"unread": {each.group: each.unread for each in topic.readers}, "needs_force": needs_force}
    asks = bool(topic.stored or topic.pending) and (force or not needs_force)  # else it is refused, without a prompt
    would = text + "; it needs --force" * (needs_force and consent.dry_run)
    return is_confirmed(session, would, plain | {"is_dry_run": True}, consent, asks=asks)


def _show(session: Session, topic: wire.Topic) -> None:
    session.show_facts(
        topic,
        [
            ("topic", topic.name),
            ("type", topic.type.lower()),
            ("queues", str(topic.queues)),
            ("stored", f"{topic.stored:,}"),
            ("pending", f"{topic.pending:,}"),
            *flow_facts(topic),
            *quota_facts(topic),
            *keep_facts(topic),
            *([("indexed", ", ".join(topic.index_properties))] if topic.index_properties else []),
            *((f"queue {each.queue_id}", f"{each.begin_offset:,} to {each.end_offset:,}") for each in topic.ranges),
        ],
    )
    if not session.as_json:
        show_lags("GROUP", [(reader.group, reader) for reader in topic.readers])
