"""How many files and sockets the daemon may have open, and which part of it has how many."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Final

# Logs, trail, snapshots, the metrics port, the loop's own; and what RocksDB opens beside its tables.
_OTHERS: Final = 128
_TABLES_MAX: Final = 512
_TABLES_MIN: Final = 64
_CONNECTIONS_MAX: Final = 4096
_CONNECTIONS_MIN: Final = 16


@dataclass(frozen=True, slots=True)
class Descriptors:
    """The limit of the process, and the parts that tables of RocksDB and connections of clients may take of it."""

    limit: int
    tables: int
    connections: int


def share(limit: int, connections: int | None) -> Descriptors:
    """Divide ``limit`` descriptors. ``connections`` is what the operator asks for: they get no more than there are."""
    tables = min(_TABLES_MAX, max(_TABLES_MIN, limit // 4))
    room = max(_CONNECTIONS_MIN, limit - tables - _OTHERS)
    return Descriptors(limit, tables, min(room, _CONNECTIONS_MAX if connections is None else connections))


def raise_limit() -> int:
    """Raise the soft limit of this process to the hard one, and return what it now may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # some systems allow less than they say
        return soft if soft != resource.RLIM_INFINITY else 2**20
    return hard if hard != resource.RLIM_INFINITY else 2**20
