"""``dmq retry``: pending retries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli.bulk.engine import check_missing, in_batches, is_confirmed
from dmq.cli.bulk.progress import Progress
from dmq.cli.nouns import noun
from dmq.cli.output import output as out
from dmq.cli.output.errors import refused
from dmq.cli.output.facts import flow_word
from dmq.cli.output.histogram import show_due
from dmq.cli.session.options import (
    Consent,
    GroupArgument,
    LimitOption,
    MessageIdsOption,
    OptionGroup,
    Session,
    with_reason,
    with_session,
    with_watch,
)

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire
    from dmq.admin.client import AdminClient

app = noun("retry")

_PAGE = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySelection(OptionGroup):
    """Options that select retries: exactly one is given."""

    entry: Annotated[
        list[str] | None,
        typer.Option(metavar="ENTRY", help="Entry, as listed by 'dmq retry ls'; may be repeated."),
    ] = None
    message_id: MessageIdsOption = None
    topic: Annotated[str | None, typer.Option(metavar="TOPIC", help="All messages sent to this topic.")] = None
    everything: Annotated[bool, typer.Option("--all", help="All retries of the group.")] = False

    def check(self) -> None:
        """Raise a usage error unless one option is given."""
        given = (bool(self.entry), bool(self.message_id), self.topic is not None, self.everything)
        if sum(given) != 1 or self.topic == "":
            raise refused("give one of them", "--entry", "--id", "--topic", "--all")

    @property
    def is_bulk(self) -> bool:
        """True if the retries are not named."""
        return self.everything or bool(self.topic)


@app.command()
@with_watch
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
    session.show_table(
        found,
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
    if len(found) == limit and not session.as_json:
        out.note(f"the first {limit:,}; --limit shows more")


@app.command()
@with_watch
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
    plain = [
        {"group": each.name, "waiting": each.waiting, "next_due_at_ms": next_due_ms[each.name], "due": each.due}
        for each in groups
    ]
    rows = [
        (each.name, flow_word(each), f"{each.waiting:,}", out.distance(next_due_ms[each.name], now_ms))
        for each in groups
    ]
    session.show_table(plain, ("GROUP", "STATE", "RETRYING", "NEXT DUE"), rows, numbers=("RETRYING",))
    if not session.as_json:
        due = [(bucket.until_ms, bucket.count) for each in groups for bucket in each.due]
        show_due("RETRIES", due, sum(each.waiting for each in groups), now_ms)


@app.command()
@with_reason
def run_now(
    session: Session,
    *,
    group: GroupArgument,
    chosen: RetrySelection,
    consent: Consent,
) -> None:
    """Deliver waiting retries now.

    Select them by --entry or --id, or in bulk by --topic or --all. The exit code is 7 if some of the named retries
    are not waiting.
    """
    _move(session, group, chosen, "run_retries_now", consent)


@app.command()
@with_reason
def to_dead(
    session: Session,
    *,
    group: GroupArgument,
    chosen: RetrySelection,
    consent: Consent,
) -> None:
    """Move waiting retries to the dead-letter queue of their group.

    Select them by --entry or --id, or in bulk by --topic or --all. The exit code is 7 if some of the named retries
    are not waiting. 'dmq dead redrive' sends the messages to their group again.
    """
    _move(session, group, chosen, "end_retries", consent)


_TEXTS = {  # by call: the effect, and the place of the moved retries
    "run_retries_now": ("would become visible to its consumers now", "visible now"),
    "end_retries": ("would go to its dead-letter queue", "in the dead-letter queue"),
}


def _move(session: Session, group: str, chosen: RetrySelection, call: str, consent: Consent) -> None:
    """Move the selected retries by ``call``, a method of the client."""
    chosen.check()
    would, where = _TEXTS[call]
    not_there = f"not among the waiting retries of group {group}"
    with session.connect() as client:
        entries, missing = list(dict.fromkeys(chosen.entry or ())), list[str]()
        if consent.dry_run or not entries:
            # All pages before the first call: a retry that runs now may fail, and would be found again as pending.
            entries, missing = _find(session, client, group, chosen)
        if not entries:
            check_missing(not_there, missing, done=0)
        of_topic = f" of topic {chosen.topic}" if chosen.topic else ""
        text = f"{_counted(len(entries))}{of_topic} waiting in group {group} {would}"
        plain = {"group": group, "matching": len(entries), "missing": missing, "is_dry_run": True}
        asks = chosen.is_bulk and bool(entries)
        if not is_confirmed(session, text, plain, consent, asks=asks):
            check_missing(not_there, missing, done=1)
            return
        method = getattr(client, call)
        answers, failure = in_batches(
            session,
            f"retries of {group}",
            entries,
            lambda batch: method(group, batch),
            by_one=not chosen.is_bulk,  # the answer for many does not name those that were gone
        )
    moved, gone = sum(each.moved for each in answers), sum(each.gone for each in answers)
    if not chosen.is_bulk:
        gone += len(missing)
        missing += [entry for entry, answer in zip(entries, answers, strict=False) if answer.gone]
    if not moved and failure is None:
        check_missing(not_there, missing, done=0)
    rest = f"; {gone:,} had been delivered, moved or ended before" if gone else ""
    plain = {"group": group, "moved": moved, "gone": gone, "missing": missing}
    session.show(plain, f"{_counted(moved)} {where}{rest}")
    if failure is not None:
        raise failure
    check_missing(not_there, missing, done=moved)


def _find(session: Session, client: AdminClient, group: str, chosen: RetrySelection) -> tuple[list[str], list[str]]:
    """Return the selected entries, and the named ones that are not pending."""
    wanted, met = dict.fromkeys(chosen.message_id or chosen.entry or ()), set[str]()
    entries: list[str] = []
    read = 0
    with Progress(f"retries of {group}", quiet=session.as_json) as progress:
        for page in _pages(client, group, topic=chosen.topic or ""):
            read += len(page)
            for retry in page:
                name = retry.message_id if chosen.message_id else retry.entry
                if chosen.is_bulk or name in wanted:
                    entries.append(retry.entry)
                    met.add(name)
            progress.show(f"{read:,} read, {len(entries):,} selected")
    return entries, [name for name in wanted if name not in met]


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


def _counted(retries: int) -> str:
    return out.counted(retries, "retry", "retries")
