"""A cell in this process, for what is measured without a daemon and without a network, and what its actions share."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from broker_adapter.runtime.clock import SystemClock
from dmq.broker.broker import EmbeddedBroker
from dmq.broker.sending.placement import Placement
from dmq.scheduler.scheduler import Scheduler
from dmq.store.store import Store, StoreOptions
from dmq.store.writer.operations import HandOver
from dmq.trail.events import gap_event

QUANTILES: Mapping[str, float] = {"p50": 0.5, "p99": 0.99, "p999": 0.999}

Observe = Callable[[Sequence[HandOver], Sequence[int]], None]


def say(**found: object) -> None:
    """Tell the other end (``bench.child``)."""
    print(json.dumps(found), flush=True)


def calm_collector() -> None:
    """Do what the daemon does when it starts: without it the collector's pauses would be the tail."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@asynccontextmanager
async def broker_in(data: Path) -> AsyncIterator[EmbeddedBroker]:
    """Open a store with a broker on it."""
    store = Store.open(data, SystemClock(), StoreOptions(gap_event=gap_event))
    broker = EmbeddedBroker(store)
    try:
        yield broker
    finally:
        await broker.close()
        store.close()


class _Noting(Placement):
    """Remembers what the turn under way moves: the scheduler tells its observer how late, but not what."""

    moved: Sequence[HandOver] = ()

    def hand_over(self, rows: Sequence[tuple[bytes, bytes]], now_ms: int) -> list[HandOver]:
        """As ``Placement.hand_over``."""
        self.moved = moved = super().hand_over(rows, now_ms)
        return moved


@contextmanager
def scheduler_of(broker: EmbeddedBroker, observe: Observe = lambda *_: None) -> Iterator[Scheduler]:
    """Run a scheduler; ``observe`` is told, in its thread, what a turn moved and how many ms late each was durable."""
    placement = _Noting(broker.names)
    scheduler = Scheduler(
        broker.store,
        placement,
        broker.checks,
        on_failure=lambda error: say(error=str(error)),
        observe=lambda late_ms, _: observe(placement.moved, late_ms),
    )
    scheduler.start()
    try:
        yield scheduler
    finally:
        scheduler.close()


async def paced(count: int, per_s: float, begin: Callable[[int], Awaitable[object]], *, first_ms: int = 0) -> None:
    """Begin ``begin(number)`` ``per_s`` times a second from ``first_ms`` on, none waiting for the others; end with all.

    Each is begun by the clock and not by the one before, so a pause is caught up and not handed on.
    """
    clock = SystemClock()
    first_s = clock.monotonic_s() + max(0, first_ms - clock.now_ms()) / 1000

    async def run(number: int) -> None:
        await begin(number)

    async with asyncio.TaskGroup() as begun:
        for number in range(count):
            await asyncio.sleep(max(0.0, first_s + number / per_s - clock.monotonic_s()))
            begun.create_task(run(number))


def quantiles(late_ms: Sequence[float]) -> dict[str, float]:
    """Return the quantiles that are shown, and the maximum."""
    ordered = sorted(late_ms)
    last = len(ordered) - 1
    return {name: ordered[min(last, int(len(ordered) * q))] for name, q in QUANTILES.items()} | {"max": ordered[last]}
