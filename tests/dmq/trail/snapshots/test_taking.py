"""Snapshots of a store under load: each is exactly what the events up to its sequence say."""

from __future__ import annotations

import asyncio
import random
import resource
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.effort import EFFORT
from support.models.trail.snapshot_check import check_snapshot, outbox_events
from support.rigs.broker.rig import an_envelope

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.errors import Refused
from broker_adapter.runtime.clock import SystemClock
from dmq.broker.broker import EmbeddedBroker
from dmq.errors import StoreCorrupt, StoreLocked
from dmq.recovery.backups.snapshots import cursors_of
from dmq.scheduler.scheduler import Scheduler
from dmq.store.engines.rocks import RocksEngine
from dmq.store.schema.keys import META_DONE, Family, pack_pair, pack_timeline_key
from dmq.store.schema.messages.record import EntryKind, encode_body, encode_waiting
from dmq.store.store import Store, StoreOptions
from dmq.store.writer.operations import Emit, Put, Schedule
from dmq.trail.events import gap_event
from dmq.trail.snapshots.taking import SnapshotFailed, SnapshotResult, Taker, directory_of, snapshot_of
from retry.policy import RetryPolicy, Table

pytestmark = pytest.mark.integration
GROUPS = ("workers", "others")
KINDS = frozenset({"NACKED", "RETRIED", "DEAD_EXHAUSTED", "DEAD_SENT_BACK", "DELIVERED", "ACKED"})
SNAPSHOTS_MAX = 50
MANY = 200_000 if EFFORT > 1 else 20_000
HOUR_MS = 3_600_000
PATIENCE_S = 20.0


class OutboxExporter:
    """Stands in for the exporter: the trail is the outbox, read when a test looks at it."""

    def __init__(self, store: Store, trail: Path) -> None:
        self.trail = trail
        self.store = store
        self.reached: int | None = None

    def flush(self) -> int:
        """Say how far it got: everything, unless a test says otherwise."""
        return self.store.outbox_state.next_sequence - 1 if self.reached is None else self.reached


