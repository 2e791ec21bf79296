"""Consumer calls: receive, acknowledge, change an invisible duration, give up. Each is answered after the sync."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from hmac import compare_digest
from typing import NamedTuple

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable, Overloaded, Refused, Rule
from broker_adapter.contracts.message import Delivery
from broker_adapter.runtime.clock import moment
from dmq.broker.deliveries.dispatch import HandOut, ReceiveRequest, ScanResult
from dmq.broker.deliveries.lease_expiry import Leases
from dmq.broker.failures import POSTPONED_MS, Failures
from dmq.broker.filters import Filters
from dmq.broker.groups import (
    ATTEMPT_MAX,
    IN_HAND_SHARE,
    DeliveryLease,
    GroupSubscription,
    LeaseEnds,
    SubscribedQueue,
    Subscriptions,
)
from dmq.broker.handles import ReceiptHandle, ReceiptHandles, name_of, read_receipt
from dmq.broker.limits import GroupFlows
from dmq.broker.message_spans import MessageSpans
from dmq.broker.topics import BrokerPart, SharedParts
from dmq.errors import StoreError
from dmq.metrics.counting import TopicCounts
from dmq.store.schema.messages.failure_reason import encode_reason
from dmq.store.schema.messages.index import Receipt as Stored
from dmq.store.writer.operations import Emit, Op
from dmq.trail.events import EventKind, with_reason
from retry.flow import Failure, GivenUp, Nacked, SentBack, Unwanted
from retry.policy import MAX_ATTEMPTS_LIMIT

_PASS_OVER_S_MAX = 0.5  # time beyond its deadline that a receive continues to skip messages its filter rejects
_NO_LEASE = DeliveryLease(0, 0, 0)
_U64 = 2**64 - 1
_new_tuple = tuple.__new__  # a NamedTuple's constructor without the cost of its argument list
_Known = tuple[SubscribedQueue, ReceiptHandle, DeliveryLease] | Refused


class ForwardedMessage(NamedTuple):
    """Delivery that a cluster has accepted: the number of sends, and its offset there, -1 if unknown."""

    receipt_handle: str
    times: int
    offset: int


class Deliveries(BrokerPart):
    """Delivery of messages to groups, and settlement of those deliveries. It belongs to the event loop."""

    def __init__(
        self,
        shared: SharedParts,
        *,
        subscriptions: Subscriptions,
        ends: LeaseEnds,
        receipts: ReceiptHandles,
        failures: Failures,
        leases: Leases,
        spans: MessageSpans | None = None,
    ) -> None:
        super().__init__(shared)
        self._spans = spans
        self.filters = Filters(self._clock)
        self._subscriptions = subscriptions
        self._ends = ends
        self._receipts = receipts
        self._failures = failures
        self._reasons = failures.reasons
        self._leases = leases
        self._hand_out = HandOut(
            shared, filters=self.filters, ends=ends, settled=subscriptions.settled, receipts=receipts, spans=spans
        )
        self.flows = GroupFlows(self._names, self._clock)
        self.handed_out = TopicCounts()
        self.acked_total = 0

    @property
    def handed_out_total(self) -> int:
        """Number of messages handed out, of all topics."""
        return self.handed_out.total

    async def receive(
        self,
        group: str,
        subscription: Subscription,
        *,
        batch_max: int,
        invisible_ms: int,
        wait_ms: int,
        renew_for: str = "",
    ) -> Sequence[Delivery]:
        passes = await self.filters.of(subscription)
        found = await self._subscriptions.subscribe(group, subscription.topic)
        queue_id = subscription.queue_id
        if queue_id >= len(found.queues):
            limit = f"0..{len(found.queues) - 1}"
            raise Refused(
                Rule.NOT_FOUND, f"{subscription.topic} has no queue with this number", value=queue_id, limit=limit
            )
        terms = ReceiveRequest(subscription, batch_max, invisible_ms, renew_for, passes)
        until_s = self._clock.monotonic_s() + wait_ms / 1000
        look = batch_max
        while True:
            if found.is_retired:
                found = await self._subscriptions.successor(found)
            is_available = found.has_available(queue_id)
            if is_available:
                looked = await self._take(found, group, terms, look, until_s)
                if looked is None:
                    return []
                deliveries, passed_over, look = looked
                if deliveries:
                    self.handed_out.add(subscription.topic, len(deliveries))
                    return deliveries
                if passed_over is not None and found.has_available(queue_id):
                    await self._commits.committed(passed_over)  # limits a scan to the rate at which it becomes durable
                else:
                    await asyncio.sleep(0)  # yield: a read from memory does not suspend
                is_available = found.has_available(queue_id)
            left_s = until_s - self._clock.monotonic_s()
            if is_available:
                if left_s <= -_PASS_OVER_S_MAX:
                    return []
            elif left_s <= 0:
                return []
            else:
                await found.wait(queue_id, left_s)
                if not found.has_available(queue_id):
                    found.wake_next()  # its message is gone, and the wake-up may have stood for more than one receive

    async def _take(
        self, found: GroupSubscription, group: str, terms: ReceiveRequest, look: int, until_s: float
    ) -> ScanResult | None:
        """Receive available messages as far as the group's rate limit allows, or wait for it; return None after the
        deadline.
        """
        if self._ends.is_full():
            terms, look = self._within_share(found, terms, look)
        allowed = self.flows.take(group, terms.batch_max)
        if not allowed:
            is_left = await self._wait_for_flow(found, group, until_s - self._clock.monotonic_s())
            return ScanResult([], None, look) if is_left else None
        if allowed < terms.batch_max:
            terms = terms._replace(batch_max=allowed)
            look = look if terms.passes is not None else min(look, allowed)
        unused = allowed
        try:
            looked = await self._hand_out.take(found, terms, look)
            unused = allowed - len(looked.deliveries)
        finally:
            self.flows.give_back(group, unused)
        return looked

    def _within_share(self, found: GroupSubscription, terms: ReceiveRequest, look: int) -> tuple[ReceiveRequest, int]:
        """Reduce a receive to the group's share while the total of leases is at its limit.

        Raise ``Overloaded`` if the share is used up.
        """
        left = IN_HAND_SHARE - found.in_hand
        if left <= 0:
            what = "all consumers together have as many messages in hand as they may: finish some"
            raise Overloaded(what, limit=f"{IN_HAND_SHARE} of a group and a topic meanwhile")
        return terms._replace(batch_max=min(terms.batch_max, left)), min(look, left)

    async def _wait_for_flow(self, found: GroupSubscription, group: str, left_s: float) -> bool:
        """Wait until the rate limit allows a delivery to the group; return True if time is left to check again."""
        is_left = left_s > 0
        try:
            if is_left:
                await self.flows.wait(group, left_s)
        except BaseException:
            is_left = False
            raise
        finally:
            if not is_left:
                found.wake_next()  # pass its wake-up on to a receive that still waits
        return is_left

    # -- finishing ----------------------------------------------------------------------------------------------------

    async def ack(self, group: str, topic: str, receipt_handles: Sequence[str]) -> Sequence[Exception | None]:
        return await self._finish(group, topic, receipt_handles)

    async def forwarded(self, group: str, topic: str, sent: Sequence[ForwardedMessage]) -> Sequence[Exception | None]:
        """As ``ack``, for deliveries that a cluster has accepted."""
        return await self._finish(group, topic, [each.receipt_handle for each in sent], sent)

    async def _finish(
        self, group: str, topic: str, receipt_handles: Sequence[str], sent: Sequence[ForwardedMessage] = ()
    ) -> Sequence[Exception | None]:
        if obstacle := self._store.write_obstacle():
            return [Overloaded(obstacle, limit="disk")] * len(receipt_handles)
        try:
            found = await self._subscriptions.subscribe_known(group, topic)
        except Refused as refused:
            return [refused] * len(receipt_handles)
        asked = [_at_hand(found, handle) or await self._known(found, handle) for handle in receipt_handles]
        if found.is_retired:
            return [_retired(handle) for handle in receipt_handles]
        results: list[Exception | None] = []
        ops: list[Op] = []
        finished: dict[SubscribedQueue, dict[int, None]] = {}
        # There is no await in this loop, so a concurrent call for the same handles runs entirely before or after it.
        for number, each in enumerate(asked):
            if isinstance(each, Refused):
                results.append(each)
                continue
            queue, receipt, lease = each
            offset = receipt.queue_offset
            try:
                is_open = queue.check(receipt)
            except Refused as refused:
                results.append(refused)
                continue
            results.append(None)
            places = finished.setdefault(queue, {})
            if is_open and offset not in places:
                places[offset] = None
                if sent:
                    _, times, place = sent[number]
                    event = found.event(EventKind.FORWARDED, queue, times, place & _U64, lease.message_id)
                else:
                    attempt = lease.attempts_before + receipt.attempt
                    event = found.event(EventKind.ACKED, queue, attempt, offset, lease.message_id)
                ops.append(_new_tuple(Emit, (event, offset)))
        if finished:
            # Also without ops: an offset found finished may come from an ack that is not durable yet.
            done = self._submit_finished(ops, finished)
            found.release_after(done, [(queue, offset) for queue, places in finished.items() for offset in places])
            await self._commits.committed(done)
            self.acked_total += sum(map(len, finished.values()))
        return results

    def _submit_finished(
        self, ops: list[Op], finished: Mapping[SubscribedQueue, Collection[int]]
    ) -> asyncio.Future[list[Stored]]:
        """Submit ``ops`` with the ends of the offsets in ``finished``."""
        ends = self._spans.acked(finished) if self._spans is not None else ()
        for queue, offsets in finished.items():
            ops += queue.finish(offsets)
        done = self._commits.submit(ops)
        if ends and self._spans is not None:
            self._spans.ended_after(done, ends)
        return done

    async def refused(self, group: str, topic: str, receipt_handle: str, code: int, why: str) -> None:
        """Turn a delivery that a cluster permanently refuses into a dead letter of the group, durable on return."""
        found = await self._subscriptions.subscribe_known(group, topic)
        _, _, lease, _ = await self._lease_of(found, receipt_handle)
        await self._fail(found, receipt_handle, lease, Unwanted(code, why))

    @staticmethod
    def is_held(found: GroupSubscription, receipt_handle: str) -> bool:
        """Return True if a delivery of this run is leased and not finished."""
        return isinstance(_at_hand(found, receipt_handle), tuple)

    def in_doubt(self, found: GroupSubscription, receipt_handle: str, times: int) -> Emit | None:
        """Return the event for a delivery that a cluster may have and receives again; None if it is not leased."""
        known = _at_hand(found, receipt_handle)
        if known is None or isinstance(known, Refused):
            return None
        queue, receipt, lease = known
        offset = receipt.queue_offset
        return Emit(found.event(EventKind.FORWARD_IN_DOUBT, queue, times, offset, lease.message_id), offset)

    async def change_invisible(
        self, group: str, topic: str, receipt_handle: str, invisible_ms: int, *, suspend: bool = False
    ) -> str:
        if obstacle := self._store.write_obstacle():
            raise Overloaded(obstacle, limit="disk")
        found = await self._subscriptions.subscribe_known(group, topic)
        queue, receipt, lease, message_group = await self._lease_of(found, receipt_handle)
        now = moment(self._clock)
        visible_at_ms = now.wall_ms + invisible_ms
        if receipt.is_push and not suspend:
            await self._fail(found, receipt_handle, lease, Nacked(visible_at_ms))
            return receipt_handle
        offset = receipt.queue_offset
        reason = self._reasons.take(receipt_handle) if not suspend and invisible_ms > 0 else None
        failure = encode_reason(reason) if reason is not None and reason.error else b""
        ops = queue.hide(
            offset, lease, now, invisible_ms, is_suspended=suspend, message_group=message_group, failure=failure
        )
        try:
            if invisible_ms <= 0:
                await self._commits.wait(self._leases.give_back(queue, offset, lease))
                return receipt_handle
            event = found.event(EventKind.INVISIBLE_CHANGED, queue, lease.attempts, visible_at_ms, lease.message_id)
            event = with_reason(event, reason) if failure else event
            done = self._commits.submit([*ops, Emit(event, offset)])
            self._ends.watch(queue, offset, lease)
            await self._commits.committed(done)
        except StoreError as error:
            raise BrokerUnavailable(str(error)) from error
        return receipt_handle

    async def not_taken(self, group: str, leased: Sequence[tuple[str, str]]) -> None:
        """End the leases of deliveries, given as (topic, receipt handle) pairs, that did not reach their client.

        Ended and finished deliveries stay as they are. So does a delivery with a changed invisible duration: it reached
        its client, and must not become visible early.
        """
        for topic, receipt_handle in leased:
            with suppress(BrokerError, StoreError):
                found = await self._subscriptions.subscribe_known(group, topic)
                known = _at_hand(found, receipt_handle)
                if not isinstance(known, tuple):
                    continue
                queue, receipt, lease = known
                if not lease.is_returning and not lease.is_changed:
                    await self._commits.wait(self._leases.give_back(queue, receipt.queue_offset, lease))

    async def dead_letter(self, group: str, topic: str, receipt_handle: str, *, attempts: int) -> None:
        found = await self._subscriptions.subscribe_known(group, topic)
        _, receipt, lease, _ = await self._lease_of(found, receipt_handle)
        if not receipt.is_push or attempts > MAX_ATTEMPTS_LIMIT:  # more than any policy allows: an explicit request
            await self._fail(found, receipt_handle, lease, GivenUp())
            return
        # Push clients give up on their own only in FIFO mode, there at the first failure, because their settings
        # make them: see dmq.rocketmq_server.sessions.settings.
        is_last = attempts >= self._catalog.policy(found.group_id).max_attempts
        await self._fail(found, receipt_handle, lease, Nacked(), min(attempts, ATTEMPT_MAX) if is_last else 0)

    async def send_back(self, group: str, topic: str, receipt_handle: str, delay_level: int) -> None:
        """Return a delivery as failed. Delay level -1 ends its attempts, 0 applies the retry policy, 1 and up select a
        level.
        """
        found = await self._subscriptions.subscribe_known(group, topic)
        _, _, lease, _ = await self._lease_of(found, receipt_handle)
        await self._fail(found, receipt_handle, lease, SentBack(delay_level))

    async def _fail(
        self,
        found: GroupSubscription,
        handle: str,
        lease: DeliveryLease,
        failure: Failure,
        attempts_told: int = 0,
    ) -> None:
        """Fail the delivery with ``lease``, durable on return; return if its failure is already under commit."""
        queue, receipt = _resolve(self._receipts, found, handle)
        while lease.is_returning:
            await self._commits.flush()
            if not lease.is_coming_back:
                return
            _, _, lease, _ = await self._lease_of(found, handle)  # raises if it is delivered again by now
        done = self._failures.fail(
            queue, receipt.queue_offset, lease, failure, attempts_told=attempts_told, handle=handle
        )
        await self._commits.wait(done)
        found.wake_next()

    async def _known(self, found: GroupSubscription, handle: str) -> _Known:
        """Return the queue, receipt and lease of a handle; the lease of a valid handle has the message id for the
        event.
        """
        try:
            queue, receipt = _resolve(self._receipts, found, handle)
            lease = queue.leases.get(receipt.queue_offset, _NO_LEASE)
            if lease.message_id:
                _check_name(receipt, lease.message_id)
            elif queue.check(receipt):
                try:
                    _, _, lease, _ = await self._lease_of(found, handle)
                except Refused:  # finished or delivered again during the read, or of another message
                    if queue.check(receipt):
                        raise
        except Refused as refused:
            return refused
        return queue, receipt, lease

    async def _lease_of(
        self, found: GroupSubscription, handle: str
    ) -> tuple[SubscribedQueue, ReceiptHandle, DeliveryLease, str]:
        """Return the queue, receipt, lease and message group of a valid handle; refuse a finished message."""
        queue, receipt = _resolve(self._receipts, found, handle)
        if not queue.check(receipt):
            raise Refused(Rule.RECEIPT_HANDLE, "the message is finished", value=handle)
        lease = queue.leases.get(receipt.queue_offset)
        message_group = queue.order.group_of(receipt.queue_offset)
        if lease is None or not lease.message_id:  # expired, or from before a restart
            (record,) = await self._reader.messages([(queue, receipt.queue_offset)])
            if found.is_retired:
                raise _retired(handle)
            if not queue.check(receipt):  # meanwhile
                raise Refused(Rule.RECEIPT_HANDLE, "the message is finished", value=handle)
            _check_name(receipt, record.message_id)
            message_group = record.message_group
            is_new = receipt.queue_offset not in queue.leases
            lease = queue.leased(receipt, message_group)
            lease.know(record)
            if is_new:  # the call ends or changes it, unless it fails
                lease.ends_ms = self._clock.boot_ms() + POSTPONED_MS
                self._ends.watch(queue, receipt.queue_offset, lease)
        else:
            _check_name(receipt, lease.message_id)
        return queue, receipt, lease, message_group


def _at_hand(found: GroupSubscription, handle: str) -> _Known | None:
    """As ``_known``, only for the exact handle issued with a lease in memory; return None for any other."""
    try:
        receipt = read_receipt(handle)
    except (ValueError, struct.error):
        return None
    if receipt.group_id != found.group_id:
        return None
    queue = found.queue_at(receipt.topic_id, receipt.queue_id)
    lease = queue.leases.get(receipt.queue_offset) if queue is not None else None
    if queue is None or lease is None or not compare_digest(lease.handle, handle):
        return None
    return queue, receipt, lease


def _check_name(receipt: ReceiptHandle, message_id: bytes) -> None:
    """Refuse a handle of a different message: the store's files were replaced by older ones."""
    if receipt.message != name_of(message_id):
        raise Refused(Rule.RECEIPT_HANDLE, "the handle is of another message", value=receipt.queue_offset)


def _retired(handle: str) -> Refused:
    return Refused(Rule.RECEIPT_HANDLE, "its topic or group was removed, or the group was reset", value=handle)


def _resolve(known: ReceiptHandles, found: GroupSubscription, handle: str) -> tuple[SubscribedQueue, ReceiptHandle]:
    receipt = known.decode(handle)
    queue = found.queue_at(receipt.topic_id, receipt.queue_id) if receipt.group_id == found.group_id else None
    if queue is None:
        raise Refused(Rule.RECEIPT_HANDLE, "the handle belongs to another group or topic", value=handle)
    if receipt.epoch <= found.reset_epoch:
        raise _retired(handle)
    return queue, receipt
