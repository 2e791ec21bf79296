"""Back pressure: while a server is busy, clients that send much are not read from, and take turns afterwards.

What is too much then waits with its sender. Refusing it would cost most of what serving it costs, and a server that is
offered twice what it can do would do half of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

MUCH: Final = 64  # calls of one client in flight; consumers and small producers have fewer


class Reader(Protocol):
    """One client, as it is read from."""

    def pause(self) -> None:
        """Read nothing until ``resume``."""
        ...

    def resume(self) -> None:
        """Read on."""
        ...


class Backpressure:
    """Who of the clients that send much is read from, and who waits. Belongs to the event loop."""

    def __init__(self, is_busy: Callable[[], bool], is_full: Callable[[], bool] = lambda: False) -> None:
        """While ``is_full`` says so, everybody waits who was read from."""
        self._is_busy = is_busy
        self._is_full = is_full
        self._reading: dict[Reader, None] = {}  # of those that had much in flight when it was too much
        self._waiting: dict[Reader, None] = {}  # who waits longest comes first
        self._is_resuming = False

    def heard(self, client: Reader, in_flight: int) -> None:
        """Something was read from a client that now has so many calls in flight."""
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
        """The server is far from busy: read on, from one client after the other, until it is busy again."""
        if not self._is_resuming:
            self._is_resuming = True
            self._resume_next()

    def left(self, client: Reader) -> None:
        """Forget a client."""
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
        # in the loop's next turn, when it has been read from: a read may be all there is room for
        asyncio.get_running_loop().call_soon(self._resume_next)
