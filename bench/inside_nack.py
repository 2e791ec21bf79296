"""Nacks and acks of push deliveries, one call per message, and how late retries are: in a process of its own."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from rocksdict import Options, Rdict, WriteBatch, WriteOptions

from bench.cell import broker_in, calm_collector, paced, quantiles, say, scheduler_of
from bench.consumer import Consumer, finish, receive
from bench.messages import HOUR_MS, TOPIC, WIRE_BYTES
from bench.retries import retry_entries
from broker_adapter.contracts.message import Delivery, Envelope
from broker_adapter.runtime.clock import SystemClock
from dmq.broker.broker import EmbeddedBroker
from dmq.store.schema.keys import pack_queue_key, pack_timeline_key
from dmq.store.writer.operations import HandOver
from retry.policy import Fixed, RetryPolicy

RATE = 500
_GROUP = "bench-group"
_SEND_BATCH = 256
_RECEIVES = 8
_POLLS = 16
_DELAY_MS = 1_000

Finish = Callable[[EmbeddedBroker, Delivery], Awaitable[object]]


def envelope(topic: str, number: int, *, deliver_at_ms: int = 0) -> Envelope:
    """Return a message of the size that ``bench.messages`` has; its number is its id."""
    return Envelope(topic, f"01{number:032X}", os.urandom(WIRE_BYTES), deliver_at_ms=deliver_at_ms)


async def send_many(broker: EmbeddedBroker, topic: str, count: int) -> None:
    """Send messages that are due at once."""
    for first in range(0, count, _SEND_BATCH):
        numbers = range(first, min(first + _SEND_BATCH, count))
        await broker.send([envelope(topic, number) for number in numbers])


async def _taken(broker: EmbeddedBroker, count: int) -> list[Delivery]:
    """Send messages and return them as a push consumer gets them."""
    await send_many(broker, TOPIC, count)
    taken: list[Delivery] = []

    async def take() -> None:
        while deliveries := await receive(broker, _GROUP, TOPIC, wait_ms=0):
            taken.extend(deliveries)

    await asyncio.gather(*(take() for _ in range(_RECEIVES)))
    if len(taken) != count:
        raise RuntimeError(f"{len(taken)} of {count} messages were handed out")
    return taken


async def nack(data: Path, count: int, *, in_flight: int) -> None:
    """Measure nacks until each is durable; none is due again meanwhile."""
    await _finished(data, count, in_flight, _nack)


async def ack(data: Path, count: int, *, in_flight: int) -> None:
    """Measure the peer: the same deliveries, acknowledged."""
    await _finished(data, count, in_flight, _ack)


async def _nack(broker: EmbeddedBroker, delivery: Delivery) -> None:
    await broker.change_invisible(_GROUP, TOPIC, delivery.receipt_handle, _DELAY_MS)


async def _ack(broker: EmbeddedBroker, delivery: Delivery) -> None:
    await finish(broker, _GROUP, TOPIC, [delivery.receipt_handle])


async def _finished(data: Path, count: int, in_flight: int, finish_one: Finish) -> None:
    calm_collector()
    async with broker_in(data) as broker:
        with scheduler_of(broker):
            await broker.set_group(_GROUP, policy=RetryPolicy(backoff=Fixed(HOUR_MS)))
            left = iter(await _taken(broker, count))
            took_ms: list[float] = []

            async def work() -> None:
                for delivery in left:
                    began_s = time.perf_counter()
                    await finish_one(broker, delivery)
                    took_ms.append((time.perf_counter() - began_s) * 1000)

            batches, sync_s = broker.store.commit_stats.batches, broker.store.commit_stats.sync_s
            cpu_s, started_s = time.process_time(), time.perf_counter()
            await asyncio.gather(*(work() for _ in range(in_flight)))
            took_s = time.perf_counter() - started_s
            stats = broker.store.commit_stats
            say(
                per_s=count / took_s,
                cpu_us=(time.process_time() - cpu_s) / count * 1e6,
                sync_us=(stats.sync_s - sync_s) / count * 1e6,
                per_batch=count / (stats.batches - batches),
                retried=broker.outcomes.retried_total,
                latency_ms=quantiles(took_ms),
            )


async def raw_nack(data: Path, count: int, *, in_flight: int) -> None:
    """Measure the floor: of each message one row is deleted and one copy put, as many to a batch as are in flight."""
    async with broker_in(data / "model") as broker:
        found = await broker.subscriptions.subscribe(_GROUP, TOPIC)
        entries = list(retry_entries(found, 1, range(count), SystemClock().now_ms()))
    database = Rdict(str(data / "raw"), Options(raw_mode=True))
    unsynced = WriteOptions()
    unsynced.sync = False
    queued = [pack_queue_key(1, number % 8, number) for number in range(count)]
    waiting = [pack_timeline_key(entry.deliver_at_ms, number) for number, entry in enumerate(entries)]
    for key, entry in zip(queued, entries, strict=True):
        database[key] = entry.record
    database.flush_wal(True)
    started_s = time.perf_counter()
    for first in range(0, count, in_flight):
        batch = WriteBatch(raw_mode=True)
        for number in range(first, min(first + in_flight, count)):
            batch.delete(queued[number])
            batch.put(waiting[number], entries[number].record)
        database.write(batch, unsynced)
        database.flush_wal(True)
    say(per_s=count / (time.perf_counter() - started_s))
    database.close()


async def retry_lateness(data: Path, count: int) -> None:
    """Measure how late messages are that were nacked ``RATE`` times a second, each due again a second later."""
    calm_collector()
    due_ms: dict[str, int] = {}
    clock = SystemClock()
    async with broker_in(data) as broker:
        # No wait of its own: the time the consumer asks for decides, and is known here to the millisecond.
        await broker.set_group(_GROUP, policy=RetryPolicy(backoff=Fixed(0)))
        taken = await _taken(broker, count)

        async def begin(number: int) -> None:
            delivery = taken[number]
            due_ms[delivery.message_id] = clock.now_ms() + _DELAY_MS
            await broker.change_invisible(_GROUP, TOPIC, delivery.receipt_handle, _DELAY_MS)

        await _lateness(broker, count, begin, lambda delivery: due_ms[delivery.message_id])


async def delay_lateness(data: Path, count: int) -> None:
    """Measure the peer: messages sent with a delay of a second, as many to a second."""
    calm_collector()
    clock = SystemClock()
    async with broker_in(data) as broker:
        await broker.route(TOPIC)

        async def begin(number: int) -> None:
            await broker.send([envelope(TOPIC, number, deliver_at_ms=clock.now_ms() + _DELAY_MS)])

        await _lateness(broker, count, begin, lambda delivery: delivery.deliver_at_ms)


async def _lateness(
    broker: EmbeddedBroker,
    count: int,
    begin: Callable[[int], Awaitable[object]],
    due_ms: Callable[[Delivery], float],
) -> None:
    queued_ms: list[int] = []

    def observe(_: Sequence[HandOver], late_ms: Sequence[int]) -> None:
        queued_ms.extend(late_ms)

    consumer = Consumer(broker, _GROUP, [TOPIC], due_ms)
    with scheduler_of(broker, observe):
        await asyncio.gather(paced(count, RATE, begin), consumer.run(count, polls=_POLLS))
    late_ms = consumer.late_ms
    say(queue=quantiles(queued_ms), consumer=quantiles(late_ms), early=sum(ms < 0 for ms in [*queued_ms, *late_ms]))
