"""What the store needs of a key-value engine. ``rocks`` is the real one, ``memory`` passes the same contract suite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from dmq.store.schema.keys import Family, begin_key, pack_queue_key, queue_offset_of, unpack_u64


class Batch:
    """One atomic write: ranges are deleted first, then single rows, then rows are set."""

    __slots__ = ("deletes", "puts", "ranges")

    def __init__(self) -> None:
        self.ranges: list[tuple[int, bytes, bytes]] = []
        self.deletes: list[tuple[int, bytes]] = []
        self.puts: list[tuple[int, bytes, bytes]] = []


class Rows(NamedTuple):
    """The result of a scan. ``is_complete`` says that the range holds nothing after the last row."""

    rows: list[tuple[bytes, bytes]]
    is_complete: bool


class EngineStats(NamedTuple):
    """Figures of an engine, for status and metrics; none of them costs a scan."""

    memtable_bytes: int
    table_bytes: int
    keys_estimate: int


class Engine(Protocol):
    """Ordered rows in families, written in atomic batches by one thread, read from any.

    Every method raises ``StoreCorrupt`` when it meets damage and ``StoreFailed`` when storage fails; a read never
    returns fewer rows than there are without saying so. After a fork every method of the child raises ``StoreForked``.
    """

    def write(self, batch: Batch) -> None:
        """Apply ``batch`` atomically in memory: readable on return, durable after ``flush`` or ``sync``.

        It does not wait for the disk while it holds the GIL.
        """
        ...

    def flush(self) -> None:
        """Return once every batch written before is safe from SIGKILL."""
        ...

    def sync(self) -> None:
        """Return once every batch written before is on disk: safe from SIGKILL and power loss."""
        ...

    def get_many(self, family: Family, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each key, ``None`` where there is none."""
        ...

    def scan(self, family: Family, start: bytes, stop: bytes, *, limit: int, bytes_max: int = 2**62) -> Rows:
        """Return rows in ``[start, stop)`` in key order, at most ``limit``, stopping once ``bytes_max`` is reached."""
        ...

    def last(self, family: Family, start: bytes, stop: bytes) -> tuple[bytes, bytes] | None:
        """Return the last row in ``[start, stop)``."""
        ...

    def stats(self) -> EngineStats:
        """Return current figures."""
        ...

    def close(self) -> None:
        """Sync, unless a write or a sync failed, let go of everything and release the lock. Idempotent."""
        ...


def queue_begin(engine: Engine, topic_id: int, queue_id: int) -> int:
    """Return the offset below which everything was removed from a queue."""
    (value,) = engine.get_many(Family.META, [begin_key(topic_id, queue_id)])
    return 0 if value is None else unpack_u64(value)


def queue_end(engine: Engine, topic_id: int, queue_id: int) -> int:
    """Return the offset after the last message of a queue, also of one that was removed: one seek, never a scan."""
    last = engine.last(
        Family.QUEUE, pack_queue_key(topic_id, queue_id, 0), pack_queue_key(topic_id, queue_id, 2**64 - 1)
    )
    return queue_begin(engine, topic_id, queue_id) if last is None else queue_offset_of(last[0]) + 1
