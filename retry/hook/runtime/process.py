"""Forks, signals and the end of the process, for all live hooks.

A forked child has the parent's objects and none of its threads. Locks may be held there for ever, and the sink belongs
to the parent. So each hook creates new locks in the child and keeps no messages from then on.
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

# Time after the close timeout of a hook to log that it was exceeded.
_SLACK_S = 0.1
_REAL = SystemClock()


class ForkAware(Protocol):
    """Object that is reset after a fork and closed at the end of the process."""

    def after_fork(self) -> None:
        """Reset the state in a forked child, before any other code runs there."""
        ...

    @property
    def close_timeout_s(self) -> float:
        """Time limit of ``close_at_exit``, in seconds."""
        ...

    def begin_nothing(self) -> None:
        """Start no new work; called on all objects before the first of them is closed."""
        ...

    def close_at_exit(self, timeout_s: float) -> None:
        """Close at the end of the process."""
        ...

    def __hash__(self) -> int: ...


_guarded: WeakSet[ForkAware] = WeakSet()
_started: set[ForkAware] = set()  # their threads run even if no other reference to them is left
_is_registered = False


def guard(one: ForkAware) -> None:
    """Guard ``one`` for as long as it is alive. The process-wide handlers are registered once."""
    global _is_registered  # noqa: PLW0603 - one process, one registration
    if not _is_registered:
        _is_registered = True
        os.register_at_fork(after_in_child=_after_fork)
        atexit.register(_close_all)
    _guarded.add(one)


def keep_alive(one: ForkAware) -> None:
    """Keep a reference to ``one`` until it is released: it has threads, and must be closed at exit."""
    _started.add(one)


def release(one: ForkAware) -> None:
    """Drop the reference to ``one`` after it was closed."""
    _started.discard(one)


def close_on_sigterm(one: ForkAware, timeout_s: float) -> None:
    """Close ``one`` on SIGTERM, then continue with the previous handler. Only the main thread may call this."""
    previous = signal.getsignal(signal.SIGTERM)

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        # Close in a thread: the main thread may hold a lock that closing needs, so its wait here is limited.
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
    """Close all hooks within the longest of their timeouts: their running handlers end in parallel."""
    began_s = _REAL.monotonic_s()
    ending = list(_guarded)
    for one in ending:
        one.begin_nothing()
    for one in ending:
        one.close_at_exit(max(0.0, one.close_timeout_s - (_REAL.monotonic_s() - began_s)))
