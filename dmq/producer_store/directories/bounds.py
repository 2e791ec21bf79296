"""Bounds of a spool, and the behaviour when they are reached."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from dmq.errors import SpoolCorrupt, StoreCorrupt
from dmq.producer_store.directories.running import Running
from dmq.producer_store.entries.entries import Entries
from dmq.producer_store.entries.plan import size_of
from dmq.store import StoreOptions
from dmq.store.engines.rocks import RocksOptions
from dmq.store.writer.writer import Unit
from dmq.trail.events import gap_event
from retry.sink import Entry, SinkFull

WAIT_S = 1.0  # interval of the check whether the spool has been reopened or closed
_MIB = 1024 * 1024
_ROCKS = RocksOptions(wal_bytes_max=32 * _MIB, memtable_bytes_max=32 * _MIB, cache_bytes=4 * _MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolOptions:
    """Bounds, and the behaviour when they are reached.

    ``overflow`` is one of:

        refuse       refuse the new entry
        block        wait up to ``block_s`` for room
        drop_newest  refuse the new entry, with an event in the trail
        drop_oldest  drop the oldest entry not held by a worker

    Low disk space always refuses or blocks: a drop does not free space at once. ``durability`` "process" survives
    SIGKILL, but not power loss. ``trail_path`` is the folder of the audit trail, written every ``trail_every_s``;
    ``None`` disables it (docs/reference/trail.md). The trail needs ``pip install rock-dmq[server]``.
    """

    entries_max: int = 1_000_000
    bytes_max: int = 1024 * _MIB
    overflow: Literal["refuse", "block", "drop_newest", "drop_oldest"] = "refuse"
    block_s: float = 5.0
    durability: Literal["disk", "process"] = "disk"
    free_bytes_min: int | None = None  # below it new entries are refused; default 5 % of the disk, at most 1 GiB
    adopt_every_s: float = 30.0  # interval of the search for directories of dead processes; 0: never
    trail_bytes_max: int = 64 * _MIB  # of audit events, exported later or never
    trail_path: str | os.PathLike[str] | None = None
    trail_every_s: float = 60.0
    rocks: RocksOptions = field(default=_ROCKS)


def store_options(options: SpoolOptions | None = None, corrupt: type[StoreCorrupt] = SpoolCorrupt) -> StoreOptions:
    """Return the options with which a spool opens its stores.

    ``corrupt`` is the error class for damage; its text contains advice.
    """
    options = options or SpoolOptions()
    return StoreOptions(
        durability=options.durability,
        outbox_bytes_max=options.trail_bytes_max,
        low_water_bytes=options.free_bytes_min,
        rocks=options.rocks._replace(corrupt=corrupt),
        gap_event=gap_event,
    )


class StoreBounds:
    """Enforces the bounds of the open directory."""

    def __init__(self, options: SpoolOptions, running: Running) -> None:
        self._options = options
        self._running = running
        self.dropped_total = 0  # dropped entries, old or new
        self.refused_total = 0  # puts refused with ``SinkFull``

    def make_room(self, entries: Entries, entry: Entry, check: Callable[[], object]) -> None:
        """Return when there is room, or raise ``SinkFull``. The caller holds the lock of ``entries``; waits release it.

        ``check`` is called after each wait, and raises if further waiting is useless.
        """
        options = self._options
        clock = entries.store.clock
        until_s = clock.monotonic_s() + options.block_s
        can_fit = size_of(entry) <= options.bytes_max
        while (limit := self._limit(entries, entry)) is not None:
            left_s = until_s - clock.monotonic_s()
            if options.overflow == "block" and can_fit and left_s > 0:
                entries.room.wait(min(left_s, WAIT_S))
                check()
                continue
            if limit != "free_bytes_min":
                if options.overflow == "drop_oldest" and can_fit and self._drop_oldest(entries):
                    continue
                if options.overflow == "drop_newest":
                    entries.refuse(entry, _nothing)
                    self.dropped_total += 1
            self.refused_total += 1
            raise SinkFull(f"the spool at {self._running.path} is full: {limit} is reached", limit=limit)

    def _limit(self, entries: Entries, entry: Entry) -> str | None:
        total = entries.total()
        if total.waiting + 1 > self._options.entries_max:
            return "entries_max"
        if total.waiting_bytes + size_of(entry) > self._options.bytes_max:
            return "bytes_max"
        return "free_bytes_min" if entries.store.is_disk_low() else None

    def _drop_oldest(self, entries: Entries) -> bool:
        found = [entries.oldest(type_id, entries.is_free) for type_id, each in entries.totals.items() if each.waiting]
        oldest = min((each for each in found if each is not None), key=lambda each: each[1].created_at_ms, default=None)
        if oldest is None:
            return False
        ticket, entry = oldest
        reader = self._running.reader
        if ticket.mark in entries.out:
            ticket = reader.take_back(ticket.mark)
        entries.out[ticket.mark] = ticket  # held by this call from here on

        def settled(unit: Unit) -> None:
            with entries.lock:
                if unit.error is None:
                    reader.gone(ticket)
                else:  # in doubt: if it still exists, any consumer may take it
                    entries.out.pop(ticket.mark, None)

        entries.drop(ticket, entry, settled)
        self.dropped_total += 1
        return True


def _nothing(_: Unit) -> None:
    """Ignore the end of the unit: no caller waits for it."""
