"""Reader of due entries: a thread that keeps a bounded number of them ready for each type.

The reader scans the timeline once, in the order of its keys. A type with enough ready entries, or without a consumer,
does not delay the others: its rows are skipped. The type is *behind* from its first skipped row on. When there is room
again the reader returns for that type alone. So memory is bounded for any backlog, and an unavailable destination
costs nothing.

Ready and held entries are *out*. The durable done mark (everything below is finished) stays below every row that is
out, skipped or unreadable. The next run reads those rows again, and reports unreadable ones again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.log import LibraryLog
from dmq.errors import StoreCorrupt, StoreError, StoreFailed
from dmq.producer_store.entries.damage import Found, Hole, mark_from, read_timeline
from dmq.producer_store.entries.entries import Entries
from dmq.producer_store.entries.plan import Ticket
from dmq.store.schema.cell.clock import encode_clock
from dmq.store.schema.keys import META_CLOCK, TIMELINE_END, Family, timeline_key, unpack_timeline_key
from dmq.store.schema.messages.record import decode_waiting
from dmq.store.schema.spool import decode_entry, entry_id
from dmq.store.writer.marks import Cursor
from dmq.store.writer.operations import Done, Put
from dmq.store.writer.writer import Unit
from retry.sink import Held

log = LibraryLog("dmq.producer_store")

READY_MAX = 256  # per type
READY_BYTES_MAX = 8 * 1024 * 1024
ROWS_MAX = 512
BYTES_MAX = 8 * 1024 * 1024
NAP_MS_MAX = 200  # maximum delay caused by a step of the wall clock
_DONE_S = 0.5


@dataclass(slots=True)
class ReadyQueue:
    """Ready entries of one type."""

    is_wanted: bool = False  # a consumer takes entries of this type
    ready: deque[Held] = field(default_factory=deque)
    ready_bytes: int = 0
    behind: int | None = None  # the first skipped row

    @property
    def has_room(self) -> bool:
        """Whether further entries may be made ready."""
        return len(self.ready) < READY_MAX and self.ready_bytes < READY_BYTES_MAX


class DueReader:
    """Reader thread and its ready entries. Entries that are out are in ``entries.out``, under its lock."""

    def __init__(self, entries: Entries, wanted: set[str], on_failure: Callable[[StoreError], None]) -> None:
        self._entries = entries
        self._store = entries.store
        self._marks = entries.store.marks
        self._clock = entries.store.clock
        self._on_failure = on_failure  # called if the store can no longer be read
        self._shelves: dict[int, ReadyQueue] = {}
        self._wanted = wanted  # by name: a type may not have an id yet
        self._gone: set[int] = set()  # finished in this turn: a row read earlier in the turn no longer exists
        self.unreadable: dict[int, str] = {}  # by mark: rows that cannot be decoded
        self.damaged: dict[bytes, Hole] = {}  # by end
        self._is_closing = False
        self._done = 0
        self._kept_offset_ms = _offset_ms(self._clock)
        self._look_at_done_s = 0.0
        self._thread = threading.Thread(target=self._run, name="dmq-spool-reader", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and release the ready entries: another reader finds them."""
        self._is_closing = True
        self._marks.wake()
        if self._thread.is_alive():
            self._thread.join()
        with self._entries.lock:
            for shelf in self._shelves.values():
                for held in shelf.ready:
                    self._entries.out.pop(_ticket(held).mark, None)
                shelf.ready.clear()
            self._shelves.clear()
            self._entries.changed.notify_all()

    # -- for consumers; the lock is held ------------------------------------------------------------------------------

    def pop(self, type_name: str, limit: int) -> list[Held]:
        """Return up to ``limit`` ready entries of a type, and wake the reader to make more ready."""
        if type_name not in self._wanted:
            self._wanted.add(type_name)
            self._marks.wake()
        type_id = self._entries.type_id(type_name)
        shelf = self._shelves.get(type_id) if type_id is not None else None
        if shelf is None:
            return []
        taken = [shelf.ready.popleft() for _ in range(min(limit, len(shelf.ready)))]
        shelf.ready_bytes -= sum(len(each.entry.payload) for each in taken)
        for each in taken:
            _ticket(each).is_ready = False
        if shelf.behind is not None and len(shelf.ready) <= READY_MAX // 2:
            self._marks.wake()
        return taken

    def take_back(self, mark: int) -> Ticket:
        """Remove a ready entry from its shelf; the caller holds it from then on."""
        ticket = self._entries.out[mark]
        shelf = self._shelves[ticket.type_id]
        (held,) = (each for each in shelf.ready if each.ticket is ticket)
        shelf.ready.remove(held)
        shelf.ready_bytes -= len(held.entry.payload)
        ticket.is_ready = False
        return ticket

    def gone(self, ticket: Ticket) -> None:
        """Record that the row of an entry no longer exists."""
        ticket.is_gone = True
        self._entries.out.pop(ticket.mark, None)
        self._gone.add(ticket.mark)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def turn(self) -> int:
        """Make due entries ready while there is room; return the time of the next turn in ms, 0 for at once."""
        self._marks.begin_turn()
        now_ms = self._clock.now_ms()
        self._keep_clock()
        with self._entries.lock:
            self._gone.clear()
            for name in self._wanted:
                type_id = self._entries.type_id(name)
                if type_id is not None:
                    self._shelf(type_id).is_wanted = True
            behind = [
                (type_id, shelf)
                for type_id, shelf in self._shelves.items()
                if shelf.behind is not None and shelf.is_wanted and shelf.has_room
            ]
        more = False
        for type_id, shelf in behind:
            more |= self._catch_up(type_id, shelf)
        wanted = [shelf for shelf in self._shelves.values() if shelf.is_wanted]
        has_room = bool(self._wanted) and (not wanted or any(each.behind is None for each in wanted))
        more |= self._go_on(now_ms, has_room=has_room)
        self._keep_done()
        if more:
            return 0
        due_ms = self._next_due_ms() if has_room else None  # without room, consumers wake the reader
        return min(now_ms + NAP_MS_MAX, max(due_ms, now_ms + 1) if due_ms is not None else now_ms + NAP_MS_MAX)

    def _shelf(self, type_id: int) -> ReadyQueue:
        return self._shelves.setdefault(type_id, ReadyQueue())

    def _go_on(self, now_ms: int, *, has_room: bool) -> bool:
        """Read the rows that became due since the last turn."""
        if not has_room:
            return False
        claim = self._marks.claim(Cursor.LIVE, now_ms)
        if claim.stop <= claim.start:
            return False
        start, stop = timeline_key(claim.start), timeline_key(claim.stop)
        found = read_timeline(self._store, start, stop, limit=ROWS_MAX, bytes_max=BYTES_MAX)
        self._note(found)
        rows, unsynced = found.rows, self._marks.unsynced()
        while rows and int.from_bytes(rows[-1][0], "big") >= unsynced:
            rows.pop()
        if found.next is not None and mark_from(found.next) < unsynced:
            self._marks.retreat(Cursor.LIVE, mark_from(found.next))
        with self._entries.lock:
            for key, value in rows:
                mark = int.from_bytes(key, "big")
                type_id = self._type_of(mark, value)
                if type_id is None:
                    continue
                shelf = self._shelf(type_id)
                if shelf.behind is None and shelf.is_wanted and shelf.has_room:
                    self._make_ready(mark, type_id, shelf, value)
                elif mark not in self._entries.out:
                    shelf.behind = min(mark, shelf.behind) if shelf.behind is not None else mark
            self._entries.changed.notify_all()
        return bool(rows) or found.next is not None

    def _catch_up(self, type_id: int, shelf: ReadyQueue) -> bool:
        """Read the skipped rows of a type."""
        assert shelf.behind is not None
        until = self._marks.low()
        if until <= shelf.behind:  # the clock was set back: the live cursor reads these rows again
            shelf.behind = None
            return True
        start, stop = timeline_key(shelf.behind), timeline_key(until)
        found = read_timeline(self._store, start, stop, limit=ROWS_MAX, bytes_max=BYTES_MAX)
        self._note(found)
        unsynced = self._marks.unsynced()  # the live cursor is below those rows and reads them again
        with self._entries.lock:
            left = None
            for key, value in found.rows:
                mark = int.from_bytes(key, "big")
                if mark >= unsynced or self._type_of(mark, value) != type_id:
                    continue
                if not shelf.has_room:
                    left = mark
                    break
                self._make_ready(mark, type_id, shelf, value)
            if left is None and found.next is not None:
                left = mark_from(found.next)
            shelf.behind = left
            self._entries.changed.notify_all()
        return shelf.has_room

    def _note(self, found: Found) -> None:
        hole = found.hole
        if hole is None:
            return
        known = self.damaged.get(hole.end)
        if known is None:
            log.error("spool_damaged", where=str(hole), error=hole.error)
        if known is None or known.first < hole.first:
            self.damaged[hole.end] = hole

    def _type_of(self, mark: int, value: bytes) -> int | None:
        """Return the type id of a row; an unknown one is left for ``dmq spool salvage``, and the result is None."""
        if mark in self.unreadable:
            return None
        try:
            type_id = decode_waiting(value).topic_id
        except StoreCorrupt as error:
            self._cannot_read(mark, str(error))
            return None
        if type_id not in self._entries.names.topics_by_id:
            self._cannot_read(mark, f"type {type_id} has no name")
            return None
        return type_id

    def _cannot_read(self, mark: int, error: str) -> None:
        self.unreadable[mark] = error
        log.error("spooled_entry_unreadable", key=f"{mark:032x}", error=error)

    def _make_ready(self, mark: int, type_id: int, shelf: ReadyQueue, value: bytes) -> None:
        entries = self._entries
        if mark in entries.out or mark in self._gone:
            return
        try:
            entry, turn = decode_entry(value, entries.type_name(type_id))
        except StoreCorrupt as error:
            self._cannot_read(mark, str(error))
            return
        ticket = entries.out[mark] = entries.ticket(entry, mark, turn)
        arriving = (type_id, entry_id(entry.uid, turn))
        if arriving in entries.arriving:  # the caller of ``put`` holds it and is about to get its result
            entries.arriving[arriving] = ticket
            return
        ticket.is_ready = True
        shelf.ready.append(Held(entry, ticket))
        shelf.ready_bytes += len(entry.payload)

    def _keep_clock(self) -> None:
        """Store the clock state after the host's clock was set: the next process continues from it."""
        offset_ms = _offset_ms(self._clock)
        if offset_ms > self._kept_offset_ms or self._clock.has_news:
            news, row = self._clock.news()
            self._store.submit(Unit([Put(Family.META, META_CLOCK, encode_clock(row))]), is_urgent=True)
            self._clock.recorded(len(news))
            self._kept_offset_ms = max(self._kept_offset_ms, offset_ms)

    def _keep_done(self) -> None:
        """Store the done mark every ``_DONE_S`` seconds if it changed: a start continues from it."""
        now_s = self._clock.monotonic_s()
        if now_s < self._look_at_done_s:
            return
        self._look_at_done_s = now_s + _DONE_S
        with self._entries.lock:
            behind = [each.behind for each in self._shelves.values() if each.behind is not None]
            damaged = [mark_from(each.first) for each in self.damaged.values()]
            done = min([self._marks.low(), *behind, *self._entries.out, *self.unreadable, *damaged])
        if done != self._done:
            self._done = done
            self._store.submit(Unit([Done(done)]), is_urgent=True)

    def _next_due_ms(self) -> int | None:
        start = timeline_key(self._marks.low())
        first = read_timeline(self._store, start, TIMELINE_END, limit=1, bytes_max=BYTES_MAX).rows
        return unpack_timeline_key(first[0][0])[0] if first else None

    def _run(self) -> None:
        while not self._is_closing:
            try:
                until_ms = self.turn()
            except Exception as error:  # noqa: BLE001 - any error would otherwise stop deliveries unnoticed
                if not self._is_closing:
                    log.error("spool_reader_stopped", error=f"{type(error).__name__}: {error}")  # noqa: TRY400
                    self._on_failure(error if isinstance(error, StoreError) else StoreFailed(str(error)))
                return  # the spool reopens the directory with another reader
            if until_ms:
                self._marks.wait(until_ms, (until_ms - self._clock.now_ms()) / 1000)


def _ticket(held: Held) -> Ticket:
    assert isinstance(held.ticket, Ticket)
    return held.ticket


def _offset_ms(clock: Clock) -> int:
    # This order: a pause between the calls makes the offset smaller, and only larger ones are stored.
    now_ms = clock.now_ms()
    return now_ms - clock.boot_ms()
