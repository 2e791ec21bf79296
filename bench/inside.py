"""What is measured in a process of its own, so that nothing of the bench is in its memory or beside it.

``python -m bench.inside ACTION DIRECTORY COUNT [OPTIONS]``, the options in JSON, prints one JSON object a line:

    enqueue   COUNT messages through the embedded broker, 100 at a time, each batch awaited until it is durable
    scattered the same, but due at any time of a day instead of all after one delay
    raw       the floor: the same rows into an empty RocksDB, 100 messages at a time, each batch synced
    burst     COUNT messages due at one instant, handed over by the scheduler beside an idle loop
    lateness  COUNT messages at 2000/s, each due 1 to 5 s later, beside what waits in the store already
    fill      COUNT messages due far away; then stays as it is until its input ends or it is killed

and what ``bench.inside_receive``, ``bench.inside_costs``, ``bench.inside_nack``, ``bench.inside_fairness``,
``bench.inside_hook`` and ``bench.inside_spool`` say for themselves.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import psutil
import uvloop
from rocksdict import Options, Rdict, WriteBatch, WriteOptions

from bench.cell import broker_in, quantiles, say
from bench.inside_costs import assembler_of, costs
from bench.inside_fairness import fairness
from bench.inside_hook import hook_drain, hook_send, hook_spool
from bench.inside_indexing import indexed
from bench.inside_nack import ack, delay_lateness, nack, raw_nack, retry_lateness
from bench.inside_neighbours import neighbours
from bench.inside_receive import receive
from bench.inside_replica import replica_base
from bench.inside_spool import (
    hand_off,
    peer_drain,
    peer_fill,
    peer_open,
    peer_put,
    raw_spool,
    spool_fill,
    spool_open,
    spool_put,
)
from bench.messages import TOPIC, WIRE_BYTES, envelope_of, far_envelopes
from broker_adapter.contracts.message import Envelope
from broker_adapter.runtime.clock import SystemClock
from dmq.broker.broker import EmbeddedBroker
from dmq.scheduler.scheduler import Scheduler
from dmq.store.engines.memory import MemoryEngine

BATCH = 100
_FILL_BATCH = 256
_FILLS_IN_FLIGHT = 4
_BURST_AHEAD_S = 3
LATENESS_RATE = 2_000


async def enqueue(data: Path, count: int) -> None:
    """Measure durable sends of one caller, all with one delay."""
    await _enqueue(data, count, is_scattered=False)


async def scattered(data: Path, count: int) -> None:
    """Measure durable sends of one caller, due at any time of a day."""
    await _enqueue(data, count, is_scattered=True)


async def _enqueue(data: Path, count: int, *, is_scattered: bool) -> None:
    clock = SystemClock()
    batches = list(far_envelopes(count, clock, batch=BATCH, is_scattered=is_scattered))
    assert len(batches[0][0].payload) == WIRE_BYTES
    async with broker_in(data) as broker:
        await broker.route(TOPIC)
        cpu_s, started_s = time.process_time(), clock.monotonic_s()
        for batch in batches:
            await broker.send(batch)
        took_s = clock.monotonic_s() - started_s
        stats = broker.store.commit_stats
        say(
            per_s=count / took_s,
            cpu_us=(time.process_time() - cpu_s) / count * 1e6,
            sync_us=stats.sync_s / count * 1e6,
        )


async def raw(data: Path, count: int) -> None:
    """Measure the floor: what a store that is nothing but RocksDB does with the same rows, in one family."""
    clock = SystemClock()
    assembler, marks = assembler_of(MemoryEngine(), clock)
    batches: list[list[tuple[bytes, bytes]]] = []
    async with broker_in(data / "model") as broker:
        await broker.route(TOPIC)
        topic = broker.names.topics[TOPIC]
        for envelopes in far_envelopes(count, clock, batch=BATCH):
            batch, _, _ = assembler.assemble([[broker.placement.accept(topic, each, 0) for each in envelopes]])
            marks.release()
            batches.append([(bytes([family]) + key, value) for family, key, value in batch.puts])
    database = Rdict(str(data / "raw"), Options(raw_mode=True))
    unsynced = WriteOptions()
    unsynced.sync = False
    started_s = clock.monotonic_s()
    for rows in batches:
        batch_of_rows = WriteBatch(raw_mode=True)
        for key, value in rows:
            batch_of_rows.put(key, value)
        database.write(batch_of_rows, unsynced)
        database.flush_wal(True)
    say(per_s=count / (clock.monotonic_s() - started_s))
    database.close()


async def burst(data: Path, count: int) -> None:
    """Measure how long after their instant the last of many messages is durable in its queue."""
    clock = SystemClock()
    async with broker_in(data) as broker:
        await broker.route(TOPIC)
        due_s = clock.now_ms() // 1000 + _BURST_AHEAD_S
        envelopes = [envelope_of(f"01{number:032X}", clock.now_ms(), due_s) for number in range(count)]
        for first in range(0, count, BATCH):
            await broker.send(envelopes[first : first + BATCH])
        spare_ms = due_s * 1000 - clock.now_ms()
        lateness: list[int] = []
        loop, is_done = asyncio.get_running_loop(), asyncio.Event()

        def observe(batch: Sequence[int], _: Sequence[int]) -> None:
            lateness.extend(batch)
            if len(lateness) >= count:
                loop.call_soon_threadsafe(is_done.set)

        scheduler = Scheduler(
            broker.store,
            broker.placement,
            broker.checks,
            on_failure=lambda error: say(error=str(error)),
            observe=observe,
        )
        scheduler.start()
        await is_done.wait()
        scheduler.close()
        say(last_ms=max(lateness), first_ms=min(lateness), early=sum(ms < 0 for ms in lateness), spare_ms=spare_ms)


async def lateness(data: Path, count: int) -> None:
    """Measure how late messages are in their queue when nothing but the store and the scheduler is in the way."""
    clock = SystemClock()
    late_ms: list[int] = []
    loop, is_done = asyncio.get_running_loop(), asyncio.Event()

    def observe(batch: Sequence[int], _: Sequence[int]) -> None:
        late_ms.extend(batch)
        if len(late_ms) >= count:
            loop.call_soon_threadsafe(is_done.set)

    async with broker_in(data) as broker:
        await broker.route(TOPIC)
        scheduler = Scheduler(
            broker.store,
            broker.placement,
            broker.checks,
            on_failure=lambda error: say(error=str(error)),
            observe=observe,
        )
        scheduler.start()
        started_s, sends, run = clock.monotonic_s(), set[asyncio.Task[object]](), clock.now_ms()
        for number in range(count):
            await asyncio.sleep(max(0.0, number / LATENESS_RATE - (clock.monotonic_s() - started_s)))
            delay_ms = random.randint(1_000, 5_000)
            due = Envelope(TOPIC, f"01{run + number:032X}", b"x" * WIRE_BYTES, deliver_at_ms=clock.now_ms() + delay_ms)
            sends.add(task := asyncio.create_task(_send(broker, [due])))
            task.add_done_callback(sends.discard)
        await is_done.wait()
        scheduler.close()
    say(**quantiles(late_ms), early=sum(ms < 0 for ms in late_ms))


async def fill(data: Path, count: int) -> None:
    """Fill a store with messages that wait, several batches in flight as many producers have, and stay."""
    clock = SystemClock()
    process = psutil.Process()
    async with broker_in(data) as broker:
        await broker.route(TOPIC)
        say(event="empty", rss=process.memory_info().rss)
        started_s = clock.monotonic_s()
        sends: set[asyncio.Task[object]] = set()
        for number, batch in enumerate(far_envelopes(count, clock, batch=_FILL_BATCH)):
            if len(sends) >= _FILLS_IN_FLIGHT:
                done, sends = await asyncio.wait(sends, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.gather(*done)
            sends.add(asyncio.create_task(_send(broker, batch)))
            if number % 64 == 0:
                say(event="filling", count=number * _FILL_BATCH)
        await asyncio.gather(*sends)
        say(event="full", rss=process.memory_info().rss, per_s=count / (clock.monotonic_s() - started_s))
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def _send(broker: EmbeddedBroker, batch: Sequence[Envelope]) -> object:
    return await broker.send(batch)


_ACTIONS: dict[str, Callable[..., Awaitable[None]]] = {
    "enqueue": enqueue,
    "scattered": scattered,
    "raw": raw,
    "burst": burst,
    "lateness": lateness,
    "fill": fill,
    "receive": receive,
    "costs": costs,
    "indexed": indexed,
    "nack": nack,
    "ack": ack,
    "raw_nack": raw_nack,
    "retry_lateness": retry_lateness,
    "delay_lateness": delay_lateness,
    "fairness": fairness,
    "neighbours": neighbours,
    "hook_send": hook_send,
    "hook_spool": hook_spool,
    "hook_drain": hook_drain,
    "spool_put": spool_put,
    "spool_fill": spool_fill,
    "spool_open": spool_open,
    "hand_off": hand_off,
    "raw_spool": raw_spool,
    "peer_put": peer_put,
    "peer_fill": peer_fill,
    "peer_open": peer_open,
    "peer_drain": peer_drain,
    "replica_base": replica_base,
}

if __name__ == "__main__":

    async def _main() -> None:
        action, data, count, *options = sys.argv[1:]
        await _ACTIONS[action](Path(data), int(count), **(json.loads(options[0]) if options else {}))

    uvloop.run(_main())
