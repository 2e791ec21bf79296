"""Message uids: UUID version 7, increasing within one process.

    unix time ms (48) | 0111 | counter, high 12 bits | 10 | counter, low 62 bits

The counter starts at a random value in each millisecond and grows by random steps within it, so uids of two processes
do not collide. The uids of one process sort in the order of creation, even if its clock stops or goes back.
"""

from __future__ import annotations

import os
import threading
from random import Random

_LOW_BITS = 62
_COUNTER_BITS = 12 + _LOW_BITS
_LOW_MASK = (1 << _LOW_BITS) - 1
_MS_MASK = (1 << 48) - 1
_START_BITS = 72  # a new counter leaves room for the steps within its millisecond
_STEP_BITS = 32


class UidSource:
    """Generates uids. Thread-safe. ``after_fork`` must be called in a child, or its first uids repeat those of its
    parent.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_ms = -1
        self._counter = 0
        self._seed()

    def _seed(self) -> None:
        # Not os.urandom for each uid: a system call allows another thread to run, which would then wait for this lock.
        self._bits = Random(os.urandom(32)).getrandbits

    def make(self, now_ms: int) -> bytes:
        """Return 16 bytes that are greater than all earlier ones."""
        with self._lock:
            if now_ms > self._last_ms:
                self._last_ms = now_ms
                self._counter = self._bits(_START_BITS)
            else:
                self._counter += 1 + self._bits(_STEP_BITS)
                if self._counter >> _COUNTER_BITS:
                    self._last_ms += 1
                    self._counter = self._bits(_START_BITS)
            at_ms, counter = self._last_ms, self._counter
        high = (at_ms & _MS_MASK) << 16 | 0x7000 | counter >> _LOW_BITS
        return (high << 64 | 0b10 << _LOW_BITS | counter & _LOW_MASK).to_bytes(16, "big")

    def after_fork(self) -> None:
        """Reset the source in a forked child: a new lock and a new random seed."""
        self._lock = threading.Lock()
        # It may be the parent's last millisecond, with another random counter: uids of two processes have no order.
        self._last_ms = -1
        self._seed()


_process_source = UidSource()
os.register_at_fork(after_in_child=_process_source.after_fork)


def make_uid(now_ms: int) -> bytes:
    """Return a new uid that is greater than all others of this process."""
    return _process_source.make(now_ms)


def time_of(uid: bytes) -> int:
    """Return the epoch milliseconds in ``uid``."""
    return int.from_bytes(uid[:6], "big")
