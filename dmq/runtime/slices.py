"""Work of the event loop that a client can make long: others have their turns in between, and half of the time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final, TypeVar

from broker_adapter.runtime.clock import Clock, SystemClock

SLICE_S: Final = 0.002
_REST_S_MAX: Final = 0.1  # work seems to have taken longer where the process was stopped in the middle of it
_now_s = SystemClock().monotonic_s
_Made = TypeVar("_Made")
_Each = TypeVar("_Each")


class Slices:
    """Does pieces of work one after the other, in the order they were asked for. Belongs to the event loop.

    Behind every ``SLICE_S`` of it, it rests: for as long as the work took that went on beyond that, a tenth of a second
    at most. So pieces should be no longer than a slice, as far as their makers can see to it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left_s = SLICE_S
        self._is_resting = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def do(self, work: Callable[[], _Made]) -> _Made:
        """Return what ``work`` does, or raise what it raises: at once, if there is nothing before it."""
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
    """Yield what there is to one who works on each; behind every ``SLICE_S`` of that others have as long."""
    until_s = _now_s() + SLICE_S
    for each in found:
        yield each
        if _now_s() >= until_s:
            await asyncio.sleep(SLICE_S)
            until_s = _now_s() + SLICE_S
