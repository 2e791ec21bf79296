"""RocksDB implementation of ``Engine``: the only module that imports rocksdict.

This module hides the following traps of rocksdict 0.3.29. Each has a test in
``tests/dmq/store/engines/test_rocks_traps.py``:

- Iterators of the dict interface end silently at a corrupt block. Only ``iter()`` is used, and its ``status()`` is
  checked whenever it becomes invalid.
- The setter of the lower iterator bound sets the upper one, and bounds refer to freed memory once their bytes object is
  deleted. No bounds are used; keys are compared here.
- A live column-family object keeps the lock after ``close``. These objects are dropped first.
- A write holds the GIL while it waits for the disk: for the sync, for the log's file, for a new log when a memtable is
  full, and for late compactions. So ``write`` only fills memory (``_database_options``), full memtables are switched
  with ``flush`` before it, and ``flush_wal`` writes and syncs the log. ``flush`` and ``flush_wal`` release the GIL.
- After a fork the child's writes seem to succeed but are lost. Opening another database hangs, since RocksDB's threads
  do not exist in the child, and a normal exit crashes in destructors. The child is refused, and the destructors are
  prevented from running.
- The default recovery mode drops everything after a damaged WAL record without an error. Only tail corruption is
  tolerated here. That mode still skips a torn record in any log except the newest, and never reports the cut:
  ``dmq.store.engines.wal`` does.
- Errors are bare ``Exception`` with RocksDB's text. Only ``_translated`` parses it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple
from weakref import WeakSet

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    Checkpoint,
    DBCompressionType,
    DBRecoveryMode,
    Options,
    Rdict,
    RdictIter,
    WriteBatch,
    WriteOptions,
)

from dmq.errors import (
    StoreBroken,
    StoreClosed,
    StoreCorrupt,
    StoreError,
    StoreFailed,
    StoreForked,
    StoreFull,
    StoreLocked,
    StoreNoDescriptors,
    StoreReadOnly,
    told,
)
from dmq.store.engines.engine import Batch, EngineStats, Rows
from dmq.store.engines.wal import check_logs
from dmq.store.schema.keys import Family

_MIB = 1024 * 1024
_OPTIONS_FOLDER = Path(__file__).parent / "rocksdb_options"  # a file of options that rocksdict has no setters for
LOG_BUFFER_BYTES = 16 * _MIB  # a larger batch is written to the file during ``write``
_SWITCH_LOOK_BYTES = 256 * 1024  # bytes written between two checks of the memtable sizes, 6 us each
_NEVER_FULL_BYTES = 128 * _MIB  # above the sizes of the memtables: twice the largest request
_WRITE_STALL_LOOK_S = 0.01
_BLOOM_BITS_PER_KEY = 10


class RocksOptions(NamedTuple):
    """Sizes that decide memory, disk use and the time to reopen after a kill (about 0.5 s per 60 MB of WAL).

    ``recovery_mode`` "skip_any" is for salvage from a copy: it opens a damaged database and silently omits damaged
    rows. ``is_read_only`` replays the WAL into memory and changes no table: for a checkpoint, or a store without a
    process. ``secondary`` opens a database for reading while another process writes it. Its value is a directory for
    RocksDB's info log. ``open_files_max`` must then be -1, since the other process removes tables. See
    ``RocksEngine.oldest_log``. ``corrupt`` is the error raised for damage; its text names the next step.
    """

    wal_bytes_max: int = 32 * _MIB
    memtable_bytes_max: int = 64 * _MIB
    cache_bytes: int = 16 * _MIB
    open_files_max: int = 512  # tables
    recovery_mode: Literal["strict", "skip_any"] = "strict"
    is_read_only: bool = False
    secondary: Path | None = None
    corrupt: type[StoreCorrupt] = StoreCorrupt


_BLOCK_BYTES = 16 * 1024

# Share of a write buffer by family: timeline and queue carry payloads, the rest small rows.
_WRITE_BUFFER_BYTES = {
    Family.META: 2 * _MIB,
    Family.TIMELINE: 16 * _MIB,
    Family.INDEX: 8 * _MIB,
    Family.QUEUE: 16 * _MIB,
    Family.GROUP: 4 * _MIB,
    Family.AUDIT: 8 * _MIB,
    Family.PROPERTY: 4 * _MIB,
}


def _database_options(options: RocksOptions) -> Options:
    made, _ = Options.load_latest(str(_OPTIONS_FOLDER))
    made.set_writable_file_max_buffer_size(LOG_BUFFER_BYTES)
    made.set_avoid_unnecessary_blocking_io(True)  # the end of an iterator removes no file, and holds the GIL
    made.create_if_missing(True)
    made.create_missing_column_families(True)
    is_strict = options.recovery_mode == "strict"
    made.set_wal_recovery_mode(
        DBRecoveryMode.tolerate_corrupted_tail_records() if is_strict else DBRecoveryMode.skip_any_corrupted_record()
    )
    made.set_paranoid_checks(is_strict)
    made.set_max_background_jobs(2)
    made.set_bytes_per_sync(_MIB)
    made.set_max_open_files(options.open_files_max)
    made.set_keep_log_file_num(4)
    made.set_max_log_file_size(4 * _MIB)
    made.set_stats_dump_period_sec(0)
    made.set_stats_persist_period_sec(0)
    made.set_skip_stats_update_on_db_open(True)
    made.set_is_fd_close_on_exec(True)
    return made


def _family_options(family: Family, cache: Cache, is_strict: bool) -> Options:
    made = Options(raw_mode=True)
    if not is_strict:
        made.set_disable_auto_compactions(True)  # a compaction that meets damage ends all writing
    buffer_bytes = _WRITE_BUFFER_BYTES[family]
    unreachable_bytes = buffer_bytes + _NEVER_FULL_BYTES  # ``_switch_memtables`` comes first
    made.set_write_buffer_size(unreachable_bytes)
    made.set_arena_block_size(min(_MIB, buffer_bytes // 8))
    made.set_max_write_buffer_number(3)
    table = BlockBasedOptions()
    table.set_block_cache(cache)
    table.set_block_size(_BLOCK_BYTES)
    table.set_format_version(5)
    if family in (Family.INDEX, Family.GROUP, Family.META):
        table.set_bloom_filter(_BLOOM_BITS_PER_KEY, False)
    if family is Family.INDEX:
        # Most look-ups are for ids that were never seen; the filter answers them without a search.
        made.set_memtable_prefix_bloom_ratio(0.05 * buffer_bytes / unreachable_bytes)
        made.set_memtable_whole_key_filtering(True)
    if family in (Family.TIMELINE, Family.PROPERTY):
        # Delivered entries leave tombstones in front of the head, or of the messages with a frequent value; files full
        # of them are compacted soon.
        made.add_compact_on_deletion_collector_factory(1024, 512, 0.5)
    made.set_compression_type(DBCompressionType.lz4())
    made.set_block_based_table_factory(table)
    return made


def _translated(error: Exception, path: Path | None = None, corrupt: type[StoreCorrupt] = StoreCorrupt) -> StoreError:
    """Return the store error for RocksDB's text, rocksdict's only detail. Prefix ``path`` if the text lacks it."""
    text = " ".join(str(error).split())  # one line
    lowered = text.lower()
    if path is not None and str(path) not in text:
        text = f"{path}: {text}"
    if "lock hold by current process" in lowered or "while lock file" in lowered:
        return told(StoreLocked, text)
    for kind, signs in _SYSTEM:
        if any(sign in lowered for sign in signs):
            return told(kind, text)
    if "corruption" in lowered or "no such file" in lowered or "does not exist" in lowered or "mismatch" in lowered:
        return told(corrupt, text)
    return StoreFailed(text)


# RocksDB's text contains the C library's message for the errno. A table that cannot be opened for lack of
# descriptors is not damage, so these come first.
_SYSTEM: tuple[tuple[type[StoreError], tuple[str, ...]], ...] = (
    (StoreFull, ("no space left on device", "disk quota exceeded", "nospace", "no space")),
    (StoreNoDescriptors, ("too many open files",)),
    (StoreReadOnly, ("read-only file system", "permission denied", "operation not permitted")),
    (StoreBroken, ("input/output error",)),
)


class _Process:
    """RocksDB state of this process. A forked child inherits the memory of the engines but none of their threads."""

    def __init__(self) -> None:
        self.engines: WeakSet[RocksEngine] = WeakSet()
        self.has_threads = False
        self.is_forked = False

    def after_fork_in_child(self) -> None:
        """Prevent RocksDB's destructors from running: they wait for threads that do not exist here, or crash."""
        if not self.has_threads:
            return
        import ctypes  # imported only in the rare fork case

        self.is_forked = True
        for engine in self.engines:
            for each in (engine._db, *engine._dicts, *engine._handles):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
        libc = ctypes.CDLL(None)
        if hasattr(libc, "on_exit"):  # end, with the same status, before the destructors of static objects
            libc.on_exit(libc._exit, None)


