"""Backups: a copy of a store that is whole or not there.

A backup is a directory like that of the daemon, with ``CELL`` and ``rocksdb/``. It is made under a hidden name beside
its own (``.NAME.part``), synced, and renamed last: whatever ends the process on the way, nobody takes a part of one for
a whole. What such an end leaves is used up by the next backup of the same name.

Tables are never written again once they are made, so on the same file system the backup has hard links to them, which
take no space until the store has dropped the table; everything else is copied, and tables too where links cannot be.
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
from dmq.store.schema.files import CELL_FILE
from dmq.store.store import Store

_CHECKPOINT = ".checkpoint-backup-"
_MARK = "COPYING"  # in a directory that a copy is being made in
_FILES = ("CURRENT", "IDENTITY", "MANIFEST-*", "OPTIONS-*", "rocksdict-config.json", "*.log", "*.sst")
_NO_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP})


class TargetTaken(StoreError):
    """The place for the copy is not empty, lies in the store, or in a folder that is not there; nothing was written."""


class Copied(NamedTuple):
    """A copy that is complete. ``linked_bytes`` of it are tables that it shares with the store."""

    path: Path
    size_bytes: int
    linked_bytes: int


def back_up(store: Store, data: Path, target: Path, *, is_wanted: Callable[[], bool] = lambda: True) -> Copied:
    """Copy a running store, of the directory ``data``, to ``target``; durable on return.

    All that was acknowledged before the call is in it, and no batch of the writer in part. Writes wait for some
    milliseconds while the tables are linked. Raises ``TargetTaken``, ``StoreLocked`` while another backup is written
    there, what the store raises, and ``StoreFailed`` once
    ``is_wanted`` says no, which is asked between two files.
    """
    checkpoint = data / f"{_CHECKPOINT}{secrets.token_hex(6)}"

    def has_room() -> bool:
        if store.keeps_room_from(target):
            raise told(StoreFull, f"{target} is on the disk of the store, which is below its low-water mark")
        return is_wanted()

    def fill(database: Path) -> int:
        try:
            store.checkpoint(checkpoint)
            store.commit([])  # behind it, all that the checkpoint holds is synced in the store as well
            return _copy_database(checkpoint, database, has_room)
        finally:
            for each in (checkpoint, checkpoint.with_name(f"{checkpoint.name}.tmp")):  # RocksDB's while it makes one
                shutil.rmtree(each, ignore_errors=True)

    return place(target, store.cell_id, fill, of=data)


def back_up_stopped(data: Path, target: Path) -> Copied:
    """Copy the store of a stopped process, as it is, to ``target``; durable on return.

    Changes nothing in it but the pid in ``LOCK``, which is held meanwhile. Raises ``StoreLocked`` if a process uses it,
    ``StoreCorrupt`` if there is no store in it, ``TargetTaken``.
    """
    if not (data / CELL_FILE).exists():
        raise StoreCorrupt(f"there is no store in {data}")
    cell = Cell(data)
    try:
        return place(target, cell.cell_id, lambda database: _copy_database(cell.database, database), of=data)
    finally:
        cell.close()


def sweep(data: Path) -> None:
    """Remove the checkpoint of a backup that a dead process left; the caller owns the cell."""
    for path in data.glob(f"{_CHECKPOINT}*"):
        shutil.rmtree(path, ignore_errors=True)


def place(target: Path, cell_id: str, fill: Callable[[Path], int], *, of: Path) -> Copied:
    """Let ``fill`` make a database, durable, under the name it is given, and make a cell of it at ``target``.

    ``fill`` returns how many bytes of it are linked. ``of`` is the directory it comes from: nothing is put inside.
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
            shutil.rmtree(part, ignore_errors=True)  # not there if all went well
            cell.close()
    except OSError as error:
        raise unusable(target, error) from error
    return Copied(target, size_bytes, linked_bytes)


def _take_place(part: Path) -> None:
    """Make ``part``, for nobody else to read; what an earlier copy left under that name is taken, nothing else is."""
    try:
        part.mkdir(mode=0o700)
    except FileExistsError:
        is_left = not part.is_symlink() and part.is_dir() and ((part / _MARK).is_file() or not any(part.iterdir()))
        if not is_left:
            text = f"{part} is in the way and was not made by an unfinished copy: move it, or copy to another name"
            raise TargetTaken(text) from None
        part.chmod(0o700)
    (part / _MARK).touch(mode=0o600)


def check_place(target: Path, of: Path) -> None:
    """Refuse a place for a copy of ``of`` with ``TargetTaken``; nothing is made."""
    if target.resolve().is_relative_to(of.resolve()):
        raise TargetTaken(f"{target} lies in the store itself: a copy needs a place of its own")
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise TargetTaken(f"{target} is there and not empty: a copy needs a new folder")
    if not target.parent.is_dir():
        why = "none is made, for it may lie on a disk that is not mounted"
        raise TargetTaken(f"there is no folder {target.parent} for the copy: mount its disk, or make the folder; {why}")


def _copy_database(source: Path, target: Path, is_wanted: Callable[[], bool] = lambda: True) -> int:
    """Copy a database that nobody changes; return how many bytes are linked. Durable on return."""
    target.mkdir(mode=0o700)
    linked_bytes = 0
    for pattern in _FILES:
        for each in sorted(source.glob(pattern)):
            if not is_wanted():
                raise StoreFailed("the copy was given up half-way")
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
