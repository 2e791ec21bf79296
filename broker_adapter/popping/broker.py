"""Adapter from ``PopBroker`` to the interface that ``Producer`` and ``Membership`` use, and factory of its consumers.

The broker chooses the queues. So a topic has one queue here, number -1, that represents all of them. Methods for the
division of queues are refused: ``PopConsumer`` does not need them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from broker_adapter.contracts.adapter import PopBroker
from broker_adapter.contracts.classic import (
    Decision,
    Filter,
    Listener,
    MessageQueue,
    Outgoing,
    Presence,
    QueueReceipt,
    Route,
    SendStatus,
    TransactionCheck,
)
from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable, Refused, Rule
from broker_adapter.contracts.limits import DELAY_LEVELS_MS
from broker_adapter.contracts.message import Delivery, Envelope
from broker_adapter.contracts.topics import check_topic
from broker_adapter.contracts.transactions import Check, Half, TransactionalBroker
from broker_adapter.popping.consumer import PopConsumer
from broker_adapter.popping.received import received_of
from broker_adapter.queue_client import GroupTaken
from broker_adapter.queue_client.consumer import ConsumerOptions, Handler
from broker_adapter.runtime.clock import Clock, SystemClock
from broker_adapter.runtime.log import LibraryLog
from broker_adapter.wire.mapping import encode

_ANY_QUEUE = -1

_log = LibraryLog("broker_adapter.popping")


class PoppedBroker:
    """Client of a ``PopBroker``. Belongs to one event loop; must be closed with ``close``."""

    def __init__(
        self,
        broker: PopBroker,
        transactions: TransactionalBroker,
        *,
        name: str,
        client_id: str,
        clock: Clock | None = None,
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Store the parameters.

        ``name`` represents the broker in queues and receipts; ``on_close`` closes the underlying client.
        """
        self._broker, self._transactions = broker, transactions
        self._name, self._client_id = name, client_id
        self._clock = clock or SystemClock()
        self._on_close = on_close
        self._listener: Listener | None = None
        self._producers: Sequence[str] = ()
        self._halves: dict[str, str] = {}  # producer group of the last half message, by topic
        self._consumers: set[str] = set()  # groups
        self._one_way: set[asyncio.Task[QueueReceipt]] = set()

    @property
    def client_id(self) -> str:
        return self._client_id

    def consumer(
        self, group: str, filters: Mapping[str, str | Filter], handler: Handler, options: ConsumerOptions
    ) -> PopConsumer:
        """Return a consumer that is not started. ``GroupTaken``, ``ValueError`` for options that are not supported
        here.
        """
        if group in self._consumers:
            raise GroupTaken(
                f"this client has a consumer of group {group!r} already; one consumer can have many topics"
            )
        consumer = PopConsumer(
            self._broker,
            group,
            filters,
            handler,
            options,
            broker_name=self._name,
            client_id=f"{self._client_id}@{group}",
            on_close=lambda: self._consumers.discard(group),
        )
        self._consumers.add(group)
        return consumer

    async def close(self) -> None:
        """Wait for one-way sends, and close the connections."""
        await asyncio.gather(*self._one_way, return_exceptions=True)
        if self._on_close is not None:
            await self._on_close()

    # -- routes and groups --------------------------------------------------------------------------------------------

    def attach(self, listener: Listener) -> None:
        """Implement ``ClassicBroker.attach``."""
        self._listener = listener
        self._transactions.attach(self)

    async def route(self, topic: str) -> Route:
        """Implement ``ClassicBroker.route``."""
        await self._broker.route(check_topic(topic))
        queues = (MessageQueue(topic, self._name, _ANY_QUEUE),)
        return Route(topic, queues, queues)

    async def heartbeat(self, producers: Sequence[str], consumers: Sequence[Presence]) -> None:  # noqa: ARG002 - unused
        """Store the producer groups; the underlying client sends its own heartbeats."""
        self._producers = tuple(producers)

    async def leave(self, *, producer: str = "", consumer: str = "") -> None:  # noqa: ARG002 - unused
        """Implement ``ClassicBroker.leave``."""
        self._producers = tuple(each for each in self._producers if each != producer)

    # -- sending ------------------------------------------------------------------------------------------------------

    async def send(
        self, group: str, queue: MessageQueue, messages: Sequence[Outgoing], *, timeout_ms: int, one_way: bool = False
    ) -> QueueReceipt:
        """Implement ``ClassicBroker.send``; an error of a one-way send is logged.

        The receipt has queue -1 if the broker does not report the queue. The protocol has delivery times and no levels:
        a level is converted by RocketMQ's table and this machine's clock.
        """
        sending = self._half(group, queue, messages[0]) if messages[0].is_half else self._plain(queue, messages)
        if one_way:
            task = asyncio.ensure_future(sending)
            self._one_way.add(task)
            task.add_done_callback(self._sent_one_way)
            return QueueReceipt(SendStatus.STORED, _ids(messages), queue, -1)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await sending
        except TimeoutError:
            raise BrokerUnavailable(f"{self._name} took longer than {timeout_ms} ms for a send") from None

    async def _plain(self, queue: MessageQueue, messages: Sequence[Outgoing]) -> QueueReceipt:
        first = (await self._broker.send([self._envelope(each) for each in messages]))[0]
        return QueueReceipt(
            SendStatus.STORED,
            _ids(messages),
            queue._replace(queue_id=first.queue_id),
            first.queue_offset,
            recall_handle=first.recall_handle,
        )

    async def _half(self, group: str, queue: MessageQueue, outgoing: Outgoing) -> QueueReceipt:
        self._halves[queue.topic] = group
        (receipt,) = await self._transactions.prepare([Half(self._envelope(outgoing))])
        if receipt.ended:
            raise Refused(Rule.TRANSACTION_ID, f"the transaction {receipt.ended}", value=receipt.message_id)
        return QueueReceipt(SendStatus.STORED, receipt.message_id, queue, -1, transaction_id=receipt.transaction_id)

    def _envelope(self, outgoing: Outgoing) -> Envelope:
        message = outgoing.message
        if outgoing.delay_level > 0:
            delay_ms = DELAY_LEVELS_MS[min(outgoing.delay_level, len(DELAY_LEVELS_MS)) - 1]
            message = replace(message, deliver_at_ms=self._clock.now_ms() + delay_ms)
        return encode(message)

    def _sent_one_way(self, task: asyncio.Task[QueueReceipt]) -> None:
        self._one_way.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("one_way_send_failed", what="it was sent one way", error=f"{type(error).__name__}: {error}")

    async def recall(self, topic: str, recall_handle: str) -> str:
        """Implement ``ClassicBroker.recall``."""
        return (await self._broker.recall(topic, recall_handle)).message_id

    # -- transactions -------------------------------------------------------------------------------------------------

    async def end_transaction(
        self,
        group: str,  # noqa: ARG002 - the id identifies the half message
        receipt: QueueReceipt,
        decision: Decision,
        *,
        check: TransactionCheck | None = None,
    ) -> None:
        """Implement ``ClassicBroker.end_transaction``."""
        transaction_id = check.transaction_id if check is not None else receipt.transaction_id
        if decision is Decision.COMMIT:
            await self._transactions.commit(receipt.queue.topic, transaction_id)
        elif decision is Decision.ROLLBACK:
            await self._transactions.roll_back(receipt.queue.topic, transaction_id)

    def is_live(self, topic: str) -> bool:
        """Implement ``Checker.is_live``."""
        return bool(self._asked_for(topic))

    async def check(self, check: Check) -> bool:
        """Implement ``Checker.check``. A broker has no producer groups: a group that sent half messages to the topic
        answers.
        """
        group = self._asked_for(check.topic)
        if self._listener is None or not group:
            return False
        half = Delivery(check.topic, check.message_id, check.payload, _ANY_QUEUE, -1, "", 1, 0, 0, 0)
        asked = TransactionCheck(group, received_of(half, self._name), check.transaction_id, self._name)
        self._listener.check(asked)
        return True

    def _asked_for(self, topic: str) -> str:
        group = self._halves.get(topic, "")
        return group if group in self._producers else next(iter(self._producers), "")

    # -- division of queues: refused ----------------------------------------------------------------------------------

    async def pull(self, *_: object, **__: object) -> NoReturn:
        """Refuse, like the following methods: this broker assigns messages, not queues."""
        raise self._no_queues("pull")

    async def queue_range(self, *_: object) -> NoReturn:
        raise self._no_queues("queue_range")

    async def offset_at(self, *_: object) -> NoReturn:
        raise self._no_queues("offset_at")

    async def committed_offset(self, *_: object) -> NoReturn:
        raise self._no_queues("committed_offset")

    async def commit_offset(self, *_: object) -> NoReturn:
        raise self._no_queues("commit_offset")

    async def members(self, *_: object) -> NoReturn:
        raise self._no_queues("members")

    async def lock(self, *_: object) -> NoReturn:
        raise self._no_queues("lock")

    async def unlock(self, *_: object) -> NoReturn:
        raise self._no_queues("unlock")

    async def send_back(self, *_: object, **__: object) -> NoReturn:
        raise self._no_queues("send_back")

    def _no_queues(self, what: str) -> BrokerError:
        return Refused(Rule.UNSUPPORTED, "this broker distributes messages, not queues", value=what)


def _ids(messages: Sequence[Outgoing]) -> str:
    return ",".join(each.message.message_id for each in messages)
