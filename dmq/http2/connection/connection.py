"""One connection of a client as a state machine without a socket: bytes in, changed streams and bytes out.

    connection = Connection(limits, account, peer, now_s)
    connection.receive(data, now_s)
    for stream in connection.take_changed(): ...     # its news, body and headers
    connection.out.answer(stream, message)           # and the other methods of ``Outbound``
    socket.write(connection.out.take())

The cost of one connection's input per loop iteration is bounded: ``receive`` reads one slice. While it ``is_behind``,
``read_on`` reads the next slice.

Time is an argument. No input raises an exception. A violation of a stream's rules ends that stream. Any other violation
ends the connection with GOAWAY (``is_over``). Both are reported as news (GONE) of the streams concerned.
"""

from __future__ import annotations

from typing import Final

from dmq.http2.admission.bounds import Account, Allowance, Share, Shares
from dmq.http2.admission.limits import Limits
from dmq.http2.codec import frames
from dmq.http2.codec.frames import HEAD_BYTES, WINDOW_MAX
from dmq.http2.codec.headers import HeaderShape, RequestHeaders, regular_fault, shape_of
from dmq.http2.codec.hpack import NAME_BYTES_MAX, Decoder, list_size, value_of, wires_of
from dmq.http2.connection.control import PRIORITY_BYTES, Control, check_priority, number_of, without_padding
from dmq.http2.connection.outbound import Outbound
from dmq.http2.connection.stream import ARRIVED, ENDED, GONE, OPENED, Stream
from dmq.http2.errors import Code, ConnectionFault, HpackFault, StreamFault

_unpack_head = frames.HEAD.unpack_from
_WRAPPED: Final = frames.PADDED | frames.PRIORITISED
_CONTENT_LENGTH_DIGITS: Final = 15
_TRAILERS: Final = wires_of("trailers")
_EMPTY_VALUES: Final = frozenset({b"\x00", b"\x80"})
# Costs of reading frames, in units of about a microsecond. The cost of a block also depends on its size.
_CALL_COST: Final = 4
_BLOCK_BYTES_PER_UNIT: Final = 16
_NAME_BYTES_PER_UNIT: Final = 4
_MANY_FIELDS: Final = 32  # a block with more fields is charged as if each byte was a field
_FIELDS_PER_UNIT: Final = 4
_SETTINGS_PER_UNIT: Final = 8
_BLOCKED_PER_UNIT: Final = 2  # streams that a wider window allows to send one byte each
_DATA_BYTES_PER_UNIT: Final = 1024
_SMALL_DATA_BYTES: Final = 64  # smaller DATA that does not end a request is rate-limited
_STREAM_BYTES: Final = 1024  # memory of an open stream without its headers
_LISTS_ROUGH_MAX: Final = 4096  # a list is measured exactly only if it may be larger


