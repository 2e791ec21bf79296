"""Receive and acknowledge in process: what the wire is compared with."""

from __future__ import annotations

import time
from pathlib import Path

from bench.cell import broker_in, calm_collector, say
from bench.consumer import Consumer
from bench.messages import TOPIC, WIRE_BYTES
from broker_adapter.contracts.message import Envelope
from broker_adapter.runtime.clock import SystemClock

_POLLS = 16
_BATCH = 100


async def receive(data: Path, count: int) -> None:
    """Take a backlog of ``count`` messages, 32 to a receive, and acknowledge each batch."""
    clock = SystemClock()
    async with broker_in(data) as broker:
        await broker.route(TOPIC)
        for first in range(0, count, _BATCH):
            numbers = range(first, min(first + _BATCH, count))
            await broker.send([Envelope(TOPIC, f"01{number:032X}", b"x" * WIRE_BYTES) for number in numbers])
        calm_collector()
        consumer = Consumer(broker, "bench-receive", [TOPIC], lambda _: None)
        cpu_s, started_s = time.process_time(), clock.monotonic_s()
        await consumer.run(count, polls=_POLLS)
        # The last receives have waited for nothing: what they waited does not count.
        took_s = consumer.last_s - started_s
        say(per_s=count / took_s, cpu_us=(time.process_time() - cpu_s) / count * 1e6)
