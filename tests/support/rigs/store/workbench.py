"""A store on either engine with a manual clock, and what tests do to it: restart it, kill it, hold its syncs up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from support.rigs.store.rows import PATIENCE_S, GatedEngine, copy_at_rest, hand_over

from broker_adapter.runtime.clock import ManualClock
from dmq.errors import StoreError
from dmq.store.engines.engine import Engine
from dmq.store.engines.memory import MemoryEngine
from dmq.store.engines.rocks import RocksEngine
from dmq.store.schema.keys import Family, timeline_key
from dmq.store.schema.messages.index import Receipt
from dmq.store.store import Store, StoreOptions
from dmq.store.writer.marks import Cursor
from dmq.store.writer.operations import Done, Op
from dmq.store.writer.writer import Unit
from dmq.trail.events import gap_event

NOW_MS = 1_700_000_000_000
ENGINES = ["rocks", "memory"]


class Disk(Protocol):
    """Where a store's rows are when nobody has it open."""

    def engine(self) -> Engine:
        """Open what is there."""
        ...

    def kill(self) -> None:
        """Make the next ``engine`` see what SIGKILL would have left."""
        ...


class RocksDisk:
    def __init__(self, path: Path) -> None:
        self.path = path

    def engine(self) -> Engine:
        return RocksEngine(self.path)

    def kill(self) -> None:
        """Copy the files as they are: the page cache is what SIGKILL leaves."""
        image = self.path.with_name(self.path.name + "+")
        copy_at_rest(self.path, image)
        self.path = image


class MemoryDisk:
    def __init__(self) -> None:
        self.last = MemoryEngine()

    def engine(self) -> Engine:
        self.last = self.last.reopened()
        return self.last

    def kill(self) -> None:
        """``reopened`` sees what was written."""


class Bench:
    """A clock, a disk, and the store that is open."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.clock = ManualClock(NOW_MS)
        self.options = StoreOptions(gap_event=gap_event)
        self.failures: list[StoreError] = []
        self._opened: list[Store] = []
        self.open()

    def open(self) -> Store:
        self.gate = GatedEngine(self.disk.engine())
        self.store = Store(self.gate, self.clock, self.options)
        self.store.on_failure = self.failures.append
        self._opened.append(self.store)
        return self.store

    def restart(self, options: StoreOptions | None = None) -> Store:
        """Close in order and open again."""
        self.store.close()
        self.options = options or self.options
        return self.open()

    def kill(self) -> Store:
        """End as SIGKILL does and open again; the store that was open goes on by itself, unseen."""
        self.disk.kill()
        self.gate.let_go()
        return self.open()

    def close(self) -> None:
        self.gate.let_go()
        for store in self._opened:
            with suppress(StoreError):
                store.close()

    def submit(self, *ops: Op, is_urgent: bool = False) -> Waiter:
        return Waiter(self.store, ops, is_urgent=is_urgent)

    def deliver(self) -> list[Receipt]:
        """What the scheduler does: hand over what is due now, in order."""
        now_ms = self.clock.now_ms()
        marks = self.store.marks
        claim = marks.claim(Cursor.LIVE, now_ms)
        rows = self.store.scan(Family.TIMELINE, timeline_key(claim.start), timeline_key(claim.stop), limit=10_000).rows
        ops: list[Op] = [hand_over(key, value) for key, value in rows]
        return self.store.commit([*ops, Done(marks.low())])[:-1]


class Waiter:
    """A unit that was submitted, and what it was told in the end: ``Store.commit`` without blocking."""

    def __init__(self, store: Store, ops: tuple[Op, ...], *, is_urgent: bool) -> None:
        self.receipts: list[Receipt] | None = None
        self.error: StoreError | None = None
        self._told = threading.Event()
        store.writer.submit(Unit(ops, self._settle), is_urgent=is_urgent)

    def _settle(self, unit: Unit) -> None:
        self.receipts, self.error = (unit.receipts, None) if unit.error is None else (None, unit.error)
        self._told.set()

    def ended(self) -> Waiter:
        assert self._told.wait(PATIENCE_S), "nobody told the waiter"
        return self


def opened_bench(engine: str, directory: Path) -> Iterator[Bench]:
    """A bench on the engine of that name, closed afterwards; for a fixture."""
    made = Bench(RocksDisk(directory / "db") if engine == "rocks" else MemoryDisk())
    yield made
    made.close()
