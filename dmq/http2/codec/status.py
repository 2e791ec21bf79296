"""gRPC header fields: the constant response blocks, status trailers, timeouts."""

from __future__ import annotations

from typing import Final

from dmq.http2.codec.hpack import literal
from dmq.http2.errors import Status

# ":status: 200" is entry 8 of the static table, "content-type" is the name of entry 31.
RESPONSE_BLOCK: Final = b"\x88\x0f\x10\x10application/grpc"
OK_TRAILERS: Final = literal("grpc-status", b"0")
ACCEPTED: Final = literal("grpc-accept-encoding", b"identity,gzip")
_TEXT_CHARS_MAX: Final = 1000  # clients accept 8 KiB of headers by default; an encoded character has up to 12 bytes

_TIMEOUT_DIGITS: Final = 8
_UNIT_S: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


def trailers(status: Status, text: str) -> bytes:
    """Return the block that ends a call. The text is cut at 1000 characters."""
    block = literal("grpc-status", str(int(status)).encode())
    if text:
        block += literal("grpc-message", percent_encoded(text[:_TEXT_CHARS_MAX]))
    return block


def percent_encoded(text: str) -> bytes:
    """Encode a status text: UTF-8, with ``%XX`` for ``%`` and every byte outside printable ASCII."""
    raw = text.encode("utf-8", "replace")
    return b"".join(bytes((byte,)) if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte for byte in raw)


def timeout_s(text: str) -> float | None:
    """Return a ``grpc-timeout`` in seconds; None if invalid. Clients send from nanoseconds to sixty years."""
    unit_s = _UNIT_S.get(text[-1:])
    digits = text[:-1]
    if unit_s is None or len(digits) > _TIMEOUT_DIGITS or not (digits.isascii() and digits.isdecimal()):
        return None
    return int(digits) * unit_s
