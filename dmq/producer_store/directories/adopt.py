"""Adoption of the directories of dead processes: each entry is durable here before it is deleted there.

The adoption progress is stored here in the same batch as the adopted entries, so a crash repeats nothing. The next
process of this directory, or a process that adopts it, skips the entries that are here.

The progress row has two timeline marks and a number. Entries between the marks are here. The second mark is that of the
first entry of a key. This entry is here if the number is not 0, and so are the parked ones below number - 1. Entries
below the first mark were deleted there, or could not be read and are read again. An unreadable entry stays there with
all entries parked after it, and the directory is recorded as damaged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from broker_adapter.runtime.log import LibraryLog
from dmq.errors import StoreCorrupt, StoreError
from dmq.producer_store.directories.root import Root
from dmq.producer_store.directories.running import Running
from dmq.producer_store.entries.damage import read_timeline
from dmq.producer_store.entries.entries import Entries, settling
from dmq.producer_store.entries.plan import Settle
from dmq.producer_store.entries.trail import SpoolTrail
from dmq.store.engines.engine import scan_pages
from dmq.store.schema import spool as schema
from dmq.store.schema.keys import TIMELINE_END, WAITING_GENERATION, Family, pack_index_prefix, timeline_key
from dmq.store.schema.messages.record import decode_waiting
from dmq.store.schema.spool import TakenMark
from dmq.store.writer.operations import Delete, Op, Put
from dmq.trail.export import TrailUnavailable
from retry.sink import Entry

log = LibraryLog("dmq.producer_store")

_PER_UNIT = 256
_BYTES_PER_UNIT = 8 * 1024 * 1024


class _Interrupted(Exception):
    """The adoption stops and continues later."""


class Adopter:
    """Thread that searches for orphans periodically."""

    def __init__(self, root: Root, running: Running, trail: SpoolTrail | None = None) -> None:
        self._root = root
        self._trail = trail or SpoolTrail()
        self._running = running
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.adopted_total = 0  # entries

    def start(self, every_s: float) -> None:
        """Search at once, then every ``every_s`` seconds; never if it is 0."""
        if every_s > 0:
            self._thread = threading.Thread(target=self._run, args=(every_s,), name="dmq-spool-adopter", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop after the unit in progress."""
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, every_s: float) -> None:
        while True:
            try:
                self.adopt()
            except (StoreError, OSError) as error:
                log.error("spool_adoption_failed", root=str(self._root.path), error=str(error))  # noqa: TRY400
            if self._is_closing.wait(every_s):
                return

    def adopt(self) -> int:
        """Adopt every orphan; return the number of entries. Raise if the own directory fails."""
        self._root.sweep()
        total = 0
        is_more = True
        while is_more and not self._is_closing.is_set():
            is_more = False  # an adopted directory may have been the adopter of another one
            own = self._running.path
            for path, orphan in self._root.orphans(own, lambda: not self._is_closing.is_set()):
                move = _Move(self._running.entries, orphan, self._is_interrupted)
                try:
                    problem = move.all()
                    if problem:
                        self._root.name_damaged(path, problem)
                    else:
                        self._trail.export_rest(orphan.store)  # its audit events, under its own name
                        self._root.remove(path, orphan, own)
                        is_more = True
                except _Interrupted:
                    return total
                except _OwnFailed:
                    raise
                except (StoreError, TrailUnavailable) as error:  # retried later; it must not block the others
                    log.warning("spool_adoption_failed", path=str(path), error=str(error))
                    continue
                finally:
                    total += move.count
                    self.adopted_total += move.count
                    _close(orphan)
                log.info("spool_adopted", path=str(path), entries=move.count, by=str(own), left=problem)
        return total

    def _is_interrupted(self) -> bool:
        """Whether to stop: on ``close``, or if the disk has no room for a second copy of the entries."""
        return self._is_closing.is_set() or self._running.entries.store.is_disk_low()


