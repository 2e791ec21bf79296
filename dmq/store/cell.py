"""A cell: one directory owned by one process. The lock, and the marker that keeps damage from looking like emptiness.

<data>/LOCK       held while a process uses the directory; holds its pid
<data>/CELL       written once the store exists: format version and cell id. With it, a missing database is damage
<data>/rocksdb/   the database
<data>/BALLAST    room for acks on a full disk (``dmq.store.disk``)
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
from pathlib import Path
from typing import IO

from dmq.errors import FormatUnsupported, StoreCorrupt, StoreFailed, StoreLocked, StoreReadOnly

FORMAT_VERSION = 1


class Cell:
    """An open cell directory. ``close`` releases the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = path / "rocksdb"
        self._marker = path / "CELL"
        self._lock = _take_lock(path)
        try:
            self.cell_id = self._check_marker()
        except BaseException:
            self.close()
            raise

    def mark_created(self) -> None:
        """Write the marker, once the database exists and is synced."""
        if self._marker.exists():
            return
        part = self._marker.with_suffix(".part")
        with part.open("w") as file:
            json.dump({"format_version": FORMAT_VERSION, "cell_id": self.cell_id}, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._marker)
        directory = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def close(self) -> None:
        """Release the directory. Idempotent."""
        self._lock.close()

    def _check_marker(self) -> str:
        if not self._marker.exists():
            return secrets.token_hex(8)
        try:
            marker = json.loads(self._marker.read_text())
            version, cell_id = int(marker["format_version"]), str(marker["cell_id"])
        except (ValueError, KeyError, TypeError) as error:
            raise StoreCorrupt(f"{self._marker} cannot be read: {error}") from error
        if version > FORMAT_VERSION:
            raise FormatUnsupported(
                f"{self.path} has format version {version}, this Rock-DMQ knows {FORMAT_VERSION} and older"
            )
        if not (self.database / "CURRENT").exists():
            raise StoreCorrupt(f"{self.path} held a store, but its database is missing ({self.database / 'CURRENT'})")
        return cell_id


def _take_lock(path: Path) -> IO[str]:
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "LOCK").open("a+")
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise StoreReadOnly(f"{path} cannot be written: {error.strerror}") from error
        raise StoreFailed(f"{path} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise StoreLocked(f"{path} is in use by another process (pid {holder})") from error
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock
