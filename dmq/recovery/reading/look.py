"""Inspection of a store, from a copy, around damage.

An unreadable range of a table is a *hole*. ``Look.fill_holes`` opens a second copy without the damaged tables: rows of
the other tables in that range are then read from there, also rows that a damaged table had deleted or replaced.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Self

from broker_adapter.runtime.clock import Clock
from dmq.errors import StoreCorrupt, StoreError
from dmq.producer_store import Hole, Readable, copy_directory, read_around, store_options, workplace
from dmq.recovery.reading.findings import Pages
from dmq.recovery.reading.log_repair import Dropped, Tell, clean_logs
from dmq.store import Store
from dmq.store.engines.rocks import RocksEngine, RocksOptions, rebuild_manifest
from dmq.store.schema.cell.files import CELL_FILE, CLOSED_FILE, decode_closed
from dmq.store.schema.keys import Family

_COPIES_MAX = 5  # copies of a directory whose files change
_ROWS, _BYTES = 512, 4 * 1024 * 1024
_KEY_BYTES = 48  # longer than any key
_END = b"\xff" * _KEY_BYTES


class How(StrEnum):
    """Way in which a copy was opened."""

    STRICT = "strict"  # opening found no damage
    WITHOUT_DAMAGED_RECORDS = "without damaged records"
    REBUILT = "with a rebuilt manifest"


class Look:
    """Open copy of a store. Reads skip damage; ``holes`` collects it during the reads."""

    corrupt: ClassVar[type[StoreCorrupt]] = StoreCorrupt  # error class for damage; its text contains advice

    def __init__(
        self, path: Path, copy: Path, source: Readable, how: How, error: str = "", dropped: Sequence[Dropped] = ()
    ) -> None:
        self.path = path  # of the original
        self._copy = copy
        self.source = source
        self.how = how
        self.error = error  # why the strict opening failed; empty: it succeeded
        self.dropped = tuple(dropped)
        self.holes: list[Hole] = []
        self._tell: Tell = lambda _: None
        self._other: Look | None = None  # copy without the damaged tables

    @property
    def has_lost_writes(self) -> bool:
        """Whether whole batches may be missing, and not only rows."""
        return bool(self.dropped) or self.how is How.REBUILT

    def has_holes(self, family: Family) -> bool:
        """Whether rows of a family may be lost, or have an older state."""
        return self.has_lost_writes or any(hole.family is family for hole in self.holes)

    def is_in_hole(self, family: Family, key: bytes) -> bool:
        """Return True if a scan of this copy does not reach a key."""
        return any(hole.family is family and hole.first <= key < hole.end for hole in self.holes)

    def rows(self, family: Family, start: bytes = b"", stop: bytes = _END) -> Iterator[tuple[bytes, bytes]]:
        """Yield the readable rows of a range in order, page by page."""
        at: bytes | None = start if start < stop else None
        while at is not None:
            found = read_around(self.source, family, at, stop, limit=_ROWS, bytes_max=_BYTES, key_bytes=_KEY_BYTES)
            yield from found.rows
            if (hole := found.hole) is not None:
                self._note(hole)
                if self._other is not None:
                    yield from self._other.rows(family, hole.first, min(hole.end, stop))
            at = found.next

    def pages(self, family: Family) -> Iterator[list[tuple[bytes, bytes]]]:
        """Yield all rows of a family, in order, in pages."""
        return Pages(lambda text: self._tell(f"saving: {text}")).of(self.rows(family), family.name.lower())

    def get_many(self, family: Family, wanted: list[bytes]) -> list[bytes | None]:
        """Return rows, or empty values for all if one is damaged: the scan of the family reports the damage."""
        try:
            return self.source.get_many(family, wanted)
        except StoreCorrupt:
            return [b""] * len(wanted)

    def find_many(self, family: Family, wanted: Sequence[bytes]) -> list[bytes | None]:
        """Return rows as far as any copy can read them, else ``None``."""
        try:
            return self.source.get_many(family, wanted)
        except StoreCorrupt:
            return [self._find(family, key) for key in wanted]

    def _find(self, family: Family, key: bytes) -> bytes | None:
        for look in (self, self._other):
            with suppress(StoreCorrupt):
                if look is not None and (value := look.source.get_many(family, [key])[0]) is not None:
                    return value
        return None

    def fill_holes(self, work: Path, tell: Tell, stack: ExitStack) -> None:
        """Read everything once, then open the copy without the damaged tables; ``stack`` closes it."""
        self._tell = tell
        read = Pages(tell)
        for family in Family:
            for page in read.of(self.rows(family), family.name.lower()):
                del page
        if tables := {table for hole in self.holes if (table := _table_of(hole))}:
            with suppress(StoreError):
                self._other = self._without(tables, work, tell, stack)

    def _without(self, tables: set[str], work: Path, tell: Tell, stack: ExitStack) -> Look:
        tell(f"reading without {', '.join(sorted(tables))}")
        copy = work / "without"
        copy_directory(self.path, copy)
        for table in tables:
            (copy / "rocksdb" / table).unlink(missing_ok=True)
        clean_logs(copy / "rocksdb", tell)
        rebuild_manifest(copy / "rocksdb")
        engine = RocksEngine(copy / "rocksdb", RocksOptions(recovery_mode="skip_any"))
        stack.callback(shutil.rmtree, copy, ignore_errors=True)
        stack.callback(engine.close)
        return Look(self.path, copy, engine, How.REBUILT)

    def _note(self, hole: Hole) -> None:
        hole = hole._replace(error=hole.error.replace(str(self._copy), str(self.path)))
        if not any(hole[:3] == known[:3] for known in self.holes):
            self.holes.append(hole)

    # -- opening ------------------------------------------------------------------------------------------------------

    @classmethod
    @contextmanager
    def strictly(cls, path: Path, clock: Clock) -> Iterator[Self]:
        """Open a copy in the same way as its process opens the original; raise the store's errors if that fails."""
        with workplace(path.parent) as work, ExitStack() as stack:
            store = _strict(path, work, clock, cls.corrupt)
            stack.callback(store.close)
            yield cls(path, work / "strict", store, How.STRICT)

    @classmethod
    @contextmanager
    def opened(cls, path: Path, clock: Clock, tell: Tell = lambda _: None) -> Iterator[Self]:
        """Open a copy that may be damaged; raise ``StoreCorrupt`` if none of it can be read."""
        with workplace(path.parent) as work, ExitStack() as stack:
            yield cls.open_in(work, path, clock, tell, stack)

    @classmethod
    def open_in(cls, work: Path, path: Path, clock: Clock, tell: Tell, stack: ExitStack) -> Self:
        """Do the same as ``opened``, in ``work``; ``stack`` closes it."""
        try:
            store = _strict(path, work, clock, cls.corrupt)
        except StoreCorrupt as error:
            why = str(error).replace(str(work / "strict"), str(path))
        else:
            stack.callback(store.close)
            return cls(path, work / "strict", store, How.STRICT)
        last: StoreError | None = None
        for how in (How.WITHOUT_DAMAGED_RECORDS, How.REBUILT):
            if how is not How.REBUILT and _manifest_is_cut(path):
                continue  # opening would delete the tables missing in the manifest
            tell(f"opening {how}")
            copy = work / how.name.lower()
            copy_directory(path, copy)
            database = copy / "rocksdb"
            if not database.is_dir():
                raise StoreCorrupt(f"{path} has no database: {why}")
            dropped = clean_logs(database, tell)
            try:
                if how is How.REBUILT:
                    rebuild_manifest(database)
                engine = RocksEngine(database, RocksOptions(recovery_mode="skip_any"))
            except StoreError as error:
                last = error
                continue
            stack.callback(engine.close)
            return cls(path, copy, engine, how, why, dropped)
        raise StoreCorrupt(f"{path} cannot be opened: {last}")


def _table_of(hole: Hole) -> str:
    """Return the table named in an error of RocksDB; empty if there is none."""
    return next((word.rpartition("/")[2] for word in hole.error.split() if word.endswith(".sst")), "")


def _strict(path: Path, work: Path, clock: Clock, corrupt: type[StoreCorrupt]) -> Store:
    options = replace(store_options(corrupt=corrupt), ballast_bytes=0, durability="process")
    copy = work / "strict"
    attempt = 0
    while True:
        attempt += 1
        is_used = copy_directory(path, copy)
        if not (copy / CELL_FILE).exists() and any((copy / "rocksdb").glob("*.sst")):
            raise StoreCorrupt(f"{path} has tables, but the file CELL is missing")
        try:
            return Store.open(copy, clock, options)
        except StoreCorrupt:
            if not is_used or attempt == _COPIES_MAX:
                raise
            shutil.rmtree(copy)


def _manifest_is_cut(path: Path) -> bool:
    try:
        files = decode_closed((path / CLOSED_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return not (path / "rocksdb" / "CURRENT").exists()
    database = path / "rocksdb"
    return any(
        not (database / name).exists() or (database / name).stat().st_size != size
        for name, size in files.items()
        if not name.endswith(".sst")
    )
