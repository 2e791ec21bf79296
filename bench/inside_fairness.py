"""A steady flow that is measured, alone or beside somebody who disturbs, in a process of its own.

The flow is the same in every case: one group, nine topics, each message sent half a second before it is due. What
disturbs is one of these:

    alone           nothing
    retries_spread  another group's retries wait, a third of them due evenly during the run
    retries_burst   the same, all of them due within one second of the run
    refusing        a tenth topic of the group: its consumer fails everything, which comes back after 1 s each time
    hoarding        another group never acknowledges: it took what it may and goes on asking, while more is sent
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from bench.cell import broker_in, calm_collector, paced, quantiles, say, scheduler_of
from bench.consumer import Consumer, receive
from bench.inside_nack import envelope, send_many
from bench.messages import HOUR_MS
from bench.retries import fill_retries
from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.limits import RECEIVE_BATCH_MAX
from broker_adapter.contracts.message import Delivery
from broker_adapter.runtime.clock import SystemClock
from dmq.broker.broker import EmbeddedBroker
from dmq.store.writer.operations import HandOver
from retry.policy import MAX_ATTEMPTS_LIMIT, Fixed, RetryPolicy

RATE = 500
_GROUP, _OTHER_GROUP = "measured-group", "other-group"
_TOPICS = tuple(f"measured-{number}" for number in range(9))
_OTHER_TOPIC = "other-topic"
_POLLS = 4  # per topic
_AHEAD_MS = 500
_WARM_UP_MS = 500
_LEAD_MS = _AHEAD_MS + _WARM_UP_MS + 200
_FILLS_PER_MS = 12  # far less than a store takes, so that they wait, settled, before the run begins
_REFUSED_AFTER_MS = 1_000
_TRICKLE_PER_S = 50
_TABLE_MS = 2 * 3_600_000  # the longest step of the default policy
_TAKERS = 8


class Disturbance(StrEnum):
    """What goes on beside the measured flow."""

    ALONE = "alone"
    RETRIES_WAITING = "retries_waiting"
    RETRIES_SPREAD = "retries_spread"
    RETRIES_BURST = "retries_burst"
    REFUSING = "refusing"
    HOARDING = "hoarding"


@dataclass(slots=True, kw_only=True)
class _Run:
    broker: EmbeddedBroker
    size: int  # of the disturbance: messages
    seconds: int
    clock: SystemClock = field(default_factory=SystemClock)
    background: list[asyncio.Task[None]] = field(default_factory=list)

    def soon_ms(self) -> int:
        """Return a time to begin at that leaves the flow its lead."""
        return self.clock.now_ms() + _LEAD_MS

    def keep(self, coroutine: Coroutine[object, object, None]) -> None:
        """Let it go on until the run ends."""
        self.background.append(asyncio.create_task(coroutine))

    async def end(self) -> None:
        """End what goes on; raise if something did not."""
        for task in self.background:
            task.cancel()
        for found in await asyncio.gather(*self.background, return_exceptions=True):
            if isinstance(found, Exception):
                raise found


async def fairness(data: Path, count: int, *, disturbance: str, seconds: int) -> None:
    """Measure the lateness of the flow for ``seconds`` beside a disturbance of ``count`` messages."""
    calm_collector()
    async with broker_in(data) as broker:
        await broker.ensure_group(_GROUP)
        run = _Run(broker=broker, size=count, seconds=seconds)
        measured = {(await broker.catalog.topic(name)).topic_id for name in _TOPICS}
        moved: list[tuple[HandOver, int]] = []

        def observe(ops: Sequence[HandOver], late_ms: Sequence[int]) -> None:
            moved.extend(zip(ops, late_ms, strict=True))

        with scheduler_of(broker, observe):
            start_ms = await _DISTURBANCES[Disturbance(disturbance)](run)
            await asyncio.sleep((start_ms - _LEAD_MS - run.clock.now_ms()) / 1000)
            cpu_s, began_s = time.process_time(), time.monotonic()
            late_ms = await _flow(run, start_ms)
            cpu_share = (time.process_time() - cpu_s) / (time.monotonic() - began_s)
            leases = broker.lease_count
            await run.end()
    queued_ms = [late for op, late in moved if op.topic_id in measured and op.deliver_at_ms >= start_ms]
    say(
        consumer=quantiles(late_ms),
        queue=quantiles(queued_ms),
        early=sum(ms < 0 for ms in [*late_ms, *queued_ms]),
        cpu_share=cpu_share,
        handed_over_beside=sum(op.topic_id not in measured for op, _ in moved),
        leases_beside=leases,
    )


async def _flow(run: _Run, start_ms: int) -> list[float]:
    """Send and consume the flow; what is due before ``start_ms`` warms up and is not counted."""
    first_ms = start_ms - _WARM_UP_MS
    count = RATE * (run.seconds * 1000 + _WARM_UP_MS) // 1000

    async def begin(number: int) -> None:
        due_ms = first_ms + number * 1000 // RATE
        await run.broker.send([envelope(_TOPICS[number % len(_TOPICS)], number, deliver_at_ms=due_ms)])

    def due_ms(delivery: Delivery) -> float | None:
        return delivery.deliver_at_ms if delivery.deliver_at_ms >= start_ms else None

    consumer = Consumer(run.broker, _GROUP, _TOPICS, due_ms)
    await asyncio.gather(
        paced(count, RATE, begin, first_ms=first_ms - _AHEAD_MS),
        consumer.run(count, polls=_POLLS),
    )
    return consumer.late_ms


async def _alone(run: _Run) -> int:
    return run.soon_ms()


async def _retries_waiting(run: _Run) -> int:
    return await _retries(run, lambda start_ms, number: start_ms + number * _TABLE_MS // run.size)


async def _retries_spread(run: _Run) -> int:
    return await _retries(run, lambda start_ms, number: start_ms + number * 3_000 * run.seconds // run.size)


async def _retries_burst(run: _Run) -> int:
    after_ms = run.seconds * 1000 // 3
    return await _retries(run, lambda start_ms, number: start_ms + after_ms + number * 1000 // run.size)


async def _retries(run: _Run, due_ms: Callable[[int, int], int]) -> int:
    # The run begins at a time set before: the delivery times of the retries count from it.
    start_ms = run.soon_ms() + run.size // _FILLS_PER_MS
    await fill_retries(run.broker, _OTHER_GROUP, _OTHER_TOPIC, [due_ms(start_ms, number) for number in range(run.size)])
    if run.soon_ms() > start_ms:
        raise RuntimeError("writing the retries took until the run; this machine is too slow for the figure")
    return start_ms


async def _refusing(run: _Run) -> int:
    policy = RetryPolicy(backoff=Fixed(_REFUSED_AFTER_MS), max_attempts=MAX_ATTEMPTS_LIMIT)
    await run.broker.set_group(_GROUP, policy=policy)

    async def begin(number: int) -> None:
        await run.broker.send([envelope(_OTHER_TOPIC, number)])

    async def refuse() -> None:
        while True:
            deliveries = await receive(run.broker, _GROUP, _OTHER_TOPIC)
            await asyncio.gather(
                *(run.broker.change_invisible(_GROUP, _OTHER_TOPIC, each.receipt_handle, 0) for each in deliveries)
            )

    for _ in range(_POLLS):
        run.keep(refuse())
    # Spread over the second after which each comes back, they stay spread.
    run.keep(paced(run.size, run.size / _REFUSED_AFTER_MS * 1000, begin))
    return run.soon_ms()


async def _hoarding(run: _Run) -> int:
    await send_many(run.broker, _OTHER_TOPIC, run.size)

    async def take(wait_ms: int) -> Sequence[Delivery]:
        return await run.broker.receive(
            _OTHER_GROUP,
            Subscription(_OTHER_TOPIC),
            batch_max=RECEIVE_BATCH_MAX,
            invisible_ms=HOUR_MS,
            wait_ms=wait_ms,
        )

    async def take_all() -> None:
        while await take(0):
            pass

    async def take_more() -> None:
        while True:
            await take(20_000)

    async def begin(number: int) -> None:
        await run.broker.send([envelope(_OTHER_TOPIC, run.size + number)])

    await asyncio.gather(*(take_all() for _ in range(_TAKERS)))
    for _ in range(_POLLS):
        run.keep(take_more())
    start_ms = run.soon_ms()
    run.keep(paced(_TRICKLE_PER_S * run.seconds, _TRICKLE_PER_S, begin, first_ms=start_ms))
    return start_ms


_DISTURBANCES: Mapping[Disturbance, Callable[[_Run], Awaitable[int]]] = {
    Disturbance.ALONE: _alone,
    Disturbance.RETRIES_WAITING: _retries_waiting,
    Disturbance.RETRIES_SPREAD: _retries_spread,
    Disturbance.RETRIES_BURST: _retries_burst,
    Disturbance.REFUSING: _refusing,
    Disturbance.HOARDING: _hoarding,
}
