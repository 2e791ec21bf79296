"""Outcomes of failed deliveries. Each outcome is one unit of ops, so that a crash applies all of it or none.

    come back       the message stays in its queue; its next attempt is a row
    retry later     the original is finished; a copy is pending for the group (in its retry lane when due)
    dead letter     the original is finished; a copy is stored in the group's dead-letter queue

A copy is written even if its id is already known, because only this copy continues the message that its unit finishes.

A message of a message group never leaves its queue for a retry: later messages of its group wait for it, so it is
hidden in place. The same applies to a dead letter that a consumer of its queue fails, because a copy has no room for
its facts. It also applies to all messages while the disk is almost full: a hidden lease is a small row, a copy is not.

Failures are batched: those that arrive during a read share the next read and unit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple

import structlog

from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable
from broker_adapter.contracts.message import Delivery, pack_id, unpack_id
from broker_adapter.contracts.topics import dead_letter_topic
from broker_adapter.runtime.clock import Moment, moment
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import not_after_of
from dmq.broker.failures.failure_log import FailureLog
from dmq.broker.failures.failure_reasons import FailureReasons
from dmq.broker.groups.group_queue import ATTEMPT_MAX, Lease
from dmq.broker.groups.lease_timers import LeaseEnds
from dmq.broker.groups.subscription import SubscribedQueue, Subscription
from dmq.broker.groups.subscriptions import Subscriptions
from dmq.broker.handles.receipt_handle import ReceiptHandles
from dmq.broker.io.commits import Commits
from dmq.broker.io.reader import Reader
from dmq.broker.topics.catalog import Catalog
from dmq.broker.topics.registry import Group, Topic
from dmq.config.units import format_time
from dmq.errors import StoreError
from dmq.store.schema.failure_reason import decode_reason, encode_reason
from dmq.store.schema.group import decode_exception
from dmq.store.schema.index import EntryState, failed_id, failed_topic_id
from dmq.store.schema.index import Receipt as Stored
from dmq.store.schema.keys import Family
from dmq.store.schema.record import (
    EntryKind,
    History,
    QueuedMessage,
    encode_body,
    encode_history,
    encode_queued,
    encode_waiting,
)
from dmq.store.writer.operations import Append, Emit, IfKnown, Op, Schedule
from dmq.trail.events import LANE, NO_QUEUE, EventKind, encode_event, with_reason
from retry.dead_letter import REFUSED
from retry.failure_reason import FailureReason, bounded
from retry.flow import ComeBack, Failure, LeaseExpired, Outcome, Unwanted, after_failure
from retry.policy import DeadLetter, Reason, RetryAt

log = structlog.get_logger("dmq.broker")

BATCH_MAX = 256
_WHY_CHARS_MAX = 300
_NOT_OURS = -1
_U64 = 2**64 - 1
POSTPONED_MS = 60_000  # delay of a dead letter that does not fit on the disk
DEAD_EVENTS = {
    Reason.EXHAUSTED: EventKind.DEAD_EXHAUSTED,
    Reason.TOO_OLD: EventKind.DEAD_TOO_OLD,
    Reason.FORWARDED: EventKind.DEAD_FORWARDED,
    Reason.SENT_BACK: EventKind.DEAD_SENT_BACK,
    Reason.OPERATOR: EventKind.DEAD_BY_OPERATOR,
    Reason.REFUSED: EventKind.FORWARD_REFUSED,
    Reason.TOO_LATE: EventKind.DEAD_TOO_LATE,
}


class FailedDelivery(NamedTuple):
    """Failed delivery without an outcome yet."""

    queue: SubscribedQueue
    offset: int
    lease: Lease
    failure: Failure
    attempts_told: int  # attempts reported by the consumer; 0: not reported
    handle: str  # the handle under which its reason was reported
    done: asyncio.Future[None]


class Failures:
    """Decides and commits the outcomes of failed deliveries. It belongs to the event loop."""

    def __init__(
        self,
        catalog: Catalog,
        commits: Commits,
        reader: Reader,
        subscriptions: Subscriptions,
        ends: LeaseEnds,
        receipts: ReceiptHandles,
        *,
        levels_ms: Sequence[int],
        keeps_reasons: bool,
    ) -> None:
        self._catalog = catalog
        self._commits = commits
        self._reader = reader
        self._subscriptions = subscriptions
        self._ends = ends
        self._receipts = receipts
        self._levels_ms = tuple(levels_ms)
        self._store = commits.store
        self._clock = self._store.clock
        self.reasons = FailureReasons(catalog.names, receipts, self._clock, is_on=keeps_reasons)
        self._rng = Random()  # jitter only
        self._log = FailureLog(self._clock)
        self._waiting: list[FailedDelivery] = []
        self._task: asyncio.Task[None] | None = None
        self.retried_total = 0
        self.dead_total = 0

    async def close(self) -> None:
        """Stop the task; failures not yet submitted have no effect, and their futures are cancelled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def outcome(
        self,
        queue: SubscribedQueue,
        lease: Lease,
        failure: Failure,
        *,
        attempts_told: int = 0,
        now_ms: int | None = None,
    ) -> Outcome:
        """Return the outcome of the failure of a lease; its message must have been read."""
        if lease.is_suspended and isinstance(failure, LeaseExpired):
            return ComeBack()
        return after_failure(
            self._catalog.policy(queue.group_id),
            failure,
            max(lease.attempts, attempts_told),
            self._clock.now_ms() if now_ms is None else now_ms,
            self._rng,
            since_ms=lease.since_ms or None,
            not_after_ms=self._believed(lease.not_after_ms),
            levels_ms=self._levels_ms,
        )

    def _believed(self, not_after_ms: int) -> int:
        """Return the expiry, or 0 while the clock is not steady: a clock step must not expire a message."""
        return not_after_ms if not_after_ms and self._clock.is_steady() else 0

    def fail(
        self,
        queue: SubscribedQueue,
        offset: int,
        lease: Lease,
        failure: Failure,
        *,
        attempts_told: int = 0,
        handle: str = "",
    ) -> asyncio.Future[None]:
        """Apply the outcome of ``failure``; the future is done when it is durable.

        ``handle`` is the handle that the client sent; by default that of the lease.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        lease.is_returning = True
        self._waiting.append(FailedDelivery(queue, offset, lease, failure, attempts_told, handle or lease.handle, done))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._drain(), name="dmq-failures")
        return done

    async def _drain(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:BATCH_MAX], self._waiting[BATCH_MAX:]
            try:
                await self._handle(batch)
            except asyncio.CancelledError:
                for each in batch + self._waiting:
                    each.done.cancel()
                raise
            except Exception as error:  # noqa: BLE001 - any error is passed to the waiting caller
                if len(batch) > 1:  # one unreadable message must not fail the others
                    for each in batch:
                        await self._handle_alone(each)
                else:
                    self._give_up(batch[0], error)

    async def _handle_alone(self, one: FailedDelivery) -> None:
        try:
            await self._handle([one])
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(one, error)

    @staticmethod
    def _give_up(one: FailedDelivery, error: BaseException) -> None:
        if not isinstance(error, BrokerError | StoreError):
            place = {"topic": one.queue.topic_id, "queue": one.queue.queue_id, "offset": one.offset}
            log.error("failure_not_decided", **place, exc_info=error)
            error = BrokerUnavailable("what follows on this failure could not be decided: the log says why")
        one.lease.is_returning = False
        if not one.done.done():
            one.done.set_exception(error)
            one.done.exception()  # marks it retrieved: no asyncio warning if no caller waits

    async def _handle(self, batch: list[FailedDelivery]) -> None:
        records = await self._reader.messages([(each.queue, each.offset) for each in batch])
        stored = await self._stored_reasons(batch)
        ops: list[Op] = []
        handled: list[tuple[FailedDelivery, int]] = []
        for each, record in zip(batch, records, strict=True):
            if not _still_fails(each):
                handled.append((each, _NOT_OURS))
                continue
            try:
                each.lease.know(record)
                more, attempt = self._plan(each, record, self._reason_of(each, stored))
            except Exception as error:  # noqa: BLE001 - one failure without an outcome must not fail the others
                self._give_up(each, error)
                continue
            ops += more
            handled.append((each, attempt))
        done = self._commits.submit(ops)

        def settle(written: asyncio.Future[list[Stored]]) -> None:
            error = None if written.cancelled() else written.exception()
            for each, attempt in handled:
                if error is not None:
                    self._give_up(each, error)
                    continue
                if each.queue.is_finished(each.offset):
                    each.queue.release(each.offset)
                if attempt > 0 and each.queue.come_back(each.offset, each.lease, attempt):
                    each.queue.subscription.wake(each.queue.queue_id)
                if not each.done.done():
                    each.done.set_result(None)
                if attempt != _NOT_OURS:
                    each.queue.subscription.wake_next()  # a message group, or the lease limit, may have room now

        done.add_done_callback(settle)

    async def _stored_reasons(self, batch: Sequence[FailedDelivery]) -> dict[bytes, bytes]:
        """Return the reasons stored in lease rows, by row key."""
        keys = [each.queue.exception_key(each.offset) for each in batch if each.lease.has_reason]
        values = await self._reader.values(Family.GROUP, keys) if keys else []
        found = zip(keys, values, strict=True)
        return {key: decode_exception(value).failure for key, value in found if value is not None}

    def _reason_of(self, failed: FailedDelivery, stored: Mapping[bytes, bytes]) -> FailureReason | None:
        """Return the reason of a failure: the reported one, else the one stored with the preceding failure of the
        lease.
        """
        reason = self.reasons.take(failed.handle)
        if reason is None and failed.lease.has_reason:
            failure = stored.get(failed.queue.exception_key(failed.offset))
            reason = decode_reason(failure) if failure else None
        if reason is None and failed.lease.renew_for and self.reasons.is_on:
            reason = bounded(FailureReason(client_id=failed.lease.renew_for))
        return reason

    # -- outcomes -----------------------------------------------------------------------------------------------------

    def _plan(
        self, failed: FailedDelivery, record: QueuedMessage, reason: FailureReason | None
    ) -> tuple[list[Op], int]:
        """Return the ops of the outcome, and the next attempt of a message that becomes available once they are
        durable, else 0.
        """
        queue, offset, lease = failed.queue, failed.offset, failed.lease
        found = queue.subscription
        now = moment(self._clock)
        outcome = self.outcome(queue, lease, failed.failure, attempts_told=failed.attempts_told, now_ms=now.wall_ms)
        is_disk_low = self._store.is_disk_low()
        match outcome:
            case ComeBack():
                attempt, rows = queue.plan_return(offset, lease, now.wall_ms)
                total = min(lease.attempts_before + attempt, ATTEMPT_MAX)
                return [*rows, _event(found, EventKind.LEASE_EXPIRED, total, offset, failed, reason)], attempt
            case RetryAt(at_ms) if record.message_group or record.is_dead or is_disk_low:
                self._log_retry(found.topic, queue.group_id, record.message_id, lease.attempts, at_ms, reason)
                return self._hide(failed, record, now, max(0, at_ms - now.wall_ms), reason), 0
            case RetryAt(at_ms):
                self.retried_total += 1
                self._log_retry(found.topic, queue.group_id, record.message_id, lease.attempts, at_ms, reason)
                return self._retry(found, failed, record, now.wall_ms, at_ms, reason), 0
            case DeadLetter() if is_disk_low:
                return self._hide(failed, record, now, POSTPONED_MS, reason), 0
            case DeadLetter(why):
                self.dead_total += 1
                return self._bury(found, failed, record, why, reason), 0

    def _hide(
        self, failed: FailedDelivery, record: QueuedMessage, now: Moment, for_ms: int, reason: FailureReason | None
    ) -> list[Op]:
        queue, offset, lease = failed.queue, failed.offset, failed.lease
        lease.first_failed_at_ms = lease.first_failed_at_ms or now.wall_ms
        lease.epoch = self._receipts.next_epoch()  # the previous consumer can no longer finish it
        rows = queue.hide(offset, lease, now, for_ms, message_group=record.message_group, failure=_encoded(reason))
        self._ends.watch(queue, offset, lease)
        attempt = lease.attempts
        found = queue.subscription
        return [*rows, _event(found, EventKind.POSTPONED, attempt, now.wall_ms + for_ms, failed, reason)]

    def _retry(
        self,
        found: Subscription,
        failed: FailedDelivery,
        record: QueuedMessage,
        now_ms: int,
        at_ms: int,
        reason: FailureReason | None,
    ) -> list[Op]:
        queue, lease = failed.queue, failed.lease
        lane, ops = self._subscriptions.lane(found)
        attempt = lease.attempts
        history = self._history(failed, record, 0, reason)
        waiting = encode_waiting(
            EntryKind.RETRY, attempt, lane.topic_id, queue.group_id, at_ms, now_ms, copy_of(record, history)
        )
        event = with_reason(found.event(EventKind.NACKED, queue, attempt, at_ms, record.message_id), reason)
        entry_id = failed_id(record.message_id, history, attempt)
        entry = Schedule(queue.group_id, entry_id, at_ms, waiting, event, if_known=IfKnown.WRITE)
        return [*ops, entry, *queue.leave(failed.offset)]

    def _log_retry(
        self, topic: Topic, group_id: int, message_id: bytes, attempt: int, at_ms: int, reason: FailureReason | None
    ) -> None:
        self._log.failed(
            "message_retried",
            group=self._catalog.names.groups_by_id[group_id].name,
            topic=topic.name,
            error=reason.error if reason is not None else "",
            message_id=unpack_id(message_id),
            attempt=attempt,
            retry_at=format_time(at_ms),
        )

    def _bury(
        self,
        found: Subscription,
        failed: FailedDelivery,
        record: QueuedMessage,
        why: Reason,
        reason: FailureReason | None,
    ) -> list[Op]:
        queue, lease = failed.queue, failed.lease
        attempts = max(lease.attempts, failed.attempts_told)
        history = self._history(failed, record, why, reason)
        if isinstance(failed.failure, Unwanted):
            record = record._replace(payload=_refused(record.payload, failed.failure))
        ops, copy = self.bury_ops(
            queue.group_id,
            found.topic.topic_id,
            record,
            history,
            attempts,
            number=found.number_of(queue),
            code=failed.failure.code if isinstance(failed.failure, Unwanted) else 0,
        )
        return [*ops, copy, *queue.leave(failed.offset)]

    def bury_ops(
        self,
        group_id: int,
        topic_id: int,
        record: QueuedMessage,
        history: History,
        attempts: int,
        *,
        number: int = NO_QUEUE,
        code: int = 0,
    ) -> tuple[list[Op], Append]:
        """Return the ops that the first use of the group's dead-letter queue needs, and the append of a copy to that
        queue.

        ``number`` is the queue in which the message failed, if it was delivered; ``code`` is that of a cluster's
        refusal.
        """
        now_ms = self._clock.now_ms()
        names = self._catalog.names
        letters, ops = names.dead_letters(names.groups_by_id[group_id], now_ms)
        reason = Reason(history.reason)
        told = {
            Reason.EXHAUSTED: self._catalog.policy(group_id).max_attempts,
            Reason.TOO_OLD: history.since_ms,
            Reason.TOO_LATE: record.not_after_ms,
        }
        event = encode_event(
            DEAD_EVENTS[reason], topic_id, group_id, number, code or attempts, told.get(reason, 0), record.message_id
        )
        event = with_reason(event, decode_reason(history.failure)) if history.failure else event
        self._log.failed(
            "message_dead_lettered",
            group=names.groups_by_id[group_id].name,
            topic=names.topics_by_id[topic_id].name,
            error=decode_reason(history.failure).error,
            message_id=unpack_id(record.message_id),
            attempts=attempts,
            reason=reason.name.lower(),
        )
        copy = encode_queued(attempts, now_ms, 0, copy_of(record, history), has_history=True)
        entry_id = failed_id(record.message_id, history, attempts)
        return ops, Append(letters.topic_id, entry_id, letters.topic_id, 0, copy, event, IfKnown.WRITE)

    # -- deliveries from a cluster ------------------------------------------------------------------------------------

    async def take_over(
        self, group: Group, topic: Topic, delivery: Delivery, failure: Failure, *, attempts_told: int = 0
    ) -> None:
        """Apply the outcome of a failed delivery from a cluster on this broker, durable on return."""
        now_ms = self._clock.now_ms()
        attempt = min(max(delivery.delivery_attempt, attempts_told), ATTEMPT_MAX)
        since_ms = delivery.stored_at_ms
        policy = self._catalog.policy(group.group_id)
        message = wire.Message.FromString(delivery.payload)
        not_after_ms = not_after_of(message.user_properties)
        outcome = after_failure(
            policy,
            failure,
            attempt,
            now_ms,
            self._rng,
            since_ms=since_ms or None,
            not_after_ms=self._believed(not_after_ms),
            levels_ms=self._levels_ms,
        )
        why = outcome.reason if isinstance(outcome, DeadLetter) else 0
        reason = self.reasons.take(delivery.receipt_handle)
        message.system_properties.message_id = delivery.message_id
        message_id, tag = pack_id(delivery.message_id), message.system_properties.tag
        payload = message.SerializeToString()
        offset = delivery.queue_offset & _U64
        queue_id = delivery.queue_id if 0 <= delivery.queue_id < LANE else 0
        epoch = self._receipts.next_epoch()
        history = History(topic.topic_id, queue_id, offset, since_ms, now_ms, now_ms, why, epoch, _encoded(reason))
        record = QueuedMessage(attempt, since_ms, 0, message_id, tag, "", payload, history, not_after_ms)
        place = topic.topic_id, group.group_id, LANE, attempt
        ops: list[Op] = [Emit(encode_event(EventKind.TAKEN_OVER, *place, offset, message_id))]
        if isinstance(outcome, DeadLetter):
            self.dead_total += 1
            more, copy = self.bury_ops(group.group_id, topic.topic_id, record, history, attempt, number=LANE)
            ops += [*more, copy]
        else:
            self.retried_total += 1
            at_ms = outcome.at_ms if isinstance(outcome, RetryAt) else now_ms
            self._log_retry(topic, group.group_id, message_id, attempt, at_ms, reason)
            lane_id, more = self._subscriptions.lane_id(group, topic)
            body = copy_of(record, history)
            waiting = encode_waiting(EntryKind.RETRY, attempt, lane_id, group.group_id, at_ms, now_ms, body)
            event = with_reason(encode_event(EventKind.NACKED, *place, at_ms, message_id), reason)
            entry_id = failed_id(message_id, history, attempt)
            ops += [*more, Schedule(group.group_id, entry_id, at_ms, waiting, event, if_known=IfKnown.WRITE)]
        await self._commits.commit(ops)

    async def is_known(self, group: Group, topic: Topic, message_id: bytes) -> bool:
        """Return True if a failed copy of a message is pending or visible for its group, or unsettled in its
        dead-letter queue.

        Once a copy is off the timeline, it is found only as long as a message id is remembered.
        """
        copies = await self._copies(group.group_id, topic, message_id)
        if any(each.state is EntryState.WAITING for each in copies):
            return True
        visible = [each.queue_offset for each in copies if each.queue_offset >= 0]
        if visible:
            lane = (await self._subscriptions.subscribe(group.name, topic.name)).lane
            if lane is not None and not all(map(lane.is_finished, visible)):
                return True
        letters = self._catalog.names.topics.get(dead_letter_topic(group.name))
        if letters is None:
            return False
        dead = await self._copies(letters.topic_id, topic, message_id)
        settled = await self._subscriptions.settled.load(letters.topic_id)
        return not all(settled.is_finished(each.queue_offset) for each in dead if each.queue_offset >= 0)

    async def _copies(self, scope: int, topic: Topic, message_id: bytes) -> list[Stored]:
        found = await self._reader.run(lambda store: store.copies(scope, message_id))
        return [receipt for key, receipt in found if failed_topic_id(key) == topic.topic_id]

    def _history(
        self, failed: FailedDelivery, record: QueuedMessage, why: int, reason: FailureReason | None
    ) -> History:
        queue, now_ms = failed.queue, self._clock.now_ms()
        if record.history is not None and queue.subscription.lane is queue:
            first_ms = record.history.first_failed_at_ms or failed.lease.first_failed_at_ms or now_ms
            return record.history._replace(
                first_failed_at_ms=first_ms,
                last_failed_at_ms=now_ms,
                reason=why,
                epoch=failed.lease.epoch,
                failure=_encoded(reason),
            )
        first_ms = failed.lease.first_failed_at_ms or now_ms
        place = queue.topic_id, queue.queue_id, failed.offset
        return History(*place, record.stored_at_ms, first_ms, now_ms, why, failed.lease.epoch, _encoded(reason))


def _still_fails(failed: FailedDelivery) -> bool:
    """Return True if the failure still applies.

    It does not if the delivery was finished since, or its subscription retired. A lease expiry also does not apply if
    the lease was extended since, because its consumer was promised more time.
    """
    lease = failed.lease
    if failed.queue.leases.get(failed.offset) is not lease:
        return False
    return lease.is_returning or not isinstance(failed.failure, LeaseExpired)


def copy_of(record: QueuedMessage, history: History) -> bytes:
    """Return the body of a copy after its header: the history, and the message in its wire format."""
    return encode_history(history) + encode_body(
        record.message_id, record.tag.encode(), record.message_group.encode(), record.payload, record.not_after_ms
    )


def _refused(payload: bytes, failure: Unwanted) -> bytes:
    """Return the payload with the code and text of the refusal as a property, for readers of the dead letter."""
    message = wire.Message.FromString(payload)
    message.user_properties[REFUSED] = f"{failure.code}: {failure.why}"[:_WHY_CHARS_MAX]
    return message.SerializeToString()


def _encoded(reason: FailureReason | None) -> bytes:
    return encode_reason(reason) if reason is not None else b""


def _event(
    found: Subscription,
    kind: EventKind,
    attempt: int,
    time_ms: int,
    failed: FailedDelivery,
    reason: FailureReason | None,
) -> Emit:
    event = found.event(kind, failed.queue, attempt, time_ms, failed.lease.message_id)
    return Emit(with_reason(event, reason), failed.offset)
