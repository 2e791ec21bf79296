"""``dmq activity``: changes by operators, and their callers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli.nouns import noun
from dmq.cli.output import output as out
from dmq.cli.output.errors import CommandFailed, ExitCode
from dmq.cli.output.times import instant_ms
from dmq.cli.session.options import LimitOption, Session, with_session, with_watch

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire

app = noun("activity")

_PAGE = 1_000


@app.command()
@with_watch
@with_session
def ls(
    session: Session,
    *,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="WHEN", help="Only changes that began at this time or later, such as -1h."),
    ] = None,
    key: Annotated[str, typer.Option("--key", metavar="KEY", help="Only changes by this access key.")] = "",
    limit: LimitOption = 100,
) -> None:
    """List the changes by operators, the newest first.

    Each row shows the time, the access key, the address, the change, the reason and the result. The daemon keeps
    the last 1,000 changes; the audit trail keeps all of them, as OPERATED events.
    """
    since_ms = instant_ms(since, "--since") or 0
    found: list[wire.Activity] = []
    with session.connect() as client:
        before = 0
        while len(found) < limit:
            page = client.activity(since_ms=since_ms, key=key, before=before, limit=min(_PAGE, limit - len(found)))
            found += page.activities
            before = page.next_before
            if not before:
                break
        now_ms = 0 if session.as_json else client.now_ms()
    session.show_table(
        found,
        ("#", "WHEN", "KEY", "ADDRESS", "CALL", "OF", "OUTCOME", "WHY"),
        [
            (
                *(str(each.number), out.distance(each.began_at_ms, now_ms)),
                *(each.key, each.address, each.rpc, _of(each)),
                *(f"{each.outcome}: {each.error}" if each.error else each.outcome, each.why),
            )
            for each in found
        ],
        numbers=("#",),
        details=("ADDRESS",),
    )


@app.command()
@with_session
def show(
    session: Session,
    *,
    number: Annotated[
        int, typer.Argument(metavar="NUMBER", min=1, help="Number of the change, as listed by 'dmq activity ls'.")
    ],
) -> None:
    """Show all details of one change."""
    with session.connect() as client:
        found = client.activity(before=number + 1, limit=1).activities
    if not found or found[0].number != number:
        raise CommandFailed(f"activity {number} does not exist or is no longer kept", ExitCode.NOT_FOUND)
    (activity,) = found
    ended = out.when(activity.ended_at_ms) if activity.ended_at_ms else "-"
    session.show_facts(
        activity,
        [
            *(("call", activity.rpc), ("topic", activity.topic), ("group", activity.group), ("what", activity.what)),
            *(("key", activity.key or "-"), ("address", activity.address), ("why", activity.why or "-")),
            *(("began", out.when(activity.began_at_ms)), ("ended", ended)),
            ("outcome", f"{activity.outcome}: {activity.error}" if activity.error else activity.outcome),
        ],
    )


def _of(activity: wire.Activity) -> str:
    named = [f"topic {activity.topic}" if activity.topic else "", f"group {activity.group}" if activity.group else ""]
    return ", ".join(each for each in (*named, activity.what) if each)
