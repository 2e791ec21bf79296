"""Batching of concurrent messages of one topic into one call.

The cost of a call to a proxy and to this process is about the same for one message as for 32. While two calls of a
topic are pending, new messages wait for the end of the first one, for milliseconds at most. Then they share a call. At
low concurrency no message waits.

The cluster accepts or refuses a call as a whole. After a refusal each of its messages is sent alone and gets its own
answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from broker_adapter.contracts.errors import BrokerUnavailable, Refused
from broker_adapter.contracts.message import Envelope, SendReceipt
from broker_adapter.wire import rocketmq_v2 as wire

_CALLS = 2  # pending calls before batching starts; measured: more calls bring no gain
_WAIT_S = 0.005  # bounds the delay by a hanging call
_TOGETHER_MAX = 32
_TOGETHER_BYTES_MAX = 512 * 1024  # far below the limit of a cluster

_CLOSED = BrokerUnavailable("the client of the cluster was closed before an answer came")


class GatheredSend(NamedTuple):
    """Message envelope and its wire message."""

    envelope: Envelope
    message: wire.Message


Send = Callable[[Sequence[GatheredSend]], Awaitable[Sequence[SendReceipt]]]
_Waiting = tuple[GatheredSend, asyncio.Future[SendReceipt]]


class Gathered:
    """Batcher of the sends to one topic. Belongs to the event loop."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._calls = 0
        self._waiting: deque[_Waiting] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._late: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """True if no call is pending."""
        return not self._calls

    async def send(self, outgoing: GatheredSend) -> SendReceipt:
        """Send one message, alone or batched; as ``PopBroker.send``."""
        if self._calls < _CALLS:
            self._calls += 1
            try:
                (receipt,) = await self._send([outgoing])
            finally:
                self._ended()
            return receipt
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[SendReceipt] = loop.create_future()
        self._waiting.append((outgoing, answer))
        if self._late is None:
            self._late = loop.call_later(_WAIT_S, self._all_go)
        return await answer

    async def close(self) -> None:
        """Cancel pending calls; their callers get an in-doubt error."""
        _tell(self._waiting, _CLOSED)
        self._all_go()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self) -> None:
        self._calls -= 1
        self._go()

    def _all_go(self) -> None:
        while self._waiting:
            self._go()
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _go(self) -> None:
        """Start a call with queued messages, up to the limits of a batch."""
        together: list[_Waiting] = []
        size = 0
        while self._waiting and len(together) < _TOGETHER_MAX:
            outgoing, answer = self._waiting[0]
            size += len(outgoing.envelope.payload)
            if together and size > _TOGETHER_BYTES_MAX:
                break
            self._waiting.popleft()
            if not answer.done():  # skip a message whose caller was cancelled
                together.append((outgoing, answer))
        if together:
            self._calls += 1
            task = asyncio.get_running_loop().create_task(self._carry(together))
            self._tasks.add(task)
            task.add_done_callback(lambda task: self._carried(task, together))

    def _carried(self, task: asyncio.Task[None], together: Sequence[_Waiting]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            _tell(together, _CLOSED)
        self._ended()

    async def _carry(self, together: Sequence[_Waiting]) -> None:
        try:
            receipts = await self._send([outgoing for outgoing, _ in together])
        except Refused as refused:
            if len(together) > 1:
                await asyncio.gather(*(self._carry([each]) for each in together))
                return
            _tell(together, refused)
        except Exception as error:  # noqa: BLE001 - forwarded to the callers
            _tell(together, error)
        else:
            for (_, answer), receipt in zip(together, receipts, strict=True):
                if not answer.done():
                    answer.set_result(receipt)


def _tell(waiting: Iterable[_Waiting], error: Exception) -> None:
    for _, answer in waiting:
        if not answer.done():
            answer.set_exception(error)
