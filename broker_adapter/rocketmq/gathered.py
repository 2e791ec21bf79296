"""Messages of one topic that are sent at the same time, gathered into one call.

A call costs a proxy and this process about the same whether it carries one message or 32. So while two calls of a
topic are under way, what is sent meanwhile waits for the first of them to end, for milliseconds at most, and goes
together. Where few send at a time nothing waits.

The cluster takes a call as a whole or not at all. If it refuses one, each of its messages is sent alone and gets an
answer of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from broker_adapter.contracts.errors import BrokerUnavailable, Refused
from broker_adapter.contracts.message import Envelope, SendReceipt
from broker_adapter.wire import rocketmq_v2 as wire

_CALLS = 2  # under way before others are gathered: measured, more of them gain nothing
_WAIT_S = 0.005  # a call that hangs holds up no other
_TOGETHER_MAX = 32
_TOGETHER_BYTES_MAX = 512 * 1024  # far below what a cluster takes

_CLOSED = BrokerUnavailable("the client of the cluster was closed before an answer came")


class Outgoing(NamedTuple):
    """A message, and what a proxy is sent of it."""

    envelope: Envelope
    message: wire.Message


Send = Callable[[Sequence[Outgoing]], Awaitable[Sequence[SendReceipt]]]
_Waiting = tuple[Outgoing, asyncio.Future[SendReceipt]]


class Gathered:
    """Belongs to the event loop."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._calls = 0
        self._waiting: deque[_Waiting] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._late: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._calls

    async def send(self, outgoing: Outgoing) -> SendReceipt:
        """As ``PopBroker.send``, for one message, alone or together with others."""
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
        """Wait for no answers any more; whoever does is told that they are in doubt."""
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
        """Begin a call with what waits, as far as it goes together."""
        together: list[_Waiting] = []
        size = 0
        while self._waiting and len(together) < _TOGETHER_MAX:
            outgoing, answer = self._waiting[0]
            size += len(outgoing.envelope.payload)
            if together and size > _TOGETHER_BYTES_MAX:
                break
            self._waiting.popleft()
            if not answer.done():  # nobody waits for it any more: it need not be sent
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
        except Exception as error:  # noqa: BLE001 - theirs
            _tell(together, error)
        else:
            for (_, answer), receipt in zip(together, receipts, strict=True):
                if not answer.done():
                    answer.set_result(receipt)


def _tell(waiting: Iterable[_Waiting], error: Exception) -> None:
    for _, answer in waiting:
        if not answer.done():
            answer.set_exception(error)
