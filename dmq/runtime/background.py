"""Work in a process of its own that takes what nobody else wants of the processors, from its first import on.

    python -m dmq.runtime.background MODULE ARGUMENT...

Where others want all of them it hardly goes on: it is for what may take long, and not for what somebody waits for.
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
    """Return the command that runs a module so; its name and arguments are what it gets from ``python -m``."""
    return [sys.executable, "-m", "dmq.runtime.background", module, *map(str, arguments)]


def die_with_parent() -> None:
    """Have this process killed when its parent ends, whatever ends that: on Linux; elsewhere what it reads ends.

    At once: a process of low priority may live on for seconds on a busy machine, and write where the next run has
    cleaned up. The parent is the thread that started it.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)


def end_with_stdin() -> None:
    """Have this process end when its stdin does, whatever it does then: its parent is gone, or wants it no more."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):  # not through a buffer: its lock would be held when the process ends
            pass
        os._exit(1)

    threading.Thread(target=wait, name="dmq-stdin", daemon=True).start()


if __name__ == "__main__":
    os.nice(_NICE)
    if sys.platform == "linux":  # a process that is only nice still takes turns from those that wake up
        with suppress(OSError):  # a sandbox may not know of it, or not allow it
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
