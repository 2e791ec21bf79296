"""Salvage: copies the readable entries of a damaged directory into a new one, and counts the missing ones.

Missing entries are counted in three ways. The totals are absolute and part of every batch. The index has each entry of
the timeline. The sequence of the audit trail has no gaps, so a gap is a lost event. A lost batch took its changes of
all three with it. So an entry that was finished in a lost batch may be found again: it is then sent again. If the
counts leave room the report gives a range.
"""

from __future__ import annotations

import secrets
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from broker_adapter.runtime.clock import Clock
from dmq.errors import StoreCorrupt
from dmq.producer_store import (
    Entries,
    Root,
    choosing,
    directories_of,
    hold,
    size_of,
    store_options,
    workplace,
    write_json,
)
from dmq.recovery.check.spool import SpoolCheck
from dmq.recovery.reading.log_repair import Tell, puts_of
from dmq.recovery.reading.look import How
from dmq.recovery.reading.spool import FoundEntry, SpooledState, SpoolLook, totals_of
from dmq.recovery.salvage.replay import Replay
from dmq.store import Store
from dmq.store.files.durable import sync_directory
from dmq.store.schema import keys
from dmq.store.schema.accounting.outbox import block_count, decode_state
from dmq.store.schema.cell.files import ADOPTER_FILE
from dmq.store.schema.keys import INDEX_PREFIX_BYTES, WAITING_GENERATION, Family, pack_index_prefix, timeline_key
from dmq.store.schema.messages.index import decode_index
from dmq.store.schema.messages.record import decode_waiting
from dmq.store.schema.spool import (
    SPOOL_KEY_QUEUE,
    SPOOL_TAKEN,
    KeyQueueId,
    decode_entry,
    key_queue_id,
    key_queue_of,
    parked_number,
    spool_rows,
    turn_of,
)
from retry.sink import UID_BYTES

_TOLD_EVERY = 256  # entries
_NAMED_MAX = 1_000
_WAL_BYTES_MIN = 150  # minimum of a new entry in the log: timeline row, index row, event, totals


class Missing(NamedTuple):
    """Number of entries that could not be saved. ``at_most`` is ``None`` if there is no upper bound."""

    at_least: int
    at_most: int | None

    def __str__(self) -> str:
        if self.at_most == self.at_least:
            return f"{self.at_least:,}"
        return f"{self.at_least:,} or more" if self.at_most is None else f"{self.at_least:,} to {self.at_most:,}"


