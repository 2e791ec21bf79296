"""The spool, the floor below it and persist-queue beside it: keeping, opening, draining; in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import sqlite3
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import persistqueue
import psutil
import structlog
from persistqueue.exceptions import Empty
from rocksdict import Options, Rdict, WriteBatch, WriteOptions

from bench.cell import quantiles, say
from broker_adapter.runtime.clock import SystemClock
from dmq.producer_store import Spool, SpoolOptions
from dmq.store.schema.keys import pack_timeline_key
from dmq.store.schema.spool import encode_entry
from retry.hook.sending.uid import make_uid
from retry.sink import Entry, Held

TYPE = "bench"
BODY_BYTES = 200
_HOUR_MS = 3_600_000
_IN_FLIGHT = 4096
_PER_TRANSACTION = 10_000
_LATER_S = 2.0  # what opening leaves to be done in the background counts as well
_ERROR = "ConnectionRefusedError: [Errno 111] Connection refused"
_ENTRIES_MAX = SpoolOptions().entries_max


def quiet() -> None:
    """Show errors only, and never on stdout, which ``bench.child`` reads."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def payloads(count: int) -> list[bytes]:
    """Return messages that no two of are alike and nothing can compress."""
    return [os.urandom(BODY_BYTES) for _ in range(count)]


def entries(count: int, due_at_ms: int) -> list[Entry]:
    """Return entries as the hook makes them of sends that failed."""
    now_ms = SystemClock().now_ms()
    return [
        Entry(
            type_name=TYPE,
            uid=make_uid(now_ms),
            payload=payload,
            created_at_ms=now_ms,
            due_at_ms=due_at_ms,
            attempts=1,
            error=_ERROR,
        )
        for payload in payloads(count)
    ]


def fill(spool: Spool, count: int, due_at_ms: int) -> None:
    """Keep ``count`` entries, thousands under way at a time, and wait until all are durable."""
    waiting: deque[Future[Held | None]] = deque()
    for first in range(0, count, _IN_FLIGHT):
        for entry in entries(min(_IN_FLIGHT, count - first), due_at_ms):
            if len(waiting) >= _IN_FLIGHT:
                waiting.popleft().result()
            waiting.append(spool.put(entry))
    for each in waiting:
        each.result()


def together(threads: int, work: Callable[[int], object]) -> float:
    """Run ``work(number)`` in as many threads, all begun at once; return seconds until the last one is done."""
    gate = threading.Barrier(threads + 1)
    failed: list[BaseException] = []

    def run(number: int) -> None:
        gate.wait()
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - told below, in the thread that can
            failed.append(error)

    running = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    gate.wait()
    started_s = time.perf_counter()
    for thread in running:
        thread.join()
    took_s = time.perf_counter() - started_s
    if failed:
        raise failed[0]
    return took_s


def say_rate(threads: int, count: int, call: Callable[[int], object], **more: Callable[[], float]) -> None:
    """Call ``call(number)`` for each number from ``threads`` threads; tell calls a second, latencies, CPU.

    ``more`` are figures that grow: told is by how much, per call.
    """
    took_ms: list[list[float]] = [[] for _ in range(threads)]

    def work(thread: int) -> None:
        mine = took_ms[thread]
        for number in range(thread, count, threads):
            began_s = time.perf_counter()
            call(number)
            mine.append((time.perf_counter() - began_s) * 1000)

    before = {name: more[name]() for name in more}
    cpu_s = time.process_time()
    took_s = together(threads, work)
    say(
        per_s=count / took_s,
        cpu_us=(time.process_time() - cpu_s) / count * 1e6,
        latency_ms=quantiles([ms for mine in took_ms for ms in mine]),
        **{name: (more[name]() - before[name]) / count for name in more},
    )


def writer_figures(spool: Spool) -> Mapping[str, Callable[[], float]]:
    """Return what the store's writer counts, for ``say_rate``."""
    stats = spool.entries.store.commit_stats
    return {"sync_us": lambda: stats.sync_s * 1e6, "batches": lambda: stats.batches}


