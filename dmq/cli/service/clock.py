"""``dmq clock``: the clock state of the daemon's host, and its confirmation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from dmq.cli.bulk.engine import is_confirmed
from dmq.cli.nouns import CommandGroup, noun
from dmq.cli.output.facts import clock_line
from dmq.cli.session.options import Consent, Session, with_reason, with_session
from dmq.config.units import format_duration, format_time

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire


class _ShownAlone(CommandGroup):
    """Command group that runs ``show`` without a subcommand."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # vendored base
        """Run ``show`` if no command is given."""
        return super().parse_args(ctx, args or ["show"])


app = noun("clock", _ShownAlone)


@app.command()
@with_session
def show(session: Session) -> None:
    """Show the host clock and the actions on hold after a clock step."""
    with session.connect() as client:
        found = client.clock()
    session.show_facts(found, _facts(found))


@app.command()
@with_reason
def accept(session: Session, *, consent: Consent) -> None:
    """Accept the host clock as correct and continue the actions on hold.

    A clock step holds the delivery of messages that are due by this clock, retention, and the deletion of old dates
    of the trail. The command cannot be undone. It shows the pending messages and asks for confirmation.
    """
    from dmq.admin import admin_v1 as wire

    with session.connect() as client:
        answer = wire.AcceptClockResponse(clock=client.clock())
        if answer.clock.is_held or not answer.clock.is_steady:
            if consent.dry_run or not consent.yes:
                timeline = client.status().timeline
                due = {"pending": timeline.pending, "next_due_at_ms": timeline.next_due_at_ms}
                plain = {"has_changed": False, "clock": answer.clock, **due, "is_dry_run": True}
                if not is_confirmed(session, _would(answer.clock, timeline), plain, consent):
                    return
            answer = client.accept_clock(session.why)
    accepted = ("accepted", "yes" if answer.has_changed else "nothing waited for it")
    session.show_facts(answer, [accepted, *_facts(answer.clock)])


def _would(clock: wire.Clock, timeline: wire.Timeline) -> str:
    next_due = f", the next is due at {format_time(timeline.next_due_at_ms)}" if timeline.next_due_at_ms else ""
    ahead = f"{format_duration(max(0, clock.wall_ms - clock.believed_ms))} ahead"
    clock_goes = f"the daemon's clock would continue from {format_time(clock.wall_ms)}, {ahead}"
    removal = "messages and dates that are too old by it are removed"
    return f"{clock_goes}: {timeline.pending:,} pending messages{next_due}, and {removal}"


def _facts(clock: wire.Clock) -> list[tuple[str, str]]:
    return [
        ("clock", clock_line(clock)),
        ("host", format_time(clock.wall_ms)),
        ("believed", format_time(clock.believed_ms)),
        ("steps", f"{clock.steps:,} since the daemon was started"),
    ]
