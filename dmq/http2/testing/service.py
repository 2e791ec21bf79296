"""A service for tests: each method is named after its behaviour, and counts its outcomes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from broker_adapter.contracts.deferred import Deferred
from dmq.http2.codec.headers import RequestHeaders
from dmq.http2.connection.methods import Bidirectional, Method, Streaming, Unary
from dmq.http2.errors import CallEnded, Status


class AwaitableCounter:
    """A counter that can be awaited."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = asyncio.Event()

    def add(self) -> None:
        """Count one."""
        self.count += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def reach(self, count: int, limit_s: float = 20) -> None:
        """Wait until the counter is at least ``count``. Raises TimeoutError."""
        async with asyncio.timeout(limit_s):
            while self.count < count:
                await self._changed.wait()


class Service:
    """The handlers. ``waiting`` counts started calls of Wait; ``ended`` counts cancelled handlers."""

    def __init__(self) -> None:
        self.waiting = AwaitableCounter()
        self.made = AwaitableCounter()  # messages of streams
        self.ended = AwaitableCounter()
        self.later: dict[bytes, Deferred[bytes]] = {}  # pending answers to Deferred, by message

    @property
    def methods(self) -> dict[str, Method]:
        """The methods by path."""
        return {
            "/t.T/Echo": Unary(self._echo),
            "/t.T/Wait": Unary(self._wait),
            "/t.T/Fail": Unary(self._fail),
            "/t.T/Refuse": Unary(self._refuse),
            "/t.T/Deferred": Unary(self._later),
            "/t.T/Tell": Unary(self._tell),
            "/t.T/Left": Unary(self._left),
            "/t.T/Count": Streaming(self._count),
            "/t.T/Blocks": Streaming(self._blocks),
            "/t.T/Twice": Bidirectional(self._twice),
            "/t.T/Broken": Streaming(self._broken),
        }

    async def _echo(self, message: bytes, _: RequestHeaders) -> bytes:
        return message

    async def _wait(self, message: bytes, _: RequestHeaders) -> bytes:
        self.waiting.add()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.ended.add()
            raise
        return message

    async def _fail(self, message: bytes, _: RequestHeaders) -> bytes:
        raise ValueError(f"a bug: {message!r}")

    async def _refuse(self, message: bytes, _: RequestHeaders) -> bytes:
        raise CallEnded(Status(int(message)), "100 % nö\n")

    def _later(self, message: bytes, _: RequestHeaders) -> Deferred[bytes]:
        """Return a Deferred that the test completes; "now" is answered at once, and "raise" raises."""
        if message == b"raise":
            raise ValueError("a bug before there is anything to wait for")
        if message == b"now":
            return Deferred.given(message)
        self.later[message] = Deferred()
        self.waiting.add()
        return self.later[message]

    async def _tell(self, _: bytes, headers: RequestHeaders) -> bytes:
        return repr((sorted(headers.items()), headers.peer)).encode()

    async def _left(self, _: bytes, headers: RequestHeaders) -> bytes:
        return repr(headers.deadline_s).encode()

    async def _count(self, message: bytes, headers: RequestHeaders) -> AsyncGenerator[bytes, None]:
        for number in range(int(message)):
            yield str(number).encode()
        if headers.get("then") == "fail":
            raise CallEnded(Status.ABORTED, "as asked")

    def _broken(self, message: bytes, _: RequestHeaders) -> AsyncGenerator[bytes, None]:
        raise ValueError(f"a bug before the first message: {message!r}")

    async def _blocks(self, message: bytes, _: RequestHeaders) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                self.made.add()
                yield b"x" * int(message)
        finally:
            self.ended.add()

    async def _twice(self, messages: AsyncIterator[bytes], _: RequestHeaders) -> AsyncGenerator[bytes, None]:
        try:
            async for message in messages:
                yield message * 2
        except asyncio.CancelledError:
            self.ended.add()
            raise
