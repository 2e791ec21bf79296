"""Common parts of commands that change delayed messages: the selection of messages, and the result of each.

Named messages are changed by calls. Messages that match a query are changed by a job of the daemon, which continues
without the command. A message delivered or changed in the meantime has its own result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from dmq.cli.bulk.confirm import confirm
from dmq.cli.bulk.engine import check_missing, in_batches
from dmq.cli.bulk.jobs import JobLook, watch_job
from dmq.cli.output import output as out
from dmq.cli.output.errors import CommandFailed, ExitCode, refused
from dmq.cli.output.times import instant_ms
from dmq.cli.session.completion import topics
from dmq.cli.session.options import Consent, DetachOption, OptionGroup, RateOption, Session
from dmq.config.units import format_duration
from dmq.errors import DmqError

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire
    from dmq.admin.client import AdminClient

BATCH = 1_000  # outcomes of a page
UNCONFIRMED_MAX = 1_000  # messages of a change that needs no typed name
_SHOWN = 10  # of a dry run, and of messages that were not changed
_PAUSE = 1
_HELD = {_PAUSE: "held until its topic is resumed", 2: "delivered in its turn at the rate of its topic"}  # by HeldBy
_TIMES = "RFC 3339, epoch milliseconds, +5m or -1h from now"


class Targets(NamedTuple):
    """Selection of messages: named ones, or the pending ones that match a query."""

    topic: str
    ids: Sequence[str] = ()
    handle: str = ""
    query: str | None = None  # empty: all
    own_keys: Sequence[str] = ()
    rate: float | None = None
    is_detached: bool = False


class BulkChange(NamedTuple):
    """Change that a command makes: its texts, its call with the names of messages, and its field of a job."""

    name: str
    would: str  # "would be recalled"
    done: str  # "recalled"
    call: Callable[[AdminClient, str, Mapping[str, Sequence[str]]], Sequence[wire.ChangedMessage]] | None
    reached: Sequence[str]  # outcomes that count as success
    fields: Mapping[str, Any]  # of the request that starts a job
    deliver_at_ms: int = 0


RECALL = BulkChange(
    "recall",
    "would be recalled",
    "recalled",
    lambda client, topic, named: client.cancel(topic, **named),
    ("DONE", "CANCELLED"),
    {"cancel": True},
)
FIRE = BulkChange(
    "fire",
    "would be delivered now",
    "fired",
    lambda client, topic, named: client.fire(topic, **named),
    ("DONE", "TOO_LATE"),
    {"fire": True},
)


def rescheduling(at_ms: int) -> BulkChange:
    """Return the change to another delivery time."""
    return BulkChange(
        "reschedule",
        f"would be delivered at {out.when(at_ms)}",
        "rescheduled",
        lambda client, topic, named: client.reschedule(topic, deliver_at_ms=at_ms, **named),
        ("DONE",),
        {"deliver_at_ms": at_ms},
        at_ms,
    )


def moving(by_ms: int) -> BulkChange:
    """Return the change of each delivery time by an offset. Only a job makes it: a kill repeats no part of a job."""
    would = f"would be delivered {format_duration(abs(by_ms))} {'later' if by_ms > 0 else 'earlier'}"
    return BulkChange("reschedule", would, "rescheduled", None, ("DONE",), {"delay_by_ms": by_ms})


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSelection(OptionGroup):
    """Arguments and options that select delayed messages."""

    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TOPIC [ID]...|HANDLE", help="Topic and message ids, or a recall handle.", autocompletion=topics
        ),
    ]
    own_key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="The pending message with this own key; may be repeated."),
    ] = None
    key: Annotated[str, typer.Option(metavar="KEY", help="All pending messages with this key.")] = ""
    tag: Annotated[str, typer.Option(metavar="TAG", help="All pending messages with this tag.")] = ""
    due_after: Annotated[
        str | None, typer.Option(metavar="TIME", help=f"All pending messages due at this time or later: {_TIMES}.")
    ] = None
    due_before: Annotated[
        str | None, typer.Option(metavar="TIME", help="All pending messages due before this time.")
    ] = None
    everything: Annotated[bool, typer.Option("--all", help="All pending messages of the topic.")] = False
    query: Annotated[
        str,
        typer.Option(metavar="QUERY", help="All pending messages that match, as for 'dmq msg ls --query'."),
    ] = ""
    rate: RateOption = None
    detach: DetachOption = False

    def read(self, *, needs_query: str = "") -> Targets:
        """Return the selection. Raise a usage error if it is empty or ambiguous.

        ``needs_query`` is an option that cannot be used with named messages.
        """
        topic, *ids = self.targets
        terms = self._terms()
        options = ("--key", "--tag", "--due-after", "--due-before", "--query", "--all")
        if self.own_key:
            if self.everything or terms or ids:
                why = "an own key selects one message: give only the topic with it"
                raise refused(why, "--own-key", "ID", *options)
        elif self.everything and terms:
            raise refused("--all selects all pending messages: give it without a filter", *options)
        elif (self.everything or terms) and ids:
            raise refused("give message ids or a filter, not both", "ID", *options)
        elif self.everything or terms:
            return Targets(topic, query=" ".join(terms), rate=self.rate, is_detached=self.detach)
        for option, is_given in (
            (needs_query, bool(needs_query)),
            ("--rate", self.rate is not None),
            ("--detach", self.detach),
        ):
            if is_given:
                raise refused("it is for messages that are selected by a filter", option, *options)
        return self._named(topic, ids, options)

    def _terms(self) -> list[str]:
        """Return the terms of the query that the options mean."""
        from dmq.admin.requests.message_query import term

        times = {"due-after": self.due_after, "due-before": self.due_before}
        for name, text in times.items():
            instant_ms(text, f"--{name}")  # a usage error here, not an error of the daemon
        named = {"key": self.key, "tag": self.tag} | times
        return [*(term(name, value) for name, value in named.items() if value), *([self.query] if self.query else [])]

    def _named(self, topic: str, ids: Sequence[str], options: Sequence[str]) -> Targets:
        if self.own_key:
            return Targets(topic, own_keys=tuple(dict.fromkeys(self.own_key)))
        if ids:
            return Targets(topic, ids=tuple(dict.fromkeys(ids)))
        from broker_adapter.contracts.errors import Refused
        from dmq.broker.delayed import decode_recall

        try:
            return Targets(decode_recall(topic).topic, handle=topic)
        except Refused as error:
            why = (
                "not a recall handle; give a message id after its topic, TOPIC ID, and after a topic give "
                f"message ids or a filter ({', '.join(options)})"
            )
            raise refused(why, "HANDLE", given=topic) from error


def run_change(session: Session, client: AdminClient, targets: Targets, change: BulkChange, consent: Consent) -> None:
    """Change the selected messages and show the results. The exit code is 0 if all have the requested state."""
    if targets.query is not None:
        _run_job(session, client, targets, change, consent)
        return
    if consent.dry_run:
        found, missing = _look(client, targets)
        if found:
            _show_found(session, client, targets, change, list(found.values()), len(found))
        check_missing(f"not pending in topic {targets.topic}", missing, done=len(found))
        return
    call = change.call
    assert call is not None, "the selection requires a query for this change"
    kind, names = ("own_keys", targets.own_keys) if targets.own_keys else ("message_ids", targets.ids)
    if targets.handle:
        kind, names = "recall_handles", [targets.handle]
    answers, failure = in_batches(
        session,
        f"messages of {targets.topic}",
        names,
        lambda batch: call(client, targets.topic, {kind: batch}),
        by_one=False,
    )
    changed = [each for answer in answers for each in answer]
    _show(session, targets, change, Results.of(changed))
    if failure is not None:
        raise failure
    _check(change, Results.of(changed))


class Results(NamedTuple):
    """Outcomes of a change: the listed messages, and the counts of all of them."""

    listed: Sequence[wire.ChangedMessage]
    missed: Sequence[wire.ChangedMessage]
    done: int
    held: int

    @classmethod
    def of(cls, changed: Iterable[wire.ChangedMessage], *, with_done: bool = True) -> Results:
        """Count the outcomes; ``with_done`` lists the changed messages as well."""
        listed, missed, done, held = list[Any](), list[Any](), 0, 0
        for each in changed:
            is_done = _outcome(each) == "DONE"
            if with_done or not is_done:
                listed.append(each)
            if not is_done:
                missed.append(each)
            done, held = done + is_done, held + bool(each.held_by)
        return cls(listed, missed, done, held)

    @property
    def total(self) -> int:
        """Number of all messages."""
        return self.done + len(self.missed)


def _run_job(session: Session, client: AdminClient, targets: Targets, change: BulkChange, consent: Consent) -> None:
    """Change all messages that match a query, by a job of the daemon."""
    from dmq.admin import admin_v1 as wire

    topic = targets.topic
    request = wire.StartMessageJobRequest(topic=topic, query=targets.query, **change.fields)
    if consent.dry_run or not consent.yes:
        request.is_dry_run = True
        would = client.start_message_job(request)
        count = would.job.selected
        if consent.dry_run:
            _show_found(session, client, targets, change, would.samples[:_SHOWN], count)
            return
        if not count:
            _show(session, targets, change, Results.of(()))
            return
        text = f"{_counted(count)} of topic {topic} {_would(client, targets, change)}"
        confirm(text, yes=False, name=topic if count > UNCONFIRMED_MAX else "")
    request.is_dry_run = False
    request.rate_per_s = targets.rate or 0.0
    job = _started(client, request)
    if targets.is_detached and job.state == wire.RUNNING:
        text = f"job {job.job_id} runs; 'dmq msg jobs {topic}' shows it, 'dmq msg stop {job.job_id}' stops it"
        session.show(job, text)
        return
    job = watch_job(
        job,
        job.job_id,
        again=lambda: job_of(client, topic, job.job_id),
        look=lambda found: JobLook(found.state == wire.RUNNING, job_counts(found), found.decided, found.selected),
        commands=(f"dmq msg stop {job.job_id}", f"dmq msg jobs {topic}"),
        quiet=session.as_json,
    )
    results = Results.of(outcomes_of(client, job.job_id), with_done=session.as_json)
    _show(session, targets, change, results)
    if job.state == wire.STOPPED:
        text = f"job {job.job_id} was stopped before it finished; 'dmq msg resume {job.job_id}' continues it"
        raise CommandFailed(text)
    _check(change, results)


def _started(client: AdminClient, request: wire.StartMessageJobRequest) -> wire.MessageJob:
    try:
        return client.start_message_job(request).job
    except DmqError as error:
        if not error.retriable:
            raise
        text = f"{error} (if in doubt, 'dmq msg jobs {request.topic}' shows whether it was started)"
        raise CommandFailed(text, ExitCode.UNAVAILABLE) from error


def job_of(client: AdminClient, topic: str, job_id: int) -> wire.MessageJob:
    """Return a job by its number. ``topic`` may be empty."""
    for found in client.message_jobs(topic):
        if found.job_id == job_id:
            return found
    raise CommandFailed(f"job {job_id} is not among the 100 newest jobs", ExitCode.NOT_FOUND)


def outcomes_of(client: AdminClient, job_id: int, *, only_missed: bool = False) -> Iterator[wire.ChangedMessage]:
    """Yield the messages of a job that have an outcome, page by page."""
    from dmq.admin import admin_v1 as wire

    request = wire.ListMessageJobOutcomesRequest(job_id=job_id, limit=BATCH, only_missed=only_missed)
    while request.offset >= 0:
        page = client.message_job_outcomes(request)
        yield from (each for each in page.messages if each.outcome)
        request.offset = page.next_offset


def job_counts(job: wire.MessageJob) -> str:
    """Return the counts of a job as text."""
    if not job.is_selected:
        return "selecting messages"
    return f"changed {job.done:,}, gone before {job.gone:,}, unchanged {job.unchanged:,}"


def _look(client: AdminClient, targets: Targets) -> tuple[dict[str, wire.ListedMessage], list[str]]:
    """Return the named messages that are pending, and the names of the others."""
    from broker_adapter.contracts.message import unpack_id
    from dmq.admin import admin_v1 as wire
    from dmq.broker.delayed import decode_recall

    of_handle = [unpack_id(decode_recall(targets.handle).message_id)] if targets.handle else []
    found: dict[str, wire.ListedMessage] = {}
    missing: list[str] = []
    for message_id, own_key in (
        *((message_id, "") for message_id in (*targets.ids, *of_handle)),
        *(("", own_key) for own_key in targets.own_keys),
    ):
        answer = client.message(targets.topic, message_id, own_key=own_key)
        if answer.state != wire.WAITING:
            missing.append(message_id or f"own key {own_key}")
            continue
        found[answer.message_id] = wire.ListedMessage(
            state=answer.state,
            message_id=answer.message_id,
            deliver_at_ms=answer.deliver_at_ms,
            stored_at_ms=answer.stored_at_ms,
            queue_id=answer.queue_id,
            queue_offset=answer.queue_offset,
            content=answer.content if answer.HasField("content") else None,
        )
    return found, missing


def _check(change: BulkChange, results: Results) -> None:
    failed = [each for each in results.missed if _outcome(each) not in change.reached]
    if not failed:
        return
    is_pending = any(_outcome(each) in {"EXPIRES", "TOO_FAR"} for each in failed)
    code = ExitCode.FAILURE if is_pending else ExitCode.NOT_FOUND
    if results.total == 1:
        raise CommandFailed(f"not {change.done}: {told(change.name, change.done, failed[0])}", code)
    text = f"{len(failed):,} of {_counted(results.total)} were not {change.done}"
    raise CommandFailed(text, code if len(failed) == results.total else ExitCode.PARTIAL)


def _show_found(
    session: Session,
    client: AdminClient,
    targets: Targets,
    change: BulkChange,
    found: Sequence[wire.ListedMessage],
    count: int,
) -> None:
    first = found[:_SHOWN]
    if session.as_json:
        out.show_json({"topic": targets.topic, "change": change.name, "matching": count, "first": first})
        return
    if first:
        now_ms = client.now_ms()
        rows = [
            (out.distance(each.deliver_at_ms, now_ms), each.message_id, each.content.tag, " ".join(each.content.keys))
            for each in first
        ]
        out.show_table(("DUE", "MESSAGE ID", "TAG", "KEYS"), rows)
    more = f"; these are the first {len(first)}" if count > len(first) else ""
    typer.echo(f"{_counted(count)} {_would(client, targets, change)}{more}")


def _would(client: AdminClient, targets: Targets, change: BulkChange) -> str:
    """Return the effect of a change; a paused topic delivers nothing now."""
    if change is FIRE and client.topic(targets.topic).paused_since_ms:
        return f"would be due now, {_HELD[_PAUSE]}"
    return change.would


def _show(session: Session, targets: Targets, change: BulkChange, results: Results) -> None:
    if session.as_json:
        out.show_json(
            {
                "topic": targets.topic,
                "change": change.name,
                "deliver_at_ms": change.deliver_at_ms or None,
                "done": results.done,
                "messages": results.listed,
            }
        )
        return
    shown = results.listed if targets.query is None else results.missed[:_SHOWN]
    if shown:
        rows = [(each.message_id, each.own_key, told(change.name, change.done, each)) for each in shown]
        if targets.own_keys:
            out.show_table(("MESSAGE ID", "OWN KEY", "OUTCOME"), rows)
        else:
            out.show_table(("MESSAGE ID", "OUTCOME"), [(row[0], row[2]) for row in rows])
    if targets.query is not None:
        typer.echo(
            f"{_counted(results.done)} {change.done}"
            + (f", {results.held:,} of them held by a pause or a rate of the topic" if results.held else "")
            + (f", {len(results.missed):,} not" if results.missed else "")
        )


def told(change: str, done: str, message: wire.ChangedMessage) -> str:
    """Return the outcome of a message as a text; ``done`` is the word for a changed message."""
    at = out.when(message.at_ms)
    match _outcome(message):
        case "DONE" if message.held_by:
            return f"is due; {_HELD[message.held_by]}, and can be recalled until then"
        case "DONE" if change == "reschedule":
            return f"will be delivered at {at}"
        case "DONE":
            return done
        case "TOO_LATE":
            return f"was delivered at {at}"
        case "CANCELLED":
            return f"was recalled at {at}"
        case "REPLACED":
            return f"was replaced at {at} by a later message under its own key"
        case "EXPIRES":
            return f"expires at {at}, not after the new delivery time: unchanged"
        case "TOO_FAR":
            return "the new delivery time is beyond the longest delay: unchanged"
        case "UNKNOWN" if message.own_key and not message.message_id:
            return f"no pending message has the own key {message.own_key}"
        case "UNKNOWN":
            return "not known: never sent there, or ended longer ago than is remembered"
        case other:
            return other  # from a newer daemon


def _outcome(message: wire.ChangedMessage) -> str:
    return out.enum_word(message, "outcome").upper()


def _counted(messages: int) -> str:
    return out.counted(messages, "delayed message")
