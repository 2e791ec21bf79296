"""Public interface of the store: submit ops, read rows, and read figures."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple, Self

from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.log import LibraryLog
from dmq.errors import FormatUnsupported, StoreCorrupt, StoreError, StoreStalled
from dmq.store.engines.engine import Batch, Engine, EngineStats, Rows, queue_begin, queue_end
from dmq.store.engines.rocks import RocksEngine, RocksOptions, check_not_forked
from dmq.store.files.cell import Cell, tighten, unusable
from dmq.store.files.disk import DiskGuard, DiskState
from dmq.store.files.identity import draw
from dmq.store.files.steady_clock import ClockOptions, SteadyClock
from dmq.store.schema import keys
from dmq.store.schema.accounting.counts import BUCKET_MS, HOUR_MS, DueCount, due_in
from dmq.store.schema.accounting.ledger import LedgerHead
from dmq.store.schema.accounting.outbox import OutboxState, decode_state
from dmq.store.schema.cell.clock import decode_clock, encode_clock
from dmq.store.schema.cell.identity import Identity, StorePlace, decode_identity, encode_identity
from dmq.store.schema.keys import FORMAT_VERSION, Family
from dmq.store.schema.messages.index import COPY_SUFFIX_MAX, REMEMBERED, Receipt, decode_index, failed_message_id
from dmq.store.writer.assemble import Assembler, RecoveredFigures
from dmq.store.writer.batch_log import BatchLog, LogMoved, LogStart
from dmq.store.writer.counts import begin_bytes, put_hours_of_format_1
from dmq.store.writer.ledger_opening import open_ledger, read_head
from dmq.store.writer.marks import Marks
from dmq.store.writer.operations import Append, Appended, Op, Put, Schedule
from dmq.store.writer.recount import read_ledger
from dmq.store.writer.writer import CommitStats, LoopUnit, OnStored, Unit, Writer

_MIB = 1024 * 1024
log = LibraryLog("dmq.store")
_SMALL_BYTES = 64 * 1024  # a batch of acknowledgements; refused on arrival while the writer would hold it back
_AGED_FROM_VERSION = 3
_DISK_LOOK_S = 0.05  # the writes of one interval are small compared with the low-water mark


def _unknown_gap(first: int, count: int) -> bytes:
    return b"\0" + first.to_bytes(8, "big") + count.to_bytes(8, "big")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Options of a store. ``durability`` "process" survives SIGKILL but not power loss; "disk" survives both."""

    durability: Literal["disk", "process"] = "disk"
    idempotency_window_ms: int = 15 * 60_000
    outbox_bytes_max: int = 1024 * _MIB
    pending_ops_max: int = 65_536
    pending_bytes_max: int = 256 * _MIB
    low_water_bytes: int | None = None
    ballast_bytes: int = 16 * _MIB
    full_bytes: int = 0  # with less free space and no ballast, writes wait for space; 0: they fail on a full disk
    directory_mode: int = 0o700
    clock: ClockOptions = field(default_factory=ClockOptions)
    rocks: RocksOptions = field(default_factory=RocksOptions)
    gap_event: Callable[[int, int], bytes] = _unknown_gap
    ledger_kinds: Collection[int] = ()  # event kinds that the ledger counts; without any there is no ledger
    begins_ledger: bool = True  # in a store that has none


_COPIES_MAX = 1_000  # of one message for one group


class StoreRecovery(NamedTuple):
    """Result of opening a store."""

    is_new: bool
    was_closed: bool  # the last run ended with ``close``
    cut_bytes: int  # dropped from the end of the WAL: a torn record, which was never acknowledged
    sequence: int
    took_s: float
    is_copy: bool = False  # first opening of a backup or of a salvaged store


