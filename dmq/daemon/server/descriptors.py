"""Limits of open files and sockets, and their division among the parts of the daemon."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Final

import structlog

from dmq.config.settings import DaemonConfig

# Logs, trail, snapshots, the metrics port, the event loop; and RocksDB files other than tables.
_OTHERS: Final = 128
_TABLES_MAX: Final = 512
_TABLES_MIN: Final = 64
_CONNECTIONS_MAX: Final = 4096
_CONNECTIONS_MIN: Final = 16

log = structlog.get_logger("dmq.daemon")


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Descriptor limit of the process, with the shares for RocksDB tables and client connections."""

    limit: int
    tables: int
    connections: int


def descriptors_of(config: DaemonConfig) -> Descriptors:
    """Raise the limit of this process as far as allowed, log it, and divide it."""
    parts = share(_raise_limit(), config.connections_max)
    log.info("descriptor_limits", limit=parts.limit, tables_max=parts.tables, connections_max=parts.connections)
    return parts


def share(limit: int, connections: int | None) -> Descriptors:
    """Divide ``limit`` descriptors. ``connections`` is the requested number, reduced to the available one."""
    tables = min(_TABLES_MAX, max(_TABLES_MIN, limit // 4))
    room = max(_CONNECTIONS_MIN, limit - tables - _OTHERS)
    return Descriptors(limit, tables, min(room, _CONNECTIONS_MAX if connections is None else connections))


def _raise_limit() -> int:
    """Raise the soft limit of this process to the hard one, and return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # some systems allow less than their hard limit
        return soft if soft != resource.RLIM_INFINITY else 2**20
    return hard if hard != resource.RLIM_INFINITY else 2**20
