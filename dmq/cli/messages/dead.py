"""``dmq dead``: dead letters, and the jobs that redrive or purge them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from broker_adapter.wire.plain import to_plain
from dmq.cli.bulk.confirm import confirm
from dmq.cli.bulk.engine import check_missing
from dmq.cli.bulk.jobs import JobLook, watch_job
from dmq.cli.bulk.progress import Progress
from dmq.cli.nouns import noun
from dmq.cli.output import output as out
from dmq.cli.output.errors import CommandFailed, ExitCode, refused
from dmq.cli.output.facts import content_facts, failure_facts, flow_word, reason_of
from dmq.cli.output.files import lines_into
from dmq.cli.output.times import past_ms
from dmq.cli.session.options import (
    BodyOption,
    Consent,
    DetachOption,
    GroupArgument,
    KeysOption,
    LimitOption,
    MessageIdsArgument,
    MessageIdsOption,
    OptionGroup,
    OutFileOption,
    RateOption,
    Session,
    UnmaskedOption,
    with_reason,
    with_session,
    with_watch,
)
from dmq.errors import DmqError
from retry.failure_reason import NOT_REPORTED
from retry.policy import Reason

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire
    from dmq.admin.client import AdminClient

app = noun("dead")

PAGE = 1_000


class ReasonName(StrEnum):
    """Reasons of dead letters, as typed and shown. SENT_HERE: sent directly to the dead-letter queue."""

    SENT_HERE = "sent_here"
    EXHAUSTED = "exhausted"
    TOO_OLD = "too_old"
    FORWARDED = "forwarded"
    SENT_BACK = "sent_back"
    OPERATOR = "operator"
    REFUSED = "refused"
    TOO_LATE = "too_late"


assert [name.name for name in ReasonName] == ["SENT_HERE", *(reason.name for reason in Reason)]

_TIME = "RFC 3339, epoch milliseconds, or -1h for an hour ago"


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter(OptionGroup):
    """Options that select dead letters by their properties."""

    reason: Annotated[
        list[ReasonName] | None,
        typer.Option(
            metavar="REASON",
            case_sensitive=False,
            help=f"Reason of death: {', '.join(ReasonName)}; may be repeated.",
        ),
    ] = None
    topic: Annotated[list[str] | None, typer.Option(metavar="TOPIC", help="Original topic; may be repeated.")] = None
    key: KeysOption = None
    since: Annotated[str | None, typer.Option(metavar="TIME", help=f"Last failure at this time or later: {_TIME}.")] = (
        None
    )
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Last failure before this time.")] = None

    def read(self, client: AdminClient, ids: Sequence[str] = ()) -> wire.DeadFilter:
        """Return the filter. Raise a usage error for invalid times. ``client`` supplies the daemon's clock."""
        from dmq.admin import admin_v1 as wire

        chosen = wire.DeadFilter(
            reasons=[name.name for name in self.reason or ()],
            topics=self.topic,
            keys=self.key,
            message_ids=ids,
            since_ms=past_ms(self.since, "--since", client.now_ms),
            until_ms=past_ms(self.until, "--until", client.now_ms),
        )
        if chosen.until_ms and chosen.until_ms <= chosen.since_ms:
            raise refused("the time range ends before it begins", "--since", "--until")
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterSelection(LetterFilter):
    """Options that select dead letters by their ids as well."""

    named: MessageIdsArgument = None
    message_id: MessageIdsOption = None

    def read(self, client: AdminClient, ids: Sequence[str] = ()) -> wire.DeadFilter:
        """Return the filter of the options and of the given ids. Raise a usage error for invalid times."""
        return LetterFilter.read(self, client, [*(self.named or ()), *(self.message_id or ()), *ids])


def letters_of(
    client: AdminClient,
    group: str,
    chosen: wire.DeadFilter,
    *,
    limit: int | None = None,
    with_outcome: bool = False,
    with_body: bool = False,
    unmasked: bool = False,
) -> Iterator[wire.DeadLetter]:
    """Yield the matching dead letters, at most ``limit``, page by page as they are read."""
    offset, left = 0, limit
    while offset >= 0 and left != 0:
        page = client.dead_letters(
            group,
            chosen,
            offset=offset,
            limit=PAGE if left is None else min(PAGE, left),
            with_outcome=with_outcome,
            with_body=with_body,
            unmasked=unmasked,
        )
        yield from page.letters
        offset = page.next_offset
        left = None if left is None else left - len(page.letters)


