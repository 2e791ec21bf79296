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
from dmq.producer_store import hold, workplace, write_json
from dmq.recovery.check.check import check_rows
from dmq.recovery.reading.findings import CheckReport, Findings
from dmq.recovery.reading.log_repair import Tell
from dmq.recovery.reading.look import How, Look
from dmq.recovery.reading.loss_report import LOST_FILE, LossReport
from dmq.recovery.reading.names import KnownNames
from dmq.recovery.reading.offset_map import MovedMessages, Place
from dmq.recovery.reading.places import place_of, shown_id_of
from dmq.recovery.reading.rows import Indexed, TimelineRow, mark_of, read_index, read_waiting
from dmq.recovery.salvage.figures import SalvagedFigures, save_audit, save_meta
from dmq.recovery.salvage.logs import tell_dropped
from dmq.recovery.salvage.names import RequiredNames
from dmq.recovery.salvage.queues import measure, save_progress, save_queues
from dmq.recovery.salvage.replay import Replay
from dmq.recovery.salvage.schedules import is_whole, save_schedules
from dmq.store import check_place, place
from dmq.store.schema import keys
from dmq.store.schema.keys import INDEX_PREFIX_BYTES, Family, pack_index_prefix, timeline_key
from dmq.store.schema.messages.own_keys import is_own_key_scope, row_of, without_own_key
from dmq.store.schema.messages.record import EntryKind, decode_half_body, decode_queued
from dmq.store.writer.operations import IndexBuilt, IndexProperties, Restore
from dmq.trail.snapshots import cell_of

REPORT_FILE = "SALVAGE.json"


class Salvaged(NamedTuple):
    """Result of a salvage."""

    path: Path
    error: str  # why the old store could not be opened or read; empty: no error
    opened: str
    rows: dict[str, int]  # saved rows, by kind
    lost: dict[str, int]  # lines of ``LOST_FILE``, by kind
    lost_offsets: int  # messages missing in queues
    checked: CheckReport  # check of the new store

    @property
    def is_whole(self) -> bool:
        """Whether there is no recorded loss."""
        return not self.lost

    def as_json(self) -> dict[str, object]:
        """Return the result as JSON values."""
        plain = self._asdict() | {"path": str(self.path), "checked": self.checked.as_json()}
        return plain | {"is_whole": self.is_whole, "lost_file": str(self.path / LOST_FILE)}


def salvage_store(path: Path, target: Path, clock: Clock, tell: Tell) -> Salvaged:
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
            look = Look.open_in(work, path, clock, tell, stack)
            if any(True for _ in look.rows(Family.META, *keys.meta_range(keys.META_SPOOL_TOTAL))):
                raise StoreError(f"{path} belongs to a spool: use 'dmq spool salvage --root {path.parent}'")
            look.fill_holes(work, tell, stack)
            error = look.error or (min(look.holes).error if look.holes else "")
            with LossReport(database.parent / LOST_FILE) as lost:
                plan = _Plan(look, lost, clock.now_ms())
                with Replay.into(database, clock, plan.figures.rows()) as new:
                    _Salvage(plan, new).run()
                    tell("checking the new store")
                    checked = check_rows(Look(target, database.parent, new.store, How.STRICT), Findings(), tell)
            rows = {kind: total.rows for kind, total in checked.totals.items()}
            made.append(Salvaged(target, error, look.how, rows, dict(lost.count), lost.offsets, checked))
            write_json(database.parent / REPORT_FILE, made[0].as_json())
            return 0

        place(target, _cell_id(path), fill, of=path)
    return made[0]


class _Plan:
    """Names, figures and offsets of the new store, determined before it is created."""

    def __init__(self, look: Look, lost: LossReport, now_ms: int) -> None:
        self.look = look
        self.lost = lost
        self.now_ms = now_ms
        for hole in sorted(look.holes):
            first, end = hole.first.rstrip(b"\0").hex(), hole.end.rstrip(b"\0").hex()
            lost.tell("range", family=hole.family.name.lower(), first=first, end=end, error=hole.error)
        self.names = KnownNames(look, lambda key, why: self.bad_row(Family.META, key, why))
        self.figures = SalvagedFigures.of(look, now_ms)
        self.moves = measure(look, self.names, self.figures, self.bad_row)

    def bad_row(self, family: Family, key: bytes, why: str) -> None:
        """Report a row that cannot be decoded."""
        self.lost.tell("row", family=family.name.lower(), key=key.hex(), error=why)


