"""The processes of a daemon: what each is doing, and what it takes of the machine."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

STORE_PROCESS: Final = "store"  # the name of the process that has the store; of a front see ``front_name``

_STATM: Final = Path("/proc/self/statm")  # of Linux, in pages


class Usage(NamedTuple):
    """What a process takes: seconds of a processor since it began, and resident memory now."""

    cpu_s: float = 0.0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """One process of a daemon; fields as in ``admin_v1.proto``. What a process has not said yet is 0."""

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
    """Return what a front is called in logs, figures and commands."""
    return f"front-{number}"


def usage() -> Usage:
    """Return what this process takes. Where nobody tells what is resident now, it is the most that ever was."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(used.ru_utime + used.ru_stime, _resident_bytes(used.ru_maxrss))


def store_process(connections: int | None = 0, streams: int | None = 0) -> ProcessStatus:
    """Return the process that has the store, which is this one, with the clients' connections that it serves itself.

    ``None``: its transport does not tell.
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
