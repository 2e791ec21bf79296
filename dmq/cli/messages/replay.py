"""``dmq replay``: send messages of the inner topic to a daemon again, after the loss of its disk.

The command reads the topic, and the daemon accepts the messages as if it had fetched them now. Both may be killed:
accepted messages are durable, and a repeated run skips the messages that the daemon already accepted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from broker_adapter.contracts.limits import MESSAGE_ID_BYTES_MAX
from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire.plain import to_plain
from dmq.cli.bulk.confirm import confirm
from dmq.cli.bulk.progress import Progress
from dmq.cli.nouns import single
from dmq.cli.output import output as out
from dmq.cli.output.errors import CommandFailed, ExitCode, refused
from dmq.cli.output.times import past_ms
from dmq.cli.session.cluster import ClusterAccess, asking_cluster
from dmq.cli.session.options import Consent, Session, with_reason

if TYPE_CHECKING:
    from broker_adapter.remoting import Reading, StoredMessage, UnreadableMessage
    from dmq.admin import admin_v1 as wire
    from dmq.admin.client import AdminClient
    from dmq.trail.export import Spared

app = single()

_BATCH, _BATCH_BYTES = 32, 4 * 1024 * 1024  # per call of the daemon
_PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0, 10.0, 30.0)  # before a call that the daemon could not serve is retried
_SHOWN_MAX = 20
_TIME = "RFC 3339, epoch ms, or -3h for three hours ago."
_ENDED, _THEIRS = "ended", "theirs"
_LABELS: Mapping[str, str] = MappingProxyType(
    {
        "accepted": "accepted",
        "known": "known already",
        "due_before": "due before",
        _ENDED: "forwarded or recalled before",
        _THEIRS: "of other daemons",
        "unreadable": "unreadable",
    }
)


@dataclass(slots=True)
class _Tally:
    """Results of the messages that were read."""

    read: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    unreadable: list[tuple[str, str]] = field(default_factory=list)  # the first ones, with the reason
    reached_ms: int = 0  # storage time of the last replayed message

    def count(self, what: str, named: str = "", why: str = "") -> None:
        """Count the result of a message."""
        self.counts[what] += 1
        if why and len(self.unreadable) < _SHOWN_MAX:
            self.unreadable.append((named, why))


@app.command()
@with_reason
def replay(
    session: Session,
    *,
    since: Annotated[str, typer.Option(metavar="TIME", help=f"Read messages stored since this time. {_TIME}")],
    namesrv: Annotated[str, typer.Option(metavar="HOST:PORT;...", help="Name servers of the cluster.")],
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Read messages stored before this time.")] = None,
    inner_topic: Annotated[str, typer.Option(metavar="TOPIC", help="The inner topic.")] = "dmq_inner_topic",
    due_after: Annotated[str | None, typer.Option(metavar="TIME", help="Skip messages due before this time.")] = None,
    trail: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Trail of the daemons that share the topic; may be repeated."),
    ] = None,
    lost: Annotated[
        list[str] | None, typer.Option(metavar="CELL", help="Cell in the trails whose disk is lost; may be repeated.")
    ] = None,
    consent: Consent,
    access: ClusterAccess,
) -> None:
    """Send messages of the inner topic to the daemon again.

    Use it after the loss of a daemon's disk. The daemon ignores messages that it has. With --trail, it also skips
    messages that the trails record as forwarded, and messages of daemons whose disk is intact. The command shows
    the number of messages and asks for confirmation. The exit code is 7 if a message could not be read. An
    unfinished command prints where to continue.
    """
    from broker_adapter.contracts.topics import check_topic

    if lost and not trail:
        raise refused("--lost requires the trail that contains the cell", "--lost", "--trail")
    now_ms = SystemClock().now_ms
    since_ms, until_ms = past_ms(since, "--since", now_ms), past_ms(until, "--until", now_ms)
    due_after_ms = past_ms(due_after, "--due-after", now_ms)
    if until_ms and until_ms <= since_ms:
        raise refused("it must be later than --since", "--until", given=until)
    options = access.remoting(namesrv, "--namesrv")
    spared = _spared(trail or (), lost or ())
    tally = _Tally()

    async def run(client: AdminClient) -> Reading:
        from broker_adapter.remoting import Reading, RemotingClient

        async with RemotingClient(options) as cluster:
            reading = Reading(cluster, check_topic(inner_topic), since_ms, until_ms)
            count = await reading.begin()
            if count and not consent.dry_run:
                confirm(f"up to {count:,} messages of {inner_topic} would be sent to the daemon", yes=consent.yes)
            call = _Call(client, inner_topic, due_after_ms, tally, is_dry_run=consent.dry_run)
            with Progress("replay", quiet=session.as_json) as progress:
                async for each in reading.messages():
                    tally.read += 1
                    await call.add(each, spared)
                    progress.show(f"{tally.read:,} of {count:,}", done=tally.read, of=count)
                await call.flush()
        return reading

    try:
        with session.connect() as client, asking_cluster():
            reading = asyncio.run(run(client))
    except CommandFailed as error:
        if error.exit_code is ExitCode.USAGE:
            raise
        raise CommandFailed(f"{error.text}; {_so_far(tally)}", error.exit_code) from error
    _show(session, tally, reading, dry_run=consent.dry_run)
    if unreadable := tally.counts["unreadable"]:
        text = f"{unreadable:,} of {tally.read:,} messages cannot be read, and were not given"
        raise CommandFailed(text, ExitCode.PARTIAL if unreadable < tally.read else ExitCode.FAILURE)


class _Call:
    """Messages on their way to the daemon, in batches."""

    def __init__(self, client: AdminClient, topic: str, due_after_ms: int, tally: _Tally, *, is_dry_run: bool) -> None:
        from dmq.admin import admin_v1

        self._client = client
        self._tally = tally
        self._request = admin_v1.ReplayMessagesRequest(
            inner_topic=topic, due_after_ms=due_after_ms, is_dry_run=is_dry_run
        )
        self._bytes = 0

    async def add(self, found: StoredMessage | UnreadableMessage, spared: Spared) -> None:
        """Add a message to the next batch for the daemon unless it is spared; send the batch if it is full."""
        from broker_adapter.contracts.message import pack_id
        from broker_adapter.remoting import UnreadableMessage, to_message
        from broker_adapter.wire.mapping import encode

        if isinstance(found, UnreadableMessage):
            self._tally.count("unreadable", f"offset {found.queue_offset}", found.why)
            return
        message_id = found.message_id
        if not message_id.strip() or len(message_id.encode()) > MESSAGE_ID_BYTES_MAX:
            self._tally.count("unreadable", f"offset {found.queue_offset}", "its id is blank or too long")
            return
        packed = pack_id(message_id)
        if packed in spared.ended or packed in spared.theirs:
            self._tally.count(_ENDED if packed in spared.ended else _THEIRS)
            return
        payload = encode(to_message(found)).payload
        if self._request.messages and self._bytes + len(payload) > _BATCH_BYTES:
            await self.flush()
        self._request.messages.add(
            message_id=message_id,
            payload=payload,
            stored_at_ms=found.stored_at_ms,
            queue_offset=found.queue_offset,
        )
        self._bytes += len(payload)
        if len(self._request.messages) == _BATCH:
            await self.flush()

    async def flush(self) -> None:
        """Send the batch to the daemon."""
        messages = self._request.messages
        if not messages:
            return
        for message, result in zip(messages, await self._replayed(), strict=True):
            fate = str(to_plain(result)["fate"]).lower()
            self._tally.count(fate, message.message_id, result.why)
        self._tally.reached_ms = messages[-1].stored_at_ms
        self._bytes = 0
        del messages[:]

    async def _replayed(self) -> list[wire.Replayed]:
        from dmq.admin.client import DaemonUnavailable

        for pause_s in _PAUSES_S:
            try:
                return list(self._client.replay(self._request))
            except DaemonUnavailable as error:
                out.note(f"{error}; trying again in {pause_s:g} s")
                await asyncio.sleep(pause_s)
        return list(self._client.replay(self._request))


def _spared(trails: list[Path] | tuple[()], lost: list[str] | tuple[()]) -> Spared:
    from dmq.trail.export import Spared, spared_by

    if not trails:
        return Spared()
    try:
        return spared_by(trails, frozenset(lost))
    except ValueError as error:
        raise CommandFailed(str(error), ExitCode.NOT_FOUND) from error


def _so_far(tally: _Tally) -> str:
    if not tally.reached_ms:
        return "nothing was given to the daemon"
    given = ", ".join(f"{count:,} {_LABELS.get(what, what)}" for what, count in sorted(tally.counts.items()))
    return f"until then {given}; continue with --since {tally.reached_ms}"


def _show(session: Session, tally: _Tally, reading: Reading, *, dry_run: bool) -> None:
    counts = {what: tally.counts[what] for what in _LABELS}
    removed = [
        {
            "broker": each.queue.broker,
            "queue_id": each.queue.queue_id,
            "before_offset": each.before_offset,
            "first_stored_at_ms": each.first_stored_at_ms,
        }
        for each in reading.removed
    ]
    why = [{"message": named, "why": why} for named, why in tally.unreadable]
    found = {"read": tally.read, **counts, "missing": reading.missing, "removed": removed, "why": why}
    session.show_facts(
        {**found, "is_dry_run": dry_run},
        [
            ("read", f"{tally.read:,}" + (", and nothing was changed" if dry_run else "")),
            *((_LABELS[fate], f"{count:,}") for fate, count in counts.items()),
            ("gone meanwhile", f"{reading.missing:,}" if reading.missing else ""),
        ],
    )
    if session.as_json:
        return
    for each in removed[:_SHOWN_MAX]:
        first_ms = int(str(each["first_stored_at_ms"]))
        left = f"the first one left was stored at {out.when(first_ms)}" if first_ms else "none is left"
        place = f"queue {each['queue_id']} at {each['broker']}"
        out.note(f"{place}: the cluster has removed the messages before offset {each['before_offset']}; {left}")
    for named, reason in tally.unreadable:
        out.note(f"{named}: {reason}")