# -- keeping ----------------------------------------------------------------------------------------------------------


async def spool_put(data: Path, count: int, *, threads: int) -> None:
    """Measure ``Spool.put``, each caller waiting until its entry is durable."""
    quiet()
    made = entries(count, SystemClock().now_ms() + _HOUR_MS)
    with Spool(data) as spool:
        say_rate(threads, count, lambda number: spool.put(made[number]).result(), **writer_figures(spool))
        check_waiting(spool, count)


async def raw_spool(data: Path, count: int, *, batch: int) -> None:
    """Measure the floor: the same rows, nothing but those, into an empty RocksDB, ``batch`` to a sync."""
    made = entries(count, SystemClock().now_ms())
    rows = [
        (pack_timeline_key(entry.due_at_ms, number), encode_entry(entry, 1, 0)) for number, entry in enumerate(made)
    ]
    database = Rdict(str(data / "raw"), Options(raw_mode=True))
    unsynced = WriteOptions()
    unsynced.sync = False
    started_s = time.perf_counter()
    for first in range(0, count, batch):
        written = WriteBatch(raw_mode=True)
        for key, value in rows[first : first + batch]:
            written.put(key, value)
        database.write(written, unsynced)
        database.flush_wal(True)
    say(per_s=count / (time.perf_counter() - started_s), row_bytes=sum(map(len, rows[0])))
    database.close()


