"""A frame-level client on a socket, and a server for it with its own clock."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Final

from dmq.http2.admission.limits import Limits
from dmq.http2.codec import frames
from dmq.http2.server.protocol import PlainServedTo
from dmq.http2.server.server import Http2Server
from dmq.http2.testing.peer import REQUEST, Encoder, Fields, ReceivedFrame, grpc_message
from dmq.http2.testing.service import Service

GREETING: Final = frames.PREFACE + frames.settings({})
_WAIT_S_MAX: Final = 20.0


async def until(is_so: Callable[[], bool]) -> None:
    """Poll until the condition holds. Raises TimeoutError."""
    for _ in range(int(_WAIT_S_MAX / 0.01)):
        if is_so():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


class RequestEncoder:
    """An encoder of requests, each on the next stream."""

    def __init__(self) -> None:
        self._encoder = Encoder()
        self._next_id = 1

    def request(self, name: str, body: bytes = b"", fields: Fields = (), *, ends: bool = True) -> bytes:
        """Return a request for a method of ``Service``; complete if it ``ends``."""
        head = [(key, f"/t.T/{name}" if key == ":path" else value) for key, value in REQUEST]
        stream_id, self._next_id = self._next_id, self._next_id + 2
        made = frames.header_block(stream_id, self._encoder.encode([*head, *fields]), ends=False)
        return made + frames.frame(frames.DATA, frames.END_STREAM if ends else 0, stream_id, grpc_message(body))


class Wire(RequestEncoder):
    """A socket that sends and receives frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__()
        self._reader = reader
        self.writer = writer

    async def say(self, data: bytes) -> None:
        """Send bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def frame(self) -> ReceivedFrame:
        """Receive a frame."""
        head = await asyncio.wait_for(self._reader.readexactly(frames.HEAD_BYTES), _WAIT_S_MAX)
        high, low, kind, flags, stream_id = frames.HEAD.unpack(head)
        return ReceivedFrame(kind, flags, stream_id, await self._reader.readexactly(high << 8 | low))

    async def until(self, kind: int) -> ReceivedFrame:
        """Receive frames up to and including one of ``kind``."""
        while (frame := await self.frame()).kind != kind:
            pass
        return frame

    async def is_closed(self) -> bool:
        """Wait until the server has closed the connection."""
        try:
            while await asyncio.wait_for(self._reader.read(65536), _WAIT_S_MAX):
                pass
        except (ConnectionError, ssl.SSLError):
            pass
        return True


class Rig:
    """A server, its service and its clients."""

    def __init__(
        self,
        monotonic_s: Callable[[], float],
        *,
        limits: Limits | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        plain_served_to: PlainServedTo = "all",
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self.service = Service()
        self.port = 0
        self._wires: list[Wire] = []
        self.server = Http2Server(
            self.service.methods,
            host="127.0.0.1",
            port=0,
            monotonic_s=monotonic_s,
            limits=limits,
            tls=tls,
            plain_served_to=plain_served_to,
            is_busy=is_busy,
        )

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[Rig, None]:
        """Run the server for the duration of the context."""
        self.port = await self.server.start()
        try:
            yield self
        finally:
            for wire in self._wires:
                wire.writer.close()
            await self.server.stop(0)

    async def connect(self, said: bytes = GREETING, context: ssl.SSLContext | None = None) -> Wire:
        """Connect; if ``said`` is not empty, send it and expect SETTINGS."""
        wire = Wire(*await asyncio.open_connection("127.0.0.1", self.port, ssl=context))
        self._wires.append(wire)
        if said:
            await wire.say(said)
            settings = await wire.frame()
            assert settings.kind == frames.SETTINGS
        return wire

    async def check_serving(self) -> None:
        """Check that the server answers a call of another client."""
        wire = await self.connect()
        await wire.say(wire.request("Echo", b"hello"))
        answer = await wire.until(frames.DATA)
        assert answer.payload == grpc_message(b"hello")