_NOTHING = Missing(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Result of a salvage. Empty paths: there was no damage, and nothing was changed."""

    directory: str
    error: str
    opened: str
    waiting: int = 0  # saved
    dead: int = 0  # saved
    superseded: int = 0  # older states of saved entries
    missing: Missing = _NOTHING
    missing_uids: tuple[str, ...] = ()  # uids of missing entries, as far as known, up to a thousand
    unreadable: tuple[str, ...] = ()
    holes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    guessed_types: tuple[str, ...] = ()  # names read from a damaged record
    unknown_types: tuple[str, ...] = ()  # substitute names of types whose name is lost
    lost_events: int = 0  # changes of any kind
    saved_in: str = ""
    kept_in: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether no entry is missing."""
        return self.missing == _NOTHING

    def as_json(self) -> dict[str, object]:
        """Return the report as JSON values."""
        plain = asdict(self)
        plain["missing"] = {"at_least": self.missing.at_least, "at_most": self.missing.at_most}
        return plain


def salvage_spool(path: Path, clock: Clock, tell: Tell) -> Report:
    """Save the readable entries of ``path`` into a new directory, and rename the original; none of its entries is
    removed.

    Raise ``StoreLocked`` if a process uses it. After a crash the original is unchanged, or both directories exist.
    Entries are then sent twice.
    """
    with hold(path), workplace(path.parent) as work:
        return _Salvage(path, work, clock, tell).run()


def looked_through(path: Path, clock: Clock, tell: Tell) -> Report:
    """Return the damage that ``salvage_spool`` would find, without changes; ``error`` is empty if there is none.

    Raise ``StoreLocked`` if a process uses the directory, ``StoreCorrupt`` if none of it can be read.
    """
    with hold(path), workplace(path.parent) as work, ExitStack() as stack:
        look = SpoolLook.open_in(work, path, clock, tell, stack)
        _find_damage(look, tell)
        return Report(directory=str(path), error=look.error, opened=look.how)


def _find_damage(look: SpoolLook, tell: Tell) -> None:
    """Set ``error`` in ``look`` if a copy that opened without errors is damaged."""
    if look.how is How.STRICT:
        tell("reading it")
        if findings := SpoolCheck(look, tell).run().lines():
            look.error = look.holes[0].error if look.holes else findings[0]


class _Salvage:
    def __init__(self, path: Path, work: Path, clock: Clock, tell: Tell) -> None:
        self._path = path
        self._work = work
        self._clock = clock
        self._tell = tell
        self._saved: Counter[tuple[str, bool]] = Counter()  # by type and dead flag
        self._superseded = 0
        self._missing_uids: list[str] = []
        self._index_missing = 0
        self._dropped_uids: set[bytes] = set()  # entries written in dropped records and not found elsewhere
        self._dropped_last: set[bytes] = set()  # of these, without later writes
        self._is_told = True  # True while all dropped records could be read

    def run(self) -> Report:
        with ExitStack() as stack:
            look = SpoolLook.open_in(self._work, self._path, self._clock, self._tell, stack)
            _find_damage(look, self._tell)
            if not look.error:
                return Report(directory=str(self._path), error="", opened=look.how)
            look.fill_holes(self._work, self._tell, stack)
            self._name_dropped(look)
            fresh = self._work / "fresh"
            store = Store.open(fresh, self._clock, store_options())
            try:
                new = Replay(store)
                self._save(look, Entries(store), new)
                for key, value in look.rows(Family.GROUP, *spool_rows(SPOOL_TAKEN)):
                    new.put(Family.GROUP, key, value)
                new.flush()
            finally:
                store.close()
            report = self._report(look)
        return self._exchange(fresh, report)

    def _name_dropped(self, look: SpoolLook) -> None:
        """Collect the uids in dropped records. A record has each uid at least twice, so a uid found once is damaged."""
        for dropped in look.dropped:
            data = dropped.data
            puts = None if data is None else puts_of(data)
            if data is None or puts is None:
                self._is_told = False
                continue
            for key, value in puts:
                if len(key) == 16 or key[:5] == b"\xff\xff\xff\xffm":
                    try:
                        uid = decode_entry(value, "")[0].uid
                    except StoreCorrupt:
                        uid = b""
                    if not uid or data.count(uid) == 1:
                        self._is_told = False
                        continue
                    self._dropped_uids.add(uid)
                    if dropped.is_tail:
                        self._dropped_last.add(uid)

    # -- saving -------------------------------------------------------------------------------------------------------

    def _save(self, look: SpoolLook, entries: Entries, new: Replay) -> None:
        """Replay the entries: first the heads of key queues, then the entries after them, in their order."""
        order = _KeyOrder.of(look) if look.has_lost_writes else _KeyOrder({}, {})
        behind: list[FoundEntry] = []
        # The later state of such a parked entry, as the head of its key, is lost.
        heads = (each for each in look.parked() if order.was_head(each)) if order.first else ()
        for found in chain(heads, self._waiting(look)):
            if found.state is SpooledState.WAITING and order.is_behind(found):
                behind.append(found)
            else:
                self._keep(look, entries, new, found)
        behind.sort(key=lambda each: each.key[8:])
        parked = (each for each in look.parked() if not order.was_head(each))
        for found in chain(behind, parked, look.dead()):
            self._keep(look, entries, new, found)
        new.flush()
        self._tell(f"{self._saved.total():,} entries saved")

    def _waiting(self, look: SpoolLook) -> Iterator[FoundEntry]:
        """Yield the entries of the timeline. In a hole the index names them; count those that cannot be read."""
        yield from _reached(look)
        if not any(hole.family is Family.TIMELINE for hole in look.holes):
            return
        start, stop = pack_index_prefix(WAITING_GENERATION, 0), keys.generation_range(1, 2)[0]
        for key, value in look.rows(Family.INDEX, start, stop):
            with suppress(StoreCorrupt):
                row = decode_index(value).key
                if not look.is_in_hole(Family.TIMELINE, row):
                    continue
                if (found := _at(look, row, keys.index_place(key)[1])) is not None:
                    yield found
                    continue
                self._index_missing += 1
                if len(self._missing_uids) < _NAMED_MAX:
                    self._missing_uids.append(key[INDEX_PREFIX_BYTES:][:UID_BYTES].hex())

    def _keep(self, look: SpoolLook, entries: Entries, new: Replay, found: FoundEntry) -> None:
        if look.has_lost_writes and _is_superseded(look, found):
            self._superseded += 1
            return
        settle = new.unit(size_of(found.entry))
        with entries.lock:
            if found.dead is not None:
                entries.adopt_dead(found.dead, found.turn, settle)
            else:
                entries.put(found.entry, lambda unit, _: settle(unit))
        self._dropped_uids.discard(found.entry.uid)
        self._saved[found.entry.type_name, found.dead is not None] += 1
        if self._saved.total() % _TOLD_EVERY == 0:
            self._tell(f"{self._saved.total():,} entries saved")

    # -- counting -----------------------------------------------------------------------------------------------------

    def _report(self, look: SpoolLook) -> Report:
        lost_events = _lost_events(look)
        return Report(
            directory=str(self._path),
            error=look.error,
            opened=look.how,
            waiting=sum(count for (_, is_dead), count in self._saved.items() if not is_dead),
            dead=sum(count for (_, is_dead), count in self._saved.items() if is_dead),
            superseded=self._superseded,
            missing=self._missing(look, lost_events),
            missing_uids=tuple(sorted([*self._missing_uids, *(uid.hex() for uid in self._dropped_uids)])[:_NAMED_MAX]),
            unreadable=tuple(dict.fromkeys(f"{row.family.name.lower()} {row.key.hex()}" for row in look.unreadable)),
            holes=tuple(str(hole) for hole in look.holes),
            dropped=tuple(str(each) for each in look.dropped),
            guessed_types=tuple(look.guessed_types),
            unknown_types=tuple(sorted({name for name, _ in self._saved if name in look.unknown_types})),
            lost_events=lost_events,
        )

    def _missing(self, look: SpoolLook, lost_events: int) -> Missing:
        damaged = {hole.family for hole in look.holes}
        short = 0
        has_totals = Family.META not in damaged
        with suppress(StoreCorrupt):
            for type_id, totals in totals_of(look).items():
                name = look.type_name(type_id)
                short += max(0, totals.waiting - self._saved[name, False])
                short += max(0, totals.dead - self._saved[name, True])
        if not look.has_lost_writes:
            if has_totals:
                return Missing(short, short)
            is_sure = not damaged & {Family.INDEX, Family.GROUP}
            return Missing(max(short, self._index_missing), self._index_missing if is_sure else None)
        at_least = max(short, self._index_missing, len(self._dropped_uids & self._dropped_last))
        if not damaged and self._is_told and look.how is not How.REBUILT:
            return Missing(at_least, max(at_least, len(self._dropped_uids)))
        if not has_totals or Family.AUDIT in damaged:
            return Missing(at_least, None)
        in_doubt = lost_events + sum(each.size_bytes // _WAL_BYTES_MIN for each in look.dropped if each.is_tail)
        at_most = short + in_doubt if damaged else min(short + in_doubt, in_doubt)
        return Missing(at_least, max(at_least, at_most))

    # -- the exchange -------------------------------------------------------------------------------------------------

    def _exchange(self, fresh: Path, report: Report) -> Report:
        """Move the new directory into place, then rename the old one: a crash may duplicate entries, not lose them."""
        root = self._path.parent
        target = root / f"spool-{secrets.token_hex(6)}"
        aside = root / self._path.name.replace("spool-", "damaged-", 1)
        while aside.exists():
            aside = root / f"{aside.name}-{secrets.token_hex(2)}"
        report = replace(report, saved_in=str(target), kept_in=str(aside))
        written = aside.with_name(f"{aside.name}.json")
        part = self._work / "report.json"
        write_json(part, report.as_json())
        with choosing(root):
            part.rename(written)
            if Root.adopter_of(self._path) is not None:
                shutil.copyfile(self._path / ADOPTER_FILE, fresh / ADOPTER_FILE)
            fresh.rename(target)
            for other in directories_of(root):  # directories being moved to the old one continue with the new one
                if Root.adopter_of(other) == self._path.name:
                    (other / ADOPTER_FILE).write_text(target.name, encoding="utf-8")
            sync_directory(root)
            self._path.rename(aside)
            sync_directory(root)
        return report


class _KeyOrder(NamedTuple):
    """Order of key queues. With lost batches a key may have two entries on the timeline: the earlier one is first."""

    head: dict[KeyQueueId, bytes]  # sequence of the first entry on the timeline
    first: dict[KeyQueueId, int]  # number of the first parked entry still in the queue

    @classmethod
    def of(cls, look: SpoolLook) -> _KeyOrder:
        """Read the order of the key queues of a copy."""
        order = cls({}, {})
        for found in _reached(look):
            if found.entry.key:
                key_queue, sequence = key_queue_id(found.type_id, found.entry.key), found.key[8:]
                order.head[key_queue] = min(sequence, order.head.get(key_queue, sequence))
        for key, value in look.rows(Family.GROUP, *spool_rows(SPOOL_KEY_QUEUE)):
            with suppress(StoreCorrupt):
                order.first[key_queue_of(key)] = keys.unpack_pair(value)[0]
        return order

    def was_head(self, found: FoundEntry) -> bool:
        """Return True if a parked entry had become the first one of its key."""
        return parked_number(found.key) < self.first.get(key_queue_id(found.type_id, found.entry.key), 0)

    def is_behind(self, found: FoundEntry) -> bool:
        """Return True if another entry of the timeline precedes this one in its key queue."""
        sequence = found.key[8:]
        key_queue = key_queue_id(found.type_id, found.entry.key)
        return bool(found.entry.key) and self.head.get(key_queue, sequence) != sequence


def _reached(look: SpoolLook) -> Iterator[FoundEntry]:
    """Yield the entries of the timeline outside of holes: in a hole, rows that were deleted may reappear."""
    return (found for found in look.waiting() if not look.is_in_hole(Family.TIMELINE, found.key))


def _at(look: SpoolLook, row: bytes, type_id: int) -> FoundEntry | None:
    (value,) = look.find_many(Family.TIMELINE, [row])
    with suppress(StoreCorrupt):
        if value is not None and decode_waiting(value).topic_id == type_id:
            return FoundEntry(SpooledState.WAITING, *decode_entry(value, look.type_name(type_id)), type_id, row)
    return None


def _is_superseded(look: SpoolLook, found: FoundEntry) -> bool:
    """Return True if a later state of the entry waits: the batch that ended this state is lost."""
    prefix = pack_index_prefix(WAITING_GENERATION, found.type_id) + found.entry.uid
    with suppress(StoreCorrupt):
        for key, value in look.source.scan(Family.INDEX, prefix, prefix + b"\xff" * 8, limit=16).rows:
            turn = turn_of(key[8:])
            if turn < found.turn or (turn == found.turn and found.state is SpooledState.WAITING):
                continue
            receipt = decode_index(value)
            mark = receipt.mark
            if look.source.get_many(Family.TIMELINE, [timeline_key(mark)])[0] is not None:
                return True
    return False


def _lost_events(look: SpoolLook) -> int:
    """Return the number of missing events in the trail, up to its recorded next sequence."""
    state = decode_state(None)
    with suppress(StoreCorrupt):
        state = decode_state(look.source.get_many(Family.META, [keys.META_OUTBOX])[0])
    at, lost = state.first_sequence, 0
    for key, block in look.rows(Family.AUDIT):
        sequence = int.from_bytes(key, "big")
        with suppress(StoreCorrupt):
            count = block_count(block)
            lost += max(0, sequence - at)
            at = max(at, sequence + count)
    return lost + max(0, state.next_sequence - at)
