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
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from broker_adapter.runtime.clock import Clock
from dmq.errors import StoreCorrupt
from dmq.producer_store.directories.copies import choosing, directories, hold, workplace, write_json
from dmq.producer_store.directories.figures import Checker, totals_of
from dmq.producer_store.directories.inspect import DirectoryState, Found, How, Look, open_look, store_options
from dmq.producer_store.directories.root import Root
from dmq.producer_store.directories.salvage_log import Tell, puts_of
from dmq.producer_store.entries.entries import Entries, settling
from dmq.producer_store.salvage.rest import Rest
from dmq.store.files.durable import sync_directory
from dmq.store.schema import keys
from dmq.store.schema.files import ADOPTER_FILE
from dmq.store.schema.index import decode_index
from dmq.store.schema.keys import WAITING_GENERATION, Family, pack_index_prefix, timeline_key
from dmq.store.schema.outbox import block_count, decode_state
from dmq.store.schema.spool import (
    SPOOL_KEY_QUEUE,
    KeyQueueId,
    decode_entry,
    key_queue_id,
    key_queue_of,
    parked_number,
    spool_rows,
    turn_of,
)
from dmq.store.store import Store
from dmq.store.writer.operations import Put

_PER_UNIT = 256
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


def salvage(path: Path, clock: Clock, tell: Tell) -> Report:
    """Save the readable entries of ``path`` into a new directory, and rename the original; none of its entries is
    removed.

    Raise ``StoreLocked`` if a process uses it. After a crash the original is unchanged, or both directories exist.
    Entries are then sent twice.
    """
    with hold(path), workplace(path.parent) as work:
        return _Salvage(path, work, clock, tell).run()


def looked_through(path: Path, clock: Clock, tell: Tell) -> Report:
    """Return the damage that ``salvage`` would find, without changes; ``error`` is empty if there is none.

    Raise ``StoreLocked`` if a process uses the directory, ``StoreCorrupt`` if none of it can be read.
    """
    with hold(path), workplace(path.parent) as work, ExitStack() as stack:
        look = open_look(path, work, clock, tell, stack)
        _find_damage(look, tell)
        return Report(directory=str(path), error=look.error, opened=look.how)


