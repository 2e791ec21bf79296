"""Long polls at the proxies of a cluster, shared by the receives of one consumer with equal parameters.

A proxy sees only the messages of its own broker. A receive of any queue that polls one proxy would wait there while
another broker has messages. So ``Polls`` polls one proxy first, then all others if the first has no message at once.
The first poll with messages answers the receive.

A poll is not cancelled when another one is faster or its receive ends. The broker continues a cancelled poll, and its
next message then comes three seconds late (RocketMQ 5.5.0). An unneeded poll runs to its end for the next receive. Its
messages are cached for a while; unclaimed ones are released at no cost of an attempt.

    polls       at most one at each proxy, or as many as there are pending receives, if that is more
    kept        batches of as many polls, for at most a quarter of their invisible duration
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from broker_adapter.contracts.errors import Refused
from broker_adapter.contracts.message import Delivery
from broker_adapter.runtime.clock import Clock

_SPREAD_S = 0.05  # a proxy with messages answers sooner; batches of other proxies would have to be cached
_MARGIN_S = 0.5  # added to the wait of a receive, so that its polls end first
_AGAIN_S = 1.0  # pause before another poll at a proxy without messages
_LEFT_MAX = 8  # polls that continue with fewer pending receives
_KEPT_SHARE = 4
_KEPT_MS_MAX = 15_000


class PollBatch(NamedTuple):
    """Messages of one poll."""

    deliveries: Sequence[Delivery]
    came_s: float  # monotonic; the invisible durations began no later


Poll = Callable[[str, int], Awaitable[PollBatch]]  # (address of the proxy, duration in ms)
GiveBack = Callable[[Sequence[Delivery]], Awaitable[object]]


class Polls:
    """Polls for all receives of one consumer with equal parameters. Belongs to the event loop."""

    def __init__(self, poll: Poll, give_back: GiveBack, is_isolated: Callable[[str], bool], clock: Clock) -> None:
        self._poll = poll
        self._give_back = give_back
        self._is_isolated = is_isolated
        self._clock = clock
        self._addresses: Sequence[str] = ()
        self._wait_ms = 0
        self._turn = random.randrange(1 << 16)
        self._waiting: deque[asyncio.Future[PollBatch | None]] = deque()
        self._polls: dict[asyncio.Task[PollBatch], str] = {}
        self._nothing_s: dict[str, float] = {}  # time of the last poll without a message
        self._kept: deque[PollBatch] = deque()
        self._giving_back: set[asyncio.Future[object]] = set()
        self._spreads: asyncio.TimerHandle | None = None
        self._expires: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """True if there is no pending receive, poll or release, and no cached batch."""
        return not (self._waiting or self._polls or self._kept or self._giving_back)

    @property
    def is_awaited(self) -> bool:
        """True if a receive is pending."""
        return bool(self._waiting)

    async def receive(self, addresses: Sequence[str], wait_ms: int) -> Sequence[Delivery]:
        """Return the messages of one poll at any of the proxies, or none after ``wait_ms``.

        Raise the error of the last poll if no other poll is left, or a refusal at once.
        """
        self._addresses, self._wait_ms = addresses, wait_ms
        while self._kept:
            batch = self._kept.popleft()
            if self._is_good(batch):
                return self._reckoned(batch)
            self._return(batch)
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[PollBatch | None] = loop.create_future()
        self._waiting.append(waiter)
        self._ask_one()
        if self._spreads is None:
            self._spreads = loop.call_later(_SPREAD_S, self._spread)
        ends = loop.call_later(wait_ms / 1000 + _MARGIN_S, _end, waiter)
        try:
            found = await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled() and waiter.exception() is None and (late := waiter.result()) is not None:
                self._came(late)
            raise
        finally:
            ends.cancel()
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            self._leave()
        return self._reckoned(found) if found is not None else ()

    def stop(self) -> None:
        """Cancel all polls."""
        for task in self._polls:
            task.cancel()

    async def close(self) -> None:
        """End all receives and polls, and release cached messages."""
        for waiter in self._waiting:
            _end(waiter)
        for timer in (self._spreads, self._expires):
            if timer is not None:
                timer.cancel()
        self._spreads = self._expires = None
        polls = list(self._polls)
        self.stop()
        await asyncio.gather(*polls, return_exceptions=True)
        while self._kept:
            self._return(self._kept.popleft())
        await asyncio.gather(*self._giving_back, return_exceptions=True)

    # -- polls --------------------------------------------------------------------------------------------------------

    def _well(self) -> Sequence[str]:
        return [each for each in self._addresses if not self._is_isolated(each)] or self._addresses

    def _ask_one(self) -> None:
        """Start a poll at one proxy without a poll, or at any if there are more receives than polls."""
        well, asked = self._well(), set(self._polls.values())
        unasked = [each for each in well if each not in asked]
        if unasked or len(self._polls) < len(self._waiting):
            self._turn += 1
            candidates = unasked or well
            self._ask(candidates[self._turn % len(candidates)])

    def _ask(self, address: str) -> None:
        async def poll() -> PollBatch:
            return await self._poll(address, self._wait_ms)

        task = asyncio.get_running_loop().create_task(poll())
        self._polls[task] = address
        task.add_done_callback(self._ended)

    def _ask_others(self) -> None:
        """Start polls at all proxies without a poll, except those that returned no message within the last second."""
        asked, since_s = set(self._polls.values()), self._clock.monotonic_s() - _AGAIN_S
        for address in self._addresses:
            is_quiet = self._nothing_s.get(address, since_s) > since_s
            if address not in asked and not is_quiet and not self._is_isolated(address):
                self._ask(address)

    def _spread(self) -> None:
        self._spreads = None
        if self._waiting:
            self._ask_others()
            self._spreads = asyncio.get_running_loop().call_later(_AGAIN_S, self._spread)

    def _leave(self) -> None:
        """Cancel surplus polls of receives that ended, except a few."""
        surplus = len(self._polls) - max(len(self._waiting), len(self._addresses), _LEFT_MAX)
        for task in list(self._polls)[: max(0, surplus)]:
            task.cancel()

    def _ended(self, task: asyncio.Task[PollBatch]) -> None:
        address = self._polls.pop(task)
        error = None if task.cancelled() else task.exception()
        if not task.cancelled() and error is None and task.result().deliveries:
            self._nothing_s.pop(address, None)
            self._came(task.result())
            if self._waiting:
                self._ask_one()
            return
        if task.cancelled():
            return
        self._nothing_s[address] = self._clock.monotonic_s()
        if not self._polls and self._waiting:
            self._ask_others()
        if self._polls and not isinstance(error, Refused):
            return  # other polls may still return messages
        while self._waiting:
            waiter = self._waiting.popleft()
            if error is None:
                _end(waiter)
            elif not waiter.done():
                waiter.set_exception(error)

    # -- batches ------------------------------------------------------------------------------------------------------

    def _came(self, batch: PollBatch) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(batch)
                return
        self._kept.append(batch)
        if self._expires is None:
            self._expire_later()

    def _expire_later(self) -> None:
        left_s = min(self._left_s(each) for each in self._kept)
        self._expires = asyncio.get_running_loop().call_later(max(0.0, left_s), self._expire)

    def _expire(self) -> None:
        self._expires = None
        for batch in [each for each in self._kept if not self._is_good(each)]:
            self._kept.remove(batch)
            self._return(batch)
        if self._kept:
            self._expire_later()

    def _left_s(self, batch: PollBatch) -> float:
        """Remaining cache time of a batch, in seconds."""
        kept_ms = min(batch.deliveries[0].invisible_ms // _KEPT_SHARE, _KEPT_MS_MAX)
        return batch.came_s + kept_ms / 1000 - self._clock.monotonic_s()

    def _is_good(self, batch: PollBatch) -> bool:
        return self._left_s(batch) > 0

    def _reckoned(self, batch: PollBatch) -> Sequence[Delivery]:
        """Return deliveries with the remaining part of their invisible durations."""
        age_ms = int((self._clock.monotonic_s() - batch.came_s) * 1000)
        if not age_ms:
            return batch.deliveries
        return [each._replace(invisible_ms=max(0, each.invisible_ms - age_ms)) for each in batch.deliveries]

    def _return(self, batch: PollBatch) -> None:
        returning = asyncio.ensure_future(self._give_back(batch.deliveries))
        self._giving_back.add(returning)
        returning.add_done_callback(self._returned)

    def _returned(self, returning: asyncio.Future[object]) -> None:
        self._giving_back.discard(returning)
        if not returning.cancelled():
            returning.exception()  # the expiry of the lease also releases it


def _end(waiter: asyncio.Future[PollBatch | None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
