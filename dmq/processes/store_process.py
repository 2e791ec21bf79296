"""The store process as a front sees it: an exchange for messages, and somebody who answers all other calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Self

import structlog

from broker_adapter.contracts.deferred import Deferred
from broker_adapter.contracts.errors import BrokerUnavailable
from broker_adapter.contracts.message import Envelope, SendReceipt
from dmq.acl.quotas import Holder
from dmq.http2 import Bidirectional, CallEnded, Method, RequestHeaders, Status, Streaming, Unary
from dmq.processes import frames
from dmq.processes.clocks import FrontClock
from dmq.processes.link import Link
from dmq.processes.settings import RelayedMethod
from dmq.rocketmq_server.calls.exchange import UNKNOWN_CALLER, Caller, Receive, Received

_GONE: Final = "the process that has the store is gone"

log = structlog.get_logger("dmq.processes")


class StoreProcess:
    """Makes calls over a link, and finds who waits for each answer. Belongs to the event loop."""

    def __init__(self, link: Link, clock: FrontClock) -> None:
        self._say = link.say
        link.on_unsaid = lambda frame: self.fail(getattr(frame, "call", 0))
        self._clock = clock
        self._number = 0
        self._waiting: dict[int, Deferred[Any]] = {}
        self._relayed: dict[int, _Relayed] = {}
        self._takes: dict[type, Callable[[Any], None]] = {
            frames.Sent: lambda frame: self._settle(frame.call, frame.receipts),
            frames.DeliveredMessages: self._delivered,
            frames.Acked: self._acked,
            frames.Hidden: lambda frame: self._settle(frame.call, frame.receipt_handle),
            frames.Failed: self._failed,
            frames.Piece: self._piece,
            frames.End: self._end,
            frames.Read: self._read,
        }

    def takes(self) -> Mapping[type, Callable[[Any], None]]:
        """Return who takes the frames that answer calls, by their kinds."""
        return self._takes

    def lose(self) -> None:
        """Fail all calls: no answer will come."""
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            each.fail(BrokerUnavailable(_GONE))
        for relayed in list(self._relayed.values()):
            relayed.end(Status.UNAVAILABLE, _GONE)

    def fail(self, call: int) -> None:
        """Fail a call that could not be told, or whose answer could not be taken."""
        answer = self._waiting.pop(call, None)
        if answer is not None:
            answer.fail(frames.Unexpected("a call that could not be told, or whose answer could not be taken"))
        relayed = self._relayed.get(call)
        if relayed is not None:
            relayed.end(Status.INTERNAL, "the server failed to serve this call")

    # -- the exchange -------------------------------------------------------------------------------------------------

    def send(self, envelopes: Sequence[Envelope], holders: tuple[Holder, ...]) -> Deferred[Sequence[SendReceipt]]:
        call, answer = self._begin()
        self._say(frames.SendMessages(call, envelopes, holders, self._clock.wall_less_boot_ms))  # type: ignore[arg-type]
        return answer

    async def receive(self, wanted: Receive, client_id: str, holders: tuple[Holder, ...]) -> Received:
        group, subscription, batch_max, invisible_ms, wait_ms, is_renewed = wanted
        topic, queue_id, tags, sql = subscription
        call, answer = self._begin()
        self._say(
            frames.ReceiveMessages(
                *(call, client_id, holders, group, topic, queue_id, list(tags), sql),
                *(batch_max, invisible_ms, wait_ms, is_renewed),
            )
        )
        try:
            deliveries = await answer
        except asyncio.CancelledError:
            if self._waiting.pop(call, None) is not None:
                self._say(frames.Cancel(call))
            elif answer.error is None and answer.value:  # it came in the very turn in which nobody wanted it any more
                self._say(frames.NotTaken(call, was_wanted=False))
            raise
        has_any = bool(deliveries)
        return Received(deliveries, partial(self._over, call, has_any), partial(self._give_back, call, has_any))

    def _over(self, call: int, has_any: bool, is_taken: bool) -> None:
        if has_any:
            self._say(frames.Taken(call) if is_taken else frames.NotTaken(call))

    def _give_back(self, call: int, has_any: bool) -> None:
        if has_any:
            self._say(frames.NotTaken(call, was_wanted=False))

    def ack(self, group: str, topic: str, receipt_handles: Sequence[str]) -> Deferred[Sequence[Exception | None]]:
        call, answer = self._begin()
        self._say(frames.Ack(call, group, topic, receipt_handles))  # type: ignore[arg-type]  # any sequence will do
        return answer

    def change_invisible(
        self,
        group: str,
        topic: str,
        receipt_handle: str,
        invisible_ms: int,
        *,
        suspend: bool,
        caller: Caller = UNKNOWN_CALLER,
    ) -> Deferred[str]:
        call, answer = self._begin()
        self._say(frames.ChangeInvisible(call, group, topic, receipt_handle, invisible_ms, suspend, *caller))
        return answer

    def _begin(self) -> tuple[int, Deferred[Any]]:
        self._number += 1
        answer: Deferred[Any] = Deferred()
        self._waiting[self._number] = answer
        return self._number, answer

    def _settle(self, call: int, value: object) -> None:
        answer = self._waiting.pop(call, None)
        if answer is not None:
            answer.settle(value)

    def _delivered(self, frame: frames.DeliveredMessages) -> None:
        if frame.call in self._waiting:
            self._settle(frame.call, frame.deliveries)
        elif frame.deliveries:
            self._say(frames.NotTaken(frame.call, was_wanted=False))

    def _acked(self, frame: frames.Acked) -> None:
        results = [None if each is None else frames.error_of(each) for each in frame.results]
        self._settle(frame.call, results)

    def _failed(self, frame: frames.Failed) -> None:
        answer = self._waiting.pop(frame.call, None)
        if answer is not None:
            answer.fail(frames.error_of(frame.failure))

    # -- calls that are passed on -------------------------------------------------------------------------------------

    def methods(self, relayed: Sequence[RelayedMethod]) -> dict[str, Method]:
        """Return methods that pass their calls on, by path."""
        return {each.path: self._method(each) for each in relayed}

    def _method(self, method: RelayedMethod) -> Method:
        path = method.path
        if method.kind == "unary":
            return Unary(partial(self.unary, path), is_frequent=method.is_frequent)
        if method.kind == "streaming":
            return Streaming(partial(self._streaming, path), is_frequent=method.is_frequent)
        return Bidirectional(partial(self._bidirectional, path), is_frequent=method.is_frequent)

    async def unary(self, path: str, body: bytes, headers: RequestHeaders) -> bytes:
        """Pass a call on, and return its answer; raises CallEnded for any other end than OK."""
        answer = b""
        with self._relay(path, headers, body) as relayed:
            async for messages in relayed:
                answer = messages[0]
        return answer

    async def _streaming(self, path: str, body: bytes, headers: RequestHeaders) -> AsyncGenerator[list[bytes], None]:
        with self._relay(path, headers, body) as relayed:
            async for messages in relayed:
                yield messages
                self._say(frames.More(relayed.call))

    async def _bidirectional(
        self, path: str, bodies: AsyncIterator[bytes], headers: RequestHeaders
    ) -> AsyncGenerator[list[bytes], None]:
        with self._relay(path, headers, None) as relayed:
            reading = asyncio.get_running_loop().create_task(self._pass_on(relayed, bodies))
            try:
                async for messages in relayed:
                    yield messages
                    self._say(frames.More(relayed.call))
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    async def _pass_on(self, relayed: _Relayed, bodies: AsyncIterator[bytes]) -> None:
        """Pass on what comes, as fast as it is read."""
        try:
            async for body in bodies:
                self._say(frames.StreamMessage(relayed.call, body))
                await relayed.wanted()
        except CallEnded as end:  # which the handler there has words for
            self._say(frames.HalfClose(relayed.call, end.status, end.text))
            return
        self._say(frames.HalfClose(relayed.call))

    def _relay(self, path: str, headers: RequestHeaders, body: bytes | None) -> _Relayed:
        self._number += 1
        call = self._number
        admission = headers.admission
        refusal = admission.refusal if admission is not None else None
        relayed = self._relayed[call] = _Relayed(call, self._forget)
        self._say(
            frames.Relay(
                *(call, path, list(headers.names), list(headers.values), headers.peer),
                admission.address if admission is not None else "",
                *(headers.deadline_s, headers.packed_bytes, body),
                frames.failure_of(refusal) if refusal is not None else None,
            )
        )
        return relayed

    def _forget(self, call: int, is_over: bool) -> None:
        del self._relayed[call]
        if not is_over:
            self._say(frames.Cancel(call))

    def _piece(self, frame: frames.Piece) -> None:
        relayed = self._relayed.get(frame.call)
        if relayed is not None:
            relayed.put(frame.messages)

    def _end(self, frame: frames.End) -> None:
        relayed = self._relayed.get(frame.call)
        if relayed is not None:
            relayed.end(Status(frame.status), frame.text)

    def _read(self, frame: frames.Read) -> None:
        relayed = self._relayed.get(frame.call)
        if relayed is not None:
            relayed.is_read()


class _Relayed:
    """A call that was passed on: gives the pieces of its answer, and raises CallEnded for any other end than OK."""

    def __init__(self, call: int, forget: Callable[[int, bool], None]) -> None:
        self.call = call
        self._forget = forget
        self._pieces: asyncio.Queue[list[bytes] | None] = asyncio.Queue()
        self._ended: CallEnded | None = None
        self._is_over = False
        self._reads = asyncio.Semaphore(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._forget(self.call, self._is_over)

    def put(self, messages: list[bytes]) -> None:
        """Take a piece of the answer."""
        self._pieces.put_nowait(messages)

    def end(self, status: Status, text: str) -> None:
        """Take the end."""
        if not self._is_over:
            self._is_over = True
            self._ended = CallEnded(status, text) if status is not Status.OK else None
            self._pieces.put_nowait(None)

    def is_read(self) -> None:
        """Note that a message was read there."""
        self._reads.release()

    async def wanted(self) -> None:
        """Wait until the last message was read there."""
        await self._reads.acquire()

    async def __aiter__(self) -> AsyncIterator[list[bytes]]:
        while (messages := await self._pieces.get()) is not None:
            yield messages
        if self._ended is not None:
            raise self._ended
