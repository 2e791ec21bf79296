"""Folder of periodic backups: lists those of this store, verifies a new one, and removes old ones.

<folder>/dmq-<store>-<number>-<time>                a verified backup
<folder>/dmq-<store>-<number>-<time>.unverified     a backup that is not verified yet
<folder>/.dmq-<store>-<number>-<time>.removing      a backup that is being removed

``<store>`` is the number of the store's identity, so a restored or copied store does not touch the backups of the
original. Backups are ordered by number, independent of the clock. A backup that was renamed, or that is used as a
store, no longer belongs to this folder: it is neither counted nor removed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from dmq.errors import DmqError, StoreCorrupt, StoreFailed
from dmq.store.files.cell import unusable
from dmq.store.files.durable import sync_directory
from dmq.store.schema.cell.files import CELL_FILE, decode_marker

DAMAGED = 4  # exit code of the verification process
_UNVERIFIED, _REMOVING = ".unverified", ".removing"
_STAMP = "%Y%m%dT%H%M%SZ"
_WHY_CHARS_MAX = 500


class KeptBackup(NamedTuple):
    """Verified backup; ``taken_ms`` is by the clock at that time, rounded to the second."""

    number: int
    taken_ms: int
    path: Path


def check_backup_dir(folder: Path) -> None:
    """Raise ``DmqError`` if a folder does not exist or is not writable."""
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        why = "the daemon does not create it, because its disk may not be mounted"
        raise DmqError(f"backup_dir {folder} does not exist: mount its disk, or create the folder; {why}") from error
    except OSError as error:
        raise DmqError(f"backup_dir {folder} cannot be used: {error.strerror or error}") from error
    if not folder.is_dir():
        raise DmqError(f"backup_dir {folder} is a file: set it to a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DmqError(f"backup_dir {folder} cannot be written by this user: change its owner or its mode")


class BackupFolder:
    """Backups of one store in an existing folder. Every call blocks; only ``cancel`` may run concurrently."""

    def __init__(self, folder: Path, identity: int) -> None:
        """Open the folder; raise ``DmqError`` if it does not exist or is not writable."""
        self.path = folder
        self._prefix = f"dmq-{identity:016x}-"
        self._name = re.compile(rf"{self._prefix}([0-9]{{6,18}})-([0-9]{{8}}T[0-9]{{6}}Z)")
        self._child: subprocess.Popen[str] | None = None
        self._is_cancelled = False
        check_backup_dir(folder)
        self._device = folder.stat().st_dev

    def sweep(self) -> None:
        """Remove the unfinished backups of this store that a killed run left."""
        for path in self._own():
            name = path.name.removeprefix(".")
            if name.endswith((_UNVERIFIED, f"{_UNVERIFIED}.part", _REMOVING)):
                with suppress(OSError):
                    self._remove(path)

    def kept(self) -> list[KeptBackup]:
        """Return the verified backups, oldest first."""
        found: list[KeptBackup] = []
        for path in self._own():
            match = self._name.fullmatch(path.name)
            if match is not None and (taken := _time_of(match[2])) is not None and _is_copy(path):
                found.append(KeptBackup(int(match[1]), round(taken.timestamp()) * 1000, path))
        return sorted(found)

    def target(self, now_ms: int) -> Path:
        """Return the path of the next backup; raise ``StoreFailed`` if the folder is now on another disk."""
        try:
            device = self.path.stat().st_dev
        except OSError as error:
            raise unusable(self.path, error) from error
        if device != self._device:
            raise StoreFailed(f"{self.path} is on another disk than at the start: is the disk of the backups mounted?")
        number = max((each.number for each in self.kept()), default=0) + 1
        stamp = datetime.fromtimestamp(now_ms // 1000, UTC).strftime(_STAMP)
        return self.path / f"{self._prefix}{number:06d}-{stamp}{_UNVERIFIED}"

    def accept(self, target: Path) -> Path:
        """Verify the whole backup at ``target`` and give it its final name, durable on return.

        Raise ``StoreCorrupt`` if it is damaged; it is then removed. Another process verifies it, at the lowest
        priority.
        """
        try:
            self._look_through(target)
            final = target.with_name(target.name.removesuffix(_UNVERIFIED))
            target.rename(final)
            sync_directory(self.path)
        except OSError as error:
            shutil.rmtree(target, ignore_errors=True)
            raise unusable(target, error) from error
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
        return final

    def trim(self, count: int) -> list[Path]:
        """Remove all backups except the newest ``count``, and return their paths."""
        removed: list[Path] = []
        for each in self.kept()[:-count]:
            self._remove(each.path)
            removed.append(each.path)
        return removed

    def cancel(self) -> None:
        """Make ``accept`` end soon, without a backup; may be called from any thread."""
        self._is_cancelled = True
        if (child := self._child) is not None:
            child.kill()

    @staticmethod
    def _remove(path: Path) -> None:
        hidden = path
        if not path.name.endswith(_REMOVING):
            hidden = path.with_name(f".{path.name.removeprefix('.')}{_REMOVING}")
            path.rename(hidden)  # rename first: a partly removed backup must not look like a backup
        shutil.rmtree(hidden, ignore_errors=True)

    def _own(self) -> list[Path]:
        try:
            found = [each for each in self.path.iterdir() if each.name.removeprefix(".").startswith(self._prefix)]
            return [each for each in found if each.is_dir() and not each.is_symlink()]
        except OSError as error:
            raise unusable(self.path, error) from error

    def _look_through(self, target: Path) -> None:
        command = [sys.executable, "-m", "dmq.recovery.check.verify", str(target)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as child:
            self._child = child
            try:
                if self._is_cancelled:
                    child.kill()
                assert child.stderr is not None
                said = child.stderr.read()  # not by communicate(): it would close stdin, on which the child ends
                child.wait()
            finally:
                self._child = None
        if self._is_cancelled:
            raise StoreFailed("the check of the backup was cancelled")
        why = " ".join(said.split())[-_WHY_CHARS_MAX:]
        if child.returncode == DAMAGED:
            raise StoreCorrupt(f"the new backup is incomplete and was removed: {why}")
        if child.returncode:
            raise StoreFailed(f"the new backup could not be checked, and was removed ({child.returncode}): {why}")


def size_of(path: Path) -> int:
    """Return the total size of a backup's files, including those shared with the store."""
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def _time_of(stamp: str) -> datetime | None:
    """Return the time in a name; ``None`` if it is invalid, so that the name is not one of this folder's."""
    try:
        return datetime.strptime(stamp, _STAMP).replace(tzinfo=UTC)
    except ValueError:
        return None


def _is_copy(path: Path) -> bool:
    try:
        return decode_marker((path / CELL_FILE).read_text(encoding="utf-8")).is_copy
    except (OSError, ValueError):
        return False
