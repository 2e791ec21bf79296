"""Limits of access keys and addresses, set by operators: one row of the meta family.

limits     version 1 | JSON: a list of kind and name of the holder, quota, limit
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import NamedTuple

VERSION = 1
_VERSION = bytes((VERSION,))


class Limit(NamedTuple):
    """Limit of one quota for one holder: an access key or an address."""

    kind: str
    name: str
    quota: str
    limit: int


def encode_limits(limits: Iterable[Limit]) -> bytes:
    """Return the value of the limits row."""
    return _VERSION + json.dumps(list(limits)).encode()


def decode_limits(value: bytes) -> Iterator[Limit]:
    """Decode the limits row; raise ``ValueError`` if it is invalid."""
    if value[:1] != _VERSION:
        raise ValueError("the limits of keys and addresses are of an unknown version")
    for kind, name, quota, limit in json.loads(value[1:]):
        yield Limit(str(kind), str(name), quota, int(limit))
