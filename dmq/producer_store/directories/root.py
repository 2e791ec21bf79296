"""Root folder of a spool: one directory per process, adopted by another process once its own is dead.

<root>/ADOPT                held while a process opens, chooses or removes a directory
<root>/spool-<id>/          a cell (``dmq.store.files.cell``): its LOCK shows whether its process is alive
<root>/spool-<id>/ADOPTER   name of the directory it is being moved to

A lock ends with its process, also in a container, so a directory that can be locked is an orphan. Locks do not work on
network file systems; RocksDB does not either.

A directory with an ADOPTER is partly moved. No process uses it as its own, and only its adopter continues the move. So
entries of one key are never in two served directories. If the adopter itself is adopted, its adopter continues.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple
from weakref import WeakSet

from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.log import LibraryLog
from dmq.errors import StoreCorrupt, StoreError, StoreFailed, StoreForked, StoreLocked
from dmq.producer_store.directories.copies import LOCK_FILE
from dmq.producer_store.entries.clock import ForwardClock
from dmq.producer_store.entries.entries import Entries
from dmq.store import Store, StoreOptions
from dmq.store.files.cell import unusable
from dmq.store.files.durable import make_directory, sync_directory
from dmq.store.schema.cell.clock import encode_clock
from dmq.store.schema.cell.files import ADOPTER_FILE
from dmq.store.schema.keys import META_CLOCK, Family
from dmq.store.writer.operations import Put

log = LibraryLog("dmq.producer_store")

_PREFIX = "spool-"
_ADOPTED = ".adopted"


class Damaged(NamedTuple):
    """Directory that is unusable, wholly or in part. It is kept; ``dmq spool salvage`` reports the entries that can be
    saved.
    """

    path: Path
    error: str


class Root:
    """Root folder. Methods may be called from any thread."""

    def __init__(self, path: Path, clock: Clock, options: StoreOptions) -> None:
        self.path = path = path.absolute()  # the process may change its working directory
        self.damaged: dict[Path, Damaged] = {}
        self.clock = ForwardClock(clock)
        self._options = options
        self._stores: WeakSet[Store] = WeakSet()
        self._choice: IO[str] | None = None
        try:
            make_directory(path)
        except OSError as error:
            raise unusable(path, error) from error
        _roots.add(self)

    def directories(self) -> list[Path]:
        """Return the directories, sorted by name."""
        return sorted(each for each in self.path.glob(f"{_PREFIX}*") if each.is_dir() and each.suffix != _ADOPTED)

    def open_own(self, *, besides: Path | None = None) -> tuple[Path, Entries]:
        """Open the first free directory, or a new one."""
        with self._choosing():
            for path in self.directories():
                found = self._open_free(path) if path != besides and self.adopter_of(path) is None else None
                if found is not None:
                    return path, found
            path = self.path / f"{_PREFIX}{secrets.token_hex(6)}"
            return path, Entries(self.open(path))

    def open(self, path: Path) -> Store:
        """Open a directory. Damage met by the first write is raised as damage, not as a failure that may pass."""
        store = self._open(path)
        self._stores.add(store)
        try:
            self._go_on_from(store)
        except BaseException as error:
            store.close()
            if isinstance(store.failure, StoreCorrupt):
                raise store.failure from error
            raise
        return store

    def _go_on_from(self, store: Store) -> None:
        """Advance the clock to the stored one if entries wait, so that their due times keep their meaning."""
        if store.known_clock is not None and _has_waiting(store) and self.clock.go_on_from(store.known_clock):
            news, row = store.clock.news()
            store.commit([Put(Family.META, META_CLOCK, encode_clock(row))])  # opening wrote the host's clock
            store.clock.recorded(len(news))

    def _open(self, path: Path) -> Store:
        return Store.open(path, self.clock, self._options)

    def orphans(self, own: Path, is_wanted: Callable[[], bool]) -> Iterator[tuple[Path, Entries]]:
        """Open the directories of dead processes one by one, for adoption by ``own``; the caller closes them."""
        for path in self.directories():
            if not is_wanted():
                return
            if path == own or path in self.damaged:
                continue
            with self._choosing():
                found = self._claim(path, own) if path.exists() else None
            if found is not None:
                yield path, found

    def name_damaged(self, path: Path, error: str) -> None:
        """Record a directory as damaged and log it; it is not used from then on."""
        if path not in self.damaged:
            log.error("spool_directory_damaged", path=str(path), error=error)
        self.damaged[path] = Damaged(path, error)

    def remove(self, path: Path, orphan: Entries, own: Path) -> None:
        """Close and remove a directory whose entries are all durable in ``own``.

        The close and the rename happen under one lock, so that no process opens the directory between them. After a
        crash the directory is either complete, or has the name of an adopted one, which is never opened.
        """
        gone = path.with_name(path.name + _ADOPTED)
        with self._choosing():
            for other in self.directories():
                if self.adopter_of(other) == path.name:
                    _write(other / ADOPTER_FILE, own.name)
            orphan.store.close()
            path.rename(gone)
        self.sweep()

    def sweep(self) -> None:
        """Delete the remains of adopted directories."""
        for path in self.path.glob(f"{_PREFIX}*{_ADOPTED}"):
            shutil.rmtree(path, ignore_errors=True)

    @staticmethod
    def adopter_of(path: Path) -> str | None:
        """Return the name of the directory that ``path`` is being moved to."""
        try:
            return (path / ADOPTER_FILE).read_text(encoding="utf-8").strip()
        except OSError:
            return None

    def _claim(self, path: Path, own: Path) -> Entries | None:
        adopter = self.adopter_of(path)
        if adopter not in {None, own.name}:
            other = self.path / str(adopter)
            if other.is_dir() and other not in self.damaged:
                return None  # that directory adopts it, or its own adopter does
        found = self._open_free(path)
        if found is not None and adopter != own.name:
            try:
                _write(path / ADOPTER_FILE, own.name)
            except OSError as error:
                found.store.close()
                raise unusable(path, error) from error
        return found

    def _open_free(self, path: Path) -> Entries | None:
        try:
            store = self.open(path)
            try:
                return Entries(store)
            except BaseException:
                store.close()
                raise
        except StoreForked:
            raise
        except StoreLocked:
            return None
        except StoreFailed as error:  # it may work later, and other directories may work now
            log.warning("spool_directory_open_failed", path=str(path), error=str(error))
            return None
        except StoreError as error:
            self.name_damaged(path, str(error))
            return None

    @contextmanager
    def _choosing(self) -> Iterator[None]:
        try:
            lock = (self.path / LOCK_FILE).open("a")
        except OSError as error:
            raise unusable(self.path, error) from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._choice = lock
            try:
                yield
            finally:
                self._choice = None
                fcntl.flock(lock, fcntl.LOCK_UN)

    def let_go_in_child(self) -> None:
        """Close the inherited lock files in a forked child: they would otherwise outlive the process that took the
        locks.
        """
        for store in list(self._stores):
            with suppress(StoreError, OSError):
                store.close()
        if self._choice is not None:
            self._choice.close()


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_directory(path.parent)


def _let_go_in_child() -> None:
    for root in list(_roots):
        root.let_go_in_child()


_roots: WeakSet[Root] = WeakSet()
os.register_at_fork(after_in_child=_let_go_in_child)


def _has_waiting(store: Store) -> bool:
    try:
        return bool(store.scan(Family.TIMELINE, b"", b"\xff", limit=1).rows)
    except StoreError:  # the next reader skips the damage, or reports it
        return True
