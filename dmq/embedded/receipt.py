"""Receipt handles that describe themselves, so that they outlive a restart.

    handle     base64url of: version 2 | group_id 4 | topic_id 4 | queue_id 2 | queue_offset 8 | epoch 8 | attempt 2
               | is push 1 | crc 4

The epoch is the daemon's run (32 bits) and a counter: no two hand-outs ever share one.
"""

from __future__ import annotations

import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from binascii import crc32
from typing import NamedTuple

from broker_adapter.errors import Refused, Rule

_HANDLE = struct.Struct(">BIIHQQH?")
_CRC = struct.Struct(">I")
_VERSION = 2


class Receipt(NamedTuple):
    """What a handle says."""

    group_id: int
    topic_id: int
    queue_id: int
    queue_offset: int
    epoch: int
    attempt: int  # in this queue
    is_push: bool = False  # handed out to a push consumer


def encode_handle(receipt: Receipt) -> str:
    """Return the handle text."""
    packed = _HANDLE.pack(_VERSION, *receipt)
    return urlsafe_b64encode(packed + _CRC.pack(crc32(packed))).decode().rstrip("=")


def decode_handle(handle: str) -> Receipt:
    """Read a handle; ``Refused(RECEIPT_HANDLE)`` for anything this broker cannot have written."""
    try:
        raw = urlsafe_b64decode(handle.encode("ascii") + b"=" * (-len(handle) % 4))
        packed = raw[: -_CRC.size]
        version, *fields = _HANDLE.unpack(packed)
        if version != _VERSION or _CRC.unpack(raw[-_CRC.size :])[0] != crc32(packed):
            raise ValueError(version)
    except (ValueError, UnicodeEncodeError, Base64Error, struct.error) as error:
        raise Refused(Rule.RECEIPT_HANDLE, "the handle is not one of this broker", value=handle) from error
    return Receipt._make(fields)
