"""Longest batch of the writer while a base is made, under load: in a process of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

from bench.cell import calm_collector, say
from bench.messages import TOPIC, far_envelopes
from broker_adapter.runtime.clock import SystemClock
from dmq.broker.broker import EmbeddedBroker
from dmq.recovery.replica import Worker, make_base
from dmq.replication.log import LogOptions, ReplicationLog
from dmq.replication.objects import open_objects
from dmq.store.store import Store, StoreOptions
from dmq.store.writer.batch_log import LogStart
from dmq.trail.events import gap_event

_FILL_BATCH = 256
_IN_FLIGHT = 64


async def replica_base(data: Path, count: int) -> None:
    """Fill a store, then send single messages while a base is made, twice: the second one uploads new tables only.

    The object store is a directory of the same disk. The floor is the same load without a base, for as long.
    """
    calm_collector()
    clock = SystemClock()
    (data / "objects").mkdir(parents=True)
    url = f"file://{data / 'objects'}"
    worker = Worker()
    log = ReplicationLog(
        open_objects(url), clock, LogOptions(is_sync=True), lambda start: make_base(worker, url, clock, start)
    )
    store = Store.open(data / "store", clock, StoreOptions(gap_event=gap_event), batch_log=log)
    start = LogStart(store.identity.number, store.boot, data, store.checkpoint)
    batches: list[tuple[float, float]] = []  # end and duration of each, in s
    store.writer.observe = lambda _ops, _size, took_s, _sync_s: batches.append((clock.monotonic_s(), took_s))
    broker = EmbeddedBroker(store)
    await broker.route(TOPIC)
    for envelopes in far_envelopes(count, clock, batch=_FILL_BATCH):
        await broker.send(envelopes)
    is_done = False

    async def send() -> None:
        sent = far_envelopes(10**9, clock, batch=1)
        while not is_done:
            await broker.send(next(sent))

    sends = [asyncio.create_task(send()) for _ in range(_IN_FLIGHT)]

    def longest_ms(began_s: float) -> float:
        ended_s = clock.monotonic_s()
        during = [took_s for end_s, took_s in batches if end_s > began_s and end_s - took_s < ended_s]
        return 1000 * max(during, default=ended_s - began_s)

    found: dict[str, float] = {}
    for name in ("first", "second"):
        began_s = clock.monotonic_s()
        await asyncio.to_thread(make_base, worker, url, clock, start)
        took_s = clock.monotonic_s() - began_s
        found[name], found[f"{name}_s"] = longest_ms(began_s), took_s
        began_s = clock.monotonic_s()
        await asyncio.sleep(took_s)
        found[f"{name}_floor"] = longest_ms(began_s)
    is_done = True
    await asyncio.gather(*sends)
    await broker.close()
    store.close()
    say(**found)