@app.command()
@with_watch
@with_session
def groups(session: Session) -> None:
    """List the groups that have dead letters, removed groups included."""
    with session.connect() as client:
        found = [group for group in client.groups(with_removed=True) if group.dead]
    session.show_table(
        [{"group": group.name, "dead": group.dead, "removed": group.is_removed} for group in found],
        ("GROUP", "DEAD", "STATE"),
        [(group.name, f"{group.dead:,}", flow_word(group)) for group in found],
        numbers=("DEAD",),
    )


@app.command()
@with_watch
@with_session
def ls(
    session: Session,
    *,
    group: GroupArgument,
    selection: LetterFilter,
    limit: LimitOption = 50,
    all_outcomes: Annotated[
        bool, typer.Option("--all-outcomes", help="Include redriven and purged dead letters.")
    ] = False,
    by_error: Annotated[
        bool, typer.Option("--by-error", help="Count the selected dead letters by error, the most frequent first.")
    ] = False,
) -> None:
    """List the dead letters of a group, the oldest death first."""
    with session.connect() as client, Progress(f"dead letters of {group}", quiet=session.as_json) as progress:
        chosen = selection.read(client)
        found: list[wire.DeadLetter] = []
        letters = letters_of(client, group, chosen, limit=None if by_error else limit, with_outcome=all_outcomes)
        errors: dict[str, _Error] = {}
        for number, letter in enumerate(letters, 1):
            if by_error:
                errors.setdefault(_error(letter), _Error(letter)).add(letter)
            else:
                found.append(letter)
            progress.show(f"{number:,} found")
        now_ms = 0 if session.as_json else client.now_ms()
    if by_error:
        _show_errors(session, errors, limit, now_ms)
        return
    headings = ["DEAD", "LAST FAILED", "TOPIC", "MESSAGE ID", "REASON", "ATTEMPTS", "TAG", "KEYS"]
    rows = [_cells(letter, now_ms) for letter in found]
    if all_outcomes:
        headings.append("OUTCOME")
        rows = [(*row, letter.outcome) for row, letter in zip(rows, found, strict=True)]
    if any(reason_of(letter.failure).error for letter in found):
        headings.append("ERROR")
        rows = [(*row, _error(letter)) for row, letter in zip(rows, found, strict=True)]
    details = ("LAST FAILED", "TAG", "ATTEMPTS", *["KEYS"] * all_outcomes)
    session.show_table(found, headings, rows, numbers=("ATTEMPTS",), details=details)
    if len(found) == limit and not session.as_json:
        out.note(f"the first {limit:,}; --limit shows more")


@app.command()
@with_session
def show(
    session: Session,
    *,
    group: GroupArgument,
    message_id: Annotated[str, typer.Argument(metavar="MESSAGE_ID", help="Message id.")],
    body: BodyOption = False,
    unmasked: UnmaskedOption = False,
) -> None:
    """Show a dead letter: origin, reason, time, outcome and content.

    A message that died more than once is shown once for each death. The JSON output is always a list.
    """
    with session.connect() as client, Progress(f"dead letters of {group}", quiet=session.as_json):
        chosen = LetterFilter().read(client, [message_id])
        found = list(letters_of(client, group, chosen, with_outcome=True, with_body=body, unmasked=unmasked))
        now_ms = client.now_ms()
    if not found:
        text = f"message {message_id} is not a dead letter of group {group}"
        raise CommandFailed(text, ExitCode.NOT_FOUND)
    session.show(found, lambda: out.show_each(_facts(letter, now_ms) for letter in found))


@app.command()
@with_session
def export(
    session: Session,
    *,
    group: GroupArgument,
    selection: LetterSelection,
    file: OutFileOption = None,
    unmasked: UnmaskedOption = False,
) -> None:
    """Write dead letters as JSON Lines, with their bodies in base64.

    Without a filter, all dead letters of the group are written, except redriven and purged ones. An output file
    gets its name when it is complete. Only its owner can read it.
    """
    count = unreadable = masked = 0
    with (
        session.connect() as client,
        Progress(f"export of {group}", quiet=session.as_json or (file is None and sys.stdout.isatty())) as progress,
    ):
        chosen = selection.read(client)
        with lines_into(file) as lines:
            for letter in letters_of(client, group, chosen, with_body=True, unmasked=unmasked):
                # Escaped as ASCII: exact, independent of the terminal and its encoding.
                lines.write(json.dumps(to_plain(letter), separators=(",", ":")) + "\n")
                count += 1
                unreadable += not letter.HasField("content")
                masked += bool(letter.content.masking)
                progress.show(f"{count:,} letters")
    if file is not None:
        text = f"{out.counted(count, 'dead letter')} of {group} in {file}"
        session.show({"group": group, "file": str(file), "letters": count, "unreadable": unreadable}, text)
    if masked:
        out.note(f"{masked:,} of {count:,} are masked by rules of the daemon (redact); --unmasked needs an admin key")
    if unreadable:
        text = f"{unreadable:,} of {count:,} cannot be read, their content is null"
        raise CommandFailed(text, ExitCode.DAMAGED)


