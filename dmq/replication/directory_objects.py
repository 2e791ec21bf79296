"""Objects as files of a directory, for a mounted file system such as NFS. Every write is synced.

A file gets its final name by a hard link once it is complete and synced, so a crash leaves no short object. A register
is a folder with one file for each version: a link to the next number is the conditional write. No lock is held, so a
stopped process or a lost host blocks no other.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from dmq.replication.objects import ReplicaRefused, ReplicaUnavailable

_WRITING = ".writing"  # files without their final name yet
_ABANDONED_S = 24 * 3600.0  # age of an unfinished file of a process that was killed
_REGISTER = "@"  # end of the name of a register's folder
_VERSIONS_KEPT = 64  # of a register; a writer that was stopped for fewer versions finds its number taken
_SETUP_ERRORS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTSUP, errno.ENOENT, errno.ENOTDIR})


class DirectoryObjects:
    """Objects below one directory, which must exist: the mount point of a missing file system may not."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        path = unquote(parts.path)
        if parts.netloc or not path.startswith("/"):
            raise ReplicaRefused(f"invalid replica URL {url!r}; expected file:///DIRECTORY with an absolute path")
        self.url = url
        self._root = Path(path)
        if not self._root.is_dir():
            raise ReplicaRefused(f"the directory {self._root} does not exist; create it, or mount its file system")
        self._identity = _identity(self._root)
        self._synced: set[Path] = set()  # folders that are durable

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless the name exists."""
        with self._access():
            return self._link(self._root / name, data)

    def replace(self, name: str, data: bytes, etag: str | None) -> str | None:
        """Write the next version of a register.

        A writer that was stopped after its check may write a number that was removed meanwhile. That version is never
        read, since a newer one exists, and the write is in doubt.
        """
        with self._access():
            folder = self._root / (name + _REGISTER)
            newest = _newest(folder)
            if (_etag(*newest) if newest else None) != etag:
                return None
            version = newest[0] + 1 if newest else 1
            if not self._link(_version_path(folder, version), data):
                return None
            versions = _versions(folder)
            if versions[-1] - version >= _VERSIONS_KEPT:
                raise ReplicaUnavailable(f"the write of {name} took longer than {_VERSIONS_KEPT} others")
            for old in versions:
                if old < version - _VERSIONS_KEPT:
                    _version_path(folder, old).unlink(missing_ok=True)
            return _etag(version, data)

    def read(self, name: str) -> tuple[bytes, str] | None:
        """Return the content and a digest of it."""
        with self._access():
            try:
                data = (self._root / name).read_bytes()
            except FileNotFoundError:
                newest = _newest(self._root / (name + _REGISTER))
                return (newest[1], _etag(*newest)) if newest else None
            return data, _etag(0, data)

    def list(self, prefix: str, after: str = "") -> list[str]:
        """Return the names in a folder."""
        with self._access():
            return sorted(name for name in _names(self._root / prefix, prefix) if name > after)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files and registers, and folders that are empty afterwards."""
        with self._access():
            for name in names:
                (self._root / name).unlink(missing_ok=True)
                register = self._root / (name + _REGISTER)
                for version in _versions(register):
                    _version_path(register, version).unlink(missing_ok=True)
                self._remove_empty(register)

    def _remove_empty(self, folder: Path) -> None:
        with suppress(OSError):
            while folder != self._root:
                with suppress(FileNotFoundError):
                    folder.rmdir()
                self._synced.discard(folder)
                folder = folder.parent

    @contextmanager
    def _access(self) -> Iterator[None]:
        """Report file errors as an unavailable store, and refuse to use another file system than at the start."""
        try:
            if _identity(self._root) != self._identity:
                raise ReplicaUnavailable(f"{self._root} is another directory than at the start; is it still mounted?")
            yield
        except OSError as error:
            reason = f"{error.strerror or error}: {error.filename or self._root}"
            raise ReplicaUnavailable(reason, is_setup=error.errno in _SETUP_ERRORS) from error

    def _link(self, path: Path, data: bytes) -> bool:
        """Give the data its name, unless the name exists. The directory entry is durable on return, in both cases."""
        with self._complete_file(data) as complete:
            while True:
                self._make_durable(path.parent)
                try:
                    os.link(complete, path)
                except FileNotFoundError:  # the folder was empty, and another process removed it
                    self._synced.discard(path.parent)
                    continue
                except FileExistsError:
                    # An NFS client repeats a link if the answer was lost, and then meets itself.
                    is_ours = complete.stat().st_nlink > 1
                else:
                    is_ours = True
                _sync(path.parent)
                return is_ours

    @contextmanager
    def _complete_file(self, data: bytes) -> Iterator[Path]:
        """Provide a synced file without its final name."""
        folder = self._root / _WRITING
        self._make_durable(folder)
        path = folder / uuid4().hex
        try:
            with path.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _make_durable(self, folder: Path) -> None:
        """Create a folder, and sync the entries of it and of its parents, also if another process created it."""
        if folder in self._synced:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for each in (folder, *folder.parents):
            if each == self._root:
                break
            _sync(each.parent)
        self._synced.add(folder)
        if folder.name == _WRITING:
            _remove_abandoned(folder)


def _identity(root: Path) -> tuple[int, int]:
    status = root.stat()
    return status.st_dev, status.st_ino


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(folder: Path) -> None:
    """Remove files that a killed process left. Ages are compared by the clock of the file system alone."""
    now_s = folder.stat().st_mtime
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            if now_s - path.stat().st_mtime > _ABANDONED_S:
                path.unlink()


def _etag(version: int, data: bytes) -> str:
    return f"{version}-{hashlib.sha256(data).hexdigest()[:32]}"


def _version_path(folder: Path, version: int) -> Path:
    return folder / f"{version:020}"


def _versions(folder: Path) -> list[int]:
    """Return the versions of a register, oldest first."""
    try:
        return sorted(int(path.name) for path in folder.iterdir())
    except FileNotFoundError:
        return []


def _newest(folder: Path) -> tuple[int, bytes] | None:
    """Return the newest version of a register and its content; a version may be removed while it is read."""
    while versions := _versions(folder):
        with suppress(FileNotFoundError):
            return versions[-1], _version_path(folder, versions[-1]).read_bytes()
    return None


def _names(folder: Path, prefix: str) -> Iterator[str]:
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.name.endswith(_REGISTER):
            if _versions(Path(entry.path)):
                yield prefix + entry.name.removesuffix(_REGISTER)
        elif entry.is_dir():
            yield from _names(Path(entry.path), f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name
