"""Receipt handles that describe themselves, so that they outlive a restart.

    handle     in hexadecimal digits: version 3 | group_id 4 | topic_id 4 | queue_id 2 | queue_offset 8 | epoch 8
               | attempt 2 | is push 1 | crc 4

The epoch is the daemon's run (32 bits) and a counter: no two hand-outs ever share one.
"""

from __future__ import annotations

import struct
from binascii import crc32
from typing import NamedTuple

from broker_adapter.errors import Refused, Rule

_PACKED, _WHOLE = struct.Struct(">BIIHQQH?"), struct.Struct(">BIIHQQH?I")
_CRC_BYTES = 4
_VERSION = 3


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
    packed = _PACKED.pack(_VERSION, *receipt)
    return (packed + crc32(packed).to_bytes(_CRC_BYTES, "big")).hex()


def decode_handle(handle: str) -> Receipt:
    """Read a handle; ``Refused(RECEIPT_HANDLE)`` for anything this broker cannot have written."""
    try:
        raw = bytes.fromhex(handle)
        version, *fields, crc = _WHOLE.unpack(raw)
    except (ValueError, struct.error) as error:
        raise _unknown(handle) from error
    if version != _VERSION or crc != crc32(raw[:-_CRC_BYTES]):
        raise _unknown(handle)
    return Receipt._make(fields)


def _unknown(handle: str) -> Refused:
    return Refused(Rule.RECEIPT_HANDLE, "the handle is not one of this broker", value=handle)