async def hand_off(data: Path, count: int, *, threads: int) -> None:
    """Measure what no spool in Python can pass: one thread appends and syncs, batch by batch, and callers wait for it.

    No database, no key, no event: what is left is an answer for each caller, under one interpreter lock.
    """
    made = payloads(count)
    log = os.open(data / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    changed = threading.Condition()
    pending: list[tuple[Future[None], bytes]] = []
    is_over = threading.Event()

    def write() -> None:
        while True:
            with changed:
                changed.wait_for(lambda: pending or is_over.is_set())
                batch = pending.copy()
                pending.clear()
            if not batch:
                return
            os.write(log, b"".join(payload for _, payload in batch))
            os.fdatasync(log)
            for done, _ in batch:
                done.set_result(None)

    def call(number: int) -> None:
        done: Future[None] = Future()
        with changed:
            pending.append((done, made[number]))
            changed.notify()
        done.result()

    writer = threading.Thread(target=write)
    writer.start()
    say_rate(threads, count, call)
    is_over.set()
    with changed:
        changed.notify()
    writer.join()
    os.close(log)


async def peer_put(data: Path, count: int, *, threads: int, kind: str) -> None:
    """Measure ``put`` of one of persist-queue's queues, which is all that its user waits for."""
    queue = peer(kind, data)
    made = payloads(count)
    say_rate(threads, count, lambda number: queue.put(made[number]))
    if queue.qsize() != count:
        raise RuntimeError(f"{queue.qsize()} of {count} messages wait")


def peer(kind: str, data: Path) -> Any:  # noqa: ANN401 - one of queues that share no type
    """Open one of persist-queue's queues, with the settings under which it keeps most."""
    if kind == "ack_queue":
        return persistqueue.SQLiteAckQueue(str(data / "queue"), multithreading=True)
    if kind == "sqlite_queue":
        return persistqueue.SQLiteQueue(str(data / "queue"), multithreading=True, auto_commit=True)
    chunk = {"file_queue": 100, "file_queue_synced": 1}[kind]
    return persistqueue.Queue(str(data / "queue"), tempdir=str(data), chunksize=chunk)


def check_waiting(spool: Spool, count: int) -> None:
    """See that nothing is missing, as a rate of messages that are lost is none."""
    stats = spool.stats()
    if stats.waiting + stats.held != count:
        raise RuntimeError(f"{stats.waiting} entries wait and {stats.held} are held, of {count}")


# -- opening ----------------------------------------------------------------------------------------------------------


async def spool_fill(data: Path, count: int) -> None:
    """Fill a spool with entries that are due, and stay until the input ends (then close) or this is killed."""
    quiet()
    with Spool(data, options=SpoolOptions(entries_max=max(count, _ENTRIES_MAX))) as spool:
        started_s = time.perf_counter()
        fill(spool, count, SystemClock().now_ms())
        check_waiting(spool, count)
        say(event="full", per_s=count / (time.perf_counter() - started_s))
        sys.stdin.read()


async def spool_open(data: Path, count: int) -> None:
    """Measure opening it: seconds until it is open, until an entry is in hand, and what memory that takes."""
    quiet()
    options = SpoolOptions(entries_max=max(count, _ENTRIES_MAX))
    memory = _Memory()
    started_s = time.perf_counter()
    spool = Spool(data, options=options)
    ready_s = time.perf_counter() - started_s
    taken = spool.take(TYPE, 1, 60.0)
    first_s = time.perf_counter() - started_s
    if len(taken) != 1:
        raise RuntimeError("no entry could be taken")
    check_waiting(spool, count)
    await asyncio.sleep(_LATER_S)
    recovery = spool.entries.store.recovery
    say(ready_s=ready_s, first_s=first_s, was_closed=recovery.was_closed, store_s=recovery.took_s, **memory.grown())
    spool.close()


async def peer_fill(data: Path, count: int) -> None:
    """Fill a ``SQLiteAckQueue``; its own ``put`` would take minutes for the same rows."""
    queue = peer("ack_queue", data)
    queue.close()
    database = sqlite3.connect(data / "queue" / "data.db")
    now_s = time.time()
    for first in range(0, count, _PER_TRANSACTION):
        rows = [(pickle.dumps(each), now_s) for each in payloads(min(_PER_TRANSACTION, count - first))]
        with database:
            database.executemany("INSERT INTO ack_queue_default (data, timestamp, status) VALUES (?, ?, 0)", rows)
    database.close()
    say(event="full")


async def peer_open(data: Path, count: int) -> None:
    """Measure the same of a ``SQLiteAckQueue``."""
    memory = _Memory()
    started_s = time.perf_counter()
    queue = peer("ack_queue", data)
    ready_s = time.perf_counter() - started_s
    taken = queue.get(block=False, raw=True)
    first_s = time.perf_counter() - started_s
    if queue.qsize() + 1 != count:
        raise RuntimeError(f"{queue.qsize() + 1} of {count} messages wait")
    say(ready_s=ready_s, first_s=first_s, **memory.grown())
    queue.nack(id=taken["pqid"])
    queue.close()


class _Memory:
    """The resident memory from here on, beside what it is now."""

    def __init__(self) -> None:
        with suppress(OSError):  # else the peak is that of the imports, if it was higher
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._process = psutil.Process()
        self._before = self._process.memory_info().rss

    def grown(self) -> dict[str, float]:
        """Return what was added, in MB: at most, and now."""
        status = Path("/proc/self/status").read_text(encoding="ascii")
        (peak_kib,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
        return {
            "peak_mb": (peak_kib * 1024 - self._before) / 1e6,
            "rss_mb": (self._process.memory_info().rss - self._before) / 1e6,
            "process_mb": self._process.memory_info().rss / 1e6,
        }


# -- draining ---------------------------------------------------------------------------------------------------------


async def peer_drain(data: Path, count: int, *, workers: int) -> None:
    """Measure get and ack of a ``SQLiteAckQueue``, in threads."""
    await peer_fill(data, count)
    queue = peer("ack_queue", data)

    def work(_: int) -> None:
        with suppress(Empty):
            while True:
                queue.ack(id=queue.get(block=False, raw=True)["pqid"])

    took_s = together(workers, work)
    if queue.acked_count() != count:
        raise RuntimeError(f"{queue.acked_count()} of {count} messages were acknowledged")
    say(per_s=count / took_s)
