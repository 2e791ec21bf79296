"""Inspection of a spool directory, from a copy, around damage."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from broker_adapter.runtime.clock import Clock
from dmq.errors import SpoolCorrupt, StoreCorrupt, StoreError
from dmq.producer_store.directories.bounds import SpoolOptions
from dmq.producer_store.directories.copies import copy_directory, workplace
from dmq.producer_store.directories.salvage_log import Dropped, Tell, clean_logs, puts_of
from dmq.producer_store.entries.damage import Hole, Readable, read_around
from dmq.store.engines.rocks import RocksEngine, RocksOptions, rebuild_manifest
from dmq.store.schema.files import CELL_FILE, CLOSED_FILE, decode_closed
from dmq.store.schema.keys import META_NAME, Family, meta_id, meta_range
from dmq.store.schema.names import NameKind, decode_name
from dmq.store.schema.record import decode_waiting
from dmq.store.schema.spool import SPOOL_DEAD, SPOOL_PARKED, decode_dead, decode_entry, spool_rows, type_of
from dmq.store.store import Store, StoreOptions
from dmq.trail.events import gap_event
from retry.sink import DeadEntry, Entry

_COPIES_MAX = 5  # copies of a directory whose files change
_ROWS, _BYTES = 512, 4 * 1024 * 1024
_KEY_BYTES = 48  # longer than any key
_END = b"\xff" * _KEY_BYTES


class How(StrEnum):
    """Way in which a copy was opened."""

    STRICT = "strict"  # opening found no damage
    WITHOUT_DAMAGED_RECORDS = "without damaged records"
    REBUILT = "with a rebuilt manifest"


class DirectoryState(StrEnum):
    """State of an entry."""

    WAITING = "waiting"
    PARKED = "parked"  # in a key queue, after its first entry
    DEAD = "dead"


class Unreadable(NamedTuple):
    """Row that cannot be decoded as an entry."""

    family: Family
    key: bytes
    error: str


class Found(NamedTuple):
    """Entry with its state and row key. ``dead`` is set for an entry of the dead set."""

    state: DirectoryState
    entry: Entry
    turn: int
    type_id: int
    key: bytes  # of its row
    dead: DeadEntry | None = None


class Look:
    """Open copy of a directory. Reads skip damage; ``holes`` and ``unreadable`` collect it during the reads."""

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
        self.unreadable: list[Unreadable] = []
        self.types: dict[int, str] = {}
        for key, value in self.rows(Family.META, *meta_range(META_NAME)):
            self.types |= _name_in(key, value)
        self.guessed_types: list[str] = []  # names found only in a damaged record
        self.unknown_types: set[str] = set()  # substitute names of types whose record is lost
        guesses = [put for each in dropped for put in (puts_of(each.data) if each.data is not None else None) or ()]
        for key, value in guesses:
            if len(key) == 5 and key[:1] == META_NAME and meta_id(key) not in self.types:
                found = _name_in(key, value)
                self.types |= found
                self.guessed_types += found.values()

    @property
    def has_lost_writes(self) -> bool:
        """Whether whole batches may be missing, and not only rows."""
        return bool(self.dropped) or self.how is How.REBUILT

    def type_name(self, type_id: int) -> str:
        """Return the name of a type, or a substitute name if its record is lost."""
        name = self.types.get(type_id)
        if name is None:
            name = f"unknown-type-{type_id}"
            self.unknown_types.add(name)
        return name

    def rows(self, family: Family, start: bytes = b"", stop: bytes = _END) -> Iterator[tuple[bytes, bytes]]:
        """Yield the readable rows of a range, page by page."""
        at: bytes | None = start if start < stop else None
        while at is not None:
            found = read_around(self.source, family, at, stop, limit=_ROWS, bytes_max=_BYTES, key_bytes=_KEY_BYTES)
            if found.hole is not None:
                self._note(found.hole)
            yield from found.rows
            at = found.next

    def get_many(self, family: Family, wanted: list[bytes]) -> list[bytes | None]:
        """Return rows, or empty values for all if one is damaged: the scan of the family reports the damage."""
        try:
            return self.source.get_many(family, wanted)
        except StoreCorrupt:
            return [b""] * len(wanted)

    def waiting(self) -> Iterator[Found]:
        """Yield the entries on the timeline, by due time."""
        for key, value in self.rows(Family.TIMELINE):
            yield from self._entry(Family.TIMELINE, DirectoryState.WAITING, key, value)

    def parked(self) -> Iterator[Found]:
        """Yield the parked entries, those of each key in its order."""
        for key, value in self.rows(Family.GROUP, *spool_rows(SPOOL_PARKED)):
            yield from self._entry(Family.GROUP, DirectoryState.PARKED, key, value)

    def dead(self) -> Iterator[Found]:
        """Yield the dead set, by type and uid."""
        for key, value in self.rows(Family.GROUP, *spool_rows(SPOOL_DEAD)):
            type_id = type_of(key)
            try:
                dead, turn = decode_dead(value, self.type_name(type_id))
            except StoreCorrupt as error:
                self.unreadable.append(Unreadable(Family.GROUP, key, str(error)))
                continue
            yield Found(DirectoryState.DEAD, dead.entry, turn, type_id, key, dead)

    def entries(self) -> Iterator[Found]:
        """Yield every entry: waiting, parked, dead."""
        yield from self.waiting()
        yield from self.parked()
        yield from self.dead()

    def _entry(self, family: Family, state: DirectoryState, key: bytes, value: bytes) -> Iterator[Found]:
        try:
            type_id = decode_waiting(value).topic_id
            entry, turn = decode_entry(value, self.type_name(type_id))
        except StoreCorrupt as error:
            self.unreadable.append(Unreadable(family, key, str(error)))
            return
        yield Found(state, entry, turn, type_id, key)

    def _note(self, hole: Hole) -> None:
        hole = hole._replace(error=hole.error.replace(str(self._copy), str(self.path)))
        if not any(hole[:3] == known[:3] for known in self.holes):
            self.holes.append(hole)


def _name_in(key: bytes, value: bytes) -> dict[int, str]:
    """Return the type id and name in a row; empty if it cannot be decoded."""
    try:
        record = decode_name(meta_id(key), value)
    except StoreCorrupt:
        return {}
    return {meta_id(key): record.name} if record.kind is NameKind.TOPIC else {}


# -- opening -----------------------------------------------------------------------------------------------------------


def store_options(corrupt: type[StoreCorrupt] = SpoolCorrupt) -> StoreOptions:
    """Return the options with which a spool opens its stores, without the bounds that its process sets.

    ``corrupt`` is the error class for damage; its text contains advice.
    """
    known = SpoolOptions()
    return StoreOptions(
        outbox_bytes_max=known.trail_bytes_max, rocks=known.rocks._replace(corrupt=corrupt), gap_event=gap_event
    )


@contextmanager
def strict_look(path: Path, clock: Clock) -> Iterator[Look]:
    """Open a copy in the same way as the spool opens the original; raise the store's errors if that fails."""
    with workplace(path.parent) as work, ExitStack() as stack:
        store = _strict(path, work, clock)
        stack.callback(store.close)
        yield Look(path, work / "strict", store, How.STRICT)