class Cell:
    """A store with a broker and a scheduler at work, and who takes snapshots of it."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.trail = data.parent / "trail"
        self.store = Store.open(data, SystemClock(), StoreOptions(gap_event=gap_event))
        self.broker = EmbeddedBroker(self.store, queues_per_topic=4, group_start="earliest")
        self.scheduler = Scheduler(self.store, self.broker.placement, self.broker.checks, on_failure=lambda error: None)
        self.scheduler.start()
        self.exporter = OutboxExporter(self.store, self.trail)
        self.taker = Taker(self.store, self.exporter, data)

    async def snapshot(self, *, is_alone: bool = False) -> SnapshotResult:
        """Take one in another thread, as the daemon does."""
        cursors = cursors_of(self.broker.subscriptions)
        take: Callable[[], SnapshotResult] = lambda: self.taker.take(cursors, is_alone=is_alone)  # noqa: E731
        return await asyncio.get_running_loop().run_in_executor(None, take)

    async def close(self) -> None:
        """End in order."""
        await self.broker.close()
        self.scheduler.close()
        self.store.close()


async def _send(cell: Cell, rng: random.Random, ending: asyncio.Event) -> None:
    number = 0
    while not ending.is_set():
        envelopes = []
        for _ in range(rng.randint(1, 30)):
            number += 1
            delay_ms = rng.choice((0, 0, 1, 100, 300, 1_000, HOUR_MS))
            at_ms = cell.store.clock.now_ms() + delay_ms if delay_ms else 0
            message_group = rng.choice(("", "", "", "a", "b"))
            topic = rng.choice(("orders", "refunds"))
            envelopes.append(an_envelope(f"m-{number}", topic=topic, message_group=message_group, deliver_at_ms=at_ms))
        await cell.broker.send(envelopes)
        await asyncio.sleep(0.001)


async def _consume(cell: Cell, rng: random.Random, group: str, topic: str, ending: asyncio.Event) -> None:
    wanted = Subscription(topic, -1, frozenset())
    while not ending.is_set():
        for each in await cell.broker.receive(group, wanted, batch_max=16, invisible_ms=500, wait_ms=20):
            handle, chance = each.receipt_handle, rng.random()
            with suppress(Refused):  # it expired meanwhile
                if chance < 0.6:
                    await cell.broker.ack(group, topic, [handle])
                elif chance < 0.8:
                    await cell.broker.send_back(group, topic, handle, 0)
                elif chance < 0.85:
                    await cell.broker.send_back(group, topic, handle, -1)
                elif chance < 0.9:
                    await cell.broker.dead_letter(group, topic, handle, attempts=3)
                elif chance < 0.95:
                    await cell.broker.change_invisible(group, topic, handle, rng.choice((0, 100, HOUR_MS)))
        await asyncio.sleep(0)


def _has_all(cell: Cell, taken: SnapshotResult) -> bool:
    """Whether a snapshot has all kinds of rows, and all kinds of events come before it."""
    kinds = {event["kind"] for event in outbox_events(cell.store) if event["sequence"] <= taken.sequence}
    entries = {row["kind"] for row in pq.read_table(taken.path / "entries.parquet").to_pylist()}
    progress = pq.read_table(taken.path / "progress.parquet").to_pylist()
    return kinds >= KINDS and entries == {"DELAYED", "RETRY"} and any(row["hidden"] for row in progress)


async def _run_under_load(
    cell: Cell, seed: int, snapshots: int, is_enough: Callable[[Cell, SnapshotResult], bool] = lambda *_: True
) -> list[SnapshotResult]:
    """Take so many snapshots, and more until the last one is enough: on a slow disk less has happened by then."""
    rng = random.Random(seed)
    ending = asyncio.Event()
    for group in GROUPS:
        await cell.broker.set_group(group, policy=RetryPolicy(backoff=Table((50, 200)), max_attempts=3))
    # Not its own dead letters: they would lie there twice, and a failure's event names no offset.
    places = [*((group, topic) for group in GROUPS for topic in ("orders", "refunds")), ("others", "%DLQ%workers")]
    tasks = [asyncio.create_task(_send(cell, rng, ending))]
    tasks += [asyncio.create_task(_consume(cell, rng, group, topic, ending)) for group, topic in places]
    taken: list[SnapshotResult] = []
    while len(taken) < snapshots or not is_enough(cell, taken[-1]):
        assert len(taken) < SNAPSHOTS_MAX, "none had all kinds of rows and events"
        await asyncio.sleep(0.3)
        taken.append(await cell.snapshot())
    ending.set()
    await asyncio.gather(*tasks)
    return taken


def test_snapshots_under_load_match_the_trail(tmp_path: Path) -> None:
    """For every entry, queue and group: with retries, lanes, dead letters and message groups, while all goes on."""

    async def scenario() -> None:
        cell = Cell(tmp_path / "data")
        try:
            taken = await _run_under_load(cell, 1, 4, _has_all)
            events = outbox_events(cell.store)
            for each in taken:
                check_snapshot(each.path, events)
            last = await cell.snapshot(is_alone=True)
            check_snapshot(last.path, outbox_events(cell.store))
            # Those before may have been asked for the cursors before a queue was loaded, or went on.
            at_rest = pq.read_table(last.path / "progress.parquet").to_pylist()
            assert all(row["cursor"] is not None and row["cursor"] >= row["floor"] for row in at_rest)
        finally:
            await cell.close()
        assert not list(cell.data.glob(".*"))
        assert not list(directory_of(cell.trail, cell.store.cell_id).glob(".*"))

    asyncio.run(scenario())


def test_a_snapshot_of_a_stopped_store(tmp_path: Path) -> None:
    """It changes nothing in the store, says so when the store is in use, and insists on a whole trail."""

    async def scenario() -> tuple[str, int]:
        cell = Cell(tmp_path / "data")
        try:
            await _run_under_load(cell, 2, 1)
            with pytest.raises(StoreLocked, match="in use"):
                snapshot_of(cell.data, cell.trail, SystemClock(), reached=2**60)
        finally:
            await cell.close()
        return cell.store.cell_id, cell.store.outbox_state.next_sequence - 1

    cell_id, sequence = asyncio.run(scenario())
    data, trail = tmp_path / "data", tmp_path / "trail"
    before = {path: path.stat().st_mtime_ns for path in (data / "rocksdb").glob("*.sst")}
    with pytest.raises(SnapshotFailed, match=f"up to {sequence - 1} only"):
        snapshot_of(data, trail, SystemClock(), reached=sequence - 1)
    taken = snapshot_of(data, trail, SystemClock(), reached=sequence)
    assert (taken.sequence, taken.path.parent) == (sequence, directory_of(trail, cell_id))
    again = snapshot_of(data, trail, SystemClock(), reached=sequence)
    assert (again.path, again.is_new, again.taken_ms) == (taken.path, False, taken.taken_ms)
    assert {path: path.stat().st_mtime_ns for path in (data / "rocksdb").glob("*.sst")} == before
    store = Store.open(data, SystemClock())
    try:
        assert store.recovery.was_closed
        check_snapshot(taken.path, outbox_events(store))
    finally:
        store.close()
    with pytest.raises(StoreCorrupt, match="there is no store"):
        snapshot_of(tmp_path / "nothing", trail, SystemClock(), reached=0)
    assert not (tmp_path / "nothing").exists()


def test_nothing_is_left_of_a_snapshot_that_failed(tmp_path: Path) -> None:
    """Neither of one whose trail ends before it, nor of one whose process died, nor of one that was cancelled."""
    store = Store.open(tmp_path / "data", SystemClock())
    exporter = OutboxExporter(store, tmp_path / "trail")
    try:
        store.commit([Emit(gap_event(1, 1))])
        taker = Taker(store, exporter, tmp_path / "data")
        exporter.reached = 0
        for is_alone in (False, True):
            with pytest.raises(SnapshotFailed, match="up to 0 only, not to 1"):
                taker.take({}, is_alone=is_alone)
        exporter.reached = None
        (tmp_path / "trail" / "snapshots").rename(tmp_path / "gone")
        (tmp_path / "trail" / "snapshots").write_text("a file", encoding="utf-8")
        with pytest.raises(SnapshotFailed, match="File exists"):
            taker.take({})
        (tmp_path / "trail" / "snapshots").unlink()
        taker.cancel()
        for is_alone in (False, True):
            with pytest.raises(SnapshotFailed, match="cancelled"):
                taker.take({}, is_alone=is_alone)
        assert not list((tmp_path / "data").glob(".*"))
        assert not list((tmp_path / "trail").rglob("*.parquet"))
    finally:
        store.close()


class GatedEngine(RocksEngine):
    """A disk whose sync waits, while the gate is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_waiting = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def sync(self) -> None:
        self.is_waiting.set()
        self.gate.wait(PATIENCE_S)
        super().sync()


