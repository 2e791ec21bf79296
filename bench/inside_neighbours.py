"""Eight topics that are measured and two beside them, which give trouble or do not, in a process of its own.

All ten get as many messages a second, each sent a few seconds before it is due, and one group consumes them. In a run
with trouble one of the two gets ten times as many; of the other, so many messages are due at once when the run begins,
and its consumer acknowledges nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from bench.cell import broker_in, calm_collector, paced, quantiles, say, scheduler_of
from bench.consumer import Consumer
from bench.inside_nack import envelope
from bench.messages import HOUR_MS
from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.limits import RECEIVE_BATCH_MAX
from broker_adapter.contracts.message import Delivery
from broker_adapter.runtime.clock import SystemClock
from dmq.broker.broker import EmbeddedBroker
from dmq.store.writer.operations import HandOver

RATE = 200  # of each topic, a second
TOPICS = 8  # that are measured
FLOOD = 10  # times the rate
AHEAD_MS = 3_000
_GROUP, _DEAF = "measured-group", "deaf-group"
_MEASURED = tuple(f"measured-{number}" for number in range(TOPICS))
_FLOODED, _STUCK = "flooded", "stuck"
_POLLS = 4  # per topic
_WARM_UP_MS = 500
_LEAD_MS = AHEAD_MS + _WARM_UP_MS + 200
_FILLS_PER_MS = 8  # less than a store takes, so that all wait before the run begins
_FILL_BATCH = 32
_FILL_MS_LEAST = 1_000


async def neighbours(data: Path, count: int, *, with_trouble: int, seconds: int) -> None:
    """Measure the lateness of the eight for ``seconds``; ``count`` messages are due at once in a run with trouble."""
    calm_collector()
    clock = SystemClock()
    async with broker_in(data) as broker:
        for group in (_GROUP, _DEAF):
            await broker.ensure_group(group)
        measured = {(await broker.catalog.topic(name)).topic_id for name in _MEASURED}
        moved: list[tuple[HandOver, int]] = []

        def observe(ops: Sequence[HandOver], late_ms: Sequence[int]) -> None:
            moved.extend(zip(ops, late_ms, strict=True))

        with scheduler_of(broker, observe):
            overdue = count if with_trouble else 0
            start_ms = clock.now_ms() + _LEAD_MS + _FILL_MS_LEAST + overdue // _FILLS_PER_MS
            await _fill(broker, overdue, start_ms)
            if clock.now_ms() + _LEAD_MS > start_ms:
                raise RuntimeError("writing what is due at once took until the run; this machine is too slow for it")
            await asyncio.sleep((start_ms - _LEAD_MS - clock.now_ms()) / 1000)
            deaf = [asyncio.create_task(_take(broker, acks=not with_trouble)) for _ in range(_POLLS)]
            cpu_s, began_s = time.process_time(), time.monotonic()
            late_ms, *_ = await asyncio.gather(
                _flow(broker, _MEASURED, RATE * TOPICS, seconds, start_ms),
                _flow(broker, (_FLOODED,), RATE * (FLOOD if with_trouble else 1), seconds, start_ms),
                _send(broker, (_STUCK,), RATE, seconds, start_ms),
            )
            cpu_share = (time.process_time() - cpu_s) / (time.monotonic() - began_s)
            for task in deaf:
                task.cancel()
            await asyncio.gather(*deaf, return_exceptions=True)
    queued_ms = [late for op, late in moved if op.topic_id in measured and op.deliver_at_ms >= start_ms]
    say(
        consumer=quantiles(late_ms),
        queue=quantiles(queued_ms),
        early=sum(ms < 0 for ms in [*late_ms, *queued_ms]),
        cpu_share=cpu_share,
        handed_over_beside=sum(op.topic_id not in measured for op, _ in moved),
    )


async def _fill(broker: EmbeddedBroker, count: int, due_ms: int) -> None:
    for first in range(0, count, _FILL_BATCH * 64):
        numbers = range(first, min(count, first + _FILL_BATCH * 64))
        sends = [
            broker.send(
                [envelope(_STUCK, 10**9 + each, deliver_at_ms=due_ms) for each in numbers[at : at + _FILL_BATCH]]
            )
            for at in range(0, len(numbers), _FILL_BATCH)
        ]
        for sent in sends:
            await sent


async def _send(broker: EmbeddedBroker, topics: Sequence[str], rate: int, seconds: int, start_ms: int) -> int:
    """Send so many a second, each ``AHEAD_MS`` before it is due; return how many."""
    first_ms = start_ms - _WARM_UP_MS
    count = rate * (seconds * 1000 + _WARM_UP_MS) // 1000

    async def begin(number: int) -> None:
        due_ms = first_ms + number * 1000 // rate
        await broker.send([envelope(topics[number % len(topics)], number, deliver_at_ms=due_ms)])

    await paced(count, rate, begin, first_ms=first_ms - AHEAD_MS)
    return count


async def _flow(broker: EmbeddedBroker, topics: Sequence[str], rate: int, seconds: int, start_ms: int) -> list[float]:
    """Send and consume; what is due before ``start_ms`` warms up and is not counted."""
    count = rate * (seconds * 1000 + _WARM_UP_MS) // 1000

    def due_ms(delivery: Delivery) -> float | None:
        return delivery.deliver_at_ms if delivery.deliver_at_ms >= start_ms else None

    consumer = Consumer(broker, _GROUP, topics, due_ms)
    await asyncio.gather(_send(broker, topics, rate, seconds, start_ms), consumer.run(count, polls=_POLLS))
    return consumer.late_ms


async def _take(broker: EmbeddedBroker, *, acks: bool) -> None:
    """Consume the last topic for ever."""
    while True:
        found = await broker.receive(
            _DEAF, Subscription(_STUCK), batch_max=RECEIVE_BATCH_MAX, invisible_ms=HOUR_MS, wait_ms=20_000
        )
        if acks and found:
            await broker.ack(_DEAF, _STUCK, [each.receipt_handle for each in found])
