"""The dead set of a client: dead letters of the group, and a note on each with facts that the daemon cannot store.

A forward carries neither the cause of death of an entry nor its last error. Both are stored before the forward in a
*note*: a message in the dead-letter queue of another group, with an id derived from the letter's. A note without its
letter (after a crash in between) has no effect. A letter without its note still has its reason and its attempts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from broker_adapter.contracts.topics import dead_letter_topic
from broker_adapter.runtime.clock import Clock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.client.admin import AdminClient, CallRefused, NotFound, admin, admin_wire
from dmq.client.calls import DaemonCalls, Told
from dmq.client.entries import (
    GROUP,
    TOPIC_PREFIX,
    death_of,
    decode,
    decode_note,
    encode_note,
    note_id_of,
    topic_of,
    unreadable,
)
from dmq.client.holds import LeaseHold
from retry.sink import DeadEntry, Death, Entry, SinkError, SinkStats, SinkUnavailable

NOTES_GROUP = f"{GROUP}-notes"
_PAGE = 1_000
_BODIES = 100
_JOB_S_MAX = 60.0
_LOOK_S = 0.02
_COUNTED_S = 10.0
_WHY = "the entry was requeued"


class _Counted(NamedTuple):
    dead: int
    of: int  # dead letters of all topics at that time
    until_s: float


class DeadSet:
    """The dead entries. Thread-safe; all methods except ``bury`` and ``forward`` block until the daemon answers."""

    def __init__(self, clock: Clock, calls: DaemonCalls) -> None:
        self._clock = clock
        self._calls = calls
        self._closing = threading.Event()
        self._counted: dict[str, _Counted] = {}

    def close(self) -> None:
        """Stop waiting for running jobs; they continue in the daemon."""
        self._closing.set()

    def bury(self, hold: LeaseHold, entry: Entry, death: Death, told: Told) -> None:
        """Write the note, then forward the message to the dead letters."""
        note = encode_note(dead_letter_topic(NOTES_GROUP), hold.message_id, entry, death)

        def noted(_: object, failure: SinkError | None) -> None:
            if failure is not None:
                told(None, failure)
            else:
                self.forward(hold, entry.attempts, told)

        self._calls.ask("SendMessage", wire.SendMessageRequest(messages=[note]), noted)

    def forward(self, hold: LeaseHold, attempts: int, told: Told) -> None:
        """Move a message to the dead letters."""
        request = wire.ForwardMessageToDeadLetterQueueRequest(
            receipt_handle=hold.handle, message_id=hold.message_id, delivery_attempt=attempts
        )
        request.group.name, request.topic.name = GROUP, hold.topic
        self._calls.ask("ForwardMessageToDeadLetterQueue", request, told)

    # -- looking ------------------------------------------------------------------------------------------------------

    def page(self, type_name: str, after: bytes, limit: int) -> list[DeadEntry]:
        """Return dead entries ordered by uid. The cost is a scan of all dead letters of the type."""
        with admin(self._calls) as client:
            letters = self._letters(client, type_name)
            uids = sorted(uid for uid in letters if uid > after)[:limit]
            if not uids:
                return []
            message_ids = [letters[uid].message_id for uid in uids]
            notes = self._notes(client, type_name, message_ids)
            whole = self._whole(client, type_name, message_ids, min(letters[uid].offset for uid in uids))
        return [
            _dead_entry(type_name, letter, notes.get(letter.message_id))
            for uid in uids
            if (letter := whole.get(letters[uid].message_id)) is not None  # None if it was requeued meanwhile
        ]

    def _letters(self, client: AdminClient, type_name: str) -> dict[bytes, admin_wire.DeadLetter]:
        """Return the newest dead letter of each uid, without bodies."""
        chosen = admin_wire.DeadFilter(topics=[topic_of(type_name)])
        return {_entry_of(type_name, letter)[0].uid: letter for letter in _listed(client, GROUP, chosen, limit=_PAGE)}

    def _whole(
        self, client: AdminClient, type_name: str, ids: Sequence[str], offset: int
    ) -> dict[str, admin_wire.DeadLetter]:
        found: dict[str, admin_wire.DeadLetter] = {}
        for some in _slices(ids):
            chosen = admin_wire.DeadFilter(message_ids=some, topics=[topic_of(type_name)])
            for letter in _listed(client, GROUP, chosen, limit=_BODIES, offset=offset, with_body=True):
                found[letter.message_id] = letter
        return found

    def _notes(
        self, client: AdminClient, type_name: str, message_ids: Sequence[str]
    ) -> dict[str, admin_wire.DeadLetter]:
        by_note = {note_id_of(topic_of(type_name), message_id): message_id for message_id in message_ids}
        found: dict[str, admin_wire.DeadLetter] = {}
        for some in _slices(list(by_note)):
            for note in _listed(client, NOTES_GROUP, admin_wire.DeadFilter(message_ids=some), limit=_PAGE):
                found[by_note[note.message_id]] = note
        return found

    # -- sending again ------------------------------------------------------------------------------------------------

    def requeue(self, type_name: str, uids: Sequence[bytes]) -> int:
        """Redrive dead entries; return the number of entries."""
        with admin(self._calls) as client:
            letters = self._letters(client, type_name)
            ids = list({letters[uid].message_id: None for uid in uids if uid in letters})
            done = 0
            for some in _slices(ids):
                request = admin_wire.StartJobRequest(
                    kind=admin_wire.REDRIVE,
                    group=GROUP,
                    filter=admin_wire.DeadFilter(message_ids=some, topics=[topic_of(type_name)]),
                )
                done += self._run(client, request)
                self._purge_notes(client, type_name, some)
        return done

    def _purge_notes(self, client: AdminClient, type_name: str, ids: Sequence[str]) -> None:
        chosen = admin_wire.DeadFilter(message_ids=[note_id_of(topic_of(type_name), each) for each in ids])
        request = admin_wire.StartJobRequest(kind=admin_wire.PURGE, group=NOTES_GROUP, filter=chosen, why=_WHY)
        with suppress(CallRefused):  # another job runs: a remaining note does not affect the next letter
            client.start_job(request)

    def _run(self, client: AdminClient, request: admin_wire.StartJobRequest) -> int:
        """Run a job to its end and return the number of moved letters; wait while another job of the group runs."""
        until_s = self._clock.monotonic_s() + _JOB_S_MAX
        job: admin_wire.Job | None = None
        while job is None or job.state == admin_wire.RUNNING:
            if job is None:
                job = self._begun(client, request)
            else:
                job = next((each for each in client.jobs(GROUP) if each.job_id == job.job_id), job)
            if job is not None and job.state != admin_wire.RUNNING:
                break
            if self._clock.monotonic_s() >= until_s or self._closing.wait(_LOOK_S):
                raise SinkUnavailable("the redrive did not finish in time; the daemon may continue it")
        return job.done

    @staticmethod
    def _begun(client: AdminClient, request: admin_wire.StartJobRequest) -> admin_wire.Job | None:
        try:
            return client.start_job(request)
        except CallRefused:
            if any(job.state == admin_wire.RUNNING for job in client.jobs(GROUP)):
                return None
            raise

    # -- figures ------------------------------------------------------------------------------------------------------

    def stats(self, type_name: str, *, held: int, hidden: int) -> SinkStats:
        """Return the daemon's figures for one type, or for all; ``hidden`` is the number of entries that this client
        postponed.
        """
        with admin(self._calls) as client:
            try:
                dead = client.group(GROUP).dead
            except NotFound:
                dead = 0
            prefix = topic_of(type_name) if type_name else TOPIC_PREFIX
            topics = {topic.name: topic.pending for topic in client.topics() if topic.name.startswith(prefix)}
            if type_name:
                topics = {prefix: topics.get(prefix, 0)}
                dead = self._dead_of(client, prefix, dead) if dead else 0
        waiting = hidden + sum(topics.values())
        return SinkStats(waiting=waiting, waiting_bytes=0, held=held, dead=dead, oldest_at_ms=None)

    def types(self) -> list[str]:
        """Return the types that have a topic."""
        with admin(self._calls) as client:
            names = [topic.name for topic in client.topics()]
        return [name.removeprefix(TOPIC_PREFIX) for name in names if name.startswith(TOPIC_PREFIX)]

    def _dead_of(self, client: AdminClient, topic: str, dead: int) -> int:
        """Return the number of the group's ``dead`` letters in one topic; cached, because it scans all of them."""
        now_s = self._clock.monotonic_s()
        counted = self._counted.get(topic)
        if counted is None or counted.of != dead or counted.until_s < now_s:
            chosen = admin_wire.DeadFilter(topics=[topic])
            request = admin_wire.StartJobRequest(kind=admin_wire.REDRIVE, group=GROUP, filter=chosen, is_dry_run=True)
            job = client.start_job(request)
            counted = self._counted[topic] = _Counted(job.done + job.failed, dead, now_s + _COUNTED_S)
        return counted.dead


