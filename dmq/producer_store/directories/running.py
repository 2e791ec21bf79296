"""The open directory of a spool, which a thread reopens after a storage error.

It retries after 1, 2, 5, then every 10 s until it succeeds. Held entries stay held in the meantime. A directory that
is refused as damaged, or whose writes meet damage twice in a row, is replaced by another one. Adoption moves its
readable entries.
"""

from __future__ import annotations

import threading

from broker_adapter.runtime.log import LibraryLog
from dmq.errors import StoreCorrupt, StoreError
from dmq.producer_store.directories.root import Root
from dmq.producer_store.entries.entries import Entries
from dmq.producer_store.entries.reader import DueReader
from dmq.producer_store.entries.trail import SpoolTrail
from dmq.store.schema.keys import Family, timeline_key

log = LibraryLog("dmq.producer_store")

REOPEN_S = (1.0, 2.0, 5.0, 10.0)


class Running:
    """Open directory of a spool: ``path``, ``entries`` and ``reader`` are replaced after a storage error."""

    def __init__(self, root: Root, *, is_driven: bool, trail: SpoolTrail | None = None) -> None:
        self._root = root
        self._trail = trail or SpoolTrail()
        self._is_driven = is_driven
        self._wanted: set[str] = set()
        self._is_down = threading.Event()
        self._closing = threading.Event()
        self._has_been_corrupt = False
        self.reopened_total = 0
        self.entries: Entries
        self.reader: DueReader
        self.path, entries = root.open_own()
        self._start(entries)
        self._thread = threading.Thread(target=self._mend, name="dmq-spool-mender", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the directory after all accepted changes are durable."""
        self._closing.set()
        self._is_down.set()
        self._thread.join()
        self.reader.close()
        self._trail.end(self.entries.store, is_orderly=True)
        try:
            self.entries.store.close()
        except StoreError as error:
            log.error("spool_close_failed", path=str(self.path), error=str(error))  # noqa: TRY400

    def _start(self, entries: Entries) -> None:
        self._trail.begin(entries.store, is_threaded=not self._is_driven)
        reader = DueReader(entries, self._wanted, lambda _: self._is_down.set())
        entries.store.on_failure = lambda _: self._is_down.set()
        self.entries, self.reader = entries, reader
        if entries.store.failure is not None:  # failed before ``on_failure`` was set
            self._is_down.set()
        if not self._is_driven:
            reader.start()

    def _mend(self) -> None:
        while True:
            self._is_down.wait()
            if self._closing.is_set():
                return
            failed = self.entries.store
            log.error("spool_failed", path=str(self.path), error=str(failed.failure or "it cannot be read"))
            self.reader.close()
            self._trail.end(failed, is_orderly=False)
            try:
                failed.close()
            except StoreError as error:
                log.warning("spool_close_failed", path=str(self.path), error=str(error))
            is_corrupt = isinstance(failed.failure, StoreCorrupt)
            is_hopeless = is_corrupt and self._has_been_corrupt
            self._has_been_corrupt = is_corrupt
            if not self._go_on(is_hopeless=is_hopeless):
                return

    def _go_on(self, *, is_hopeless: bool) -> bool:
        """Try until a directory is open again; return ``False`` if ``close`` comes first."""
        attempt = 0
        while not self._closing.wait(REOPEN_S[min(attempt, len(REOPEN_S) - 1)]):
            attempt += 1
            was = self.entries
            try:
                entries = self._open_another() if is_hopeless else self._open_again()
            except StoreCorrupt as error:
                self._root.name_damaged(self.path, str(error))
                is_hopeless = True
            except StoreError as error:
                log.error("spool_reopen_failed", path=str(self.path), error=str(error), attempt=attempt)  # noqa: TRY400
            else:
                self.reopened_total += 1
                self._is_down.clear()  # not earlier: both the reader and the writer of the failed store may set it
                if self._closing.is_set():
                    self._is_down.set()
                self._start(entries)
                with was.lock:
                    was.changed.notify_all()
                    was.room.notify_all()
                log.info("spool_reopened", path=str(self.path), sequence=entries.store.recovery.sequence)
                return True
        return False

    def _open_again(self) -> Entries:
        """Open the same directory: held entries stay held, unless their row is already finished."""
        was = self.entries
        store = self._root.open(self.path)
        try:
            entries = Entries(store, was.out)
            marks = list(was.out)
            rows = store.get_many(Family.TIMELINE, [timeline_key(mark) for mark in marks])
        except BaseException:
            store.close()
            raise
        with was.lock:
            for mark, row in zip(marks, rows, strict=True):
                if row is None:
                    was.out.pop(mark).is_gone = True
        return entries

    def _open_another(self) -> Entries:
        """Open another directory; held entries stay in the old one and are delivered again after its adoption."""
        path, entries = self._root.open_own(besides=self.path)
        with self.entries.lock:
            for ticket in self.entries.out.values():
                ticket.is_lost = True
        self.path = path
        return entries
