"""Looking into the directories of a spool, whoever uses them: a copy is read, the original is never opened.

Tables are never written again once they are made, so the copy has hard links to them; logs and manifest grow and are
copied. A copy of a directory in use is as the directory was at one instant: a batch of its writer is in it, or is not.

<root>/.work-<id>/  a copy, and what is made of it; removed when the command ends, or by a later one
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
from typing import IO

from dmq.errors import StoreError, StoreLocked
from dmq.store.files.cell import unusable
from dmq.store.schema.files import CELL_FILE, CLOSED_FILE

LOCK_FILE = "ADOPT"  # there since a process first opened a directory of the spool
_WORK = ".work-"
_COPIES_MAX = 100  # of a manifest that grows meanwhile: it does so a few times a second at most
_SMALL = ("CURRENT", "IDENTITY", "MANIFEST-*", "OPTIONS-*", "rocksdict-config.json")


def directories(root: Path) -> list[Path]:
    """Return the directories of a spool, in the order of their names; empty if there is no spool."""
    return sorted(each for each in root.glob("spool-*") if each.is_dir() and each.suffix != ".adopted")


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """Own a directory for the time of the context; ``StoreLocked`` names the process that does."""
    lock = _lock(path)
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
    """Keep the processes of this spool from opening, choosing or removing a directory meanwhile."""
    try:
        lock = (root / LOCK_FILE).open("a")
    except OSError as error:
        raise unusable(root, error) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def holder(path: Path) -> str:
    """Return the pid of the process that uses a directory; empty if none does."""
    try:
        _lock(path).close()
    except StoreLocked as error:
        return str(error).rpartition(" ")[2]
    return ""


def _lock(path: Path) -> IO[str]:
    try:
        lock = (path / "LOCK").open("a+")
    except OSError as error:
        raise unusable(path, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        pid = lock.read().strip() or "unknown"
        lock.close()
        raise StoreLocked(f"{path} is in use by pid {pid}") from error
    return lock


@contextmanager
def workplace(root: Path) -> Iterator[Path]:
    """Give a directory beside those of the spool, on their file system; it is gone afterwards."""
    for left in root.glob(f"{_WORK}*"):
        with suppress(StoreError), hold(left):  # of a command that was killed
            shutil.rmtree(left, ignore_errors=True)
    path = root / f"{_WORK}{secrets.token_hex(6)}"
    part = root / f".{path.name}"  # nobody removes it before it is locked
    try:
        part.mkdir()
        lock = _lock(part)
        part.rename(path)
    except OSError as error:
        raise unusable(root, error) from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        lock.close()


def copy_directory(path: Path, into: Path) -> bool:
    """Copy what a directory needs to be opened, and say whether a process used it meanwhile."""
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

    Tables and logs are pinned before and after the manifest is copied. If it has not changed in between, no table was
    made or left, and no log let go: all that it names is pinned, and every log from there on.
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
    """Write a report, durable when this returns."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
