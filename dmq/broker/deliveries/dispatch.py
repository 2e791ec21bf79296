"""Dispatch of messages to a receive: select and lease, then read, then deliver those that may be delivered.

A receive with a filter may read many messages for each one that it delivers. It reads them in *scans* (``look``). A
scan is one read, and one unit that finishes the filtered messages; then other tasks of the loop run. Scans grow while
they find nothing, up to a limit of messages and bytes. The skipped messages of one scan are durable before the next
scan, so a backlog is scanned only once, even after a crash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.message import DeadLetterFacts, Delivery, unpack_id
from dmq.broker.filters import Filters, Passes
from dmq.broker.groups import DeliveryLease, GroupSubscription, LeaseEnds, Settled, SubscribedQueue, due_of
from dmq.broker.handles import ReceiptHandle, ReceiptHandles, name_of
from dmq.broker.message_spans import MessageSpans
from dmq.broker.topics import BrokerPart, Names, SharedParts
from dmq.store.schema.messages.index import Receipt as Stored
from dmq.store.schema.messages.record import QueuedMessage
from dmq.store.writer.operations import Emit, Op
from dmq.trail.events import EventKind
from retry.policy import Reason

RECEIVE_BYTES_MAX = 8 * 1024 * 1024
LOOK_MAX = 256  # messages: a few milliseconds of the loop
LOOK_BYTES_MAX = 8 * 1024 * 1024
_new_tuple = tuple.__new__  # a NamedTuple's constructor without the cost of its argument list


class ReceiveRequest(NamedTuple):
    """Parameters of a receive."""

    wanted: Subscription
    batch_max: int
    invisible_ms: int
    renew_for: str  # a push consumer's client id, or empty
    passes: Passes | None  # the filter

    @property
    def run_max(self) -> int:
        """Maximum number of messages of one message group in one receive."""
        return 1 if self.renew_for else self.batch_max


class ScanResult(NamedTuple):
    """Result of one scan."""

    deliveries: list[Delivery]
    passed_over: asyncio.Future[list[Stored]] | None  # done when the skipped messages are durably finished
    look_next: int  # number of messages of the next scan, if this one found nothing


class _Taken(NamedTuple):
    queue: SubscribedQueue
    offset: int
    lease: DeliveryLease


class HandOut(BrokerPart):
    """Delivery of messages to receives. It belongs to the event loop."""

    def __init__(
        self,
        shared: SharedParts,
        *,
        filters: Filters,
        ends: LeaseEnds,
        settled: Settled,
        receipts: ReceiptHandles,
        spans: MessageSpans | None,
    ) -> None:
        super().__init__(shared)
        self._spans = spans
        self._filters = filters
        self._ends = ends
        self._settled = settled
        self._receipts = receipts

    async def take(self, found: GroupSubscription, terms: ReceiveRequest, look: int) -> ScanResult:
        """Scan up to ``look`` available messages and deliver those that pass the filter, up to the batch size; perhaps
        none.
        """
        available = found.available(terms.wanted.queue_id)
        if heads := found.without_head(available, look):
            await self._read_heads(found, terms, heads)
            available = found.available(terms.wanted.queue_id)
        first_epoch = self._receipts.epoch + 1
        taken = self._lease(found, terms, available, look)
        found.wake_next()  # there may be more messages than this receive reads
        verdicts: Sequence[bool] | None = None
        try:
            records = await self._reader.messages([(each.queue, each.offset) for each in taken], is_cut=True)
            if terms.passes is not None:
                verdicts = await self._filters.verdicts(terms.passes, records)
                records = records[: len(verdicts)]
        except BaseException:
            for each in reversed(taken):
                each.queue.give_back(each.offset)
            found.wake_next()
            raise
        if found.is_retired:
            return ScanResult([], None, look)
        _note_read(found, taken, records)
        if len(records) < len(taken):  # the rest exceeds the size or time limit of a scan
            for each in reversed(taken[len(records) :]):
                each.queue.give_back(each.offset)
            found.wake_next()
            del taken[len(records) :]
        return self._deliver(found, terms, taken, records, verdicts, first_epoch)

    async def _read_heads(
        self, found: GroupSubscription, terms: ReceiveRequest, heads: Sequence[SubscribedQueue]
    ) -> None:
        """Read the next message of each queue; other receives cannot lease it meanwhile."""
        ends_ms = self._clock.boot_ms() + terms.invisible_ms
        taken = self._lease_of(terms, [(queue, 1) for queue in heads], ends_ms)
        try:
            records = await self._reader.messages([(each.queue, each.offset) for each in taken], is_cut=True)
        finally:
            for each in reversed(taken):
                each.queue.give_back(each.offset)
            found.wake_next()
        for each, record in zip(taken, records, strict=False):
            each.queue.due_ms, each.queue.is_head_read = max(each.queue.due_ms, due_of(record) - 1), True

    def _lease(
        self, found: GroupSubscription, terms: ReceiveRequest, available: Sequence[SubscribedQueue], look: int
    ) -> list[_Taken]:
        """Lease ``look`` messages, or all available ones if there are fewer."""
        ends_ms = self._clock.boot_ms() + terms.invisible_ms  # one end for all: one timer is started for them
        taken = self._lease_of(terms, found.choose(available, look), ends_ms)
        while len(taken) < look and len(available) > 1:
            available = [each for each in available if each.has_available()]
            taken += self._lease_of(terms, found.choose(available, look - len(taken)), ends_ms)
        return taken

    def _lease_of(
        self, terms: ReceiveRequest, chosen: Sequence[tuple[SubscribedQueue, int]], ends_ms: int
    ) -> list[_Taken]:
        """Select and lease offsets before they are read, so that no other receive selects them meanwhile."""
        renew_for, is_push = terms.renew_for, bool(terms.renew_for)
        next_epoch = self._receipts.next_epoch
        taken: list[_Taken] = []
        for queue, limit in chosen:
            for offset, (attempt, _, failed_at_ms) in queue.take(limit):
                lease = DeliveryLease(
                    next_epoch(),
                    attempt,
                    ends_ms,
                    renew_for=renew_for,
                    first_failed_at_ms=failed_at_ms,
                    is_push=is_push,
                )
                queue.lease(offset, lease)
                taken.append(_new_tuple(_Taken, (queue, offset, lease)))
        return taken

    def _deliver(
        self,
        found: GroupSubscription,
        terms: ReceiveRequest,
        taken: Sequence[_Taken],
        records: Sequence[QueuedMessage],
        verdicts: Sequence[bool] | None,
        first_epoch: int,
    ) -> ScanResult:
        deliveries: list[Delivery] = []
        leased: list[_Taken] = []
        passed_over: list[Op] = []
        passed: list[_Taken] = []
        max_attempts = self._catalog.policy(found.group_id).max_attempts
        settled = self._settled.get(found.topic.topic_id)
        condemned: set[str] = set()
        run_max = terms.run_max
        size = number = 0
        try:
            for number, (each, record) in enumerate(zip(taken, records, strict=True)):
                queue, offset, lease = each
                lease.know(record)
                is_resolved = settled is not None and queue is not found.lane and settled.is_finished(offset)
                if is_resolved or (verdicts is not None and not verdicts[number]):
                    passed_over += _filtered(found, each)
                    passed.append(each)
                    continue
                if len(deliveries) >= terms.batch_max:
                    queue.give_back(offset)
                    found.wake(queue.queue_id)
                    continue
                # No message is delivered together with one of its message group that becomes a dead letter.
                together_max = 1 if record.message_group in condemned else run_max
                if not queue.admit(offset, record.message_group, first_epoch=first_epoch, run_max=together_max):
                    continue
                attempts = lease.attempts
                is_late = lease.not_after_ms and self._is_too_late(lease)
                if attempts > max_attempts or is_late:  # the policy may have changed since
                    condemned.add(record.message_group)
                    lease.attempt -= 1  # this attempt is not made
                    lease.ends_ms, lease.renew_for = 0, ""
                    self._ends.watch(queue, offset, lease)
                    continue
                size += len(record.payload)
                if deliveries and size > RECEIVE_BYTES_MAX:
                    queue.give_back(offset)
                    found.wake(queue.queue_id)
                    continue
                leased.append(each)
                deliveries.append(self._delivery(found, each, record, attempts, terms.invisible_ms))
        except BaseException:
            leased += taken[number:]
            raise
        finally:  # leases expire even if this receive fails
            self._ends.watch_together(leased)
        if not passed_over:
            return ScanResult(deliveries, None, terms.batch_max)
        # A receive with deliveries does not wait for this unit. After a crash the messages are skipped again, and a
        # failure of the store reaches all other callers.
        done = self._commits.submit(passed_over)
        found.release_after(done, [(each.queue, each.offset) for each in passed])
        return ScanResult(deliveries, done, _next_look(records))

    def _is_too_late(self, lease: DeliveryLease) -> bool:
        """Return True if the message is past its sender's expiry, by a steady wall clock."""
        return 0 < lease.not_after_ms < self._clock.now_ms() and self._clock.is_steady()

    def _delivery(
        self, found: GroupSubscription, taken: _Taken, record: QueuedMessage, attempts: int, invisible_ms: int
    ) -> Delivery:
        queue, offset, lease = taken
        _, stored_at_ms, deliver_at_ms, message_id, _, message_group, payload, history, _ = record
        queue_id, name = queue.queue_id, name_of(message_id)
        place = queue.group_id, queue.topic_id, queue_id, offset
        receipt = _new_tuple(ReceiptHandle, (*place, lease.epoch, lease.attempt, lease.is_push, name))
        handle = lease.handle = self._receipts.encode(receipt)
        if self._spans is not None:
            lease.traced = self._spans.handed_out(payload)
        end = facts_of(self._catalog.names, record) if history is not None else None
        # fmt: off
        return _new_tuple(Delivery, (
            found.topic.name, unpack_id(message_id), payload, queue_id, offset, handle, attempts, invisible_ms,
            stored_at_ms, deliver_at_ms, end, message_group,
        ))
        # fmt: on


