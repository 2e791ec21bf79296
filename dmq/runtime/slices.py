"""Time slices for long work of clients on the event loop: other tasks run in between, for half of the time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final, TypeVar

from broker_adapter.runtime.clock import Clock, SystemClock

SLICE_S: Final = 0.002
_REST_S_MAX: Final = 0.1  # bounded, because work seems longer if the process was suspended meanwhile
_now_s = SystemClock().monotonic_s
_Made = TypeVar("_Made")
_Each = TypeVar("_Each")


class Slices:
    """Queue that runs pieces of work in order of submission. Owned by the event loop.

    After each ``SLICE_S`` of work it pauses for as long as the last piece exceeded the slice, at most a tenth of a
    second. So callers should keep pieces shorter than a slice.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left_s = SLICE_S
        self._is_resting = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def do(self, work: Callable[[], _Made]) -> _Made:
        """Return the result of ``work``, or raise its exception. It runs at once if no other work is queued."""
        if self._is_resting or self._waiting:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._next()  # it was this one's turn
                raise
        began_s = self._clock.monotonic_s()
        try:
            return work()
        finally:
            self._left_s -= self._clock.monotonic_s() - began_s
            if self._left_s > 0:
                self._next()
            elif not self._is_resting:
                self._is_resting = True
                asyncio.get_running_loop().call_later(min(-self._left_s, _REST_S_MAX), self._go_on)

    def _go_on(self) -> None:
        self._is_resting = False
        self._left_s = SLICE_S
        self._next()

    def _next(self) -> None:
        while self._waiting and not self._is_resting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return


async def in_slices(found: Iterable[_Each]) -> AsyncIterator[_Each]:
    """Yield the items to a caller that processes each; after every ``SLICE_S``, sleep for ``SLICE_S`` for other
    tasks.
    """
    until_s = _now_s() + SLICE_S
    for each in found:
        yield each
        if _now_s() >= until_s:
            await asyncio.sleep(SLICE_S)
            until_s = _now_s() + SLICE_S