def _listed(
    client: AdminClient,
    group: str,
    chosen: admin_wire.DeadFilter,
    *,
    limit: int,
    offset: int = 0,
    with_body: bool = False,
) -> Iterator[admin_wire.DeadLetter]:
    while offset >= 0:
        try:
            page = client.dead_letters(group, chosen, offset=offset, limit=limit, with_body=with_body)
        except NotFound:  # there is no dead letter yet
            return
        for letter in page.letters:
            if letter.content.masking:  # it is not the entry that was sent
                topic = letter.origin_topic
                raise SinkUnavailable(f"the daemon masks messages of {topic}: exclude it from its setting redact")
            yield letter
        offset = page.next_offset


def _slices(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for at in range(0, len(ids), _PAGE):
        yield ids[at : at + _PAGE]


def _entry_of(type_name: str, letter: admin_wire.DeadLetter) -> tuple[Entry, Death]:
    """Return the entry and the cause of death in a letter."""
    body = letter.content.body
    try:
        found = decode(type_name, dict(letter.content.properties), body, stored_at_ms=letter.first_failed_at_ms)
    except (KeyError, ValueError):
        return unreadable(type_name, letter.message_id, body, letter.dead_at_ms), Death.UNREADABLE
    entry = replace(found.entry, attempts=found.entry.attempts + letter.attempts)
    return entry, death_of(admin_wire.Reason.Name(letter.reason))


def _dead_entry(type_name: str, letter: admin_wire.DeadLetter, note: admin_wire.DeadLetter | None) -> DeadEntry:
    entry, death = _entry_of(type_name, letter)
    if note is not None:
        entry, death = decode_note(dict(note.content.properties), entry)
    return DeadEntry(entry=entry, death=death, died_at_ms=letter.dead_at_ms)
