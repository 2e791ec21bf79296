"""Processes of a daemon: their activity, and their use of processor and memory."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

STORE_PROCESS: Final = "store"  # name of the store process; see ``front_name`` for fronts

_STATM: Final = Path("/proc/self/statm")  # of Linux, in pages


class Usage(NamedTuple):
    """Resources of a process: processor seconds since its start, and current resident memory."""

    cpu_s: float = 0.0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """One process of a daemon; fields as in ``admin_v1.proto``. A figure that is not reported yet is 0."""

    name: str
    pid: int = 0
    state: Literal["starting", "serving", "ended"] = "serving"
    connections: int | None = 0
    streams: int | None = 0
    cpu_s: float = 0.0
    memory_bytes: int = 0
    starts: int = 1
    last_end: str = ""


def front_name(number: int) -> str:
    """Return the name of a front in logs, metrics and commands."""
    return f"front-{number}"


def usage() -> Usage:
    """Return the usage of this process. If the current resident memory is unavailable, return its maximum."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(used.ru_utime + used.ru_stime, _resident_bytes(used.ru_maxrss))


def store_process(connections: int | None = 0, streams: int | None = 0) -> ProcessStatus:
    """Return the status of the store process, which is this one, with the client connections that it serves itself.

    None: its transport does not report them.
    """
    cpu_s, memory_bytes = usage()
    return ProcessStatus(
        name=STORE_PROCESS,
        pid=os.getpid(),
        connections=connections,
        streams=streams,
        cpu_s=cpu_s,
        memory_bytes=memory_bytes,
    )


def _resident_bytes(most: int) -> int:
    try:
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return most if sys.platform == "darwin" else most * 1024
