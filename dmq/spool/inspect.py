"""Reading what a directory of a spool holds, from a copy of it, around whatever is damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Protocol, cast

from broker_adapter.clock import Clock
from dmq.audit.events import gap_event
from dmq.embedded.names import Names
from dmq.errors import StoreCorrupt, StoreError
from dmq.spool.copies import copy_directory, workplace
from dmq.spool.damage import earliest
from dmq.spool.records import decode_dead, decode_entry
from dmq.spool.salvage_log import Dropped, Tell, clean_logs, puts_of
from dmq.spool.spool import SpoolOptions
from dmq.store.engine import Rows
from dmq.store.keys import name_range
from dmq.store.ops import Family
from dmq.store.record import decode_waiting
from dmq.store.rocks import RocksEngine, RocksOptions, rebuild_manifest
from dmq.store.store import Store, StoreOptions
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


class Hole(NamedTuple):
    """A range of a family that cannot be read: what is in a damaged block, and nothing behind it."""

    family: Family
    first: bytes
    end: bytes
    error: str

    def __str__(self) -> str:
        first, end = (key.rstrip(b"\0").hex() for key in (self.first, self.end))
        return f"{self.family.name.lower()} {first or 'from its beginning'} up to {end}"


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


class Readable(Protocol):
    """What a look needs of a store or an engine."""

    def get_many(self, family: Family, wanted: Sequence[bytes], /) -> list[bytes | None]:
        """As ``Engine.get_many``."""
        ...

    def scan(self, family: Family, start: bytes, stop: bytes, *, limit: int, bytes_max: int = ...) -> Rows:
        """As ``Engine.scan``."""
        ...


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
        for key, value in self.rows(Family.META, *name_range()):
            self.types |= _name_in(key, value)
        self.guessed_types: list[str] = []  # names of which only a damaged record tells
        self.unknown_types: set[str] = set()  # names that were made up, for types whose record is lost
        guesses = [put for each in dropped for put in (puts_of(each.data) if each.data is not None else None) or ()]
        for key, value in guesses:
            if len(key) == 5 and key[:1] == b"n" and int.from_bytes(key[1:], "big") not in self.types:
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
        at = start
        while at < stop:
            try:
                found = self.source.scan(family, at, stop, limit=_ROWS, bytes_max=_BYTES)
                rows, is_complete = found.rows, found.is_complete
            except StoreCorrupt as error:
                rows, is_complete = self._rows_before(family, at, stop), False
                if not rows:
                    end = self._first_readable(family, at, stop)
                    self._note(Hole(family, at, end, str(error)))
                    at = end
                    continue
            yield from rows
            if is_complete:
                return
            at = rows[-1][0] + b"\0"

    def waiting(self) -> Iterator[Found]:
        """Give the entries on the timeline, in the order of their times."""
        for key, value in self.rows(Family.TIMELINE):
            yield from self._entry(Family.TIMELINE, State.WAITING, key, value)

    def parked(self) -> Iterator[Found]:
        """Give the entries behind others of their key, each key's in its order."""
        for key, value in self.rows(Family.GROUP, b"\xff\xff\xff\xffm", b"\xff\xff\xff\xffn"):
            yield from self._entry(Family.GROUP, State.PARKED, key, value)

    def dead(self) -> Iterator[Found]:
        """Give the dead set, by type and uid."""
        for key, value in self.rows(Family.GROUP, b"\xff\xff\xff\xffd", b"\xff\xff\xff\xffe"):
            type_id = int.from_bytes(key[5:9], "big")
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

    # -- around damage ------------------------------------------------------------------------------------------------

    def _note(self, hole: Hole) -> None:
        hole = hole._replace(error=hole.error.replace(str(self._copy), str(self.path)))
        if not any(hole[:3] == known[:3] for known in self.holes):
            self.holes.append(hole)

    def _rows_before(self, family: Family, start: bytes, stop: bytes) -> list[tuple[bytes, bytes]]:
        rows: list[tuple[bytes, bytes]] = []
        good, bad = 0, _ROWS
        while bad - good > 1:
            middle = (good + bad) // 2
            try:
                rows = self.source.scan(family, start, stop, limit=middle, bytes_max=_BYTES).rows
                good = middle
            except StoreCorrupt:
                bad = middle
        return rows

    def _first_readable(self, family: Family, start: bytes, stop: bytes) -> bytes:
        """Return the least key from which on rows can be read; ``stop`` if there is none."""
        first, last = _number(start), _number(stop)

        def is_readable(at: int) -> bool:
            try:
                self.source.scan(family, _key(at), stop, limit=1)
            except StoreCorrupt:
                return False
            return True

        good = earliest(first, last, is_readable)
        return stop if good >= last else _key(good)


def _number(key: bytes) -> int:
    return int.from_bytes(key[:_KEY_BYTES].ljust(_KEY_BYTES, b"\0"), "big")


def _key(number: int) -> bytes:
    return number.to_bytes(_KEY_BYTES, "big")


class _OneRow:
    """Stands in for a store that holds the record of one name."""

    def __init__(self, key: bytes, value: bytes) -> None:
        self._row = key, value

    def scan(self, _: Family, start: bytes, stop: bytes, *, limit: int) -> Rows:
        return Rows([self._row] if start <= self._row[0] < stop and limit else [], True)


def _name_in(key: bytes, value: bytes) -> dict[int, str]:
    """Return the type that a row names; empty if it cannot be read."""
    try:
        known = Names(cast("Store", _OneRow(key, value))).topics_by_id
    except (StoreCorrupt, ValueError):
        return {}
    return {type_id: topic.name for type_id, topic in known.items()}


# -- opening -----------------------------------------------------------------------------------------------------------


def store_options() -> StoreOptions:
    """Return how a spool opens its stores, but for the bounds that its process sets."""
    known = SpoolOptions()
    return StoreOptions(outbox_bytes_max=known.trail_bytes_max, rocks=known.rocks, gap_event=gap_event)


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


def open_look(path: Path, work: Path, clock: Clock, tell: Tell, stack: ExitStack) -> Look:
    """As ``look``, in ``work``; ``stack`` closes it."""
    try:
        store = _strict(path, work, clock)
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


def _strict(path: Path, work: Path, clock: Clock) -> Store:
    options = replace(store_options(), ballast_bytes=0, durability="process")
    copy = work / "strict"
    attempt = 0
    while True:
        attempt += 1
        is_used = copy_directory(path, copy)
        if not (copy / "CELL").exists() and any((copy / "rocksdb").glob("*.sst")):
            raise StoreCorrupt(f"{path} has tables but no CELL: something removed it")
        try:
            return Store.open(copy, clock, options)
        except StoreCorrupt:
            if not is_used or attempt == _COPIES_MAX:
                raise
            shutil.rmtree(copy)


def _manifest_is_cut(path: Path) -> bool:
    try:
        files = dict(json.loads((path / "CLOSED").read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return not (path / "rocksdb" / "CURRENT").exists()
    database = path / "rocksdb"
    return any(
        not (database / name).exists() or (database / name).stat().st_size != size
        for name, size in files.items()
        if not name.endswith(".sst")
    )