@contextmanager
def look(path: Path, clock: Clock, tell: Tell = lambda _: None) -> Iterator[Look]:
    """Open a copy that may be damaged; raise ``StoreCorrupt`` if none of it can be read."""
    with workplace(path.parent) as work, ExitStack() as stack:
        yield open_look(path, work, clock, tell, stack)


def open_look(
    path: Path,
    work: Path,
    clock: Clock,
    tell: Tell,
    stack: ExitStack,
    corrupt: type[StoreCorrupt] = SpoolCorrupt,
) -> Look:
    """Do the same as ``look``, in ``work``; ``stack`` closes it. For ``corrupt`` see ``store_options``."""
    try:
        store = _strict(path, work, clock, corrupt)
    except StoreCorrupt as error:
        why = str(error).replace(str(work / "strict"), str(path))
    else:
        stack.callback(store.close)
        return Look(path, work / "strict", store, How.STRICT)
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
        return Look(path, copy, engine, how, why, dropped)
    raise StoreCorrupt(f"{path} cannot be opened in any way: {last}")


def _strict(path: Path, work: Path, clock: Clock, corrupt: type[StoreCorrupt] = SpoolCorrupt) -> Store:
    options = replace(store_options(corrupt), ballast_bytes=0, durability="process")
    copy = work / "strict"
    attempt = 0
    while True:
        attempt += 1
        is_used = copy_directory(path, copy)
        if not (copy / CELL_FILE).exists() and any((copy / "rocksdb").glob("*.sst")):
            raise StoreCorrupt(f"{path} has tables but no CELL: something removed it")
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
