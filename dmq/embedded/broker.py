"""The embedded broker's shell: fits ``PopBroker``. Logic lives in ``place`` and ``group_queue``; here are the waits.

Everything in memory belongs to one event loop. Reads go through one thread, writes through the store's writer. A change
of state is answered only after the store said that it is durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from broker_adapter import limits
from broker_adapter.adapter import Subscription as Wanted
from broker_adapter.adapter import TopicRoute
from broker_adapter.errors import BrokerUnavailable, Overloaded, Refused, Rule
from broker_adapter.message import Delivery, Envelope, SendReceipt, unpack_id
from broker_adapter.topics import check_group, check_topic
from dmq.audit.events import EventKind, encode_event
from dmq.embedded.group_queue import GroupQueue, Lease
from dmq.embedded.leases import Leases
from dmq.embedded.names import Group, Names, Topic
from dmq.embedded.place import Placement
from dmq.embedded.reader import Reader
from dmq.embedded.receipt import Receipt, decode_handle, encode_handle
from dmq.embedded.subscription import Subscription
from dmq.errors import StoreBusy, StoreError
from dmq.store.commit import Appended
from dmq.store.ops import Emit, Op
from dmq.store.ops import Receipt as Stored
from dmq.store.record import QueuedMessage
from dmq.store.store import Store

RECEIVE_BYTES_MAX = 8 * 1024 * 1024
_PASS_OVER_S_MAX = 0.5  # how long a receive whose time is up goes on through messages that its filter passes over


class EmbeddedBroker:
    """A full broker on the store. Create it on the loop that will use it; ``close`` ends its task and its thread."""

    def __init__(
        self,
        store: Store,
        *,
        queues_per_topic: int = limits.QUEUES_PER_TOPIC_DEFAULT,
        group_start: Literal["earliest", "latest"] = "earliest",
    ) -> None:
        self.store = store
        self.names = Names(store)
        self.placement = Placement(self.names)
        self.accepted_total = 0  # messages, without those that were known already
        self.repeated_total = 0
        self.refused_total = 0  # sends refused because a bound is reached
        self.handed_out_total = 0
        self.acked_total = 0
        self._clock = store.clock
        self._queues_per_topic = queues_per_topic
        self._group_start = group_start
        self._subscriptions: dict[tuple[int, int], Subscription] = {}
        self._by_topic: dict[int, list[Subscription]] = {}
        self._epoch = store.boot << 32
        self._loop = asyncio.get_running_loop()
        self._reader = Reader(store, self._loop)
        self.leases = Leases(store, self._subscription_of)
        store.attach(self._loop, self._on_appended)

    async def close(self) -> None:
        """Stop expiring leases and reading. The store stays open."""
        await self.leases.close()
        self._reader.close()

    @property
    def lease_count(self) -> int:
        """How many messages are handed out and not finished."""
        return sum(len(queue.leases) for found in list(self._subscriptions.values()) for queue in found.queues)

    # -- topics and groups --------------------------------------------------------------------------------------------

    async def route(self, topic: str) -> TopicRoute:
        found = self.names.topics.get(topic)
        if found is None:
            found = await self._create_topic(topic)
        return TopicRoute(found.name, found.queues)

    async def ensure_group(self, group: str) -> None:
        if group not in self.names.groups:
            await self._create_group(group)

    async def _create_topic(self, name: str) -> Topic:
        topic, ops = self.names.plan_topic(check_topic(name), self._queues_per_topic, self._clock.now_ms())
        done = self._submit(ops)
        self.names.add_topic(topic)  # later units are committed after this one, so its id may be used at once
        await self._committed(done)
        return topic

    async def _create_group(self, name: str) -> Group:
        group, ops = self.names.plan_group(check_group(name), self._clock.now_ms())
        done = self._submit(ops)
        self.names.add_group(group)
        await self._committed(done)
        return group

    # -- sending ------------------------------------------------------------------------------------------------------

    async def send(self, envelopes: Sequence[Envelope]) -> Sequence[SendReceipt]:
        if self.store.is_disk_low():
            self.refused_total += len(envelopes)
            raise Overloaded("the disk is almost full", limit="disk_low_water_bytes")
        topics = self.names.topics
        now_ms = self._clock.now_ms()
        ops: list[Op] = []
        for envelope in envelopes:
            topic = topics.get(envelope.topic) or await self._create_topic(envelope.topic)
            ops.append(self.placement.accept(topic, envelope, now_ms))
        try:
            done = self._submit(ops, is_urgent=False)
        except Overloaded:
            self.refused_total += len(envelopes)
            raise
        receipts = await self._committed(done)
        repeated = sum(receipt.repeated for receipt in receipts)
        self.repeated_total += repeated
        self.accepted_total += len(envelopes) - repeated
        return [
            SendReceipt(envelope.message_id, receipt.queue_id, receipt.queue_offset, receipt.repeated)
            for envelope, receipt in zip(envelopes, receipts, strict=True)
        ]

    # -- receiving ----------------------------------------------------------------------------------------------------

    async def receive(
        self,
        group: str,
        subscription: Wanted,
        *,
        batch_max: int,
        invisible_ms: int,
        wait_ms: int,
        renew_for: str = "",
    ) -> Sequence[Delivery]:
        found = await self._subscribe(group, subscription.topic)
        if subscription.queue_id >= len(found.queues):
            raise Refused(Rule.NOT_FOUND, f"{subscription.topic} has no such queue", value=subscription.queue_id)
        until_s = self._clock.monotonic_s() + wait_ms / 1000
        while True:
            if found.has_available(subscription.queue_id):
                deliveries = await self._hand_out(found, subscription, batch_max, invisible_ms, renew_for)
                if deliveries:
                    self.handed_out_total += len(deliveries)
                    return deliveries
            left_s = until_s - self._clock.monotonic_s()
            if found.has_available(subscription.queue_id):
                if left_s <= -_PASS_OVER_S_MAX:
                    return []
            elif left_s <= 0:
                return []
            else:
                await found.wait(subscription.queue_id, left_s)

    async def _hand_out(
        self, found: Subscription, wanted: Wanted, batch_max: int, invisible_ms: int, renew_for: str
    ) -> list[Delivery]:
        now_ms = self._clock.now_ms()
        taken: list[tuple[GroupQueue, int, int]] = []
        for queue in found.choose(wanted.queue_id):
            for offset, attempt in queue.take(batch_max - len(taken)):
                self._epoch += 1
                # Leased before the read, so that no other receive takes them meanwhile.
                queue.lease(offset, Lease(self._epoch, attempt, now_ms + invisible_ms, b"", renew_for))
                taken.append((queue, offset, attempt))
            if len(taken) >= batch_max:
                break
        found.wake_next()  # there may be more than this receive takes
        try:
            records = await self._reader.messages([(queue, offset) for queue, offset, _ in taken])
        except BaseException:
            for queue, offset, _ in reversed(taken):
                queue.give_back(offset)
            found.wake_next()
            raise
        return self._deliver(found, wanted, taken, records, invisible_ms)

    def _deliver(
        self,
        found: Subscription,
        wanted: Wanted,
        taken: list[tuple[GroupQueue, int, int]],
        records: list[QueuedMessage],
        invisible_ms: int,
    ) -> list[Delivery]:
        deliveries: list[Delivery] = []
        passed_over: list[Op] = []
        size = 0
        for (queue, offset, attempt), record in zip(taken, records, strict=True):
            lease = queue.leases[offset]
            if wanted.tags and record.tag not in wanted.tags:
                passed_over += self._filtered(found, queue, offset, record)
                continue
            size += len(record.payload)
            if deliveries and size > RECEIVE_BYTES_MAX:
                queue.give_back(offset)
                found.wake(queue.queue_id)
                continue
            lease.message_id = record.message_id
            self.leases.watch(queue, offset, lease)
            receipt = Receipt(queue.group_id, queue.topic_id, queue.queue_id, offset, lease.epoch, attempt)
            deliveries.append(
                Delivery(
                    found.topic.name,
                    unpack_id(record.message_id),
                    record.payload,
                    queue.queue_id,
                    offset,
                    encode_handle(receipt),
                    attempt + record.attempts_before,
                    invisible_ms,
                    record.stored_at_ms,
                    record.deliver_at_ms,
                )
            )
        if passed_over:
            # Not waited for: forgotten by a crash, they are passed over again; a failure reaches everybody else.
            self._submit(passed_over).add_done_callback(_look_at)
        return deliveries

    def _filtered(self, found: Subscription, queue: GroupQueue, offset: int, record: QueuedMessage) -> list[Op]:
        event = encode_event(
            EventKind.FILTERED, queue.topic_id, found.group.group_id, queue.queue_id, 0, offset, record.message_id
        )
        return [*queue.finish(offset), Emit(event, offset)]

    # -- finishing ----------------------------------------------------------------------------------------------------

    async def ack(self, group: str, topic: str, receipt_handles: Sequence[str]) -> Sequence[Exception | None]:
        results: list[Exception | None] = []
        ops: list[Op] = []
        finished = 0
        try:
            found = await self._subscribe_known(group, topic)
        except Refused as refused:
            return [refused] * len(receipt_handles)
        for handle in receipt_handles:
            try:
                queue, receipt = self._resolve(found, handle)
                if queue.check(receipt):
                    lease = queue.leases.get(receipt.queue_offset)
                    message_id = lease.message_id if lease is not None else b""
                    ops += queue.finish(receipt.queue_offset)
                    event = _event(EventKind.ACKED, receipt, receipt.attempt, receipt.queue_offset, message_id)
                    ops.append(Emit(event, receipt.queue_offset))
                    finished += 1
                results.append(None)
            except Refused as refused:
                results.append(refused)
        if None in results:
            # Also with nothing to write: what was found finished may be so by an ack that is not durable yet.
            await self._committed(self._submit(ops))
            self.acked_total += finished
            found.wake_next()  # the bound of leases may have kept messages back
        return results

    async def change_invisible(
        self, group: str, topic: str, receipt_handle: str, invisible_ms: int, *, suspend: bool = False
    ) -> str:
        found = await self._subscribe_known(group, topic)
        queue, receipt = self._resolve(found, receipt_handle)
        if not queue.check(receipt):
            raise Refused(Rule.RECEIPT_HANDLE, "the message is finished", value=receipt_handle)
        visible_at_ms = self._clock.now_ms() + invisible_ms
        ops = queue.hide(receipt, visible_at_ms, is_suspended=suspend)
        lease = queue.leases[receipt.queue_offset]
        if invisible_ms <= 0:
            try:
                done = self.leases.give_back(queue, receipt.queue_offset, lease)
            except StoreError as error:
                raise BrokerUnavailable(str(error)) from error
            await self._committed(done)
            return receipt_handle
        event = _event(EventKind.INVISIBLE_CHANGED, receipt, lease.attempt, visible_at_ms, lease.message_id)
        done = self._submit([*ops, Emit(event, receipt.queue_offset)])
        self.leases.watch(queue, receipt.queue_offset, lease)
        await self._committed(done)
        return receipt_handle

    def client_seen(self, client_id: str) -> None:
        self.leases.client_seen(client_id)

    def client_gone(self, client_id: str) -> None:
        self.leases.client_gone(client_id)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _resolve(self, found: Subscription, handle: str) -> tuple[GroupQueue, Receipt]:
        receipt = decode_handle(handle)
        mine = (found.group.group_id, found.topic.topic_id)
        if (receipt.group_id, receipt.topic_id) != mine or receipt.queue_id >= len(found.queues):
            raise Refused(Rule.RECEIPT_HANDLE, "the handle belongs to another group or topic", value=handle)
        return found.queues[receipt.queue_id], receipt

    def _subscription_of(self, queue: GroupQueue) -> Subscription:
        return self._subscriptions[queue.group_id, queue.topic_id]

    async def _subscribe_known(self, group_name: str, topic_name: str) -> Subscription:
        """As ``_subscribe``, but a handle cannot be of a group or topic that nobody ever named: create nothing."""
        if group_name not in self.names.groups or topic_name not in self.names.topics:
            raise Refused(Rule.RECEIPT_HANDLE, "nothing was ever handed out", value=f"{group_name}, {topic_name}")
        return await self._subscribe(group_name, topic_name)

    async def _subscribe(self, group_name: str, topic_name: str) -> Subscription:
        """Return the state of (group, topic), loaded; creates what is missing."""
        group = self.names.groups.get(group_name) or await self._create_group(group_name)
        topic = self.names.topics.get(topic_name) or await self._create_topic(topic_name)
        while (found := self._subscriptions.get((group.group_id, topic.topic_id))) is not None:
            if found.is_loaded.is_set():
                return found
            await found.is_loaded.wait()  # and look again: whoever loads it may fail, or be cancelled
        found = Subscription(group, topic)
        self._subscriptions[group.group_id, topic.topic_id] = found
        self._by_topic.setdefault(topic.topic_id, []).append(found)  # from here on it hears of new messages
        try:
            await self._load(found)
        except BaseException:
            del self._subscriptions[group.group_id, topic.topic_id]
            self._by_topic[topic.topic_id].remove(found)
            raise
        finally:
            found.is_loaded.set()
        return found

    async def _load(self, found: Subscription) -> None:
        ops: list[Op] = []
        for queue, (rows, end) in zip(found.queues, await self._reader.progress(found.queues), strict=True):
            queue.end = max(queue.end, end)
            if rows:
                queue.load(rows)
            else:
                ops += queue.start_at(0 if self._group_start == "earliest" else queue.end)
        # Also without ops: behind this unit, what lies below the ends that were read is durable.
        await self._committed(self._submit(ops))
        for queue in found.queues:
            for offset, lease in queue.leases.items():
                self.leases.watch(queue, offset, lease)

    def _on_appended(self, appended: Appended) -> None:
        for (topic_id, queue_id), end in appended.items():
            for found in self._by_topic.get(topic_id, ()):
                queue = found.queues[queue_id]
                queue.end = max(queue.end, end)
                found.wake(queue_id)

    def _submit(self, ops: Sequence[Op], *, is_urgent: bool = True) -> asyncio.Future[list[Stored]]:
        try:
            return self.store.commit_async(ops, is_urgent=is_urgent)
        except StoreBusy as error:
            raise Overloaded("the store is busy", limit="pending_sends_max") from error
        except StoreError as error:
            raise BrokerUnavailable(str(error)) from error

    async def _committed(self, done: asyncio.Future[list[Stored]]) -> list[Stored]:
        try:
            return await asyncio.shield(done)  # a caller that goes away does not undo what was submitted
        except StoreError as error:
            raise BrokerUnavailable(str(error)) from error


def _look_at(done: asyncio.Future[list[Stored]]) -> None:
    if not done.cancelled():
        done.exception()


def _event(kind: EventKind, receipt: Receipt, attempt: int, time_ms: int, message_id: bytes) -> bytes:
    return encode_event(kind, receipt.topic_id, receipt.group_id, receipt.queue_id, attempt, time_ms, message_id)
