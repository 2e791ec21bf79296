"""``dmq clock``: how the clock of the daemon's host is, and that it is right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli import output as out
from dmq.cli.facts import clock_line
from dmq.cli.nouns import Group, noun
from dmq.cli.options import Session, with_session
from dmq.units import format_time

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire


class _ShownAlone(Group):
    """Shows the clock where nothing else is asked for."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # vendored base
        """Take no command for ``show``."""
        return super().parse_args(ctx, args or ["show"])


app = noun("clock", _ShownAlone)


@app.command()
@with_session
def show(session: Session) -> None:
    """Show the state of the host clock, and what is on hold because it was stepped."""
    with session.connect() as client:
        found = client.clock().clock
    if session.as_json:
        out.show_json(out.to_plain(found))
    else:
        out.show_facts(_facts(found))


@app.command()
@with_session
def accept(
    session: Session,
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="The reason, kept in the audit trail.")] = "",
) -> None:
    """Declare the host clock right: what is on hold goes on at once.

    That is the hand-over of what is due by it, retention, and the deletion of old dates of the trail. It cannot be
    undone: look at 'dmq clock' first.
    """
    with session.connect() as client:
        answer = client.accept_clock(why)
    if session.as_json:
        out.show_json(out.to_plain(answer))
        return
    out.show_facts([("accepted", "yes" if answer.has_changed else "nothing waited for it"), *_facts(answer.clock)])


def _facts(clock: wire.Clock) -> list[tuple[str, str]]:
    return [
        ("clock", clock_line(clock)),
        ("host", format_time(clock.wall_ms)),
        ("believed", format_time(clock.believed_ms)),
        ("steps", f"{clock.steps:,} since the daemon was started"),
    ]
