"""In-memory engine: the reference model for RocksDB, and a store for tests that simulate crashes."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Sequence

from dmq.errors import StoreClosed, StoreFailed
from dmq.store.engines.engine import Batch, EngineStats, Rows
from dmq.store.schema.keys import Family


class _Table:
    """Sorted keys with their values."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.values: dict[bytes, bytes] = {}

    def put(self, key: bytes, value: bytes) -> None:
        if key not in self.values:
            insort(self.keys, key)
        self.values[key] = value

    def delete(self, key: bytes) -> None:
        if key in self.values:
            del self.values[key]
            del self.keys[bisect_left(self.keys, key)]

    def delete_range(self, start: bytes, stop: bytes) -> None:
        first, last = bisect_left(self.keys, start), bisect_left(self.keys, stop)
        for key in self.keys[first:last]:
            del self.values[key]
        del self.keys[first:last]


def _apply(tables: list[_Table], batch: Batch) -> None:
    for family, start, stop in batch.ranges:
        tables[family].delete_range(start, stop)
    for family, key in batch.deletes:
        tables[family].delete(key)
    for family, key, value in batch.puts:
        tables[family].put(key, value)


class MemoryEngine:
    """In-memory implementation of ``Engine``. ``crashed()`` returns the state after a power loss."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a batch is atomic for readers in other threads
        self._live = [_Table() for _ in Family]
        self._synced = [_Table() for _ in Family]
        self._unsynced: list[Batch] = []
        self._is_closed = False
        self._has_failed = False
        self.fail_next_write = False
        self.fail_next_sync = False

    def crashed(self) -> MemoryEngine:
        """Return a new engine with the synced batches, and close this one."""
        self._is_closed = True
        return self.copied()

    def copied(self) -> MemoryEngine:
        """Return a new engine with the synced batches; this one stays open."""
        after = MemoryEngine()
        for table, live, synced in zip(self._synced, after._live, after._synced, strict=True):
            for copy in (live, synced):
                copy.keys, copy.values = list(table.keys), dict(table.values)
        return after

    def reopened(self) -> MemoryEngine:
        """Return a new engine with every written batch, as after SIGKILL or a clean close."""
        self._is_closed = False
        self.sync()
        return self.crashed()

    def write(self, batch: Batch) -> None:
        self._check_open()
        if self.fail_next_write:
            self.fail_next_write, self._has_failed = False, True
            raise StoreFailed("write failed (injected)")
        taken = Batch()
        taken.ranges, taken.deletes, taken.puts = list(batch.ranges), list(batch.deletes), list(batch.puts)
        with self._lock:
            _apply(self._live, taken)
        self._unsynced.append(taken)

    def flush(self) -> None:
        self._check_open()

    def sync(self) -> None:
        self._check_open()
        if self.fail_next_sync:
            self.fail_next_sync, self._has_failed = False, True
            raise StoreFailed("sync failed (injected)")
        for batch in self._unsynced:
            _apply(self._synced, batch)
        self._unsynced.clear()

    def get_many(self, family: Family, keys: Sequence[bytes]) -> list[bytes | None]:
        self._check_open()
        values = self._live[family].values
        with self._lock:
            return [values.get(key) for key in keys]

    def scan(self, family: Family, start: bytes, stop: bytes, *, limit: int, bytes_max: int = 2**62) -> Rows:
        self._check_open()
        table = self._live[family]
        rows: list[tuple[bytes, bytes]] = []
        taken_bytes = 0
        with self._lock:
            at, end = bisect_left(table.keys, start), bisect_left(table.keys, stop)
            while at < end and len(rows) < limit and taken_bytes < bytes_max:
                key = table.keys[at]
                value = table.values[key]
                rows.append((key, value))
                taken_bytes += len(value)
                at += 1
        return Rows(rows, at >= end)

    def last(self, family: Family, start: bytes, stop: bytes) -> tuple[bytes, bytes] | None:
        self._check_open()
        table = self._live[family]
        with self._lock:
            at = bisect_left(table.keys, stop) - 1
            if at < 0 or table.keys[at] < start:
                return None
            return table.keys[at], table.values[table.keys[at]]

    def clear(self, family: Family) -> None:
        self._check_open()
        self._live[family], self._synced[family] = _Table(), _Table()

    def stats(self) -> EngineStats:
        self._check_open()
        return EngineStats(0, 0, sum(len(table.keys) for table in self._live))

    def close(self) -> None:
        if not self._is_closed:
            if not self._has_failed:
                self.sync()
            self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreClosed("the engine is closed")
