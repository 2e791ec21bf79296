"""Failed deliveries: their outcomes, each one unit of ops, so that a crash applies all of it or none.

    come back       the message stays in its queue; its next attempt is a row
    retry later     the original is finished, and copied (``dmq.broker.failures.outcomes``)
    dead letter     the same

A message of a message group never leaves its queue for a retry: later messages of its group wait for it, so it is
hidden in place. The same applies to a dead letter that a consumer of its queue fails, because a copy has no room for
its facts. It also applies to all messages while the disk is almost full: a hidden lease is a small row, a copy is not.

Failures are batched: those that arrive during a read share the next read and unit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import structlog

from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable
from broker_adapter.contracts.message import Delivery, pack_id
from broker_adapter.contracts.topics import dead_letter_topic
from broker_adapter.runtime.clock import Moment, moment
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import not_after_of
from dmq.broker.failures.failure_reasons import FailureReasons
from dmq.broker.failures.outcomes import FailedMessage, Outcomes, come_back
from dmq.broker.groups import ATTEMPT_MAX, DeliveryLease, LeaseEnds, SubscribedQueue, Subscriptions
from dmq.broker.handles import ReceiptHandles
from dmq.broker.message_spans import DeliveryEnd, MessageSpans
from dmq.broker.topics import BrokerPart, Group, SharedParts, Topic
from dmq.errors import StoreError
from dmq.store.schema.keys import Family
from dmq.store.schema.messages.failure_reason import decode_reason, encode_reason
from dmq.store.schema.messages.index import EntryState, failed_topic_id
from dmq.store.schema.messages.index import Receipt as Stored
from dmq.store.schema.messages.record import (
    History,
    QueuedMessage,
)
from dmq.store.schema.topics.group import ExceptionRow, decode_exception
from dmq.store.writer.operations import Emit, Op
from dmq.trail.events import LANE, EventKind, with_reason
from retry.dead_letter import REFUSED
from retry.failure_reason import FailureReason, bounded
from retry.flow import ComeBack, Failure, LeaseExpired, Outcome, Unwanted
from retry.policy import DeadLetter, RetryAt

log = structlog.get_logger("dmq.broker")

BATCH_MAX = 256
_WHY_CHARS_MAX = 300
_NOT_OURS = -1
_U64 = 2**64 - 1
POSTPONED_MS = 60_000  # delay of a dead letter that does not fit on the disk, and of a failure that cannot be applied


class FailedDelivery(NamedTuple):
    """Failed delivery without an outcome yet."""

    queue: SubscribedQueue
    offset: int
    lease: DeliveryLease
    failure: Failure
    attempts_told: int  # attempts reported by the consumer; 0: not reported
    handle: str  # the handle under which its reason was reported
    done: asyncio.Future[None]


class Failures(BrokerPart):
    """Decides and commits the outcomes of failed deliveries. It belongs to the event loop."""

    def __init__(
        self,
        shared: SharedParts,
        subscriptions: Subscriptions,
        ends: LeaseEnds,
        receipts: ReceiptHandles,
        *,
        outcomes: Outcomes,
        keeps_reasons: bool,
        spans: MessageSpans | None = None,
    ) -> None:
        super().__init__(shared)
        self._spans = spans
        self._subscriptions = subscriptions
        self._ends = ends
        self._receipts = receipts
        self._outcomes = outcomes
        self.reasons = FailureReasons(self._names, receipts, self._clock, is_on=keeps_reasons)
        self._waiting: list[FailedDelivery] = []
        self._task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Stop the task; failures not yet submitted have no effect, and their futures are cancelled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def outcome(
        self,
        queue: SubscribedQueue,
        lease: DeliveryLease,
        failure: Failure,
        *,
        attempts_told: int = 0,
        now_ms: int | None = None,
    ) -> Outcome:
        """Return the outcome of the failure of a lease; its message must have been read."""
        if lease.is_suspended and isinstance(failure, LeaseExpired):
            return ComeBack()
        return self._outcomes.decide(
            self._catalog.policy(queue.group_id),
            failure,
            max(lease.attempts, attempts_told),
            self._clock.now_ms() if now_ms is None else now_ms,
            since_ms=lease.since_ms,
            not_after_ms=lease.not_after_ms,
        )

    def fail(
        self,
        queue: SubscribedQueue,
        offset: int,
        lease: DeliveryLease,
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

    def _give_up(self, one: FailedDelivery, error: BaseException) -> None:
        if not isinstance(error, BrokerError | StoreError):
            place = {"topic": one.queue.topic_id, "queue": one.queue.queue_id, "offset": one.offset}
            log.error("failure_not_processed", **place, exc_info=error)
            error = BrokerUnavailable("the failure could not be processed; see the log")
        lease, now_ms = one.lease, self._clock.boot_ms()
        lease.is_returning = False
        if one.queue.leases.get(one.offset) is lease and lease.ends_ms <= now_ms:
            lease.ends_ms = now_ms + POSTPONED_MS  # with a new timer: the last one may have expired meanwhile
            self._ends.watch(one.queue, one.offset, lease)
        if not one.done.done():
            one.done.set_exception(error)
            one.done.exception()  # marks it retrieved: no asyncio warning if no caller waits

    async def _handle(self, batch: list[FailedDelivery]) -> None:
        records = await self._reader.messages([(each.queue, each.offset) for each in batch])
        stored = await self._stored_reasons(batch)
        ops: list[Op] = []
        handled: list[tuple[FailedDelivery, int]] = []
        ends: list[DeliveryEnd] = []
        for each, record in zip(batch, records, strict=True):
            if not _still_fails(each):
                handled.append((each, _NOT_OURS))
                continue
            try:
                more, attempt = self._decide(each, record, stored.get(each.queue.exception_key(each.offset)), ends)
            except Exception as error:  # noqa: BLE001 - one failure without an outcome must not fail the others
                self._give_up(each, error)
                continue
            ops += more
            handled.append((each, attempt))
        done = self._commits.submit(ops)
        if self._spans is not None:
            self._spans.ended_after(done, ends)

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

    async def _stored_reasons(self, batch: Sequence[FailedDelivery]) -> dict[bytes, ExceptionRow]:
        """Return the lease rows with a reason, by key."""
        keys = [each.queue.exception_key(each.offset) for each in batch if each.lease.has_reason]
        values = await self._reader.values(Family.GROUP, keys) if keys else []
        found = zip(keys, values, strict=True)
        return {key: decode_exception(value) for key, value in found if value is not None}

    def _reason_of(self, failed: FailedDelivery, before: ExceptionRow | None) -> FailureReason | None:
        """Return the reason of a failure: the reported one, else the one stored with the preceding failure of the
        lease.
        """
        reason = self.reasons.take(failed.handle)
        if reason is None and before is not None and before.failure:
            reason = decode_reason(before.failure)
        if reason is None and failed.lease.renew_for and self.reasons.is_on:
            reason = bounded(FailureReason(client_id=failed.lease.renew_for))
        return reason

    # -- outcomes -----------------------------------------------------------------------------------------------------

    def _decide(
        self, failed: FailedDelivery, record: QueuedMessage, before: ExceptionRow | None, ends: list[DeliveryEnd]
    ) -> tuple[list[Op], int]:
        """Return the ops and the next attempt of ``_plan``; add the end of a traced delivery to ``ends``."""
        failed.lease.know(record)
        reason = self._reason_of(failed, before)
        ops, attempt, outcome = self._plan(failed, record, reason, before)
        if self._spans is not None:
            facts = record.payload, failed.failure, outcome, reason or FailureReason()
            end = self._spans.failed(failed.queue, failed.lease, *facts)
            ends += [end._replace(attempt=max(end.attempt, failed.attempts_told))] if end is not None else []
        return ops, attempt

    def _plan(
        self, failed: FailedDelivery, record: QueuedMessage, reason: FailureReason | None, before: ExceptionRow | None
    ) -> tuple[list[Op], int, Outcome]:
        """Return the ops of the outcome, and the next attempt of a message that becomes available once they are
        durable, else 0. The outcome that is returned is the applied one.
        """
        queue, offset, lease = failed.queue, failed.offset, failed.lease
        now = moment(self._clock)
        outcome = self.outcome(queue, lease, failed.failure, attempts_told=failed.attempts_told, now_ms=now.wall_ms)
        is_disk_low, code = self._store.is_disk_low(), 0
        message = self._failed_message(failed, record, reason, now.wall_ms)
        match outcome:
            case ComeBack():
                return *come_back(queue, offset, lease, now.wall_ms, reason=reason, before=before), outcome
            case RetryAt(at_ms) if record.message_group or record.is_dead or is_disk_low:
                self._outcomes.log_retry(message, at_ms)
                return self._hide(failed, record, now, max(0, at_ms - now.wall_ms), reason), 0, outcome
            case DeadLetter() if is_disk_low:
                return self._hide(failed, record, now, POSTPONED_MS, reason), 0, RetryAt(now.wall_ms + POSTPONED_MS)
            case DeadLetter() if isinstance(failed.failure, Unwanted):
                code = failed.failure.code
                record = record._replace(payload=_refused(record.payload, failed.failure))
                message = message._replace(record=record)
        return [*self._outcomes.ops(message, outcome, now.wall_ms, code=code), *queue.leave(offset)], 0, outcome

    def _hide(
        self, failed: FailedDelivery, record: QueuedMessage, now: Moment, for_ms: int, reason: FailureReason | None
    ) -> list[Op]:
        queue, offset, lease = failed.queue, failed.offset, failed.lease
        lease.first_failed_at_ms = lease.first_failed_at_ms or now.wall_ms
        lease.epoch = self._receipts.next_epoch()  # the previous consumer can no longer finish it
        rows = queue.hide(offset, lease, now, for_ms, message_group=record.message_group, failure=_encoded(reason))
        self._ends.watch(queue, offset, lease)
        until_ms = now.wall_ms + for_ms
        event = queue.subscription.event(EventKind.POSTPONED, queue, lease.attempts, until_ms, lease.message_id)
        return [*rows, Emit(with_reason(event, reason), offset)]

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
        outcome = self._outcomes.decide(policy, failure, attempt, now_ms, since_ms=since_ms, not_after_ms=not_after_ms)
        reason = self.reasons.take(delivery.receipt_handle)
        message.system_properties.message_id = delivery.message_id
        message_id, tag = pack_id(delivery.message_id), message.system_properties.tag
        queue_id = delivery.queue_id if 0 <= delivery.queue_id < LANE else 0
        place = topic.topic_id, queue_id, delivery.queue_offset & _U64
        history = History(*place, since_ms, now_ms, now_ms, 0, self._receipts.next_epoch(), _encoded(reason))
        payload = message.SerializeToString()
        record = QueuedMessage(attempt, since_ms, 0, message_id, tag, "", payload, history, not_after_ms)
        failed = FailedMessage(group.group_id, topic.topic_id, LANE, attempt, record, history)
        later = RetryAt(now_ms) if isinstance(outcome, ComeBack) else outcome
        await self._commits.commit(self._outcomes.taken_over(failed, later, now_ms))

    async def is_known(self, group: Group, topic: Topic, message_id: bytes) -> bool:
        """Return True if a failed copy of a message is pending or visible for its group, or unsettled in its
        dead-letter queue.

        Once a copy is off the timeline, it is found only as long as a message id is remembered.
        """
        found = await self._reader.run(lambda store: store.copies(group.group_id, message_id))
        copies = [receipt for key, receipt in found if failed_topic_id(key) == topic.topic_id]
        if any(each.state is EntryState.WAITING for each in copies):
            return True
        visible = [each.queue_offset for each in copies if each.queue_offset >= 0]
        if visible:
            lane = (await self._subscriptions.subscribe(group.name, topic.name)).lane
            if lane is not None and not all(map(lane.is_finished, visible)):
                return True
        dead = await self.open_letters(group, message_id)
        return any(failed_topic_id(letter) == topic.topic_id for letter in dead)

    async def open_letters(self, group: Group, message_id: bytes) -> list[bytes]:
        """Return the index ids of a message's unsettled dead letters of a group."""
        letters = self._catalog.names.topics.get(dead_letter_topic(group.name))
        if letters is None:
            return []
        found = await self._reader.run(lambda store: store.copies(letters.topic_id, message_id))
        settled = await self._subscriptions.settled.load(letters.topic_id)
        offsets = ((key, copy.queue_offset) for key, copy in found)
        return [key for key, offset in offsets if offset >= 0 and not settled.is_finished(offset)]

    def _failed_message(
        self, failed: FailedDelivery, record: QueuedMessage, reason: FailureReason | None, now_ms: int
    ) -> FailedMessage:
        queue, lease, history = failed.queue, failed.lease, record.history
        found = queue.subscription
        if history is None or found.lane is not queue:
            place = queue.topic_id, queue.queue_id, failed.offset
            history = History(*place, record.stored_at_ms, 0, 0, 0)
        history = history._replace(
            first_failed_at_ms=history.first_failed_at_ms or lease.first_failed_at_ms or now_ms,
            last_failed_at_ms=now_ms,
            reason=0,
            epoch=lease.epoch,
            failure=_encoded(reason),
        )
        attempt = max(lease.attempts, failed.attempts_told)
        place = queue.group_id, found.topic.topic_id, found.number_of(queue)
        return FailedMessage(*place, attempt, record, history)


def _still_fails(failed: FailedDelivery) -> bool:
    """Return True if the failure still applies.

    It does not if the delivery was finished since, or its subscription retired. A lease expiry also does not apply if
    the lease was extended since, because its consumer was promised more time.
    """
    lease = failed.lease
    if failed.queue.leases.get(failed.offset) is not lease:
        return False
    return lease.is_returning or not isinstance(failed.failure, LeaseExpired)


def _refused(payload: bytes, failure: Unwanted) -> bytes:
    """Return the payload with the code and text of the refusal as a property, for readers of the dead letter."""
    message = wire.Message.FromString(payload)
    message.user_properties[REFUSED] = f"{failure.code}: {failure.why}"[:_WHY_CHARS_MAX]
    return message.SerializeToString()


def _encoded(reason: FailureReason | None) -> bytes:
    return encode_reason(reason) if reason is not None else b""
