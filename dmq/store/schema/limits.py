"""The limits of keys and addresses that operators set: one row of the meta family.

limits     version 1 | JSON: a list of kind and name of the holder, quota, limit
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import NamedTuple

VERSION = 1
_VERSION = bytes((VERSION,))


class Limit(NamedTuple):
    """What one holder, a key or an address, may have of something."""

    kind: str
    name: str
    quota: str
    limit: int


def encode_limits(limits: Iterable[Limit]) -> bytes:
    """Encode the limits that are set."""
    return _VERSION + json.dumps(list(limits)).encode()


def decode_limits(value: bytes) -> Iterator[Limit]:
    """Undo ``encode_limits``; raises ``ValueError`` if it cannot be one."""
    if value[:1] != _VERSION:
        raise ValueError("the limits of keys and addresses are of an unknown version")
    for kind, name, quota, limit in json.loads(value[1:]):
        yield Limit(str(kind), str(name), quota, int(limit))
