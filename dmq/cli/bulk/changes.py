"""Common parts of commands that change delayed messages: the selection of messages, and the result of each.

Messages are named, or selected by a filter among the pending ones. The selection is complete before the first change,
so that no message is selected twice. A message delivered or changed in the meantime has its own result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from dmq.cli.bulk.engine import BATCH, check_missing, in_batches, is_confirmed
from dmq.cli.bulk.progress import Progress
from dmq.cli.output import output as out
from dmq.cli.output.errors import CommandFailed, ExitCode, refused
from dmq.cli.output.times import instant_ms
from dmq.cli.session.completion import topics
from dmq.cli.session.options import Consent, OptionGroup, Session

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire
    from dmq.admin.client.client import AdminClient

_SHOWN = 10  # of a dry run, and of messages that were not changed
_PAUSE = 1
_HELD = {_PAUSE: "held until its topic is resumed", 2: "delivered in its turn at the rate of its topic"}  # by HeldBy
_TIMES = "RFC 3339, epoch milliseconds, +5m or -1h from now"


class Targets(NamedTuple):
    """Selection of messages: named ones, or the matches of a filter."""

    topic: str
    ids: Sequence[str] = ()
    handle: str = ""
    filter: wire.ListMessagesRequest | None = None
    own_keys: Sequence[str] = ()


class BulkChange(NamedTuple):
    """Change that a command makes: its texts and its call with the names of messages."""

    name: str
    would: str  # "would be recalled"
    done: str  # "recalled"
    call: Callable[[AdminClient, str, Mapping[str, Sequence[str]]], Sequence[wire.ChangedMessage]]
    reached: Sequence[str]  # outcomes that count as success
    deliver_at_ms: int = 0


RECALL = BulkChange(
    "recall",
    "would be recalled",
    "recalled",
    lambda client, topic, named: client.cancel(topic, **named),
    ("DONE", "CANCELLED"),
)
FIRE = BulkChange(
    "fire",
    "would be delivered now",
    "fired",
    lambda client, topic, named: client.fire(topic, **named),
    ("DONE", "TOO_LATE"),
)


def rescheduling(at_ms: int) -> BulkChange:
    """Return the change to another delivery time."""
    return BulkChange(
        "reschedule",
        f"would be delivered at {out.when(at_ms)}",
        "rescheduled",
        lambda client, topic, named: client.reschedule(topic, deliver_at_ms=at_ms, **named),
        ("DONE",),
        at_ms,
    )


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

    def read(self) -> Targets:
        """Return the selection. Raise a usage error if it is empty or ambiguous."""
        topic, *ids = self.targets
        is_filtered = bool(self.key or self.tag or self.due_after is not None or self.due_before is not None)
        options = ("--key", "--tag", "--due-after", "--due-before", "--all")
        if self.own_key:
            if self.everything or is_filtered or ids:
                why = "an own key selects one message: give only the topic with it"
                raise refused(why, "--own-key", "ID", *options)
            return Targets(topic, own_keys=tuple(dict.fromkeys(self.own_key)))
        if self.everything and is_filtered:
            raise refused("--all selects all pending messages: give it without a filter", *options)
        if (self.everything or is_filtered) and ids:
            raise refused("give message ids or a filter, not both", "ID", *options)
        if self.everything or is_filtered:
            from dmq.admin import admin_v1 as wire

            chosen = wire.ListMessagesRequest(
                topic=topic,
                state=wire.WAITING,
                due_after_ms=instant_ms(self.due_after, "--due-after") or 0,
                due_before_ms=instant_ms(self.due_before, "--due-before") or 0,
                key=self.key,
                tag=self.tag,
            )
            return Targets(topic, filter=chosen)
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

    ids = targets.ids
    if targets.filter is not None:
        found = _find(client, targets, quiet=session.as_json)
        ids = tuple(found)
        if consent.dry_run:
            _show_found(session, client, targets, change, found)
            return
        if ids:
            would = f"{_counted(len(ids))} of topic {targets.topic} {_would(client, targets, change)}"
            is_confirmed(session, would, None, consent)
    elif consent.dry_run:
        found, missing = _look(client, targets)
        if found:
            _show_found(session, client, targets, change, found)
        check_missing(f"not pending in topic {targets.topic}", missing, done=len(found))
        return
    kind, names = ("own_keys", targets.own_keys) if targets.own_keys else ("message_ids", ids)
    if targets.handle:
        kind, names = "recall_handles", [targets.handle]
    answers, failure = in_batches(
        session,
        f"messages of {targets.topic}",
        names,
        lambda batch: change.call(client, targets.topic, {kind: batch}),
        by_one=False,
    )
    changed = [each for answer in answers for each in answer]
    _show(session, targets, change, changed)
    if failure is not None:
        raise failure
    _check(change, changed)


def _find(client: AdminClient, targets: Targets, *, quiet: bool) -> dict[str, wire.ListedMessage]:
    """Return the matches of a filter, in delivery order. A message that moves in the meantime is returned once."""
    from dmq.admin import admin_v1 as wire

    assert targets.filter is not None
    request = wire.ListMessagesRequest(limit=BATCH)
    request.MergeFrom(targets.filter)
    found: dict[str, wire.ListedMessage] = {}
    with Progress(f"messages of {targets.topic}", quiet=quiet) as progress:
        while True:
            page = client.messages(request)
            for each in page.messages:
                if len(found) >= _SHOWN:
                    each.ClearField("content")  # there may be millions of messages
                found[each.message_id] = each
            progress.show(f"{len(found):,} found")
            request.token = page.next_token
            if not page.next_token:
                return found


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


def _check(change: BulkChange, changed: Sequence[wire.ChangedMessage]) -> None:
    failed = [each for each in changed if _outcome(each) not in change.reached]
    if not failed:
        return
    code = ExitCode.FAILURE if any(_outcome(each) == "EXPIRES" for each in failed) else ExitCode.NOT_FOUND
    if len(changed) == 1:
        raise CommandFailed(f"not {change.done}: {_told(change, changed[0])}", code)
    text = f"{len(failed):,} of {_counted(len(changed))} were not {change.done}"
    raise CommandFailed(text, code if len(failed) == len(changed) else ExitCode.PARTIAL)


def _show_found(
    session: Session, client: AdminClient, targets: Targets, change: BulkChange, found: dict[str, wire.ListedMessage]
) -> None:
    first = list(islice(found.values(), _SHOWN))
    if session.as_json:
        out.show_json({"topic": targets.topic, "change": change.name, "matching": len(found), "first": first})
        return
    if first:
        now_ms = client.now_ms()
        rows = [
            (out.distance(each.deliver_at_ms, now_ms), each.message_id, each.content.tag, " ".join(each.content.keys))
            for each in first
        ]
        out.show_table(("DUE", "MESSAGE ID", "TAG", "KEYS"), rows)
    more = f", of which these are the first {len(first)}" if len(found) > len(first) else ""
    typer.echo(f"{_counted(len(found))} {_would(client, targets, change)}{more}")


def _would(client: AdminClient, targets: Targets, change: BulkChange) -> str:
    """Return the effect of a change; a paused topic delivers nothing now."""
    if change is FIRE and client.topic(targets.topic).paused_since_ms:
        return f"would be due now, {_HELD[_PAUSE]}"
    return change.would


def _show(session: Session, targets: Targets, change: BulkChange, changed: Sequence[wire.ChangedMessage]) -> None:
    done = sum(_outcome(each) == "DONE" for each in changed)
    if session.as_json:
        out.show_json(
            {
                "topic": targets.topic,
                "change": change.name,
                "deliver_at_ms": change.deliver_at_ms or None,
                "done": done,
                "messages": changed,
            }
        )
        return
    if targets.filter is None:
        shown = changed
    else:
        shown = list(islice((each for each in changed if _outcome(each) != "DONE"), _SHOWN))
    if shown:
        rows = [(each.message_id, each.own_key, _told(change, each)) for each in shown]
        if targets.own_keys:
            out.show_table(("MESSAGE ID", "OWN KEY", "OUTCOME"), rows)
        else:
            out.show_table(("MESSAGE ID", "OUTCOME"), [(row[0], row[2]) for row in rows])
    if targets.filter is not None:
        held = sum(bool(each.held_by) for each in changed)
        typer.echo(
            f"{_counted(done)} {change.done}"
            + (f", {held:,} of them held by a pause or a rate of the topic" if held else "")
            + (f", {len(changed) - done:,} not" if done < len(changed) else "")
        )


def _told(change: BulkChange, message: wire.ChangedMessage) -> str:
    at = out.when(message.at_ms)
    match _outcome(message):
        case "DONE" if message.held_by:
            return f"is due; {_HELD[message.held_by]}, and can be recalled until then"
        case "DONE" if change.name == "reschedule":
            return f"will be delivered at {at}"
        case "DONE":
            return change.done
        case "TOO_LATE":
            return f"was delivered at {at}"
        case "CANCELLED":
            return f"was recalled at {at}"
        case "REPLACED":
            return f"was replaced at {at} by a later message under its own key"
        case "EXPIRES":
            return f"expires at {at}, not after the new delivery time: unchanged"
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
