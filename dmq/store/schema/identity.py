"""Who a store is: a number and a secret, which no copy of it has.

identity   version 1 | number 8 | secret 32 | inode 8 | changed_ns 8      a row of the meta family
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from dmq.errors import StoreCorrupt

VERSION = 1
SECRET_BYTES = 32
_ROW = struct.Struct(">BQ32sQQ")
_U64 = 2**64 - 1


class Place(NamedTuple):
    """Which file the marker of a directory is; zeros for a store in memory, and before there is a marker."""

    inode: int = 0
    changed_ns: int = 0

    @classmethod
    def of(cls, found: os.stat_result) -> Place:
        """Return that of a file. A copy of a file has another time of its last change, which nobody can set.

        The number of its device says nothing: some file systems are given another one each time they are mounted.
        """
        return cls(found.st_ino & _U64, found.st_ctime_ns & _U64)


class Identity(NamedTuple):
    """A store's number, its secret, and the marker beside which they were drawn."""

    number: int
    secret: bytes
    place: Place = Place()

    def __repr__(self) -> str:
        """Name the number alone."""
        return f"Identity({self.number:016x})"


def encode_identity(identity: Identity) -> bytes:
    """Encode the row."""
    return _ROW.pack(VERSION, identity.number, identity.secret, *identity.place)


def decode_identity(value: bytes) -> Identity:
    """Undo ``encode_identity``; ``StoreCorrupt`` for anything else."""
    if len(value) != _ROW.size or value[0] != VERSION:
        raise StoreCorrupt(f"the identity of the store has {len(value)} bytes instead of {_ROW.size}, or no version")
    _, number, secret, *place = _ROW.unpack(value)
    return Identity(number, secret, Place(*place))
