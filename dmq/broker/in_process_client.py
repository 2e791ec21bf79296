"""Client of the embedded broker in the same process: implements ``ClassicBroker`` without a network.

Such clients divide the queues of a topic among themselves. One broker object serves any number of them, each with its
own client id. They share messages, leases and committed offsets with all other clients of the broker.
``dmq.broker.classic.send_back`` implements redelivery after a send-back; ``dmq.broker.classic.clients`` tracks group
members.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from broker_adapter.contracts.adapter import PulledMessage, QueueRange, Subscription
from broker_adapter.contracts.classic import (
    Decision,
    Filter,
    Listener,
    MessageQueue,
    Outgoing,
    Presence,
    PulledMessages,
    QueueReceipt,
    ReceivedMessage,
    Route,
    SendStatus,
    TransactionCheck,
)
from broker_adapter.contracts.errors import BrokerUnavailable, Refused, Rule
from broker_adapter.contracts.message import Envelope
from broker_adapter.contracts.topics import RETRY_PREFIX
from broker_adapter.contracts.transactions import Half
from broker_adapter.wire.failure_reports import report_of
from dmq.broker.broker import EmbeddedBroker
from dmq.broker.classic import BROKER, CHECK_AFTER_S, PRODUCER_GROUP, envelope_of, received_of
from dmq.broker.topics import Topic
from retry.failure_reason import FailureReason

_Result = TypeVar("_Result")


class EmbeddedClassic:
    """One client of a broker in this process. It belongs to the broker's event loop."""

    def __init__(
        self, broker: EmbeddedBroker, client_id: str, *, on_close: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Create a client; ``on_close`` is awaited after the client is closed, to release its other resources."""
        self._broker = broker
        self._client_id = client_id
        self._on_close = on_close
        self._clients = broker.clients
        self._pulls = broker.pulls
        self._clock = broker.store.clock
        self._groups: set[str] = set()  # groups of its consumers
        self._under_way: set[asyncio.Future[object]] = set()
        self._is_closed = False

    @property
    def client_id(self) -> str:
        """As ``ClassicBroker.client_id``."""
        return self._client_id

    def attach(self, listener: Listener) -> None:
        """As ``ClassicBroker.attach``."""
        self._clients.attach(self._client_id, listener)

    async def close(self) -> None:
        """As ``ClassicBroker.close``: leave all groups and unlock all queues of the client."""
        if self._is_closed:
            return
        self._is_closed = True
        self._clients.detach(self._client_id)
        self._pulls.locks.gone(self._client_id)
        for call in self._under_way:
            call.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        if self._on_close is not None:
            await self._on_close()

    # -- routes and members -------------------------------------------------------------------------------------------

    async def route(self, topic: str) -> Route:
        """As ``ClassicBroker.route``. The call creates an unknown topic if the broker auto-creates topics."""
        group = topic.removeprefix(RETRY_PREFIX)
        if group != topic:
            if group not in self._broker.names.groups:
                raise Refused(Rule.TOPIC_UNKNOWN, "unknown group", value=topic)
            found = await self._broker.catalog.retry_topic(group)
        else:
            found = await self._broker.catalog.topic(topic)
        queues = tuple(MessageQueue(topic, BROKER, queue_id) for queue_id in range(found.queues))
        return Route(topic, queues, queues)

    async def heartbeat(self, producers: Sequence[str], consumers: Sequence[Presence]) -> None:
        """As ``ClassicBroker.heartbeat``. It creates unknown groups and their retry topics."""
        self._check_open()
        for each in consumers:
            if each.is_broadcast:
                await self._broker.ensure_group(each.group)
            else:
                await self._broker.catalog.retry_topic(each.group)
        self._check_open()
        self._groups |= {each.group for each in consumers}
        self._clients.seen(self._client_id, producers, [each.group for each in consumers])

    async def leave(self, *, producer: str = "", consumer: str = "") -> None:
        """As ``ClassicBroker.leave``."""
        self._groups.discard(consumer)
        self._clients.gone(self._client_id, producer=producer, consumer=consumer)
        if consumer:
            self._pulls.locks.gone(self._client_id, consumer)

    async def members(self, group: str, topic: str) -> Sequence[str]:
        """As ``ClassicBroker.members``."""
        self._broker.catalog.known_topic(topic)
        return self._clients.members(group)

    async def lock(self, group: str, queues: Sequence[MessageQueue]) -> frozenset[MessageQueue]:
        """As ``ClassicBroker.lock``."""
        held: set[MessageQueue] = set()
        for topic, queue_ids in _by_topic(queues).items():
            locked = await self._pulls.lock(group, self._client_id, topic, queue_ids)
            held |= {MessageQueue(topic, BROKER, queue_id) for queue_id in locked}
        return frozenset(held)

    async def unlock(self, group: str, queues: Sequence[MessageQueue]) -> None:
        """As ``ClassicBroker.unlock``."""
        for topic, queue_ids in _by_topic(queues).items():
            await self._pulls.unlock(group, self._client_id, topic, queue_ids)

    # -- sending ------------------------------------------------------------------------------------------------------

    async def send(
        self, group: str, queue: MessageQueue, messages: Sequence[Outgoing], *, timeout_ms: int, one_way: bool = False
    ) -> QueueReceipt:
        """As ``ClassicBroker.send``. As in all sends, a message id already known in its topic is not stored again."""
        self._check_open()
        self._topic_of(queue)
        if not messages or (len(messages) > 1 and any(each.is_half or self._is_delayed(each) for each in messages)):
            raise Refused(Rule.REQUEST, "a batch cannot contain delayed or half messages", value=len(messages))
        sending = self._send_half(group, queue, messages[0]) if messages[0].is_half else self._send(queue, messages)
        if one_way:
            call = self._begin(sending)
            call.add_done_callback(lambda done: done.cancelled() or done.exception())
            ids = ",".join(each.message.message_id for each in messages)
            return QueueReceipt(SendStatus.STORED, ids, queue, -1)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await self._run(sending)
        except TimeoutError as error:
            raise BrokerUnavailable(f"the message was not stored within {timeout_ms} ms") from error

    async def _send(self, queue: MessageQueue, messages: Sequence[Outgoing]) -> QueueReceipt:
        ids = ",".join(each.message.message_id for each in messages)
        envelopes = [self._envelope(queue, each) for each in messages]
        if queue.topic.startswith(RETRY_PREFIX):  # the same message may be sent here many times
            group = queue.topic.removeprefix(RETRY_PREFIX)
            for each, envelope in zip(messages, envelopes, strict=True):
                await self._broker.sent_back.put(group, each, envelope, self._reason(each.error))
            return QueueReceipt(SendStatus.STORED, ids, queue, -1)
        first = (await self._broker.send(envelopes))[0]
        where = queue if first.queue_id < 0 else queue._replace(queue_id=first.queue_id)
        return QueueReceipt(SendStatus.STORED, ids, where, first.queue_offset, recall_handle=first.recall_handle)

    async def _send_half(self, group: str, queue: MessageQueue, outgoing: Outgoing) -> QueueReceipt:
        envelope = self._envelope(queue, outgoing, **{PRODUCER_GROUP: group})
        check_after = outgoing.system.get(CHECK_AFTER_S, "")
        half = Half(
            envelope,
            delay_ms=self._broker.sent_back.level_ms(outgoing.delay_level) if outgoing.delay_level > 0 else 0,
            check_after_ms=1000 * int(check_after) if check_after.isdecimal() else 0,
        )
        (receipt,) = await self._broker.transactions.prepare([half])
        if receipt.ended:
            raise Refused(Rule.TRANSACTION_ID, f"the transaction {receipt.ended}", value=receipt.message_id)
        return QueueReceipt(SendStatus.STORED, receipt.message_id, queue, -1, transaction_id=receipt.transaction_id)

    def _envelope(self, queue: MessageQueue, outgoing: Outgoing, **system: str) -> Envelope:
        at_ms = outgoing.message.deliver_at_ms
        if outgoing.delay_level > 0:
            at_ms = self._clock.now_ms() + self._broker.sent_back.level_ms(outgoing.delay_level)
        return envelope_of(outgoing, queue, at_ms, **system)

    @staticmethod
    def _is_delayed(outgoing: Outgoing) -> bool:
        return outgoing.delay_level > 0 or outgoing.message.deliver_at_ms > 0

    async def end_transaction(
        self,
        group: str,  # noqa: ARG002 - a half message stores its group
        receipt: QueueReceipt,
        decision: Decision,
        *,
        check: TransactionCheck | None = None,
    ) -> None:
        """As ``ClassicBroker.end_transaction``; durable on return.

        ``Refused(TRANSACTION_ID)``: the transaction already ended with another outcome.
        """
        queue = check.message.queue if check is not None else receipt.queue
        transaction_id = check.transaction_id if check is not None else receipt.transaction_id
        transactions = self._broker.transactions
        if decision is Decision.COMMIT:
            await transactions.commit(queue.topic, transaction_id, queue_id=queue.queue_id)
        elif decision is Decision.ROLLBACK:
            await transactions.roll_back(queue.topic, transaction_id)

    async def recall(self, topic: str, recall_handle: str) -> str:
        """As ``ClassicBroker.recall``; ``Refused(REQUEST)`` for a handle that this broker did not issue."""
        return (await self._broker.recall(topic, recall_handle)).message_id

    # -- reading ------------------------------------------------------------------------------------------------------

    async def pull(
        self, group: str, queue: MessageQueue, wanted: Filter, queue_offset: int, *, batch_max: int, wait_ms: int
    ) -> PulledMessages:
        """As ``ClassicBroker.pull``."""
        self._check_open()
        if group not in self._groups:
            raise Refused(Rule.REQUEST, "this client has not sent a heartbeat for the group", value=group)
        asked = _subscription(queue, wanted)
        try:
            pulled = await self._run(self._pulls.pull(asked, queue_offset, batch_max=batch_max, wait_ms=wait_ms))
        except Refused as refused:
            if refused.rule is not Rule.OFFSET:
                raise
            begin, end = await self.queue_range(queue)
            return PulledMessages((), min(max(queue_offset, begin), end), moved=True)
        return PulledMessages([_received(queue, each) for each in pulled.messages], pulled.next_offset)

    async def queue_range(self, queue: MessageQueue) -> QueueRange:
        """As ``ClassicBroker.queue_range``."""
        return await self._pulls.queue_range(queue.topic, queue.queue_id)

    async def offset_at(self, queue: MessageQueue, stored_at_ms: int) -> int:
        """As ``ClassicBroker.offset_at``; after a step back of the clock, as ``PullBroker.offset_at``."""
        return await self._pulls.offset_at(queue.topic, queue.queue_id, stored_at_ms)

    async def committed_offset(self, group: str, queue: MessageQueue) -> int | None:
        """As ``ClassicBroker.committed_offset``."""
        return await self._pulls.committed_offset(group, queue.topic, queue.queue_id)

    async def commit_offset(self, group: str, queue: MessageQueue, queue_offset: int) -> None:
        """As ``ClassicBroker.commit_offset``; durable on return. ``Refused(OFFSET)`` for an offset after the end of the
        queue.
        """
        await self._pulls.commit_offset(group, queue.topic, queue.queue_id, queue_offset)

    async def send_back(
        self,
        group: str,
        received: ReceivedMessage,
        *,
        delay_level: int,
        attempts_max: int,
        error: BaseException | str = "",
    ) -> None:
        """As ``ClassicBroker.send_back``; durable on return and idempotent."""
        self._check_open()
        sent_back, reason = self._broker.sent_back, self._reason(error)
        await sent_back.send_back(group, received, delay_level=delay_level, attempts_max=attempts_max, reason=reason)

    def _reason(self, error: BaseException | str) -> FailureReason:
        if not error:
            return FailureReason(client_id=self._client_id)
        report = report_of("", "", error)
        return FailureReason(report.error_type, report.error_text, report.host, self._client_id)

    # -- calls --------------------------------------------------------------------------------------------------------

    def _topic_of(self, queue: MessageQueue) -> Topic:
        topic = self._broker.catalog.known_topic(queue.topic)
        if not 0 <= queue.queue_id < topic.queues or queue.broker != BROKER:
            limit = f"broker {BROKER}, queues 0..{topic.queues - 1}"
            raise Refused(
                Rule.REQUEST, f"{queue.topic} has no queue with this number", value=tuple(queue[1:]), limit=limit
            )
        return topic

    def _check_open(self) -> None:
        if self._is_closed:
            raise BrokerUnavailable("the client is closed")

    def _begin(self, call: Awaitable[_Result]) -> asyncio.Future[_Result]:
        begun = asyncio.ensure_future(call)
        self._under_way.add(begun)  # type: ignore[arg-type]  # results are not read through this set
        begun.add_done_callback(self._under_way.discard)
        return begun

    async def _run(self, call: Awaitable[_Result]) -> _Result:
        """Return the result of a call. The call is cancelled with its caller, or fails if the client is closed."""
        begun = self._begin(call)
        try:
            return await begun
        except asyncio.CancelledError:
            if self._is_closed and begun.cancelled() and not _is_cancelled():
                raise BrokerUnavailable("the client was closed") from None
            begun.cancel()
            raise


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _subscription(queue: MessageQueue, wanted: Filter) -> Subscription:
    if wanted.is_sql:
        return Subscription(queue.topic, queue.queue_id, sql=wanted.expression)
    tags = frozenset(tag for part in wanted.expression.split("||") if (tag := part.strip()))
    return Subscription(queue.topic, queue.queue_id, frozenset() if tags == {"*"} else tags)


def _received(queue: MessageQueue, pulled: PulledMessage) -> ReceivedMessage:
    attempts = pulled.dead_letter.attempts if pulled.dead_letter is not None else 0
    return received_of(pulled.payload, pulled.message_id, queue, pulled.queue_offset, pulled.stored_at_ms, attempts)


def _by_topic(queues: Sequence[MessageQueue]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for queue in queues:
        found.setdefault(queue.topic, []).append(queue.queue_id)
    return found
