"""Calls that a front passes on as they came, served here by whoever serves them in one process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Final

import structlog

from dmq.http2 import SMALL_BYTES, Account, Accounts, Admission, Bidirectional, CallEnded, RequestHeaders, Status, Unary
from dmq.processes import frames
from dmq.processes.link import Link
from dmq.rocketmq_server.transport.http2_server import Port

_CALL_BYTES: Final = 1024  # that a call takes beside its own bytes
_BEGUN_PER_TURN: Final = 16  # calls; each costs more than a message does
_SMALL_ONES_PART: Final = 8  # of a share; that much beyond it is for small calls when others have filled it
_FAILED: Final = "the server failed to serve this call"

log = structlog.get_logger("dmq.processes")


class Relays:
    """Serves the calls that one front passes on. Belongs to the event loop."""

    def __init__(self, link: Link, port: Port, accounts: Accounts) -> None:
        self._link = link
        self._say = link.say
        self._port = port
        self._accounts = accounts
        self._relayed: dict[int, _Relayed] = {}
        self._to_begin: deque[_Relayed] = deque()
        self._begun = 0  # in this turn of the loop
        self.takes: dict[type, Callable[[Any], None]] = {
            frames.Relay: self._relay,
            frames.StreamMessage: lambda frame: self._with(frame.call, lambda relayed: relayed.put(frame.body)),
            frames.HalfClose: lambda frame: self._with(
                frame.call, lambda relayed: relayed.finish(Status(frame.status), frame.text)
            ),
            frames.More: lambda frame: self._with(frame.call, lambda relayed: relayed.go_on()),
        }

    def cancel(self, call: int) -> None:
        """End a call that nobody waits for any more."""
        self._with(call, lambda relayed: relayed.cancel(Status.CANCELLED, ""))

    def fail(self, call: int, error: Exception | None = None) -> bool:
        """End a call for a fault of ours; say whether it is one of these."""
        relayed = self._relayed.get(call)
        if relayed is None:
            return False
        if error is not None:
            log.error("call_failed", path=relayed.frame.path, exc_info=error)
        relayed.cancel(Status.INTERNAL, _FAILED)
        return True

    def lose(self) -> None:
        """End all calls: the front is gone."""
        for relayed in list(self._relayed.values()):
            relayed.cancel(Status.CANCELLED, "")

    def _with(self, call: int, do: Callable[[_Relayed], None]) -> None:
        relayed = self._relayed.get(call)
        if relayed is not None:
            do(relayed)

    def _relay(self, frame: frames.Relay) -> None:
        try:
            headers, admission = self._headers(frame)
        except Exception:  # a fault of ours ends one call
            log.exception("call_failed", path=frame.path)
            self._say(frames.End(frame.call, Status.INTERNAL, _FAILED))
            return
        relayed = _Relayed(frame, headers, self._say, self._over)
        account = headers.account = self._accounts.open(
            frame.address, admission.key, relayed.let_go, is_operator=admission.is_operator
        )
        relayed.admit(account, _CALL_BYTES + len(frame.body or b"") + sum(map(len, frame.values)))
        self._relayed[frame.call] = relayed  # messages may come before it begins
        if self._begun == _BEGUN_PER_TURN:
            self._to_begin.append(relayed)
        else:
            self._begin(relayed)

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

    def _begin(self, relayed: _Relayed) -> None:
        loop = asyncio.get_running_loop()
        if not self._begun:
            loop.call_soon(self._begin_more)
        self._begun += 1
        relayed.task = loop.create_task(self._serve(relayed))
        relayed.task.add_done_callback(lambda _: self._over(relayed))  # of one that was cancelled before it began

    def _begin_more(self) -> None:
        """Begin some of the calls that wait: messages of all fronts have their turn in between."""
        self._begun, waiting = 0, self._to_begin
        while waiting and self._begun < _BEGUN_PER_TURN:
            relayed = waiting.popleft()
            if relayed.call in self._relayed:
                self._begin(relayed)

    async def _serve(self, relayed: _Relayed) -> None:
        try:
            await self._answer(relayed)
            relayed.end = Status.OK, ""
        except CallEnded as ended:
            relayed.end = ended.status, ended.text
        except Exception as error:
            log.exception("call_failed", path=relayed.frame.path, error=str(error))
            relayed.end = Status.INTERNAL, _FAILED
        finally:
            self._over(relayed)

    async def _answer(self, relayed: _Relayed) -> None:
        frame, headers = relayed.frame, relayed.headers
        method, body = self._port.methods_of_fronts[frame.path], frame.body or b""
        relayed.check()
        if isinstance(method, Unary):
            await self._give(relayed, [await method.handle(body, headers)])
            return
        given: AsyncIterator[Any] = (
            method.handle(relayed.messages(), headers)
            if isinstance(method, Bidirectional)
            else method.handle(body, headers)
        )
        async with aclosing(given) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                relayed.check()
                await self._give(relayed, piece if isinstance(piece, list) else [piece])
                del piece  # not kept here as well while the front has it
                await relayed.more()

    async def _give(self, relayed: _Relayed, messages: list[bytes]) -> None:
        size = sum(map(len, messages))
        if self._link.is_behind:
            relayed.hold(size)
            relayed.check()
            await self._link.room()
            relayed.hold(-size)
        self._say(frames.Piece(relayed.call, messages), size)

    def _over(self, relayed: _Relayed) -> None:
        if self._relayed.pop(relayed.call, None) is not None:
            relayed.give_back()
            relayed.task = None  # its CancelledError has the frames with their messages, and would be kept in a cycle
            self._accounts.close(relayed.account)
            self._say(frames.End(relayed.call, *relayed.end))


class _Relayed:
    """A call that was passed on: what its client says, what it holds, and whether the client took what it was told."""

    account: Account

    def __init__(
        self,
        frame: frames.Relay,
        headers: RequestHeaders,
        say: Callable[[frames.Frame], None],
        over: Callable[[_Relayed], None],
    ) -> None:
        self.frame = frame
        self.headers = headers
        self.call = frame.call
        self._over = over
        self.end: tuple[Status, str] = (Status.CANCELLED, "")
        self._say = say
        self._said: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._fault: CallEnded | None = None
        self._taken = asyncio.Semaphore(0)
        self._held = 0
        self.task: asyncio.Task[None] | None = None  # once it is begun

    def admit(self, account: Account, size: int) -> None:
        """Count what the call holds, from now on."""
        self.account = account
        self.hold(size)

    def hold(self, size: int) -> None:
        """Count bytes that are kept for the call; a negative size gives them back."""
        self._held += size
        self.account.hold(size)

    def give_back(self) -> None:
        """Count nothing for it any more."""
        self.hold(-self._held)

    def check(self) -> None:
        """Raise CallEnded if there is no room for what the call holds."""
        account = self.account
        pool = account.has_room()
        if pool is None:
            return
        is_small = account.bytes_held <= SMALL_BYTES
        if not is_small or pool.bytes_held > pool.bytes_max + pool.bytes_max // _SMALL_ONES_PART:
            why = f"too many bytes of requests and answers are waiting ({pool}): {pool.bytes_held}"
            raise CallEnded(Status.RESOURCE_EXHAUSTED, f"{why}, {pool.bytes_max} are allowed")

    def let_go(self, _: Account) -> None:
        """End the call: others need its room."""
        self.cancel(
            Status.RESOURCE_EXHAUSTED,
            "others need the room of what waits for this call: read faster, or ask for less at once",
        )

    def cancel(self, status: Status, text: str) -> None:
        """End the call, for a reason of ours."""
        self.end = status, text
        self.give_back()
        if self.task is not None:
            self.task.cancel()
        else:
            self._over(self)

    def put(self, body: bytes) -> None:
        """Take a message of the client."""
        self.hold(len(body))
        try:
            self.check()
        except CallEnded as ended:
            self.cancel(ended.status, ended.text)
            return
        self._said.put_nowait(body)

    def finish(self, status: Status, text: str) -> None:
        """Note that the client said its last word; with a ``status`` other than OK, that what it said then is wrong."""
        if status is not Status.OK:
            self._fault = CallEnded(status, text)
        self._said.put_nowait(None)

    async def messages(self) -> AsyncIterator[bytes]:
        """Give the client's messages; the next one is asked for when the last was read. Raises CallEnded."""
        while (body := await self._said.get()) is not None:
            self.hold(-len(body))
            self._say(frames.Read(self.call))
            yield body
        if self._fault is not None:
            raise self._fault

    def go_on(self) -> None:
        """Note that the client took a piece."""
        self._taken.release()

    async def more(self) -> None:
        """Wait until the client took the last piece."""
        await self._taken.acquire()
