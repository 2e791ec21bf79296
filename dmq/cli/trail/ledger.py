"""``dmq ledger``: messages by state, and whether the numbers balance."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from broker_adapter.wire.plain import to_plain
from dmq.cli.bulk.progress import Progress
from dmq.cli.nouns import single
from dmq.cli.output import output as out
from dmq.cli.output.errors import CommandFailed, ExitCode
from dmq.cli.output.histogram import show_spans
from dmq.cli.session.options import Session, with_session
from dmq.config.units import format_time

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire

app = single()

_POLL_S = 0.2
_SPANS = (
    *(("overdue", "overdue"), ("minute", "within a minute"), ("hour", "within an hour"), ("day", "within a day")),
    *(("week", "within a week"), ("later", "later")),
)
_TOPIC_TERMS = ("scheduled", "fired", "cancelled", "pending", "at_once", "expired")
_HALF_TERMS = ("half", "committed", "rolled_back", "given_up", "undecided")
_GROUP_TERMS = ("fired", "acked", "forwarded", "dead", "filtered", "expired", "in_retry", "unread", "in_flight")


@app.command()
@with_session
def ledger(
    session: Session,
    *,
    topic: Annotated[str, typer.Argument(metavar="[TOPIC]", help="Only this topic and its groups.")] = "",
    groups: Annotated[bool, typer.Option("--groups", help="Show the counts of each group as well.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Count the rows of the store, and compare these counts with the ledger.")
    ] = False,
) -> None:
    """Show message counts by state; exit with 4 if they do not balance.

    For a topic: scheduled = fired + cancelled + pending. For a group: fired = acked + forwarded + dead + filtered +
    expired + in retry + unread. Unread messages include those in flight. --verify covers all topics and takes longer;
    the daemon continues to serve.
    """
    if verify:
        if topic or groups:
            raise CommandFailed("--verify covers all topics and groups: give no TOPIC and no --groups", ExitCode.USAGE)
        _verify(session)
        return
    with session.connect() as client:
        found = client.ledger(topic, with_groups=groups or bool(topic))
    plain = to_plain(found) | {"balances": not found.differences_total}
    session.show(plain, lambda: _show(found, topic, with_groups=groups))
    _fail_unless_balanced(session, found.differences, found.differences_total)


def _show(found: wire.GetLedgerResponse, topic: str, *, with_groups: bool) -> None:
    if topic:
        for each in found.topics:
            _show_topic(each)
    else:
        _show_topics(found.topics)
        if with_groups and any(each.groups for each in found.topics):
            typer.echo()
            _show_groups(found.topics, with_topic=True)
    typer.echo()
    if not found.differences_total:
        typer.echo(f"balances; counted since {format_time(found.began_at_ms)}")


def _show_topics(topics: Sequence[wire.LedgerTopic]) -> None:
    plain = [each for each in topics if not each.HasField("letters")]
    headings = ("TOPIC", "SCHEDULED", "= FIRED", "+ CANCELLED", "+ PENDING", "AT ONCE", "EXPIRED")
    _show_numbers(headings, [(each.topic, *_terms(each, _TOPIC_TERMS)) for each in plain])
    if halves := [each for each in plain if each.half]:
        typer.echo()
        headings_of_halves = ("TOPIC", "HALF MESSAGES", "= COMMITTED", "+ ROLLED BACK", "+ GIVEN UP", "+ UNDECIDED")
        _show_numbers(headings_of_halves, [(each.topic, *_terms(each, _HALF_TERMS)) for each in halves])
    if letters := [each for each in topics if each.HasField("letters")]:
        typer.echo()
        _show_letters(letters)


def _show_topic(topic: wire.LedgerTopic) -> None:
    scheduled = f"{topic.scheduled:,} = fired {topic.fired:,} + cancelled {topic.cancelled:,}"
    ends = f"committed {topic.committed:,} + rolled back {topic.rolled_back:,} + given up {topic.given_up:,}"
    half = f"{topic.half:,} = {ends} + undecided {topic.undecided:,}" if topic.half else ""
    out.show_facts(
        [
            ("topic", topic.topic),
            ("scheduled", f"{scheduled} + pending {topic.pending:,}"),
            ("at once", f"{topic.at_once:,}"),
            ("half messages", half),
            ("expired", f"{topic.expired:,} removed from its queues unread" if topic.expired else ""),
        ]
    )
    if topic.HasField("due"):
        show_spans("MESSAGES", [(label, getattr(topic.due, name)) for name, label in _SPANS])
    if topic.HasField("letters"):
        typer.echo()
        _show_letters([topic])
    if topic.groups:
        typer.echo()
        _show_groups([topic], with_topic=False)


def _show_letters(topics: Sequence[wire.LedgerTopic]) -> None:
    headings = ("DEAD-LETTER QUEUE", "LETTERS", "= REDRIVEN", "+ PURGED", "+ EXPIRED", "+ LEFT")
    terms = ("letters", "redriven", "purged", "expired", "left")
    _show_numbers(headings, [(each.topic, *_terms(each.letters, terms)) for each in topics])


def _show_groups(topics: Sequence[wire.LedgerTopic], *, with_topic: bool) -> None:
    headings = (
        *(("TOPIC",) if with_topic else ()),
        *("GROUP", "FIRED", "= ACKED", "+ FORWARDED", "+ DEAD", "+ FILTERED", "+ EXPIRED", "+ IN RETRY", "+ UNREAD"),
        "IN FLIGHT",
    )
    rows: list[tuple[str, ...]] = [
        (*((topic.topic,) if with_topic else ()), group.group, *_terms(group, _GROUP_TERMS))
        for topic in topics
        for group in topic.groups
    ]
    _show_numbers(headings, rows, names=2 if with_topic else 1)


def _terms(message: object, names: Sequence[str]) -> list[str]:
    return [f"{getattr(message, name):,}" for name in names]


def _show_numbers(headings: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> None:
    terms = headings[names:]
    zeros = [term for at, term in enumerate(terms, names) if all(row[at] == "0" for row in rows)]
    out.show_table(headings, rows, numbers=terms, details=[term for term in reversed(zeros) if term.startswith("+")])


# -- verifying ---------------------------------------------------------------------------------------------------------


def _verify(session: Session) -> None:
    with session.connect() as client, Progress("verify", quiet=session.as_json) as progress:
        found = client.verify_ledger()
        while not found.ended_at_ms:
            of = max(found.expected, found.looked)
            progress.show(f"{found.looked:,} of about {of:,} rows", done=found.looked, of=of)
            threading.Event().wait(_POLL_S)
            found = client.verify_ledger(found.number)
    if found.error:
        raise CommandFailed(f"the ledger could not be verified: {found.error}")
    if session.as_json:
        out.show_json(to_plain(found) | {"balances": not found.differences_total})
    elif not found.differences_total:
        took = out.about(found.ended_at_ms - found.started_at_ms)
        typer.echo(f"balances with the store: {found.looked:,} rows counted in {took}")
    _fail_unless_balanced(session, found.differences, found.differences_total)


def _fail_unless_balanced(session: Session, differences: Sequence[wire.LedgerDifference], total: int) -> None:
    if not total:
        return
    if not session.as_json:
        rows = [(each.topic, each.group, each.term, f"{each.counted:,}", f"{each.found:,}") for each in differences]
        out.show_table(("TOPIC", "GROUP", "TERM", "COUNTED", "FOUND"), rows, numbers=("COUNTED", "FOUND"))
    raise CommandFailed(f"the ledger does not balance: {total:,} terms differ", ExitCode.DAMAGED)
