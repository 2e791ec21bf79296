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
_UNSENT_HIGH: Final = 4 * 1024 * 1024  # with so much unsent the other end is behind
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
    ) -> None:
        """``reads_while_behind`` must be so on one end: two that write and do not read would wait for each other."""
        self._reads_while_behind = reads_while_behind
        self._decode = decode
        self._on_frames = on_frames
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(_BUFFER_BYTES)
        self._filled = 0
        self._frames: list[Frame] = []
        self._is_ended = False  # here: nothing is said or heard any more
        self.is_lost = False

    @classmethod
    async def over(
        cls,
        stream: socket.socket,
        decode: Callable[[memoryview], Sequence[Any]],
        on_frames: Callable[[Sequence[Any]], None],
        on_lost: Callable[[], None],
        *,
        reads_while_behind: bool = True,
    ) -> Link:
        """Return a link over a connected socket, which it takes for its own."""
        stream.setblocking(False)
        loop = asyncio.get_running_loop()
        _, link = await loop.create_connection(
            lambda: cls(decode, on_frames, on_lost, reads_while_behind=reads_while_behind), sock=stream
        )
        return link

    # -- saying -------------------------------------------------------------------------------------------------------

    def say(self, frame: Frame) -> None:
        """Write a frame at the end of the loop's turn, behind all that was said before; nothing behind the end."""
        if self._is_ended:
            return
        frames = self._frames
        if not frames:
            self._loop.call_soon(self._flush)
        frames.append(frame)

    def _flush(self) -> None:
        frames, self._frames = self._frames, []
        if not self.is_lost and frames:
            self._transport.write(encode(frames))

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
        self._transport.set_write_buffer_limits(high=_UNSENT_HIGH)

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
        if not self._reads_while_behind:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if not self._reads_while_behind:
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.is_lost = self._is_ended = True
        self._on_lost()