_process = _Process()
os.register_at_fork(after_in_child=_process.after_fork_in_child)


def check_not_forked() -> None:
    """Raise ``StoreForked`` if this process is a fork of one that used RocksDB and so cannot open a store."""
    if _process.is_forked:
        raise StoreForked("this process is a fork of one that used a store; open stores in a new process")


class RocksEngine:
    """RocksDB implementation of ``Engine``. Opening replays the WAL.

    ``recovered_cut_bytes`` is the length of the unacknowledged, torn end of the WAL that recovery dropped.
    """

    def __init__(self, path: Path, options: RocksOptions | None = None) -> None:
        check_not_forked()
        _process.has_threads = True
        options = options or RocksOptions()
        self.path = path
        self._corrupt = options.corrupt
        self._is_strict = options.recovery_mode == "strict"
        # One shard. The LRU cache has 32: it would keep no block with a message of more than half a megabyte, and
        # each seek to an empty queue next to such a block would decompress all of it again.
        self._cache = Cache.new_hyper_clock_cache(options.cache_bytes, _BLOCK_BYTES)
        self._pid = os.getpid()
        self._has_failed = False
        self._reclaiming = threading.Lock()  # column families cannot be closed during a compaction call
        self._unsynced = WriteOptions()
        self._unsynced.sync = False
        self._unsynced.no_slowdown = True  # RocksDB would sleep in ``write``
        self._wal_bytes_max = options.wal_bytes_max
        self._memtable_bytes_max = options.memtable_bytes_max
        self._written_bytes = self._flushed_bytes = self._looked_bytes = 0
        self._switched_bytes = [0] * len(Family)  # written when the memtable of the family was new
        is_strict = self._is_strict
        self._is_read_only = options.is_read_only or options.secondary is not None
        self.recovered_cut_bytes = check_logs(path) if is_strict and options.secondary is None else 0
        access = AccessType.read_only() if options.is_read_only else AccessType.read_write()
        if options.secondary is not None:
            access = AccessType.secondary(str(options.secondary))
        try:
            there = Rdict.list_cf(str(path)) if self._is_read_only else [family.name.lower() for family in Family]
            # A directory of an older format lacks the last families until a daemon has opened it: they read as empty.
            names = [family.name.lower() for family in Family if family.name.lower() in there]
            self._absent = frozenset(family for family in Family if family.name.lower() not in there)
            families = {name: _family_options(Family[name.upper()], self._cache, is_strict) for name in names}
            self._db: Rdict | None = Rdict(
                str(path), _database_options(options), column_families=families, access_type=access
            )
            self._dicts = [self._db.get_column_family(name) for name in names]
            self._handles = [self._db.get_column_family_handle(name) for name in names]
        except Exception as error:
            raise self._told(error, path) from error
        _process.engines.add(self)

    def write(self, batch: Batch) -> None:
        db = self._open_db()
        try:
            while True:
                writes = self._packed(batch)
                size = writes.size_in_bytes()
                if self._written_bytes + size >= self._looked_bytes + _SWITCH_LOOK_BYTES:
                    self._switch_memtables(size)
                if self._written_bytes + size > self._flushed_bytes + LOG_BUFFER_BYTES:
                    self._flush_log(is_synced=False)
                try:
                    db.write(writes, self._unsynced)
                except Exception as error:
                    if "incomplete: write stall" not in str(error).lower():
                        raise
                    self._await_compaction(db)
                else:
                    self._written_bytes += size
                    return
        except StoreError:
            raise
        except Exception as error:
            self._has_failed = True
            raise self._told(error) from error

    def _packed(self, batch: Batch) -> WriteBatch:
        handles = self._handles
        writes = WriteBatch(raw_mode=True)
        for family, start, stop in batch.ranges:
            writes.delete_range(start, stop, handles[family])
        delete = writes.delete
        for family, key in batch.deletes:
            delete(key, handles[family])
        put = writes.put
        for family, key, value in batch.puts:
            put(key, value, handles[family])
        return writes

    def _switch_memtables(self, size: int) -> None:
        """Start new memtables, and a new log, if ``size`` more bytes reach a bound.

        Otherwise RocksDB would create the log's file within ``write``. ``flush`` also waits while too many tables are
        unwritten or uncompacted. A rarely written family would keep old logs, which slows down opening. It is therefore
        switched after ``wal_bytes_max``.
        """
        active = [rows.property_int_value("rocksdb.cur-size-active-mem-table") or 0 for rows in self._dicts]
        end = self._written_bytes + size
        full = [
            family
            for family in Family
            if active[family] + _SWITCH_LOOK_BYTES > _WRITE_BUFFER_BYTES[family]
            or end - self._switched_bytes[family] > self._wal_bytes_max
        ]
        left = [family for family in Family if family not in full]
        if left and sum(active[family] for family in left) + size > self._memtable_bytes_max * 7 // 8:
            full.append(max(left, key=lambda family: active[family]))
        for family in full:
            self._dicts[family].flush(False)
            self._switched_bytes[family] = self._written_bytes
        self._looked_bytes = self._written_bytes

    @staticmethod
    def _await_compaction(db: Rdict) -> None:
        """Wait until RocksDB accepts writes without a delay, or has a background error and never will."""
        while True:
            threading.Event().wait(_WRITE_STALL_LOOK_S)
            stalled = ("rocksdb.is-write-stopped", "rocksdb.actual-delayed-write-rate")
            if not any(map(db.property_int_value, stalled)) or db.property_int_value("rocksdb.background-errors"):
                return

    def flush(self) -> None:
        self._flush_log(is_synced=False)

    def sync(self) -> None:
        self._flush_log(is_synced=True)

    def _flush_log(self, *, is_synced: bool) -> None:
        db = self._open_db()
        written_bytes = self._written_bytes
        try:
            db.flush_wal(is_synced)
            self._flushed_bytes = written_bytes
        except Exception as error:
            self._has_failed = True
            raise self._told(error) from error

    def get_many(self, family: Family, keys: Sequence[bytes]) -> list[bytes | None]:
        self._open_db()
        if family in self._absent:
            return [None] * len(keys)
        try:
            values: list[bytes | None] | None = self._dicts[family].get(list(keys))
        except Exception as error:
            raise self._told(error) from error
        return values if values is not None else []

    def scan(self, family: Family, start: bytes, stop: bytes, *, limit: int, bytes_max: int = 2**62) -> Rows:
        self._open_db()
        if family in self._absent:
            return Rows([], True)
        rows: list[tuple[bytes, bytes]] = []
        taken_bytes = 0
        try:
            cursor = self._dicts[family].iter()
            cursor.seek(start)
            valid, read_key, read_value, step = cursor.valid, cursor.key, cursor.value, cursor.next
            while valid():
                key: bytes = read_key()
                if key >= stop:
                    return Rows(rows, True)
                if len(rows) >= limit or taken_bytes >= bytes_max:
                    return Rows(rows, False)
                value: bytes = read_value()
                rows.append((key, value))
                taken_bytes += len(value)
                step()
        except Exception as error:
            raise self._told(error) from error
        try:
            self._raise_if_damaged(cursor)  # an invalid cursor is the end, or damage
        except StoreCorrupt:
            if not rows or (len(rows) < limit and taken_bytes < bytes_max):
                raise
            return Rows(rows, False)  # the requested rows are complete; the next scan reports the damage
        return Rows(rows, True)

    def last(self, family: Family, start: bytes, stop: bytes) -> tuple[bytes, bytes] | None:
        self._open_db()
        if family in self._absent:
            return None
        try:
            cursor = self._dicts[family].iter()
            cursor.seek_for_prev(stop)
            if cursor.valid() and cursor.key() == stop:
                cursor.prev()
            if cursor.valid():
                key: bytes = cursor.key()
                return (key, cursor.value()) if key >= start else None
        except Exception as error:
            raise self._told(error) from error
        self._raise_if_damaged(cursor)
        return None

    def clear(self, family: Family) -> None:
        db, name = self._open_db(), family.name.lower()
        try:
            del self._handles[family]  # it would keep the column family
            self._dicts[family].close()
            db.drop_column_family(name)
            self._dicts[family] = db.create_column_family(name, _family_options(family, self._cache, self._is_strict))
            self._handles.insert(family, db.get_column_family_handle(name))
        except Exception as error:
            self._has_failed = True
            raise self._told(error) from error

    def stats(self) -> EngineStats:
        self._open_db()

        def total(name: str) -> int:
            return sum(each.property_int_value(name) or 0 for each in self._dicts)

        return EngineStats(
            total("rocksdb.cur-size-all-mem-tables"),
            total("rocksdb.total-sst-files-size"),
            total("rocksdb.estimate-num-keys"),
        )

    def reclaim(self, family: Family, ranges: Sequence[tuple[bytes, bytes]]) -> None:
        """Compact these key ranges, so that deleted rows release their disk space.

        The calls release the GIL. ``close`` from another thread ends it early.
        """
        with self._reclaiming:
            self._open_db()
            rows = self._dicts[family]
            try:
                rows.flush(True)
                for start, stop in ranges:
                    if self._db is None:
                        return
                    rows.compact_range(start, stop)
            except Exception as error:
                if self._db is not None:  # else it was cut short by closing
                    raise self._told(error) from error

    def checkpoint(self, path: Path) -> None:
        """Create a database in ``path``, a new name on the same file system, with every write so far, synced or not.

        It is one consistent cut through all families. Tables are shared by hard links. Later changes to one database do
        not affect the other.
        """
        db = self._open_db()
        try:
            db.flush_wal(False)
            # The checkpoint writes the memtables itself, and keeps the GIL meanwhile. Flushing frees it. The second
            # flush writes the rows that came during the first: few are left for the checkpoint.
            for each in (*self._dicts, *self._dicts):
                each.flush(True)
            Checkpoint(db).create_checkpoint(str(path))
            path.chmod(0o700)  # its tables are the store's own files
        except Exception as error:
            raise self._told(error, path) from error

    def oldest_log(self) -> int:
        """Return the number of the oldest log that recovery would need. Older logs may be removed at any time.

        A process that opens the database as a secondary reads the list of tables first and the logs second. If a log is
        removed in between, the secondary lacks rows. If this number is the same before and after, no log was removed.
        """
        return int(self._open_db().property_int_value("rocksdb.min-log-number-to-keep") or 0)

    def close(self) -> None:
        db, self._db = self._db, None
        if db is None or os.getpid() != self._pid:
            return
        last_steps: list[Callable[[], object]] = (
            [] if self._has_failed or self._is_read_only else [partial(db.flush_wal, True)]
        )
        is_cut = not self._reclaiming.acquire(blocking=False)
        if is_cut:  # tables stay unchanged; closing then writes none either, and the log has the missing rows
            last_steps += [partial(db.cancel_all_background, False), self._reclaiming.acquire]
        # The lock is released when the last object that refers to the database is gone.
        self._handles.clear()
        failures: list[Exception] = []
        for step in (*last_steps, *(each.close for each in self._dicts), db.close):
            try:
                step()
            except Exception as error:  # noqa: BLE001 - the other ones must still let go
                if not (is_cut and "shutdown in progress" in str(error).lower()):
                    failures.append(error)
        self._dicts.clear()
        self._reclaiming.release()
        if failures and not self._has_failed:
            raise self._told(failures[0]) from failures[0]

    def _open_db(self) -> Rdict:
        if os.getpid() != self._pid:
            raise StoreForked("the store belongs to the process that opened it; open stores in a new process")
        if self._db is None:
            raise StoreClosed("the store is closed")
        return self._db

    def _raise_if_damaged(self, cursor: RdictIter) -> None:
        try:
            cursor.status()
        except Exception as error:
            raise self._told(error) from error

    def _told(self, error: Exception, path: Path | None = None) -> StoreError:
        return _translated(error, path, self._corrupt)


def rebuild_manifest(path: Path) -> None:
    """Rebuild the lost manifest of a copy in ``path`` from its tables and logs; damaged ones are left out."""
    try:
        Rdict.repair(str(path), _database_options(RocksOptions()))
    except Exception as error:
        raise _translated(error, path) from error
