"""The clock of the daemon's host, for operators: fits ``ClockSource``."""

from __future__ import annotations

import asyncio

from broker_adapter.errors import BrokerUnavailable
from dmq.admin.source import ClockState
from dmq.store.store import Store

_LOOK_S = 0.01
_RECORDED_S_MAX = 30.0


class Clocks:
    """Belongs to the event loop; what happens to the clock is recorded in the scheduler's thread."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def clock(self) -> ClockState:
        """Say how the clock is."""
        return clock_of(self._store)

    async def accept(self, why: str) -> bool:
        """Believe the clock from here on, durable on return; say whether that changed anything."""
        clock = self._store.clock
        has_changed = clock.accept(why)
        self._store.marks.wake()
        try:
            async with asyncio.timeout(_RECORDED_S_MAX):
                while clock.has_news:  # noqa: ASYNC110 - the scheduler's thread has no event for it
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise BrokerUnavailable("the clock is accepted, and that is not on record yet: ask again") from None
        return has_changed


def clock_of(store: Store) -> ClockState:
    """Return how the clock of a store is."""
    found = store.clock.status()
    return ClockState(
        wall_ms=found.wall_ms,
        believed_ms=found.believed_ms,
        is_steady=found.is_steady,
        is_held=found.is_held,
        steady_in_ms=found.steady_in_ms,
        steps=found.steps,
        last_step_ms=found.last_step_ms,
        last_step_at_ms=found.last_step_at_ms,
    )
