"""Results of the worker process, as it writes them to its stdout."""

from __future__ import annotations

import msgspec

UNAVAILABLE = 3  # exit code if the object store was not reachable


class Verified(msgspec.Struct, frozen=True):
    """Result of a verification: the base, and the size of the restored store."""

    base: str
    size_bytes: int


class Pruned(msgspec.Struct, frozen=True):
    """Number of removed objects."""

    objects: int
