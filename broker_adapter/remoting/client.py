"""Read-only access to a cluster by offset, over the classic protocol.

A queue belongs to a broker, and its number is local to that broker. Reads go to masters only: a slave may lag.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

from broker_adapter.contracts.adapter import QueueRange
from broker_adapter.contracts.classic import Filter
from broker_adapter.contracts.errors import BrokerUnavailable, Overloaded, Refused, Rule
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.remoting.calls import CallingClient
from broker_adapter.remoting.protocol.codes import Operation, Result
from broker_adapter.remoting.protocol.requests.pulling import PULLED, offset_fields, pull_fields, pulled
from broker_adapter.remoting.protocol.requests.routes import MASTER, decode_route
from broker_adapter.remoting.protocol.stored import StoredMessage, UnreadableMessage
from broker_adapter.remoting.searching import PULL_MAX, READER_GROUP, offset_at

_PAUSES_S = (0.2, 1.0)  # before the retries of a read
_Found = TypeVar("_Found")


class Queue(NamedTuple):
    """Queue of a topic at one broker."""

    topic: str
    broker: str
    queue_id: int
    address: str  # of the broker


class Pull(NamedTuple):
    """Messages of a pull and the next offset. Without messages, an unchanged ``next_offset`` means the end of the
    queue.
    """

    messages: Sequence[StoredMessage | UnreadableMessage]
    next_offset: int


class RemotingClient(CallingClient):
    """Read-only client of a cluster. Belongs to one event loop, connects on first use, and must be closed with
    ``close``.

    Every method raises ``BrokerUnavailable`` or ``Overloaded`` after three attempts, ``Refused(TOPIC_UNKNOWN)``,
    ``Refused(UNAUTHORIZED)`` or ``Refused(FORBIDDEN)``.
    """

    async def queues(self, topic: str) -> Sequence[Queue]:
        """Return the readable queues of a topic, by broker and number."""
        fields = {"topic": topic, "acceptStandardJsonOnly": "true"}
        return queues_of(topic, (await _again(lambda: self._calls.ask_names(Operation.ROUTE, fields))).body)

    async def queue_range(self, queue: Queue) -> QueueRange:
        """Return the range of readable offsets; messages below it are deleted."""
        begin, end = [
            await self._offset(queue, operation) for operation in (Operation.BEGIN_OFFSET, Operation.END_OFFSET)
        ]
        return QueueRange(begin, max(begin, end))

    async def offset_at(self, queue: Queue, stored_at_ms: int) -> int:
        """Return the offset of the first message stored at or after a time, or the end offset if there is none.

        Times are those of the broker's clock. The result is only correct if that clock was never stepped back.
        """
        return await _again(lambda: offset_at(self._calls, queue.address, _message_queue(queue), stored_at_ms))

    async def pull(self, queue: Queue, queue_offset: int, *, batch_max: int = PULL_MAX) -> Pull:
        """Return messages of a queue from an offset on, without a long poll.

        An offset below the readable range continues at its start. ``Refused(OFFSET)`` for an offset after the end.
        """
        fields = pull_fields(READER_GROUP, _message_queue(queue), queue_offset, batch_max=batch_max, brought=Filter())

        async def ask() -> Pull:
            answer = await self._calls.ask(queue.address, Operation.PULL, fields, accepted=PULLED)
            messages, next_offset = pulled(answer, queue_offset, queue.address)
            if answer.code != Result.OK and next_offset < queue_offset:
                why = f"queue {queue.queue_id} of {queue.topic} at {queue.broker} ends before it"
                raise Refused(Rule.OFFSET, why, value=queue_offset, limit=next_offset)
            return Pull(messages, next_offset)

        return await _again(ask)

    async def _offset(self, queue: Queue, operation: Operation) -> int:
        fields = offset_fields(_message_queue(queue))
        return await _again(lambda: self._calls.offset(queue.address, operation, fields))


def queues_of(topic: str, body: bytes) -> Sequence[Queue]:
    """Return the readable queues in a name server's answer about a topic.

    ``FrameBroken`` for an invalid answer, ``BrokerUnavailable`` if a broker in it has no master.
    """
    queues = []
    for part in decode_route(topic, body):
        address = part.addresses.get(MASTER)
        if part.readable and address is None:
            count = f"{part.readable} queues"
            raise BrokerUnavailable(f"topic {topic} has {count} at broker {part.broker}, which has no master now")
        queues += [Queue(topic, part.broker, number, address or "") for number in range(part.readable)]
    return queues


def _message_queue(queue: Queue) -> MessageQueue:
    return MessageQueue(queue.topic, queue.broker, queue.queue_id)


async def _again(ask: Callable[[], Awaitable[_Found]]) -> _Found:
    """Attempt a read up to three times: reads have no side effects."""
    for pause_s in _PAUSES_S:
        try:
            return await ask()
        except (BrokerUnavailable, Overloaded):
            await asyncio.sleep(pause_s)
    return await ask()
