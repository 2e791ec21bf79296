"""Entries that a scan cannot reach, because another table is damaged in their key range."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from dmq.errors import StoreCorrupt, StoreError
from dmq.producer_store.directories.copies import copy_directory
from dmq.producer_store.directories.inspect import DirectoryState, Found, How, Look
from dmq.producer_store.directories.salvage_log import Tell, clean_logs
from dmq.producer_store.entries.damage import Hole
from dmq.store.engines.rocks import RocksEngine, RocksOptions, rebuild_manifest
from dmq.store.schema import keys
from dmq.store.schema.index import decode_index
from dmq.store.schema.keys import Family
from dmq.store.schema.record import decode_waiting
from dmq.store.schema.spool import decode_entry
from retry.sink import UID_BYTES

_NAMED_MAX = 1_000


class Rest:
    """Reads such entries one by one by the marks in the index, also from a copy without the damaged tables."""

    def __init__(self, look: Look, path: Path, work: Path, tell: Tell, stack: ExitStack) -> None:
        self._look = look
        self._tell = tell
        self.missing = 0  # in the index, but unreadable in every copy
        self.missing_uids: list[str] = []
        self._timeline = [hole for hole in look.holes if hole.family is Family.TIMELINE]
        self._other: Look | None = None
        tables = {table for hole in self._timeline if (table := table_of(hole))}
        tables |= {table for hole in _group_holes(look) if (table := table_of(hole))}
        if tables:
            with suppress(StoreError):
                self._other = without(look, path, work, tables, tell, stack)

    def waiting(self) -> Iterator[Found]:
        """Yield the unreached entries of the timeline; count those that cannot be read."""
        if not self._timeline:
            return
        start, stop = keys.pack_index_prefix(keys.WAITING_GENERATION, 0), keys.generation_range(1, 2)[0]
        for key, value in self._look.rows(Family.INDEX, start, stop):
            with suppress(StoreCorrupt):
                receipt = decode_index(value)
                row = receipt.key
                if any(hole.first <= row < hole.end for hole in self._timeline):
                    found = self._ask(row, keys.index_place(key)[1])
                    if found is not None:
                        yield found
                    else:
                        self.missing += 1
                        if len(self.missing_uids) < _NAMED_MAX:
                            self.missing_uids.append(key[8 : 8 + UID_BYTES].hex())

    def group(self) -> Iterator[Found]:
        """Yield the unreached parked and dead entries."""
        if self._other is None:
            return
        for hole in _group_holes(self._look):
            for each in (*self._other.parked(), *self._other.dead()):
                if hole.first <= each.key < hole.end:
                    yield each

    def _ask(self, row: bytes, type_id: int) -> Found | None:
        for look in (self._look, self._other):
            if look is None:
                continue
            with suppress(StoreCorrupt):
                (value,) = look.source.get_many(Family.TIMELINE, [row])
                if value is not None and decode_waiting(value).topic_id == type_id:
                    entry, turn = decode_entry(value, self._look.type_name(type_id))
                    return Found(DirectoryState.WAITING, entry, turn, type_id, row)
        return None


def _group_holes(look: Look) -> list[Hole]:
    return [hole for hole in look.holes if hole.family is Family.GROUP]


def table_of(hole: Hole) -> str:
    """Return the table named in an error of RocksDB; empty if there is none."""
    return next((word.rpartition("/")[2] for word in hole.error.split() if word.endswith(".sst")), "")


def without(look: Look, path: Path, work: Path, tables: set[str], tell: Tell, stack: ExitStack) -> Look:
    """Open another copy without ``tables``; rows that these deleted or replaced may reappear."""
    tell(f"reading without {', '.join(sorted(tables))}")
    copy = work / "without"
    copy_directory(path, copy)
    for table in tables:
        (copy / "rocksdb" / table).unlink(missing_ok=True)
    clean_logs(copy / "rocksdb", tell)
    rebuild_manifest(copy / "rocksdb")
    engine = RocksEngine(copy / "rocksdb", RocksOptions(recovery_mode="skip_any"))
    stack.callback(shutil.rmtree, copy, ignore_errors=True)
    stack.callback(engine.close)
    return Look(path, copy, engine, How.REBUILT, look.error)
