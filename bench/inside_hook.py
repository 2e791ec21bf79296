"""The producer's hook on a spool: sends that succeed, sends that are kept, and the drain; in a process of its own."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from statistics import median

from bench.cell import say
from bench.inside_spool import TYPE, check_waiting, fill, payloads, quiet, say_rate, together, writer_figures
from broker_adapter.runtime.clock import SystemClock
from dmq.producer_store import Spool
from retry.hook.destinations import ramp
from retry.hook.redelivery import Redelivery
from retry.outcome import Delivered, Outcome, Spooled

_BLOCKS = 10
_LOOK_S = 0.002


async def hook_send(data: Path, count: int, *, threads: int) -> None:
    """Measure a send whose handler succeeds, and the handler alone: in turn, a block of calls each.

    Told is the time from the first to the last call of a block divided by its calls, of all threads: what a send takes
    from whatever else the process could do.
    """
    quiet()
    (payload,) = payloads(1)
    called = 0

    def handler(_: bytes) -> None:
        nonlocal called
        called += 1

    with Spool(data) as spool, Redelivery(spool, owns_sink=False) as redelivery:
        redelivery.add_handler(TYPE, handler)
        send = redelivery.send
        outcome = send(TYPE, payload)
        if type(outcome) is not Delivered:
            raise RuntimeError(f"it was not sent: {outcome}")
        calls = range(max(1, count // _BLOCKS // threads))

        def bare(_: int) -> None:
            for _ in calls:
                handler(payload)

        def hooked(_: int) -> None:
            for _ in calls:
                send(TYPE, payload)

        took_us: dict[str, list[float]] = {"bare": [], "hooked": []}
        for _ in range(_BLOCKS):
            gc.collect()
            for name, work in (("bare", bare), ("hooked", hooked)):
                took_us[name].append(together(threads, work) / len(calls) / threads * 1e6)
        delivered = redelivery.metrics().sends[TYPE, "delivered"]
        if delivered != 1 + _BLOCKS * threads * len(calls):
            raise RuntimeError(f"{delivered} sends were delivered")
    bare_us, hooked_us = median(took_us["bare"]), median(took_us["hooked"])
    say(bare_us=bare_us, hooked_us=hooked_us, added_us=hooked_us - bare_us, worst_block_us=max(took_us["hooked"]))


async def hook_spool(data: Path, count: int, *, threads: int) -> None:
    """Measure sends while the broker refuses connections, each caller waiting until its message is durable.

    The breaker opens at the fifth; from then on only the drain's probes call the handler.
    """
    quiet()
    made = payloads(count)
    outcomes: list[Outcome] = []

    def handler(_: bytes) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    with Spool(data) as spool, Redelivery(spool, owns_sink=False) as redelivery:
        redelivery.add_handler(TYPE, handler)
        say_rate(
            threads,
            count,
            lambda number: outcomes.append(redelivery.send(TYPE, made[number])),
            **writer_figures(spool),
        )
        if any(type(each) is not Spooled for each in outcomes):
            raise RuntimeError("not every message was kept")
        check_waiting(spool, count)


async def hook_drain(data: Path, count: int, *, workers: int, is_ramped: bool) -> None:
    """Measure the drain of entries that are due, with a handler that does nothing, until the last one is forgotten.

    It begins at 50 a second and doubles that each second, and no setting says otherwise; without the ramp it begins
    where the ramp ends.
    """
    quiet()
    if not is_ramped:
        ramp.START_PER_S = ramp.UNLIMITED_PER_S
    is_done, left = threading.Event(), iter(range(1, count))

    def handler(_: bytes) -> None:
        if next(left, None) is None:
            is_done.set()

    with Spool(data) as spool:
        fill(spool, count, SystemClock().now_ms())
        with Redelivery(spool, owns_sink=False, autostart=False, workers_per_type=workers) as redelivery:
            redelivery.add_handler(TYPE, handler)
            stats = spool.entries.store.commit_stats
            batches, cpu_s, started_s = stats.batches, time.process_time(), time.perf_counter()
            redelivery.start()
            is_done.wait()
            handled_s = time.perf_counter() - started_s
            _await_settled(redelivery)
            took_s = time.perf_counter() - started_s
            cpu_s = time.process_time() - cpu_s
            redelivered = redelivery.metrics().redelivered[TYPE]
            say(
                per_s=count / took_s,
                handled_per_s=count / handled_s,
                cpu_us=cpu_s / count * 1e6,
                per_batch=count / (stats.batches - batches),
                repeated=redelivered - count,
            )
        check_waiting(spool, 0)


def _await_settled(redelivery: Redelivery) -> None:
    while redelivery.metrics().unsettled:
        time.sleep(_LOOK_S)
