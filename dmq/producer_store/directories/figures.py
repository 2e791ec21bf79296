"""Figures of a directory and their verification: counts for ``stats``, all rows and rules for ``check``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from dmq.config.units import format_time
from dmq.errors import StoreCorrupt
from dmq.producer_store.directories.findings import Findings, Pages, check_outbox
from dmq.producer_store.directories.inspect import Look
from dmq.producer_store.directories.salvage_log import Tell
from dmq.producer_store.entries.plan import size_of
from dmq.store.schema import keys
from dmq.store.schema import spool as schema
from dmq.store.schema.counts import due_in, end_of_minute
from dmq.store.schema.index import decode_index
from dmq.store.schema.keys import Family
from dmq.store.schema.outbox import decode_state
from dmq.store.schema.spool import KeyQueueId, TypeTotals
from retry.sink import UID_BYTES, Entry

_TOLD_MAX = 100


class TypeFigures(NamedTuple):
    """Stored figures of one type in a directory."""

    type_name: str
    waiting: int
    parked: int  # of these, in key queues after the first entry
    bytes: int
    dead: int
    oldest_at_ms: int  # creation time of the oldest entry on the timeline; 0: none
    due: list[tuple[int, int]]  # of entries on the timeline: (end of period, count)


def totals_of(look: Look) -> dict[int, TypeTotals]:
    """Return the readable totals by type id."""
    found = {}
    for key, value in look.rows(Family.META, *keys.meta_range(keys.META_SPOOL_TOTAL)):
        found[keys.meta_id(key)] = schema.decode_totals(value)
    return found


def figures_of(look: Look) -> list[TypeFigures]:
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


def _oldest_ms(look: Look, type_id: int) -> int:
    """Return the creation time of the entry with the least uid: uids begin with a time."""
    prefix = keys.pack_index_prefix(keys.WAITING_GENERATION, type_id)
    for _, value in islice(look.rows(Family.INDEX, prefix, prefix + b"\xff" * 32), 64):
        (row,) = look.source.get_many(Family.TIMELINE, [decode_index(value).key])
        if row is not None:
            return schema.decode_entry(row, look.type_name(type_id))[0].created_at_ms
    return 0


class Checker:
    """Reads every row of an open copy and collects findings, the first hundred of each kind."""

    def __init__(self, look: Look, tell: Tell) -> None:
        self._look = look
        self._read = Pages(tell)
        self._findings = Findings(_TOLD_MAX)
        self._find = self._findings.add
        self._waiting: dict[int, TypeTotals] = {}
        self._on_timeline: Counter[int] = Counter()
        self._due: Counter[tuple[int, int]] = Counter()  # by type and end of the minute
        self._heads = 0  # keyed entries on the timeline
        self._first_mark = -1
        self._last_sequence = 0

    @property
    def rows(self) -> int:
        """Number of rows read."""
        return self._read.rows

    @property
    def waiting(self) -> int:
        """Number of waiting entries."""
        return sum(each.waiting for each in self._waiting.values())

    @property
    def dead(self) -> int:
        """Number of entries in the dead set."""
        return sum(each.dead for each in self._waiting.values())

    def run(self) -> list[str]:
        """Check all families; return the findings."""
        for part in (self._timeline, self._index, self._group, self._audit, self._queue, self._meta):
            try:
                part()
            except StoreCorrupt as error:
                self._find("row", str(error))
        for hole in self._look.holes:
            self._find("damage", f"{hole} cannot be read: {hole.error}")
        for row in self._look.unreadable:
            self._find("row", f"{row.family.name.lower()} {row.key.hex()} is no entry: {row.error}")
        return self._findings.lines()

    def _pages(self, family: Family) -> Iterator[list[tuple[bytes, bytes]]]:
        return self._read.of(self._look.rows(family), family.name.lower())

    def _count(self, type_id: int, waiting: int, size: int, dead: int) -> None:
        was = self._waiting.get(type_id, TypeTotals())
        self._waiting[type_id] = TypeTotals(was.waiting + waiting, was.waiting_bytes + size, was.dead + dead)

    # -- families -----------------------------------------------------------------------------------------------------

    def _timeline(self) -> None:
        for page in self._read.of(self._look.waiting(), "timeline"):
            wanted = [
                keys.pack_index_prefix(0, each.type_id) + schema.entry_id(each.entry.uid, each.turn) for each in page
            ]
            for each, value in zip(page, self._look.get_many(Family.INDEX, wanted), strict=True):
                mark = int.from_bytes(each.key, "big")
                self._first_mark = mark if self._first_mark < 0 else self._first_mark
                self._last_sequence = max(self._last_sequence, keys.sequence_of(mark))
                self._count(each.type_id, 1, size_of(each.entry), 0)
                self._on_timeline[each.type_id] += 1
                self._due[each.type_id, end_of_minute(each.entry.due_at_ms)] += 1
                if value is None:
                    self._find("index", f"{_name(each.entry)} waits, but the index does not know it")
                elif value and _mark_of(value) != mark:
                    self._find("index", f"{_name(each.entry)}: the index says that it waits elsewhere")
                if each.type_id not in self._look.types:
                    self._find("type", f"{_name(each.entry)} is of type {each.type_id}, which has no record")
            keyed = [schema.key_queue_id(each.type_id, each.entry.key) for each in page if each.entry.key]
            self._heads += len(keyed)
            key_queues = self._look.get_many(Family.GROUP, [schema.key_queue_key(each) for each in keyed])
            for key_queue, row in zip(keyed, key_queues, strict=True):
                if row is None:
                    self._find(
                        "key queue",
                        f"an entry needs key queue {key_queue.type_id} {key_queue.digest.hex()}, which is not there",
                    )

    def _index(self) -> None:
        count = 0
        for page in self._pages(Family.INDEX):
            waiting = []
            for key, value in page:
                try:
                    receipt = decode_index(value)
                    if keys.index_place(key)[0] == keys.WAITING_GENERATION:
                        schema.turn_of(key[keys.INDEX_PREFIX_BYTES :])
                        waiting.append((key, receipt.mark))
                except StoreCorrupt as error:
                    self._find("index", f"index {key.hex()}: {error}")
            count += len(waiting)
            rows = self._look.get_many(Family.TIMELINE, [keys.timeline_key(mark) for _, mark in waiting])
            for (key, mark), row in zip(waiting, rows, strict=True):
                if row is None:
                    uid = key[keys.INDEX_PREFIX_BYTES :][:UID_BYTES].hex()
                    self._find("index", f"{uid} is in the index, but does not wait at {mark:032x}")
        on_timeline = self._on_timeline.total()
        if count != on_timeline:
            self._find("index", f"{on_timeline:,} entries on the timeline, {count:,} in the index")

    def _group(self) -> None:
        key_queues = 0
        for page in self._pages(Family.GROUP):
            for key, _ in page:
                if not schema.is_spool_key(key):
                    self._find("group", f"group {key.hex()} is a row that no spool writes")
        for found in self._look.dead():
            self._count(found.type_id, 0, 0, 1)
            if found.key != schema.dead_key(found.type_id, found.entry.uid):
                self._find("dead", f"{_name(found.entry)} lies under another's uid in the dead set")
        for key_queue, first, after in self._key_queues():
            key_queues += 1
            self._parked(key_queue, first, after)
        if key_queues != self._heads:
            self._find("key queue", f"{key_queues:,} key queues, {self._heads:,} entries with a key on the timeline")
        for found in self._look.parked():
            self._count(found.type_id, 1, size_of(found.entry), 0)
            key_queue = schema.key_queue_id(found.type_id, found.entry.key)
            number = schema.parked_number(found.key)
            (row,) = self._look.get_many(Family.GROUP, [schema.key_queue_key(key_queue)])
            if not row:
                if row is None:
                    self._find("key queue", f"{_name(found.entry)} is parked in a key queue that is not there")
                continue
            first, after = keys.unpack_pair(row)
            if not first <= number < after:
                self._find(
                    "key queue", f"{_name(found.entry)} is parked at {number}, its key queue has {first} up to {after}"
                )

    def _key_queues(self) -> Iterator[tuple[KeyQueueId, int, int]]:
        for key, value in self._look.rows(Family.GROUP, *schema.spool_rows(schema.SPOOL_KEY_QUEUE)):
            try:
                yield schema.key_queue_of(key), *keys.unpack_pair(value)
            except StoreCorrupt as error:
                self._find("key queue", f"key queue {key.hex()}: {error}")

    def _parked(self, key_queue: KeyQueueId, first: int, after: int) -> None:
        count = sum(1 for _ in self._look.rows(Family.GROUP, *schema.parked_range(key_queue)))
        if count != after - first:
            name = f"key queue {key_queue.type_id} {key_queue.digest.hex()}"
            self._find("key queue", f"{name} should have {after - first:,} parked entries, it has {count:,}")

    def _audit(self) -> None:
        (value,) = self._look.source.get_many(Family.META, [keys.META_OUTBOX])
        check_outbox(self._pages(Family.AUDIT), decode_state(value), self._find, self._saw_events)

    def _saw_events(self, key: bytes, _: bytes, error: StoreCorrupt | None) -> None:
        if error is not None:
            self._find("row", f"audit {key.hex()}: {error}")

    def _queue(self) -> None:
        for page in self._pages(Family.QUEUE):
            self._find("queue", f"{len(page):,} rows in the queue family, where no spool writes")

    def _meta(self) -> None:
        figures = {key: value for page in self._pages(Family.META) for key, value in page}
        says = {
            keys.meta_id(key): schema.decode_totals(figures[key]) for key in figures if key[:1] == keys.META_SPOOL_TOTAL
        }
        for type_id in sorted(says.keys() | self._waiting.keys()):
            claim, real = says.get(type_id, TypeTotals()), self._waiting.get(type_id, TypeTotals())
            if claim != real:
                self._find(
                    "totals",
                    f"type {self._look.type_name(type_id)}: totals say {_told(claim)}, there are {_told(real)}",
                )
        pending = {keys.meta_id(key): keys.unpack_u64(figures[key]) for key in figures if key[:1] == keys.META_TOTAL}
        for type_id in sorted(pending.keys() | self._on_timeline.keys()):
            found, said = self._on_timeline[type_id], pending.get(type_id, 0)
            if said != found:
                name = self._look.type_name(type_id)
                self._find("totals", f"type {name}: {found:,} entries on the timeline, the figure says {said:,}")
        self._due_figures(figures)
        last = keys.unpack_u64(figures.get(keys.META_SEQUENCE, bytes(8)))
        if last < self._last_sequence:
            self._find("sequence", f"the last sequence is {last}, an entry has {self._last_sequence}")
        done = keys.unpack_mark(figures.get(keys.META_DONE, bytes(16)))
        if 0 <= self._first_mark < done:
            self._find(
                "done", f"an entry waits at {self._first_mark:032x}, below the mark {done:032x}: it is never read"
            )

    def _due_figures(self, figures: dict[bytes, bytes]) -> None:
        hours = [row for row in figures.items() if row[0][:1] == keys.META_HOUR]
        says = {(keys.meta_id(row[0]), each.until_ms): each.count for row in hours for each in due_in(*row)}
        for type_id, until_ms in sorted(says.keys() | self._due.keys()):
            said, found = says.get((type_id, until_ms), 0), self._due[type_id, until_ms]
            if said != found:
                name, when = self._look.type_name(type_id), f"in the minute until {format_time(until_ms)}"
                self._find("due", f"type {name}: {found:,} entries are due {when}, the figure says {said:,}")


def _mark_of(value: bytes) -> int:
    return decode_index(value).mark


def _name(entry: Entry) -> str:
    return f"{entry.type_name} {entry.uid.hex()}"


def _told(totals: TypeTotals) -> str:
    return f"{totals.waiting:,} waiting with {totals.waiting_bytes:,} bytes and {totals.dead:,} dead"
