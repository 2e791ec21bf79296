"""The output of a connection: frames in order, the peer's windows, and the data that waits for them.

An answer that fits is three frames in three pieces of bytes. A larger one waits in its stream, one message at a time.
Waiting streams send one frame each in turn.
"""

from __future__ import annotations

from collections import OrderedDict
from struct import Struct
from typing import Final

from dmq.http2.admission.bounds import Account, Allowance, Share
from dmq.http2.codec import frames
from dmq.http2.codec.frames import HEAD_BYTES, WINDOW_MAX
from dmq.http2.codec.status import OK_TRAILERS, RESPONSE_BLOCK, trailers
from dmq.http2.connection.methods import Bidirectional
from dmq.http2.connection.stream import DRAINED, Stream
from dmq.http2.errors import Code, ConnectionFault, Status, StreamFault

PREFIX_BYTES: Final = 5
_LET_GO_MAX: Final = 4096
WRITE_BYTES: Final = 128 * 1024  # limit of one write; further data stays in its stream, where it is accounted
_EARNING_BYTES: Final = 256  # bytes of an answer that permit one WINDOW_UPDATE of the peer

# HEADERS with the constant block, the head of DATA, the prefix of the message
_ANSWER: Final = Struct(f">HBBBI{len(RESPONSE_BLOCK)}sHBBBIBI")
_ANSWER_BYTES: Final = _ANSWER.size + HEAD_BYTES + len(OK_TRAILERS)
_TRAILERS: Final = Struct(f">HBBBI{len(OK_TRAILERS)}s")
_PREFIX: Final = Struct(">BI")
_RESPONSE_SIZE: Final = len(RESPONSE_BLOCK)
_TRAILERS_SIZE: Final = len(OK_TRAILERS)
_LAST_FLAGS: Final = frames.END_HEADERS | frames.END_STREAM


