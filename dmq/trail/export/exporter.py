"""The exporter of the audit trail: moves events from the outbox into files, as defined by docs/reference/trail.md.

One thread per store. Only synced events are exported. A file is synced and listed in its manifest before its events
leave the outbox. So a kill at any point leaves every event in the outbox, in the trail, or in both, and recovery
resolves which. Sequences are never reused: if the store lost its tail, they continue after the exported ones.

An unwritable trail stops nothing else. The exporter logs it once and retries.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from broker_adapter.runtime.clock import SystemClock
from broker_adapter.runtime.log import LibraryLog
from dmq.errors import StoreCorrupt, StoreError
from dmq.replication.objects import ReplicaUnavailable
from dmq.store import Store, StoreOptions
from dmq.store.schema.accounting.outbox import block_head
from dmq.store.schema.cell.files import CELL_FILE
from dmq.store.schema.keys import Family, pack_u64
from dmq.store.writer.operations import DropOutbox, Emit, HoldOutbox, Op, SkipOutbox
from dmq.store.writer.writer import Unit
from dmq.trail import manifest
from dmq.trail.events import EventKind, cell_event, gap_event, tail_lost_event
from dmq.trail.export import recovery
from dmq.trail.export.retention import retire
from dmq.trail.export.uploads import TrailUploads
from dmq.trail.export.values import ExportFigures, ExportOptions, TrailUnavailable
from dmq.trail.ledger import LEDGER_KINDS
from dmq.trail.manifest import CellFile, Layout, Listed, Role
from dmq.trail.names import TrailNames
from dmq.trail.outbox_rows import Row, chunks_of, drop_of, files_of, read_rows

__all__ = ["ExportFigures", "ExportOptions", "Exporter", "TrailUnavailable", "export_all"]

log = LibraryLog("dmq.trail")

LOOK_S = 1.0  # interval between checks of the outbox
HEARTBEAT_S = 55.0  # with the interval between checks: at least one event a minute
IDLE_EVERY_S = 600.0  # how often files with only heartbeats are written
RETIRE_EVERY_S = 600.0
RETRY_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_BREATH_S = 0.001  # pause for the hot path
_ABORT_S = 5.0  # wait for an aborted thread, which a hanging disk may block


class _Aborted(Exception):
    """Abort of the current export, requested by ``close``."""


class Exporter:
    """Exporter of one store. Call ``recover`` before the run's first event, then ``start``, and ``close`` at the end.

    Without ``start`` there is no thread: ``turn`` and ``flush`` work in the caller's thread, for tests and offline use.
    """

    def __init__(
        self, store: Store, trail: Path, options: ExportOptions | None = None, uploads: TrailUploads | None = None
    ) -> None:
        """With ``uploads`` an event leaves the outbox once the object store has its file."""
        self.trail = trail
        self.exported_total = 0
        self.failures_total = 0
        self._store = store
        self._clock = store.clock
        self._options = options or ExportOptions()
        self._uploads = uploads
        self._is_fetched = uploads is None
        self._layout = Layout(trail, store.cell_id)
        self._names = TrailNames(store)
        self._cell: CellFile | None = None
        self._opened_end = store.outbox_state.next_sequence
        self._next = 0  # next event to export; 0: unknown until recovery
        self._last = 0  # last exported event
        self._is_settled = False  # a loss of the store's tail, if any, is recorded
        self._beats = 0  # heartbeats since the last export
        self._seen_end = 0
        now_s = self._clock.monotonic_s()
        self._quiet_since_s = self._exported_at_s = now_s
        self._retired_at_s = now_s - RETIRE_EVERY_S
        self._retry_at_s = now_s
        self._failures = 0  # consecutive failures
        self._error = ""
        self._wake = threading.Condition()
        self._working = threading.Lock()
        self._abort = threading.Event()
        self._attempt = self._failed_attempt = 0
        self._is_wanted = self._is_closing = self._has_ended = False
        self._thread: threading.Thread | None = None

    # -- life ---------------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Reconcile trail and store. Call it before the run's first event; it never raises.

        A failed recovery is repeated with the first export.
        """
        with self._working:
            try:
                self._recover()
            except Exception as error:  # noqa: BLE001 - the daemon serves without its trail
                self._note_failure(error)

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="dmq-trail-export", daemon=True)
        self._thread.start()

    def flush(self) -> int:
        """Export all durable events, and return the sequence of the last exported one.

        Blocks; callable from any thread. Raise ``TrailUnavailable`` if the export fails. The thread will retry.
        """
        if self._thread is None:
            self.turn(is_wanted=True)
            if self._error:
                raise TrailUnavailable(self._error)
            return self._last
        wanted = self._store.outbox_synced - 1
        with self._wake:
            after = self._attempt
            while self._last < wanted:
                if self._has_ended:
                    raise TrailUnavailable(self._error or "the trail is closed")
                if self._failed_attempt > after:
                    raise TrailUnavailable(self._error)
                self._is_wanted = self._is_wanted or self._attempt == after
                self._wake.notify_all()
                self._wake.wait(LOOK_S)
            return self._last

    def close(self, timeout_s: float) -> None:
        """Export the remaining events, for at most ``timeout_s``, and end the thread.

        Call it before the store is closed.
        """
        thread = self._thread
        if thread is None:
            return
        with self._wake:
            self._is_closing = True
            self._wake.notify_all()
        thread.join(timeout_s)
        if thread.is_alive():
            self._abort.set()
            thread.join(_ABORT_S)
            log.warning("trail_close_timed_out", waiting=self.waiting, has_ended=not thread.is_alive())

    # -- figures ------------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Number of events that are not exported yet."""
        state = self._store.outbox_state
        return state.next_sequence - max(state.first_sequence, self._last + 1)

    @property
    def figures(self) -> ExportFigures:
        """Figures of the export. Readable from any thread."""
        return ExportFigures(
            self._last, self.waiting, self.lag_ms(), self.exported_total, self.failures_total, self._error
        )

    def lag_ms(self) -> int:
        """Return the age of the oldest event that is not exported; 0 if there is none."""
        if not self.waiting:
            return 0
        found = self._store.scan(Family.AUDIT, pack_u64(self._last + 1), b"\xff" * 9, limit=1).rows
        return max(0, self._clock.now_ms() - block_head(found[0][1]).committed_at_ms) if found else 0

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            _load_libraries()
            while True:
                with self._wake:
                    if not (self._is_closing or self._is_wanted):
                        self._wake.wait(LOOK_S)
                    is_closing = self._is_closing
                    is_wanted, self._is_wanted = self._is_wanted or is_closing, False
                if self._store.failure is not None:
                    return
                self.turn(is_wanted=is_wanted, is_last=is_closing)
                if is_closing:
                    return
        except _Aborted:
            return
        finally:
            with self._wake:
                self._has_ended = True
                self._wake.notify_all()

    def turn(self, *, is_wanted: bool = False, is_last: bool = False) -> None:
        """Check once, and export if it is due or ``is_wanted``.

        Errors of the trail or the store are logged, not raised.
        """
        with self._working:
            with self._wake:
                self._attempt += 1
            try:
                now_s = self._clock.monotonic_s()
                if not is_last:
                    self._beat(now_s)
                if is_wanted or (now_s >= self._retry_at_s and self._is_due(now_s)):
                    self._export(now_s, is_hurried=is_wanted)
            except _Aborted:
                self._let_go()
                raise
            except Exception as error:  # noqa: BLE001 - whatever it was: the thread goes on, and says so
                self._note_failure(error)

    def _beat(self, now_s: float) -> None:
        """Record a heartbeat if no other event was committed for a while."""
        end = self._store.outbox_state.next_sequence
        if end != self._seen_end:
            self._seen_end, self._quiet_since_s = end, now_s
        elif now_s - self._quiet_since_s >= HEARTBEAT_S:
            self._quiet_since_s = now_s
            self._beats += 1
            with suppress(StoreError):
                self._store.submit(Unit([Emit(cell_event(EventKind.HEARTBEAT))]), is_urgent=True)

    def _is_due(self, now_s: float) -> bool:
        if not self._next and self._error:  # recovery must find the last exported event
            return True
        state = self._store.outbox_state
        waiting = self._store.outbox_synced - max(self._next, state.first_sequence)
        if waiting <= 0:
            return False
        if waiting >= self._options.rows_max or state.stored_bytes * 2 >= self._store.outbox_bytes_max:
            return True
        every_s = self._options.every_s
        if waiting <= self._beats:
            every_s = max(every_s, IDLE_EVERY_S)
        return now_s - self._exported_at_s >= every_s

    def _note_failure(self, error: Exception) -> None:
        self._next = 0  # a file may exist, or a line be half written: recover before the next export
        self._let_go()
        text = f"{type(error).__name__}: {error}"
        is_known = isinstance(error, OSError | StoreError | ValueError | ImportError | ReplicaUnavailable)
        if not self._error or not is_known:
            log.error("trail_stopped", trail=str(self.trail), error=text, exc_info=not is_known)
        self._retry_at_s = self._clock.monotonic_s() + RETRY_S[min(self._failures, len(RETRY_S) - 1)]
        self._failures += 1
        self.failures_total += 1
        with self._wake:
            self._error = text
            self._failed_attempt = self._attempt
            self._wake.notify_all()

    def _let_go(self) -> None:
        with suppress(StoreError):
            self._store.submit(Unit([HoldOutbox(0)]), is_urgent=True)

    # -- exporting ----------------------------------------------------------------------------------------------------

    def _export(self, now_s: float, *, is_hurried: bool) -> None:
        """Export all events that are synced now."""
        if not self._next:
            self._recover()
        self._beats = 0
        self._exported_at_s = now_s
        end = self._store.outbox_synced
        if self._next < end:
            self._store.commit([HoldOutbox(end)], is_urgent=True)
            while self._next < end:
                self._export_some(end, is_hurried=is_hurried)
        is_time = now_s - self._retired_at_s >= RETIRE_EVERY_S
        if is_time and self._cell is not None and self._clock.is_steady():  # a clock step must not delete the trail
            self._retired_at_s = now_s
            self._cell = retire(self._layout, self._cell, self._clock.now_ms(), self._options.keep)
            if self._uploads is not None:
                self._uploads.retire(self._layout)
        if self._uploads is not None:
            self._uploads.send_snapshots(self._layout)
        self._note_success()

    def _export_some(self, end: int, *, is_hurried: bool) -> None:
        """Export at most ``rows_max`` events, the limit of memory."""
        if self._store.keeps_room_from(self._layout.cell_file):
            raise OSError(
                errno.ENOSPC, "the disk is below its low-water mark; the rest is reserved for acknowledgements"
            )

        def breathe() -> None:
            if self._abort.is_set() or (not is_hurried and self._abort.wait(_BREATH_S)):
                raise _Aborted

        cut_to = self._store.outbox_state.first_sequence
        if cut_to > self._next:
            if self._last:
                log.error("audit_events_lost", first=self._next, count=cut_to - self._next)
            else:  # they are in another trail, or were cut before this one existed
                log.warning("audit_events_trimmed", first=cut_to)
            self._next = cut_to
        rows = read_rows(self._store, self._next, end, events_max=self._options.rows_max, breathe=breathe)
        missing = (rows[0].first_sequence if rows else end) - self._next
        if missing > 0:
            log.log(logging.CRITICAL, "trail_events_missing", first=self._next, count=missing)
        self._next = rows[-1].end if rows else end
        for part in files_of(rows):
            self._note_exported(self._write(part, breathe))
        if rows:
            more: list[Op] = [HoldOutbox(end)] if self._next < end else []
            self._store.commit([drop_of(rows), *more], is_urgent=True)

    def _write(self, rows: list[Row], breathe: Callable[[], None]) -> Listed:
        from dmq.trail.columns import to_columns
        from dmq.trail.files import write_events

        batches = []
        for chunk in chunks_of(rows):
            breathe()
            batches.append(to_columns(chunk, self._names.name))
        listed = write_events(self._layout, batches)
        manifest.append(self._layout, listed)
        if self._uploads is not None:
            self._uploads.send(self._layout, listed)
        return listed

    def _note_exported(self, listed: Listed) -> None:
        self.exported_total += listed.rows
        self._note_success()
        with self._wake:
            self._last = listed.last_sequence
            self._wake.notify_all()

    def _note_success(self) -> None:
        self._failures = 0
        if self._error:
            log.info("trail_resumed", trail=str(self.trail))
            self._error = ""

    # -- recovery -----------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        if self._uploads is not None and not self._is_fetched:
            self._uploads.fetch(self._layout)
            self._is_fetched = True
        found = recovery.recover(self._layout, self._options.role, socket.gethostname())
        last = found.last_sequence
        if not self._is_settled:
            first = min(self._opened_end, self._first_of_others(last))
            if first <= last:
                self._tell_lost_tail(first, last)
        self._is_settled = True
        if self._uploads is not None:
            self._uploads.send_missing(self._layout)
        self._drop_exported(last)
        self._cell = found.cell
        with self._wake:
            self._last = last
            self._next = last + 1
            self._wake.notify_all()

    def _first_of_others(self, last: int) -> int:
        """Return the first event of the outbox that shares its sequence with another event in the trail.

        Return ``last + 1`` if there is none. Such events exist if a store was reset to an earlier state and ran while
        its trail was unreadable.
        """
        start = self._store.outbox_state.first_sequence
        if start > last:
            return last + 1
        from dmq.trail.files import Committed  # pyarrow is not needed after a clean shutdown

        committed = Committed(self._layout)
        while start <= last:
            rows = read_rows(self._store, start, last + 1, events_max=self._options.rows_max, breathe=_no_breath)
            for row in rows:
                if committed.at(row.first_sequence) not in {None, (row.boot, row.at_ms)}:
                    return row.first_sequence
            start = rows[-1].end if rows else last + 1
        return last + 1

    def _tell_lost_tail(self, first: int, last: int) -> None:
        """Record the loss of exported events that the store lacks, and continue the sequences after them.

        Events of this store that got the same sequences while the trail was unreadable are dropped.
        """
        state = self._store.outbox_state
        starts, total_bytes, total, end = [], [], 0, last + 1
        at = state.first_sequence
        while at <= last:
            rows = read_rows(self._store, at, last + 1, events_max=self._options.rows_max, breathe=_no_breath)
            for row in rows:
                total += len(row.value)
                starts.append(row.first_sequence)
                total_bytes.append(total)
                end = max(end, row.end)
            at = rows[-1].end if rows else last + 1
        dropped = max(0, min(state.next_sequence, end) - first)
        count = last + 1 - first
        log.log(
            logging.CRITICAL,
            "trail_tail_lost",
            cell=self._layout.cell,
            first=first,
            count=count,
            not_exported=dropped,
        )
        ops: list[Op] = [DropOutbox(end, starts, total_bytes)] if starts else []
        ops += [SkipOutbox(last + 1), Emit(tail_lost_event(first, count))]
        if dropped:
            ops.append(Emit(gap_event(first, dropped)))
        self._store.commit(ops, is_urgent=True)

    def _drop_exported(self, last: int) -> None:
        """Drop exported events from the outbox: the process was killed before it could do so."""
        while (first := self._store.outbox_state.first_sequence) <= last:
            rows = read_rows(self._store, first, last + 1, events_max=self._options.rows_max, breathe=_no_breath)
            whole = [row for row in rows if row.end <= last + 1]
            if not whole:
                raise StoreCorrupt(f"the outbox does not end a row at event {last}, where the trail ends a file")
            self._store.commit([drop_of(whole)], is_urgent=True)


def export_all(data: Path, trail: Path, *, role: Role = "daemon") -> int:
    """Export everything from the store of a stopped process in ``data``; return the last exported sequence.

    Raise ``StoreLocked`` if a process uses it, other store errors as opening does, and ``TrailUnavailable``.
    """
    if not (data / CELL_FILE).exists():
        raise StoreError(f"{data} holds no store")
    forever = 2**62  # an export must not make the store cut events or forget ids
    options = StoreOptions(
        idempotency_window_ms=forever,
        outbox_bytes_max=forever,
        ballast_bytes=0,
        low_water_bytes=0,
        gap_event=gap_event,
        ledger_kinds=LEDGER_KINDS,
        begins_ledger=False,  # a producer store has none
    )
    store = Store.open(data, SystemClock(), options)
    try:
        exporter = Exporter(store, trail, ExportOptions(role=role))
        return exporter.flush()
    finally:
        store.close()


def _load_libraries() -> None:
    """Load numpy and pyarrow at start instead of during a burst: it costs a large part of a second."""
    with suppress(Exception):  # the first export raises it again and logs it
        import dmq.trail.files  # noqa: F401


def _no_breath() -> None:
    """Do not pause during recovery, which usually runs before there is a hot path."""
