"""A spool driven by hand, on disk or on the engine in memory, that can be closed, killed and broken; and its rows."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from support.rigs.broker.rig import End
from support.rigs.store.rows import all_rows, copy_at_rest

from broker_adapter.runtime.clock import Clock, ManualClock
from dmq.producer_store import spool
from dmq.producer_store.directories.bounds import SpoolOptions
from dmq.producer_store.directories.root import Root
from dmq.producer_store.entries import entries, reader
from dmq.producer_store.entries.entries import Entries
from dmq.producer_store.entries.plan import size_of
from dmq.producer_store.spool import Spool
from dmq.store.engines.memory import MemoryEngine
from dmq.store.schema.keys import Family
from dmq.store.schema.messages.record import decode_waiting
from dmq.store.schema.spool import TypeTotals, decode_dead, decode_entry, spool_range
from dmq.store.store import Store, StoreOptions
from dmq.trail.events import gap_event
from retry.sink import Entry, Held

PATIENCE_S = 20.0
QUIET = SpoolOptions(adopt_every_s=0)


def an_entry(
    number: int = 1,
    *,
    type_name: str = "orders",
    key: str = "",
    payload: bytes = b"payload",
    created_at_ms: int = 1_700_000_000_000,
    due_at_ms: int = 0,
) -> Entry:
    """An entry; the higher its number, the younger its uid."""
    return Entry(
        type_name=type_name,
        uid=number.to_bytes(16, "big"),
        payload=payload,
        key=key,
        created_at_ms=created_at_ms,
        due_at_ms=due_at_ms or created_at_ms,
    )


def number_of(held: Held) -> int:
    """The number of a held entry."""
    return int.from_bytes(held.entry.uid, "big")


class Counted(NamedTuple):
    """What the rows of a directory say."""

    totals: dict[str, TypeTotals]
    waiting: dict[int, Entry]  # by number; on the timeline, or parked
    dead: dict[int, Entry]


def recount(of: Entries) -> Counted:
    """Count from the rows what the figures must say."""
    names = {type_id: topic.name for type_id, topic in of.names.topics_by_id.items()}
    waiting: list[Entry] = []
    for _, value in all_rows(of.store, Family.TIMELINE):
        waiting.append(decode_entry(value, names[decode_waiting(value).topic_id])[0])
    dead: list[Entry] = []
    for type_id, name in names.items():
        rows = of.store.scan(Family.GROUP, *spool_range(b"m", type_id), limit=10**6).rows
        waiting += [decode_entry(value, name)[0] for _, value in rows]
        rows = of.store.scan(Family.GROUP, *spool_range(b"d", type_id), limit=10**6).rows
        dead += [decode_dead(value, name)[0].entry for _, value in rows]
    uids = Counter(each.uid for each in waiting)
    assert not uids or max(uids.values()) == 1, "an entry is there twice"
    totals = {
        name: TypeTotals(
            sum(each.type_name == name for each in waiting),
            sum(size_of(each) for each in waiting if each.type_name == name),
            sum(each.type_name == name for each in dead),
        )
        for name in names.values()
    }
    number = int.from_bytes
    return Counted(
        totals, {number(each.uid, "big"): each for each in waiting}, {number(each.uid, "big"): each for each in dead}
    )


class SpoolRig:
    """One spool after the other on the same entries, each driven by hand; small shelves, so that all of it is used."""

    def __init__(self, path: Path, *, on_disk: bool, options: SpoolOptions = QUIET) -> None:
        self.clock = ManualClock()
        self.spool: Spool
        self.memory = MemoryEngine()
        self.next_end = End.KILL  # what is left when a storage error ends a run: all that was written, or synced
        self._path = path
        self._runs = 0
        self._on_disk = on_disk
        self._options = options

    def open(self) -> None:
        """Open the directory that is there."""
        with patch.object(spool, "Root", self._root):
            self.spool = Spool(
                self._path / f"run-{self._runs}", options=self._options, clock=self.clock, is_driven=True
            )

    def restart(self, end: End) -> None:
        """End the run and begin the next one."""
        before = self._path / f"run-{self._runs}"
        if end is End.CLOSE:
            self.spool.close()
            if not self._on_disk:
                self.memory = self.memory.reopened()
        else:
            self._runs += 1
            if self._on_disk:
                assert end is End.KILL, "tests cannot take the page cache away"
                copy_at_rest(before, self._path / f"run-{self._runs}")
                self.spool.close()
            else:
                left = self._left(end)
                self.spool.close()  # it may be about to open what it takes for its own directory
                self.memory = left
            shutil.rmtree(before, ignore_errors=True)
        self.open()

    def mended(self) -> None:
        """Wait until the spool has opened its directory again."""
        for _ in range(int(PATIENCE_S * 1000)):
            if self.spool.entries.store.failure is None:
                return
            threading.Event().wait(0.001)
        raise AssertionError("it is not mended")

    def _left(self, end: End) -> MemoryEngine:
        return self.memory.reopened() if end is End.KILL else self.memory.crashed()

    def _root(self, path: Path, clock: Clock, options: StoreOptions) -> Root:
        return Root(path, clock, options) if self._on_disk else _MemoryRoot(self, path, clock, options)


class _MemoryRoot(Root):
    """A folder whose directories are all the same engine in memory."""

    def __init__(self, rig: SpoolRig, path: Path, clock: Clock, options: StoreOptions) -> None:
        super().__init__(path, clock, options)
        self._rig = rig

    def _open(self, path: Path) -> Store:
        path.mkdir(exist_ok=True)
        memory = self._rig.memory
        if memory._has_failed:
            self._rig.memory = self._rig._left(self._rig.next_end)
        return Store(self._rig.memory, self.clock, StoreOptions(gap_event=gap_event))


@contextmanager
def small_parts() -> Iterator[None]:
    """Shelves, chunks and pauses so small that a few entries go all the ways there are."""
    with (
        patch.object(reader, "READY_MAX", 3),
        patch.object(reader, "ROWS_MAX", 4),
        patch.object(entries, "_OLDEST_LOOKED_AT", 2),
        patch("dmq.producer_store.directories.running.REOPEN_S", (0.0,)),
    ):
        yield