class Connection:
    """The server's side of one connection. ``fault`` is the reason for its end, if the peer violated the protocol."""

    def __init__(self, limits: Limits, account: Account, peer: str, now_s: float, lists: Share | None = None) -> None:
        """``lists`` is the account of header lists that the connections of the peer's address share."""
        self.limits = limits
        self.streams: dict[int, Stream] = {}
        if lists is None:
            lists = Shares(limits.lists_in_all, limits.lists_per_address).join(peer)
        self._small_frames = Allowance("frames of a few bytes", limits.small_frames, now_s)
        self.out = Outbound(self.streams, account, lists, self._small_frames)
        self.control = Control(limits, self.out, now_s)
        self.fault: ConnectionFault | None = None
        self.last_id = 0  # the newest stream that the peer opened
        self._peer = peer
        self._decoder = Decoder(limits.header_list_max)
        self._rest = bytearray()  # an incomplete frame
        self._ahead = b""  # input for the next slice
        self._block: bytearray | None = None  # an incomplete header block
        self._block_head = (0, 0, 0)  # stream, flags, CONTINUATIONs so far
        self._block_until_s = 0.0
        self._left = 0  # remaining cost of the slice
        self._lists = lists
        self._receive_left = limits.connection_window
        self._has_preface = False
        self._now_s = now_s
        self.control.greet()

    @property
    def is_over(self) -> bool:
        """True if no more input is read: queued bytes may be written, then the socket is to be closed."""
        return self.fault is not None or (self.control.is_final and not self.streams and not self.out.open_halves)

    @property
    def is_leaving(self) -> bool:
        """True if no stream is served any more but the peer still has to end its half of some.

        The peer has not read our end of these streams yet. grpcio, which the Python, C++ and PHP clients use, would
        report such a stream as lost if the socket was closed now.
        """
        return self.control.is_final and not self.streams and bool(self.out.open_halves)

    def leave(self) -> None:
        """Stop waiting for the peer's half-open streams."""
        self.out.open_halves.clear()

    @property
    def is_ready(self) -> bool:
        """True after the peer has sent its preface and its first SETTINGS."""
        return self.control.has_settings

    @property
    def is_behind(self) -> bool:
        """True if input waits for ``read_on``."""
        return bool(self._ahead)

    def check(self, now_s: float) -> None:
        """End the connection if its header block is incomplete after the time limit."""
        if self._block is not None and now_s > self._block_until_s:
            self.end(ConnectionFault(Code.ENHANCE_YOUR_CALM, "unfinished header block"))

    def take_changed(self) -> list[Stream]:
        """Return the streams with news. The caller processes each one and sets its ``news`` to 0."""
        changed = self.out.changed
        if changed:
            self.out.changed = []
        return changed

    def receive(self, data: bytes, now_s: float) -> None:
        """Accept input from the peer and read one slice of it."""
        if self.fault is not None:
            return
        self._now_s = now_s
        if self._ahead:
            self.out.hold_input(len(data))
            self._ahead += data
            return
        rest = self._rest
        if rest:
            rest += data
            if self._has_preface and len(rest) < HEAD_BYTES + self._awaited():
                return
            data = bytes(rest)
            rest.clear()
        self._read(data)

    def read_on(self, now_s: float) -> None:
        """Read the next slice of the buffered input."""
        data = self._ahead
        if data and self.fault is None:
            self._now_s = now_s
            self._ahead = b""
            self.out.hold_input(-len(data))
            self._read(data)

    def _read(self, data: bytes) -> None:
        self._left = self.limits.slice_cost
        try:
            at = self._frames(data, 0) if self._has_preface else self._preface(data)
        except ConnectionFault as fault:
            self.end(fault)
            return
        if at == len(data):
            return
        if self._left > 0:
            self._rest += data[at:]
        else:
            self._ahead = data[at:]
            self.out.hold_input(len(self._ahead))

    def end(self, fault: ConnectionFault) -> None:
        """Send GOAWAY with a reason, and drop all streams. A second reason is ignored."""
        if self.fault is None:
            self.fault = fault
            self.out.put(frames.goaway(self.last_id, fault.code, fault.text))
            self.lose()

    def lose(self) -> None:
        """Drop all streams and all input after the peer has disconnected."""
        self.out.hold_input(-len(self._ahead))
        self._ahead = b""
        self._rest = bytearray()
        self._drop_block()
        for stream in list(self.streams.values()):
            stream.is_ended = True
            self.out.close(stream)
            self.out.tell(stream, GONE)

    def consume(self, stream: Stream, size: int) -> None:
        """Release ``size`` bytes read by a handler; widen the peer's window in steps of half a window."""
        if stream.is_closed:
            return
        stream.unread -= size
        self.out.hold(stream, -size)
        room = self.limits.stream_window - stream.receive_left - stream.unread
        if room >= self.limits.stream_window // 2 and not stream.is_ended:
            self._widen(stream, room)

    def drop(self, stream: Stream) -> None:
        """Discard the buffered bytes of a request that is not read."""
        self.out.hold(stream, -stream.unread)
        stream.unread = 0
        stream.body = b""

    def received(self, stream: Stream) -> int:
        """Return the number of bytes received for a request whose window was never widened."""
        return self.limits.stream_window - stream.receive_left

    def expect(self, stream: Stream, size: int) -> None:
        """Widen the window so that the peer can complete a message of ``size`` bytes.

        One byte is added. hyper, which the Rust client uses, polls for further data only while its window has room.
        Without the byte it would never send the end of the stream.
        """
        lacking = size + 1 - stream.unread - stream.receive_left
        if lacking > 0 and not stream.is_ended and not stream.is_closed:
            self._widen(stream, lacking)

    def _widen(self, stream: Stream, size: int) -> None:
        stream.receive_left += size
        self.out.put(frames.window_update(stream.id, size))

    # -- frames --------------------------------------------------------------------------------------------------------

    def _awaited(self) -> int:
        """Return the payload size of the frame at the start of ``_rest``; 0 if unknown or too large."""
        rest = self._rest
        size = int.from_bytes(rest[:3], "big") if len(rest) >= HEAD_BYTES else 0
        return size if size <= frames.FRAME_BYTES else 0

    def _preface(self, data: bytes) -> int:
        expected = frames.PREFACE
        if len(data) < len(expected):
            if not expected.startswith(data):
                raise ConnectionFault(Code.PROTOCOL_ERROR, "this is not HTTP/2")
            return 0
        if not data.startswith(expected):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "this is not HTTP/2")
        self._has_preface = True
        return self._frames(data, len(expected))

    def _frames(self, data: bytes, at: int) -> int:
        """Read complete frames until the slice is used up (``_left``); return the end offset."""
        end = len(data)
        while end - at >= HEAD_BYTES and self._left > 0:
            high, low, kind, flags, stream_id = _unpack_head(data, at)
            start = at + HEAD_BYTES
            stop = start + (high << 8 | low)
            if stop - start > frames.FRAME_BYTES:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "frame above the maximum size")
            if stop > end:
                break
            at = stop
            if self._block is not None and kind != frames.CONTINUATION:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "other frame inside a header block")
            if kind != frames.SETTINGS and not self.control.has_settings:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "no SETTINGS after the preface")
            stream_id &= frames.STREAM_MAX
            self._left -= 1
            try:
                if kind == frames.DATA:
                    self._on_data(data, start, stop, flags, stream_id)
                elif kind == frames.HEADERS:
                    self._on_headers(data, start, stop, flags, stream_id)
                else:
                    self._on_other(kind, data[start:stop], flags, stream_id)
            except StreamFault as fault:
                self._fail(fault)
        return at

    def _fail(self, fault: StreamFault) -> None:
        # Otherwise deliberate faults would bypass the rate limit on the peer's own resets.
        self.control.resets.spend(self._now_s)
        stream = self.streams.get(fault.stream_id)
        self.out.reset(fault.stream_id, fault.code)
        if stream is not None:
            self.out.tell(stream, GONE)

    def _on_data(self, data: bytes, start: int, stop: int, flags: int, stream_id: int) -> None:
        size = stop - start
        self._receive_left -= size
        if self._receive_left < self.limits.connection_window // 2:
            self._refill_connection()
        stream = self.streams.get(stream_id)
        if stream is None:
            self._check_let_go(stream_id, size, ends=bool(flags & frames.END_STREAM))
            return
        self._left -= size // _DATA_BYTES_PER_UNIT
        if stream.is_ended:
            raise StreamFault(stream_id, Code.STREAM_CLOSED, "DATA after the end of the request")
        stream.receive_left -= size
        if stream.receive_left < 0:
            raise StreamFault(stream_id, Code.FLOW_CONTROL_ERROR, "DATA above the window of the stream")
        if flags & frames.PADDED:
            start, stop = without_padding(data, start, stop)
            size = stop - start
        ends = flags & frames.END_STREAM
        if size < _SMALL_DATA_BYTES and not ends:
            (self._small_frames if size else self.control.idle_frames).spend(self._now_s)
        if size:
            self._keep(stream, data[start:stop])
        if stream.body_left >= 0:
            self._count_body(stream, size, ends=bool(ends))
        if ends:
            stream.is_ended = True
        self.out.tell(stream, ARRIVED | ENDED if ends else ARRIVED)

    def _check_let_go(self, stream_id: int, size: int, *, ends: bool) -> None:
        self._check_not_idle(stream_id)
        if size < _SMALL_DATA_BYTES:
            (self._small_frames if size else self.control.idle_frames).spend(self._now_s)
        if stream_id not in self.out.let_go:
            raise StreamFault(stream_id, Code.STREAM_CLOSED, "DATA on a closed stream")
        if ends:
            self.out.open_halves.discard(stream_id)

    def _keep(self, stream: Stream, piece: bytes) -> None:
        body = stream.body
        if not body:
            stream.body = piece
        elif isinstance(body, bytes):
            stream.body = bytearray(body)
            stream.body += piece
        else:
            body += piece
        stream.unread += len(piece)
        self.out.hold(stream, len(piece))

    def _refill_connection(self) -> None:
        # Independent of handlers: the account bounds the buffered bytes, and an unread stream must not block the
        # others. A peer cannot overdraw this window: it is refilled at half, and a frame is smaller than that.
        lacking = self.limits.connection_window - self._receive_left
        self._receive_left += lacking
        self.out.put(frames.window_update(0, lacking))

    def _count_body(self, stream: Stream, size: int, *, ends: bool) -> None:
        stream.body_left -= size
        if stream.body_left < 0 or (ends and stream.body_left):
            raise StreamFault(stream.id, Code.PROTOCOL_ERROR, "amount of DATA differs from content-length")

    def _on_headers(self, data: bytes, start: int, stop: int, flags: int, stream_id: int) -> None:
        if not stream_id & 1:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "HEADERS on a stream number reserved for the server")
        if flags & _WRAPPED:
            if flags & frames.PADDED:
                start, stop = without_padding(data, start, stop)
            if flags & frames.PRIORITISED:
                try:
                    check_priority(data[start:stop], stream_id)
                    start += PRIORITY_BYTES
                except StreamFault as fault:  # its block is not decoded, so the table is out of sync
                    raise ConnectionFault(fault.code, fault.text) from fault
        if flags & frames.END_HEADERS:
            self._on_block(data[start:stop], stream_id, ends=bool(flags & frames.END_STREAM))
        else:
            self._block = bytearray(data[start:stop])
            self._block_head = (stream_id, flags, 0)
            self._block_until_s = self._now_s + self.limits.header_block_s
            self._hold_block(stop - start)

    def _on_continuation(self, payload: bytes, flags: int, stream_id: int) -> None:
        opened_id, opened_flags, count = self._block_head
        block = self._block
        if block is None or stream_id != opened_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "CONTINUATION without a header block")
        count += 1
        block += payload
        self._hold_block(len(payload))
        if count > self.limits.continuations or len(block) > self.limits.header_block_max:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "header block of too many frames")
        self._block_head = (stream_id, opened_flags, count)
        if flags & frames.END_HEADERS:
            self._drop_block()
            self._on_block(bytes(block), stream_id, ends=bool(opened_flags & frames.END_STREAM))

    def _hold_block(self, size: int) -> None:
        if not self._lists.take(size):
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many bytes of unfinished headers")
        self.out.lists_held += size

    def _drop_block(self) -> None:
        if self._block is not None:
            self.out.lists_held -= len(self._block)
            self._lists.give(len(self._block))
            self._block = None

    def _on_block(self, block: bytes, stream_id: int, *, ends: bool) -> None:
        self._left -= _CALL_COST + len(block) // _BLOCK_BYTES_PER_UNIT
        # Decoded first: the table needs every block, also those of refused streams.
        names, values, is_whole = self._decoder.decode(block)
        self._left -= (NAME_BYTES_MAX - self._decoder.name_bytes_left) // _NAME_BYTES_PER_UNIT
        if len(names) > _MANY_FIELDS or not is_whole:
            self._left -= len(block) // _FIELDS_PER_UNIT
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._on_trailers(stream, names, ends=ends)
            return
        if stream_id <= self.last_id:
            if stream_id in self.out.let_go:
                self.control.resets.spend(self._now_s)
                self.out.open_halves.discard(stream_id)
                return
            raise ConnectionFault(Code.STREAM_CLOSED, "HEADERS on a closed stream")
        self.last_id = stream_id
        if self.control.is_final:
            self.control.resets.spend(self._now_s)
            self.out.forget(stream_id)  # above the last stream of GOAWAY: the client retries it on another connection
            return
        if len(self.streams) >= self.limits.streams:
            raise StreamFault(stream_id, Code.REFUSED_STREAM, "too many streams")
        # An upper bound is sufficient for almost every list, and cheaper than a sum.
        list_bytes = len(block) + self._decoder.largest * len(names)
        if list_bytes > _LISTS_ROUGH_MAX:
            list_bytes = list_size(names, values)
        list_bytes += _STREAM_BYTES
        out = self.out
        if out.lists_held + list_bytes > self.limits.lists_per_connection or not self._lists.take(list_bytes):
            raise StreamFault(stream_id, Code.ENHANCE_YOUR_CALM, "too many bytes of unfinished headers")
        out.lists_held += list_bytes
        try:
            self._open(stream_id, names, values, list_bytes, is_whole=is_whole, ends=ends)
        except StreamFault:
            out.lists_held -= list_bytes
            self._lists.give(list_bytes)
            raise

    def _open(
        self,
        stream_id: int,
        names: tuple[str, ...],
        values: tuple[bytes, ...],
        list_bytes: int,
        *,
        is_whole: bool,
        ends: bool,
    ) -> None:
        # A list over its bound is empty here; the call layer refuses it with a status.
        shape = shape_of(names) if is_whole else HeaderShape("")
        if shape.fault:
            raise StreamFault(stream_id, Code.PROTOCOL_ERROR, shape.fault)
        headers = RequestHeaders(names, values, self._peer)
        out = self.out
        stream = Stream(stream_id, headers, shape, out.account, self.limits.stream_window)
        stream.list_bytes = list_bytes
        stream.request_max = self.limits.request_max
        if is_whole:
            if values[shape.path] in _EMPTY_VALUES:
                raise StreamFault(stream_id, Code.PROTOCOL_ERROR, "an empty path")
            if shape.te >= 0 and values[shape.te] not in _TRAILERS and _text(stream, shape.te) != "trailers":
                raise StreamFault(stream_id, Code.PROTOCOL_ERROR, "te allows only trailers")
            if shape.content_length >= 0:
                stream.body_left = _content_length(stream)
                if ends:
                    self._count_body(stream, 0, ends=True)
        self.streams[stream_id] = stream
        stream.is_ended = ends
        stream.news = OPENED | ENDED if ends else OPENED
        out.changed.append(stream)

    def _on_trailers(self, stream: Stream, names: tuple[str, ...], *, ends: bool) -> None:
        if stream.is_ended:
            raise StreamFault(stream.id, Code.STREAM_CLOSED, "HEADERS after the end of the request")
        if not ends:
            raise StreamFault(stream.id, Code.PROTOCOL_ERROR, "trailers without the end of the request")
        for name in names:
            if regular_fault(name):  # this also refuses a colon
                raise StreamFault(stream.id, Code.PROTOCOL_ERROR, "header not allowed as a trailer")
        if stream.body_left > 0:
            self._count_body(stream, 0, ends=True)
        stream.is_ended = True
        self.out.tell(stream, ENDED)

    def _on_other(self, kind: int, payload: bytes, flags: int, stream_id: int) -> None:
        if kind == frames.WINDOW_UPDATE:
            self._small_frames.spend(self._now_s)
            self._on_window_update(number_of(payload), stream_id)
        elif kind == frames.RST_STREAM:
            number_of(payload)  # the reason does not matter
            self._on_rst_stream(stream_id)
        elif kind == frames.CONTINUATION:
            self._on_continuation(payload, flags, stream_id)
        elif kind == frames.PUSH_PROMISE:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        else:
            if kind == frames.SETTINGS:
                waiting = len(self.out.blocked) + len(self.out.shut)
                self._left -= len(payload) // frames.SETTING.size // _SETTINGS_PER_UNIT + waiting // _BLOCKED_PER_UNIT
            self.control.on_frame(kind, payload, flags, stream_id, now_s=self._now_s, last_id=self.last_id)

    def _on_rst_stream(self, stream_id: int) -> None:
        self._check_not_idle(stream_id)
        self.control.resets.spend(self._now_s)
        stream = self.streams.get(stream_id)
        if stream is None:
            self.out.open_halves.discard(stream_id)
        else:
            stream.is_ended = True
            self.out.close(stream)
            self.out.tell(stream, GONE)

    def _on_window_update(self, number: int, stream_id: int) -> None:
        size = number & WINDOW_MAX
        if stream_id == 0:
            if size == 0:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
            self.out.widen(size)
            return
        self._check_not_idle(stream_id)
        stream = self.streams.get(stream_id)
        if stream is None:
            return
        if size == 0:
            raise StreamFault(stream_id, Code.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
        self.out.widen_one(stream, size)

    def _check_not_idle(self, stream_id: int) -> None:
        if stream_id > self.last_id or not stream_id & 1:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "frame of a stream that was never opened")


def _text(stream: Stream, index: int) -> str:
    try:
        return value_of(stream.headers.values[index])
    except HpackFault as fault:
        raise StreamFault(stream.id, Code.PROTOCOL_ERROR, fault.text) from fault


def _content_length(stream: Stream) -> int:
    text = _text(stream, stream.shape.content_length)
    if not text.isascii() or not text.isdecimal() or len(text) > _CONTENT_LENGTH_DIGITS:
        raise StreamFault(stream.id, Code.PROTOCOL_ERROR, "invalid content-length")
    return int(text)
