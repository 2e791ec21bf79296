"""Frames (RFC 9113, section 4): one struct for the frame header, and the small frames as bytes.

+-----------------------------------------------+
| length (24) | type (8) | flags (8) | R | stream (31) |
+-----------------------------------------------+
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from dmq.http2.errors import Code

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

ACK: Final = 0x1
END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITISED: Final = 0x20

HEADER_TABLE_SIZE: Final = 1
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

HEAD_BYTES: Final = 9
FRAME_BYTES: Final = 16_384  # the smallest limit that a peer may set, and our own limit
FRAME_BYTES_LEGAL: Final = 2**24 - 1
WINDOW_DEFAULT: Final = 65_535
WINDOW_MAX: Final = 2**31 - 1
STREAM_MAX: Final = 2**31 - 1

# length / 256, length % 256, type, flags, stream: the fastest way to 24 bits
HEAD: Final = Struct(">HBBBI")
_WITH_NUMBER: Final = Struct(">HBBBII")
_GOAWAY: Final = Struct(">HBBBIII")
SETTING: Final = Struct(">HI")
SETTINGS_ACK: Final = HEAD.pack(0, 0, SETTINGS, ACK, 0)


def head(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    """Return the nine bytes of a frame header."""
    return HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream_id)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return a whole frame."""
    return head(len(payload), kind, flags, stream_id) + payload


def settings(values: dict[int, int]) -> bytes:
    """Return a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*item) for item in values.items()))


def window_update(stream_id: int, size: int) -> bytes:
    """Return a WINDOW_UPDATE that allows the peer to send ``size`` bytes more."""
    return _WITH_NUMBER.pack(0, 4, WINDOW_UPDATE, 0, stream_id, size)


def rst_stream(stream_id: int, code: Code) -> bytes:
    """Return an RST_STREAM frame."""
    return _WITH_NUMBER.pack(0, 4, RST_STREAM, 0, stream_id, code)


def goaway(last_id: int, code: Code, text: str = "") -> bytes:
    """Return a GOAWAY with the last stream that is served, and the reason."""
    said = text.encode()
    return _GOAWAY.pack(0, 8 + len(said), GOAWAY, 0, 0, last_id, code) + said


def ping(opaque: bytes, *, is_answer: bool = False) -> bytes:
    """Return a PING with its eight bytes."""
    return frame(PING, ACK if is_answer else 0, 0, opaque)


def header_block(stream_id: int, block: bytes, *, ends: bool, frame_bytes: int = FRAME_BYTES) -> bytes:
    """Return HEADERS, with CONTINUATIONs if the block does not fit in one frame."""
    flags = END_STREAM if ends else 0
    if len(block) <= frame_bytes:
        return frame(HEADERS, flags | END_HEADERS, stream_id, block)
    pieces = [block[at : at + frame_bytes] for at in range(0, len(block), frame_bytes)]
    made = [frame(HEADERS, flags, stream_id, pieces[0])]
    made += [frame(CONTINUATION, 0, stream_id, piece) for piece in pieces[1:-1]]
    made.append(frame(CONTINUATION, END_HEADERS, stream_id, pieces[-1]))
    return b"".join(made)