def test_an_unsynced_row_is_in_no_snapshot(tmp_path: Path) -> None:
    """A batch that was written and not synced is in the checkpoint: the snapshot is not there before the batch is."""
    engine = GatedEngine(tmp_path / "db")
    store = Store(engine, SystemClock(), StoreOptions())
    data, trail = tmp_path / "data", tmp_path / "trail"
    data.mkdir()
    with ThreadPoolExecutor(2) as pool:
        try:
            taker = Taker(store, OutboxExporter(store, trail), data)
            engine.is_waiting.clear()
            engine.gate.clear()
            written = pool.submit(store.commit, [Emit(gap_event(1, 1))])
            assert engine.is_waiting.wait(PATIENCE_S)
            taken = pool.submit(taker.take, {})
            until_s = time.monotonic() + PATIENCE_S
            while not list(trail.glob("snapshots/*/.new-*/manifest.json")):
                assert time.monotonic() < until_s
                time.sleep(0.01)  # a file of another process has no event
            wait([taken], timeout=1.0)  # the other process ends meanwhile; that this one waits has no event
            assert not written.done()
            assert not taken.done()
            assert not list(trail.glob("snapshots/*/0*"))
            engine.gate.set()
            assert taken.result(PATIENCE_S).sequence == 1
            assert written.done()
        finally:
            engine.gate.set()
            store.close()


