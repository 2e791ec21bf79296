"""``dmq cron``: recurring messages."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from broker_adapter.wire.plain import to_plain
from dmq.cli.nouns import noun
from dmq.cli.output import output as out
from dmq.cli.output.errors import refused, refusing
from dmq.cli.output.facts import content_facts
from dmq.cli.output.times import instant_ms
from dmq.cli.session.options import (
    AfterOption,
    BodyOption,
    LimitOption,
    MessageOptions,
    OptionGroup,
    Session,
    UnmaskedOption,
    with_reason,
    with_session,
    with_watch,
)
from dmq.config.units import format_duration, parse_duration

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire

app = noun("cron")

_PAGE = 1_000
_TIMES = "RFC 3339, epoch milliseconds, +5m or -1h from now"
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the schedule.")]


class CatchUpOption(StrEnum):
    """Handling of occurrences that were due while the daemon could not send."""

    ONE = "one"
    ALL = "all"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOptions(OptionGroup):
    """Options of the rule of a schedule."""

    every: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Fixed interval, such as 30s or 5m; at least 1s.")
    ] = None
    cron: Annotated[
        str | None,
        typer.Option(metavar="EXPRESSION", help="Cron expression of five fields, or @hourly, @daily, @weekly, ..."),
    ] = None
    zone: Annotated[
        str,
        typer.Option(metavar="ZONE", help="Time zone of the cron expression, such as Europe/Paris.  [default: UTC]"),
    ] = ""
    start: Annotated[str | None, typer.Option(metavar="TIME", help=f"Send nothing before this time: {_TIMES}.")] = None
    end: Annotated[str | None, typer.Option(metavar="TIME", help="Send nothing after this time.")] = None
    count: Annotated[
        int, typer.Option(min=0, show_default=False, help="Total number of occurrences.  [default: no limit]")
    ] = 0
    jitter: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Maximum random delay added to each occurrence.")
    ] = None
    catch_up: Annotated[
        CatchUpOption,
        typer.Option(help="Occurrences missed during a downtime: send one message for all, send all, or none."),
    ] = CatchUpOption.ONE

    def schedule(self) -> wire.Schedule:
        """Return a schedule with this rule. Raise a usage error for an invalid one."""
        from dmq.admin import admin_v1 as wire

        if (self.every is None) == (self.cron is None):
            raise refused("give one of them", "--every", "--cron")
        if self.zone and self.cron is None:
            raise refused("a time zone requires --cron", "--zone", given=self.zone)
        return wire.Schedule(
            interval_ms=_duration_ms(self.every, "--every"),
            cron=self.cron,
            time_zone=self.zone,
            start_at_ms=instant_ms(self.start, "--start") or 0,
            end_at_ms=instant_ms(self.end, "--end") or 0,
            count=self.count,
            jitter_ms=_duration_ms(self.jitter, "--jitter"),
            catch_up=self.catch_up.value,
        )


@app.command()
@with_reason
def add(
    session: Session,
    *,
    name: NameArgument,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic to send to.")],
    body: Annotated[str, typer.Argument(metavar="BODY", help="Message body; - reads it from stdin.")],
    rule: RuleOptions,
    options: MessageOptions,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="Replace an existing schedule with other content; it starts from the beginning."
        ),
    ] = False,
) -> None:
    """Add a schedule, which sends a message repeatedly, and print it.

    Running the same command again changes nothing. Each occurrence has its own message id. The properties
    DMQ_SCHEDULE and DMQ_OCCURRENCE contain the name of the schedule and the number of the occurrence.
    """
    schedule = rule.schedule()
    schedule.name, schedule.topic = name, topic
    content = schedule.content
    content.tag, content.message_group = options.tag, options.group
    content.keys.extend(options.key or [])
    content.properties.update(options.properties())
    content.body = sys.stdin.buffer.read() if body == "-" else os.fsencode(body)
    with session.connect() as client:
        made = client.add_schedule(schedule, replace=replace)
    session.show_facts({**to_plain(made.schedule), "is_new": made.is_new}, _facts(made.schedule))
    if not made.is_new and not session.as_json:
        out.note("the schedule exists with the same content; nothing was changed")


@app.command()
@with_watch
@with_session
def ls(
    session: Session,
    *,
    topic: Annotated[str, typer.Option(metavar="TOPIC", help="Only schedules of this topic.")] = "",
    limit: LimitOption = 1_000,
    after: AfterOption = "",
) -> None:
    """List the schedules by name: rule, sent occurrences and next time."""
    found: list[wire.Schedule] = []
    with session.connect() as client:
        while True:
            page = client.schedules(topic=topic, token=after, limit=min(_PAGE, limit - len(found)))
            found += page.schedules
            after = page.next_token
            if len(found) >= limit or not after:
                break
        now_ms = 0 if session.as_json else client.now_ms()
    session.show_table(
        {"schedules": found, "next": after or None},
        ("NAME", "TOPIC", "RULE", "STATE", "OCCURRENCES", "LAST", "NEXT"),
        (
            (
                *(each.name, each.topic, _rule(each), each.state, f"{each.occurrences:,}"),
                *(out.distance(at_ms, now_ms) for at_ms in (each.last_at_ms, each.next_at_ms)),
            )
            for each in found
        ),
        numbers=("OCCURRENCES",),
        details=("OCCURRENCES", "LAST"),
    )
    if after and not session.as_json:
        out.note(f"there may be more: --after {after}")


@app.command()
@with_session
def show(
    session: Session,
    *,
    name: NameArgument,
    body: BodyOption = False,
    unmasked: UnmaskedOption = False,
) -> None:
    """Show a schedule: rule, progress, next times and message."""
    with session.connect() as client:
        found = client.schedule(name, with_body=body, unmasked=unmasked)
    session.show_facts(found, _facts(found))


@app.command()
@with_reason
def pause(session: Session, *, name: NameArgument) -> None:
    """Pause a schedule: it sends nothing until it is resumed."""
    with session.connect() as client:
        found = client.pause_schedule(name)
    session.show_facts(found, _facts(found))


@app.command()
@with_reason
def resume(session: Session, *, name: NameArgument) -> None:
    """Resume a schedule; occurrences missed meanwhile are not sent."""
    with session.connect() as client:
        found = client.resume_schedule(name)
    session.show_facts(found, _facts(found))


@app.command()
@with_reason
def rm(session: Session, *, name: NameArgument) -> None:
    """Remove a schedule; messages that it sent remain."""
    with session.connect() as client:
        found = client.remove_schedule(name)
    plain = {"name": name, "removed": True, "occurrences": found.occurrences}
    session.show_facts(plain, [("removed", name), ("occurrences", f"{found.occurrences:,}")])


def _duration_ms(text: str | None, option: str) -> int:
    if text is None:
        return 0
    with refusing(option, text):
        duration_ms = parse_duration(text)
        if not duration_ms:
            raise ValueError("more than 0 is expected")
    return duration_ms


def _rule(schedule: wire.Schedule) -> str:
    if schedule.interval_ms:
        return f"every {format_duration(schedule.interval_ms)}"
    return f"{schedule.cron} {schedule.time_zone or 'UTC'}"


def _facts(schedule: wire.Schedule) -> list[tuple[str, str]]:
    return [
        ("schedule", schedule.name),
        ("topic", schedule.topic),
        ("rule", _rule(schedule)),
        ("start", out.when(schedule.start_at_ms)),
        ("end", out.when(schedule.end_at_ms)),
        ("count", f"{schedule.count:,}" if schedule.count else ""),
        ("jitter", format_duration(schedule.jitter_ms) if schedule.jitter_ms else ""),
        ("catch up", schedule.catch_up),
        ("state", f"{schedule.state}: {schedule.why}" if schedule.why else schedule.state),
        ("occurrences", f"{schedule.occurrences:,}"),
        ("last", out.when(schedule.last_at_ms)),
        ("next", out.when(schedule.next_at_ms)),
        *(("then", out.when(each)) for each in schedule.following_at_ms),
        *(content_facts(schedule.content) if schedule.HasField("content") else ()),
    ]
