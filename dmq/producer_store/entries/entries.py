"""Entries of one spool directory: every change is planned here under one lock, and submitted as one unit.

Totals, key queues and dead rows in memory are ahead of the disk by the units in progress, in the order of submission.
A change is applied in memory only once its unit is accepted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from broker_adapter.contracts.errors import BrokerError
from broker_adapter.contracts.topics import check_topic
from dmq.broker.topics import Names
from dmq.errors import UnitRefused
from dmq.producer_store.entries.key_queues import KeyQueues
from dmq.producer_store.entries.plan import ChangePlan, Settle, Ticket, event_of, size_of, withdrawn
from dmq.store import Store
from dmq.store.engines.engine import scan_pages
from dmq.store.schema.keys import WAITING_GENERATION, Family, pack_index_prefix, timeline_key
from dmq.store.schema.messages.index import decode_index
from dmq.store.schema.spool import (
    SPOOL_DEAD,
    KeyQueueId,
    TypeTotals,
    dead_key,
    decode_dead,
    decode_entry,
    decode_totals,
    encode_dead,
    encode_entry,
    encode_totals,
    entry_id,
    key_queue_id,
    spool_range,
    spool_total_key,
    turn_of,
)
from dmq.store.writer.operations import Delete, Emit, IfKnown, Op, Put, Schedule
from dmq.store.writer.writer import Unit
from dmq.trail.events import EventKind
from retry.sink import DeadEntry, Death, Entry

_OLDEST_LOOKED_AT = 64


class Entries:
    """Entries of one open store. The caller of every method must hold ``lock``; no method waits for the disk."""

    def __init__(self, store: Store, out: dict[int, Ticket] | None = None) -> None:
        """Read the state of ``store``; ``out`` has the entries held from an earlier store of the same directory."""
        self.store = store
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)  # signals further ready entries
        self.room = threading.Condition(self.lock)  # signals free room
        self.names = Names(store)
        self.key_queues = KeyQueues(store)
        self.totals: dict[int, TypeTotals] = {}
        self.out = out if out is not None else {}  # by mark: ready entries and held entries
        # Entries held by their callers from the start, by type id and entry id, until their marks are known.
        self.arriving: dict[tuple[int, bytes], Ticket | None] = {}
        # New entries in progress, by type id and uid: the list receives their unit once it ends.
        self._entering: dict[tuple[int, bytes], list[Unit]] = {}
        self._dead_ahead: dict[bytes, tuple[bytes, bytes | None]] = {}
        self._oldest_from: dict[int, bytes] = {}  # below it the index has only tombstones of a type
        types = list(self.names.topics_by_id)
        rows = store.get_many(Family.META, [spool_total_key(type_id) for type_id in types])
        for type_id, row in zip(types, rows, strict=True):
            self.totals[type_id] = decode_totals(row)

    # -- figures ------------------------------------------------------------------------------------------------------

    def type_id(self, type_name: str) -> int | None:
        """Return the id of a type; ``None`` if no entry of it was ever stored."""
        found = self.names.topics.get(type_name)
        return found.topic_id if found is not None else None

    def type_name(self, type_id: int) -> str:
        """Return the name of a type."""
        return self.names.topics_by_id[type_id].name

    def total(self) -> TypeTotals:
        """Return the totals over all types."""
        waiting = waiting_bytes = dead = 0
        for each in self.totals.values():
            waiting += each.waiting
            waiting_bytes += each.waiting_bytes
            dead += each.dead
        return TypeTotals(waiting, waiting_bytes, dead)

    def oldest(self, type_id: int, is_wanted: Callable[[int], bool]) -> tuple[Ticket, Entry] | None:
        """Return the oldest entry on the timeline, by uid, for whose mark ``is_wanted`` returns True."""
        prefix = pack_index_prefix(WAITING_GENERATION, type_id)
        first = prefix + self._oldest_from.get(type_id, b"")
        pages = scan_pages(self.store, Family.INDEX, first, prefix + b"\xff" * 32, limit=_OLDEST_LOOKED_AT)
        for number, page in enumerate(pages):
            if not number and page[0][0] != first:
                self._oldest_from[type_id] = page[0][0][len(prefix) :]
            for row, value in page:
                waiting = decode_index(value)
                mark = waiting.mark
                if not is_wanted(mark):
                    continue
                (there,) = self.store.get_many(Family.TIMELINE, [timeline_key(mark)])
                if there is not None:  # None: finished between the two reads
                    entry, _ = decode_entry(there, self.type_name(type_id))
                    return self.ticket(entry, mark, turn_of(row[len(prefix) :])), entry
        return None

    def ticket(self, entry: Entry, mark: int, turn: int) -> Ticket:
        """Return the ticket of an entry on the timeline."""
        type_id = self.names.topics[entry.type_name].topic_id
        key_queue = key_queue_id(type_id, entry.key) if entry.key else None
        return Ticket(mark, type_id, turn, entry.due_at_ms, size_of(entry), key_queue)

    def is_free(self, mark: int) -> bool:
        """Return True if no worker holds the entry."""
        ticket = self.out.get(mark)
        return ticket is None or ticket.is_ready

    def has_waiting(self, type_name: str, key: str) -> bool:
        """Return True if entries of a key are waiting or held."""
        type_id = self.type_id(type_name)
        return type_id is not None and self.key_queues.exists(key_queue_id(type_id, key))

    def keeps(self, entry: Entry) -> bool:
        """Return True if an entry with this uid is waiting or held under its type and key."""
        type_id = None if entry.is_new else self.type_id(entry.type_name)
        return type_id is not None and ((type_id, entry.uid) in self._entering or self._has(type_id, entry))

    def dead(self, type_name: str, after: bytes, limit: int) -> list[DeadEntry]:
        """Return entries of the dead set in the order of uids."""
        type_id = self.type_id(type_name)
        if type_id is None:
            return []
        start, stop = spool_range(SPOOL_DEAD, type_id)
        start = start + after + b"\0" if after else start
        rows = self.store.scan(Family.GROUP, start, stop, limit=limit).rows
        return [decode_dead(value, type_name)[0] for _, value in rows]

    # -- changes ------------------------------------------------------------------------------------------------------

    def put(self, entry: Entry, settle: Callable[[Unit, Ticket | None], None], *, is_held: bool = False) -> None:
        """Store a new entry; an entry with a uid that already waits on the timeline is stored once.

        ``settle`` gets its ticket if the caller holds it. That requires ``is_held``, no other entries of its key before
        it, and no other caller that holds it.
        """
        type_id, plan = self._type(entry.type_name)
        if self.keeps(entry):  # perhaps not yet on disk: the unit submitted now settles after it
            ended = self._entering.get((type_id, entry.uid), [])
            self._count(plan, type_id)
            self._submit(plan, lambda unit: settle(next((first for first in ended if first.error), unit), None))
            return
        self._enter(entry, type_id, 0, EventKind.SCHEDULED, plan, settle, is_held=is_held, is_new=entry.is_new)

    def finish(self, ticket: Ticket, entry: Entry, settle: Settle) -> None:
        """Remove the entry after it was sent."""
        event = event_of(EventKind.SENT, ticket.type_id, entry, entry.attempts + 1, entry.due_at_ms)
        self._remove(ticket, entry, ChangePlan([Emit(event)]), settle)

    def again(self, ticket: Ticket, entry: Entry, settle: Settle, *, is_counted: bool) -> None:
        """Make the entry wait until ``entry.due_at_ms``, with the values of ``entry``."""
        turn = ticket.turn + 1
        event = (
            event_of(EventKind.SEND_FAILED, ticket.type_id, entry, entry.attempts, entry.due_at_ms)
            if is_counted
            else b""
        )
        plan = ChangePlan()
        self._schedule(plan, ticket.type_id, entry, turn, event)
        plan.ops = withdrawn(ticket, entry, plan.ops)
        self._submit(plan, settle)

    def bury(self, ticket: Ticket, entry: Entry, death: Death, settle: Settle) -> None:
        """Move the entry to the dead set."""
        event = event_of(EventKind.SEND_DEAD, ticket.type_id, entry, entry.attempts, entry.created_at_ms)
        dead = DeadEntry(entry=entry, death=death, died_at_ms=self.store.clock.now_ms())
        plan = ChangePlan([Emit(event)])
        died = self._die(plan, dead, ticket.type_id, ticket.turn)
        self._remove(ticket, entry, plan, settle, died=died)

    def drop(self, ticket: Ticket, entry: Entry, settle: Settle) -> None:
        """Drop the entry, with an audit event."""
        event = event_of(EventKind.DROPPED, ticket.type_id, entry, entry.attempts, entry.created_at_ms)
        self._remove(ticket, entry, ChangePlan([Emit(event)]), settle)

    def refuse(self, entry: Entry, settle: Settle) -> None:
        """Record in the audit trail that a new entry was dropped."""
        type_id, plan = self._type(entry.type_name)
        plan.ops.append(Emit(event_of(EventKind.DROPPED, type_id, entry, entry.attempts, entry.created_at_ms)))
        self._submit(plan, settle)

    def requeue(self, type_name: str, uid: bytes, settle: Settle) -> bool:
        """Make a dead entry wait again, due now; return True if it existed."""
        type_id = self.type_id(type_name)
        if type_id is None:
            return False
        row = dead_key(type_id, uid)
        value = self._dead_value(row)
        if value is None:
            return False
        found, turn = decode_dead(value, type_name)
        entry = replace(found.entry, attempts=0, due_at_ms=self.store.clock.now_ms())
        plan = ChangePlan([Delete(Family.GROUP, row)], dead=(row, None))
        self._enter(
            *(entry, type_id, turn + 1, EventKind.REQUEUED, plan),
            lambda unit, _: settle(unit),
            died=-1,
            if_known=IfKnown.REFUSE,  # it would leave the dead set while another entry with its uid waits
        )
        return True

    def adopt(self, entry: Entry, turn: int, progress: Put, settle: Settle) -> None:
        """Store an entry of another directory, and in the same unit the adoption progress of that directory."""
        type_id, plan = self._type(entry.type_name)
        plan.ops.append(progress)
        self._enter(entry, type_id, turn, EventKind.SCHEDULED, plan, lambda unit, _: settle(unit))

    def adopt_dead(self, dead: DeadEntry, turn: int, settle: Settle) -> None:
        """Store a dead entry of another directory; a second call with the same entry has no effect."""
        type_id, plan = self._type(dead.entry.type_name)
        self._count(plan, type_id, died=self._die(plan, dead, type_id, turn))
        self._submit(plan, settle)

    def forget(self, type_id: int, entry: Entry) -> list[Op]:
        """Return the ops that subtract a moved entry from the totals; the caller deletes its rows."""
        plan = ChangePlan()
        self._count(plan, type_id, -1, -size_of(entry))
        return self._known(plan)

    def forget_dead(self, type_id: int) -> list[Op]:
        """Return the ops that subtract a moved dead entry from the totals."""
        plan = ChangePlan()
        self._count(plan, type_id, died=-1)
        return self._known(plan)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _type(self, type_name: str) -> tuple[int, ChangePlan]:
        """Return the id of a type, and a plan with the ops that its first use needs."""
        found = self.names.topics.get(type_name)
        if found is not None:
            return found.topic_id, ChangePlan()
        try:
            made, ops = self.names.plan_topic(check_topic(type_name), 1, self.store.clock.now_ms())
        except BrokerError as error:
            raise ValueError(str(error)) from error
        return made.topic_id, ChangePlan(list(ops), made)

    def _enter(
        self,
        entry: Entry,
        type_id: int,
        turn: int,
        kind: EventKind,
        plan: ChangePlan,
        settle: Callable[[Unit, Ticket | None], None],
        *,
        died: int = 0,
        is_held: bool = False,
        is_new: bool = False,
        if_known: IfKnown = IfKnown.ANSWER,
    ) -> None:
        value = encode_entry(entry, type_id, turn)
        event = event_of(kind, type_id, entry, 0, entry.due_at_ms)
        key_queue = key_queue_id(type_id, entry.key) if entry.key else None
        size = size_of(entry)
        plan.key_queue = self.key_queues.enter(key_queue, value) if key_queue is not None else None
        if plan.key_queue is not None:
            plan.ops += [Emit(event), *plan.key_queue.ops]
            self._count(plan, type_id, 1, size, died)
            self._submit_entering(plan, (type_id, entry.uid), lambda unit: settle(unit, None))
            return
        at = len(plan.ops)  # index of the entry's own receipt
        plan.scheduled = entry_id(entry.uid, turn)
        plan.ops.append(Schedule(type_id, plan.scheduled, entry.due_at_ms, value, event, is_new, if_known))
        if key_queue is not None:
            plan.key_queue = self.key_queues.open(key_queue)
            plan.ops += plan.key_queue.ops
        self._count(plan, type_id, 1, size, died)
        held = (type_id, plan.scheduled) if is_held else None

        def settled(unit: Unit) -> None:
            ticket = None
            if isinstance(unit.error, UnitRefused):
                with self.lock:
                    self._undo(plan, type_id, key_queue, entry.type_name, TypeTotals(1, size, died))
            if unit.error is None and (held is not None or unit.receipts[at].repeated):
                receipt = unit.receipts[at]
                mark = receipt.mark
                with self.lock:
                    seen = self.arriving.pop(held, None) if held is not None else None
                    if receipt.repeated:
                        ticket = seen
                        again = ChangePlan()
                        self._count(again, type_id, -1, -size)
                        self._submit(again, _ignore)
                    elif held is not None:
                        ticket = seen or Ticket(mark, type_id, turn, entry.due_at_ms, size, key_queue)
                        self.out[mark] = ticket
            settle(unit, ticket)

        if held is not None:
            self.arriving[held] = None
        try:
            self._submit_entering(plan, (type_id, entry.uid), settled)
        except BaseException:
            if held is not None:
                del self.arriving[held]
            raise

    def _undo(
        self, plan: ChangePlan, type_id: int, key_queue: KeyQueueId | None, type_name: str, added: TypeTotals
    ) -> None:
        """Revert the changes in memory of a refused unit, which is not on disk."""
        undone = ChangePlan()
        if plan.dead is not None and self._dead_ahead.get(plan.dead[0]) is plan.dead:
            del self._dead_ahead[plan.dead[0]]
        if key_queue is not None:  # other entries may have been parked after it in the meantime
            undone.key_queue = self.key_queues.leave(key_queue)
            undone.ops += undone.key_queue.ops
            if undone.key_queue.head is not None:
                following, turn = decode_entry(undone.key_queue.head, type_name)
                self._schedule(undone, type_id, following, turn, b"")
        self._count(undone, type_id, -added.waiting, -added.waiting_bytes, -added.dead)
        self._submit(undone, _ignore)

    def _remove(self, ticket: Ticket, entry: Entry, plan: ChangePlan, settle: Settle, *, died: int = 0) -> None:
        if ticket.key_queue is not None:
            plan.key_queue = self.key_queues.leave(ticket.key_queue)
            plan.ops += plan.key_queue.ops
            if plan.key_queue.head is not None:
                following, turn = decode_entry(plan.key_queue.head, entry.type_name)
                self._schedule(plan, ticket.type_id, following, turn, b"")
        self._count(plan, ticket.type_id, -1, -ticket.size_bytes, died)
        plan.ops = withdrawn(ticket, entry, plan.ops)
        self._submit(plan, settle)

    def _die(self, plan: ChangePlan, dead: DeadEntry, type_id: int, turn: int) -> int:
        """Add an entry to the dead set; return the growth of the set, 0 or 1."""
        row = dead_key(type_id, dead.entry.uid)
        value = encode_dead(encode_entry(dead.entry, type_id, turn), dead.death, dead.died_at_ms)
        plan.ops.append(Put(Family.GROUP, row, value))
        plan.dead = (row, value)
        return int(self._dead_value(row) is None)

    def _dead_value(self, row: bytes) -> bytes | None:
        ahead = self._dead_ahead.get(row)
        if ahead is not None:
            return ahead[1]
        (value,) = self.store.get_many(Family.GROUP, [row])
        return value

    def _schedule(self, plan: ChangePlan, type_id: int, entry: Entry, turn: int, event: bytes) -> None:
        plan.scheduled = entry_id(entry.uid, turn)
        value = encode_entry(entry, type_id, turn)
        plan.ops.append(Schedule(type_id, plan.scheduled, entry.due_at_ms, value, event, is_new=True))

    def _count(self, plan: ChangePlan, type_id: int, waiting: int = 0, size_bytes: int = 0, died: int = 0) -> None:
        was = self.totals.get(type_id, TypeTotals())
        now = TypeTotals(max(0, was.waiting + waiting), max(0, was.waiting_bytes + size_bytes), max(0, was.dead + died))
        plan.totals = (type_id, now)
        plan.ops.append(Put(Family.META, spool_total_key(type_id), encode_totals(now)))

    def _submit(self, plan: ChangePlan, settle: Settle) -> None:
        """Submit the unit; nothing in memory has changed if that fails."""

        def settled(unit: Unit) -> None:
            if unit.error is None:
                self._settled(plan)
            settle(unit)

        self.store.submit(Unit(plan.ops, settled), is_urgent=True)
        if plan.topic is not None:
            self.names.add_topic(plan.topic)
        if plan.key_queue is not None:
            self.key_queues.submitted(plan.key_queue)
        if plan.dead is not None:
            self._dead_ahead[plan.dead[0]] = plan.dead
        if plan.totals is not None:
            self.totals[plan.totals[0]] = plan.totals[1]

    def _submit_entering(self, plan: ChangePlan, name: tuple[int, bytes], settle: Settle) -> None:
        """Submit the unit of a new entry, and track it until the unit is settled."""
        ended: list[Unit] = []

        def settled(unit: Unit) -> None:
            ended.append(unit)
            if self._entering.get(name) is ended:
                del self._entering[name]
            settle(unit)

        self._entering[name] = ended
        try:
            self._submit(plan, settled)
        except BaseException:
            del self._entering[name]
            raise

    def _has(self, type_id: int, entry: Entry) -> bool:
        """Return True if the entry is on disk and waits under its key, in this turn or a later one."""
        if entry.key and self.key_queues.has_parked(key_queue_id(type_id, entry.key), entry.uid):
            return True  # checked first: entries move from there to the timeline
        start = pack_index_prefix(WAITING_GENERATION, type_id) + entry.uid
        return bool(self.store.scan(Family.INDEX, start, start + b"\xff" * 8, limit=1).rows)

    def _known(self, plan: ChangePlan) -> list[Op]:
        if plan.totals is not None:
            self.totals[plan.totals[0]] = plan.totals[1]
        return plan.ops

    def _settled(self, plan: ChangePlan) -> None:
        is_early = (
            plan.scheduled is not None
            and plan.totals is not None
            and plan.scheduled < self._oldest_from.get(plan.totals[0], b"")
        )
        if plan.key_queue is None and plan.dead is None and not is_early:
            return  # most entries need no lock here
        with self.lock:
            if plan.key_queue is not None:
                self.key_queues.settled(plan.key_queue)
            if plan.dead is not None and self._dead_ahead.get(plan.dead[0]) is plan.dead:
                del self._dead_ahead[plan.dead[0]]
            if is_early and plan.scheduled is not None and plan.totals is not None:
                type_id = plan.totals[0]
                self._oldest_from[type_id] = min(plan.scheduled, self._oldest_from.get(type_id, b""))


def _ignore(_: Unit) -> None:
    """Ignore the end of a unit: no caller waits for it."""


def settling(done: Future[None]) -> Settle:
    """Return a callback that settles ``done`` when a unit ends."""

    def settle(unit: Unit) -> None:
        if unit.error is not None:
            done.set_exception(unit.error)
        else:
            done.set_result(None)

    return settle
