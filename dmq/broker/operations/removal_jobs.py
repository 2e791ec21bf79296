"""Procedures of many units: remove topics and groups, reset groups.

A *procedure* is a row. It is written in one unit with the removal of the name, or with the reset epoch of the group.
Then the procedure works in small units. Each unit is atomic and only moves forward; the last one deletes the row. After
a kill the procedure starts again and finds the remaining work. One procedure runs at a time.

Each message removed from a queue, from the timeline or from a group's progress leaves a final event; see
docs/reference/trail.md. A pending message is RECALLED, a half message ROLLED_BACK, a message that some group has not
finished EXPIRED. A message skipped for a group is FILTERED, its pending retries after their move to the retry lane.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import islice

import structlog

from broker_adapter.contracts.errors import BrokerError, Refused, Rule
from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX
from dmq.broker.groups import NOBODY, GroupQueue, GroupSubscription, Subscriptions, step_end
from dmq.broker.handles import ReceiptHandles
from dmq.broker.io import Place, look_at
from dmq.broker.operations.progress import ProgressReader
from dmq.broker.pulling import Tails
from dmq.broker.topics import BrokerPart, Group, SharedParts, Topic
from dmq.errors import StoreError
from dmq.store import Store
from dmq.store.schema import keys
from dmq.store.schema.accounting.ledger import Term
from dmq.store.schema.keys import Family
from dmq.store.schema.messages.index import decode_index, failed_topic_id
from dmq.store.schema.messages.own_keys import row_of
from dmq.store.schema.messages.properties import scope_place, starts_range
from dmq.store.schema.messages.record import (
    HALF_KINDS,
    WAITING_HEADER_BYTES,
    body_facts,
    decode_history,
    decode_queued,
    decode_waiting,
    encode_queued,
    history_bytes,
    waiting_bytes,
)
from dmq.store.schema.operators.orders import Procedure, decode_procedure, encode_procedure
from dmq.store.schema.topics.group import NO_GROUP, committed_key, group_queue_range
from dmq.store.schema.topics.notified import notified_key
from dmq.store.writer.operations import Append, CloseLedger, Delete, Emit, Op, Put, Tally, Withdraw
from dmq.trail.events import LANE, NO_QUEUE, EventKind, encode_event, reset_event

log = structlog.get_logger("dmq.broker")

NOWHERE = 2**63 - 1  # start offset of a removed group in its reset event
ROWS_PER_UNIT_MAX = 512
BYTES_PER_UNIT_MAX = 4 * 1024 * 1024
_FIRST_STEP = 16  # each row may be 4 MiB in memory; later steps adapt to the size of the rows
_PROCEDURES_MAX = 1_000_000
_FAILED_PAUSE_S = 10.0


class Procedures(BrokerPart):
    """Starts and executes procedures. It belongs to the event loop, and resumes stored ones when created."""

    def __init__(
        self,
        shared: SharedParts,
        *,
        subscriptions: Subscriptions,
        tails: Tails,
        receipts: ReceiptHandles,
    ) -> None:
        super().__init__(shared)
        self._subscriptions = subscriptions
        self.progress = ProgressReader(self._names, self._reader, subscriptions)
        self._settled = subscriptions.settled
        self._tails = tails
        self._receipts = receipts
        self._waiting: list[tuple[Procedure, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None
        orders = keys.meta_range(keys.META_PROCEDURE)
        for key, value in self._store.scan(Family.META, *orders, limit=_PROCEDURES_MAX).rows:
            _ = self._begin(decode_procedure(key, value))

    async def close(self) -> None:
        """Stop the task; the procedures resume in the next run."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def is_at_work(self, topic: Topic) -> bool:
        """Return True if a waiting or running procedure concerns a topic."""
        return any(procedure.topic_id in {0, topic.topic_id} for procedure, _ in self._waiting)

    async def ended(self) -> None:
        """Return once all procedures started so far are done."""
        await asyncio.gather(*(done for _, done in self._waiting), return_exceptions=True)

    # -- starting procedures ------------------------------------------------------------------------------------------

    async def remove(self, *subjects: Topic | Group) -> None:
        """Remove topics and groups with all their data. Their names are unknown from now on; done on return."""
        procedures = [
            Procedure(found.topic_id, 0) if isinstance(found, Topic) else Procedure(0, found.group_id)
            for found in subjects
        ]
        ops: list[Op] = []
        for found, procedure in zip(subjects, procedures, strict=True):
            ops += [*self._names.plan_removal(found), Put(Family.META, procedure.key, encode_procedure(procedure))]
        ordered = self._commits.submit(ops)
        for found in subjects:
            self._names.forget(found)
        begun = [self._begin(procedure) for procedure in procedures]
        await self._commits.committed(ordered)
        for done in begun:
            await self._commits.wait(done)

    async def reset(self, topic: Topic, group: Group, first: Sequence[int], end: Sequence[int]) -> None:
        """Skip all messages below ``end`` of each queue for a group and continue at ``first``; done on return.

        Meanwhile the group's consumers get no messages of the topic. Older handles are refused, also in later runs: the
        epoch written with the procedure is higher than theirs.
        """
        procedure = Procedure(topic.topic_id, group.group_id, tuple(first), tuple(end))
        if any(procedure.key == other.key for other, _ in self._waiting):
            raise Refused(Rule.REQUEST, "the group is being reset on this topic already", value=group.name)
        epoch = keys.pack_u64(self._receipts.next_epoch())
        last = Put(Family.META, keys.reset_key(group.group_id, topic.topic_id), epoch)
        ordered = self._commits.submit([Put(Family.META, procedure.key, encode_procedure(procedure)), last])
        done = self._begin(procedure)
        await self._commits.committed(ordered)
        await self._commits.wait(done)

    def _begin(self, procedure: Procedure) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.add_done_callback(look_at)  # no caller may be left to retrieve the error
        self._waiting.append((procedure, done))
        if not procedure.first:
            names = self._names
            found = (
                names.topics_by_id[procedure.topic_id] if procedure.topic_id else names.groups_by_id[procedure.group_id]
            )
            names.removing.add((type(found), found.name))
        self._subscriptions.retire(procedure.topic_id, procedure.group_id, is_held=bool(procedure.first))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="dmq-procedures")
        return done

    async def _run(self) -> None:
        while self._waiting:
            procedure, done = self._waiting[0]
            try:
                await (self._reset(procedure) if procedure.first else self._remove(procedure))
            except Exception as error:  # any error: a task that ended silently would look like a running procedure
                is_bug = not isinstance(error, BrokerError | StoreError)
                log.error("procedure_failed", procedure=procedure, error=str(error), exc_info=is_bug)  # noqa: TRY400
                if self._store.failure is not None:
                    if not done.done():
                        done.set_exception(error)
                    return
                await asyncio.sleep(_FAILED_PAUSE_S)
                continue
            log.info("procedure_ended", topic=procedure.topic_id, group=procedure.group_id)
            self._waiting.pop(0)
            if not done.done():
                done.set_result(None)

    # -- removal ------------------------------------------------------------------------------------------------------

    async def _remove(self, procedure: Procedure) -> None:
        names = self._names
        await self._subscriptions.retired(procedure.topic_id, procedure.group_id)
        if procedure.topic_id:
            topic = names.topics_by_id[procedure.topic_id]
            await self._cancel(
                keys.half_scope(topic.topic_id), topic
            )  # half messages first: a transaction commit in progress adds pending messages
            await self._cancel(topic.topic_id, topic)
            groups = await self.progress.readers_of(topic)
            await self._leave_lanes(names.lanes_of(topic.topic_id))
            if topic.name.startswith(DEAD_LETTER_PREFIX):
                await self._give_up_letters(topic)
            await self._empty(topic, groups)
            subject: Topic | Group = topic
            ledgers = [CloseLedger(topic.topic_id)]
            left = [GroupSubscription(group.group_id, topic) for group in groups]
            await self._commit([_progress_erased(NO_GROUP, topic.topic_id, number) for number in range(topic.queues)])
            await self._commit(
                [
                    Delete(Family.META, key_of(topic.topic_id, each))
                    for key_of in (keys.begin_key, keys.bound_key)
                    for each in range(topic.queues)
                ]
                + [Delete(Family.META, notified_key(topic.topic_id))]
            )
            await self._commit(
                [Delete(Family.META, keys.reset_key(group.group_id, topic.topic_id)) for group in groups]
            )
        else:
            subject = group = names.groups_by_id[procedure.group_id]
            await self._leave_lanes(names.lanes_of(group.group_id))
            left = [await self.progress.load(group.group_id, each) for each in await self.progress.topics_of(group)]
            for found in left:
                await self._leave(found, None)
            ledgers = await self._reader.run(partial(_ledgers_of, group_id=group.group_id))
            committed = (
                Delete(Family.GROUP, committed_key(topic.topic_id, number, group.group_id))
                for topic in list(names.topics.values())
                for number in range(topic.queues)
            )
            while unit := list(islice(committed, ROWS_PER_UNIT_MAX)):
                await self._commit(unit)
            await self._commit([Delete(Family.META, *keys.reset_range(group.group_id))])
        for key in names.lanes_of(procedure.topic_id or procedure.group_id):
            if names.topics_by_id[key[1]].index_properties:
                await self._shorten_lane(names.lanes[key])
        ops: list[Op] = [Delete(Family.META, procedure.key)]
        for queue in [queue for found in left for queue in found.queues]:
            ops.append(_progress_erased(queue.group_id, queue.topic_id, queue.queue_id))
            if not procedure.topic_id:  # messages after this end never belonged to the group
                ops.append(Emit(reset_event(queue.topic_id, queue.group_id, queue.queue_id, queue.end), NOWHERE))
        if procedure.topic_id:  # of a dead-letter queue: the settled letters and their outcomes
            first, last = (group_queue_range(NO_GROUP, procedure.topic_id, number) for number in (0, 0xFFFF))
            ops.append(Delete(Family.GROUP, first[0], last[1]))
        if procedure.group_id:
            ops.append(Delete(Family.PROPERTY, *starts_range(scope_place(procedure.group_id))))
        for key in names.lanes_of(procedure.topic_id or procedure.group_id):
            lane = names.lanes[key]
            ops.append(Delete(Family.QUEUE, *_queue_range(lane.topic_id, 0)))
            ops += [Delete(Family.META, key_of(lane.topic_id, 0)) for key_of in (keys.begin_key, keys.bound_key)]
            ops.append(_progress_erased(key[0], lane.topic_id, 0))
            ops += [*names.drop_lane(key), CloseLedger(lane.topic_id)]
        await self._commit([*ops, *ledgers])
        self._subscriptions.let_go(procedure.topic_id, procedure.group_id)
        self._settled.forget(procedure.topic_id)
        self._tails.forget(procedure.topic_id)
        names.free_name(subject)

    async def _cancel(self, scope: int, topic: Topic) -> None:
        """Withdraw all entries of a scope from the timeline."""
        async for entries in self._waiting_of(scope):
            ops: list[Op] = []
            for key, message_id, value in entries:
                entry = decode_waiting(value)
                is_half = entry.kind in HALF_KINDS
                kind = EventKind.ROLLED_BACK if is_half else EventKind.RECALLED
                time_ms = 0 if is_half else entry.deliver_at_ms
                event = encode_event(kind, topic.topic_id, 0, NO_QUEUE, entry.attempts, time_ms, message_id)
                body = (
                    (Delete(Family.TIMELINE, keys.half_body_key(keys.unpack_timeline_key(key)[1])),) if is_half else ()
                )
                place = key, scope, message_id, entry.deliver_at_ms, waiting_bytes(value)
                ops.append(Withdraw(*place, body, event, own_key=row_of(value)))
            await self._commit(ops)

    async def _waiting_of(self, scope: int) -> AsyncIterator[list[tuple[bytes, bytes, bytes]]]:
        """Yield (timeline key, id, value) of pending entries of a scope until none is left. The caller must remove each
        batch.

        A pass reads each row once, because a scan from the start would step over all rows deleted before. The next pass
        finds entries that move during a pass.
        """
        start, stop = keys.waiting_range(scope)
        step = _FIRST_STEP
        while True:
            await self._commits.flush()  # so that the index has no entries that the scheduler has already handed over
            at = start
            while rows := (await self._reader.rows(Family.INDEX, at, stop, limit=step)).rows:
                at = rows[-1][0] + b"\0"
                known = [(row[0][8:], decode_index(row[1])) for row in rows]
                wanted = [receipt.key for _, receipt in known]
                values = await self._reader.values(Family.TIMELINE, wanted)
                found = [
                    (key, message_id, value)
                    for key, (message_id, _), value in zip(wanted, known, values, strict=True)
                    if value is not None
                ]
                step = _next_step(step, sum(len(value) for _, _, value in found))
                yield found
            if at == start:
                return

    async def _leave_lanes(self, lanes: Sequence[tuple[int, int]]) -> None:
        """Skip the failed messages of groups: move pending retries to their lane, then finish the lane."""
        for group_id, topic_id in lanes:
            lane = self._names.lanes[group_id, topic_id]
            await self._move_retries(group_id, topic_id, lane.topic_id)
            found = await self.progress.load(group_id, self._names.topics_by_id[topic_id])
            assert found.lane is not None
            await self._leave_queue(found, found.lane, found.lane.end)

    async def _move_retries(self, group_id: int, topic_id: int, lane_id: int) -> None:
        """Move the pending retries of a topic to their lane, in passes as in ``_waiting_of``."""
        start, stop = keys.waiting_range(group_id)
        step = _FIRST_STEP
        while True:
            at, is_complete, is_clean = start, False, True
            while not is_complete:
                found = await self._reader.rows(Family.INDEX, at, stop, limit=ROWS_PER_UNIT_MAX)
                own = [row for row in found.rows if failed_topic_id(row[0]) == topic_id][:step]
                is_complete = found.is_complete and len(own) < step
                if found.rows:
                    at = (own if len(own) == step else found.rows)[-1][0] + b"\0"
                if not own:
                    continue
                is_clean = False
                known = [decode_index(value) for _, value in own]
                wanted = [each.key for each in known]
                values = await self._reader.values(Family.TIMELINE, wanted)
                ops: list[Op] = []
                for key, (row, _), value in zip(wanted, own, values, strict=True):
                    if value is not None:
                        ops.append(self._moved(key, row[8:], value, lane_id))
                step = _next_step(step, sum(len(value or b"") for value in values))
                await self._commit(ops)
            if is_clean:
                return

    def _moved(self, key: bytes, entry_id: bytes, value: bytes, lane_id: int) -> Withdraw:
        entry, body = decode_waiting(value), value[WAITING_HEADER_BYTES:]
        message_id, _ = body_facts(body[history_bytes(body, 0) :])
        record = encode_queued(entry.retry_count, self._clock.now_ms(), 0, body, has_history=True)
        event = encode_event(
            EventKind.RETRY_MOVED,
            decode_history(body, 0).topic_id,
            entry.scope,
            LANE,
            entry.retry_count + 1,
            entry.deliver_at_ms,
            message_id,
        )
        copy = Append(entry.scope, entry_id, lane_id, 0, record, event)
        return Withdraw(key, entry.scope, entry_id, entry.deliver_at_ms, len(value), (copy,))

    async def _give_up_letters(self, topic: Topic) -> None:
        """Give every dead letter without an outcome its final one, PURGED. The caller empties the queue afterwards."""
        group = self._names.group_of_letters(topic.name.removeprefix(DEAD_LETTER_PREFIX))
        group_id = group.group_id if group is not None else 0
        settled = await self._settled.load(topic.topic_id)
        at, is_complete = settled.floor, False
        while not is_complete:
            found = await self._reader.rows(
                Family.QUEUE,
                keys.pack_queue_key(topic.topic_id, 0, at),
                _queue_range(topic.topic_id, 0)[1],
                limit=ROWS_PER_UNIT_MAX,
                bytes_max=BYTES_PER_UNIT_MAX,
            )
            is_complete = found.is_complete
            ops: list[Op] = []
            ended: list[int] = []
            for key, value in found.rows:
                at = keys.queue_offset_of(key) + 1
                if settled.is_finished(at - 1):
                    continue
                record = decode_queued(value)
                origin = record.history.topic_id if record.history is not None else topic.topic_id
                event = encode_event(
                    *(EventKind.PURGED, origin, group_id, NO_QUEUE, record.attempts_before),
                    *(at - 1, record.message_id),
                )
                ops += (Emit(event, at - 1), Tally(topic.topic_id, 0, Term.LETTERS_PURGED, 1))
                ended.append(at - 1)
            await self._commit([*ops, *settled.finish(ended)])

    async def _empty(self, topic: Topic, groups: Sequence[Group]) -> None:
        """Delete all messages of a topic; messages not finished by all groups, or read by no group, are EXPIRED."""
        loaded = [await self.progress.load(group.group_id, topic) for group in groups]
        for queue_id in range(topic.queues):
            progress = [found.queues[queue_id] for found in loaded]
            at = min((queue.floor for queue in progress), default=0)
            stop = _queue_range(topic.topic_id, queue_id)[1]
            is_complete = False
            while not is_complete:
                start = keys.pack_queue_key(topic.topic_id, queue_id, at)
                found = await self._reader.rows(
                    Family.QUEUE, start, stop, limit=ROWS_PER_UNIT_MAX, bytes_max=BYTES_PER_UNIT_MAX
                )
                is_complete = found.is_complete
                ops: list[Op] = []
                for key, value in found.rows:
                    offset = keys.queue_offset_of(key)
                    if not progress or not all(queue.is_finished(offset) for queue in progress):
                        record = decode_queued(value)
                        event = encode_event(
                            *(EventKind.EXPIRED, topic.topic_id, 0, queue_id, 0),
                            *(record.deliver_at_ms, record.message_id),
                        )
                        ops.append(Emit(event, offset))
                    at = offset + 1
                first = keys.pack_queue_key(topic.topic_id, queue_id, 0)
                removed = stop if is_complete else keys.pack_queue_key(topic.topic_id, queue_id, at)
                ops.append(Delete(Family.QUEUE, first, removed))
                await self._commit(ops)

    async def _shorten_lane(self, lane: Topic) -> None:
        """Delete the messages of a lane in small units: the writer reads them for their indexed properties."""
        place, at = Place(lane.topic_id, 0), 0
        while (stop := await self._reader.run(partial(step_end, place=place, begin=at, end=NOBODY - 1))) > at:
            rows = Delete(Family.QUEUE, keys.pack_queue_key(*place, at), keys.pack_queue_key(*place, stop))
            await self._commit([rows, Put(Family.META, keys.begin_key(*place), keys.pack_u64(stop))])
            at = stop

    # -- resets and skipped messages ----------------------------------------------------------------------------------

    async def _reset(self, procedure: Procedure) -> None:
        await self._subscriptions.retired(procedure.topic_id, procedure.group_id)
        topic = self._names.topics_by_id[procedure.topic_id]
        found = await self.progress.load(procedure.group_id, topic)
        # Messages appended after the order but finished before it was durable would be delivered again: skip them too.
        ends = [max(end, queue.end) for queue, end in zip(found.queues, procedure.end, strict=False)]
        await self._leave(found, ends)
        begins = await self._reader.begins(procedure.topic_id, len(found.queues))
        ops: list[Op] = [Delete(Family.META, procedure.key)]
        for queue, at, end, begin in zip(found.queues, procedure.first, ends, begins, strict=False):
            first = max(at, begin)  # the begin may have moved since the order
            ops.append(_progress_erased(queue.group_id, queue.topic_id, queue.queue_id))
            ops += queue.go_on_at(first, end)
            event = reset_event(queue.topic_id, queue.group_id, queue.queue_id, end)
            ops.append(Emit(event, first))
        await self._commit(ops)
        self._subscriptions.let_go(procedure.topic_id, procedure.group_id)

    async def _leave(self, found: GroupSubscription, ends: Sequence[int] | None) -> None:
        """Finish a topic's queues for a group, up to their ends or to the ``ends`` given."""
        for queue in found.queues:
            if ends is None or queue.queue_id < len(ends):
                await self._leave_queue(found, queue, queue.end if ends is None else ends[queue.queue_id])

    async def _leave_queue(self, found: GroupSubscription, queue: GroupQueue, end: int) -> None:
        step = _FIRST_STEP
        while (at := queue.floor) < end:
            offsets: list[int] = []
            while at < end and len(offsets) < step:
                if not queue.is_finished(at):
                    offsets.append(at)
                at += 1
            if not offsets:  # all offsets left are finished; the floor row is out of date
                break
            records = await self._reader.messages([(queue, offset) for offset in offsets])
            ops: list[Op] = []
            for offset, record in zip(offsets, records, strict=True):
                ops.append(Emit(found.event(EventKind.FILTERED, queue, 0, offset, record.message_id), offset))
            ops += queue.finish(offsets)
            step = _next_step(len(offsets), sum(len(record.payload) for record in records))
            await self._commit(ops)

    async def _commit(self, ops: Sequence[Op]) -> None:
        await self._commits.commit(ops)


def _next_step(count: int, size: int) -> int:
    """Return twice ``count`` within the limits, assuming that the next rows have the same size."""
    return max(1, min(2 * count, ROWS_PER_UNIT_MAX, BYTES_PER_UNIT_MAX * count // max(1, size)))


def _ledgers_of(store: Store, group_id: int) -> list[CloseLedger]:
    """Return the ops that close a group's ledgers in all topics, including topics where it has only failed messages."""
    return [CloseLedger(*pair) for pair in store.ledger()[0] if pair[1] == group_id]


def _queue_range(topic_id: int, queue_id: int) -> tuple[bytes, bytes]:
    return keys.pack_queue_key(topic_id, queue_id, 0), keys.pack_queue_key(topic_id, queue_id + 1, 0)


def _progress_erased(group_id: int, topic_id: int, queue_id: int) -> Delete:
    start, stop = group_queue_range(group_id, topic_id, queue_id)
    return Delete(Family.GROUP, start, stop)
