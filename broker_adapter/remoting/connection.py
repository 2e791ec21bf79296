"""Connection of the classic protocol: requests are pipelined, and answers are matched by their request number.

A peer that breaks the protocol, stays silent or disconnects fails each pending call with one error. The next call
opens a new connection. A peer that announces its shutdown gets no new requests but may answer the pending ones.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from broker_adapter.contracts.errors import BrokerAway, BrokerUnavailable
from broker_adapter.remoting.protocol.codes import Result
from broker_adapter.remoting.protocol.frames import (
    LENGTH_BYTES,
    FrameBroken,
    RemotingFrame,
    decode_frame,
    encode_frame,
    frame_bytes,
)

_OPAQUE_MAX = 2**31 - 1
# Handles a request of the peer: returns the answer, or None if the peer expects none. Must not block.
OnRequest = Callable[[RemotingFrame], RemotingFrame | None]


def not_served(request: RemotingFrame) -> RemotingFrame | None:
    """Return the answer for a request that this client does not support."""
    return RemotingFrame(code=Result.UNSUPPORTED, remark=f"operation {request.code} is not served by this client")


class RemotingConnection:
    """Connection to one address. Belongs to one event loop; must be closed with ``close``.

    ``greeting`` returns the first request of each reconnection, not of the first connection. It restores the state that
    a peer drops with a connection. The connection does not wait for its answer.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float,
        tls: ssl.SSLContext | None = None,
        on_request: OnRequest = not_served,
        greeting: Callable[[], RemotingFrame | None] = lambda: None,
    ) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._tls = tls
        self._on_request = on_request
        self._greeting = greeting
        self._opaque = 0
        self._connecting = asyncio.Lock()
        self._link: _Link | None = None
        self._leaving: set[_Link] = set()
        self._was_linked = False

    @property
    def version(self) -> int:
        """RocketMQ version in the last frame of the peer over this connection; 0 before the first frame."""
        return self._link.version if self._link is not None else 0

    async def ask(
        self, request: RemotingFrame, *, wait_s: float = 0.0, timeout_s: float | None = None
    ) -> RemotingFrame:
        """Send a request and return its answer, with any result code. ``wait_s``: additional time for a long poll.

        ``BrokerUnavailable`` if no answer arrives in time, ``BrokerAway`` if no connection was available. A connection
        that received no frame at all during the full timeout is closed.
        """
        patience_s = (self._timeout_s if timeout_s is None else timeout_s) + wait_s
        link, heard, answer = None, 0, asyncio.get_running_loop().create_future()
        opaque = self._next()
        try:
            async with asyncio.timeout(patience_s):
                link = await self._linked()
                heard = link.heard
                link.waiting[opaque] = answer
                if link.ended is not None:
                    raise link.ended
                await link.write(replace(request, opaque=opaque))
                found: RemotingFrame = await answer
        except TimeoutError:
            kind = BrokerUnavailable if link is not None else BrokerAway
            error = kind(f"no answer from {self.address} within {patience_s:g} s")
            if link is not None and link.heard == heard and patience_s >= self._timeout_s:
                self._give_up(link, error)
            raise error from None
        except OSError as error:
            if link is None:
                raise BrokerAway(f"the connection to {self.address} failed: {_text(error)}") from None
            failure = self._failed(_text(error))
            self._give_up(link, failure)
            raise failure from None
        finally:
            if link is not None:
                link.waiting.pop(opaque, None)
                self._leave(link)
            if answer.done() and not answer.cancelled():
                answer.exception()  # marks it as retrieved: the caller gets the error that is raised
        if found.code == Result.GO_AWAY:
            self._go_away(link)
        return found

    async def tell(self, request: RemotingFrame, *, timeout_s: float | None = None) -> None:
        """Send a one-way request. ``BrokerUnavailable`` if it cannot be written; otherwise its outcome is unknown."""
        link = None
        try:
            async with asyncio.timeout(self._timeout_s if timeout_s is None else timeout_s):
                link = await self._linked()
                await link.write(replace(request, opaque=self._next(), is_one_way=True))
        except (TimeoutError, OSError) as error:  # TimeoutError is an OSError
            failure = self._failed(_text(error))
            if link is not None:
                self._give_up(link, failure)
            raise failure from None

    async def close(self) -> None:
        """Close the connection; pending calls fail."""
        links = [*self._leaving, *([self._link] if self._link is not None else [])]
        for link in links:
            self._give_up(link, BrokerUnavailable(f"the connection to {self.address} was closed"))
        await asyncio.gather(*(link.reading for link in links), return_exceptions=True)

    def _next(self) -> int:
        self._opaque = self._opaque % _OPAQUE_MAX + 1
        return self._opaque

    async def _linked(self) -> _Link:
        async with self._connecting:
            if self._link is None:
                host, _, port = self.address.rpartition(":")
                streams = await asyncio.open_connection(host.strip("[]"), int(port), ssl=self._tls)
                link = self._link = _Link(*streams, self._on_request, self._broke)
                greeting, self._was_linked = self._greeting() if self._was_linked else None, True
                if greeting is not None:
                    await link.write(replace(greeting, opaque=self._next()))
                return link
            return self._link

    def _broke(self, link: _Link, why: str) -> None:
        self._give_up(link, self._failed(why))

    def _failed(self, why: str) -> BrokerUnavailable:
        return BrokerUnavailable(f"the connection to {self.address} failed: {why}")

    def _give_up(self, link: _Link, error: BrokerUnavailable) -> None:
        if self._link is link:
            self._link = None
        self._leaving.discard(link)
        link.end(error)

    def _go_away(self, link: _Link) -> None:
        if self._link is link:
            self._link = None
            self._leaving.add(link)
        self._leave(link)

    def _leave(self, link: _Link) -> None:
        if link in self._leaving and not link.waiting:
            self._give_up(link, self._failed("its peer went away"))


