"""Threads, event loops, forks and signals of the hook, and its log.

Imports: nothing else of the hook. Interface: daemon threads, event loops, the guard of live hooks, the log.
"""

from __future__ import annotations

from retry.hook.runtime.logs import HookLog
from retry.hook.runtime.loops import LoopEnded, Loops, failure_of
from retry.hook.runtime.process import close_on_sigterm, guard, keep_alive, release
from retry.hook.runtime.threads import DaemonThreads

__all__ = [
    "DaemonThreads",
    "HookLog",
    "LoopEnded",
    "Loops",
    "close_on_sigterm",
    "failure_of",
    "guard",
    "keep_alive",
    "release",
]