def _find_damage(look: Look, tell: Tell) -> None:
    """Set ``error`` in ``look`` if a copy that opened without errors is damaged."""
    if look.how is How.STRICT:
        tell("reading it")
        if findings := Checker(look, tell).run():
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
        self._waiting: list[Future[None]] = []
        self._dropped_uids: set[bytes] = set()  # entries written in dropped records and not found elsewhere
        self._dropped_last: set[bytes] = set()  # of these, without later writes
        self._is_told = True  # True while all dropped records could be read

    def run(self) -> Report:
        with ExitStack() as stack:
            look = open_look(self._path, self._work, self._clock, self._tell, stack)
            _find_damage(look, self._tell)
            if not look.error:
                return Report(directory=str(self._path), error="", opened=look.how)
            self._name_dropped(look)
            fresh = self._work / "fresh"
            store = Store.open(fresh, self._clock, store_options())
            try:
                self._save(look, Entries(store))
                taken_over = look.rows(Family.GROUP, b"\xff\xff\xff\xffa", b"\xff\xff\xff\xffb")
                if ops := [Put(Family.GROUP, key, value) for key, value in taken_over]:
                    store.commit(ops)
            finally:
                store.close()
            report = self._report(look)
        return self._exchange(fresh, report)

    def _name_dropped(self, look: Look) -> None:
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

    def _save(self, look: Look, entries: Entries) -> None:
        key_queues = self._key_queues(look)
        for found in look.parked() if look.has_lost_writes else ():  # their later state as head is lost
            first = key_queues.first.get(key_queue_id(found.type_id, found.entry.key), 0)
            if parked_number(found.key) < first:
                self._keep(look, entries, found)
        later: list[Found] = []
        for found in look.waiting():
            key_queue = key_queue_id(found.type_id, found.entry.key) if found.entry.key else None
            if key_queue is not None and key_queues.head.get(key_queue, found.key[8:]) != found.key[8:]:
                later.append(found)
            else:
                self._keep(look, entries, found)
        with ExitStack() as stack:
            rest = Rest(look, self._path, self._work, self._tell, stack)
            for found in rest.waiting():
                self._keep(look, entries, found)
            self._missing_uids, self._index_missing = rest.missing_uids, rest.missing
            for found in sorted(later, key=lambda each: each.key[8:]):
                self._keep(look, entries, found)
            for found in look.parked():
                first = (
                    key_queues.first.get(key_queue_id(found.type_id, found.entry.key), 0) if look.has_lost_writes else 0
                )
                if parked_number(found.key) >= first:
                    self._keep(look, entries, found)
            for found in look.dead():
                self._keep(look, entries, found)
            for found in rest.group():
                self._keep(look, entries, found)
        self._settle()

    def _keep(self, look: Look, entries: Entries, found: Found) -> None:
        if look.has_lost_writes and _is_superseded(look, found):
            self._superseded += 1
            return
        done: Future[None] = Future()
        settle = settling(done)
        with entries.lock:
            if found.dead is not None:
                entries.adopt_dead(found.dead, found.turn, settle)
            else:
                entries.put(found.entry, lambda unit, _: settle(unit))
        self._waiting.append(done)
        self._dropped_uids.discard(found.entry.uid)
        self._saved[found.entry.type_name, found.dead is not None] += 1
        if len(self._waiting) >= _PER_UNIT:
            self._settle()

    def _settle(self) -> None:
        for done in self._waiting:
            done.result()
        self._waiting.clear()
        self._tell(f"{self._saved.total():,} entries saved")

    @staticmethod
    def _key_queues(look: Look) -> _KeyQueues:
        """Return the order of key queues. With lost batches a key may have two entries on the timeline: the earlier one
        is first.
        """
        head: dict[KeyQueueId, bytes] = {}
        first: dict[KeyQueueId, int] = {}
        if look.has_lost_writes:
            for found in look.waiting():
                if found.entry.key:
                    key_queue = key_queue_id(found.type_id, found.entry.key)
                    head[key_queue] = min(found.key[8:], head.get(key_queue, found.key[8:]))
            for key, value in look.rows(Family.GROUP, *spool_rows(SPOOL_KEY_QUEUE)):
                with suppress(StoreCorrupt):
                    first[key_queue_of(key)] = keys.unpack_pair(value)[0]
        return _KeyQueues(head, first)

    # -- counting -----------------------------------------------------------------------------------------------------

    def _report(self, look: Look) -> Report:
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

    def _missing(self, look: Look, lost_events: int) -> Missing:
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
            for other in directories(root):  # directories being moved to the old one continue with the new one
                if Root.adopter_of(other) == self._path.name:
                    (other / ADOPTER_FILE).write_text(target.name, encoding="utf-8")
            sync_directory(root)
            self._path.rename(aside)
            sync_directory(root)
        return report


class _KeyQueues(NamedTuple):
    head: dict[KeyQueueId, bytes]  # sequence of the first entry on the timeline
    first: dict[KeyQueueId, int]  # number of the first parked entry still in the queue


def _is_superseded(look: Look, found: Found) -> bool:
    """Return True if a later state of the entry waits: the batch that ended this state is lost."""
    prefix = pack_index_prefix(WAITING_GENERATION, found.type_id) + found.entry.uid
    with suppress(StoreCorrupt):
        for key, value in look.source.scan(Family.INDEX, prefix, prefix + b"\xff" * 8, limit=16).rows:
            turn = turn_of(key[8:])
            if turn < found.turn or (turn == found.turn and found.state is DirectoryState.WAITING):
                continue
            receipt = decode_index(value)
            mark = receipt.mark
            if look.source.get_many(Family.TIMELINE, [timeline_key(mark)])[0] is not None:
                return True
    return False


def _lost_events(look: Look) -> int:
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
