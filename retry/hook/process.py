"""Forks, signals and the end of the process, for all hooks that are alive.

A child of a fork has the parent's objects and none of its threads. Locks may be held there for ever, and the sink
belongs to the parent: so each hook makes its locks anew and keeps nothing from then on.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from types import FrameType
from typing import Protocol
from weakref import WeakSet

from broker_adapter.runtime.clock import SystemClock

# Beyond its time a hook closes no more, and this is for telling so.
_SLACK_S = 0.1
_REAL = SystemClock()


class Guarded(Protocol):
    """What the process looks after."""

    def after_fork(self) -> None:
        """Called in a child, before anything else runs there."""
        ...

    @property
    def close_timeout_s(self) -> float:
        """How long that may take."""
        ...

    def begin_nothing(self) -> None:
        """Called before the first of several is closed."""
        ...

    def close_at_exit(self, timeout_s: float) -> None:
        """Called when the process ends."""
        ...

    def __hash__(self) -> int: ...


_guarded: WeakSet[Guarded] = WeakSet()
_started: set[Guarded] = set()  # their threads work on, though nobody else may know them any more
_is_registered = False


def guard(one: Guarded) -> None:
    """Look after ``one`` for as long as it is alive. The hooks into the process are set once."""
    global _is_registered  # noqa: PLW0603 - one process, one registration
    if not _is_registered:
        _is_registered = True
        os.register_at_fork(after_in_child=_after_fork)
        atexit.register(_close_all)
    _guarded.add(one)


def keep_alive(one: Guarded) -> None:
    """Keep ``one`` until it is released: it has threads, and is to be closed when the process ends."""
    _started.add(one)


def release(one: Guarded) -> None:
    """Let ``one`` go: it is closed."""
    _started.discard(one)


def close_on_sigterm(one: Guarded, timeout_s: float) -> None:
    """On SIGTERM close ``one``, then do what the process would have done. Only the main thread may call this."""
    previous = signal.getsignal(signal.SIGTERM)

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        # In a thread: the main one may be inside a lock that closing needs, so it waits here only for so long.
        closing = threading.Thread(target=one.close_at_exit, args=(timeout_s,), name="retry-close", daemon=True)
        closing.start()
        closing.join(timeout_s + _SLACK_S)
        if callable(previous):
            previous(number, frame)
        elif previous is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, on_sigterm)


def _after_fork() -> None:
    for one in list(_guarded):
        one.after_fork()


def _close_all() -> None:
    """Close all within the longest time that one of them was given: their handlers end beside each other."""
    began_s = _REAL.monotonic_s()
    ending = list(_guarded)
    for one in ending:
        one.begin_nothing()
    for one in ending:
        one.close_at_exit(max(0.0, one.close_timeout_s - (_REAL.monotonic_s() - began_s)))
