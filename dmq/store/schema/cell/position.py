"""Position of a store in its replication log: the row that every batch of a replicated store carries.

position   version 1 | store 8 | epoch 8 | number 8 | batch 8 | checksum 16      a row of the meta family

The row belongs to the run with the boot number ``epoch``. If a later run writes no replication log, the numbers differ,
and the row is void. The row of a copy of the store is void as well, since a copy has another store number.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from dmq.errors import StoreCorrupt

VERSION = 1
CHECKSUM_BYTES = 16
NO_CHECKSUM = bytes(CHECKSUM_BYTES)
_ROW = struct.Struct(f">BQQQQ{CHECKSUM_BYTES}s")


class Position(NamedTuple):
    """State of a store as seen from its log.

    ``batch`` is the number of the store's last batch. ``number`` and ``checksum`` are those of the last segment that
    the log certainly had when the batch was written; 0: none. In synchronous mode that segment ends with the batch.
    """

    store: int  # number of the store's identity
    epoch: int  # boot number of the run
    number: int
    batch: int
    checksum: bytes


def encode_position(position: Position) -> bytes:
    """Return the value of the position row."""
    return _ROW.pack(VERSION, *position)


def decode_position(value: bytes) -> Position:
    """Decode the value of the position row; raise ``StoreCorrupt`` if it is invalid."""
    if len(value) != _ROW.size or value[0] != VERSION:
        raise StoreCorrupt(f"the position in the log has {len(value)} bytes instead of {_ROW.size}, or no version")
    return Position(*_ROW.unpack(value)[1:])
