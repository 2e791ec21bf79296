"""A cell: one directory owned by one process. The marker file distinguishes a damaged store from a new one.

<data>/LOCK       locked while a process uses the directory; holds its pid
<data>/CELL       written once the store exists: format version, cell id, and whether it is a copy that was never
                  opened. If it exists, a missing database is damage
<data>/CLOSED     exists only after a clean shutdown: names and sizes of the database's files, checked on opening
<data>/HOLDERS    ids of processes that may hold the lease of the replication log
<data>/rocksdb/   the database
<data>/BALLAST    reserved space for acks on a full disk (``dmq.store.files.disk``)
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO

from dmq.errors import (
    FormatUnsupported,
    StoreBroken,
    StoreCorrupt,
    StoreError,
    StoreFailed,
    StoreFull,
    StoreLocked,
    StoreNoDescriptors,
    StoreReadOnly,
    told,
)
from dmq.store.files.durable import make_directory, sync_directory
from dmq.store.schema.cell.files import (
    CELL_FILE,
    CLOSED_FILE,
    HOLDERS_FILE,
    Marker,
    decode_closed,
    decode_holders,
    decode_marker,
    encode_closed,
    encode_holders,
    encode_marker,
)
from dmq.store.schema.cell.identity import StorePlace
from dmq.store.schema.keys import FORMAT_VERSION

_DATA = ("CURRENT", "MANIFEST-")
_HOLDERS_MAX = 8  # each start adds one, and any of them may have a lease until one start acquires it


class Cell:
    """Open cell directory. ``close`` releases the lock."""

    def __init__(self, path: Path, *, copy_of: str = "") -> None:
        """Lock the directory and check its files.

        If ``copy_of`` is a cell id, prepare the directory for a copy of that cell: remove the remains of an earlier
        attempt.
        """
        self.path = path
        self.database = path / "rocksdb"
        self._marker = path / CELL_FILE
        self._closed = path / CLOSED_FILE
        self.is_copy = bool(copy_of)
        self._lock = _take_lock(path)
        try:
            if copy_of:
                self._clear()
            self.cell_id = copy_of or self._check_marker()
            self._check_closed()
        except BaseException:
            self.close()
            raise

    def mark_created(self) -> None:
        """Write the marker, once the database exists and is synced. The marker of a copy records that it is one."""
        if self._marker.exists():
            return
        self._write(self._marker, encode_marker(Marker(self.cell_id, self.is_copy)))

    def remove_marker(self) -> None:
        """Remove the marker, durably, before the database is removed."""
        self._marker.unlink(missing_ok=True)
        sync_directory(self.path)

    def rewrite_marker(self) -> None:
        """Replace the marker by another file, durably, so that the identity row no longer names it."""
        self.is_copy = False
        self._write(self._marker, encode_marker(Marker(self.cell_id, is_copy=False)))

    def mark_original(self) -> None:
        """Clear the copy flag in the marker, durably. Call it once the new identity of the store is durable."""
        if self.is_copy:
            self.is_copy = False
            self._write(self._marker, encode_marker(Marker(self.cell_id, is_copy=False)))

    def place(self) -> StorePlace:
        """Return the file identity of the marker; zeros if there is no marker."""
        try:
            return StorePlace.of(self._marker.stat())
        except FileNotFoundError:
            return StorePlace()

    def mark_opened(self) -> None:
        """Remove the record of a clean shutdown, before the database is opened and its files change."""
        if self._closed.exists():
            self._closed.unlink()
            sync_directory(self.path)

    def mark_closed(self) -> None:
        """Record a clean shutdown with the sizes of the files.

        An error, as on a full disk, is ignored: the next opening only has less to check.
        """
        with suppress(OSError):
            self._write(self._closed, encode_closed(self._files()))

    def add_holder(self, holder: str) -> list[str]:
        """Record the id under which this process may hold a lease, and return those of earlier processes.

        The lock proves that these are dead. A copy of the directory has none: their processes may live. An error, as on
        a full disk, is ignored: a start then waits for the end of the lease.
        """
        path, earlier = self.path / HOLDERS_FILE, list[str]()
        with suppress(OSError, ValueError):
            earlier = decode_holders(path.read_text(encoding="utf-8"), path.stat().st_ino)[-_HOLDERS_MAX:]
        with suppress(OSError):
            part = path.with_suffix(".part")
            part.unlink(missing_ok=True)
            part.touch()
            self._write(path, encode_holders([*earlier, holder], part.stat().st_ino))
        return earlier

    def close(self) -> None:
        """Release the lock. Idempotent."""
        self._lock.close()

    def _clear(self) -> None:
        for each in (self._marker, self._closed):
            each.unlink(missing_ok=True)
        if self.database.exists():
            shutil.rmtree(self.database)

    def _check_marker(self) -> str:
        if not self._marker.exists():
            return secrets.token_hex(8)
        try:
            cell_id, self.is_copy, version = decode_marker(self._marker.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StoreCorrupt(f"{self._marker} cannot be read: {error}") from error
        if version > FORMAT_VERSION:
            raise FormatUnsupported(
                f"{self.path} has format version {version}, this Rock-DMQ knows {FORMAT_VERSION} and older"
            )
        if not (self.database / "CURRENT").exists():
            raise StoreCorrupt(f"{self.path} held a store, but its database is missing ({self.database / 'CURRENT'})")
        return cell_id

    def _check_closed(self) -> None:
        """Check the files against the record of a clean shutdown.

        RocksDB treats a truncated manifest as a short one, and deletes the tables that it does not name.
        """
        if not self._closed.exists():
            return
        try:
            files = decode_closed(self._closed.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StoreCorrupt(f"{self._closed} cannot be read: {error}") from error
        found = self._files()
        changed = [
            f"{name} has {found[name]} of {size} bytes" if name in found else f"{name} is missing"
            for name, size in sorted(files.items())
            if found.get(name) != size
        ]
        if changed:
            raise StoreCorrupt(f"{self.database} changed since it was closed: {', '.join(changed[:5])}")

    def _files(self) -> dict[str, int]:
        """Return the sizes of the data files by name."""
        found = self.database.iterdir() if self.database.is_dir() else ()
        data = [path for path in found if path.name.startswith(_DATA) or path.suffix == ".sst"]
        return {path.name: path.stat().st_size for path in data}

    def _write(self, path: Path, text: str) -> None:
        part = path.with_suffix(".part")
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync_directory(self.path)


def unusable(path: Path, error: OSError) -> StoreError:
    """Return the store error for an error of the file system."""
    match error.errno:
        case errno.EROFS | errno.EACCES | errno.EPERM:
            return told(StoreReadOnly, f"{path} cannot be written: {error.strerror}")
        case errno.ENOSPC | errno.EDQUOT:
            return told(StoreFull, f"{path} has no room: {error.strerror}")
        case errno.EMFILE | errno.ENFILE:
            return told(StoreNoDescriptors, f"{path} cannot be opened: {error.strerror}")
        case errno.EIO:
            return told(StoreBroken, f"{path} cannot be read or written: {error.strerror}")
        case _:
            return StoreFailed(f"{path} cannot be used: {error.strerror}")


def tighten(path: Path, mode: int) -> bool:
    """Set the mode of the store's directory; return True if this removed access rights."""
    has = stat.S_IMODE(path.stat().st_mode)
    if has & 0o777 == mode:
        return False
    try:
        path.chmod(has & 0o7000 | mode)
    except OSError:  # another user's directory that this process may write: only its owner can restrict it
        return False
    return bool(has & ~mode & 0o777)


def holder_of(path: Path) -> int | None:
    """Return the pid of the process that has the directory open, or ``None`` if no process is found.

    It reads ``/proc/locks``, and returns ``None`` on a host without it. It acquires no lock, so it never blocks a
    process that opens the directory.
    """
    with suppress(OSError, ValueError):
        lock = path / "LOCK"
        file = lock.stat()
        name = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
        locks = Path("/proc/locks").read_text(encoding="ascii")
        if any(name in line.split() for line in locks.splitlines()):
            return int(lock.read_text(encoding="ascii"))
    return None


def lock_directory(path: Path) -> IO[str]:
    """Lock a directory until the returned file is closed; ``StoreLocked`` ends with the pid of the holder."""
    try:
        lock = (path / "LOCK").open("a+")
    except OSError as error:
        raise unusable(path, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise StoreLocked(f"{path} is in use by another process (pid {holder})") from error
    return lock


def _take_lock(path: Path) -> IO[str]:
    try:
        make_directory(path, 0o700)
    except OSError as error:
        raise unusable(path, error) from error
    lock = lock_directory(path)
    with suppress(OSError):  # on a full disk: the pid is only information, the lock itself is held
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), f"{os.getpid()}\n".encode())
    return lock
