"""Scheduling of input: one slice of one client per loop iteration, with pauses between expensive slices.

There are two queues, so that a client with much input is not delayed by clients with slow input.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol

_PAUSE_S: Final = 0.001  # minimum between two paused clients; uvloop's timers have a resolution of 1 ms


class Sliced(Protocol):
    """A client with buffered input."""

    def read_on(self) -> None:
        """Read the next slice, and call ``InputSlices.wait`` again if there is more."""
        ...


class InputSlices:
    """The queues of clients with buffered input. The event loop owns the object."""

    def __init__(self) -> None:
        self._soon: deque[Sliced] = deque()
        self._later: deque[Sliced] = deque()
        self._is_soon_due = self._is_later_due = False

    def wait(self, client: Sliced, pause_s: float) -> None:
        """Schedule a client's next slice: in its turn without a delay, or in its turn after a pause."""
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
        finally:  # an exception of one client must not stop the others
            if self._soon:
                self._hurry()

    def _read_later(self) -> None:
        self._is_later_due = False
        try:
            self._later.popleft().read_on()
        finally:
            if self._later:
                self._pause(_PAUSE_S)
