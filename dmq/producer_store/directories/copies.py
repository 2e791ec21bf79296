"""Copies of spool directories for inspection, also of directories in use; the original is never opened.

Tables are never modified after their creation, so the copy has hard links to them. Logs and manifest grow and are
copied. A copy of a directory in use has its state at one instant: a batch of its writer is included or not.

<root>/.work-<id>/  a copy, and the files made from it; removed when the command ends, or by a later command
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from dmq.errors import StoreError, StoreLocked
from dmq.store.files.cell import lock_directory, unusable
from dmq.store.schema.cell.files import CELL_FILE, CLOSED_FILE

LOCK_FILE = "ADOPT"  # exists since a process first opened a directory of the spool
_WORK = ".work-"
_COPIES_MAX = 100  # copy attempts for a growing manifest: it grows a few times per second at most
_SMALL = ("CURRENT", "IDENTITY", "MANIFEST-*", "OPTIONS-*", "rocksdict-config.json")


def directories_of(root: Path) -> list[Path]:
    """Return the directories of a spool, sorted by name; empty if there is no spool."""
    return sorted(each for each in root.glob("spool-*") if each.is_dir() and each.suffix != ".adopted")


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """Lock a directory within the context; ``StoreLocked`` names the process that holds it."""
    lock = lock_directory(path)
    try:
        lock.seek(0)
        lock.truncate()
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield
    finally:
        lock.close()


@contextmanager
def choosing(root: Path) -> Iterator[None]:
    """Prevent the processes of this spool from opening, choosing or removing a directory within the context."""
    try:
        lock = (root / LOCK_FILE).open("a")
    except OSError as error:
        raise unusable(root, error) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def holder(path: Path) -> str:
    """Return the pid of the process that uses a directory; empty if there is none."""
    try:
        lock_directory(path).close()
    except StoreLocked as error:
        return str(error).rpartition(" ")[2].rstrip(")")
    return ""


@contextmanager
def workplace(root: Path) -> Iterator[Path]:
    """Create a temporary directory on the file system of the spool; it is removed at the end of the context."""
    for left in root.glob(f"{_WORK}*"):
        with suppress(StoreError), hold(left):  # left by a killed command
            shutil.rmtree(left, ignore_errors=True)
    path = root / f"{_WORK}{secrets.token_hex(6)}"
    part = root / f".{path.name}"  # another name until it is locked: other commands remove unlocked ones
    try:
        part.mkdir()
        lock = lock_directory(part)
        part.rename(path)
    except OSError as error:
        raise unusable(root, error) from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        lock.close()


def copy_directory(path: Path, into: Path) -> bool:
    """Copy the files needed to open a directory; return True if a process used it during the copy."""
    with ExitStack() as stack:
        try:
            stack.enter_context(hold(path))
            is_used = False
        except StoreLocked:
            is_used = True
        try:
            into.mkdir()
            for name in (CELL_FILE, CLOSED_FILE):
                with suppress(FileNotFoundError):
                    shutil.copyfile(path / name, into / name)
            if (path / "rocksdb").is_dir():
                _copy_database(path / "rocksdb", into / "rocksdb")
        except OSError as error:
            raise unusable(into, error) from error
    return is_used


def _copy_database(source: Path, target: Path) -> None:
    """Copy a database that may be changing.

    Tables and logs are pinned by hard links before and after the copy of the manifest. If the manifest is unchanged, no
    table was added or removed in between, and no log was released. Then every table in the manifest is pinned, and so
    is every log from its first one on.
    """
    target.mkdir()
    pins = target / "pins"
    pins.mkdir()
    for _ in range(_COPIES_MAX):
        _pin(source, pins)
        before = _manifests(source)
        for pattern in _SMALL:
            for each in source.glob(pattern):
                with suppress(FileNotFoundError):
                    shutil.copyfile(each, target / each.name)
        _pin(source, pins)
        if before == _manifests(source):
            break
        for each in target.glob("MANIFEST-*"):
            each.unlink()
    for each in sorted(pins.glob("*.log")):
        shutil.copyfile(each, target / each.name)
    for each in pins.glob("*.sst"):
        each.rename(target / each.name)
    shutil.rmtree(pins)


def _manifests(source: Path) -> dict[str, int]:
    found = {}
    for each in source.glob("MANIFEST-*"):
        with suppress(FileNotFoundError):
            found[each.name] = each.stat().st_size
    return found


def _pin(source: Path, pins: Path) -> None:
    for each in (*source.glob("*.sst"), *source.glob("*.log")):
        with suppress(FileNotFoundError, FileExistsError):
            try:
                (pins / each.name).hardlink_to(each)
            except OSError as error:
                if error.errno not in {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP}:
                    raise
                shutil.copyfile(each, pins / each.name)


def write_json(path: Path, value: object) -> None:
    """Write a report; it is durable when this returns."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
