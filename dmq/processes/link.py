"""One end of the stream between a front and the store process: frames in, and one write in each turn of the loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import structlog

from dmq.processes.frames import LENGTH_BYTES, Frame, encode, length_at

_BUFFER_BYTES: Final = 256 * 1024
UNSENT_HIGH: Final = 4 * 1024 * 1024
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError)  # which msgspec lets through

log = structlog.get_logger("dmq.processes")


class Link(asyncio.BufferedProtocol):
    """Reads batches and writes them. ``lost`` is called once, when the stream has ended, whoever ended it."""

    def __init__(
        self,
        decode: Callable[[memoryview], Sequence[Any]],
        on_frames: Callable[[Sequence[Any]], None],
        on_lost: Callable[[], None],
        *,
        reads_while_behind: bool = True,
        unsent_high: int = UNSENT_HIGH,
    ) -> None:
        """The other end is behind from ``unsent_high`` bytes on that it did not take.

        ``reads_while_behind`` must be so on one end: two that write and do not read would wait for each other.
        """
        self._reads_while_behind = reads_while_behind
        self._decode = decode
        self._on_frames = on_frames
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(_BUFFER_BYTES)
        self._filled = 0
        self._frames: list[Frame] = []
        self._is_ended = False  # here: nothing is said or heard any more
        self._said_bytes = 0  # of messages in them
        self._unsent_high = unsent_high
        self._is_paused = False
        self._room: asyncio.Future[None] | None = None
        self.is_lost = False
        self.on_room: Callable[[], None] = lambda: None  # the other end is not behind any more
        self.on_unsaid: Callable[[Any], None] = lambda _: None  # a frame that cannot be written

    @classmethod
    async def over(
        cls,
        stream: socket.socket,
        decode: Callable[[memoryview], Sequence[Any]],
        on_frames: Callable[[Sequence[Any]], None],
        on_lost: Callable[[], None],
        *,
        reads_while_behind: bool = True,
        unsent_high: int = UNSENT_HIGH,
    ) -> Link:
        """Return a link over a connected socket, which it takes for its own."""
        link = cls(decode, on_frames, on_lost, reads_while_behind=reads_while_behind, unsent_high=unsent_high)
        await link.join(stream)
        return link

    async def join(self, stream: socket.socket) -> None:
        """Begin, over a connected socket, which it takes for its own; frames may come before this returns."""
        stream.setblocking(False)
        await self._loop.create_connection(lambda: self, sock=stream)

    # -- saying -------------------------------------------------------------------------------------------------------

    def say(self, frame: Frame, size: int = 0) -> None:
        """Write a frame at the end of the loop's turn, behind all that was said before; nothing behind the end.

        ``size`` is that of the messages in it, in bytes, where many such frames may come in one turn.
        """
        if self._is_ended:
            return
        said = self._frames
        if not said:
            self._loop.call_soon(self._flush)
        said.append(frame)
        self._said_bytes += size

    @property
    def is_behind(self) -> bool:
        """The other end has much to read: who can wait does so before he says more."""
        return self._is_paused or self._said_bytes > self._unsent_high

    async def room(self) -> None:
        """Return once the other end is not behind, or gone."""
        while self.is_behind and not self.is_lost:
            if self._room is None:
                self._room = self._loop.create_future()
            await asyncio.shield(self._room)

    def _flush(self) -> None:
        said, self._frames = self._frames, []
        is_much, self._said_bytes = self._said_bytes > self._unsent_high, 0
        if self.is_lost or not said:
            return
        try:
            batch = encode(said)
        except Exception:  # noqa: BLE001 - which of them it is will be told
            batch = encode([frame for frame in said if self._can_say(frame)])
        self._transport.write(batch)
        if is_much and not self._is_paused:
            self._tell_room()

    def _can_say(self, frame: Frame) -> bool:
        try:
            encode([frame])
        except Exception:
            log.exception("frame_encoding_failed", kind=type(frame).__name__)
            self.on_unsaid(frame)
            return False
        return True

    def _tell_room(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            room.set_result(None)
        self.on_room()

    def close(self) -> None:
        """End the stream behind what was said; nothing is heard any more."""
        if not self._is_ended:
            self._flush()
            self._is_ended = True
            self._transport.close()

    def abort(self) -> None:
        """End the stream at once."""
        if not self.is_lost:
            self._is_ended = True
            self._frames = []
            self._transport.abort()

    # -- called by the loop -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]  # uvloop's is a class of its own
        self._transport.set_write_buffer_limits(high=self._unsent_high)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - what there is room for is read
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        at = 0
        with memoryview(self._buffer) as view:
            while self._filled - at >= LENGTH_BYTES and not self._is_ended:
                end = at + LENGTH_BYTES + length_at(view, at)
                if end > self._filled:
                    break
                try:
                    frames = self._decode(view[at + LENGTH_BYTES : end])
                except _UNREADABLE:
                    log.exception("frames_unreadable")
                    self.abort()
                    return
                self._on_frames(frames)
                at = end
        self._make_room(at)

    def _make_room(self, at: int) -> None:
        """Keep what is not whole yet, with room for the rest of it."""
        left = self._filled - at
        needed = LENGTH_BYTES
        if left >= LENGTH_BYTES:
            needed += length_at(self._buffer, at)
        if at or needed > len(self._buffer):
            if needed > len(self._buffer) or (len(self._buffer) > _BUFFER_BYTES >= needed):
                grown = bytearray(max(needed, _BUFFER_BYTES))  # the loop may still hold the old one
                grown[:left] = memoryview(self._buffer)[at : self._filled]
                self._buffer = grown
            elif left:
                self._buffer[:left] = self._buffer[at : self._filled]
            self._filled = left

    def eof_received(self) -> bool:
        return False  # which closes it

    def pause_writing(self) -> None:
        self._is_paused = True
        if not self._reads_while_behind:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_paused = False
        if not self._reads_while_behind:
            self._transport.resume_reading()
        self._tell_room()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.is_lost = self._is_ended = True
        self._tell_room()
        self._on_lost()