class _Salvage:
    def __init__(self, plan: _Plan, new: Replay) -> None:
        self._plan = plan
        self._look = plan.look
        self._new = new
        self._lost = plan.lost
        self._names = plan.names
        self._figures = plan.figures
        self._bad_row = plan.bad_row
        self._needed = RequiredNames(plan.names, new, plan.lost, plan.now_ms)
        self._needed.queues = plan.moves.queue_counts()
        self._bodiless: set[bytes] = set()  # index keys of half messages and schedules with unreadable parts

    def run(self) -> None:
        look, new, lost, moves = self._look, self._new, self._lost, self._plan.moves
        for key, value in self._names.rows:
            new.put(Family.META, key, value)
        for topic in self._names.topics.values():  # the writer makes their rows, of all messages that are saved
            if topic.index_properties:
                new.add(IndexProperties(topic.topic_id, topic.index_properties))
        self._timeline()
        save_queues(look, moves, new, lost, self._needed)
        self._index(moves)
        save_progress(look, moves, new, self._names, self._needed)
        save_audit(look, new, lost, self._figures)
        save_meta(look, moves, new, self._names, self._figures, self._bad_row)
        save_schedules(look, new, self._names, lost)
        tell_dropped(look.dropped, lost, self._needed)
        for topic in self._names.topics.values():
            if topic.index_properties:
                new.add(IndexBuilt(topic.topic_id, topic.index_properties))
        new.flush()

    # -- the timeline and the index -----------------------------------------------------------------------------------

    def _timeline(self) -> None:
        for page in self._look.pages(Family.TIMELINE):
            self._save_waiting([row for row in page if not keys.is_half_body_key(row[0])])
        self._rest()

    def _save_waiting(self, rows: list[tuple[bytes, bytes]]) -> None:
        found: dict[bytes, tuple[TimelineRow, bytes]] = {}
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
        says = self._look.find_many(Family.INDEX, list(found))
        own_keys = [row for _, value in found.values() if (row := row_of(value))]
        taken = {row for row, held in zip(own_keys, self._new.get_many(Family.META, own_keys), strict=True) if held}
        for (index_key, (each, value)), before, said in zip(found.items(), known, says, strict=True):
            if before is not None or self._is_older(each, said):
                self._lost.tell("twice", message_id=self._needed.shown_id(each.message_id))
            else:
                self._keep_waiting(index_key, each, value, taken)

    def _is_older(self, each: TimelineRow, said: bytes | None) -> bool:
        """Return True if the index has a later state of the entry, and that state is readable."""
        mark = mark_of(said)
        if mark in {-1, each.mark}:
            return False
        (value,) = self._look.find_many(Family.TIMELINE, [timeline_key(mark)])
        return value is not None

    def _keep_waiting(self, index_key: bytes, each: TimelineRow, value: bytes, taken: set[bytes]) -> None:
        entry = each.entry
        body, half_body = value[each.body_at :], b""
        if entry.kind == EntryKind.TRANSACTION:
            body_key = keys.half_body_key(keys.sequence_of(each.mark))
            half_body = self._look.find_many(Family.TIMELINE, [body_key])[0] or b""
            try:
                body = decode_half_body(half_body)
            except StoreCorrupt:
                topic = self._needed.scope_name(entry.scope)
                self._lost.tell(
                    "message", topic=topic, message_id=self._needed.shown_id(each.message_id), was="waiting"
                )
                self._bodiless.add(index_key)
                return
        if entry.kind == EntryKind.RECURRING and not is_whole(self._look, each):  # reported when schedules are saved
            self._bodiless.add(index_key)
            return
        self._needed.of_waiting(each, value, body)
        if (own_key := row_of(value)) in taken:
            # Of two entries with a key one replaced the other, which a lost table had deleted. Both are delivered.
            own_key, value = b"", without_own_key(value)
        elif own_key:
            taken.add(own_key)
        key = timeline_key(each.mark)
        place = key, entry.scope, each.index_id, entry.deliver_at_ms
        self._new.add(Restore(*place, value, half_body, own_key or b""))

    def _rest(self) -> None:
        """Read unreached entries one by one by the index; report the missing ones."""
        for page in self._look.pages(Family.INDEX):
            asked: dict[bytes, bytes] = {}  # timeline key by index key
            for key, value in page:
                mark = mark_of(value) if key[:4] == bytes(4) and len(key) > INDEX_PREFIX_BYTES else -1
                if mark >= 0:
                    asked[key] = timeline_key(mark)
            for key in self._bodiless & asked.keys():  # already reported
                del asked[key]
            missing = [
                key
                for key, saved in zip(asked, self._new.get_many(Family.INDEX, list(asked)), strict=True)
                if saved is None
            ]
            entries = self._look.find_many(Family.TIMELINE, [asked[key] for key in missing])
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
        for page in self._look.pages(Family.INDEX):
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


def _cell_id(path: Path) -> str:
    try:
        return cell_of(path)
    except StoreCorrupt:  # the marker file is lost too
        return os.urandom(8).hex()