class Outbound:
    """The sending half of a connection. ``parts`` are the queued bytes, ``part_bytes`` their size."""

    __slots__ = (
        "account",
        "blocked",
        "changed",
        "frame_bytes",
        "granted_max",
        "held",
        "is_paused",
        "let_go",
        "lists",
        "lists_held",
        "open_halves",
        "part_bytes",
        "parts",
        "send_left",
        "shut",
        "small_frames",
        "streams",
        "window",
    )

    def __init__(self, streams: dict[int, Stream], account: Account, lists: Share, small_frames: Allowance) -> None:
        self.streams = streams
        self.account = account
        self.lists = lists
        self.lists_held = 0
        self.small_frames = small_frames
        self.parts: list[bytes] = []
        self.part_bytes = 0
        self.changed: list[Stream] = []  # streams with news
        # Streams that wait for the connection's window, in turn order; and streams with a closed window of their own.
        self.blocked: OrderedDict[int, Stream] = OrderedDict()
        self.shut: dict[int, Stream] = {}
        self.let_go: dict[int, None] = {}  # streams that we ended first: later frames for them are no fault
        self.open_halves: set[int] = set()  # the subset that only the peer can end
        self.is_paused = False  # the peer does not read
        self.send_left = frames.WINDOW_DEFAULT
        self.window = frames.WINDOW_DEFAULT  # of new streams
        self.granted_max = 0  # the largest grant of any stream
        self.frame_bytes = frames.FRAME_BYTES
        self.held = 0

    def put(self, part: bytes) -> None:
        """Queue frames that are exempt from flow control."""
        self.parts.append(part)
        self.part_bytes += len(part)

    def take(self) -> bytes:
        """Return and clear all queued bytes, in one piece."""
        data = b"".join(self.parts)
        self.parts.clear()
        self.part_bytes = 0
        return data

    def answer(self, stream: Stream, message: bytes) -> None:
        """Send the only answer of a call, with status OK."""
        size = len(message) + PREFIX_BYTES
        if (
            size > self.send_left
            or size > stream.granted + self.window
            or size > self.frame_bytes
            or self.is_paused
            or self.part_bytes >= WRITE_BYTES
            or stream.is_closed
            or stream.has_answered
        ):
            self.send(stream, message)
            self.end(stream)
            return
        self.send_left -= size
        sid = stream.id
        # fmt: off
        self.parts += (
            _ANSWER.pack(0, _RESPONSE_SIZE, 1, 4, sid, RESPONSE_BLOCK, size >> 8, size & 0xFF, 0, 0, sid, 0, size - 5),
            message,
            _TRAILERS.pack(0, _TRAILERS_SIZE, 1, _LAST_FLAGS, sid, OK_TRAILERS),
        )
        # fmt: on
        self.part_bytes += _ANSWER_BYTES + size
        self.close(stream)

    def send(self, stream: Stream, sent: bytes | list[bytes]) -> bool:
        """Send one or more messages of an answer; return False if a part has to wait. The next send then waits for
        DRAINED.

        A list is cleared, because its messages would otherwise be kept twice until the peer reads them. On a closed
        stream the call has no effect.
        """
        if stream.is_closed:
            return True
        assert not stream.pending, "a message before the last one was sent"
        if not stream.has_answered:
            self._start(stream, RESPONSE_BLOCK)
        messages = sent if isinstance(sent, list) else (sent,)
        stream.pending = b"".join([part for message in messages for part in (_PREFIX.pack(0, len(message)), message)])
        if isinstance(sent, list):
            sent.clear()
        return self._offer(stream)

    def send_raw(self, stream: Stream, block: bytes, body: bytes) -> None:
        """Send an answer that is not gRPC, and end the stream."""
        self._start(stream, block)
        stream.pending = body
        stream.trailers = b""
        self._offer(stream)

    def end(self, stream: Stream, status: Status = Status.OK, text: str = "", extra: bytes = b"") -> None:
        """End a call after its queued messages; without any answer before it, in a single frame.

        ``extra`` are fields for the same block.
        """
        if stream.is_closed:
            return
        block = OK_TRAILERS if status is Status.OK else trailers(status, text) + extra
        if not stream.has_answered:
            block = RESPONSE_BLOCK + block
        if status is not Status.OK and stream.pending:
            self._drop_pending(stream)  # a partial message before an error is useless
        stream.trailers = block
        if not stream.pending:
            self._finish(stream)

    def reset(self, stream_id: int, code: Code) -> None:
        """End a stream with an error."""
        self.put(frames.rst_stream(stream_id, code))
        self.forget(stream_id)
        stream = self.streams.get(stream_id)
        if stream is not None:
            stream.is_ended = True  # one RST_STREAM is enough
            self.close(stream)

    def forget(self, stream_id: int) -> None:
        """Accept frames of the stream that are still in transit; they are not a fault."""
        self.let_go[stream_id] = None
        if len(self.let_go) > _LET_GO_MAX:
            oldest = next(iter(self.let_go))
            del self.let_go[oldest]
            self.open_halves.discard(oldest)

    def close(self, stream: Stream) -> None:
        """Close a stream; reset it if the peer has not ended its half.

        A bidirectional stream gets no reset, because its peer ends its half when it reads the status. Clients on Rust's
        h2 0.3 report a reset each time they poll again, and the official one polls without a pause, for ever.
        """
        if stream.is_closed:
            return
        stream.is_closed = True
        del self.streams[stream.id]
        if self.blocked:
            self.blocked.pop(stream.id, None)
        if self.shut:
            self.shut.pop(stream.id, None)
        self.lists_held -= stream.list_bytes
        self.lists.give(stream.list_bytes)
        held = stream.unread + len(stream.pending)
        self.held -= held
        stream.account.hold(-held)
        stream.unread = 0
        stream.body = stream.pending = b""
        if not stream.is_ended:
            stream.is_ended = True
            if isinstance(stream.method, Bidirectional):
                self.open_halves.add(stream.id)
            else:
                self.put(frames.rst_stream(stream.id, Code.NO_ERROR))
            self.forget(stream.id)

    def hold(self, stream: Stream, size: int) -> None:
        """Count buffered bytes of a stream; a negative size releases them."""
        self.held += size
        stream.account.hold(size)

    def hold_input(self, size: int) -> None:
        """Count unread input bytes; a negative size releases them."""
        self.held += size
        self.account.hold(size)

    def charge(self, stream: Stream, account: Account) -> None:
        """Move the bytes of a stream to another account, for now and later."""
        held = stream.unread + len(stream.pending)
        stream.account.hold(-held)
        stream.account = account
        account.hold(held)

    def widen(self, size: int) -> None:
        """Widen the connection's send window by ``size`` bytes. Raises ConnectionFault."""
        was_shut = self.send_left <= 0
        self.send_left += size
        if self.send_left > WINDOW_MAX:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "connection window above the maximum")
        if was_shut:
            self.pump()

    def rewindow(self, window: int) -> None:
        """Change the initial window of all streams, new and open, without visiting each one. Raises ConnectionFault."""
        is_wider = window > self.window
        self.window = window
        if window + self.granted_max > WINDOW_MAX:  # the largest grant may belong to a closed stream
            self.granted_max = max((stream.granted for stream in self.streams.values()), default=0)
            if window + self.granted_max > WINDOW_MAX:
                raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "stream window above the maximum")
        if is_wider and self.shut:
            opened = [stream for stream in self.shut.values() if stream.granted + window > 0]
            for stream in opened:
                del self.shut[stream.id]
                self.blocked[stream.id] = stream

    def widen_one(self, stream: Stream, size: int) -> None:
        """Widen a stream's send window by ``size`` bytes, and send its pending data. Raises StreamFault."""
        stream.granted += size
        if stream.granted > self.granted_max:
            self.granted_max = stream.granted
            if stream.granted + self.window > WINDOW_MAX:
                raise StreamFault(stream.id, Code.FLOW_CONTROL_ERROR, "window above the maximum")
        if stream.pending:
            self.shut.pop(stream.id, None)
            if self._go(stream):
                self._drained(stream)
            else:
                self._wait(stream)

    @property
    def may_queue(self) -> bool:
        """Return True if the connection's window, the socket and the next write have room for DATA."""
        return self.send_left > 0 and not self.is_paused and self.part_bytes < WRITE_BYTES

    def pump(self) -> None:
        """Send pending data that the windows allow, one frame of each stream in turn."""
        blocked = self.blocked
        while blocked and self.may_queue:
            stream_id, stream = blocked.popitem(last=False)
            if stream.granted + self.window > 0:
                self._send_frame(stream)
            if not stream.pending:
                self._drained(stream)
            elif stream.granted + self.window > 0:
                blocked[stream_id] = stream
            else:
                self.shut[stream_id] = stream

    def _wait(self, stream: Stream) -> None:
        if stream.granted + self.window > 0:
            self.blocked[stream.id] = stream
        else:
            self.blocked.pop(stream.id, None)
            self.shut[stream.id] = stream

    def _start(self, stream: Stream, block: bytes) -> None:
        stream.has_answered = True
        self.put(frames.header_block(stream.id, block, ends=False))

    def _offer(self, stream: Stream) -> bool:
        """Send the allowed part of ``pending``; return True if that is all."""
        self.hold(stream, len(stream.pending))
        stream.waits_since_s = 0.0
        if not self._go(stream):
            self._wait(stream)
            return False
        if stream.trailers is not None:
            self._finish(stream)
        return True

    def _go(self, stream: Stream) -> bool:
        while stream.pending and stream.granted + self.window > 0 and self.may_queue:
            self._send_frame(stream)
        return not stream.pending

    def _send_frame(self, stream: Stream) -> None:
        pending, start = stream.pending, stream.sent
        size = min(len(pending) - start, stream.granted + self.window, self.send_left, self.frame_bytes)
        stop = start + size
        is_all = stop == len(pending)
        flags = frames.END_STREAM if is_all and stream.trailers == b"" else 0
        self.parts += (frames.head(size, frames.DATA, flags, stream.id), pending[start:stop])
        self.part_bytes += HEAD_BYTES + size
        stream.granted -= size
        self.send_left -= size
        stream.sent = stop
        if size >= _EARNING_BYTES:
            self.small_frames.earn(size // _EARNING_BYTES)
        if is_all:
            self._drop_pending(stream)

    def _drop_pending(self, stream: Stream) -> None:
        self.hold(stream, -len(stream.pending))
        stream.pending = b""
        stream.sent = 0

    def _drained(self, stream: Stream) -> None:
        self.blocked.pop(stream.id, None)
        self.shut.pop(stream.id, None)
        if stream.trailers is not None:
            self._finish(stream)
        else:
            self.tell(stream, DRAINED)

    def _finish(self, stream: Stream) -> None:
        if stream.trailers:
            self.put(frames.header_block(stream.id, stream.trailers, ends=True))
        self.close(stream)

    def tell(self, stream: Stream, news: int) -> None:
        """Record news of a stream."""
        if not stream.news:
            self.changed.append(stream)
        stream.news |= news
