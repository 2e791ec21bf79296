"""Backups: complete copies of a store.

A backup is a directory with the layout of the daemon's: ``CELL`` and ``rocksdb/``. It is written under a hidden name in
the same folder (``.NAME.part``), synced, and renamed last. A crash at any step therefore never leaves a partial backup
under the final name. The next backup of the same name reuses the remains.

RocksDB never modifies a finished table. On the same file system the backup therefore has hard links to the tables,
which use no space until the store drops the table. Other files are copied, and so are tables that cannot be linked.
"""

from __future__ import annotations

import errno
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dmq.errors import StoreCorrupt, StoreError, StoreFailed, StoreFull, told
from dmq.store.files.cell import Cell, unusable
from dmq.store.files.durable import sync_directory, sync_file
from dmq.store.schema.cell.files import CELL_FILE
from dmq.store.store import Store

_CHECKPOINT = ".checkpoint-backup-"
_MARK = "COPYING"  # in the directory of an unfinished copy
_FILES = ("CURRENT", "IDENTITY", "MANIFEST-*", "OPTIONS-*", "rocksdict-config.json", "*.log", "*.sst")
_NO_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP})


class TargetTaken(StoreError):
    """Invalid target of a copy: not empty, within the store, or in a missing folder. Nothing was written."""


class Copied(NamedTuple):
    """A complete copy. ``linked_bytes`` of its size are tables shared with the store."""

    path: Path
    size_bytes: int
    linked_bytes: int


def back_up(store: Store, data: Path, target: Path, *, is_wanted: Callable[[], bool] = lambda: True) -> Copied:
    """Copy a running store from its directory ``data`` to ``target``; durable on return.

    The copy has every write acknowledged before the call, and each of the writer's batches whole or not at all. Writes
    wait some milliseconds while the tables are linked.

    Raise ``TargetTaken``, ``StoreLocked`` while another backup writes to the target, or any error of the store. Raise
    ``StoreFailed`` once ``is_wanted``, which is called between two files, returns False.
    """
    checkpoint = data / f"{_CHECKPOINT}{secrets.token_hex(6)}"

    def has_room() -> bool:
        if store.keeps_room_from(target):
            raise told(StoreFull, f"{target} is on the disk of the store, which is below its low-water mark")
        return is_wanted()

    def fill(database: Path) -> int:
        try:
            store.checkpoint(checkpoint)
            store.commit([])  # after it, every write in the checkpoint is synced in the store as well
            return _copy_database(checkpoint, database, has_room)
        finally:
            for each in (checkpoint, checkpoint.with_name(f"{checkpoint.name}.tmp")):  # .tmp: unfinished, by RocksDB
                shutil.rmtree(each, ignore_errors=True)

    return place(target, store.cell_id, fill, of=data)


def back_up_stopped(data: Path, target: Path) -> Copied:
    """Copy the store of a stopped process to ``target`` without opening the database; durable on return.

    The store stays unchanged except for the pid in ``LOCK``, which is held during the copy. Raise ``StoreLocked`` if a
    process uses the store, ``StoreCorrupt`` if ``data`` has no store, or ``TargetTaken``.
    """
    if not (data / CELL_FILE).exists():
        raise StoreCorrupt(f"there is no store in {data}")
    cell = Cell(data)
    try:
        return place(target, cell.cell_id, lambda database: _copy_database(cell.database, database), of=data)
    finally:
        cell.close()


def sweep(data: Path) -> None:
    """Remove the checkpoints of backups that a dead process left unfinished. The caller must own the cell."""
    for path in data.glob(f"{_CHECKPOINT}*"):
        shutil.rmtree(path, ignore_errors=True)


def place(target: Path, cell_id: str, fill: Callable[[Path], int], *, of: Path | None = None) -> Copied:
    """Create a cell at ``target`` with the database written by ``fill``.

    ``fill`` gets the path of the database, makes it durable, and returns the number of bytes in hard links. ``of`` is
    the source directory, if any; a target within it is refused.
    """
    check_place(target, of)
    part = target.with_name(f".{target.name}.part")
    try:
        _take_place(part)
        cell = Cell(part, copy_of=cell_id)  # its lock keeps others from writing the same backup
        try:
            linked_bytes = fill(cell.database)
            cell.mark_created()
            cell.mark_closed()
            size_bytes = sum(each.stat().st_size for each in part.rglob("*") if each.is_file())
            check_place(target, of)
            part.rename(target)  # over an empty directory, or over nothing
            (target / _MARK).unlink()
            sync_directory(target.parent)
        finally:
            shutil.rmtree(part, ignore_errors=True)  # already renamed after success
            cell.close()
    except OSError as error:
        raise unusable(target, error) from error
    return Copied(target, size_bytes, linked_bytes)


def _take_place(part: Path) -> None:
    """Create the directory ``part``, private to this user.

    The remains of an earlier copy under that name are reused. Raise ``TargetTaken`` for any other content.
    """
    try:
        part.mkdir(mode=0o700)
    except FileExistsError:
        is_left = not part.is_symlink() and part.is_dir() and ((part / _MARK).is_file() or not any(part.iterdir()))
        if not is_left:
            text = f"{part} exists and is not an unfinished backup; move it, or choose another name"
            raise TargetTaken(text) from None
        part.chmod(0o700)
    (part / _MARK).touch(mode=0o600)


def check_place(target: Path, of: Path | None) -> None:
    """Raise ``TargetTaken`` if a copy of ``of`` cannot be written to ``target``. Nothing is created."""
    if of is not None and target.resolve().is_relative_to(of.resolve()):
        raise TargetTaken(f"{target} is inside the store; choose another folder")
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise TargetTaken(f"{target} exists and is not empty; choose a new folder")
    if not target.parent.is_dir():
        text = f"there is no folder {target.parent} for the copy: mount its disk, or create the folder"
        raise TargetTaken(f"{text}; it is not created, because its disk may not be mounted")


def database_files(database: Path) -> list[Path]:
    """Return the files that make a copy of a database at rest."""
    return [each for pattern in _FILES for each in sorted(database.glob(pattern))]


def _copy_database(source: Path, target: Path, is_wanted: Callable[[], bool] = lambda: True) -> int:
    """Copy a database that no process modifies; return the number of bytes in hard links. Durable on return."""
    target.mkdir(mode=0o700)
    linked_bytes = 0
    for each in database_files(source):
        if not is_wanted():
            raise StoreFailed("the copy was cancelled")
        if each.suffix == ".sst" and _link(each, target / each.name):
            linked_bytes += each.stat().st_size
            continue
        shutil.copyfile(each, target / each.name)
        (target / each.name).chmod(0o600)
        sync_file(target / each.name)
    sync_directory(target)
    return linked_bytes


def _link(source: Path, target: Path) -> bool:
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        return False
    return True