class _Link:
    """TCP connection until it breaks. All pending calls fail with the error of the first failure."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_request: OnRequest,
        broke: Callable[[_Link, str], None],
    ) -> None:
        self.waiting: dict[int, asyncio.Future[RemotingFrame]] = {}
        self.heard = 0  # number of received frames
        self.version = 0
        self.ended: BrokerUnavailable | None = None
        self._reader, self._writer = reader, writer
        self._on_request, self._broke = on_request, broke
        self.reading = asyncio.get_running_loop().create_task(self._read())

    async def write(self, frame: RemotingFrame) -> None:
        self._put(frame)
        await self._writer.drain()

    def _put(self, frame: RemotingFrame) -> None:
        try:
            self._writer.write(encode_frame(frame))
        except RuntimeError as error:  # uvloop raises it for a broken connection before it reports the break
            raise ConnectionResetError(str(error)) from None

    def end(self, error: BrokerUnavailable) -> None:
        self.ended = error
        if self.reading is not asyncio.current_task():
            self.reading.cancel()
        with suppress(OSError):
            self._writer.transport.abort()
        for answer in self.waiting.values():
            if not answer.done():
                answer.set_exception(BrokerUnavailable(str(error)))

    async def _read(self) -> None:
        why = "it was closed by its peer"
        try:
            while True:
                head = await self._reader.readexactly(LENGTH_BYTES)
                self._heard(decode_frame(await self._reader.readexactly(frame_bytes(head))))
        except asyncio.IncompleteReadError as error:
            if error.partial:
                why = "it was closed by its peer in the middle of a frame"
        except FrameBroken as broken:
            why = f"the input is not the classic protocol: {broken}"
        except OSError as error:
            why = _text(error)
        except Exception as error:  # noqa: BLE001 - a bug of ours: without this reader no answer is received
            why = f"the command could not be served: {type(error).__name__}: {error}"
        self._broke(self, why)

    def _heard(self, frame: RemotingFrame) -> None:
        self.heard += 1
        self.version = frame.version
        if frame.is_answer:
            answer = self.waiting.get(frame.opaque)
            if answer is not None and not answer.done():
                answer.set_result(frame)
            return
        answered = self._on_request(frame)
        if answered is not None and not frame.is_one_way:
            self._put(replace(answered, opaque=frame.opaque, is_answer=True))


def _text(error: OSError) -> str:
    text = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
    return text or str(error) or type(error).__name__
