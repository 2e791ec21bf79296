"""Input in slices: one slice of one client in each turn of the loop, and those who cost much wait between theirs.

Two queues, so that a client whose input waits since it is much is not kept waiting by those whose input is slow.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol

_PAUSE_S: Final = 0.001  # between two that wait for a pause, at least; timers of uvloop have whole milliseconds


class Sliced(Protocol):
    """One client, whose input waits."""

    def read_on(self) -> None:
        """Read the next slice, and ``wait`` again if there is more."""
        ...


class Slices:
    """Whose input is read on next. Belongs to the event loop."""

    def __init__(self) -> None:
        self._soon: deque[Sliced] = deque()
        self._later: deque[Sliced] = deque()
        self._is_soon_due = self._is_later_due = False

    def wait(self, client: Sliced, pause_s: float) -> None:
        """Have a client read on in its turn: at once, or when the others of its kind and it have paused."""
        if pause_s:
            self._later.append(client)
            self._pause(pause_s)
        else:
            self._soon.append(client)
            self._hurry()

    def _hurry(self) -> None:
        if not self._is_soon_due:
            self._is_soon_due = True
            asyncio.get_running_loop().call_soon(self._read_soon)

    def _pause(self, pause_s: float) -> None:
        if not self._is_later_due:
            self._is_later_due = True
            asyncio.get_running_loop().call_later(max(pause_s, _PAUSE_S), self._read_later)

    def _read_soon(self) -> None:
        self._is_soon_due = False
        try:
            self._soon.popleft().read_on()
        finally:  # whatever one client does: the others are read on
            if self._soon:
                self._hurry()

    def _read_later(self) -> None:
        self._is_later_due = False
        try:
            self._later.popleft().read_on()
        finally:
            if self._later:
                self._pause(_PAUSE_S)
