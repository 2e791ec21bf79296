"""Execution of the calls of one connection, from request to status: one task for each, none for a ``Deferred`` answer.

Every call ends with a status, whatever its handler raises, and does not affect other calls. If a call ends for the peer
(reset, deadline, lost connection), its task is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Final, TypeVar

import structlog

from broker_adapter.contracts.deferred import Deferred
from dmq.http2.admission.admission import Admit
from dmq.http2.admission.bounds import Account
from dmq.http2.codec.headers import RequestHeaders
from dmq.http2.connection.connection import Connection
from dmq.http2.connection.messages import check_growing, check_held, next_message, only_message
from dmq.http2.connection.methods import Bidirectional, Methods, NotGrpc, Sent, Streaming, Unary, Unserved
from dmq.http2.connection.stream import ARRIVED, DRAINED, ENDED, GONE, OPENED, Stream
from dmq.http2.errors import CallEnded, Code, Status

_DROPPED_MAX: Final = 64 * 1024  # received bytes of a request that its headers refuse
_BYTES_PER_S_MIN: Final = 64 * 1024  # slower transfers count as stalled
_LARGE_BYTES: Final = 4 * 1024  # such a request, or a compressed one, may be slow to process
# Limits on the work of one connection per loop iteration.
_LARGE_S: Final = 0.001  # time after which no more large requests are started
_SLOW_CALLS: Final = 4  # if no more calls than this fit in that time, they are slow
_ROOM: Final = 16  # tasks of frequent calls that are started, woken or cancelled; a task costs some 80 us
_SELDOM: Final = 4  # the cost of a task of an infrequent call
_PAUSE_S: Final = 0.004  # pause after many infrequent calls
_SLOW_PAUSES: Final = 3  # pause after slow calls, as a multiple of their time
_SLOW_PAUSE_S_MAX: Final = 0.02
_WRITE_BYTES: Final = 64 * 1024  # write size of a fast stream

_Request = TypeVar("_Request")

log = structlog.get_logger("dmq.http2")


class Calls:
    """The calls of one connection. ``flush`` writes queued bytes; ``flush_soon`` does so at the end of the loop
    iteration.
    """

    def __init__(
        self,
        connection: Connection,
        methods: Methods,
        *,
        address: str,
        admit: Admit,
        account_of: Callable[[str, bool], Account],
        monotonic_s: Callable[[], float],
        watch: Callable[[float], None],
        flush: Callable[[], None],
        flush_soon: Callable[[], None],
    ) -> None:
        """``watch`` receives each deadline, so that ``expire`` is called when it passes.

        ``admit`` decides about calls of ``address`` from their headers. ``account_of`` returns the account of a key, or
        of an operator.
        """
        self._connection = connection
        self._out = connection.out
        self._methods = methods
        self._address = address
        self.admit = admit
        self._account_of = account_of
        self._monotonic_s = monotonic_s
        self._watch = watch
        self._flush = flush
        self._flush_soon = flush_soon
        self._loop = asyncio.get_running_loop()
        self._large_s = 0.0  # start of the first large request in this iteration; 0: none
        self._room = _ROOM
        self._has_seldom = False  # an infrequent call ran in this iteration
        self._is_counted = False  # this iteration did work that may delay others
        self.has_begun = False  # a call started since the flag was last reset

    def advance(self) -> float:
        """Process streams with news, up to the limits of one loop iteration; ``is_behind`` is then True if some remain.

        Return the pause in seconds for which other connections have priority.
        """
        changed = self._connection.take_changed()
        self._large_s, self._room, self._has_seldom, self._is_counted = 0.0, _ROOM, False, False
        number = 0
        for number, stream in enumerate(changed):
            if self._is_counted and self._has_enough():
                self._out.changed = changed[number:] + self._out.changed
                break
            news = stream.news
            stream.news = 0
            if news & GONE:
                if stream.task is not None:
                    self._take_room(stream)
                    stream.task.cancel()
            elif not stream.is_closed:
                try:
                    self._advance(stream, news)
                except CallEnded as end:
                    _cancel(stream)
                    self._end(stream, end)

        if not self._is_counted:
            return 0.0
        if self._large_s and number <= _SLOW_CALLS:
            took_s = self._monotonic_s() - self._large_s
            return min(_SLOW_PAUSES * took_s, _SLOW_PAUSE_S_MAX) if took_s >= _LARGE_S else 0.0
        return _PAUSE_S if self._room <= 0 and self._has_seldom else 0.0

    def _has_enough(self) -> bool:
        return self._room <= 0 or (self._large_s > 0.0 and self._monotonic_s() >= self._large_s + _LARGE_S)

    @property
    def is_behind(self) -> bool:
        """True if streams with news wait for ``advance``."""
        return bool(self._out.changed)

    def expire(self, now_s: float) -> float | None:
        """End calls whose deadline has passed, up to the limit of one iteration; return the next deadline."""
        next_s: float | None = None
        ended = 0
        for stream in list(self._connection.streams.values()):
            at_s = stream.deadline_at_s
            if at_s is None:
                continue
            if at_s <= now_s:
                if ended == _ROOM:
                    return now_s  # the others at the next timer
                ended += 1
                _cancel(stream)
                self._out.end(stream, Status.DEADLINE_EXCEEDED, "the deadline is over")
            elif next_s is None or at_s < next_s:
                next_s = at_s
        return next_s

    def end_stalled(self, now_s: float, *, is_read: bool) -> None:
        """End calls whose peer does not read its answer or, while it ``is_read``, does not complete its request."""
        for stream in list(self._connection.streams.values()):
            owed = _owed(stream)
            if owed is None or not (is_read or stream.pending):
                stream.waits_since_s = 0.0
            elif not stream.waits_since_s:
                stream.waits_since_s = now_s
            elif now_s - stream.waits_since_s > self._connection.limits.request_s + owed / _BYTES_PER_S_MIN:
                _cancel(stream)
                what = (
                    "the answer was not taken in time"
                    if stream.pending
                    else "the request was incomplete after the time limit"
                )
                self._out.end(stream, Status.DEADLINE_EXCEEDED, what)

    def let_go(self, account: Account) -> None:
        """End the calls of an account that hold bytes and wait for the peer, to free memory."""
        for stream in list(self._connection.streams.values()):
            if stream.account is account and (stream.pending or (stream.unread and not stream.is_ended)):
                _cancel(stream)
                text = (
                    "the buffered bytes of this connection are needed by others: send or read faster, or less at once"
                )
                self._out.end(stream, Status.RESOURCE_EXHAUSTED, text)
        self._flush_soon()

    def abandon(self, status: Status, text: str) -> None:
        """End every call now."""
        for stream in list(self._connection.streams.values()):
            _cancel(stream)
            self._out.end(stream, status, text)

    def refuse(self) -> None:
        """Reset every call as one that was not processed."""
        for stream in list(self._connection.streams.values()):
            _cancel(stream)
            self._out.reset(stream.id, Code.REFUSED_STREAM)

    def _advance(self, stream: Stream, news: int) -> None:
        if news & OPENED:
            self._open(stream)
        if news & DRAINED and stream.writer is not None:
            self._wake(stream, stream.writer)
        if not news & (ARRIVED | ENDED):
            return
        if isinstance(stream.method, Bidirectional):
            check_held(self._connection, stream)
            if stream.reader is not None:
                self._wake(stream, stream.reader)
        elif stream.refusal is not None:
            self._refuse(stream, stream.refusal)
        elif stream.headers.admission is not None and stream.headers.admission.refusal is not None:
            self._turn_away(stream)
        elif stream.task is None and stream.method is not None:
            if news & ENDED:
                self._start(stream, stream.method)
            else:
                check_growing(self._connection, stream)

    def _open(self, stream: Stream) -> None:
        self._connection.control.served()
        try:
            method, path, stream.encoding = self._methods.admit(stream)
        except NotGrpc as answer:
            stream.refusal = answer
            return
        stream.method = method
        headers = stream.headers
        admission = headers.admission = self.admit(path, headers, self._address)
        if admission.key or admission.is_operator:
            self._out.charge(stream, self._account_of(admission.key, admission.is_operator))
        headers.account = stream.account
        if admission.request_max:
            stream.request_max = admission.request_max
        left_s = headers.deadline_s
        if left_s is not None:
            stream.deadline_at_s = self._monotonic_s() + left_s
            self._watch(stream.deadline_at_s)
        if isinstance(method, Bidirectional):
            self.has_begun = True
            self._run(stream, self._stream(stream, method.handle, _Requests(self._connection, stream)))

    def _turn_away(self, stream: Stream) -> None:
        """Discard a request that its headers refused; answer when it is complete or has sent enough bytes."""
        self._connection.drop(stream)
        method = stream.method
        if stream.task is None and (stream.is_ended or self._connection.received(stream) > _DROPPED_MAX):
            if isinstance(method, Unary):
                self._start_unary(stream, method, b"")
            elif isinstance(method, Streaming):
                self._run(stream, self._stream(stream, method.handle, b""))

    def _refuse(self, stream: Stream, answer: NotGrpc) -> None:
        """Answer in plain HTTP when the request is complete or cannot grow: a fault in its body is reported first."""
        self._connection.drop(stream)
        if stream.is_ended or stream.receive_left <= 0:
            stream.refusal = None
            self._out.send_raw(stream, answer.block, answer.body)

    def _start(self, stream: Stream, method: Unary | Streaming) -> None:
        self.has_begun = True
        check_held(self._connection, stream)
        if not self._large_s and (stream.unread >= _LARGE_BYTES or stream.encoding):
            self._large_s = self._monotonic_s()
            self._is_counted = True
        message = only_message(self._connection, stream, stream.encoding)
        if isinstance(method, Unary):
            self._start_unary(stream, method, message)
        else:
            self._run(stream, self._stream(stream, method.handle, message))

    def _start_unary(self, stream: Stream, method: Unary, message: bytes) -> None:
        try:
            answer = method.handle(message, stream.headers)
        except Exception as error:  # noqa: BLE001 - one call ends with it
            self._fail(stream, error)
            return
        if isinstance(answer, Deferred):
            answer.then(lambda answer: self._told(stream, answer))
        else:
            self._run(stream, self._unary(stream, answer))

    def _run(self, stream: Stream, serving: Coroutine[Any, Any, None]) -> None:
        self._take_room(stream)
        stream.task = self._loop.create_task(serving)

    def _wake(self, stream: Stream, waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            self._take_room(stream)
            waiter.set_result(None)

    def _take_room(self, stream: Stream) -> None:
        self._is_counted = True
        if stream.method is not None and stream.method.is_frequent:
            self._room -= 1
        else:
            self._room -= _SELDOM
            self._has_seldom = True

    def _told(self, stream: Stream, answer: Deferred[bytes]) -> None:
        if answer.error is not None:
            self._fail(stream, answer.error)
        else:
            self._answer(stream, answer.value)
        self._flush_soon()

    def _answer(self, stream: Stream, message: bytes) -> None:
        self._out.answer(stream, message)
        if stream.pending:
            try:
                check_held(self._connection, stream)
            except CallEnded as end:
                self._end(stream, end)

    async def _unary(self, stream: Stream, answer: Awaitable[bytes]) -> None:
        try:
            self._answer(stream, await answer)
        except asyncio.CancelledError:
            self._out.end(stream, Status.CANCELLED)
            raise
        except Exception as error:  # noqa: BLE001 - one call ends with it
            self._fail(stream, error)
        finally:
            self._over(stream)

    async def _stream(
        self,
        stream: Stream,
        handle: Callable[[_Request, RequestHeaders], AsyncGenerator[Sent, None]],
        request: _Request,
    ) -> None:
        try:
            async with aclosing(handle(request, stream.headers)) as answers:
                async for sent in answers:
                    await self._send(stream, sent)
            self._out.end(stream)
        except asyncio.CancelledError:
            self._out.end(stream, Status.CANCELLED)
            raise
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(stream, error)
        finally:
            self._over(stream)

    def _over(self, stream: Stream) -> None:
        if stream.is_closed:
            stream.task = None  # otherwise its CancelledError keeps the stack frames, with their messages, in a cycle
        self._flush_soon()

    async def _send(self, stream: Stream, sent: Sent) -> None:
        """Send a handler's output; return when the stream accepts more."""
        is_sent = self._out.send(stream, sent)
        if stream.is_closed:
            raise CallEnded(Status.CANCELLED)
        if is_sent:
            if self._out.part_bytes < _WRITE_BYTES:
                self._flush_soon()
            else:
                self._flush()
                await asyncio.sleep(0)  # a handler that never awaits would block all others
            return
        check_held(self._connection, stream)
        self._flush_soon()
        stream.writer = self._loop.create_future()
        try:
            await stream.writer
        finally:
            stream.writer = None

    def _fail(self, stream: Stream, error: Exception) -> None:
        if isinstance(error, CallEnded):
            self._end(stream, error)
            return
        log.error("call_failed", path=stream.headers.get(":path"), exc_info=error)
        self._out.end(stream, Status.INTERNAL, "the server failed to serve this call")

    def _end(self, stream: Stream, end: CallEnded) -> None:
        self._out.end(stream, end.status, end.text, end.extra if isinstance(end, Unserved) else b"")


class _Requests:
    """The messages of one call, as an asynchronous iterator for its handler."""

    def __init__(self, connection: Connection, stream: Stream) -> None:
        self._connection = connection
        self._stream = stream

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> bytes:
        stream = self._stream
        while True:
            message = next_message(self._connection, stream, stream.encoding)
            if message is not None:
                return message
            if stream.is_ended:
                if stream.body:
                    raise CallEnded(Status.INTERNAL, "request ends inside a message")
                raise StopAsyncIteration
            stream.reader = asyncio.get_running_loop().create_future()
            try:
                await stream.reader
            finally:
                stream.reader = None


def _owed(stream: Stream) -> int | None:
    """Return the progress in bytes of a call that waits for its peer; None if it does not wait."""
    if stream.pending:
        return stream.sent
    if stream.is_ended or (isinstance(stream.method, Bidirectional) and not stream.body):
        return None
    return stream.unread


def _cancel(stream: Stream) -> None:
    if stream.task is not None:
        stream.task.cancel()
