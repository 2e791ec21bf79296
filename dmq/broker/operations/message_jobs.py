"""Bulk changes of pending messages: cancel, deliver now or reschedule all messages of a topic that match a filter.

A job has two parts. First it *selects*: it reads the index of the topic's pending messages in the order of their ids,
and writes a row for each match. A message that moves on the timeline keeps its place in that order, so it is selected
once. Nothing is changed before the selection is complete; after a crash the selection starts again.

Then the job gives each selected message one outcome. The row of a message gets the outcome in the batch that changes
the message, so that a crash repeats no change. A message that was delivered or changed in the meantime has that as its
outcome.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from heapq import nsmallest
from typing import Final, NamedTuple

import structlog

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import pack_id
from dmq.broker.delayed import Changed, ChangeOutcome, DelayedMessages, Meant
from dmq.broker.operations.jobs import Jobs, rows_per_unit
from dmq.broker.operations.message_filter import is_due, is_meant
from dmq.broker.topics import BrokerPart, SharedParts, Topic
from dmq.errors import StoreCorrupt
from dmq.store import Store
from dmq.store.schema.keys import META_MESSAGE_JOB, Family, is_held_key, meta_range, pack_index_prefix, waiting_range
from dmq.store.schema.messages.index import EntryState, decode_index
from dmq.store.schema.messages.record import (
    DELAYED_KINDS,
    WAITING_HEADER_BYTES,
    QueuedMessage,
    decode_queued,
    decode_waiting,
    encode_queued,
)
from dmq.store.schema.operators.message_jobs import (
    JobMessage,
    MessageJob,
    MessageJobKind,
    decode_job_message,
    decode_message_job,
    encode_job_message,
    encode_message_job,
    job_message_key,
    job_message_offset,
    job_messages_range,
    message_job_key,
)
from dmq.store.writer.operations import Delete, Op, Put
from retry.dead_letter import JobState

log = structlog.get_logger("dmq.broker")

SAMPLES: Final = 20  # messages that a dry run returns
ROWS_PER_UNIT_MAX: Final = 128
JOBS_KEPT: Final = 100  # ended jobs; the oldest make room
MESSAGES_KEPT: Final = 1_000_000  # outcomes of ended jobs; the newest job keeps all of its own
_JOB_ROWS_MAX: Final = 1_000_000
_ROWS_PER_READ_MAX: Final = 512
_BYTES_PER_READ: Final = 4 * 1024 * 1024
_FIRST_READ: Final = 16  # each message may be 4 MiB in memory; later reads adapt to the size of the messages
_TRIES_MAX: Final = 16  # an entry that moves between two reads is searched again
_GONE: Final = frozenset(
    (ChangeOutcome.TOO_LATE, ChangeOutcome.CANCELLED, ChangeOutcome.REPLACED, ChangeOutcome.UNKNOWN)
)


class PendingMessage(NamedTuple):
    """Pending message that matches a filter."""

    sequence: int
    message: QueuedMessage
    is_held: bool


class DryRun(NamedTuple):
    """Number of matching messages, and the first of them by delivery time."""

    matching: int
    samples: Sequence[PendingMessage]


class OutcomePage(NamedTuple):
    """Page of the messages of a job, and the offset of the next page; -1 at the end."""

    messages: Sequence[JobMessage]
    next_offset: int


class _Read(NamedTuple):
    """Matches of one read of the index, and the key of the next read; None at the end."""

    found: Sequence[PendingMessage]
    next_key: bytes | None
    bytes_read: int


class MessageJobs(BrokerPart):
    """Bulk changes of pending messages. It belongs to the event loop, and resumes stored jobs when created."""

    def __init__(self, shared: SharedParts, delayed: DelayedMessages) -> None:
        super().__init__(shared)
        self._delayed = delayed
        self._turn = asyncio.Lock()  # one unit at a time; a stop waits for the end of the unit
        self._jobs = Jobs[MessageJob](shared.commits, self)
        rows = self._store.scan(Family.META, *meta_range(META_MESSAGE_JOB), limit=_JOB_ROWS_MAX).rows
        self._jobs.load([self._loaded(decode_message_job(value)) for _, value in rows])

    async def close(self) -> None:
        """Stop the job tasks; running jobs resume in the next run."""
        await self._jobs.close()

    # -- calls --------------------------------------------------------------------------------------------------------

    def jobs(self, topic: str = "") -> list[MessageJob]:
        """Return the jobs of a topic, or of all topics, newest first."""
        return self._jobs.newest_first(topic)

    def find(self, job_id: int) -> MessageJob | None:
        """Return a job, or None."""
        return self._jobs.find(job_id)

    def is_at_work(self, topic: str) -> bool:
        """Return True if a job is running on a topic."""
        return self._jobs.is_at_work(topic)

    async def start(self, job: MessageJob) -> MessageJob:
        """Start ``job``, durable on return. It covers the matching messages that are pending when it selects them."""
        return await self._jobs.start(self._prepared(job))

    async def dry_run(self, job: MessageJob) -> DryRun:
        """Return the messages that ``job`` would select now."""
        count, samples = 0, list[PendingMessage]()
        async for found in self._pending(self._prepared(job)):
            count += len(found)
            samples = nsmallest(SAMPLES, (*samples, *found), key=lambda each: each.message.deliver_at_ms)
        return DryRun(count, samples)

    async def stop(self, job_id: int) -> MessageJob:
        """Stop a job at its current position, durable on return; no message is changed after that."""
        stopped = await self._jobs.stop(job_id)
        async with self._turn:
            return self._jobs.find(job_id) or stopped

    async def resume(self, job_id: int) -> MessageJob:
        """Continue a stopped job at its position, durable on return."""
        job = self._jobs.get(job_id)
        if job.state is JobState.STOPPED and self._topic(job) is None:
            raise Refused(Rule.NOT_FOUND, "the topic of the job was removed", value=job.topic)
        return await self._jobs.resume(job_id)

    async def outcomes(self, job_id: int, *, offset: int, limit: int, only_missed: bool) -> OutcomePage:
        """Return the messages of a job from ``offset`` on; with ``only_missed`` those that it did not change."""
        job = self._jobs.get(job_id)
        end = job.end_offset if job.is_selected else 0
        found, at = list[JobMessage](), end
        rows_max = max(limit, _ROWS_PER_READ_MAX) if only_missed else limit
        rows = await self._messages_of(job, offset, end, rows_max)
        for row_offset, each in rows:
            if len(found) == limit:
                at = row_offset
                break
            if not only_missed or each.outcome not in {0, ChangeOutcome.DONE}:
                found.append(each)
        else:
            at = rows[-1][0] + 1 if len(rows) == rows_max else end
        return OutcomePage(found, at if at < end else -1)

    def _prepared(self, job: MessageJob) -> MessageJob:
        """Return a job with its topic and the time of its start. Raise ``Refused`` if it cannot be done."""
        topic = self._catalog.known_topic(job.topic)
        if job.deliver_at_ms:
            self._delayed.check_time(job.deliver_at_ms)
        name = job.filter.property.partition("=")[0]
        if name:
            topic.check_indexed(name)
        return replace(job, topic_id=topic.topic_id, created_at_ms=self._clock.now_ms())

    def _topic(self, job: MessageJob) -> Topic | None:
        """Return the topic of a job, unless it was removed; a topic that was created again is another one."""
        topic = self._names.topics.get(job.topic)
        return topic if topic is not None and topic.topic_id == job.topic_id else None

    def _loaded(self, job: MessageJob) -> MessageJob:
        is_lost = job.state is JobState.RUNNING and self._topic(job) is None
        return self._without_topic(job) if is_lost else job

    def _without_topic(self, job: MessageJob) -> MessageJob:
        """Return a job that stopped because its topic was removed; it cannot be resumed, and its row may stay."""
        log.warning("job_without_topic", job=job.job_id, topic=job.topic)
        return replace(job, state=JobState.STOPPED)

    # -- the work of the job engine -----------------------------------------------------------------------------------

    def subject(self, job: MessageJob) -> tuple[str, str]:
        """Return the topic of the messages that a job changes."""
        return "topic", job.topic

    def ops_of(self, job: MessageJob) -> Sequence[Op]:
        """Return the op that stores a job."""
        return (Put(Family.META, message_job_key(job.job_id), encode_message_job(job)),)

    def to_forget(self, jobs: Sequence[MessageJob]) -> Sequence[MessageJob]:
        """Return the oldest ended jobs beyond ``JOBS_KEPT`` or ``MESSAGES_KEPT``."""
        ended = [job for job in jobs if job.state is not JobState.RUNNING]
        kept = messages = 0
        for job in reversed(ended):
            messages += job.end_offset
            if kept and (kept >= JOBS_KEPT or messages > MESSAGES_KEPT):
                break
            kept += 1
        return ended[: len(ended) - kept]

    def ops_of_removal(self, job: MessageJob) -> Sequence[Op]:
        """Return the ops that delete a job and its messages."""
        return (
            Delete(Family.META, message_job_key(job.job_id)),
            Delete(Family.META, *job_messages_range(job.job_id)),
        )

    def is_held(self, job: MessageJob) -> bool:
        """Return True on low disk space: a new delivery time needs some. A cancellation is always allowed."""
        return job.kind is not MessageJobKind.CANCEL and self._store.is_disk_low()

    async def advance(self, job: MessageJob) -> int:
        """Select the messages, or change the next ones, durable on return; return the number of changed ones."""
        if self._topic(job) is None:
            self._jobs.advanced(self._without_topic(job))
            return 0
        if not job.is_selected:
            await self._select(job)
            return 0
        async with self._turn:
            if not self._jobs.is_current(job):  # stopped during the wait
                return 0
            return await self._change(job)

    async def _select(self, job: MessageJob) -> None:
        """Write a row for each matching message; rows of a selection that was interrupted are deleted first."""
        await self._commits.commit([Delete(Family.META, *job_messages_range(job.job_id))])
        count = 0
        async for found in self._pending(job):
            if not self._jobs.is_current(job):  # stopped
                return
            rows = [JobMessage(each.message.message_id, each.sequence) for each in found]
            await self._commits.commit([_row(job, count + number, each) for number, each in enumerate(rows)])
            count += len(rows)
        if not self._jobs.is_current(job):
            return
        after = job.selected(count)
        self._jobs.advanced(after)
        await self._commits.commit(self.ops_of(after))

    async def _change(self, job: MessageJob) -> int:
        """Give the next messages their outcome. Those that have one were changed before a crash."""
        limit = rows_per_unit(job, ROWS_PER_UNIT_MAX)
        rows = await self._messages_of(job, job.next_offset, job.end_offset, limit)
        decided = [each.outcome for _, each in rows if each.outcome]
        left = [(offset, each) for offset, each in rows if not each.outcome]
        changed = await self._changed(job, left)
        missed = [
            _row(job, offset, each._replace(outcome=told.outcome, at_ms=told.at_ms))
            for (offset, each), told in zip(left, changed, strict=True)
            if told.outcome is not ChangeOutcome.DONE
        ]
        counts = Counter([*decided, *(int(each.outcome) for each in changed)])
        done = counts.pop(ChangeOutcome.DONE, 0)
        gone = sum(number for outcome, number in counts.items() if outcome in _GONE)
        following = rows[-1][0] + 1 if len(rows) == limit else job.end_offset
        # A stop during the unit has changed the state of the job, and nothing else.
        after = self._jobs.get(job.job_id).advanced(following, done=done, gone=gone, unchanged=counts.total() - gone)
        self._jobs.advanced(after)
        await self._commits.commit([*missed, *self.ops_of(after)])
        return len(changed)

    async def _changed(self, job: MessageJob, left: Sequence[tuple[int, JobMessage]]) -> Sequence[Changed]:
        meant = [Meant(each.message_id, each.sequence) for _, each in left]
        offsets = {each.message_id: (offset, each) for offset, each in left}

        def note(message_id: bytes, told: Changed) -> Put:
            offset, each = offsets[message_id]
            return _row(job, offset, each._replace(outcome=told.outcome, at_ms=told.at_ms))

        if job.kind is MessageJobKind.CANCEL:
            return await self._delayed.cancel(job.topic, meant, note)
        at_ms, by_ms = job.deliver_at_ms, job.delay_by_ms
        return await self._delayed.move(job.topic, meant, lambda due_ms: due_ms + by_ms if by_ms else at_ms, note)

    # -- reads --------------------------------------------------------------------------------------------------------

    async def _messages_of(self, job: MessageJob, first: int, end: int, limit: int) -> list[tuple[int, JobMessage]]:
        """Return the next selected messages with their offsets."""
        start, stop = job_message_key(job.job_id, first), job_message_key(job.job_id, max(first, end))
        rows = (await self._reader.rows(Family.META, start, stop, limit=limit)).rows
        return [(job_message_offset(key), decode_job_message(value)) for key, value in rows]

    async def _pending(self, job: MessageJob) -> AsyncIterator[Sequence[PendingMessage]]:
        """Yield the messages that match the filter of a job, a few at a time."""
        start, stop = waiting_range(job.topic_id)
        if job.filter.message_id:
            start = pack_index_prefix(0, job.topic_id) + pack_id(job.filter.message_id)
            stop = start + b"\0"
        at: bytes | None = start
        step = _FIRST_READ
        await self._commits.flush()  # the index then has no messages that were handed over before
        while at is not None:
            first, limit = at, step
            read = await self._reader.run(
                lambda store: _read(store, job, first, stop, limit)  # noqa: B023 - called before the next
            )
            yield read.found
            at = read.next_key
            step = max(1, min(2 * step, _ROWS_PER_READ_MAX, _BYTES_PER_READ * step // max(1, read.bytes_read)))


def _row(job: MessageJob, offset: int, message: JobMessage) -> Put:
    return Put(Family.META, job_message_key(job.job_id, offset), encode_job_message(message))


def _read(store: Store, job: MessageJob, start: bytes, stop: bytes, limit: int) -> _Read:
    """Return the matches among the next pending messages, which are read with their content."""
    rows = store.scan(Family.INDEX, start, stop, limit=limit)
    receipts = [decode_index(value) for _, value in rows.rows]
    values = store.get_many(Family.TIMELINE, [each.key for each in receipts])
    found, size = list[PendingMessage](), 0
    for (key, _), receipt, value in zip(rows.rows, receipts, values, strict=True):
        timeline_key, value = (receipt.key, value) if value is not None else _moved(store, key)  # noqa: PLW2901
        if value is None:
            continue
        size += len(value)
        match = _match(job, timeline_key, value)
        if match is not None:
            found.append(PendingMessage(receipt.sequence, match, is_held_key(timeline_key)))
    return _Read(found, None if rows.is_complete else rows.rows[-1][0] + b"\0", size)


def _moved(store: Store, index_key: bytes) -> tuple[bytes, bytes | None]:
    """Return the place and the value of an entry that moved between two reads; None if it is not pending any more."""
    for _ in range(_TRIES_MAX):
        (row,) = store.get_many(Family.INDEX, [index_key])
        receipt = decode_index(row) if row is not None else None
        if receipt is None or receipt.state is not EntryState.WAITING:
            return b"", None
        (value,) = store.get_many(Family.TIMELINE, [receipt.key])
        if value is not None:
            return receipt.key, value
    raise StoreCorrupt("a pending message is in the index, but not on the timeline")


def _match(job: MessageJob, timeline_key: bytes, value: bytes) -> QueuedMessage | None:
    """Return a message if it matches the filter and was accepted before the start of the job."""
    entry, chosen = decode_waiting(value), job.filter
    if entry.kind not in DELAYED_KINDS or entry.accepted_at_ms > job.created_at_ms:
        return None
    if not is_due(chosen, entry.deliver_at_ms) or (chosen.only_held and not is_held_key(timeline_key)):
        return None
    body = value[WAITING_HEADER_BYTES:]
    message = decode_queued(encode_queued(0, entry.accepted_at_ms, entry.deliver_at_ms, body))
    return message if is_meant(chosen, message) else None
