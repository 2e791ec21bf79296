"""A store in memory with a trail, whose exporter works turn by turn."""

from __future__ import annotations

import shutil
from pathlib import Path

from support.models.trail.read import HOUR_MS, read_trail, sequences
from support.rigs.store.rows import GatedEngine, all_rows

from broker_adapter.runtime.clock import ManualClock
from dmq.replication.objects import ObjectStore
from dmq.store.engines.memory import MemoryEngine
from dmq.store.schema.keys import Family
from dmq.store.store import Store, StoreOptions
from dmq.store.writer.operations import Emit
from dmq.trail.events import encode_event, gap_event
from dmq.trail.export.exporter import Exporter
from dmq.trail.export.uploads import TrailUploads
from dmq.trail.export.values import ExportOptions

CELL = "memory"
DAY_MS = 24 * HOUR_MS


class Cell:
    """A store in memory with a trail; ``restart`` is a kill and the next run."""

    def __init__(self, folder: Path, objects: ObjectStore | None = None) -> None:
        self.trail = folder / "trail"
        self.objects = objects
        self.clock = ManualClock(1_700_000_000_000 - 1_700_000_000_000 % DAY_MS)
        self.memory = MemoryEngine()
        self.options = StoreOptions(gap_event=gap_event)
        self.how = ExportOptions()
        self.open()

    def open(self) -> None:
        """Open the store, and bring its trail in order."""
        self.gate = GatedEngine(self.memory)
        self.store = Store(self.gate, self.clock, self.options)
        uploads = TrailUploads(self.objects) if self.objects is not None else None
        self.exporter = Exporter(self.store, self.trail, self.how, uploads)
        self.exporter.recover()

    def restart(self, *, from_synced: bool = False) -> None:
        """End without a word, and begin again."""
        self.store._writer.close()
        self.memory = self.memory.crashed() if from_synced else self.memory.reopened()
        self.open()

    def take_over(self) -> None:
        """Continue on another host, which has the store and no trail."""
        shutil.rmtree(self.trail, ignore_errors=True)
        self.restart()

    def emit(self, count: int, *, batches: int = 1) -> None:
        """Let events happen."""
        for _ in range(batches):
            self.store.commit([Emit(encode_event(2, 0, 0, 1, 0, 0, b"\1" * 17), number) for number in range(count)])

    def numbers(self) -> list[int]:
        """What is in the trail."""
        return sequences(self.trail, CELL)

    def kinds(self) -> list[str]:
        """What is in the trail, by kind."""
        return [str(event["kind"]) for event in read_trail(self.trail, CELL)]

    def check_outbox(self) -> None:
        """Its figures are those of its rows."""
        state, rows = self.store.outbox_state, all_rows(self.store, Family.AUDIT)
        assert state.stored_bytes == sum(len(value) for _, value in rows)
        assert state.first_sequence == (int.from_bytes(rows[0][0], "big") if rows else state.next_sequence)