def _cells(letter: wire.DeadLetter, now_ms: int) -> tuple[str, ...]:
    return (
        *(out.distance(each, now_ms) for each in (letter.dead_at_ms, letter.last_failed_at_ms)),
        *(letter.origin_topic, letter.message_id),
        *(_reason(letter), f"{letter.attempts}", letter.tag, " ".join(letter.keys)),
    )


def _error(letter: wire.DeadLetter) -> str:
    """Return the error of the last failure; empty if no consumer failed the message or the error is unknown."""
    return (reason_of(letter.failure).error or NOT_REPORTED) if letter.HasField("failure") else ""


class _Error:
    """Dead letters that have one error in common."""

    def __init__(self, first: wire.DeadLetter) -> None:
        self.count = 0
        self.first_dead_at_ms, self.last_dead_at_ms = first.dead_at_ms, first.dead_at_ms
        self.message_id = ""  # an example: the newest

    def add(self, letter: wire.DeadLetter) -> None:
        """Count one more dead letter; they come in the order of their deaths."""
        self.count += 1
        self.last_dead_at_ms, self.message_id = letter.dead_at_ms, letter.message_id


def _show_errors(session: Session, errors: dict[str, _Error], limit: int, now_ms: int) -> None:
    most = sorted(errors.items(), key=lambda each: (-each[1].count, each[0]))
    rows = [
        (
            f"{found.count:,}",
            *(out.distance(each, now_ms) for each in (found.first_dead_at_ms, found.last_dead_at_ms)),
            *(found.message_id, error or "not known"),
        )
        for error, found in most[:limit]
    ]
    headings = ("LETTERS", "FIRST DEATH", "LAST DEATH", "LAST MESSAGE ID", "ERROR")
    plain = [{"error": error, **vars(found)} for error, found in most[:limit]]
    session.show_table(plain, headings, rows, numbers=("LETTERS",), details=("FIRST DEATH",))
    if len(most) > limit and not session.as_json:
        out.note(f"the first {limit:,} of {len(most):,} errors; --limit shows more")


def _reason(letter: wire.DeadLetter) -> str:
    return out.enum_word(letter, "reason")


def _facts(letter: wire.DeadLetter, now_ms: int) -> list[tuple[str, str]]:
    note = f": {letter.outcome_note}" if letter.outcome_note else ""
    facts = [
        ("message id", letter.message_id),
        ("origin topic", letter.origin_topic),
        ("reason", _reason(letter)),
        ("attempts", str(letter.attempts)),
        ("first failed", out.when(letter.first_failed_at_ms, now_ms)),
        ("last failed", out.when(letter.last_failed_at_ms, now_ms)),
        ("dead at", out.when(letter.dead_at_ms, now_ms)),
        *(failure_facts(letter.failure) if letter.HasField("failure") else ()),
        ("offset", str(letter.offset)),
        ("outcome", f"{letter.outcome} {out.when(letter.outcome_at_ms, now_ms)}{note}" if letter.outcome else "none"),
    ]
    is_purged = letter.outcome == "purged"
    if letter.HasField("content"):
        removed = is_purged and not letter.content.body_bytes
        return [*facts, *content_facts(letter.content), ("message", "its body went with its purge" if removed else "")]
    why = "gone with its purge" if is_purged else "CANNOT BE READ, the stored bytes are damaged"
    return [*facts, ("tag", letter.tag), ("keys", " ".join(letter.keys)), ("message", why)]


