"""Replay of saved entries and rows into a new store, as operations through its writer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path

from broker_adapter.runtime.clock import Clock
from dmq.producer_store import settling
from dmq.store import Store, StoreOptions
from dmq.store.engines.engine import Batch
from dmq.store.engines.rocks import RocksEngine
from dmq.store.schema.keys import Family
from dmq.store.writer.operations import Delete, IndexBuilt, IndexProperties, Op, Put, Restore
from dmq.store.writer.writer import Unit

_OPS_PER_UNIT = 1_000
_BYTES_PER_UNIT = 4 * 1024 * 1024
_UNITS_MAX = 60  # in flight; the store refuses more than 65,536 operations or 256 MiB
_BYTES_MAX = 64 * 1024 * 1024
_FOREVER = 2**62


class Replay:
    """Submits operations to a store without other users, with a bounded number of units in flight."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._ops: list[Op] = []
        self._bytes = 0
        self._in_flight: list[Future[None]] = []
        self._bytes_in_flight = 0

    @classmethod
    @contextmanager
    def into(cls, database: Path, clock: Clock, figures: Sequence[tuple[bytes, bytes]]) -> Iterator[Replay]:
        """Create a database that continues from ``figures``, rows of the meta family; it is durable at the end."""
        with ExitStack() as stack:
            engine = RocksEngine(database)
            stack.callback(engine.close)
            seed = Batch()
            seed.puts += [(Family.META, key, value) for key, value in figures]
            engine.write(seed)
            # Neither bound applies: saved ids and events stay, however long the salvage takes.
            options = StoreOptions(durability="process", idempotency_window_ms=_FOREVER, outbox_bytes_max=_FOREVER)
            store = Store(engine, clock, options)
            stack.callback(store.close)
            replay = cls(store)
            yield replay
            replay.flush()

    def add(self, op: Put | Delete | Restore | IndexProperties | IndexBuilt) -> None:
        """Add an operation to the current unit; full units are submitted."""
        self._ops.append(op)
        self._bytes += sum(len(each) for each in op if isinstance(each, bytes))
        if len(self._ops) >= _OPS_PER_UNIT or self._bytes >= _BYTES_PER_UNIT:
            self._submit()

    def put(self, family: Family, key: bytes, value: bytes) -> None:
        """Add a row."""
        self.add(Put(family, key, value))

    def unit(self, size_bytes: int) -> Callable[[Unit], None]:
        """Return the callback for a unit of this size that the caller submits now."""
        if len(self._in_flight) >= _UNITS_MAX or self._bytes_in_flight + size_bytes > _BYTES_MAX:
            self._wait()
        done: Future[None] = Future()
        self._in_flight.append(done)
        self._bytes_in_flight += size_bytes
        return settling(done)

    def flush(self) -> None:
        """Wait until all operations are written and readable; raise the error of the store."""
        self._submit()
        self._wait()

    def get_many(self, family: Family, wanted: Sequence[bytes]) -> list[bytes | None]:
        """Return rows of the new store."""
        self.flush()
        return self.store.get_many(family, wanted)

    def _submit(self) -> None:
        if self._ops:
            ops, size = self._ops, self._bytes
            self._ops, self._bytes = [], 0
            self.store.submit(Unit(ops, self.unit(size)))

    def _wait(self) -> None:
        for done in self._in_flight:
            done.result()
        self._in_flight.clear()
        self._bytes_in_flight = 0
