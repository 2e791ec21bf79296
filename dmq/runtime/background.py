"""Background work in a separate process that uses only idle processor time, starting with its first import.

    python -m dmq.runtime.background MODULE ARGUMENT...

On a busy machine it makes almost no progress. It is for work that may take long, and not for work that a caller waits
for.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
from contextlib import suppress

_NICE = 19
_SET_PDEATHSIG = 1  # of Linux's prctl


def background(module: str, *arguments: object) -> list[str]:
    """Return the command that runs a module in the background, with its name and arguments as of ``python -m``."""
    return [sys.executable, "-m", "dmq.runtime.background", module, *map(str, arguments)]


def die_with_parent(parent_pid: int | None = None) -> None:
    """Kill this process when its parent ends, for any reason. On Linux only; elsewhere its stdin ends.

    It is killed at once: a process of low priority may live on for seconds on a busy machine. It could then write to
    files that the next run has cleaned up. The parent is the thread that started it. ``parent_pid`` is for a process
    without a pipe of its parent, which could have ended before this call.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid() if parent_pid is None else parent_pid
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def end_with_stdin() -> None:
    """Exit this process when its stdin ends, at any point of its work: its parent is gone or has cancelled it."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):  # not through a buffer: its lock would be held when the process ends
            pass
        os._exit(1)

    threading.Thread(target=wait, name="dmq-stdin", daemon=True).start()


if __name__ == "__main__":
    os.nice(_NICE)
    if sys.platform == "linux":  # a process that is only nice still competes with those that wake up
        with suppress(OSError):  # a sandbox may not support or allow it
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
