"""Identity of a store: a number and a secret that no copy of it shares.

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


class StorePlace(NamedTuple):
    """File identity of a directory's marker file. Zeros for a store in memory, and before the marker exists."""

    inode: int = 0
    changed_ns: int = 0

    @classmethod
    def of(cls, found: os.stat_result) -> StorePlace:
        """Return the identity of a file: its inode and change time. A copy differs: no program can set the change time.

        The device number is ignored, since some file systems get another one on each mount.
        """
        return cls(found.st_ino & _U64, found.st_ctime_ns & _U64)


class Identity(NamedTuple):
    """A store's number and secret, with the file identity of its marker when they were generated."""

    number: int
    secret: bytes
    place: StorePlace = StorePlace()

    def __repr__(self) -> str:
        """Return the number only, so that the secret never reaches a log."""
        return f"Identity({self.number:016x})"


def encode_identity(identity: Identity) -> bytes:
    """Return the value of the identity row."""
    return _ROW.pack(VERSION, identity.number, identity.secret, *identity.place)


def decode_identity(value: bytes) -> Identity:
    """Decode the value of the identity row; raise ``StoreCorrupt`` if it is invalid."""
    if len(value) != _ROW.size or value[0] != VERSION:
        raise StoreCorrupt(f"the identity of the store has {len(value)} bytes instead of {_ROW.size}, or no version")
    _, number, secret, *place = _ROW.unpack(value)
    return Identity(number, secret, StorePlace(*place))
