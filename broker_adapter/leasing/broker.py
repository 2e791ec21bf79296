"""Broker contract for brokers with queues and offsets only (``PopBroker``, ``TransactionalBroker``).

Requests that such a cluster does not support are refused with ``Rule.UNSUPPORTED``. Other differences:

- A send is not idempotent: two sends of one message id store two messages.
- Delays depend on the brokers: brokers before RocketMQ 5 have levels only, unless the daemon keeps the message.
- A recall does not report the fate of the message.
- A lease is local to this process, as its queues are. If it dies or a queue moves to another member of the group,
  leased messages are redelivered. So are messages acknowledged recently or after an unfinished message.
- A retry has at least the shortest delay level, a second, unless the message was released.
- A commit or a rollback has no answer: a broker that did not receive it checks again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from broker_adapter.contracts.adapter import ROCKETMQ_GROUP, GroupSettings, Subscription, TopicRoute
from broker_adapter.contracts.classic import ClassicBroker, Decision, Start, TransactionCheck
from broker_adapter.contracts.errors import Overloaded, Refused, Rule
from broker_adapter.contracts.limits import AUTO_RENEW_INVISIBLE_MS, BODY_BYTES_MAX, GROUPS_MAX, TOPICS_MAX
from broker_adapter.contracts.message import Delivery, Envelope, MessageType, RecallReceipt, SendReceipt
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX, RETRY_PREFIX, check_group
from broker_adapter.contracts.transactions import Check, Checker, Half, HalfReceipt, single_half
from broker_adapter.leasing.handles import HalfHandle, LeaseHandle, given_recall_handle, is_ours
from broker_adapter.leasing.leases import MemberLeases
from broker_adapter.leasing.member import GroupMember
from broker_adapter.leasing.messages import delivery_of, message_of, send_receipt
from broker_adapter.queue_client import Membership
from broker_adapter.queue_client.producer import Producer, ProducerOptions
from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.live_clients import LiveClients
from broker_adapter.runtime.log import LibraryLog
from broker_adapter.wire.mapping import encode

PRODUCER_GROUP = "dmq-producers"
_TICK_S = 0.2
_LOOK_EVERY = 300  # ticks: a minute
_LOOK_S = 1.0
_CHECK_AFTER, _CHECKED_TIMES = "CHECK_IMMUNITY_TIME_IN_SECONDS", "TRANSACTION_CHECK_TIMES"  # of a half message

_log = LibraryLog("broker_adapter.leasing")


class BrokerReach(Protocol):
    """Reachability of the brokers."""

    @property
    def is_away(self) -> bool:
        """True if no broker answers."""
        ...

    @property
    def errors(self) -> Mapping[str, str]:
        """Failure reasons of unreachable brokers, by address."""
        ...

    async def look(self) -> None:
        """Probe unreachable brokers; while no broker is known, discover brokers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasingOptions:
    """Options of a cluster. ``start``: start position of a group in a queue without a committed offset."""

    start: Start = Start.FIRST_OFFSET
    timeout_ms: int = 3_000  # of a send


_DEFAULTS = LeasingOptions()


