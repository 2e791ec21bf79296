"""What the forwarder leaves for the next run: whether the trail says of everything that the cluster may have it.

border   version 1 | number of the store 8 | is_settled 1      a row of the meta family
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from dmq.errors import StoreCorrupt

VERSION = 1
_ROW = struct.Struct(">BQ?")


class Border(NamedTuple):
    """Written when a run begins to send, not settled, and settled at an end that leaves nothing in doubt."""

    store_number: int  # of the store that it was written in: a copy has another one
    is_settled: bool


def encode_border(border: Border) -> bytes:
    """Encode the row."""
    return _ROW.pack(VERSION, *border)


def decode_border(value: bytes) -> Border:
    """Undo ``encode_border``; ``StoreCorrupt`` for anything else."""
    if len(value) != _ROW.size or value[0] != VERSION:
        raise StoreCorrupt(f"what the forwarder left has {len(value)} bytes instead of {_ROW.size}, or no version")
    _, store_number, is_settled = _ROW.unpack(value)
    return Border(store_number, is_settled)
