"""Entries of a producer store's directory, read from a copy, and their stored figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from dmq.errors import SpoolCorrupt, StoreCorrupt
from dmq.producer_store import Readable
from dmq.recovery.reading.log_repair import Dropped, puts_of
from dmq.recovery.reading.look import How, Look
from dmq.store.schema import keys
from dmq.store.schema.accounting.counts import due_in
from dmq.store.schema.keys import META_NAME, Family, meta_id, meta_range
from dmq.store.schema.messages.index import decode_index
from dmq.store.schema.messages.record import decode_waiting
from dmq.store.schema.spool import (
    SPOOL_DEAD,
    SPOOL_PARKED,
    TypeTotals,
    decode_dead,
    decode_entry,
    decode_totals,
    spool_rows,
    type_of,
)
from dmq.store.schema.topics.names import NameKind, decode_name
from retry.sink import DeadEntry, Entry


class SpooledState(StrEnum):
    """State of an entry."""

    WAITING = "waiting"
    PARKED = "parked"  # in a key queue, after its first entry
    DEAD = "dead"


class UnreadableRow(NamedTuple):
    """Row that cannot be decoded as an entry."""

    family: Family
    key: bytes
    error: str


class FoundEntry(NamedTuple):
    """Entry with its state and row key. ``dead`` is set for an entry of the dead set."""

    state: SpooledState
    entry: Entry
    turn: int
    type_id: int
    key: bytes  # of its row
    dead: DeadEntry | None = None


class SpoolLook(Look):
    """Open copy of a directory of the producer store; ``unreadable`` collects the rows that are no entries."""

    corrupt = SpoolCorrupt

    def __init__(
        self, path: Path, copy: Path, source: Readable, how: How, error: str = "", dropped: Sequence[Dropped] = ()
    ) -> None:
        super().__init__(path, copy, source, how, error, dropped)
        self.unreadable: list[UnreadableRow] = []
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

    def type_name(self, type_id: int) -> str:
        """Return the name of a type, or a substitute name if its record is lost."""
        name = self.types.get(type_id)
        if name is None:
            name = f"unknown-type-{type_id}"
            self.unknown_types.add(name)
        return name

    def waiting(self) -> Iterator[FoundEntry]:
        """Yield the entries on the timeline, by due time."""
        for key, value in self.rows(Family.TIMELINE):
            yield from self._entry(Family.TIMELINE, SpooledState.WAITING, key, value)

    def parked(self) -> Iterator[FoundEntry]:
        """Yield the parked entries, those of each key in its order."""
        for key, value in self.rows(Family.GROUP, *spool_rows(SPOOL_PARKED)):
            yield from self._entry(Family.GROUP, SpooledState.PARKED, key, value)

    def dead(self) -> Iterator[FoundEntry]:
        """Yield the dead set, by type and uid."""
        for key, value in self.rows(Family.GROUP, *spool_rows(SPOOL_DEAD)):
            type_id = type_of(key)
            try:
                dead, turn = decode_dead(value, self.type_name(type_id))
            except StoreCorrupt as error:
                self.unreadable.append(UnreadableRow(Family.GROUP, key, str(error)))
                continue
            yield FoundEntry(SpooledState.DEAD, dead.entry, turn, type_id, key, dead)

    def entries(self) -> Iterator[FoundEntry]:
        """Yield every entry: waiting, parked, dead."""
        yield from self.waiting()
        yield from self.parked()
        yield from self.dead()

    def _entry(self, family: Family, state: SpooledState, key: bytes, value: bytes) -> Iterator[FoundEntry]:
        try:
            type_id = decode_waiting(value).topic_id
            entry, turn = decode_entry(value, self.type_name(type_id))
        except StoreCorrupt as error:
            self.unreadable.append(UnreadableRow(family, key, str(error)))
            return
        yield FoundEntry(state, entry, turn, type_id, key)


def _name_in(key: bytes, value: bytes) -> dict[int, str]:
    """Return the type id and name in a row; empty if it cannot be decoded."""
    try:
        record = decode_name(meta_id(key), value)
    except StoreCorrupt:
        return {}
    return {meta_id(key): record.name} if record.kind is NameKind.TOPIC else {}


class TypeFigures(NamedTuple):
    """Stored figures of one type in a directory."""

    type_name: str
    waiting: int
    parked: int  # of these, in key queues after the first entry
    bytes: int
    dead: int
    oldest_at_ms: int  # creation time of the oldest entry on the timeline; 0: none
    due: list[tuple[int, int]]  # of entries on the timeline: (end of period, count)


def totals_of(look: SpoolLook) -> dict[int, TypeTotals]:
    """Return the readable totals by type id."""
    found = {}
    for key, value in look.rows(Family.META, *keys.meta_range(keys.META_SPOOL_TOTAL)):
        found[keys.meta_id(key)] = decode_totals(value)
    return found


def figures_of(look: SpoolLook) -> list[TypeFigures]:
    """Return the figures by type, sorted by name, without a scan of the entries."""
    made = []
    for type_id, totals in totals_of(look).items():
        (count,) = look.source.get_many(Family.META, [keys.total_key(type_id)])
        hours = look.rows(Family.META, *keys.hour_range(type_id, 0, 2**63))
        due: list[tuple[int, int]] = [each for row in hours for each in due_in(*row)]
        on_timeline = keys.unpack_u64(count) if count is not None else 0
        parked = max(totals.waiting - on_timeline, 0)
        name = look.type_name(type_id)
        made.append(
            TypeFigures(name, totals.waiting, parked, totals.waiting_bytes, totals.dead, _oldest_ms(look, type_id), due)
        )
    return sorted(made)


def _oldest_ms(look: SpoolLook, type_id: int) -> int:
    """Return the creation time of the entry with the least uid: uids begin with a time."""
    prefix = keys.pack_index_prefix(keys.WAITING_GENERATION, type_id)
    for _, value in islice(look.rows(Family.INDEX, prefix, prefix + b"\xff" * 32), 64):
        (row,) = look.source.get_many(Family.TIMELINE, [decode_index(value).key])
        if row is not None:
            return decode_entry(row, look.type_name(type_id))[0].created_at_ms
    return 0