class LeasingBroker:
    """Broker contract over a ``ClassicBroker``. Belongs to one event loop; must be closed with ``close``."""

    def __init__(
        self,
        classic: ClassicBroker,
        clock: Clock,
        options: LeasingOptions = _DEFAULTS,
        reach: BrokerReach | None = None,
    ) -> None:
        """Start the background tasks.

        Without ``reach`` all brokers count as reachable, as brokers of this process are.
        """
        self._classic = classic
        self._clock = clock
        self._options = options
        self._reach = reach
        self._membership = Membership(classic)
        sends = ProducerOptions(attempts_max=1, timeout_ms=options.timeout_ms, fault_avoidance=True)
        self._producer = Producer(self._membership, PRODUCER_GROUP, sends, clock=clock)
        self._is_producing = False
        self._run = os.urandom(6).hex()
        self._handed_out = count(1)
        self._ticks = 0
        self._clients = LiveClients(clock)
        self._members: dict[str, GroupMember] = {}
        self._routes: dict[str, Mapping[MessageQueue, int]] = {}  # the number of each queue, by topic
        self._checker: Checker | None = None
        self._tasks: set[asyncio.Task[None]] = {
            asyncio.ensure_future(self._every(_TICK_S, self._tick)),
            asyncio.ensure_future(self._every(_LOOK_S, self._look)),
        }

    async def close(self) -> None:
        """Commit the offsets of all groups, leave the groups, and close all connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(each.close() for each in self._members.values()))
        if self._is_producing:
            await self._membership.remove_producer(PRODUCER_GROUP)
        await self._membership.close()
        await self._classic.close()

    # -- the cluster --------------------------------------------------------------------------------------------------

    @property
    def is_away(self) -> bool:
        """True if no broker of the cluster answers."""
        return self._reach is not None and self._reach.is_away

    @property
    def errors(self) -> Mapping[str, str]:
        """Failure reasons of unreachable brokers, by address."""
        return self._reach.errors if self._reach is not None else {}

    def owns(self, handle: str) -> bool:
        """Return True if this adapter issued a receipt handle, recall handle or transaction id."""
        return is_ours(handle)

    def known_route(self, topic: str) -> TopicRoute | None:
        """Return the last route of a topic at any age, or ``None`` if there was none."""
        known = self._routes.get(topic)
        return TopicRoute(topic, len(known)) if known is not None else None

    def is_known(self, kind: str, name: str) -> bool:
        """Return True if the cluster has confirmed the topic ``name``, or if the group ``name`` is receiving.

        ``kind`` is ``topics`` or ``groups``.
        """
        return name in (self._routes if kind == "topics" else self._members)

    # -- names --------------------------------------------------------------------------------------------------------

    async def route(self, topic: str) -> TopicRoute:
        """Implement ``PopBroker.route``. A cluster with auto-creation creates the topic with the first message."""
        return TopicRoute(topic, len(await self._numbers(topic)))

    async def ensure_group(self, group: str) -> None:
        """Implement ``PopBroker.ensure_group``: check the name; brokers may refuse the group at its first receive."""
        check_group(group)

    def group_settings(self, group: str, topics: Collection[str] = ()) -> GroupSettings:  # noqa: ARG002 - all alike
        """Implement ``PopBroker.group_settings``: always RocketMQ's defaults."""
        return ROCKETMQ_GROUP

    # -- producing ----------------------------------------------------------------------------------------------------

    async def send(self, envelopes: Sequence[Envelope]) -> Sequence[SendReceipt]:
        """Implement ``PopBroker.send``, in one attempt, without deduplication of message ids."""
        first = envelopes[0]
        messages = [message_of(each) for each in envelopes]
        if len(envelopes) > 1:
            if any(
                each.topic != first.topic
                or each.message_type is not MessageType.NORMAL
                or each.topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX))
                for each in envelopes
            ):
                why = "RocketMQ accepts several messages in one send only if all are normal messages of one topic"
                raise Refused(Rule.UNSUPPORTED, why, value=f"{len(envelopes)} messages")
            if sum(len(each.body) for each in messages) > BODY_BYTES_MAX:
                why = "the messages of one send are too large together: send them one by one"
                raise Refused(Rule.BODY_SIZE, why, value=len(envelopes), limit=f"{BODY_BYTES_MAX} bytes")
            batch = await self._producer.send_batch(messages)
            queue_id = self._routes.get(first.topic, {}).get(batch.queue, -1)
            return [
                send_receipt(batch._replace(queue_offset=batch.queue_offset + number), each.message_id, queue_id)
                for number, each in enumerate(envelopes)
            ]
        receipt = await self._producer.send(messages[0])
        return [send_receipt(receipt, first.message_id, self._routes.get(first.topic, {}).get(receipt.queue, -1))]

    async def recall(self, topic: str, recall_handle: str) -> RecallReceipt:
        """Implement ``PopBroker.recall``. The cluster's OK does not prove that the message was still pending."""
        message_id = await self._classic.recall(topic, given_recall_handle(recall_handle))
        return RecallReceipt(message_id, self._clock.now_ms())

    # -- transactions -------------------------------------------------------------------------------------------------

    def attach(self, checker: Checker) -> None:
        """Implement ``TransactionalBroker.attach``."""
        self._checker = checker

    async def prepare(self, halves: Sequence[Half]) -> Sequence[HalfReceipt]:
        """Implement ``TransactionalBroker.prepare``, for one half message without a delay."""
        half = single_half(halves)
        await self._join_producers()
        message = message_of(half.envelope)
        system = {_CHECK_AFTER: str(-(-half.check_after_ms // 1000))} if half.check_after_ms else {}
        receipt = await self._producer.send_half(message, system)
        handle = HalfHandle(
            receipt.queue, receipt.queue_offset, receipt.offset_id, message.message_id, receipt.transaction_id
        )
        return [HalfReceipt(message.message_id, str(handle))]

    async def commit(self, topic: str, transaction_id: str) -> None:
        """Implement ``TransactionalBroker.commit``, without a confirmation of the broker."""
        await self._end(HalfHandle.of(transaction_id, topic), Decision.COMMIT)

    async def roll_back(self, topic: str, transaction_id: str) -> None:
        """Implement ``TransactionalBroker.roll_back``, without a confirmation of the broker."""
        await self._end(HalfHandle.of(transaction_id, topic), Decision.ROLLBACK)

    async def _end(self, half: HalfHandle, decision: Decision) -> None:
        await self._classic.end_transaction(PRODUCER_GROUP, half.receipt, decision, check=half.question(PRODUCER_GROUP))

    async def _join_producers(self) -> None:
        """Join the producer group for transaction checks, including those of an earlier run."""
        if not self._is_producing:
            self._is_producing = True
            await self._membership.add_producer(PRODUCER_GROUP, self._asked)

    def _asked(self, question: TransactionCheck) -> None:
        self._begin(self._pass_on(question))

    async def _pass_on(self, question: TransactionCheck) -> None:
        received = question.message
        message = received.message
        half = HalfHandle(
            received.queue,
            received.queue_offset,
            received.offset_id,
            message.message_id,
            question.transaction_id,
            is_asked=True,
        )
        number = received.system.get(_CHECKED_TIMES, "1")
        check = Check(
            message.topic,
            message.message_id,
            str(half),
            encode(message).payload,
            int(number) if number.isdigit() else 1,
        )
        if self._checker is not None and self._checker.is_live(message.topic):
            await self._checker.check(check)  # without an answer the broker checks again

    # -- consuming ----------------------------------------------------------------------------------------------------

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
        """Implement ``PopBroker.receive``; the queue number of a subscription is ignored."""
        numbers = await self._numbers(subscription.topic)
        hidden_ms = AUTO_RENEW_INVISIBLE_MS if renew_for else invisible_ms
        found = await self._member(group).receive(
            subscription, batch_max=batch_max, invisible_ms=invisible_ms, wait_ms=wait_ms, renew_for=renew_for
        )
        return [delivery_of(each, numbers.get(each.received.queue, 0), hidden_ms) for each in found]

    async def ack(self, group: str, topic: str, receipt_handles: Sequence[str]) -> Sequence[Exception | None]:  # noqa: ARG002
        """Implement ``PopBroker.ack``. A crash of this process may lose an acknowledgement, which must then be
        repeated.
        """
        return [self._acked(group, each) for each in receipt_handles]

    def _acked(self, group: str, receipt_handle: str) -> Exception | None:
        try:
            self._leases(group, receipt_handle).ack(LeaseHandle.of(receipt_handle))
        except Refused as refused:
            return refused
        return None

    async def change_invisible(
        self,
        group: str,
        topic: str,  # noqa: ARG002
        receipt_handle: str,
        invisible_ms: int,
        *,
        suspend: bool = False,
    ) -> str:
        """Implement ``PopBroker.change_invisible``."""
        handle = LeaseHandle.of(receipt_handle)
        await self._leases(group, receipt_handle).change_invisible(handle, invisible_ms, suspend=suspend)
        return receipt_handle

    async def dead_letter(self, group: str, topic: str, receipt_handle: str, *, attempts: int) -> None:  # noqa: ARG002
        """Implement ``PopBroker.dead_letter``; the number of attempts is not verified, as in RocketMQ."""
        handle = LeaseHandle.of(receipt_handle)
        await self._leases(group, receipt_handle).bury(handle)

    def client_seen(self, client_id: str) -> None:
        """Implement ``PopBroker.client_seen``."""
        self._clients.seen(client_id)

    def client_gone(self, client_id: str) -> None:
        """Implement ``PopBroker.client_gone``; the leases of the client end in a second."""
        if self._clients.gone(client_id):
            for member in self._members.values():
                if member.leases is not None:
                    member.leases.client_gone(client_id)

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _numbers(self, topic: str) -> Mapping[MessageQueue, int]:
        """Return the queues of a topic with their numbers for clients."""
        try:
            route = await self._membership.route(topic)
        except Refused:
            self._routes.pop(topic, None)
            raise
        known = self._routes.get(topic)
        if known is None or len(known) != len(route.readable) or any(each not in known for each in route.readable):
            known = {queue: number for number, queue in enumerate(route.readable)}
            if len(self._routes) >= TOPICS_MAX:
                self._routes.pop(next(iter(self._routes)))
            self._routes[topic] = known
        return known

    def _member(self, group: str) -> GroupMember:
        member = self._members.get(group)
        if member is None:
            if len(self._members) >= GROUPS_MAX:
                raise Overloaded("too many consumer groups receive at once", limit=GROUPS_MAX)
            member = self._members[check_group(group)] = GroupMember(
                self._membership,
                group,
                self._clock,
                self._clients,
                run=self._run,
                numbers=self._handed_out,
                start=self._options.start,
            )
        return member

    def _leases(self, group: str, receipt_handle: str) -> MemberLeases:
        member = self._members.get(group)
        if member is None or member.leases is None:
            why = f"group {group!r} has no receives here now; its messages are redelivered"
            raise Refused(Rule.RECEIPT_HANDLE, why, value=receipt_handle)
        return member.leases

    # -- in the background --------------------------------------------------------------------------------------------

    async def _every(self, interval_s: float, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                await act()
            except Exception as error:  # noqa: BLE001 - without this loop no lease ends
                _log.error("background_work_failed", error=f"{type(error).__name__}: {error}")

    async def _tick(self) -> None:
        """End leases, and leave groups without receives."""
        self._clients.look()
        self._ticks += 1
        if self._checker is not None and self._routes and not self._is_producing:
            self._begin(self._join_producers())
        for group, member in list(self._members.items()):
            if member.tick(looks=self._ticks % _LOOK_EVERY == 0):
                self._begin(member.close(if_idle=True))  # in a task: it may wait for unreachable brokers
            elif member.is_over:
                del self._members[group]

    async def _look(self) -> None:
        """Probe unreachable brokers."""
        if self._reach is not None:
            await self._reach.look()

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background_work_failed", error=f"{type(error).__name__}: {error}")
