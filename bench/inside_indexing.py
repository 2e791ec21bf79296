"""Durable delayed sends through a broker in this process, with and without an indexed user property."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from bench.cell import broker_in, calm_collector, say
from bench.messages import BODY_BYTES, HOUR_MS, TOPIC, sent_message
from broker_adapter.contracts.message import Envelope
from broker_adapter.wire.mapping import to_envelope
from dmq.broker.topics import IndexChange

_BATCH = 100
_WARM = 20  # batches before the clock counts
_PROPERTY = "order-id"
_OTHER_TOPIC = "other"


async def indexed(data: Path, count: int, *, of: int) -> None:
    """Print CPU time and bytes per message. ``of``: 0 no index, 1 an index of another topic, 2 of their own topic."""
    async with broker_in(data) as broker:
        for topic in (TOPIC, _OTHER_TOPIC):
            await broker.route(topic)
        if of:
            await broker.operator.set_topic(TOPIC if of == 2 else _OTHER_TOPIC, index=IndexChange((_PROPERTY,)))
        batches = list(_batches(count + _WARM * _BATCH, broker.store.clock.now_ms()))
        calm_collector()
        for batch in batches[:_WARM]:
            await broker.send(batch)
        cpu_s = time.process_time()
        for batch in batches[_WARM:]:
            await broker.send(batch)
        cpu_s = time.process_time() - cpu_s
        broker.store.checkpoint(data / "checkpoint")  # all rows are in tables then
        size = broker.store.engine_stats().table_bytes
    say(cpu_us=cpu_s / count * 1e6, bytes=size / (count + _WARM * _BATCH))


def _batches(count: int, now_ms: int) -> Iterator[list[Envelope]]:
    """Yield batches of messages, each of another order, due about half a day ahead."""
    prefix, due_s = os.urandom(8).hex().upper(), (now_ms + 12 * HOUR_MS) // 1000
    for first in range(0, count, _BATCH):
        batch = []
        for number in range(first, first + _BATCH):
            at_s = due_s + number % 3600
            message = sent_message(f"01{prefix}{number:016X}", os.urandom(BODY_BYTES), now_ms, at_s)
            message.user_properties[_PROPERTY] = f"{number:012d}"
            batch.append(to_envelope(message, deliver_at_ms=at_s * 1000))
        yield batch
