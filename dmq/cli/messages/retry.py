"""``dmq retry``: pending retries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from dmq.cli.bulk.confirm import confirm
from dmq.cli.bulk.progress import Progress
from dmq.cli.nouns import noun
from dmq.cli.output import output as out
from dmq.cli.output.errors import CommandFailed, ExitCode, refused
from dmq.cli.output.histogram import show_due
from dmq.cli.session.options import (
    DryRunOption,
    GroupArgument,
    LimitOption,
    MessageIdsOption,
    Session,
    YesOption,
    with_reason,
    with_session,
)
from dmq.errors import DmqError

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire
    from dmq.admin.client.client import AdminClient

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
    """Selection of retries: exactly one of the four fields is set."""

    entries: Sequence[str] = ()
    message_ids: Sequence[str] = ()
    topic: str = ""
    is_all: bool = False

    @property
    def is_bulk(self) -> bool:
        return self.is_all or bool(self.topic)


class _Found(NamedTuple):
    """Selected entries, and the named ones that are not pending."""

    entries: Sequence[str]
    missing: Sequence[str] = ()


class _Move(NamedTuple):
    """Action of a command: its call and its texts."""

    call: Callable[[str, Sequence[str]], wire.RunRetriesNowResponse | wire.EndRetriesResponse]
    would: str
    where: str


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
        now_ms = client.now_ms()
    if session.as_json:
        out.show_json([out.to_plain(retry) for retry in found])
        return
    out.show_table(
        ("DUE", "TOPIC", "MESSAGE ID", "ATTEMPT", "FIRST FAILED", "ENTRY"),
        [
            (
                out.distance(max(retry.due_at_ms, now_ms), now_ms),
                *(retry.topic, retry.message_id, str(retry.attempt)),
                *(out.distance(retry.first_failed_at_ms, now_ms), retry.entry),
            )
            for retry in found
        ],
        numbers=("ATTEMPT",),
        details=("FIRST FAILED", "ATTEMPT"),
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
    """Count the waiting retries of each group by due time."""
    with session.connect() as client, Progress("groups", quiet=session.as_json) as progress:
        names = [group] if group is not None else [found.name for found in client.groups() if found.waiting]
        groups: list[wire.Group] = []
        next_due_ms: dict[str, int] = {}
        for name in names:
            groups.append(client.group(name))
            next_due_ms[name] = next((page[0].due_at_ms for page in _pages(client, name, limit=1) if page), 0)
            progress.show(name, done=len(groups), of=len(names))
        now_ms = client.now_ms()
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
        [(found.name, f"{found.waiting:,}", out.distance(next_due_ms[found.name], now_ms)) for found in groups],
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
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> None:
    """Deliver waiting retries now.

    Select them by --entry or --id, or in bulk by --topic or --all. The exit code is 7 if some of the named retries
    are not waiting.
    """
    chosen = _chosen(entry, message_id, topic, everything=everything)
    with session.connect() as client:
        move = _Move(client.run_retries_now, "would become visible to its consumers now", "visible now")
        _run(session, client, group, chosen, move, yes=yes, dry_run=dry_run)


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
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> None:
    """Move waiting retries to the dead-letter queue of their group.

    Select them by --entry or --id, or in bulk by --topic or --all. The exit code is 7 if some of the named retries
    are not waiting. 'dmq dead redrive' sends the messages to their group again.
    """
    chosen = _chosen(entry, message_id, topic, everything=everything)
    with session.connect() as client:
        move = _Move(client.end_retries, "would go to its dead-letter queue", "in the dead-letter queue")
        _run(session, client, group, chosen, move, yes=yes, dry_run=dry_run)


def _chosen(
    entries: list[str] | None, message_ids: list[str] | None, topic: str | None, *, everything: bool
) -> _Chosen:
    given = (bool(entries), bool(message_ids), topic is not None, everything)
    if sum(given) != 1 or topic == "":
        raise refused("give one of them", "--entry", "--id", "--topic", "--all")
    return _Chosen(tuple(dict.fromkeys(entries or ())), tuple(message_ids or ()), topic or "", everything)


def _run(
    session: Session, client: AdminClient, group: str, chosen: _Chosen, move: _Move, *, yes: bool, dry_run: bool
) -> None:
    found = _Found(chosen.entries)
    if dry_run or not chosen.entries:
        # All pages before the first call: a retry that runs now may fail, and would be found again as pending.
        with Progress(f"retries of {group}", quiet=session.as_json) as progress:
            found = _find(client, group, chosen, progress)
    topic = f" of topic {chosen.topic}" if chosen.topic else ""
    what = f"{_counted(len(found.entries))}{topic} waiting in group {group} {move.would}"
    if not found.entries:
        _check_named(group, found.missing, is_none=True)
    if dry_run:
        if session.as_json:
            plain = {"group": group, "matching": len(found.entries), "missing": list(found.missing)}
            out.show_json({**plain, "is_dry_run": True})
        else:
            typer.echo(what)
        _check_named(group, found.missing, is_none=False)
        return
    if chosen.is_bulk and found.entries:
        confirm(what, yes=yes)
    moved, gone, went = _move(group, found.entries, move, quiet=session.as_json, by_one=not chosen.is_bulk)
    missing = [*found.missing, *went]
    if not moved:
        _check_named(group, missing, is_none=True)
    _show_moved(group, moved, len(found.missing) + gone, missing, move.where, as_json=session.as_json)
    _check_named(group, missing, is_none=False)


def _check_named(group: str, missing: Sequence[str], *, is_none: bool) -> None:
    """End the command if some named retries are not pending: as not found if none is, else as partial."""
    if missing:
        text = f"not among the retries that wait in group {group}: {', '.join(missing)}"
        raise CommandFailed(text, ExitCode.NOT_FOUND if is_none else ExitCode.PARTIAL)


def _move(group: str, entries: Sequence[str], move: _Move, *, quiet: bool, by_one: bool) -> tuple[int, int, list[str]]:
    """Call for ``entries``. Return the numbers of moved and gone ones and, if called one by one, the names of
    the gone.
    """
    per_call = 1 if by_one else _ENTRIES_PER_CALL  # the answer for many does not name those that were gone
    moved = gone = 0
    went: list[str] = []
    with Progress(f"retries of {group}", quiet=quiet) as progress:
        for start in range(0, len(entries), per_call):
            chunk = entries[start : start + per_call]
            try:
                outcomes = move.call(group, chunk)
            except DmqError as error:
                if not start:
                    raise
                text = f"{error}; {moved:,} of {len(entries):,} were moved before"
                raise CommandFailed(text, ExitCode.UNAVAILABLE if error.retriable else ExitCode.FAILURE) from error
            moved, gone = moved + outcomes.moved, gone + outcomes.gone
            went += chunk if by_one and outcomes.gone else ()
            progress.show(f"{moved:,} of {len(entries):,}", done=moved + gone, of=len(entries))
    return moved, gone, went


def _find(client: AdminClient, group: str, chosen: _Chosen, progress: Progress) -> _Found:
    """Return the selected entries, and the named ones that are not pending."""
    wanted, met = dict.fromkeys(chosen.message_ids or chosen.entries), set[str]()
    entries: list[str] = []
    read = 0
    for page in _pages(client, group, topic=chosen.topic):
        read += len(page)
        for retry in page:
            name = retry.message_id if chosen.message_ids else retry.entry
            if chosen.is_bulk or name in wanted:
                entries.append(retry.entry)
                met.add(name)
        progress.show(f"{read:,} read, {len(entries):,} meant")
    return _Found(entries, [name for name in wanted if name not in met])


def _pages(
    client: AdminClient, group: str, *, topic: str = "", limit: int | None = None
) -> Iterator[Sequence[wire.WaitingRetry]]:
    """Yield the pending retries, at most ``limit``, page by page; a page may be empty."""
    token, left = "", limit
    while left != 0:
        page = client.retries(group, topic=topic, token=token, limit=_PAGE if left is None else min(_PAGE, left))
        yield page.retries
        token = page.next_token
        if not token:
            return
        left = None if left is None else left - len(page.retries)


def _show_moved(group: str, moved: int, gone: int, missing: Sequence[str], where: str, *, as_json: bool) -> None:
    if as_json:
        out.show_json({"group": group, "moved": moved, "gone": gone, "missing": list(missing)})
        return
    rest = f"; {gone:,} had been delivered, moved or ended before" if gone else ""
    typer.echo(f"{_counted(moved)} {where}{rest}")


def _counted(retries: int) -> str:
    return "1 retry" if retries == 1 else f"{retries:,} retries"
