"""Reading a cluster over the classic protocol, by offset: nothing that is called here changes anything in it.

A queue is a broker's, and numbered there. Only masters are asked: a slave may not have all of it yet.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from broker_adapter.adapter import QueueRange
from broker_adapter.errors import BrokerUnavailable, Overloaded, Refused, Rule
from broker_adapter.remoting.codes import Operation, Result, error_of
from broker_adapter.remoting.connection import Connection
from broker_adapter.remoting.frames import Frame, FrameBroken
from broker_adapter.remoting.signature import signed
from broker_adapter.remoting.stored import StoredMessage, UnreadableMessage, decode_messages

# A group that every broker has from its start, for tools: so none is made, and nobody's progress changes.
READER_GROUP = "TOOLS_CONSUMER"
PULL_MAX = 32  # a broker's own bound for one pull, unless its operators raised it
_HAS_SUBSCRIPTION = 4  # bit of a pull: it brings its filter, so that no heartbeat is needed before
_MASTER = "0"
_READABLE = 4  # bit of perm
_QUEUES_MAX = 65_536  # of one topic at one broker
_PAUSES_S = (0.2, 1.0)  # before a read is tried again
_BARE_NUMBERS = re.compile(rb"([{,])\s*(\d+)\s*:")
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotingOptions:
    """How to reach a cluster. ``tls_ca`` is a file of certificates; without it and ``tls`` nothing is encrypted."""

    names: tuple[str, ...]  # its name servers
    access_key: str = ""
    secret_key: str = ""
    tls: bool = False
    tls_ca: Path | None = None
    request_timeout_ms: int = 3_000  # default of RocketMQ's clients

    def __repr__(self) -> str:
        return f"RemotingOptions(names={self.names!r}, access_key={self.access_key!r})"


class Queue(NamedTuple):
    """One queue of a topic, at one broker."""

    topic: str
    broker: str
    queue_id: int
    address: str  # of the broker


class Pull(NamedTuple):
    """What a pull found, and where to go on. No messages and ``next_offset`` as asked: the end of the queue."""

    messages: Sequence[StoredMessage | UnreadableMessage]
    next_offset: int


class RemotingClient(AbstractAsyncContextManager["RemotingClient"]):
    """One client of a cluster. Belongs to one event loop; connects when it is first used, ``close`` it.

    Every method raises ``BrokerUnavailable`` after some tries within seconds, ``Refused(TOPIC_UNKNOWN)``,
    ``Refused(UNAUTHORIZED)``, ``Refused(FORBIDDEN)``.
    """

    def __init__(self, options: RemotingOptions) -> None:
        self._options = options
        self._tls = _tls(options)
        self._connections: dict[str, Connection] = {}

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def __aenter__(self) -> Self:
        return self

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(each.close() for each in self._connections.values()))

    async def queues(self, topic: str) -> Sequence[Queue]:
        """Return the queues of a topic that can be read, by broker and number."""
        fields = {"topic": topic, "acceptStandardJsonOnly": "true"}

        async def ask() -> Frame:
            failure: BrokerUnavailable | None = None
            for names in self._options.names:
                try:
                    return await self._ask(names, Operation.ROUTE, fields)
                except BrokerUnavailable as error:
                    failure = error
            assert failure is not None, "there is a name server"
            raise failure

        return queues_of(topic, (await _again(ask)).body)

    async def queue_range(self, queue: Queue) -> QueueRange:
        """Return the readable part of a queue; what lies below it is gone."""
        begin, end = [
            await self._number(queue, operation, {}) for operation in (Operation.BEGIN_OFFSET, Operation.END_OFFSET)
        ]
        return QueueRange(begin, max(begin, end))

    async def offset_at(self, queue: Queue, stored_at_ms: int) -> int:
        """Return the offset of the first message that was stored at or after a time; the end if none was.

        By the clock of the broker, and as long as that was never stepped back.
        """
        return await self._number(queue, Operation.OFFSET_AT, {"timestamp": str(stored_at_ms)})

    async def pull(self, queue: Queue, queue_offset: int, *, batch_max: int = PULL_MAX) -> Pull:
        """Return messages of a queue from an offset on, without waiting for any.

        From an offset below what is readable it goes on where that begins. ``Refused(OFFSET)`` behind the end.
        """
        fields = {
            "consumerGroup": READER_GROUP,
            "topic": queue.topic,
            "queueId": str(queue.queue_id),
            "queueOffset": str(queue_offset),
            "maxMsgNums": str(batch_max),
            "sysFlag": str(_HAS_SUBSCRIPTION),
            "commitOffset": "0",
            "suspendTimeoutMillis": "0",
            "subscription": "*",
            "subVersion": "0",
            "expressionType": "TAG",
        }
        accepted = (Result.OK, Result.NOTHING_THERE, Result.NOTHING_MATCHED, Result.OFFSET_MOVED)

        async def ask() -> Pull:
            answer = await self._ask(queue.address, Operation.PULL, fields, accepted=accepted)
            next_offset = _number_of(answer, "nextBeginOffset", queue.address)
            if answer.code != Result.OK:
                if next_offset < queue_offset:
                    why = f"queue {queue.queue_id} of {queue.topic} at {queue.broker} ends before it"
                    raise Refused(Rule.OFFSET, why, value=queue_offset, limit=next_offset)
                return Pull((), next_offset)
            if next_offset <= queue_offset:
                raise FrameBroken(f"{queue.address} answers a pull at {queue_offset} with {next_offset} as the next")
            return Pull(tuple(decode_messages(answer.body)), next_offset)

        return await _again(ask)

    async def _number(self, queue: Queue, operation: Operation, fields: Mapping[str, str]) -> int:
        asked = {"topic": queue.topic, "queueId": str(queue.queue_id), **fields}

        async def ask() -> int:
            return _number_of(await self._ask(queue.address, operation, asked), "offset", queue.address)

        return await _again(ask)

    async def _ask(
        self, address: str, operation: Operation, fields: Mapping[str, str], *, accepted: Sequence[int] = (Result.OK,)
    ) -> Frame:
        connection = self._connections.get(address)
        if connection is None:
            timeout_s = self._options.request_timeout_ms / 1000
            connection = self._connections[address] = Connection(address, timeout_s=timeout_s, tls=self._tls)
        request = Frame(code=operation, fields=fields)
        if self._options.access_key:
            request = signed(request, self._options.access_key, self._options.secret_key)
        answer = await connection.ask(request)
        if answer.code not in accepted:
            raise error_of(answer, address, operation)
        return answer


def queues_of(topic: str, body: bytes) -> Sequence[Queue]:
    """Read a name server's answer about a topic; ``FrameBroken`` for one that is none, ``BrokerUnavailable`` for one
    that names a broker without a master.
    """
    try:
        found = _json(body)
        masters = {each["brokerName"]: each["brokerAddrs"].get(_MASTER) for each in found["brokerDatas"]}
        read = [
            (str(each["brokerName"]), int(each["readQueueNums"]), int(each["perm"])) for each in found["queueDatas"]
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FrameBroken(f"the route of {topic} cannot be read: {type(error).__name__}: {error}") from None
    queues = []
    for broker, count, perm in sorted(read):
        if not perm & _READABLE:
            continue
        address = masters.get(broker)
        if not isinstance(address, str) or not 0 <= count <= _QUEUES_MAX:
            raise BrokerUnavailable(f"topic {topic} has {count} queues at broker {broker}, which has no master now")
        queues += [Queue(topic, broker, queue_id, address) for queue_id in range(count)]
    return queues


def _json(body: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(body))
    except ValueError:  # older name servers write names that are numbers without quotes
        return dict(json.loads(_BARE_NUMBERS.sub(rb'\1"\2":', body)))


async def _again(ask: Callable[[], Awaitable[_Found]]) -> _Found:
    """Ask up to three times: whatever is asked here changes nothing."""
    for pause_s in _PAUSES_S:
        try:
            return await ask()
        except (BrokerUnavailable, Overloaded):
            await asyncio.sleep(pause_s)
    return await ask()


def _number_of(answer: Frame, name: str, address: str) -> int:
    text = answer.fields.get(name, "")
    try:
        return int(text)
    except ValueError:
        raise FrameBroken(f"{address} answers {text[:40]!r} for {name}, which is no number") from None


def _tls(options: RemotingOptions) -> ssl.SSLContext | None:
    if not options.tls and options.tls_ca is None:
        return None
    return ssl.create_default_context(cafile=str(options.tls_ca) if options.tls_ca is not None else None)
