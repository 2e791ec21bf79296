"""New store of a salvage: writes rows in bounded batches, and the counts of pending entries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dmq.recovery.reading.rows import Waiting
from dmq.store.engines.engine import Batch, Engine
from dmq.store.schema.keys import Family, is_held_key, sequence_of, timeline_key
from dmq.store.writer.counts import Counts

_ROWS_PER_BATCH = 1_000
_BYTES_PER_BATCH = 4 * 1024 * 1024
_COUNTED_MAX = 100_000


class NewStore:
    """Writes to an engine without other users. ``flush`` makes the rows put so far readable."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._batch = Batch()
        self._bytes = 0
        self._counts = Counts(engine)
        self._counted = 0
        self.rows: Counter[str] = Counter()  # by family

    def put(self, family: Family, key: bytes, value: bytes) -> None:
        """Add a row to the current batch; full batches are written."""
        self._batch.puts.append((family, key, value))
        self._bytes += len(key) + len(value)
        self.rows[family.name.lower()] += 1
        if len(self._batch.puts) >= _ROWS_PER_BATCH or self._bytes >= _BYTES_PER_BATCH:
            self.flush()

    def waits(self, each: Waiting, size: int) -> None:
        """Count a pending entry of the timeline, and its bytes."""
        scope = each.entry.scope
        self._counts.add(scope, each.entry.deliver_at_ms, 1)
        if size:
            self._counts.grow(scope, sequence_of(each.mark), size)
        if is_held_key(timeline_key(each.mark)):
            self._counts.hold(scope, 1)
        self._counted += 1
        if self._counted >= _COUNTED_MAX:
            self._put_counts()

    def flush(self) -> None:
        """Write the current batch."""
        if self._batch.puts:
            self._engine.write(self._batch)
            self._batch, self._bytes = Batch(), 0

    def get_many(self, family: Family, wanted: Sequence[bytes]) -> list[bytes | None]:
        """Return rows, including those of the current batch."""
        self.flush()
        return self._engine.get_many(family, wanted)

    def finish(self) -> None:
        """Write the rest, durable on return."""
        self._put_counts()
        self.flush()
        self._engine.sync()

    def _put_counts(self) -> None:
        self.flush()  # earlier figures must be readable
        figures = Batch()
        self._counts.put(figures)
        for _, key, value in figures.puts:
            self.put(Family.META, key, value)
        self._counts.begin()
        self._counted = 0
