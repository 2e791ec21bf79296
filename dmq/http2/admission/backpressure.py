"""Back pressure: while a server is busy, it does not read from heavy senders, and afterwards resumes them in turn.

Excess requests then wait at their sender. To refuse a request costs almost as much as to serve it. A server under twice
its maximum load would serve only half of that maximum.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

MUCH: Final = 64  # calls of one client in flight; consumers and small producers have fewer


class ReadControl(Protocol):
    """A client whose reading can be paused."""

    def pause(self) -> None:
        """Stop reading until ``resume``."""
        ...

    def resume(self) -> None:
        """Resume reading."""
        ...


class Backpressure:
    """The heavy senders, divided into those being read and those paused. The event loop owns the object."""

    def __init__(self, is_busy: Callable[[], bool], is_full: Callable[[], bool] = lambda: False) -> None:
        """While ``is_full`` returns True, every client is paused after its next read."""
        self._is_busy = is_busy
        self._is_full = is_full
        self._reading: dict[ReadControl, None] = {}  # heavy senders that are being read
        self._waiting: dict[ReadControl, None] = {}  # paused longest first
        self._is_resuming = False

    def heard(self, client: ReadControl, in_flight: int) -> None:
        """Process a read from a client that now has ``in_flight`` calls."""
        if self._is_full() and client not in self._waiting:
            self._reading.pop(client, None)
            self._waiting[client] = None
            client.pause()
            return
        if not self._is_busy():
            return
        if in_flight >= MUCH and client not in self._waiting:
            self._reading[client] = None
        for each in self._reading:
            each.pause()
            self._waiting[each] = None
        self._reading.clear()

    def go_on(self) -> None:
        """Resume paused clients one at a time until the server is busy again; called when its load is low."""
        if not self._is_resuming:
            self._is_resuming = True
            self._resume_next()

    def left(self, client: ReadControl) -> None:
        """Remove a client."""
        self._reading.pop(client, None)
        self._waiting.pop(client, None)

    def _resume_next(self) -> None:
        if not self._waiting or self._is_busy() or self._is_full():
            self._is_resuming = False
            return
        client = next(iter(self._waiting))
        del self._waiting[client]
        self._reading[client] = None
        client.resume()
        # in the next loop iteration, after a read from this client: that may already use all the room
        asyncio.get_running_loop().call_soon(self._resume_next)
