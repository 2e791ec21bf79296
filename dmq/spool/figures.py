"""What a directory says of itself, and whether that is so: figures for ``stats``, every row and rule for ``verify``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from dmq.audit.events import decode_event
from dmq.errors import StoreCorrupt
from dmq.spool.inspect import Look
from dmq.spool.lanes import LaneId, lane_id
from dmq.spool.plan import size_of
from dmq.spool.records import Totals, decode_entry, decode_totals, entry_id, turn_of
from dmq.spool.salvage_log import Tell
from dmq.store import keys
from dmq.store.counts import due_in, end_of_minute
from dmq.store.keys import WAITING_GENERATION, pack_index_prefix, spool_range, timeline_key, timeline_mark
from dmq.store.ops import Family
from dmq.store.outbox import block_count, decode_block, decode_state
from dmq.store.record import decode_index
from dmq.units import format_time
from retry.sink import UID_BYTES, Entry

_PAGE = 512
_TOLD_MAX = 100
_INDEX_PREFIX_BYTES = 8
_GROUP_LETTERS = (b"a", b"d", b"l", b"m")


class TypeFigures(NamedTuple):
    """What a directory holds of one type, by its own figures."""

    type_name: str
    waiting: int
    parked: int  # of these, behind others of their key
    bytes: int
    dead: int
    oldest_at_ms: int  # when the oldest one on the timeline was made; 0: there is none
    due: list[tuple[int, int]]  # of those on the timeline: until when, how many


def totals_of(look: Look) -> dict[int, Totals]:
    """Return the totals by type, as far as they can be read."""
    found = {}
    for key, value in look.rows(Family.META, b"w", b"x"):
        found[int.from_bytes(key[1:5], "big")] = decode_totals(value)
    return found


def figures_of(look: Look) -> list[TypeFigures]:
    """Return the figures by type, in the order of the names; costs no look at the entries."""
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
    """Return when the entry with the least uid was made: uids begin with a time."""
    prefix = pack_index_prefix(WAITING_GENERATION, type_id)
    for _, value in islice(look.rows(Family.INDEX, prefix, prefix + b"\xff" * 32), 64):
        receipt = decode_index(value)
        (row,) = look.source.get_many(Family.TIMELINE, [timeline_key(timeline_mark(receipt.at_ms, receipt.sequence))])
        if row is not None:
            return decode_entry(row, look.type_name(type_id))[0].created_at_ms
    return 0


class Verifier:
    """Reads every row of an open copy. ``findings`` says what is wrong, the first hundred of each kind."""

    def __init__(self, look: Look, tell: Tell) -> None:
        self._look = look
        self._tell = tell
        self.findings: list[str] = []
        self.rows = 0
        self._kinds: Counter[str] = Counter()
        self._waiting: dict[int, Totals] = {}
        self._on_timeline: Counter[int] = Counter()
        self._due: Counter[tuple[int, int]] = Counter()  # by type and end of the minute
        self._heads = 0  # on the timeline, with a key
        self._first_mark = -1
        self._last_sequence = 0

    @property
    def waiting(self) -> int:
        """How many entries wait."""
        return sum(each.waiting for each in self._waiting.values())

    @property
    def dead(self) -> int:
        """How many are in the dead set."""
        return sum(each.dead for each in self._waiting.values())

    def run(self) -> list[str]:
        """Look at everything; return what is wrong."""
        for part in (self._timeline, self._index, self._group, self._audit, self._queue, self._meta):
            self._tell(f"{self.rows:,} rows read")
            try:
                part()
            except StoreCorrupt as error:
                self._find("row", str(error))
        for hole in self._look.holes:
            self._find("damage", f"{hole} cannot be read: {hole.error}")
        for row in self._look.unreadable:
            self._find("row", f"{row.family.name.lower()} {row.key.hex()} is no entry: {row.error}")
        left = [f"{count - _TOLD_MAX:,} more of {kind}" for kind, count in self._kinds.items() if count > _TOLD_MAX]
        return self.findings + left

    def _find(self, kind: str, text: str) -> None:
        self._kinds[kind] += 1
        if self._kinds[kind] <= _TOLD_MAX:
            self.findings.append(text)

    def _pages(
        self, family: Family, start: bytes = b"", stop: bytes = b"\xff" * 48
    ) -> Iterator[list[tuple[bytes, bytes]]]:
        rows = self._look.rows(family, start, stop)
        while page := list(islice(rows, _PAGE)):
            self.rows += len(page)
            self._tell(f"{self.rows:,} rows read")
            yield page

    def _count(self, type_id: int, waiting: int, size: int, dead: int) -> None:
        was = self._waiting.get(type_id, Totals())
        self._waiting[type_id] = Totals(was.waiting + waiting, was.waiting_bytes + size, was.dead + dead)

    def _get(self, family: Family, wanted: list[bytes]) -> Sequence[bytes | None]:
        """Return the rows, all of them empty if one is damaged: that is found where the family is read."""
        try:
            return self._look.source.get_many(family, wanted)
        except StoreCorrupt:
            return [b""] * len(wanted)

    # -- families -----------------------------------------------------------------------------------------------------

    def _timeline(self) -> None:
        rows = self._look.waiting()
        while page := list(islice(rows, _PAGE)):
            self.rows += len(page)
            self._tell(f"{self.rows:,} rows read")
            wanted = [pack_index_prefix(0, each.type_id) + entry_id(each.entry.uid, each.turn) for each in page]
            for each, value in zip(page, self._get(Family.INDEX, wanted), strict=True):
                mark = int.from_bytes(each.key, "big")
                self._first_mark = mark if self._first_mark < 0 else self._first_mark
                self._last_sequence = max(self._last_sequence, mark & 0xFFFF_FFFF_FFFF_FFFF)
                self._count(each.type_id, 1, size_of(each.entry), 0)
                self._on_timeline[each.type_id] += 1
                self._due[each.type_id, end_of_minute(each.entry.due_at_ms)] += 1
                if value is None:
                    self._find("index", f"{_name(each.entry)} waits, but the index does not know it")
                elif value and _mark_of(value) != mark:
                    self._find("index", f"{_name(each.entry)}: the index says that it waits elsewhere")
                if each.type_id not in self._look.types:
                    self._find("type", f"{_name(each.entry)} is of type {each.type_id}, which has no record")
            keyed = [lane_id(each.type_id, each.entry.key) for each in page if each.entry.key]
            self._heads += len(keyed)
            lanes = self._get(Family.GROUP, [_lane_key(each) for each in keyed])
            for lane, row in zip(keyed, lanes, strict=True):
                if row is None:
                    self._find(
                        "lane", f"an entry waits for lane {lane.type_id} {lane.digest.hex()}, which is not there"
                    )

    def _index(self) -> None:
        count = 0
        for page in self._pages(Family.INDEX):
            waiting = []
            for key, value in page:
                try:
                    receipt = decode_index(value)
                    if not int.from_bytes(key[:4], "big"):
                        turn_of(key[_INDEX_PREFIX_BYTES:])
                        waiting.append((key, timeline_mark(receipt.at_ms, receipt.sequence)))
                except StoreCorrupt as error:
                    self._find("index", f"index {key.hex()}: {error}")
            count += len(waiting)
            rows = self._get(Family.TIMELINE, [timeline_key(mark) for _, mark in waiting])
            for (key, mark), row in zip(waiting, rows, strict=True):
                if row is None:
                    uid = key[_INDEX_PREFIX_BYTES:][:UID_BYTES].hex()
                    self._find("index", f"{uid} is in the index, but does not wait at {mark:032x}")
        on_timeline = self._on_timeline.total()
        if count != on_timeline:
            self._find("index", f"{on_timeline:,} entries on the timeline, {count:,} in the index")

    def _group(self) -> None:
        lanes = 0
        for page in self._pages(Family.GROUP):
            for key, _ in page:
                if key[:4] != b"\xff\xff\xff\xff" or key[4:5] not in _GROUP_LETTERS:
                    self._find("group", f"group {key.hex()} is a row that no spool writes")
        for found in self._look.dead():
            self._count(found.type_id, 0, 0, 1)
            if found.key != spool_range(b"d", found.type_id, found.entry.uid)[0]:
                self._find("dead", f"{_name(found.entry)} lies under another's uid in the dead set")
        for lane, first, after in self._lanes():
            lanes += 1
            self._parked(lane, first, after)
        if lanes != self._heads:
            self._find("lane", f"{lanes:,} lanes, {self._heads:,} entries with a key on the timeline")
        for found in self._look.parked():
            self._count(found.type_id, 1, size_of(found.entry), 0)
            lane = lane_id(found.type_id, found.entry.key)
            number = int.from_bytes(found.key[-8:], "big")
            (row,) = self._get(Family.GROUP, [_lane_key(lane)])
            if not row:
                if row is None:
                    self._find("lane", f"{_name(found.entry)} is parked in a lane that is not there")
                continue
            first, after = keys.unpack_pair(row)
            if not first <= number < after:
                self._find("lane", f"{_name(found.entry)} is parked at {number}, its lane has {first} up to {after}")

    def _lanes(self) -> Iterator[tuple[LaneId, int, int]]:
        for key, value in self._look.rows(Family.GROUP, b"\xff\xff\xff\xffl", b"\xff\xff\xff\xffm"):
            try:
                yield LaneId(int.from_bytes(key[5:9], "big"), key[9:]), *keys.unpack_pair(value)
            except StoreCorrupt as error:
                self._find("lane", f"lane {key.hex()}: {error}")

    def _parked(self, lane: LaneId, first: int, after: int) -> None:
        start, stop = spool_range(b"m", lane.type_id, lane.digest)
        count = sum(1 for _ in self._look.rows(Family.GROUP, start, stop))
        if count != after - first:
            name = f"lane {lane.type_id} {lane.digest.hex()}"
            self._find("lane", f"{name} should have {after - first:,} parked entries, it has {count:,}")

    def _audit(self) -> None:
        (value,) = self._look.source.get_many(Family.META, [keys.META_OUTBOX])
        state = decode_state(value)
        at, size = state.first_sequence, 0
        for page in self._pages(Family.AUDIT):
            for key, block in page:
                sequence = int.from_bytes(key, "big")
                if sequence != at:
                    self._find("audit", f"audit events {at} up to {sequence} are missing")
                try:
                    for record in decode_block(key, block):
                        decode_event(record.event)
                    at = sequence + block_count(block)
                except StoreCorrupt as error:
                    self._find("audit", f"audit {sequence}: {error}")
                    at = sequence + 1
                size += len(block)
        if at != state.next_sequence:
            self._find("audit", f"audit events {at} up to {state.next_sequence} are missing")
        if size != state.stored_bytes:
            self._find("audit", f"the trail has {size:,} bytes, its figure says {state.stored_bytes:,}")

    def _queue(self) -> None:
        for page in self._pages(Family.QUEUE):
            self._find("queue", f"{len(page):,} rows in the queue family, where no spool writes")

    def _meta(self) -> None:
        figures = {key: value for page in self._pages(Family.META) for key, value in page}
        says = {int.from_bytes(key[1:5], "big"): decode_totals(figures[key]) for key in figures if key[:1] == b"w"}
        for type_id in sorted(says.keys() | self._waiting.keys()):
            claim, real = says.get(type_id, Totals()), self._waiting.get(type_id, Totals())
            if claim != real:
                self._find(
                    "totals",
                    f"type {self._look.type_name(type_id)}: totals say {_told(claim)}, there are {_told(real)}",
                )
        pending = {keys.scope_of_total(key): keys.unpack_u64(figures[key]) for key in figures if key[:1] == b"t"}
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
        says = {(keys.scope_of_hour(row[0]), each.until_ms): each.count for row in hours for each in due_in(*row)}
        for type_id, until_ms in sorted(says.keys() | self._due.keys()):
            said, found = says.get((type_id, until_ms), 0), self._due[type_id, until_ms]
            if said != found:
                name, when = self._look.type_name(type_id), f"in the minute until {format_time(until_ms)}"
                self._find("due", f"type {name}: {found:,} entries are due {when}, the figure says {said:,}")


def _mark_of(value: bytes) -> int:
    receipt = decode_index(value)
    return timeline_mark(receipt.at_ms, receipt.sequence)


def _lane_key(lane: LaneId) -> bytes:
    return spool_range(b"l", lane.type_id, lane.digest)[0]


def _name(entry: Entry) -> str:
    return f"{entry.type_name} {entry.uid.hex()}"


def _told(totals: Totals) -> str:
    return f"{totals.waiting:,} waiting with {totals.waiting_bytes:,} bytes and {totals.dead:,} dead"
