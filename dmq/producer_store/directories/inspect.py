"""Reading what a directory of a spool holds, from a copy of it, around whatever is damaged."""

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

_COPIES_MAX = 5  # of a directory whose files change meanwhile
_ROWS, _BYTES = 512, 4 * 1024 * 1024
_KEY_BYTES = 48  # longer than any key
_END = b"\xff" * _KEY_BYTES


class How(StrEnum):
    """How a copy was opened."""

    STRICT = "strict"  # nothing is wrong that opening can see
    WITHOUT_DAMAGED_RECORDS = "without damaged records"
    REBUILT = "with a rebuilt manifest"


class State(StrEnum):
    """Where an entry lies."""

    WAITING = "waiting"
    PARKED = "parked"  # behind others of its key
    DEAD = "dead"


class Unreadable(NamedTuple):
    """A row that is there and is no entry."""

    family: Family
    key: bytes
    error: str


class Found(NamedTuple):
    """An entry, and where it lies. ``dead`` is set for one of the dead set."""

    state: State
    entry: Entry
    turn: int
    type_id: int
    key: bytes  # of its row
    dead: DeadEntry | None = None


class Look:
    """An open copy. Reading goes around what is damaged; ``holes`` and ``unreadable`` fill while that happens."""

    def __init__(
        self, path: Path, copy: Path, source: Readable, how: How, error: str = "", dropped: Sequence[Dropped] = ()
    ) -> None:
        self.path = path  # of the original
        self._copy = copy
        self.source = source
        self.how = how
        self.error = error  # why it could not be opened as it should; empty: it could
        self.dropped = tuple(dropped)
        self.holes: list[Hole] = []
        self.unreadable: list[Unreadable] = []
        self.types: dict[int, str] = {}
        for key, value in self.rows(Family.META, *meta_range(META_NAME)):
            self.types |= _name_in(key, value)
        self.guessed_types: list[str] = []  # names of which only a damaged record tells
        self.unknown_types: set[str] = set()  # names that were made up, for types whose record is lost
        guesses = [put for each in dropped for put in (puts_of(each.data) if each.data is not None else None) or ()]
        for key, value in guesses:
            if len(key) == 5 and key[:1] == META_NAME and meta_id(key) not in self.types:
                found = _name_in(key, value)
                self.types |= found
                self.guessed_types += found.values()

    @property
    def has_lost_writes(self) -> bool:
        """Whether batches may be missing; else only rows are."""
        return bool(self.dropped) or self.how is How.REBUILT

    def type_name(self, type_id: int) -> str:
        """Return the name of a type; one that is made up if its record is lost."""
        name = self.types.get(type_id)
        if name is None:
            name = f"unknown-type-{type_id}"
            self.unknown_types.add(name)
        return name

    def rows(self, family: Family, start: bytes = b"", stop: bytes = _END) -> Iterator[tuple[bytes, bytes]]:
        """Give the rows of a range that can be read, page by page."""
        at: bytes | None = start if start < stop else None
        while at is not None:
            found = read_around(self.source, family, at, stop, limit=_ROWS, bytes_max=_BYTES, key_bytes=_KEY_BYTES)
            if found.hole is not None:
                self._note(found.hole)
            yield from found.rows
            at = found.next

    def get_many(self, family: Family, wanted: list[bytes]) -> list[bytes | None]:
        """Return rows, all of them empty if one is damaged: that is found where the family is read."""
        try:
            return self.source.get_many(family, wanted)
        except StoreCorrupt:
            return [b""] * len(wanted)

    def waiting(self) -> Iterator[Found]:
        """Give the entries on the timeline, in the order of their times."""
        for key, value in self.rows(Family.TIMELINE):
            yield from self._entry(Family.TIMELINE, State.WAITING, key, value)

    def parked(self) -> Iterator[Found]:
        """Give the entries behind others of their key, each key's in its order."""
        for key, value in self.rows(Family.GROUP, *spool_rows(SPOOL_PARKED)):
            yield from self._entry(Family.GROUP, State.PARKED, key, value)

    def dead(self) -> Iterator[Found]:
        """Give the dead set, by type and uid."""
        for key, value in self.rows(Family.GROUP, *spool_rows(SPOOL_DEAD)):
            type_id = type_of(key)
            try:
                dead, turn = decode_dead(value, self.type_name(type_id))
            except StoreCorrupt as error:
                self.unreadable.append(Unreadable(Family.GROUP, key, str(error)))
                continue
            yield Found(State.DEAD, dead.entry, turn, type_id, key, dead)

    def entries(self) -> Iterator[Found]:
        """Give every entry: waiting, parked, dead."""
        yield from self.waiting()
        yield from self.parked()
        yield from self.dead()

    def _entry(self, family: Family, state: State, key: bytes, value: bytes) -> Iterator[Found]:
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
    """Return the type that a row names; empty if it cannot be read."""
    try:
        record = decode_name(meta_id(key), value)
    except StoreCorrupt:
        return {}
    return {meta_id(key): record.name} if record.kind is NameKind.TOPIC else {}


# -- opening -----------------------------------------------------------------------------------------------------------


def store_options(corrupt: type[StoreCorrupt] = SpoolCorrupt) -> StoreOptions:
    """Return how a spool opens its stores, but for the bounds that its process sets.

    ``corrupt`` is raised for damage, and has the advice.
    """
    known = SpoolOptions()
    return StoreOptions(
        outbox_bytes_max=known.trail_bytes_max, rocks=known.rocks._replace(corrupt=corrupt), gap_event=gap_event
    )


@contextmanager
def strict_look(path: Path, clock: Clock) -> Iterator[Look]:
    """Open a copy as the spool opens the original; the store's errors if it would not open."""
    with workplace(path.parent) as work, ExitStack() as stack:
        store = _strict(path, work, clock)
        stack.callback(store.close)
        yield Look(path, work / "strict", store, How.STRICT)


@contextmanager
def look(path: Path, clock: Clock, tell: Tell = lambda _: None) -> Iterator[Look]:
    """Open a copy, however little of it can be read; ``StoreCorrupt`` if nothing can."""
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
    """As ``look``, in ``work``; ``stack`` closes it. ``corrupt`` as of ``store_options``."""
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
            continue  # it would open, and delete the tables that are not named any more
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
