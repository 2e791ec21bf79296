"""Clock of the daemon's host, and the RPCs about it."""

from __future__ import annotations

import asyncio

from broker_adapter.contracts.errors import BrokerUnavailable, Refused, Rule
from dmq.admin import admin_v1 as wire
from dmq.store import Store

WHY_CHARS_MAX = 200
_LOOK_S = 0.01
_RECORDED_S_MAX = 30.0


class ClockCalls:
    """RPCs of the clock. Raise ``Refused`` for invalid input; exceptions of the store pass through."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def get_clock(self, _request: wire.GetClockRequest) -> wire.GetClockResponse:
        """Return the clock state."""
        return wire.GetClockResponse(clock=clock_of(self._store))

    async def accept_clock(self, request: wire.AcceptClockRequest) -> wire.AcceptClockResponse:
        """Trust the clock from now on."""
        why = request.why.strip()
        if len(why) > WHY_CHARS_MAX or not why.isprintable():
            text = f"the reason may have up to {WHY_CHARS_MAX} printable characters"
            raise Refused(Rule.REQUEST, text, value=request.why[: WHY_CHARS_MAX + 1])
        has_changed = await _accept(self._store, why)
        return wire.AcceptClockResponse(has_changed=has_changed, clock=clock_of(self._store))


async def _accept(store: Store, why: str) -> bool:
    """Trust the clock from now on, durable on return; return True if that changed anything.

    The scheduler's thread records events of the clock.
    """
    clock = store.clock
    has_changed = clock.accept(why)
    store.marks.wake()
    try:
        async with asyncio.timeout(_RECORDED_S_MAX):
            while clock.has_news:  # noqa: ASYNC110 - the scheduler's thread has no event for it
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise BrokerUnavailable("the clock is accepted, but this is not recorded yet; repeat the call") from None
    return has_changed


def clock_of(store: Store) -> wire.Clock:
    """Return the clock state of a store."""
    return wire.Clock(**store.clock.status()._asdict())
