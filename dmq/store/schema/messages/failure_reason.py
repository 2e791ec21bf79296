"""Failure reasons, embedded in other values: the history of a copy, and a hidden lease. Since format 6.

reason     for each of error type, error text, host, client id, address: length 2 | UTF-8
"""

from __future__ import annotations

import struct

from dmq.errors import StoreCorrupt
from retry.failure_reason import FailureReason

_LENGTH = struct.Struct(">H")


def encode_reason(reason: FailureReason) -> bytes:
    """Encode a reason, which must be ``bounded``."""
    return b"".join(_LENGTH.pack(len(text)) + text for text in map(str.encode, reason))


def decode_reason(value: bytes) -> FailureReason:
    """Decode a reason; empty bytes are an empty reason. Raise ``StoreCorrupt`` if it is invalid.

    Fields that a later version appends are ignored.
    """
    texts: list[str] = []
    at = 0
    try:
        while at < len(value) and len(texts) < len(FailureReason._fields):
            (length,) = _LENGTH.unpack_from(value, at)
            at += _LENGTH.size
            if at + length > len(value):
                raise StoreCorrupt(f"a failure reason of {len(value)} bytes is shorter than its own lengths say")
            texts.append(value[at : at + length].decode())
            at += length
    except (struct.error, UnicodeDecodeError) as error:
        raise StoreCorrupt(f"a failure reason cannot be read: {error}") from error
    return FailureReason(*texts)
