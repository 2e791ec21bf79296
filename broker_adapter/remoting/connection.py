"""One connection of the classic protocol: requests go out in any number, answers are matched by their number.

A peer that breaks the protocol, falls silent or goes away fails the calls that wait with one clear error each; the next
call connects anew. What the peer asks by itself is not answered: nothing that is called here has it ask.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from dataclasses import replace

from broker_adapter.errors import BrokerUnavailable
from broker_adapter.remoting.frames import LENGTH_BYTES, Frame, FrameBroken, decode_frame, encode_frame, frame_bytes

_OPAQUE_MAX = 2**31 - 1


class Connection:
    """To one address. Belongs to one event loop; ``close`` it."""

    def __init__(self, address: str, *, timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._tls = tls
        self._opaque = 0
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._connecting = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def ask(self, request: Frame, *, wait_s: float = 0.0) -> Frame:
        """Send a request and return its answer, whatever it says. ``wait_s``: how long the peer may take beside.

        ``BrokerUnavailable`` if there is none in time; then the connection is given up, so that no late answer is
        taken for another one's.
        """
        self._opaque = self._opaque % _OPAQUE_MAX + 1
        opaque = self._opaque
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._timeout_s + wait_s):
                writer = await self._connected()
                self._waiting[opaque] = answer
                writer.write(encode_frame(replace(request, opaque=opaque)))
                await writer.drain()
                return await answer
        except TimeoutError:
            error = BrokerUnavailable(f"no answer from {self.address} within {self._timeout_s + wait_s:g} s")
            self._give_up(error)
            raise error from None
        except OSError as error:
            failure = BrokerUnavailable(f"the connection to {self.address} failed: {_text(error)}")
            self._give_up(failure)
            raise failure from None
        finally:
            self._waiting.pop(opaque, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # it is told by the error that is raised, if by any

    async def close(self) -> None:
        """End the connection; calls that wait fail."""
        reading = self._reading
        self._give_up(BrokerUnavailable(f"the connection to {self.address} was closed"))
        if reading is not None:
            await asyncio.gather(reading, return_exceptions=True)

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._connecting:
            if self._writer is None:
                host, _, port = self.address.rpartition(":")
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=self._tls)
                self._writer = writer
                self._reading = asyncio.get_running_loop().create_task(self._read(reader, writer))
            return self._writer

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        why = "it was closed by its peer"
        try:
            while True:
                content = await reader.readexactly(frame_bytes(await reader.readexactly(LENGTH_BYTES)))
                frame = decode_frame(content)
                answer = self._waiting.get(frame.opaque)
                if frame.is_answer and answer is not None and not answer.done():
                    answer.set_result(frame)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                why = "it was closed by its peer in the middle of a frame"
        except FrameBroken as broken:
            why = f"what came is not the classic protocol: {broken}"
        except OSError as error:
            why = _text(error)
        if self._writer is writer:
            self._give_up(BrokerUnavailable(f"the connection to {self.address} failed: {why}"))

    def _give_up(self, error: BrokerUnavailable) -> None:
        writer, self._writer = self._writer, None
        reading, self._reading = self._reading, None
        if reading is not None and reading is not asyncio.current_task():
            reading.cancel()
        if writer is not None:
            with suppress(OSError):
                writer.transport.abort()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(BrokerUnavailable(str(error)))


def _text(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
