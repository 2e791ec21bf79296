"""Salvage: writes the readable rows of a damaged store to a new one; the old one is never changed.

The new store passes ``check`` and a daemon starts on it. Figures, marks and the index of pending entries are rebuilt
from the saved rows. If a queue is incomplete, its messages get new offsets (``reading.offset_map``), and every row
with offsets is adjusted. Rows that a lost table had deleted may reappear: such a message is delivered twice, but no
message is invented.

In the audit trail, each range of missing events is replaced by a ``GAP`` event. There is no event for a lost message:
the trail has its acceptance but no end, and the audit reports it as lost.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from broker_adapter.runtime.clock import Clock
from dmq.errors import StoreCorrupt, StoreError
from dmq.producer_store.directories.copies import hold, workplace, write_json
from dmq.producer_store.directories.findings import Findings
from dmq.producer_store.directories.inspect import How, Look, open_look
from dmq.producer_store.directories.salvage_log import Tell
from dmq.recovery.check.check import check_rows
from dmq.recovery.reading.damage_reader import DamageReader
from dmq.recovery.reading.findings import Checked
from dmq.recovery.reading.loss_report import LOST_FILE, LossReport
from dmq.recovery.reading.names import KnownNames
from dmq.recovery.reading.new_store import NewStore
from dmq.recovery.reading.places import Place, place_of, shown_id_of
from dmq.recovery.reading.rows import Indexed, Waiting, read_index, read_waiting
from dmq.recovery.reading.schedules import is_whole, save_schedules
from dmq.recovery.salvage.figures import SalvagedFigures, save_audit, save_meta
from dmq.recovery.salvage.logs import tell_dropped
from dmq.recovery.salvage.names import RequiredNames
from dmq.recovery.salvage.queues import MovedMessages, measure, save_progress, save_queues
from dmq.store.backup import check_place, place
from dmq.store.engines.rocks import RocksEngine
from dmq.store.schema import keys
from dmq.store.schema.index import decode_index, encode_index_waiting
from dmq.store.schema.keys import INDEX_PREFIX_BYTES, Family, pack_index_prefix, timeline_key
from dmq.store.schema.own_keys import KeyHolder, encode_key_holder, is_own_key_scope, row_of, without_own_key
from dmq.store.schema.record import EntryKind, decode_half_body, decode_queued, waiting_bytes
from dmq.trail.snapshots.taking import cell_of

REPORT_FILE = "SALVAGE.json"


class Salvaged(NamedTuple):
    """Result of a salvage."""

    path: Path
    error: str  # why the old store could not be opened or read; empty: no error
    opened: str
    rows: dict[str, int]  # saved rows, by kind
    lost: dict[str, int]  # lines of ``LOST_FILE``, by kind
    lost_offsets: int  # messages missing in queues
    checked: Checked  # check of the new store

    @property
    def is_whole(self) -> bool:
        """Whether there is no recorded loss."""
        return not self.lost

    def as_json(self) -> dict[str, object]:
        """Return the result as JSON values."""
        plain = self._asdict() | {"path": str(self.path), "checked": self.checked.as_json()}
        return plain | {"is_whole": self.is_whole, "lost_file": str(self.path / LOST_FILE)}


def salvage(path: Path, target: Path, clock: Clock, tell: Tell) -> Salvaged:
    """Save the readable rows of the store of a stopped daemon in ``path`` into a new one at ``target``.

    The new store exists complete and durable, or not at all. Raise ``StoreLocked``, ``StoreCorrupt`` if nothing can be
    read, ``TargetTaken``, and ``StoreError`` for the directory of a spool.
    """
    if not (path / "rocksdb").is_dir():
        raise StoreCorrupt(f"there is no database in {path}")
    made: list[Salvaged] = []
    check_place(target, path)
    with hold(path), workplace(target.parent) as work, ExitStack() as stack:

        def fill(database: Path) -> int:
            look = open_look(path, work, clock, tell, stack, StoreCorrupt)
            if any(True for _ in look.rows(Family.META, *keys.meta_range(keys.META_SPOOL_TOTAL))):
                raise StoreError(f"{path} belongs to a spool: use 'dmq spool salvage --root {path.parent}'")
            pieces = DamageReader(look, path, work, tell, stack)
            with LossReport(database.parent / LOST_FILE) as lost:
                engine = RocksEngine(database)
                try:
                    _Salvage(pieces, NewStore(engine), lost, clock).run()
                    tell("checking the new store")
                    checked = check_rows(Look(target, database.parent, engine, How.STRICT), Findings(), tell)
                    rows = dict(_rows_of(checked))
                finally:
                    engine.close()
            error = look.error or (pieces.holes[0].error if pieces.holes else "")
            made.append(Salvaged(target, error, look.how, rows, dict(lost.count), lost.offsets, checked))
            write_json(database.parent / REPORT_FILE, made[0].as_json())
            return 0

        place(target, _cell_id(path), fill, of=path)
    return made[0]


class _Salvage:
    def __init__(self, pieces: DamageReader, new: NewStore, lost: LossReport, clock: Clock) -> None:
        self._pieces = pieces
        self._new = new
        self._lost = lost
        self._now_ms = clock.now_ms()
        self._names = KnownNames(pieces, lambda key, why: self._bad_row(Family.META, key, why))
        self._needed = RequiredNames(self._names, new, lost, self._now_ms)
        self._figures = SalvagedFigures.of(pieces, self._now_ms)
        self._bodiless: set[bytes] = set()  # index keys of half messages and schedules with unreadable parts

    def run(self) -> None:
        pieces, new, lost = self._pieces, self._new, self._lost
        for hole in pieces.holes:
            first, end = hole.first.rstrip(b"\0").hex(), hole.end.rstrip(b"\0").hex()
            lost.tell("range", family=hole.family.name.lower(), first=first, end=end, error=hole.error)
        for key, value in self._names.rows:
            new.put(Family.META, key, value)
        moves = measure(pieces, self._names, self._figures, self._bad_row)
        self._needed.queues = moves.queue_counts()
        self._timeline()
        save_queues(pieces, moves, new, lost, self._needed)
        self._index(moves)
        save_progress(pieces, moves, new, self._names, self._needed)
        save_audit(pieces, new, lost, self._figures)
        save_meta(pieces, moves, new, self._names, self._figures, self._bad_row)
        save_schedules(pieces, new, self._names, lost)
        tell_dropped(pieces.look.dropped, lost, self._needed)
        new.finish()

    def _bad_row(self, family: Family, key: bytes, why: str) -> None:
        self._lost.tell("row", family=family.name.lower(), key=key.hex(), error=why)

    # -- the timeline and the index -----------------------------------------------------------------------------------

    def _timeline(self) -> None:
        for page in self._pieces.pages(Family.TIMELINE):
            self._save_waiting([row for row in page if not keys.is_half_body_key(row[0])])
        self._rest()

    def _save_waiting(self, rows: list[tuple[bytes, bytes]]) -> None:
        found: dict[bytes, tuple[Waiting, bytes]] = {}
        for key, value in rows:
            try:
                each = read_waiting(key, value)
            except StoreCorrupt as error:
                self._bad_row(Family.TIMELINE, key, str(error))
                continue
            index_key = pack_index_prefix(0, each.entry.scope) + each.index_id
            if index_key in found:
                self._lost.tell("twice", message_id=self._needed.shown_id(each.message_id))
            else:
                found[index_key] = (each, value)
        known = self._new.get_many(Family.INDEX, list(found))
        says = self._pieces.get_many(Family.INDEX, list(found))
        for (index_key, (each, value)), before, said in zip(found.items(), known, says, strict=True):
            if before is not None or self._is_older(each, said):
                self._lost.tell("twice", message_id=self._needed.shown_id(each.message_id))
                continue
            self._keep_waiting(index_key, each, value)

    def _is_older(self, each: Waiting, said: bytes | None) -> bool:
        """Return True if the index has a later state of the entry, and that state is readable."""
        mark = _mark_of(said)
        if mark is None or mark == each.mark:
            return False
        (value,) = self._pieces.get_many(Family.TIMELINE, [timeline_key(mark)])
        return value is not None

    def _keep_waiting(self, index_key: bytes, each: Waiting, value: bytes) -> None:
        entry = each.entry
        body = value[each.body_at :]
        if entry.kind == EntryKind.TRANSACTION:
            body_key = keys.half_body_key(keys.sequence_of(each.mark))
            found = self._pieces.get_many(Family.TIMELINE, [body_key])[0]
            try:
                body = decode_half_body(found or b"")
            except StoreCorrupt:
                topic = self._needed.scope_name(entry.scope)
                self._lost.tell(
                    "message", topic=topic, message_id=self._needed.shown_id(each.message_id), was="waiting"
                )
                self._bodiless.add(index_key)
                return
            self._new.put(Family.TIMELINE, body_key, found or b"")
        if entry.kind == EntryKind.RECURRING and not is_whole(self._pieces, each):  # reported when schedules are saved
            self._bodiless.add(index_key)
            return
        self._needed.of_waiting(each, value, body)
        key = timeline_key(each.mark)
        value = self._with_key(each, value)
        self._new.put(Family.TIMELINE, key, value)
        receipt = keys.sequence_of(each.mark), each.mark >> 64
        self._new.put(Family.INDEX, index_key, encode_index_waiting(*receipt))
        self._new.waits(each, waiting_bytes(value))
        self._figures.saw_mark(each.mark)

    def _with_key(self, each: Waiting, value: bytes) -> bytes:
        """Save the own key of an entry; return its value, without the key if another saved entry has it.

        Of two such entries one replaced the other, and a lost table had deleted it. It is delivered all the same.
        """
        if not (row := row_of(value)):
            return value
        if self._new.get_many(Family.META, [row])[0] is not None:
            return without_own_key(value)
        holder = KeyHolder(keys.sequence_of(each.mark), each.entry.deliver_at_ms, len(value), each.message_id)
        self._new.put(Family.META, row, encode_key_holder(holder))
        return value

    def _rest(self) -> None:
        """Read unreached entries one by one by the index; report the missing ones."""
        for page in self._pieces.pages(Family.INDEX):
            asked: dict[bytes, bytes] = {}  # timeline key by index key
            for key, value in page:
                mark = _mark_of(value) if key[:4] == bytes(4) and len(key) > INDEX_PREFIX_BYTES else None
                if mark is not None:
                    asked[key] = timeline_key(mark)
            for key in self._bodiless & asked.keys():  # already reported
                del asked[key]
            missing = [
                key
                for key, saved in zip(asked, self._new.get_many(Family.INDEX, list(asked)), strict=True)
                if saved is None
            ]
            entries = self._pieces.get_many(Family.TIMELINE, [asked[key] for key in missing])
            for key, entry in zip(missing, entries, strict=True):
                if entry is not None:
                    self._save_waiting([(asked[key], entry)])
                else:
                    scope, index_id = keys.index_place(key)[1], key[INDEX_PREFIX_BYTES:]
                    topic = self._needed.scope_name(scope)
                    shown = shown_id_of(scope, index_id, self._names)
                    self._lost.tell("message", topic=topic, message_id=shown, was="waiting")

    def _index(self, moves: MovedMessages) -> None:
        """Save the index rows of finished entries whose message exists."""
        for page in self._pieces.pages(Family.INDEX):
            placed: list[tuple[Indexed, bytes, Place]] = []
            for key, value in page:
                try:
                    row = read_index(key, value)
                except StoreCorrupt:  # reported when the queues were measured
                    continue
                if row.is_waiting or row.generation < self._figures.generation - 1:
                    continue
                if is_own_key_scope(row.scope):  # a lost table may have had a later holder, or its end
                    continue
                place = place_of(row, self._names)
                if place is None:
                    self._new.put(Family.INDEX, key, value)
                else:
                    placed.append((row, key, place))
            queue_keys = [moves.queue_key(place, row.receipt.queue_offset) for row, _, place in placed]
            messages = self._new.get_many(Family.QUEUE, queue_keys)
            for (row, key, place), queue_key, message in zip(placed, queue_keys, messages, strict=True):
                if message is not None and row.index_id.startswith(decode_queued(message).message_id):
                    self._new.put(Family.INDEX, key, moves.index_row(row, queue_key))
                elif not moves.is_removed(place, row.receipt.queue_offset):
                    shown = shown_id_of(row.scope, row.index_id, self._names)
                    topic = self._needed.scope_name(row.scope)
                    self._lost.tell("message", topic=topic, message_id=shown, was="in a queue")
                else:
                    self._new.put(Family.INDEX, key, moves.index_row(row, queue_key))


def _mark_of(row: bytes | None) -> int | None:
    if not row:
        return None
    try:
        return decode_index(row).mark
    except StoreCorrupt:
        return None


def _cell_id(path: Path) -> str:
    try:
        return cell_of(path)
    except StoreCorrupt:  # the marker file is lost too
        return os.urandom(8).hex()


def _rows_of(checked: Checked) -> list[tuple[str, int]]:
    return [(kind, total.rows) for kind, total in checked.totals.items()]