class Store:
    """One open cell. Any thread of the process that opened it may submit ops and read rows."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        options: StoreOptions,
        *,
        cell: Cell | None = None,
        disk: DiskGuard | None = None,
        batch_log: BatchLog | None = None,
    ) -> None:
        """Own an open ``engine`` from here on. Use ``Store.open`` for a store on disk."""
        started_s = clock.monotonic_s()
        self._engine = engine
        self._cell = cell
        self._batch_log = batch_log
        self.on_failure: Callable[[StoreError], None] = lambda _: None
        self.identity = _identity(engine, cell)
        if batch_log is not None:
            batch_log.watch(lambda error: self.on_failure(error))  # noqa: PLW0108 - set later, by who opened it
        self._pid = os.getpid()
        self._is_closed = False
        self._look_at_disk_s = 0.0
        self.outbox_bytes_max = options.outbox_bytes_max
        first, recovered, version, was_closed = self._begin_run(clock, options)
        while batch_log is not None:
            try:
                batch_log.append(first, opens=recovered.boot)
                break
            except LogMoved:
                first, recovered, version, was_closed = self._begin_run(clock, options)
        engine.write(first)
        engine.sync()
        self.marks = Marks(recovered.done)
        self._assembler = Assembler(
            engine,
            self.marks,
            self.clock,
            recovered,
            idempotency_window_ms=options.idempotency_window_ms,
            outbox_bytes_max=options.outbox_bytes_max,
            gap_event=options.gap_event,
            ledger_kinds=options.ledger_kinds if self.ledger_head is not None else (),
            bytes_since=self.bytes_since,
        )
        self._writer = Writer(
            engine,
            self._assembler,
            self.marks,
            self.clock,
            is_synced=options.durability == "disk",
            pending_ops_max=options.pending_ops_max,
            pending_bytes_max=options.pending_bytes_max,
            on_failure=lambda error: self.on_failure(error),  # noqa: PLW0108 - set later, by who opened it
            has_room=disk.has_room if disk is not None else lambda _: True,
            batch_log=batch_log,
        )
        self._disk = disk
        self._writer.start()
        cut_bytes = engine.recovered_cut_bytes if isinstance(engine, RocksEngine) else 0
        took_s = clock.monotonic_s() - started_s
        is_copy = cell is not None and cell.is_copy
        self.recovery = StoreRecovery(version is None, was_closed, cut_bytes, recovered.sequence, took_s, is_copy)

    def _begin_run(self, clock: Clock, options: StoreOptions) -> tuple[Batch, RecoveredFigures, int | None, bool]:
        """Apply the end of the log, if any, and return the first batch of this run with the figures of the last one."""
        engine = self._engine
        if self._batch_log is not None:
            self._batch_log.begin(engine, _log_start(engine, self.identity, self._cell))
        recovered, version, was_closed = _read_meta(engine)
        (kept,) = engine.get_many(Family.META, [keys.META_CLOCK])
        known = decode_clock(kept) if kept is not None else None
        self.known_clock = known  # clock row of an earlier process
        self.clock = SteadyClock(clock, options.clock, known, is_new=version is None)
        self.boot = recovered.boot
        first, self.ledger_head = self._opening_batch(recovered, version, options)
        self.bytes_since = begin_bytes(engine, first, run=recovered.boot, sequence=recovered.sequence)
        return first, recovered, version, was_closed

    def _opening_batch(
        self, recovered: RecoveredFigures, version: int | None, options: StoreOptions
    ) -> tuple[Batch, LedgerHead | None]:
        """Return the first batch of this run, and the head of the ledger if this run keeps one."""
        batch = _first_batch(self._engine, recovered, self.identity, version, self.clock)
        try:
            if not options.ledger_kinds or (not options.begins_ledger and read_head(self._engine) is None):
                return batch, None
            with_ledger = Batch()
            head = open_ledger(self._engine, with_ledger, run=recovered.boot, now_ms=self.clock.now_ms())
        except StoreCorrupt as error:  # the user of a damaged row reports it; a damaged ledger does not prevent opening
            log.warning("ledger_damaged", error=str(error), why="its head or its newest row is damaged")
            return batch, None
        batch.ranges += with_ledger.ranges
        batch.puts += with_ledger.puts
        return batch, head

    @classmethod
    def open(
        cls, path: Path, clock: Clock, options: StoreOptions | None = None, batch_log: BatchLog | None = None
    ) -> Self:
        """Open the cell in ``path``, or create it. The store owns ``batch_log`` from here on.

        Raise ``StoreLocked``, ``StoreCorrupt``, ``StoreReadOnly``, ``FormatUnsupported``, ``StoreFailed`` or
        ``StoreForked``, each with one clear line. An error leaves nothing open.
        """
        options = options or StoreOptions()
        started_s = clock.monotonic_s()
        check_not_forked()  # before a directory is made
        cell = Cell(path)
        with ExitStack() as undo:
            undo.callback(cell.close)
            if batch_log is not None:
                undo.callback(batch_log.close)
            try:
                if tighten(path, options.directory_mode):
                    log.warning("directory_mode_restricted", path=str(path), mode=f"{options.directory_mode:o}")
                disk = DiskGuard(
                    path,
                    low_water_bytes=options.low_water_bytes,
                    ballast_bytes=options.ballast_bytes,
                    full_bytes=options.full_bytes,
                )
                disk.make_room_to_open(sum(each.stat().st_size for each in cell.database.glob("*.log")))
                cell.database.mkdir(mode=0o700, exist_ok=True)
                tighten(cell.database, 0o700)
                cell.mark_opened()
                engine = RocksEngine(cell.database, options.rocks)
                undo.callback(engine.close)
                store = cls(engine, clock, options, cell=cell, disk=disk, batch_log=batch_log)
                undo.callback(store.close)
                cell.mark_created()
                cell.mark_original()
                store._settle_in(cell)
            except OSError as error:
                raise unusable(path, error) from error
            undo.pop_all()
        store.recovery = store.recovery._replace(took_s=clock.monotonic_s() - started_s)
        return store

    def _settle_in(self, cell: Cell) -> None:
        """Store the file identity of the marker if it was written after the identity was generated.

        This is safe, since no handle has been issued yet.
        """
        place = cell.place()
        if place != self.identity.place:
            self.identity = self.identity._replace(place=place)
            self.commit([Put(Family.META, keys.META_IDENTITY, encode_identity(self.identity))])

    # -- writing ------------------------------------------------------------------------------------------------------

    def send(self, op: Schedule | Append, on_stored: OnStored) -> None:
        """Commit a message that arrives alone, as ``submit`` does, batched with the others of this turn of the loop."""
        self._check_disk()
        self._writer.send(op, on_stored)

    def submit(self, unit: Unit, *, is_urgent: bool = False) -> None:
        """Commit ``unit``, then settle it: a ``LoopUnit`` on the attached loop, any other in the writer's thread.

        Errors that the ``settle`` of a loop unit raises go to the loop's exception handler.
        """
        if not (unit.is_direct or is_urgent):
            self._check_disk()
        self._writer.submit(unit, is_urgent=is_urgent)

    def commit(self, ops: Sequence[Op], *, is_urgent: bool = False) -> list[Receipt]:
        """Block until ``ops`` are durable and return their receipts. Must not run on the event loop."""
        done: Future[list[Receipt]] = Future()
        self.submit(Unit(ops, lambda unit: _resolve(done, unit)), is_urgent=is_urgent)
        return done.result()

    def commit_async(self, ops: Sequence[Op], *, is_urgent: bool = False) -> asyncio.Future[list[Receipt]]:
        """Return a future, of the attached loop, of the receipts. Cancelling it does not undo the write."""
        loop = self._writer.loop
        assert loop is not None, "attach a loop first"
        done: asyncio.Future[list[Receipt]] = loop.create_future()
        self.submit(LoopUnit(ops, lambda unit: _resolve(done, unit)), is_urgent=is_urgent)
        return done

    def attach(self, loop: asyncio.AbstractEventLoop, on_appended: Callable[[Appended], None]) -> None:
        """Settle loop units on ``loop``, with one wake-up per batch. ``on_appended`` is called before them."""
        self._writer.attach(loop, on_appended)

    # -- reading ------------------------------------------------------------------------------------------------------

    def get_many(self, family: Family, wanted: Sequence[bytes]) -> list[bytes | None]:
        """Return values as ``Engine.get_many`` does."""
        return self._engine.get_many(family, wanted)

    def scan(self, family: Family, start: bytes, stop: bytes, *, limit: int, bytes_max: int = 2**62) -> Rows:
        """Return rows as ``Engine.scan`` does."""
        return self._engine.scan(family, start, stop, limit=limit, bytes_max=bytes_max)

    def last(self, family: Family, start: bytes, stop: bytes) -> tuple[bytes, bytes] | None:
        """Return the last row as ``Engine.last`` does."""
        return self._engine.last(family, start, stop)

    def queue_end(self, topic_id: int, queue_id: int) -> int:
        """Return the offset after the last message of a queue."""
        return queue_end(self._engine, topic_id, queue_id)

    def queue_begin(self, topic_id: int, queue_id: int) -> int:
        """Return the first offset of a queue: all messages below it were removed."""
        return queue_begin(self._engine, topic_id, queue_id)

    def reclaim(self, family: Family, ranges: Sequence[tuple[bytes, bytes]]) -> None:
        """Release the disk space of rows deleted from these ranges. May take long: do not call it on an event loop."""
        if isinstance(self._engine, RocksEngine):
            self._engine.reclaim(family, ranges)

    def find(self, scope: int, message_id: bytes, *, with_withdrawn: bool = False) -> Receipt | None:
        """Return the state of a message that is pending or was finished within the idempotency window; else ``None``.

        A withdrawn, replaced or absorbed message is returned only with ``with_withdrawn``.
        """
        rows = self._engine.get_many(
            Family.INDEX, [keys.pack_index_prefix(g, scope) + message_id for g in self._assembler.generations()]
        )
        known = (decode_index(value) for value in rows if value is not None)
        return next((each for each in known if with_withdrawn or each.state not in REMEMBERED), None)

    def copies(self, scope: int, message_id: bytes) -> list[tuple[bytes, Receipt]]:
        """Return the index id and the state of each retry copy of a message, at most 1,000 per generation."""
        found: list[tuple[bytes, Receipt]] = []
        for generation in self._assembler.generations():
            prefix = keys.pack_index_prefix(generation, scope)
            start = prefix + message_id
            rows = self._engine.scan(Family.INDEX, start, start + b"\xff" * COPY_SUFFIX_MAX, limit=_COPIES_MAX).rows
            copies = ((key[len(prefix) :], value) for key, value in rows)
            found += [(each, decode_index(value)) for each, value in copies if failed_message_id(each) == message_id]
        return found

    # -- figures ------------------------------------------------------------------------------------------------------

    def pending(self) -> dict[int, int]:
        """Return the number of pending entries by scope, without a read."""
        return self._assembler.counts.pending.copy()

    def pending_of(self, scope: int) -> tuple[int, int]:
        """Return the number of pending entries of one scope, and their bytes, without a read."""
        counts = self._assembler.counts
        return counts.pending.get(scope, 0), counts.sizes.get(scope, 0)

    def pending_bytes(self) -> dict[int, int]:
        """Return the pending bytes by scope, of entries with a sequence above ``bytes_since``, without a read."""
        return self._assembler.counts.sizes.copy()

    def ledger(self) -> tuple[dict[tuple[int, int], dict[int, int]], dict[int, int]]:
        """Return the ledger's counts by topic and group, and the pending entries by scope, all of one instant."""
        return read_ledger(self)

    def held(self) -> dict[int, int]:
        """Return the number of held entries by topic, without a read; topics without any are left out."""
        return self._assembler.counts.held.copy()

    def due_counts(self, scope: int, from_ms: int, until_ms: int, *, limit: int = 10_000) -> list[DueCount]:
        """Return the number of due entries of ``scope`` per minute, in order of time; empty minutes are left out."""
        start, stop = keys.hour_range(scope, from_ms // HOUR_MS, -(-until_ms // HOUR_MS))
        hours = self._engine.scan(Family.META, start, stop, limit=limit + 1)  # the first may be all too early
        minutes = (each for row in hours.rows for each in due_in(*row))
        return list(islice((each for each in minutes if from_ms < each.until_ms < until_ms + BUCKET_MS), limit))

    def last_due_ms(self, scope: int, from_ms: int) -> int:
        """Return the end of the last minute that begins by ``from_ms`` and has an entry of ``scope``; 0: none."""
        hour = from_ms // HOUR_MS
        while row := self._engine.last(Family.META, *keys.hour_range(scope, 0, hour + 1)):
            found = [each.until_ms for each in due_in(*row) if each.until_ms - BUCKET_MS <= from_ms]
            if found:
                return found[-1]
            hour = keys.hour_of(row[0]) - 1
        return 0

    def next_due_ms(self) -> int | None:
        """Return the key time of the first pending entry that is not held, or ``None``."""
        first = self._engine.scan(Family.TIMELINE, keys.timeline_key(self.marks.low()), keys.HELD_BEGIN, limit=1).rows
        return keys.unpack_timeline_key(first[0][0])[0] if first else None

    @property
    def cell_id(self) -> str:
        """Cell id of the directory; "memory" for a store in memory."""
        return self._cell.cell_id if self._cell is not None else "memory"

    @property
    def failure(self) -> StoreError | None:
        """Error that made the store stop accepting ops, or ``None``."""
        return self._writer.failure

    @property
    def writer(self) -> Writer:
        """Writer thread, for its figures."""
        return self._writer

    @property
    def commit_stats(self) -> CommitStats:
        """Totals of the writer since opening."""
        return self._writer.stats

    @property
    def outbox_state(self) -> OutboxState:
        """Figures of the audit outbox."""
        return self._assembler.outbox.state

    @property
    def outbox_synced(self) -> int:
        """Audit sequence below which events have the configured ``durability``, so that they may be exported."""
        return self._assembler.outbox.synced_end

    def engine_stats(self) -> EngineStats:
        """Return the figures of the engine."""
        return self._engine.stats()

    def disk(self) -> DiskState | None:
        """Check and return the free space; ``None`` for a store in memory."""
        return self._disk.check() if self._disk is not None else None

    def is_disk_low(self) -> bool:
        """Return True if new messages must be refused for lack of space. Checks the disk at most every 50 ms."""
        if self._disk is None:
            return False
        now_s = self.clock.monotonic_s()
        if now_s >= self._look_at_disk_s:
            self._look_at_disk_s = now_s + _DISK_LOOK_S
            self._disk.check()
        return self._disk.state.is_low

    def keeps_room_from(self, path: Path) -> bool:
        """Return True if a file at ``path`` must not be written now.

        It would use space of the store's disk, which is below its low-water mark and reserved for acknowledgements.
        """
        if self._cell is None or not self.is_disk_low():
            return False
        there = next((each for each in (path, *path.parents) if each.exists()), self._cell.path)
        return there.stat().st_dev == self._cell.path.stat().st_dev

    def is_disk_full(self) -> bool:
        """Return True if all writes wait for space. Checks the disk at most every 50 ms while there is enough."""
        return self.is_disk_low() and self._disk is not None and not self._disk.has_room(_SMALL_BYTES)

    @property
    def stalled_s(self) -> float:
        """Seconds of the current disk stall, as ``Writer.stalled_s``."""
        return self._writer.stalled_s

    def write_obstacle(self) -> str:
        """Return why a write would wait for an unknown time: a stalled or full disk, or an unreachable replica.

        Empty if it would not.
        """
        if stalled_s := self._writer.stalled_s:
            return f"the disk stalls: a write has taken {stalled_s:.0f} s, repeat it later"
        if self.is_disk_full():
            return "the disk is full: make room, then repeat it"
        return self.replica_obstacle()

    def replica_obstacle(self) -> str:
        """Return the reason why writes wait for the replication log; empty if they do not."""
        return self._batch_log.obstacle() if self._batch_log is not None else ""

    def _check_disk(self) -> None:
        if obstacle := self.write_obstacle():
            raise StoreStalled(obstacle)

    def checkpoint(self, path: Path) -> None:
        """Copy the store's state between two batches to ``path``, a new name on the same file system, by hard links.

        The last batch in it may not be synced yet. It is synced once a later ``commit`` has returned.
        """
        if not isinstance(self._engine, RocksEngine):
            raise StoreError("a store in memory has no checkpoint")
        self._engine.checkpoint(path)

    def read_beside(self) -> tuple[Path, int]:
        """Return the path of the database, for a process that opens it as a secondary, and its ``oldest_log``."""
        if not isinstance(self._engine, RocksEngine):
            raise StoreError("a store in memory has no database")
        return self._engine.path, self._engine.oldest_log()

    def close(self) -> None:
        """Commit the accepted ops, record the clean shutdown, sync, and release the directory. Idempotent.

        In a forked child it only closes its copy of the lock: other locks may be held by threads that do not exist
        there.
        """
        if os.getpid() != self._pid:
            if self._cell is not None:
                self._cell.close()
            return
        if self._batch_log is not None:
            self._batch_log.end_soon()
        self._writer.close()
        self.marks.close()
        is_clean = self._writer.failure is None and not self._is_closed
        self._is_closed = True
        with ExitStack() as last:
            if self._cell is not None:
                last.callback(self._cell.close)
            try:
                if is_clean:
                    batch = Batch()
                    batch.puts.append((Family.META, keys.META_CLOSED, keys.pack_u64(self._assembler.sequence)))
                    if self._batch_log is not None:
                        self._batch_log.append(batch)
                    self._engine.write(batch)
            finally:
                if self._batch_log is not None:
                    self._batch_log.close()
                self._engine.close()
            if is_clean and self._cell is not None:
                self._cell.mark_closed()


def _resolve(done: Future[list[Receipt]] | asyncio.Future[list[Receipt]], unit: Unit) -> None:
    if done.cancelled():
        return
    if unit.error is not None:
        done.set_exception(unit.error)
    else:
        done.set_result(unit.receipts)


def _read_meta(engine: Engine) -> tuple[RecoveredFigures, int | None, bool]:
    """Return the recovered figures, the format version (``None``: new store), and whether it was closed cleanly."""
    names = [
        keys.META_FORMAT,
        keys.META_BOOT,
        keys.META_SEQUENCE,
        keys.META_DONE,
        keys.META_GENERATION,
        keys.META_OUTBOX,
        keys.META_CLOSED,
    ]
    packed_version, boot, sequence, done, generation, outbox, closed = engine.get_many(Family.META, names)
    version = keys.unpack_u64(packed_version) if packed_version is not None else None
    if version is None and any(engine.scan(family, b"", b"\xff" * 32, limit=1).rows for family in Family):
        raise StoreCorrupt("the database has rows but no format version")
    if version is not None and version > FORMAT_VERSION:
        raise FormatUnsupported(f"the database has format version {version}, this Rock-DMQ knows {FORMAT_VERSION}")
    last_sequence = keys.unpack_u64(sequence) if sequence is not None else 0
    if closed is not None and keys.unpack_u64(closed) != last_sequence:
        raise StoreCorrupt(
            f"the store was closed at sequence {keys.unpack_u64(closed)}, but only {last_sequence} is there"
        )
    number, age_ms = keys.unpack_pair(generation) if generation is not None else (2, 0)
    if version is not None and version < _AGED_FROM_VERSION:  # a start by an unknown wall clock
        age_ms = 0
    recovered = RecoveredFigures(
        boot=(keys.unpack_u64(boot) if boot is not None else 0) + 1,
        sequence=last_sequence,
        done=keys.unpack_mark(done) if done is not None else 0,
        generation=number,
        generation_age_ms=age_ms,
        outbox=decode_state(outbox),
    )
    return recovered, version, closed is not None


def _log_start(engine: Engine, identity: Identity, cell: Cell | None) -> LogStart:
    (boot,) = engine.get_many(Family.META, [keys.META_BOOT])
    return LogStart(
        store=identity.number,
        boot=keys.unpack_u64(boot) if boot is not None else 0,
        directory=cell.path if cell is not None else None,
        checkpoint=engine.checkpoint if isinstance(engine, RocksEngine) else None,
    )


def _identity(engine: Engine, cell: Cell | None) -> Identity:
    """Return the identity of a store: the stored one, or a new one if the store is new or a copy."""
    (row,) = engine.get_many(Family.META, [keys.META_IDENTITY])
    place = cell.place() if cell is not None else StorePlace()
    if row is None:
        return draw(place)
    if cell is not None and cell.is_copy:
        log.warning("store_copy_detected", path=str(cell.path), why="it was restored from a backup, or salvaged")
        return draw(place)
    found = decode_identity(row)
    # A store in memory has no marker. With a cell, a row without a marker's identity is from an unfinished opening.
    if cell is None or (found.place == place and place != StorePlace()):
        return found
    log.warning("store_copy_detected", path=str(cell.path), why="its CELL file is not the one it was made with")
    return draw(place)


def _first_batch(
    engine: Engine, recovered: RecoveredFigures, identity: Identity, version: int | None, clock: SteadyClock
) -> Batch:
    batch = Batch()
    if version == 1:
        put_hours_of_format_1(engine, batch)
    batch.deletes.append((Family.META, keys.META_CLOSED))
    batch.puts += [
        (Family.META, keys.META_FORMAT, keys.pack_u64(FORMAT_VERSION)),
        (Family.META, keys.META_BOOT, keys.pack_u64(recovered.boot)),
        (Family.META, keys.META_IDENTITY, encode_identity(identity)),
        (Family.META, keys.META_GENERATION, keys.pack_pair(recovered.generation, recovered.generation_age_ms)),
    ]
    if (row := clock.row()) is not None:
        batch.puts.append((Family.META, keys.META_CLOCK, encode_clock(row)))
    return batch