class _Move:
    """Move of one directory into another one."""

    def __init__(self, own: Entries, other: Entries, is_interrupted: Callable[[], bool]) -> None:
        self._own = own
        self._other = other
        self._is_interrupted = is_interrupted
        self._row = schema.taken_key(other.store.cell_id)
        self._taken = TakenMark()
        self._start = 0  # first mark of the page in progress
        self._waiting: list[Future[None]] = []
        self._gone: list[Op] = []
        self._left: list[str] = []
        self.count = 0  # entries

    def all(self) -> str:
        """Move all entries; return the errors of entries that had to stay, or an empty text."""
        with _of_own():
            (value,) = self._own.store.get_many(Family.GROUP, [self._row])
        self._taken = schema.decode_taken(value)
        try:
            for key, row in self._timeline():
                self._head(int.from_bytes(key, "big"), row)
            self._dead()
            self._inherit()
        except StoreCorrupt as error:
            self._left.append(str(error))
        return "; ".join(self._left[:5])

    def _timeline(self) -> Iterator[tuple[bytes, bytes]]:
        at: bytes | None = timeline_key(0)
        while at is not None:
            found = read_timeline(self._other.store, at, TIMELINE_END, limit=_PER_UNIT, bytes_max=_BYTES_PER_UNIT)
            if found.hole is not None:
                self._left.append(f"{found.hole}: {found.hole.error}")
            if found.rows:
                self._start = int.from_bytes(found.rows[0][0], "big")
            yield from found.rows
            self._settle()
            at = found.next

    def _head(self, mark: int, value: bytes) -> None:
        """Move an entry of the timeline, and the entries parked after it."""
        try:
            type_id = decode_waiting(value).topic_id
            entry, turn = schema.decode_entry(value, self._other.type_name(type_id))
        except (StoreCorrupt, KeyError) as error:
            self._left.append(f"entry {mark:032x} cannot be read: {error}")
            return
        self._adopt(entry, turn, mark, 1)
        rest: list[Op] = [
            Delete(Family.TIMELINE, timeline_key(mark)),
            Delete(Family.INDEX, pack_index_prefix(WAITING_GENERATION, type_id) + schema.entry_id(entry.uid, turn)),
        ]
        if entry.key:
            try:
                self._parked(mark, type_id, entry)
            except StoreCorrupt as error:  # the row stays: it leads to them, and is read again with them
                self._left.append(f"behind entry {mark:032x}: {error}")
                self._settle()
                self._start = mark + 1
                return
            rest.append(Delete(Family.GROUP, schema.key_queue_key(schema.key_queue_id(type_id, entry.key))))
        self._gone += rest + self._other.forget(type_id, entry)

    def _parked(self, mark: int, type_id: int, head: Entry) -> None:
        """Move the entries parked after ``head``, whose row stays until they are moved: it leads to them."""
        for number, page in enumerate(self._pages(schema.parked_range(schema.key_queue_id(type_id, head.key)))):
            if number:
                self._settle()
            for row, value in page:
                entry, turn = schema.decode_entry(value, head.type_name)
                self._adopt(entry, turn, mark, schema.parked_number(row) + 2)
                self._gone += [Delete(Family.GROUP, row), *self._other.forget(type_id, entry)]

    def _pages(self, bounds: tuple[bytes, bytes]) -> Iterator[list[tuple[bytes, bytes]]]:
        return scan_pages(self._other.store, Family.GROUP, *bounds, limit=_PER_UNIT, bytes_max=_BYTES_PER_UNIT)

    def _adopt(self, entry: Entry, turn: int, mark: int, number: int) -> None:
        if self._taken.covers(mark, number):
            return
        progress = Put(Family.GROUP, self._row, schema.encode_taken(TakenMark(self._start, mark, number)))
        with _of_own(), self._own.lock:
            self._own.adopt(entry, turn, progress, self._settling())
        self.count += 1

    def _dead(self) -> None:
        """Move the dead set; a repeated move of an entry has no effect."""
        for type_id, topic in list(self._other.names.topics_by_id.items()):
            for page in self._pages(schema.spool_range(schema.SPOOL_DEAD, type_id)):
                for row, value in page:
                    try:
                        dead, turn = schema.decode_dead(value, topic.name)
                    except StoreCorrupt as error:
                        self._left.append(f"dead entry {row.hex()} cannot be read: {error}")
                        continue
                    with _of_own(), self._own.lock:
                        self._own.adopt_dead(dead, turn, self._settling())
                    self._gone += [Delete(Family.GROUP, row), *self._other.forget_dead(type_id)]
                    self.count += 1
                self._settle()

    def _inherit(self) -> None:
        """Copy the adoption progress that the other directory has recorded."""
        rows = self._other.store.scan(Family.GROUP, *schema.spool_rows(schema.SPOOL_TAKEN), limit=10_000).rows
        with _of_own():
            self._own.store.commit([Put(Family.GROUP, row, value) for row, value in rows], is_urgent=True)

    def _settling(self) -> Settle:
        done: Future[None] = Future()
        self._waiting.append(done)
        return settling(done)

    def _settle(self) -> None:
        """Wait until the adopted entries are durable here, then delete them there."""
        with _of_own():
            for each in self._waiting:
                each.result()
        self._waiting.clear()
        if self._gone:
            self._other.store.commit(self._gone)
            self._gone = []
        if self._is_interrupted():
            raise _Interrupted


class _OwnFailed(StoreError):
    """The directory that adopts the entries has failed."""


@contextmanager
def _of_own() -> Iterator[None]:
    """Convert errors of the own directory, to distinguish them from errors of the adopted one."""
    try:
        yield
    except StoreError as error:
        raise _OwnFailed(str(error)) from error


def _close(orphan: Entries) -> None:
    try:
        orphan.store.close()
    except StoreError as error:
        log.warning("spool_close_failed", error=str(error))
