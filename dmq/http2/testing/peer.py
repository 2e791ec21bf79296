"""The peer's side for tests: encodes a client's bytes and decodes the server's.

It enforces no protocol rules except those that a test requests. It is not a client: it never waits, retries or opens a
socket.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dmq.http2.admission.bounds import Account, Share
from dmq.http2.admission.limits import Limits
from dmq.http2.codec import frames
from dmq.http2.codec.hpack import STATIC, TABLE_BYTES, Decoder, value_of
from dmq.http2.codec.huffman import encode as huffman_encode
from dmq.http2.connection.connection import Connection
from dmq.http2.connection.stream import Stream

Fields = Sequence[tuple[str, str]]

REQUEST: Fields = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test.Test/Echo"),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)


class ReceivedFrame(NamedTuple):
    """A received frame."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes


def split(data: bytes) -> list[ReceivedFrame]:
    """Split bytes into frames; no bytes may remain."""
    found = []
    while data:
        high, low, kind, flags, stream_id = frames.HEAD.unpack_from(data)
        end = frames.HEAD_BYTES + (high << 8 | low)
        assert len(data) >= end, "half a frame"
        found.append(ReceivedFrame(kind, flags, stream_id, data[frames.HEAD_BYTES : end]))
        data = data[end:]
    return found


def integer(value: int, bits: int, first: int) -> bytes:
    """Encode an HPACK integer after the flags in ``first``."""
    full = (1 << bits) - 1
    if value < full:
        return bytes((first | value,))
    made = bytearray((first | full,))
    value -= full
    while value >= 0x80:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


def text(value: bytes, *, is_huffman: bool) -> bytes:
    """Encode an HPACK text."""
    if is_huffman:
        raw = huffman_encode(value)
        return integer(len(raw), 7, 0x80) + raw
    return integer(len(value), 7, 0) + value


class Encoder:
    """An encoder with all features of HPACK, and a table with the exact sizes of the RFC."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, str]] = []  # the newest first
        self._size_max = TABLE_BYTES

    @staticmethod
    def _size(entry: tuple[str, str]) -> int:
        return len(entry[0]) + len(entry[1].encode()) + 32

    @property
    def table(self) -> list[tuple[str, str]]:
        """The entries, newest first."""
        return list(self._entries)

    def resize(self, size_max: int) -> bytes:
        """Change the table size; the returned bytes belong at the start of the next block."""
        self._size_max = size_max
        self._evict()
        return integer(size_max, 5, 0x20)

    def encode(self, fields: Iterable[tuple[str, str]], *, is_huffman: bool = True, is_kept: bool = True) -> bytes:
        """Encode a block; without ``is_kept`` the table is unchanged."""
        return b"".join(self.field(field, is_huffman=is_huffman, is_kept=is_kept) for field in fields)

    def field(self, field: tuple[str, str], *, is_huffman: bool, is_kept: bool, is_never: bool = False) -> bytes:
        """Encode one field, by its index if it has one."""
        whole = [(name, value_of(wire)) for name, wire, _ in STATIC[1:]] + self._entries
        if field in whole:
            return integer(whole.index(field) + 1, 7, 0x80)
        names = [name for name, _ in whole]
        index = names.index(field[0]) + 1 if field[0] in names else 0
        bits, first = (6, 0x40) if is_kept else (4, 0x10 if is_never else 0)
        made = integer(index, bits, first)
        if not index:
            made += text(field[0].encode("latin-1"), is_huffman=is_huffman)
        made += text(field[1].encode(), is_huffman=is_huffman)
        if is_kept:
            self._entries.insert(0, field)
            self._evict()
        return made

    def _evict(self) -> None:
        while sum(map(self._size, self._entries)) > self._size_max:
            self._entries.pop()


def grpc_message(body: bytes, *, flag: int = 0) -> bytes:
    """Return a message with its prefix."""
    return bytes((flag,)) + len(body).to_bytes(4, "big") + body


class Peer:
    """A client in memory, connected to a ``Connection``. Its methods send frames or read the answers."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        greets: bool = True,
        account: Account | None = None,
        lists: Share | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.account = account or Account.alone(self.limits.held_in_all)
        self.now_s = 0.0
        self.connection = Connection(self.limits, self.account, "ipv4:127.0.0.1:1", self.now_s, lists)
        self.encoder = Encoder()
        self._decoder = Decoder(64 * 1024)
        self.next_id = 1
        if greets:
            self.say(frames.PREFACE + frames.settings({}))
            self.hear()

    def say(self, data: bytes) -> None:
        """Send bytes."""
        self.connection.receive(data, self.now_s)
        while self.connection.is_behind:
            self.connection.read_on(self.now_s)

    def frame(self, kind: int, flags: int = 0, stream_id: int = 0, payload: bytes = b"") -> None:
        """Send a frame."""
        self.say(frames.frame(kind, flags, stream_id, payload))

    def open(self, fields: Fields = REQUEST, *, ends: bool = False) -> int:
        """Open a stream and return its number."""
        stream_id, self.next_id = self.next_id, self.next_id + 2
        flags = frames.END_HEADERS | (frames.END_STREAM if ends else 0)
        self.frame(frames.HEADERS, flags, stream_id, self.encoder.encode(fields))
        return stream_id

    def data(self, stream_id: int, payload: bytes, *, ends: bool = False) -> None:
        """Send DATA, in as many frames as needed."""
        for at in range(0, len(payload) or 1, frames.FRAME_BYTES):
            piece = payload[at : at + frames.FRAME_BYTES]
            is_last = ends and at + frames.FRAME_BYTES >= len(payload)
            self.frame(frames.DATA, frames.END_STREAM if is_last else 0, stream_id, piece)

    def call(self, body: bytes = b"hello", fields: Fields = REQUEST) -> int:
        """Send a complete request."""
        stream_id = self.open(fields)
        self.data(stream_id, grpc_message(body), ends=True)
        return stream_id

    def hear(self) -> list[ReceivedFrame]:
        """Return the frames that the server has sent since the last call."""
        return split(self.connection.out.take())

    def changed(self) -> list[tuple[Stream, int]]:
        """Return the streams with news, and the news."""
        found = []
        for stream in self.connection.take_changed():
            found.append((stream, stream.news))
            stream.news = 0
        return found

    def stream(self, stream_id: int) -> Stream:
        """Return the server's stream."""
        return self.connection.streams[stream_id]

    def fields(self, block: bytes) -> list[tuple[str, str]]:
        """Decode a header block of the server."""
        names, values, _ = self._decoder.decode(block)
        return [(name, value_of(wire)) for name, wire in zip(names, values, strict=True)]
