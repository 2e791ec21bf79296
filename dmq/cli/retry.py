"""``dmq retry``: retries that wait for their time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from dmq.cli import output as out
from dmq.cli.confirm import confirm
from dmq.cli.errors import CommandFailed, ExitCode, refused
from dmq.cli.histogram import show_due
from dmq.cli.nouns import noun
from dmq.cli.options import GroupArgument, LimitOption, MessageIdsOption, Session, YesOption, with_reason, with_session
from dmq.cli.progress import Progress
from dmq.errors import DmqError

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire
    from dmq.admin.client import AdminClient

app = noun("retry")

_PAGE = 1_000
_ENTRIES_PER_CALL = 1_000

EntryOption = Annotated[
    list[str] | None,
    typer.Option("--entry", metavar="ENTRY", help="Entry, as listed by 'dmq retry ls'; may be repeated."),
]
TopicOption = Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="All messages sent to this topic.")]
AllOption = Annotated[bool, typer.Option("--all", help="All retries of the group.")]


class _Chosen(NamedTuple):
    """Which retries a command means: one of the four."""

    entries: Sequence[str] = ()
    message_ids: Sequence[str] = ()
    topic: str = ""
    is_all: bool = False

    @property
    def is_bulk(self) -> bool:
        return self.is_all or bool(self.topic)


@app.command()
@with_session
def ls(
    session: Session,
    *,
    group: GroupArgument,
    topic: Annotated[str, typer.Option(metavar="TOPIC", help="Only messages sent to this topic.")] = "",
    limit: LimitOption = 50,
) -> None:
    """List the waiting retries of a group, next due first."""
    with session.connect() as client, Progress(f"retries of {group}", quiet=session.as_json) as progress:
        found: list[wire.WaitingRetry] = []
        for page in _pages(client, group, topic=topic, limit=limit):
            found += page
            progress.show(f"{len(found):,} found")
        now_ms = client.status().now_ms
    if session.as_json:
        out.show_json([out.to_plain(retry) for retry in found])
        return
    out.show_table(
        ("DUE IN", "DUE AT", "TOPIC", "MESSAGE ID", "NEXT ATTEMPT", "FIRST FAILED", "ENTRY"),
        [
            (
                out.about(retry.due_at_ms - now_ms) if retry.due_at_ms > now_ms else "now",
                *(out.when(retry.due_at_ms), retry.topic, retry.message_id, str(retry.attempt)),
                *(out.when(retry.first_failed_at_ms), retry.entry),
            )
            for retry in found
        ],
        numbers=("NEXT ATTEMPT",),
    )
    if len(found) == limit:
        out.note(f"the first {limit:,}; --limit shows more")


@app.command()
@with_session
def stats(
    session: Session,
    *,
    group: Annotated[str | None, typer.Argument(metavar="GROUP", help="Only this consumer group.")] = None,
) -> None:
    """Count the waiting retries of each group, and show when they are due."""
    with session.connect() as client, Progress("groups", quiet=session.as_json) as progress:
        names = [group] if group is not None else [found.name for found in client.groups() if found.waiting]
        groups: list[wire.Group] = []
        next_due_ms: dict[str, int] = {}
        for name in names:
            groups.append(client.group(name))
            next_due_ms[name] = next((page[0].due_at_ms for page in _pages(client, name, limit=1) if page), 0)
            progress.show(name, done=len(groups), of=len(names))
        now_ms = client.status().now_ms
    if session.as_json:
        out.show_json(
            [
                {
                    "group": found.name,
                    "waiting": found.waiting,
                    "next_due_at_ms": next_due_ms[found.name],
                    "due": [out.to_plain(bucket) for bucket in found.due],
                }
                for found in groups
            ]
        )
        return
    out.show_table(
        ("GROUP", "RETRYING", "NEXT DUE"),
        [(found.name, f"{found.waiting:,}", out.when(next_due_ms[found.name], now_ms)) for found in groups],
        numbers=("RETRYING",),
    )
    waiting = sum(found.waiting for found in groups)
    due = [(bucket.until_ms, bucket.count) for found in groups for bucket in found.due]
    show_due("RETRIES", due, waiting, now_ms)


@app.command()
@with_reason
def run_now(
    session: Session,
    *,
    group: GroupArgument,
    entry: EntryOption = None,
    message_id: MessageIdsOption = None,
    topic: TopicOption = None,
    everything: AllOption = False,
    yes: YesOption = False,
) -> None:
    """Deliver waiting retries now.

    Select them by --entry or --id, or many of them by --topic or --all.
    """
    chosen = _chosen(entry, message_id, topic, everything=everything)
    with session.connect() as client:
        what = "would become visible to its consumers now"
        moved, gone = _move(client, client.run_retries_now, group, chosen, what, yes=yes, quiet=session.as_json)
    _show_moved(group, moved, gone, "visible now", as_json=session.as_json)


@app.command()
@with_reason
def to_dead(
    session: Session,
    *,
    group: GroupArgument,
    entry: EntryOption = None,
    message_id: MessageIdsOption = None,
    topic: TopicOption = None,
    everything: AllOption = False,
    yes: YesOption = False,
) -> None:
    """Move waiting retries to the dead-letter queue of their group.

    Select them by --entry or --id, or many of them by --topic or --all. 'dmq dead redrive' brings them back.
    """
    chosen = _chosen(entry, message_id, topic, everything=everything)
    with session.connect() as client:
        what = "would go to its dead-letter queue"
        moved, gone = _move(client, client.end_retries, group, chosen, what, yes=yes, quiet=session.as_json)
    _show_moved(group, moved, gone, "in the dead-letter queue", as_json=session.as_json)


def _chosen(
    entries: list[str] | None, message_ids: list[str] | None, topic: str | None, *, everything: bool
) -> _Chosen:
    given = (bool(entries), bool(message_ids), topic is not None, everything)
    if sum(given) != 1 or topic == "":
        raise refused("give one of them", "--entry", "--id", "--topic", "--all")
    return _Chosen(tuple(dict.fromkeys(entries or ())), tuple(message_ids or ()), topic or "", everything)


def _move(
    client: AdminClient,
    call: Callable[[str, Sequence[str]], wire.RunRetriesNowResponse | wire.EndRetriesResponse],
    group: str,
    chosen: _Chosen,
    what: str,
    *,
    yes: bool,
    quiet: bool,
) -> tuple[int, int]:
    """Find what is meant, ask if it is many, and call for it in chunks; returns how many moved, and how many had."""
    entries, gone = chosen.entries, 0
    if not chosen.entries:
        # All of them before the first call: one that runs now may fail and wait again, and would be met once more.
        with Progress(f"retries of {group}", quiet=quiet) as progress:
            entries, gone = _find(client, group, chosen, progress)
    if chosen.is_bulk and entries:
        topic = f" of topic {chosen.topic}" if chosen.topic else ""
        confirm(f"{_counted(len(entries))}{topic} waiting in group {group} {what}", yes=yes)
    moved = 0
    with Progress(f"retries of {group}", quiet=quiet) as progress:
        for start in range(0, len(entries), _ENTRIES_PER_CALL):
            try:
                outcomes = call(group, entries[start : start + _ENTRIES_PER_CALL])
            except DmqError as error:
                if not start:
                    raise
                text = f"{error}; {moved:,} of {len(entries):,} were moved before"
                raise CommandFailed(text, ExitCode.UNAVAILABLE if error.retriable else ExitCode.FAILURE) from error
            moved, gone = moved + outcomes.moved, gone + outcomes.gone
            progress.show(f"{moved:,} of {len(entries):,}", done=moved + gone, of=len(entries))
    if not moved and not chosen.is_bulk:
        raise CommandFailed(f"no such retry waits in group {group}", ExitCode.NOT_FOUND)
    return moved, gone


def _find(client: AdminClient, group: str, chosen: _Chosen, progress: Progress) -> tuple[list[str], int]:
    """Return the entries that are meant, and how many of the messages that were named have none."""
    wanted, met = set(chosen.message_ids), set[str]()
    entries: list[str] = []
    read = 0
    for page in _pages(client, group, topic=chosen.topic):
        read += len(page)
        for retry in page:
            if chosen.is_bulk or retry.message_id in wanted:
                entries.append(retry.entry)
                met.add(retry.message_id)
        progress.show(f"{read:,} read, {len(entries):,} meant")
    return entries, len(wanted - met)


def _pages(
    client: AdminClient, group: str, *, topic: str = "", limit: int | None = None
) -> Iterator[Sequence[wire.WaitingRetry]]:
    """Give the retries that wait, at most ``limit``, page by page; a page may be empty."""
    token, left = "", limit
    while left != 0:
        page = client.retries(group, topic=topic, token=token, limit=_PAGE if left is None else min(_PAGE, left))
        yield page.retries
        token = page.next_token
        if not token:
            return
        left = None if left is None else left - len(page.retries)


def _show_moved(group: str, moved: int, gone: int, where: str, *, as_json: bool) -> None:
    if as_json:
        out.show_json({"group": group, "moved": moved, "gone": gone})
        return
    rest = f"; {gone:,} had been delivered, moved or ended before" if gone else ""
    typer.echo(f"{_counted(moved)} {where}{rest}")


def _counted(retries: int) -> str:
    return "1 retry" if retries == 1 else f"{retries:,} retries"
