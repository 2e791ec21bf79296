"""Forwarding state left for the next run: whether the trail accounts for every message that the cluster may have.

border   version 1 | number of the store 8 | is_settled 1      a row of the meta family
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from dmq.errors import StoreCorrupt

VERSION = 1
_ROW = struct.Struct(">BQ?")


class Border(NamedTuple):
    """Marker of unfinished forwarding.

    A run writes it unsettled before its first send. It is settled by a shutdown that leaves no message in doubt.
    """

    store_number: int  # of the store that wrote it: a copy has another number
    is_settled: bool


def encode_border(border: Border) -> bytes:
    """Return the value of the border row."""
    return _ROW.pack(VERSION, *border)


def decode_border(value: bytes) -> Border:
    """Decode the value of the border row; raise ``StoreCorrupt`` if it is invalid."""
    if len(value) != _ROW.size or value[0] != VERSION:
        raise StoreCorrupt(f"what the forwarder left has {len(value)} bytes instead of {_ROW.size}, or no version")
    _, store_number, is_settled = _ROW.unpack(value)
    return Border(store_number, is_settled)