def test_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    """A checkpoint and a hidden directory, whoever made them; a whole snapshot stays."""
    store = Store.open(tmp_path / "data", SystemClock())
    try:
        exporter = OutboxExporter(store, tmp_path / "trail")
        store.commit([Emit(gap_event(1, 1))])
        taken = Taker(store, exporter, tmp_path / "data").take({}, is_alone=True)
        left = [tmp_path / "data" / ".checkpoint-1", tmp_path / "data" / ".checkpoint-2.tmp"]
        left.append(taken.path.with_name(".new-1"))
        for each in left:
            each.mkdir()
            (each / "entries.parquet").write_bytes(b"half")
        Taker(store, exporter, tmp_path / "data")
        assert not any(each.exists() for each in left)
        assert taken.path.exists()
    finally:
        store.close()


def test_nothing_is_written_but_its_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container whose root cannot be written has no place for temporary files, and no need of one."""
    store = Store.open(tmp_path / "data", SystemClock())
    try:
        store.commit([Emit(gap_event(1, 1))])
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
        taken = Taker(store, OutboxExporter(store, tmp_path / "trail"), tmp_path / "data").take({})
        assert {each.suffix for each in taken.path.iterdir()} == {".parquet", ".json"}
        assert not list((tmp_path / "data").glob(".*"))
    finally:
        store.close()


def test_stranded_entries_are_reported(tmp_path: Path) -> None:
    """A row below the mark up to which all is finished is in the snapshot, and marked."""
    store = Store.open(tmp_path / "data", SystemClock())
    try:
        value = encode_waiting(EntryKind.DELAYED, 0, 7, 7, 5_000, 4_000, encode_body(b"\0m", b"", b"", b"x"))
        name = b"\x01\x01" + (1).to_bytes(2, "big") + bytes(8) + b"orders"
        rows = [Put(Family.TIMELINE, pack_timeline_key(at_ms, at_ms), value) for at_ms in (5_000, 6_000)]
        store.commit([Put(Family.META, b"n" + (7).to_bytes(4, "big"), name), *rows])
        store.commit([Put(Family.META, META_DONE, pack_pair(6_000, 0)), Emit(gap_event(1, 1))])
        taken = Taker(store, OutboxExporter(store, tmp_path / "trail"), tmp_path / "data").take({})
        found = pq.read_table(taken.path / "entries.parquet").to_pylist()
        assert [(row["entry"], row["is_stranded"]) for row in found] == [(5_000, True), (6_000, False)]
    finally:
        store.close()


def test_time_and_memory_of_many_entries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, not asserted: how long it takes, and how much the process of its own needs."""
    store = Store.open(tmp_path / "data", SystemClock())
    try:
        due_ms = SystemClock().now_ms() + HOUR_MS
        name = b"\x01\x01" + (1).to_bytes(2, "big") + bytes(8) + b"orders"
        store.commit([Put(Family.META, b"n" + (7).to_bytes(4, "big"), name)])
        for start in range(0, MANY, 2_000):
            ops = []
            for number in range(start, start + 2_000):
                message_id = b"\x01" + number.to_bytes(16, "big")
                value = encode_waiting(
                    EntryKind.DELAYED, 0, 7, 7, due_ms, 1, encode_body(message_id, b"", b"", bytes(200))
                )
                ops.append(Schedule(7, message_id, due_ms, value, gap_event(1, 1)))
            store.commit(ops)
        taker = Taker(store, OutboxExporter(store, tmp_path / "trail"), tmp_path / "data")
        started_s = time.perf_counter()
        taken = taker.take({})
        took_s = time.perf_counter() - started_s
        assert taken.entries == MANY
        peak_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        size = sum(path.stat().st_size for path in taken.path.iterdir())
        with capsys.disabled():
            print(f"\nsnapshot of {MANY:,} entries: {took_s:.2f} s, peak {peak_mib:.0f} MiB, {size / 1e6:.1f} MB")
    finally:
        store.close()
