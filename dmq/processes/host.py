"""The store process's end of one front: makes the calls that it asks for, and answers them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import structlog

from broker_adapter.adapter import Subscription
from broker_adapter.clock import Clock
from broker_adapter.deferred import Deferred
from broker_adapter.errors import BrokerError
from broker_adapter.message import Envelope, SendReceipt
from dmq.http2 import Admission, Bidirectional, CallEnded, RequestHeaders, Status, Unary
from dmq.http2.bounds import Accounts
from dmq.processes import frames
from dmq.processes.clocks import NEAR_MS, wall_less_boot_ms
from dmq.processes.link import Link
from dmq.sidecar.exchange import Exchange, Receive, Received
from dmq.sidecar.http2_server import Port

_IN_DOUBT_S: Final = 1.0  # so long after a front wrote an answer to a socket its client may not have read it

log = structlog.get_logger("dmq.processes")


class _Handed(NamedTuple):
    """Deliveries that are not known to be taken, of which group, and whether they are renewed."""

    received: Received
    group: str
    is_renewed: bool


class _Taken(NamedTuple):
    """Renewed deliveries that a client's socket took."""

    at_s: float
    received: Received


class Host:
    """Serves one front. Belongs to the event loop; ``lose`` it when its link has ended."""

    def __init__(
        self,
        link: Link,
        port: Port,
        accounts: Accounts,
        clock: Clock,
        others: Mapping[type, Callable[[Any], None]] = MappingProxyType({}),
    ) -> None:
        """``others`` take the kinds of frames that are no calls."""
        self._link = link
        self._say = link.say
        self._port = port
        self._exchange: Exchange = port.service.exchange
        self._accounts = accounts
        self._clock = clock
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._relayed: dict[int, _Relayed] = {}
        self._handed: dict[int, _Handed] = {}
        self._taken: deque[_Taken] = deque()
        self._acks: dict[tuple[str, str], list[frames.Ack]] = {}  # of the batch that is being read
        self._wall_less_boot_ms = 0  # as it is believed while a batch is read
        self._takes: dict[type, Callable[[Any], None]] = {
            frames.Send: self._send,
            frames.ReceiveMessages: self._receive,
            frames.Taken: self._over,
            frames.NotTaken: self._not_taken,
            frames.Ack: lambda frame: self._acks.setdefault((frame.group, frame.topic), []).append(frame),
            frames.ChangeInvisible: self._change_invisible,
            frames.Relay: self._relay,
            frames.Message: lambda frame: self._of_stream(frame.call, frame.body),
            frames.HalfClose: self._half_close,
            frames.More: self._more,
            frames.Cancel: self._cancel,
            **others,
        }

    def on_frames(self, batch: Sequence[frames.Frame]) -> None:
        """Take what the front said in one turn of its loop."""
        self._wall_less_boot_ms = wall_less_boot_ms(self._clock)
        takes = self._takes
        for frame in batch:
            takes[type(frame)](frame)
        if self._acks:
            acks, self._acks = self._acks, {}
            for (group, topic), each in acks.items():
                self._ack(group, topic, each)

    def lose(self) -> None:
        """End all calls of a front that is gone, and give back what its clients may not have."""
        for task in list(self._tasks.values()):
            task.cancel()
        for handed in self._handed.values():
            handed.received.over(False)
        since_s = self._clock.monotonic_s() - _IN_DOUBT_S
        for taken in self._taken:
            if taken.at_s >= since_s:
                taken.received.over(False)
        self._handed.clear()
        self._taken.clear()

    def _fail(self, call: int, error: Exception, rpc: str) -> None:
        self._say(frames.Failed(call, self._failure(error, rpc)))

    @staticmethod
    def _failure(error: Exception, rpc: str) -> frames.Failure:
        if not isinstance(error, BrokerError):  # the front is not told why
            log.error("call_failed", rpc=rpc, exc_info=error)
        return frames.failure_of(error)

    # -- messages -----------------------------------------------------------------------------------------------------

    def _send(self, frame: frames.Send) -> None:
        call = frame.call
        try:
            sending = self._exchange.send(self._timed(frame), frame.holders)
        except Exception as error:  # noqa: BLE001 - it is told
            self._fail(call, error, "SendMessage")
            return
        Deferred.of(sending).then(partial(self._sent, call))

    def _timed(self, frame: frames.Send) -> list[Envelope]:
        """Count delays from the time that is believed here: the front may not have heard of a step yet."""
        behind_ms = self._wall_less_boot_ms - frame.wall_less_boot_ms
        if -NEAR_MS <= behind_ms <= NEAR_MS:
            return frame.envelopes
        return [
            each._replace(deliver_at_ms=each.deliver_at_ms + behind_ms) if each.is_relative else each
            for each in frame.envelopes
        ]

    def _sent(self, call: int, sent: Deferred[Sequence[SendReceipt]]) -> None:
        if sent.error is not None:
            self._fail(call, sent.error, "SendMessage")
        else:
            self._say(frames.Sent(call, sent.value))  # type: ignore[arg-type]  # any sequence will do

    def _receive(self, frame: frames.ReceiveMessages) -> None:
        wanted = Receive(
            frame.group,
            Subscription(frame.topic, frame.queue_id, frozenset(frame.tags), frame.sql),
            *(frame.batch_max, frame.invisible_ms, frame.wait_ms, frame.is_renewed),
        )
        self._run(frame.call, self._received(frame, wanted))

    async def _received(self, frame: frames.ReceiveMessages, wanted: Receive) -> None:
        call = frame.call
        try:
            received = await self._exchange.receive(wanted, frame.client_id, frame.holders)
        except Exception as error:  # noqa: BLE001 - it is told
            self._fail(call, error, "ReceiveMessage")
            return
        deliveries = received.deliveries
        if deliveries:
            self._handed[call] = _Handed(received, frame.group, frame.is_renewed)
        self._say(frames.Delivered(call, deliveries))  # type: ignore[arg-type]  # any sequence will do

    def _over(self, frame: frames.Taken) -> None:
        handed = self._handed.pop(frame.call, None)
        if handed is None:
            return
        received = handed.received
        received.over(True)
        if handed.is_renewed:
            now_s = self._clock.monotonic_s()
            self._taken.append(_Taken(now_s, received))
            while self._taken[0].at_s < now_s - _IN_DOUBT_S:
                self._taken.popleft()

    def _not_taken(self, frame: frames.NotTaken) -> None:
        handed = self._handed.pop(frame.call, None)
        if handed is None:
            return
        if frame.was_wanted:
            handed.received.over(False)
            return
        for each in handed.received.deliveries:  # one that fails comes again when its lease ends
            give_back = self._exchange.change_invisible(handed.group, each.topic, each.receipt_handle, 0, suspend=True)
            Deferred.of(give_back).then(lambda _: None)

    def _ack(self, group: str, topic: str, asked: Sequence[frames.Ack]) -> None:
        """Acknowledge what several calls ask for together: they share a look at the group, and a unit of work."""
        handles = [handle for each in asked for handle in each.receipt_handles]
        Deferred.of(self._exchange.ack(group, topic, handles)).then(partial(self._acked, asked))

    def _acked(self, asked: Sequence[frames.Ack], acked: Deferred[Sequence[Exception | None]]) -> None:
        if acked.error is not None:
            for each in asked:
                self._fail(each.call, acked.error, "AckMessage")
            return
        results = acked.value
        if not any(results):
            for each in asked:
                self._say(frames.Acked(each.call, []))
            return
        at = 0
        for each in asked:
            own, at = results[at : at + len(each.receipt_handles)], at + len(each.receipt_handles)
            failures = [None if one is None else self._failure(one, "AckMessage") for one in own]
            self._say(frames.Acked(each.call, failures))

    def _change_invisible(self, frame: frames.ChangeInvisible) -> None:
        hiding = self._exchange.change_invisible(
            frame.group, frame.topic, frame.receipt_handle, frame.invisible_ms, suspend=frame.suspend
        )
        Deferred.of(hiding).then(partial(self._hidden, frame.call))

    def _hidden(self, call: int, hidden: Deferred[str]) -> None:
        if hidden.error is not None:
            self._fail(call, hidden.error, "ChangeInvisibleDuration")
        else:
            self._say(frames.Hidden(call, hidden.value))

    # -- calls that are passed on -------------------------------------------------------------------------------------

    def _relay(self, frame: frames.Relay) -> None:
        call = frame.call
        relayed = self._relayed[call] = _Relayed(call, self._say)  # its messages may be in the same batch
        self._run(call, self._relayed_call(frame, relayed), lambda: self._relayed.pop(call, None))

    def _headers(self, frame: frames.Relay) -> tuple[RequestHeaders, Admission]:
        """Return the headers of a call and what is decided about it: here, unless the front refused it already."""
        headers = RequestHeaders(tuple(frame.names), frame.values, frame.peer)
        headers.deadline_s, headers.packed_bytes = frame.deadline_s, frame.packed_bytes
        if frame.refusal is not None:
            admission = Admission(address=frame.address, refusal=frames.error_of(frame.refusal))
        else:
            admission = self._port.gate.admit(frame.path, headers, frame.address)
        headers.admission = admission
        return headers, admission

    async def _relayed_call(self, frame: frames.Relay, relayed: _Relayed) -> None:
        call, body = frame.call, frame.body
        method = self._port.methods_of_fronts[frame.path]
        end, text = Status.OK, ""
        headers, admission = self._headers(frame)
        account = headers.account = self._accounts.open(
            frame.address, admission.key, lambda _: None, is_operator=admission.is_operator
        )
        held = len(body or b"")
        account.hold(held)
        try:
            if isinstance(method, Unary):
                self._say(frames.Piece(call, [await method.handle(body or b"", headers)]))
                return
            given: AsyncIterator[Any] = (
                method.handle(relayed.messages(), headers)
                if isinstance(method, Bidirectional)
                else method.handle(body or b"", headers)
            )
            async with aclosing(given) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    self._say(frames.Piece(call, piece if isinstance(piece, list) else [piece]))
                    await relayed.more()
        except CallEnded as ended:
            end, text = ended.status, ended.text
        except asyncio.CancelledError:
            end, text = Status.CANCELLED, ""
            raise
        except Exception as error:
            log.exception("call_failed", path=frame.path, error=str(error))
            end, text = Status.INTERNAL, "the server failed to serve this call"
        finally:
            account.hold(-held)
            self._accounts.close(account)
            self._say(frames.End(call, end, text))

    def _of_stream(self, call: int, body: bytes) -> None:
        relayed = self._relayed.get(call)
        if relayed is not None:
            relayed.put(body)

    def _half_close(self, frame: frames.HalfClose) -> None:
        relayed = self._relayed.get(frame.call)
        if relayed is not None:
            relayed.finish(Status(frame.status), frame.text)

    def _more(self, frame: frames.More) -> None:
        relayed = self._relayed.get(frame.call)
        if relayed is not None:
            relayed.go_on()

    def _cancel(self, frame: frames.Cancel) -> None:
        task = self._tasks.get(frame.call)
        if task is not None:
            task.cancel()

    def _run(self, call: int, serving: Coroutine[Any, Any, None], on_end: Callable[[], object] = lambda: None) -> None:
        task = asyncio.get_running_loop().create_task(serving)
        self._tasks[call] = task
        task.add_done_callback(lambda _: (self._tasks.pop(call, None), on_end()))


class _Relayed:
    """A call that was passed on: what its client says, and whether it took what it was told."""

    def __init__(self, call: int, say: Callable[[frames.Frame], None]) -> None:
        self._call = call
        self._say = say
        self._said: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._fault: CallEnded | None = None
        self._taken = asyncio.Semaphore(0)

    def put(self, body: bytes) -> None:
        """Take a message of the client."""
        self._said.put_nowait(body)

    def finish(self, status: Status, text: str) -> None:
        """Note that the client said its last word; with a ``status`` other than OK, that what it said then is wrong."""
        if status is not Status.OK:
            self._fault = CallEnded(status, text)
        self._said.put_nowait(None)

    async def messages(self) -> AsyncIterator[bytes]:
        """Give the client's messages; the next one is asked for when the last was read. Raises CallEnded."""
        while (body := await self._said.get()) is not None:
            self._say(frames.Read(self._call))
            yield body
        if self._fault is not None:
            raise self._fault

    def go_on(self) -> None:
        """Note that the client took a piece."""
        self._taken.release()

    async def more(self) -> None:
        """Wait until the client took the last piece."""
        await self._taken.acquire()
