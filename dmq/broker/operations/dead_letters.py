"""Dead-letter queues: list, redrive and purge letters, each with exactly one outcome.

``%DLQ%<group>`` is a topic with one queue. A letter is *settled* once it has an outcome. Settled letters are recorded
as the progress of group 0 (the floor and bitmaps of ``dmq.broker.groups.group_queue``). Each outcome is a row of its
own. Redrives and purges are *jobs*. A job processes each message once, in order, and commits outcomes and its position
in one unit. After a crash a message has either no outcome or its complete outcome, and the job continues from there.

A redriven letter goes to the group that failed it: into the group's retry lane of the topic. There it starts at attempt
1 and is invisible to other groups. A job can choose another target (``all_groups``, ``to_topic``). No group failed an
undecided half message. In these cases the letter becomes a new message of a topic, for all groups.
An unreadable letter is listed without its facts and stays in the queue.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import structlog
from google.protobuf.message import DecodeError

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Envelope, MessageType, pack_id, unpack_id
from broker_adapter.contracts.message_id import new_message_id
from broker_adapter.contracts.topics import RETRY_PREFIX, check_topic, dead_letter_topic, retry_topic
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import NOT_AFTER_MS, full_name, resource_of, to_envelope
from dmq.broker.groups import GroupQueue, Subscriptions
from dmq.broker.io import look_at
from dmq.broker.message_spans import MessageSpans
from dmq.broker.operations.jobs import Jobs, rows_per_unit
from dmq.broker.sending import Placement
from dmq.broker.topics import FORWARDER_GROUP, BrokerPart, Group, SharedParts, Topic
from dmq.broker.transactions import GIVEN_UP_GROUP
from dmq.errors import StoreCorrupt
from dmq.store.schema.accounting.ledger import Term
from dmq.store.schema.keys import META_JOB, Family, job_key, meta_range, pack_queue_key, queue_offset_of
from dmq.store.schema.messages.failure_reason import decode_reason
from dmq.store.schema.messages.index import redriven_history, redriven_id
from dmq.store.schema.messages.record import QueuedMessage, decode_queued, encode_body, encode_history, encode_queued
from dmq.store.schema.operators.orders import decode_job, encode_job
from dmq.store.schema.topics.group import LetterOutcome, decode_outcome, encode_outcome, outcome_key
from dmq.store.schema.topics.names import GROUPED, PLAIN
from dmq.store.writer.operations import Append, Delete, Emit, IfKnown, Op, Put, Tally
from dmq.trail.events import LANE, NO_QUEUE, EventKind, encode_event
from retry.dead_letter import PARENT_MESSAGE_ID, REFUSED, UNREADABLE, Dead, DeadFilter, Job, JobKind, JobState
from retry.policy import Reason

log = structlog.get_logger("dmq.broker")

ROWS_PER_CALL_MAX = 2_000  # scanned by one list call
BYTES_PER_CALL_MAX = 16 * 1024 * 1024
_ROWS_PER_LOOK = 64  # rows are decoded on the event loop, which serves other tasks between two scans
ROWS_PER_UNIT_MAX = 128
BYTES_PER_UNIT_MAX = 4 * 1024 * 1024
JOBS_KEPT = 1_000  # ended jobs make room beyond this; running ones stay
_JOB_ROWS_MAX = 1_000_000


class Letter(NamedTuple):
    """Dead letter as it is listed."""

    dead: Dead
    payload: bytes
    dead_at_ms: int
    outcome: LetterOutcome | None


class Page(NamedTuple):
    """Page of letters, and the offset of the next page; -1 at the end."""

    letters: list[Letter]
    next_offset: int


class _Row(NamedTuple):
    """Message of a dead-letter queue, decoded as far as it is readable."""

    offset: int
    dead: Dead
    record: QueuedMessage
    message: wire.Message | None


_UNREADABLE = QueuedMessage(0, 0, 0, b"", "", "", b"", None)


class DeadLetters(BrokerPart):
    """List calls and jobs on dead letters. It belongs to the event loop, and resumes stored jobs when created."""

    def __init__(
        self,
        shared: SharedParts,
        *,
        subscriptions: Subscriptions,
        placement: Placement,
        spans: MessageSpans | None = None,
    ) -> None:
        super().__init__(shared)
        self._spans = spans
        self._subscriptions = subscriptions
        self._settled = subscriptions.settled
        self._placement = placement
        self._jobs = Jobs[Job](shared.commits, self)
        self.redriven_total = 0
        self.purged_total = 0
        stored = list[Job]()
        for _, value in self._store.scan(Family.META, *meta_range(META_JOB), limit=_JOB_ROWS_MAX).rows:
            try:
                job = decode_job(value)
            except ValueError as error:
                raise StoreCorrupt(str(error)) from error
            if job.state is JobState.RUNNING and dead_letter_topic(job.group) not in self._names.topics:
                raise StoreCorrupt(f"job {job.job_id} uses a dead-letter queue without a record")
            stored.append(job)
        self._jobs.load(stored)

    async def close(self) -> None:
        """Stop the job tasks; running jobs resume in the next run."""
        await self._jobs.close()

    # -- listing ------------------------------------------------------------------------------------------------------

    async def count(self, topic: Topic) -> int:
        """Return the number of dead letters without an outcome."""
        settled = await self._settled.load(topic.topic_id)
        end = await self._reader.end(topic.topic_id, 0)
        return end - settled.finished_count

    async def page(self, group: str, chosen: DeadFilter, *, offset: int, limit: int, with_outcome: bool) -> Page:
        """Return up to ``limit`` matching letters from ``offset`` on; scan at most ``ROWS_PER_CALL_MAX`` messages."""
        topic = self._names.topics.get(dead_letter_topic(group))
        if topic is None:
            return Page([], -1)
        settled = await self._settled.load(topic.topic_id)
        first = offset if with_outcome else max(offset, settled.floor)

        def is_wanted(row: _Row) -> bool:
            return chosen.matches(row.dead) and (with_outcome or not settled.is_finished(row.offset))

        found, next_offset = await self._find(topic, first, is_wanted, limit)
        outcomes = await self._outcomes(topic, found) if with_outcome else [None] * len(found)
        letters = [
            Letter(row.dead, row.record.payload, row.record.stored_at_ms, outcome)
            for row, outcome in zip(found, outcomes, strict=True)
        ]
        return Page(letters, next_offset)

    async def _find(
        self, topic: Topic, first: int, is_wanted: Callable[[_Row], bool], limit: int
    ) -> tuple[list[_Row], int]:
        """Return the first matching rows, and the offset of the next page; -1 at the end."""
        found: list[_Row] = []
        looked = size = 0
        while looked < ROWS_PER_CALL_MAX and size < BYTES_PER_CALL_MAX:
            rows_max, bytes_max = min(_ROWS_PER_LOOK, ROWS_PER_CALL_MAX - looked), BYTES_PER_CALL_MAX - size
            rows, is_complete = await self._rows(topic, first, 2**63, rows_max, bytes_max)
            for row in rows:
                if is_wanted(row):
                    if len(found) == limit:
                        return found, row.offset
                    found.append(row)
                first = row.offset + 1
                size += len(row.record.payload)
            if is_complete or not rows:
                return found, -1
            looked += len(rows)
        return found, first

    async def _rows(self, topic: Topic, first: int, end: int, rows_max: int, bytes_max: int) -> tuple[list[_Row], bool]:
        found = await self._reader.rows(
            Family.QUEUE,
            pack_queue_key(topic.topic_id, 0, first),
            pack_queue_key(topic.topic_id, 0, end),
            limit=rows_max,
            bytes_max=bytes_max,
        )
        return [self._row(topic, queue_offset_of(key), value) for key, value in found.rows], found.is_complete

    def _row(self, topic: Topic, offset: int, value: bytes) -> _Row:
        try:
            record = decode_queued(value)
            dead = self._dead(offset, record)
        except (StoreCorrupt, KeyError, ValueError) as error:
            log.error("dead_letter_unreadable", topic=topic.name, offset=offset, error=str(error))  # noqa: TRY400
            return _Row(offset, Dead(offset=offset, message_id=""), _UNREADABLE, None)
        with suppress(DecodeError):
            message = wire.Message.FromString(record.payload)
            return _Row(offset, replace(dead, keys=tuple(message.system_properties.keys)), record, message)
        return _Row(offset, dead, record, None)

    def _dead(self, offset: int, record: QueuedMessage) -> Dead:
        message_id, history = unpack_id(record.message_id), record.history
        if history is None or not record.is_dead:  # sent to this topic by a producer
            return Dead(offset=offset, message_id=message_id, tag=record.tag, last_failed_at_ms=record.stored_at_ms)
        return Dead(
            offset=offset,
            message_id=message_id,
            origin_topic=self._names.topics_by_id[history.topic_id].name,
            reason=Reason(history.reason),
            attempts=record.attempts_before,
            first_failed_at_ms=history.first_failed_at_ms,
            last_failed_at_ms=history.last_failed_at_ms,
            tag=record.tag,
            failure=decode_reason(history.failure) if history.failure else None,
        )

    async def _outcomes(self, topic: Topic, rows: Sequence[_Row]) -> list[LetterOutcome | None]:
        values = await self._reader.values(Family.GROUP, [outcome_key(topic.topic_id, row.offset) for row in rows])
        return [decode_outcome(value) if value is not None else None for value in values]

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def jobs(self, group: str = "") -> list[Job]:
        """Return the jobs of a group, or of all groups, newest first."""
        return self._jobs.newest_first(group)

    async def start(self, job: Job, *, is_dry_run: bool) -> Job:
        """Start ``job``, durable on return; for a dry run, only count its effects.

        The job covers the letters now in the queue, except for the leading ones that are all settled.
        """
        self._check_target(job)
        self._check_group(job)
        topic = self._names.topics.get(dead_letter_topic(job.group))
        first = end = 0
        if topic is not None:
            first = (await self._settled.load(topic.topic_id)).floor
            end = await self._reader.end(topic.topic_id, 0)
        job = replace(
            job, created_at_ms=self._clock.now_ms(), first_offset=first, next_offset=first, end_offset=end
        ).advanced(first)
        if is_dry_run:
            return await self._counted(topic, job)
        self._jobs.check_alone(job)
        if job.to_topic and self._names.leaves(job.to_topic):  # only the cluster can confirm that it exists
            await self._catalog.topic(job.to_topic)
        if topic is not None and self._names.topics.get(topic.name) is not topic:
            raise Refused(Rule.NOT_FOUND, "the dead letters of the group are being removed", value=job.group)
        return await self._jobs.start(job)

    async def stop(self, job_id: int) -> Job:
        """Stop a job at its current position, durable on return."""
        return await self._jobs.stop(job_id)

    async def resume(self, job_id: int) -> Job:
        """Continue a stopped job at its position, durable on return."""
        topic = self._names.topics.get(dead_letter_topic(self.job(job_id).group))
        end = await self._reader.end(topic.topic_id, 0) if topic is not None else 0
        job = self.job(job_id)
        if job.state is JobState.STOPPED:
            self._check_group(job)
            self._check_target(job)
            # A queue that was made again under this name has other letters at these offsets.
            current = self._names.topics.get(dead_letter_topic(job.group))
            if topic is None or current is None or current.topic_id != topic.topic_id:
                raise Refused(Rule.NOT_FOUND, "the dead letters of the job were removed", value=job_id)
            if topic.created_at_ms > job.created_at_ms or end < job.end_offset:
                raise Refused(Rule.NOT_FOUND, "the dead letters of the job were removed", value=job_id)
        return await self._jobs.resume(job_id)

    def job(self, job_id: int) -> Job:
        """Return a job. Raise ``Refused`` if there is none with this number."""
        return self._jobs.get(job_id)

    def is_at_work(self, group: str) -> bool:
        """Return True if a job is running on the dead letters of a group."""
        return self._jobs.is_at_work(group)

    def _check_target(self, job: Job) -> None:
        """Refuse a topic that cannot receive dead letters, and an unknown topic: a misspelt name would receive all of
        them.
        """
        if not job.to_topic:
            return
        if check_topic(job.to_topic).startswith(RETRY_PREFIX) or job.to_topic == dead_letter_topic(job.group):
            raise Refused(Rule.TOPIC, "dead letters cannot be sent to this topic", value=job.to_topic)
        if job.to_topic not in self._names.topics and not self._names.leaves(job.to_topic):
            why = "create it with 'dmq topic create' first: a redrive makes none"
            raise Refused(Rule.TOPIC_UNKNOWN, why, value=job.to_topic)

    def _check_group(self, job: Job) -> None:
        if job.group != GIVEN_UP_GROUP and _is_for_group(job) and job.group not in self._names.groups:
            why = "the group does not exist: its letters can go to all groups of their topics, or to a topic"
            raise Refused(Rule.REQUEST, why, value=job.group, limit="--all-groups or --to TOPIC")

    async def _counted(self, topic: Topic | None, job: Job) -> Job:
        while topic is not None and job.state is JobState.RUNNING:
            rows, _ = await self._rows(topic, job.next_offset, job.end_offset, ROWS_PER_CALL_MAX, BYTES_PER_CALL_MAX)
            settled = await self._settled.load(topic.topic_id)
            _, job = _look(job, settled, partial(self._is_possible, job, is_dry_run=True), rows, len(rows))
        return job

    # -- the work of the job engine -----------------------------------------------------------------------------------

    def subject(self, job: Job) -> tuple[str, str]:
        """Return the group of the dead letters that a job changes."""
        return "group", job.group

    def ops_of(self, job: Job) -> Sequence[Op]:
        """Return the op that stores a job."""
        return (_job_row(job),)

    def to_forget(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """Return the oldest ended jobs beyond ``JOBS_KEPT``."""
        ended = [job for job in jobs if job.state is not JobState.RUNNING]
        return ended[: max(0, len(jobs) + 1 - JOBS_KEPT)]

    def ops_of_removal(self, job: Job) -> Sequence[Op]:
        """Return the op that deletes a job."""
        return (Delete(Family.META, job_key(job.job_id)),)

    def is_held(self, job: Job) -> bool:
        """Return True on low disk space: a redrive sends. A purge deletes, which is always allowed."""
        return job.kind is JobKind.REDRIVE and self._store.is_disk_low()

    async def advance(self, job: Job) -> int:
        """Execute one unit of a job, durable on return; return the number of letters settled."""
        done_max = rows_per_unit(job, ROWS_PER_UNIT_MAX)
        topic = self._names.topics[dead_letter_topic(job.group)]
        settled = await self._settled.load(topic.topic_id)
        rows, _ = await self._rows(topic, job.next_offset, job.end_offset, ROWS_PER_UNIT_MAX, BYTES_PER_UNIT_MAX)
        if not self._jobs.is_current(job):  # stopped during the read
            return 0
        meant, after = _look(job, settled, partial(self._is_possible, job), rows, done_max)
        self._make_lanes(job, meant)
        ops: list[Op] = [_job_row(after)]
        redriven: list[Callable[[], None]] = []  # emit their spans
        for row in meant:
            is_redrive = job.kind is JobKind.REDRIVE
            ops += self._redriven(topic, job, row, redriven) if is_redrive else self._purged(topic, job, row)
        for row in meant:
            ops += settled.finish((row.offset,))
        self._jobs.advanced(after)
        await self._commits.commit(ops)
        for emit in redriven:
            emit()
        if job.kind is JobKind.REDRIVE:
            self.redriven_total += len(meant)
        else:
            self.purged_total += len(meant)
        return len(meant)

    # -- outcomes -----------------------------------------------------------------------------------------------------

    def _make_lanes(self, job: Job, rows: Sequence[_Row]) -> None:
        """Create missing retry lanes in a unit before the one that uses them, so that they exist even if that one
        fails.
        """
        meant = (row for row in rows if self._is_for_group(job, row) and self._retry_topic(job, row) is None)
        names = {row.dead.origin_topic: None for row in meant}
        ops: list[Op] = []
        for name in names:
            ops += self._subscriptions.lane_id(self._names.groups[job.group], self._names.topics[name])[1]
        if ops:
            self._commits.submit(ops).add_done_callback(look_at)  # a store failure also fails the next unit

    def _is_possible(self, job: Job, row: _Row, *, is_dry_run: bool = False) -> bool:
        """Return True if a letter can get the job's outcome. A dry run accepts an unknown cluster topic."""
        if job.kind is JobKind.PURGE:
            return row.record is not _UNREADABLE
        if row.message is None:
            return False
        target = self._names.topics.get(job.to_topic or row.dead.origin_topic)
        if target is None:
            return is_dry_run and bool(job.to_topic)
        if self._is_for_group(job, row):
            return job.group in self._names.groups
        is_grouped = bool(row.message.system_properties.message_group)
        return target.message_type is None or (target.message_type is MessageType.FIFO) == is_grouped

    def _is_for_group(self, job: Job, row: _Row) -> bool:
        """As the module function, but False for a refused forward of a now local topic: it goes to all groups."""
        has_moved = job.group == FORWARDER_GROUP and not self._names.leaves(row.dead.origin_topic)
        return _is_for_group(job, row) and not has_moved

    def _retry_topic(self, job: Job, row: _Row) -> Topic | None:
        """Return the retry topic of a pull group if the letter was sent back, else None.

        A letter that was sent back carries its delivery attempt. For a pop delivery, the group's progress has it.
        """
        is_sent_back = row.message is not None and row.message.system_properties.delivery_attempt > 0
        return self._names.topics.get(retry_topic(job.group)) if is_sent_back else None

    def _redriven(self, topic: Topic, job: Job, row: _Row, spans: list[Callable[[], None]]) -> list[Op]:
        message = row.message
        assert message is not None
        now_ms = self._clock.now_ms()
        target = self._names.topics[job.to_topic or row.dead.origin_topic]
        message_id = new_message_id(now_ms, os.getpid(), secrets.token_bytes(10))
        if full_name(message.topic) != target.name:
            message.topic.CopyFrom(resource_of(target.name))
        message.system_properties.message_id = message_id
        message.system_properties.ClearField("delivery_timestamp")
        if row.record.history is None:  # remove properties that the daemon added
            message.user_properties.pop(UNREADABLE, None)
        elif row.dead.reason is Reason.REFUSED:
            message.user_properties.pop(REFUSED, None)
        message.user_properties.pop(NOT_AFTER_MS, None)  # a redriven message does not expire
        message.user_properties[PARENT_MESSAGE_ID] = row.dead.message_id
        retries = self._retry_topic(job, row)
        message.system_properties.ClearField("delivery_attempt")
        envelope = to_envelope(message)._replace(own_key="", keeps_first=False)  # a pending message there is newer
        if self._spans is not None:
            emit = self._spans.redriven(envelope.payload, target.name, job.group, message_id)
            spans += [emit] if emit is not None else []
        note = f"{target.name} {message_id}"
        if self._is_for_group(job, row):
            if retries is None:
                ops = self._to_group(self._names.groups[job.group], target, envelope, row, now_ms)
            else:
                ops = [self._placement.accept(retries, envelope, now_ms)._replace(if_known=IfKnown.WRITE)]
            note += f" for group {job.group}"
        else:
            changed, ops = self._names.plan_first({target.name: GROUPED if envelope.message_group else PLAIN})
            self._names.change_topics(changed)  # a unit of a job is urgent and never refused
            ops.append(self._placement.accept(target, envelope, now_ms)._replace(if_known=IfKnown.WRITE))
        return [*ops, *self._outcome_ops(topic, job, row, LetterOutcome("redriven", now_ms, note))]

    def _to_group(self, group: Group, topic: Topic, envelope: Envelope, row: _Row, now_ms: int) -> list[Op]:
        """Append a message to the group's retry lane of a topic, as a failed message with no attempts."""
        lane_id, ops = self._subscriptions.lane_id(group, topic)
        assert not ops, "the lane was made in front of the unit"
        message_id = pack_id(envelope.message_id)
        history = encode_history(redriven_history(topic.topic_id, now_ms))
        body = encode_body(message_id, envelope.tag.encode(), envelope.message_group.encode(), envelope.payload)
        record = encode_queued(0, now_ms, 0, history + body, has_history=True)
        event = encode_event(
            EventKind.QUEUED_FOR_GROUP, topic.topic_id, group.group_id, LANE, 1, row.offset, message_id
        )
        entry_id = redriven_id(message_id, topic.topic_id)
        return [Append(group.group_id, entry_id, lane_id, 0, record, event, IfKnown.WRITE)]

    def _purged(self, topic: Topic, job: Job, row: _Row) -> list[Op]:
        """Return the ops that delete a letter's body and user properties.

        The id, tag, keys and failure history stay.
        """
        record, message, history = row.record, row.message, row.record.history
        payload = b""
        if message is not None:
            payload = wire.Message(topic=message.topic, system_properties=message.system_properties).SerializeToString()
        body = encode_body(record.message_id, record.tag.encode(), record.message_group.encode(), payload)
        if history is not None:
            body = encode_history(history) + body
        value = encode_queued(
            record.attempts_before, record.stored_at_ms, record.deliver_at_ms, body, has_history=history is not None
        )
        put = Put(Family.QUEUE, pack_queue_key(topic.topic_id, 0, row.offset), value)
        return [put, *self._outcome_ops(topic, job, row, LetterOutcome("purged", self._clock.now_ms(), job.why))]

    def _outcome_ops(self, topic: Topic, job: Job, row: _Row, outcome: LetterOutcome) -> list[Op]:
        record = row.record
        kind = EventKind.REDRIVEN if job.kind is JobKind.REDRIVE else EventKind.PURGED
        origin = record.history.topic_id if record.history is not None else topic.topic_id
        group = self._names.group_of_letters(job.group)
        group_id = group.group_id if group is not None else 0
        event = encode_event(kind, origin, group_id, NO_QUEUE, record.attempts_before, row.offset, record.message_id)
        row_of = Put(Family.GROUP, outcome_key(topic.topic_id, row.offset), encode_outcome(outcome))
        term = Term.LETTERS_REDRIVEN if job.kind is JobKind.REDRIVE else Term.LETTERS_PURGED
        return [row_of, Emit(event, row.offset), Tally(topic.topic_id, 0, term, 1)]


def _look(
    job: Job, settled: GroupQueue, is_possible: Callable[[_Row], bool], rows: Sequence[_Row], done_max: int
) -> tuple[list[_Row], Job]:
    """Return the ``rows`` that get their outcome now, at most ``done_max``, and the job after them."""
    meant: list[_Row] = []
    passed = failed = 0
    following = rows[-1].offset + 1 if rows else job.end_offset
    for row in rows:
        if settled.is_finished(row.offset) or not job.filter.matches(row.dead):
            passed += 1
        elif not is_possible(row):
            failed += 1
        elif len(meant) == done_max:
            following = row.offset
            break
        else:
            meant.append(row)
    return meant, job.advanced(following, done=len(meant), passed=passed, failed=failed)


def _is_for_group(job: Job, row: _Row | None = None) -> bool:
    """Return True if a job sends a letter only to its own group; an undecided half message has no such group."""
    if job.kind is JobKind.PURGE or job.to_topic or job.all_groups:
        return False
    history = row.record.history if row is not None else None
    return history is None or history.queue_id != NO_QUEUE


def _job_row(job: Job) -> Put:
    return Put(Family.META, job_key(job.job_id), encode_job(job))