def facts_of(names: Names, record: QueuedMessage) -> DeadLetterFacts | None:
    """Return the failure facts of a dead letter, or None for any other message."""
    history = record.history
    if history is None or not record.is_dead:
        return None
    return DeadLetterFacts(
        names.topics_by_id[history.topic_id].name,
        unpack_id(record.message_id),
        record.attempts_before,
        Reason(history.reason).name.lower(),
        history.first_failed_at_ms,
        history.last_failed_at_ms,
    )


def _note_read(found: GroupSubscription, taken: Sequence[_Taken], records: Sequence[QueuedMessage]) -> None:
    ends: dict[SubscribedQueue, tuple[QueuedMessage, QueuedMessage]] = {}
    for (queue, _, _), record in zip(taken, records, strict=False):
        first, _ = ends.get(queue, (record, record))
        ends[queue] = first, record
    for queue, (first, last) in ends.items():
        found.was_read(queue, first, last)


def _next_look(records: Sequence[QueuedMessage]) -> int:
    """Return twice the number scanned, within the limits, assuming that the next messages have the same size."""
    size = sum(len(record.payload) for record in records)
    return max(1, min(2 * len(records), LOOK_MAX, LOOK_BYTES_MAX * len(records) // max(1, size)))


def _filtered(found: GroupSubscription, taken: _Taken) -> list[Op]:
    queue, offset, lease = taken
    event = found.event(EventKind.FILTERED, queue, 0, offset, lease.message_id)
    return [*queue.finish((offset,)), Emit(event, offset)]