@app.command()
@with_reason
def redrive(
    session: Session,
    *,
    group: GroupArgument,
    selection: LetterSelection,
    to: Annotated[
        str,
        typer.Option("--to", metavar="TOPIC", help="Send them to all groups of this topic.  [default: only to GROUP]"),
    ] = "",
    all_groups: Annotated[
        bool, typer.Option("--all-groups", help="Send each message to all groups of its original topic.")
    ] = False,
    rate: RateOption = None,
    consent: Consent,
    detach: DetachOption = False,
) -> None:
    """Send dead letters to their group again, as new messages.

    The command waits for the end of the redrive. Each new message has a new message id, and only GROUP gets it. With
    --all-groups or --to, all groups of the topic get it. One of these options is required for a removed group.
    Without a filter, all dead letters of the group are redriven.

    The redrive is a job of the daemon: it continues after Ctrl-C and after a restart. 'dmq dead show' shows the
    outcome of each dead letter. A message that a client sent to the dead-letter queue has no original topic, so it
    requires --to. The topic of --to must exist.

    The exit code is 7 if some dead letters failed or do not exist, and 1 if the job was stopped.
    """
    if to and all_groups:
        raise refused("give one of them only: --to includes all groups of its topic", "--to", "--all-groups")
    with session.connect() as client:
        from dmq.admin import admin_v1 as wire

        request = wire.StartJobRequest(
            kind=wire.REDRIVE,
            group=group,
            filter=selection.read(client),
            to_topic=to,
            all_groups=all_groups,
            rate_per_s=rate or 0.0,
            is_dry_run=consent.dry_run,
        )
        _run(session, client, request, detach=detach, yes=consent.yes)


@app.command()
@with_reason
def purge(
    session: Session,
    *,
    group: GroupArgument,
    selection: LetterSelection,
    consent: Consent,
    detach: DetachOption = False,
) -> None:
    """Discard dead letters permanently.

    The command waits for the end of the purge. The option --why is required; its text is recorded with each dead
    letter. Without a filter, all dead letters of the group are purged. The bodies are removed. 'dmq dead show'
    still shows the other properties, the reason of death and the reason of the purge.

    The exit code is 7 if some dead letters failed or do not exist, and 1 if the job was stopped.
    """
    if not session.why:
        raise refused("a purge requires a reason, which is recorded with each dead letter", "--why")
    with session.connect() as client:
        from dmq.admin import admin_v1 as wire

        request = wire.StartJobRequest(
            kind=wire.PURGE,
            group=group,
            filter=selection.read(client),
            why=session.why,
            is_dry_run=consent.dry_run,
        )
        _run(session, client, request, detach=detach, yes=consent.yes)


@app.command()
@with_watch
@with_session
def jobs(
    session: Session,
    *,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="Only jobs of this consumer group.")] = "",
) -> None:
    """List redrives and purges, the newest first, at most 100."""
    with session.connect() as client:
        found = client.jobs(group)
        now_ms = client.now_ms()
    session.show_table(
        found,
        ("JOB", "KIND", "GROUP", "STATE", "LOOKED AT", "DONE", "PASSED OVER", "FAILED", "STARTED"),
        [
            (
                *(str(job.job_id), _kind(job), job.group, _state(job), f"{_looked_at(job):,} of {_size(job):,}"),
                *(f"{job.done:,}", f"{job.passed:,}", f"{job.failed:,}", out.distance(job.created_at_ms, now_ms)),
            )
            for job in found
        ],
        numbers=("JOB", "LOOKED AT", "DONE", "PASSED OVER", "FAILED"),
    )


@app.command()
@with_reason
def stop(
    session: Session,
    *,
    job: Annotated[int, typer.Argument(metavar="JOB", help="Job number, as listed by 'dmq dead jobs'.", min=1)],
) -> None:
    """Stop a running job; 'dmq dead resume' continues it.

    Completed changes remain.
    """
    with session.connect() as client:
        ended = client.stop_job(job)
    session.show(ended, f"job {ended.job_id} is {_state(ended)}: {_counts(ended)}")


@app.command()
@with_reason
def resume(
    session: Session,
    *,
    job: Annotated[int, typer.Argument(metavar="JOB", help="Job number, as listed by 'dmq dead jobs'.", min=1)],
) -> None:
    """Resume a stopped job at its position.

    A job can be resumed after a restart of the daemon as well. It covers the dead letters that were in the queue when
    it was started. The command does not change a job that is done.
    """
    with session.connect() as client:
        resumed = client.resume_job(job)
    session.show(resumed, f"job {resumed.job_id} is {_state(resumed)}: {_counts(resumed)}")


