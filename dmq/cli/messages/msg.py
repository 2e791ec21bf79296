"""``dmq msg``: send messages, find, list, count and inspect them, and recall them."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from broker_adapter.contracts.message_id import new_message_id
from broker_adapter.wire.plain import to_plain
from dmq.cli.bulk.changes import (
    FIRE,
    RECALL,
    MessageSelection,
    job_counts,
    job_of,
    moving,
    outcomes_of,
    rescheduling,
    run_change,
    told,
)
from dmq.cli.bulk.progress import Progress
from dmq.cli.nouns import noun
from dmq.cli.output import output as out
from dmq.cli.output.errors import CommandFailed, ExitCode, refused, refusing
from dmq.cli.output.facts import content_facts, masking_of, reason_of
from dmq.cli.output.times import instant_ms
from dmq.cli.session.completion import topics
from dmq.cli.session.options import (
    AfterOption,
    BodyOption,
    Consent,
    LimitOption,
    MessageOptions,
    Session,
    TopicArgument,
    UnmaskedOption,
    with_reason,
    with_session,
    with_watch,
)
from dmq.config.units import After, At, format_duration, parse_duration, parse_when
from dmq.states import MessageState
from retry.dead_letter import PARENT_MESSAGE_ID
from retry.failure_reason import NOT_REPORTED

if TYPE_CHECKING:
    from broker_adapter.wire import rocketmq_v2 as public
    from dmq.admin import admin_v1 as wire
    from dmq.admin.client import AdminClient

app = noun("msg")

# Exit codes for codes of the public protocol; all others are a failure.
_NOT_FOUND_CODES = range(40400, 40500)
_NOT_ALLOWED_CODES = frozenset({40100, 40300})
_LATER_CODES = range(42900, 43000)


class OnSameKey(StrEnum):
    """Handling of a pending message under the own key of a message that is sent."""

    REPLACE = "replace"
    KEEP = "keep"


@app.command()
@with_session
def send(
    session: Session,
    *,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic to send to.", autocompletion=topics)],
    body: Annotated[str, typer.Argument(metavar="BODY", help="Message body; - reads it from stdin.")],
    at: Annotated[
        str | None, typer.Option(metavar="TIME", help="Delivery time: RFC 3339, epoch milliseconds, or +5m.")
    ] = None,
    delay: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Delay before delivery, such as 5m or 1h30m.")
    ] = None,
    level: Annotated[int | None, typer.Option(min=1, help="Delay level, from 1.")] = None,
    not_after: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="After this time the message becomes a dead letter (formats as --at)."),
    ] = None,
    options: MessageOptions,
    message_id: Annotated[
        str | None, typer.Option("--id", help="Message id; a repeated send with the same id is stored once.")
    ] = None,
    own_key: Annotated[
        str, typer.Option(metavar="KEY", help="Own key: at most one pending message of the topic has it.")
    ] = "",
    on_same_key: Annotated[
        OnSameKey | None,
        typer.Option(help="Replace or keep a pending message with the same own key.  [default: replace]"),
    ] = None,
) -> None:
    """Send one message and print its id.

    With --on-same-key keep, the command prints the id of the pending message, if there is one.
    """
    due = _due(at, delay, level)
    until = _until(not_after)
    properties = options.properties() | _own_key(own_key, on_same_key)
    payload = sys.stdin.buffer.read() if body == "-" else os.fsencode(body)
    from broker_adapter.runtime.clock import SystemClock
    from broker_adapter.wire import rocketmq_v2 as public
    from broker_adapter.wire.mapping import NOT_AFTER_MS, set_timestamp

    now_ms = SystemClock().now_ms()
    message_id = message_id or new_message_id(now_ms, os.getpid(), secrets.token_bytes(10))
    message = public.Message(topic=public.Resource(name=topic), user_properties=properties, body=payload)
    system = message.system_properties
    system.message_id = message_id
    system.keys.extend(options.key or [])
    system.body_encoding = public.IDENTITY
    set_timestamp(system.born_timestamp, now_ms)
    if until is not None:
        until_ms = until.epoch_ms if isinstance(until, At) else now_ms + until.delay_ms
        message.user_properties[NOT_AFTER_MS] = str(until_ms)
    system.message_type = public.FIFO if options.group else public.NORMAL
    if options.tag:
        system.tag = options.tag
    if options.group:
        system.message_group = options.group
    _delay(message, due)
    with session.connect() as client:
        try:
            response = client.send(message)
        except Exception as error:
            if getattr(error, "retriable", False):
                text = f"{error} (if in doubt, repeat with --id {message_id})"
                raise CommandFailed(text, ExitCode.UNAVAILABLE) from error
            raise
    _show_sent(session, topic, message_id, own_key, response)


def _show_sent(
    session: Session, topic: str, message_id: str, own_key: str, response: public.SendMessageResponse
) -> None:
    entry = response.entries[0] if response.entries else None
    _check(entry.status if entry is not None else response.status)
    stored_id = entry.message_id if entry is not None else message_id  # another message if that one was kept instead
    recall_handle = entry.recall_handle if entry is not None else ""
    session.show({"topic": topic, "message_id": stored_id, "recall_handle": recall_handle or None}, stored_id)
    if stored_id != message_id and not session.as_json:
        out.note(f"not stored: pending message {stored_id} has the own key {own_key}")


@app.command()
@with_session
def get(
    session: Session,
    *,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic of the message.", autocompletion=topics)],
    message_id: Annotated[str, typer.Argument(metavar="[ID]", help="Message id.")] = "",
    own_key: Annotated[
        str, typer.Option(metavar="KEY", help="Show the pending message with this own key, instead of an id.")
    ] = "",
    body: BodyOption = False,
    unmasked: UnmaskedOption = False,
) -> None:
    """Show a message: state, result for each group, and content."""
    if bool(message_id) == bool(own_key):
        raise refused("give one of them after the topic", "ID", "--own-key")
    with session.connect() as client:
        found = client.message(topic, message_id, own_key=own_key, with_body=body, unmasked=unmasked)
    if state_word(found) == "unknown":
        text = f"message {message_id} is not known in topic {topic}: never sent there, or forgotten since"
        if own_key:
            text = f"no pending message in topic {topic} has the own key {own_key}"
        raise CommandFailed(text, ExitCode.NOT_FOUND)
    held = ", held: its topic is paused or slowed" if found.is_held else ""
    ended = f" {out.when(found.ended_at_ms)}" if found.ended_at_ms else ""
    facts = [("state", state_word(found) + held + ended), *_group_facts(found), *_message_facts(found)]
    session.show_facts(found, facts)


@app.command()
@with_reason
def recall(
    session: Session,
    *,
    selection: MessageSelection,
    consent: Consent,
) -> None:
    """Recall delayed messages before they are delivered.

    Select messages by the recall handle that the send returned, or by a topic with message ids or a filter. Each
    message is either recalled or delivered, and the output shows which. Messages of a filter are recalled by a job of
    the daemon: it continues after Ctrl-C and after a restart, see 'dmq msg jobs'. The exit code is 7 if some messages
    were not recalled, 3 if none was, and 1 if the job was stopped.
    """
    chosen = selection.read()
    with session.connect() as client:
        if chosen.handle and not consent.dry_run:
            _recall_one(session, client, chosen.topic, chosen.handle)
        else:
            run_change(session, client, chosen, RECALL, consent)


@app.command()
@with_reason
def reschedule(
    session: Session,
    *,
    at: Annotated[
        str | None, typer.Option(metavar="TIME", help="New delivery time: RFC 3339, epoch milliseconds, or +5m.")
    ] = None,
    in_: Annotated[
        str | None, typer.Option("--in", metavar="DURATION", help="Delay from now, such as 5m or 1h30m.")
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(metavar="OFFSET", help="Move each time, such as +1h or -30m; for messages of a filter."),
    ] = None,
    selection: MessageSelection,
    consent: Consent,
) -> None:
    """Change the delivery time of delayed messages.

    A past time means now. Select messages by a recall handle, which remains valid, or by a topic with message ids or
    a filter. Messages of a filter are rescheduled by a job of the daemon: it continues after Ctrl-C and after a
    restart, and moves no message twice. Messages of a message group are delivered in the order of their new times.
    The exit code is 7 if some messages were not rescheduled, 3 if none was, and 1 if the job was stopped.
    """
    if sum(option is not None for option in (at, in_, by)) != 1:
        raise refused("give one of them", "--at", "--in", "--by")
    chosen = selection.read(needs_query="--by" if by is not None else "")
    due, by_ms = _time(at, in_, "--in"), _offset(by)
    with session.connect() as client:
        if due is None:
            change = moving(by_ms)
        else:
            change = rescheduling(client.now_ms() + due.delay_ms if isinstance(due, After) else due.epoch_ms)
        run_change(session, client, chosen, change, consent)


def _offset(text: str | None) -> int:
    if text is None:
        return 0
    with refusing("--by", text):
        duration_ms = parse_duration(text.lstrip("+-") if text[:1] in {"+", "-"} else text)
        if not duration_ms:
            raise ValueError("an offset other than 0 is expected")
    return -duration_ms if text.startswith("-") else duration_ms


@app.command()
@with_reason
def fire(
    session: Session,
    *,
    selection: MessageSelection,
    consent: Consent,
) -> None:
    """Deliver delayed messages now.

    Select messages by a recall handle, or by a topic with message ids or a filter. Messages of a filter are delivered
    by a job of the daemon: it continues after Ctrl-C and after a restart. Messages that were delivered before count as
    success. A pause or a rate limit of the topic still holds the messages. The exit code is 7 if some messages were
    recalled or are unknown, 3 if that is true of all, and 1 if the job was stopped.
    """
    chosen = selection.read()
    with session.connect() as client:
        run_change(session, client, chosen, FIRE, consent)


@app.command()
@with_watch
@with_session
def jobs(
    session: Session,
    *,
    topic: Annotated[
        str, typer.Argument(metavar="[TOPIC]", help="Only jobs of this topic.", autocompletion=topics)
    ] = "",
) -> None:
    """List changes of messages by a filter, newest first.

    At most 100 are listed. 'dmq msg outcomes' shows the messages of one.
    """
    with session.connect() as client:
        found = client.message_jobs(topic)
        now_ms = client.now_ms()
    session.show_table(
        found,
        ("JOB", "CHANGE", "TOPIC", "QUERY", "STATE", "DECIDED", "CHANGED", "GONE", "UNCHANGED", "STARTED"),
        [
            (
                *(str(job.job_id), _change_of(job, now_ms), job.topic, job.query or "all"),
                *(_job_state(job), f"{job.decided:,} of {job.selected:,}" if job.is_selected else "selecting"),
                *(f"{each:,}" for each in (job.done, job.gone, job.unchanged)),
                out.distance(job.created_at_ms, now_ms),
            )
            for job in found
        ],
        numbers=("JOB", "DECIDED", "CHANGED", "GONE", "UNCHANGED"),
        details=("QUERY", "GONE", "UNCHANGED"),
    )


JobArgument = Annotated[int, typer.Argument(metavar="JOB", help="Job number, as listed by 'dmq msg jobs'.", min=1)]


@app.command()
@with_session
def outcomes(
    session: Session,
    *,
    job: JobArgument,
    missed: Annotated[bool, typer.Option("--missed", help="Only messages that the job did not change.")] = False,
) -> None:
    """Show the outcome of each message of a job.

    Messages that the job has not reached yet are left out. The daemon keeps the outcomes of 100 ended jobs, with
    1,000,000 messages in all.
    """
    with session.connect() as client:
        found = job_of(client, "", job)
        change = {"cancel": "recall", "fire": "fire"}.get(found.WhichOneof("change") or "", "reschedule")
        done = {"recall": "recalled", "fire": "fired"}.get(change, "rescheduled")
        messages = list(outcomes_of(client, job, only_missed=missed))
    rows = [(each.message_id, told(change, done, each)) for each in messages]
    session.show_table({"job": found, "messages": messages}, ("MESSAGE ID", "OUTCOME"), rows)


@app.command()
@with_reason
def stop(session: Session, *, job: JobArgument) -> None:
    """Stop a running job; 'dmq msg resume' continues it.

    Completed changes remain.
    """
    with session.connect() as client:
        ended = client.stop_message_job(job)
    session.show(ended, f"job {ended.job_id} is {_job_state(ended)}: {job_counts(ended)}")


@app.command()
@with_reason
def resume(session: Session, *, job: JobArgument) -> None:
    """Resume a stopped job at its position.

    A job can be resumed after a restart of the daemon as well. It covers the messages that it selected when it was
    started. The command does not change a job that is done.
    """
    with session.connect() as client:
        resumed = client.resume_message_job(job)
    session.show(resumed, f"job {resumed.job_id} is {_job_state(resumed)}: {job_counts(resumed)}")


def _change_of(job: wire.MessageJob, now_ms: int) -> str:
    match job.WhichOneof("change"):
        case "cancel":
            return "recall"
        case "deliver_at_ms":
            return f"reschedule, due {out.distance(job.deliver_at_ms, now_ms)}"
        case "delay_by_ms":
            sign = "+" if job.delay_by_ms > 0 else "-"
            return f"reschedule by {sign}{format_duration(abs(job.delay_by_ms))}"
        case other:
            return str(other)


def _job_state(job: wire.MessageJob) -> str:
    return out.enum_word(job, "state")


def _recall_one(session: Session, client: AdminClient, topic: str, handle: str) -> None:
    """Recall through the public protocol, as a client does."""
    response = client.recall(topic, handle)
    _check(response.status)
    is_repeated = response.status.message != "OK"
    plain = {"topic": topic, "message_id": response.message_id, "recalled_before": is_repeated}
    session.show(plain, response.message_id)
    if is_repeated and not session.as_json:
        out.note(f"{response.status.message}")


def _time(at: str | None, delay: str | None, delay_option: str = "--delay") -> At | After | None:
    if at is not None:
        with refusing("--at", at):
            return parse_when(at)
    if delay is not None:
        with refusing(delay_option, delay):
            return After(parse_duration(delay))
    return None


def _due(at: str | None, delay: str | None, level: int | None) -> At | After | int | None:
    if sum(option is not None for option in (at, delay, level)) > 1:
        raise refused("give one of them only", "--at", "--delay", "--level")
    return level if level is not None else _time(at, delay)


def _until(not_after: str | None) -> At | After | None:
    if not_after is None:
        return None
    with refusing("--not-after", not_after):
        return parse_when(not_after)


def _own_key(own_key: str, on_same_key: OnSameKey | None) -> dict[str, str]:
    from broker_adapter.contracts.own_keys import ON_SAME_KEY, OWN_KEY

    if on_same_key is not None and not own_key:
        raise refused("it requires --own-key", "--on-same-key", "--own-key")
    made = {OWN_KEY: own_key} if own_key else {}
    return made | ({ON_SAME_KEY: on_same_key.value} if on_same_key is not None else {})


def _delay(message: public.Message, due: At | After | int | None) -> None:
    from broker_adapter.wire import rocketmq_v2 as public
    from broker_adapter.wire.mapping import set_timestamp

    match due:
        case At(epoch_ms):
            set_timestamp(message.system_properties.delivery_timestamp, epoch_ms)
            message.system_properties.message_type = public.DELAY
        case After(delay_ms):
            message.user_properties["TIMER_DELAY_MS"] = str(delay_ms)
        case int():
            message.user_properties["DELAY"] = str(due)


def _check(status: public.Status) -> None:
    from broker_adapter.wire import rocketmq_v2 as public

    if status.code == public.OK:
        return
    text = f"refused: {status.message} ({int(status.code)})"
    if status.code in _NOT_FOUND_CODES:
        raise CommandFailed(text, ExitCode.NOT_FOUND)
    if status.code in _NOT_ALLOWED_CODES:
        raise CommandFailed(text, ExitCode.NOT_ALLOWED)
    raise CommandFailed(text, ExitCode.UNAVAILABLE if status.code in _LATER_CODES else ExitCode.FAILURE)


def state_word(message: wire.GetMessageResponse | wire.ListedMessage | wire.FoundMessage | wire.GroupState) -> str:
    """Return the word of a state, as shown and as accepted by options; the number of a state of a newer daemon."""
    try:
        return MessageState(message.state).word
    except ValueError:
        return str(message.state)


def _group_facts(found: wire.GetMessageResponse) -> list[tuple[str, str]]:
    if found.queue_offset < 0:
        return []
    facts: list[str] = []
    for each in found.groups:
        facts.append(f"{each.group}: {_group_state(each)}")
        if each.HasField("failure"):
            reason = reason_of(each.failure)
            by = f" by {reason.client}" if reason.client else ""
            facts.append(f"{each.group}: failed at {out.when(each.failed_at_ms)}{by}: {reason.error or NOT_REPORTED}")
    facts = facts or ["none has read the topic"]
    return [("groups" if not number else " ", fact) for number, fact in enumerate(facts)]


def _group_state(group: wire.GroupState) -> str:
    word, at = state_word(group), out.when(group.at_ms)
    match word:
        case "leased":
            return f"{word}, attempt {group.attempt}" + (f", until {at}" if at else "")
        case "retrying":
            return f"{word}, attempt {group.attempt} at {at}"
        case "ready":
            attempt = f", attempt {group.attempt}" if group.attempt > 1 else ""
            return word + attempt + (", held: the group is paused" if group.is_paused else "")
        case "dead":
            return f"{word} since {at}" + (f", {_outcome(group)}" if group.outcome else "")
        case "finished":
            return f"{word}: acknowledged, or passed over"
        case _:
            return word


def _outcome(group: wire.GroupState) -> str:
    """Return the outcome of a dead letter; a redriven one names its new message."""
    topic, _, rest = group.outcome_note.partition(" ")
    new_id, _, to_group = rest.partition(" ")
    what = f"as {new_id} to topic {topic} {to_group}".rstrip() if group.outcome == "redriven" else group.outcome_note
    return f"{group.outcome} {what} at {out.when(group.outcome_at_ms)}".replace("  ", " ")


def _message_facts(found: wire.GetMessageResponse) -> list[tuple[str, str]]:
    return [
        ("topic", found.topic),
        ("message id", found.message_id),
        ("redriven from", found.content.properties.get(PARENT_MESSAGE_ID, "") if found.HasField("content") else ""),
        ("deliver at", out.when(found.deliver_at_ms)),
        ("stored at", out.when(found.stored_at_ms)),
        ("queue", f"{found.queue_id}, offset {found.queue_offset}" if found.queue_id >= 0 else ""),
        *(content_facts(found.content) if found.HasField("content") else ()),
    ]


_PAGE = 100
_LISTED_NUMBERS = ("QUEUE", "OFFSET", "BYTES")
_DETAILS = ("BYTES", "OFFSET", "QUEUE", "STORED", "TAG")  # of a list of messages
_TIMES = "RFC 3339, epoch milliseconds, +5m or -1h from now"


class State(StrEnum):
    """States of the messages of a topic."""

    WAITING = MessageState.WAITING.word
    QUEUED = MessageState.QUEUED.word
    HELD = "held"  # due, and held back by a pause or a rate of the topic


@app.command()
@with_watch
@with_session
def ls(
    session: Session,
    *,
    topic: TopicArgument,
    state: Annotated[
        State | None,
        typer.Option(
            case_sensitive=False,
            help="Delayed messages, queued messages, or due messages held by a pause or a rate limit.",
        ),
    ] = None,
    due_after: Annotated[str | None, typer.Option(metavar="TIME", help=f"Due at this time or later: {_TIMES}.")] = None,
    due_before: Annotated[str | None, typer.Option(metavar="TIME", help="Due before this time.")] = None,
    key: Annotated[str, typer.Option(metavar="KEY", help="Only messages with this key.")] = "",
    own_key: Annotated[str, typer.Option(metavar="KEY", help="Only messages sent with this own key.")] = "",
    tag: Annotated[str, typer.Option(metavar="TAG", help="Only messages with this tag.")] = "",
    newest: Annotated[bool, typer.Option("--newest", help="List the newest message first.")] = False,
    query: Annotated[
        str,
        typer.Option(
            metavar="QUERY",
            help="Terms that all match, such as 'state:waiting tag:created due-before:+1h', instead of the options.",
        ),
    ] = "",
    limit: LimitOption = 20,
    after: AfterOption = "",
) -> None:
    """List the queued messages of a topic, then the delayed ones.

    Queued messages include acknowledged ones; 'dmq msg get' shows the result for each group. Delayed messages are
    listed by delivery time, the next one first. For --due-after and --due-before, a message without a delivery time
    is due at the time when it was stored. A search with few results may take long, but does not delay other clients.
    """
    from dmq.admin import admin_v1 as wire

    request = wire.ListMessagesRequest(
        topic=topic,
        state=("WAITING" if state is State.HELD else state.name) if state is not None else None,
        due_after_ms=instant_ms(due_after, "--due-after") or 0,
        due_before_ms=instant_ms(due_before, "--due-before") or 0,
        key=key,
        own_key=own_key,
        tag=tag,
        newest_first=newest,
        query=query,
        token=after,
    )
    found: list[wire.ListedMessage] = []
    with session.connect() as client, Progress(f"messages of {topic}", quiet=session.as_json) as progress:
        while True:
            request.limit = min(_PAGE, limit - len(found))
            page = client.messages(request)
            found += [each for each in page.messages if state is not State.HELD or each.is_held]
            request.token = page.next_token
            progress.show(f"{len(found):,} found", done=len(found), of=limit)
            if len(found) >= limit or not page.next_token:
                break
        now_ms = 0 if session.as_json else client.now_ms()
    session.show_table(
        {"messages": found, "next": request.token or None},
        ("STATE", "DUE", "STORED", "MESSAGE ID", "QUEUE", "OFFSET", "TAG", "KEYS", "BYTES"),
        (_listed_row(each, now_ms) for each in found),
        numbers=_LISTED_NUMBERS,
        details=_DETAILS,
    )
    if request.token and not session.as_json:
        out.note(f"there may be more: --after {request.token}")


def _listed_row(message: wire.ListedMessage, now_ms: int) -> tuple[str, ...]:
    is_queued = message.queue_id >= 0
    tag, keys, size = _content_cells(message)
    return (
        State.HELD.value if message.is_held else state_word(message),
        *(out.distance(each, now_ms) for each in (message.deliver_at_ms, message.stored_at_ms)),
        message.message_id,
        *(str(each) if is_queued else "" for each in (message.queue_id, message.queue_offset)),
        *(tag, keys, size),
    )


def _content_cells(message: wire.ListedMessage | wire.PeekedMessage) -> tuple[str, str, str]:
    """Return the tag, the keys and the size of a message; an unreadable one has none."""
    if not message.HasField("content"):
        return "", "", "cannot be read"
    return message.content.tag, " ".join(message.content.keys), f"{message.content.body_bytes}"


@app.command()
@with_session
def count(session: Session, *, topic: TopicArgument) -> None:
    """Count the queued and the delayed messages of a topic.

    Queued messages include acknowledged ones.
    """
    with session.connect() as client:
        found = client.count(topic)
    total = sum(each.end_offset - each.begin_offset for each in found.queues)
    numbers = ("QUEUE", "BEGIN", "END", "MESSAGES")
    rows = [
        (f"{each.queue_id}", f"{each.begin_offset}", f"{each.end_offset}", f"{each.end_offset - each.begin_offset:,}")
        for each in found.queues
    ]
    session.show_table({**to_plain(found), "messages": total}, numbers, rows, numbers=numbers)
    if not session.as_json:
        typer.echo(f"{total:,} in queues, {found.pending:,} wait for their time")


@app.command()
@with_session
def peek(
    session: Session,
    *,
    topic: TopicArgument,
    queue: Annotated[int | None, typer.Option(min=0, help="Queue to read.  [default: all queues, in order]")] = None,
    offset: Annotated[
        int | None, typer.Option(min=0, help="First offset to read.  [default: the first offset of the queue]")
    ] = None,
    limit: LimitOption = 10,
    body: Annotated[bool, typer.Option("--body", help="Include bodies (base64 in JSON).")] = False,
    unmasked: UnmaskedOption = False,
) -> None:
    """Show messages in the queues of a topic without consuming them."""
    if offset is not None and queue is None:
        raise refused("an offset requires --queue", "--offset")
    with session.connect() as client:
        ranges = client.count(topic).queues
        if queue is not None and queue >= len(ranges):
            text = f"topic {topic} has the queues 0 to {len(ranges) - 1}, and no queue {queue}"
            raise CommandFailed(text, ExitCode.NOT_FOUND)
        found: list[wire.PeekedMessage] = []
        for each in ranges if queue is None else (ranges[queue],):
            start = each.begin_offset if offset is None else offset
            peek = partial(client.peek, topic, each.queue_id, with_body=body, unmasked=unmasked)
            found += _messages(peek, each, start, limit - len(found))
            if len(found) >= limit:
                break
        now_ms = 0 if session.as_json else client.now_ms()
    session.show_table(
        found,
        ("QUEUE", "OFFSET", "STORED", "MESSAGE ID", "TAG", "KEYS", "BYTES", *["BODY"] * body),
        [_peeked_row(each, now_ms, with_body=body) for each in found],
        numbers=_LISTED_NUMBERS,
        details=("BYTES", "STORED", "TAG"),
    )


def _messages(
    peek: Callable[..., wire.PeekMessagesResponse], within: wire.QueueRange, offset: int, limit: int
) -> list[wire.PeekedMessage]:
    """Return up to ``limit`` messages from ``offset`` on. The daemon refuses an offset outside the queue."""
    found: list[wire.PeekedMessage] = []
    while True:
        page = peek(offset=offset, limit=min(_PAGE, limit - len(found)))
        found += page.messages
        offset = page.next_offset
        if len(found) >= limit or offset >= within.end_offset:
            return found


def _peeked_row(message: wire.PeekedMessage, now_ms: int, *, with_body: bool) -> tuple[str, ...]:
    return (
        *(str(message.queue_id), str(message.queue_offset), out.distance(message.stored_at_ms, now_ms)),
        *(message.message_id, *_content_cells(message)),
        *([masking_of(message.content) or out.body_text(message.content.body)] if with_body else []),
    )
