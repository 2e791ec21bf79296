"""Protocol of the store's key-value engine. ``rocks`` is for production; ``memory`` passes the same contract tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from dmq.store.schema.keys import Family, begin_key, pack_queue_key, queue_offset_of, unpack_u64


class Batch:
    """One atomic write. Ranges are deleted first, then single rows, then rows are set."""

    __slots__ = ("deletes", "puts", "ranges")

    def __init__(self) -> None:
        self.ranges: list[tuple[int, bytes, bytes]] = []
        self.deletes: list[tuple[int, bytes]] = []
        self.puts: list[tuple[int, bytes, bytes]] = []


class Rows(NamedTuple):
    """Result of a scan. ``is_complete`` is True if the range has no rows after the last returned one."""

    rows: list[tuple[bytes, bytes]]
    is_complete: bool


class EngineStats(NamedTuple):
    """Engine figures for status and metrics. Reading them needs no scan."""

    memtable_bytes: int
    table_bytes: int
    keys_estimate: int


class Engine(Protocol):
    """Ordered rows in column families, written in atomic batches by one thread, readable from any thread.

    Every method raises ``StoreCorrupt`` on damaged data and ``StoreFailed`` on a storage error. A read never omits rows
    silently. After a fork every method raises ``StoreForked`` in the child.
    """

    def write(self, batch: Batch) -> None:
        """Apply ``batch`` atomically in memory: readable on return, durable after ``flush`` or ``sync``.

        Must not wait for the disk while holding the GIL.
        """
        ...

    def flush(self) -> None:
        """Make every earlier batch survive SIGKILL; durable on return."""
        ...

    def sync(self) -> None:
        """Sync every earlier batch to disk: on return they survive SIGKILL and power loss."""
        ...

    def get_many(self, family: Family, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each key, or ``None`` for a missing key, in the order of ``keys``."""
        ...

    def scan(self, family: Family, start: bytes, stop: bytes, *, limit: int, bytes_max: int = 2**62) -> Rows:
        """Return rows of ``[start, stop)`` in key order: at most ``limit``, none after ``bytes_max`` is reached."""
        ...

    def last(self, family: Family, start: bytes, stop: bytes) -> tuple[bytes, bytes] | None:
        """Return the last row in ``[start, stop)``, or ``None`` if the range is empty."""
        ...

    def clear(self, family: Family) -> None:
        """Remove all rows of a family, unreadable ones included. No other thread may use the engine meanwhile."""
        ...

    def stats(self) -> EngineStats:
        """Return the current figures."""
        ...

    def close(self) -> None:
        """Sync, unless a write or a sync failed; release all resources and the lock. Idempotent."""
        ...


class Scannable(Protocol):
    """Store or engine that can be scanned."""

    def scan(self, family: Family, start: bytes, stop: bytes, *, limit: int, bytes_max: int = ...) -> Rows:
        """Do the same as ``Engine.scan``."""
        ...


def scan_pages(
    source: Scannable, family: Family, start: bytes, stop: bytes, *, limit: int, bytes_max: int = 2**62
) -> Iterator[list[tuple[bytes, bytes]]]:
    """Yield all rows of ``[start, stop)`` in order, a bounded number at a time."""
    while True:
        found = source.scan(family, start, stop, limit=limit, bytes_max=bytes_max)
        if found.rows:
            yield found.rows
            start = found.rows[-1][0] + b"\0"
        if found.is_complete:
            return


def queue_begin(engine: Engine, topic_id: int, queue_id: int) -> int:
    """Return the first offset of a queue: all messages below it were removed."""
    (value,) = engine.get_many(Family.META, [begin_key(topic_id, queue_id)])
    return 0 if value is None else unpack_u64(value)


def queue_end(engine: Engine, topic_id: int, queue_id: int) -> int:
    """Return the offset after the last message ever appended to a queue: one seek, never a scan.

    Removed messages count as well.
    """
    last = engine.last(
        Family.QUEUE, pack_queue_key(topic_id, queue_id, 0), pack_queue_key(topic_id, queue_id, 2**64 - 1)
    )
    return queue_begin(engine, topic_id, queue_id) if last is None else queue_offset_of(last[0]) + 1