def _run(session: Session, client: AdminClient, request: wire.StartJobRequest, *, detach: bool, yes: bool) -> None:
    but = "" if len(request.filter.ListFields()) == 1 else " that the other options mean"
    text = f"not among the dead letters of group {request.group} without an outcome{but}"
    missing = _missing(client, request)
    if missing and len(missing) == len(set(request.filter.message_ids)):
        check_missing(text, missing, done=0)
    is_asked = not (request.is_dry_run or yes or request.filter.message_ids)
    if is_asked or request.is_dry_run:
        would = _would(client, request)
        if request.is_dry_run or not would.done:
            rest = f"{would.passed:,} would be skipped, {would.failed:,} would fail"
            session.show(would, f"{would.done:,} would be {_done(would)}, {rest}")
            check_missing(text, missing, done=1)
            return
        letters = f"{out.counted(would.done, 'dead letter')} of group {request.group}"
        confirm(f"{letters} would be {_done(request)}", yes=False)
    job = _start(client, request)
    if detach and _state(job) == "running":
        told = f"job {job.job_id} runs; 'dmq dead jobs {job.group}' shows it, 'dmq dead stop {job.job_id}' ends it"
    else:
        job = _watch(client, job, quiet=session.as_json)
        told = _counts(job)
    session.show(job, told)
    if _state(job) == "stopped":
        raise CommandFailed(
            f"job {job.job_id} was stopped before it finished; 'dmq dead resume {job.job_id}' continues it"
        )
    if job.failed:
        is_bound = _kind(job) == "redrive" and not job.to_topic
        origin = ", or their topic or group is gone and they need --to" if is_bound else ""
        failed = f"{job.failed:,} failed and stay dead: they cannot be read{origin}"
        raise CommandFailed(failed, ExitCode.PARTIAL if job.done else ExitCode.FAILURE)
    check_missing(text, missing, done=1)


def _missing(client: AdminClient, request: wire.StartJobRequest) -> list[str]:
    """Return the named ids that match no dead letter."""
    named = dict.fromkeys(request.filter.message_ids)
    found = {letter.message_id for letter in letters_of(client, request.group, request.filter)} if named else set()
    return [message_id for message_id in named if message_id not in found]


def _would(client: AdminClient, request: wire.StartJobRequest) -> wire.Job:
    """Return the result of a dry run of the job."""
    from dmq.admin import admin_v1 as wire

    dry = wire.StartJobRequest()
    dry.CopyFrom(request)
    dry.is_dry_run = True
    return client.start_job(dry)


def _start(client: AdminClient, request: wire.StartJobRequest) -> wire.Job:
    try:
        return client.start_job(request)
    except DmqError as error:
        if not error.retriable:
            raise
        text = f"{error} (if in doubt, 'dmq dead jobs {request.group}' tells whether it was started)"
        raise CommandFailed(text, ExitCode.UNAVAILABLE) from error


def _watch(client: AdminClient, job: wire.Job, *, quiet: bool) -> wire.Job:
    """Show the progress of ``job`` until it ends, and return its last state."""
    if not quiet and _state(job) == "running":
        out.note(f"job {job.job_id}: {_kind(job)} of {job.group}")
    return watch_job(
        job,
        job.job_id,
        again=lambda: _again(client, job),
        look=lambda found: JobLook(_state(found) == "running", _counts(found), _looked_at(found), _size(found)),
        commands=(f"dmq dead stop {job.job_id}", f"dmq dead jobs {job.group}"),
        quiet=quiet,
    )


def _again(client: AdminClient, job: wire.Job) -> wire.Job:
    for found in client.jobs(job.group):
        if found.job_id == job.job_id:
            return found
    raise CommandFailed(f"job {job.job_id} is no longer among the newest jobs of its group")


def _counts(job: wire.Job) -> str:
    return f"{_done(job)} {job.done:,}, skipped {job.passed:,}, failed {job.failed:,}"


def _done(job: wire.Job | wire.StartJobRequest) -> str:
    return {"redrive": "redriven", "purge": "purged"}.get(_kind(job), "done")


def _kind(job: wire.Job | wire.StartJobRequest) -> str:
    return out.enum_word(job, "kind")


def _state(job: wire.Job) -> str:
    return out.enum_word(job, "state")


def _looked_at(job: wire.Job) -> int:
    return min(job.next_offset, job.end_offset) - job.first_offset


def _size(job: wire.Job) -> int:
    return job.end_offset - job.first_offset
