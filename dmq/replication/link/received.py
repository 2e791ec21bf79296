"""Batches that a standby has received by the direct link, and that the object store may lack.

<data>/link/member                        16 random bytes
<data>/link/<store>-<epoch>-<serial>      frames: size 4 | CRC-32 4 | msgpack

The id of the directory depends on the file system's identity of ``member``, so a copy of the directory has another id.
Each connection begins a file. So an incomplete frame is only at the end of a file, and was not acknowledged.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from dmq.errors import ReplicaDamaged
from dmq.replication.link.frames import LinkBroken, LinkFrame, decode
from dmq.store.files.durable import make_directory, sync_directory, sync_file

_FILE_BYTES_MAX = 8 * 1024 * 1024  # then the next frame begins a file
_MEMBER_BYTES = 16
_HEAD = struct.Struct(">II")
_NAME = re.compile(r"([0-9a-f]{16})-([0-9]{20})-([0-9]{10})")


class ReceivedBatch(NamedTuple):
    """Encoded batch; ``time_ms`` is the primary's when it was sent."""

    number: int
    data: bytes
    time_ms: int


@dataclass(slots=True)
class _File:
    path: Path
    store: int
    epoch: int
    serial: int
    last: int  # number of its last batch; 0: none


class ReceivedBatches:
    """ReceivedBatches batches in a locked directory. All threads may call."""

    def __init__(self, data: Path, *, makes: bool) -> None:
        """Without ``makes`` nothing is created; ``member`` is empty if the directory has never received batches."""
        self._folder = data / "link"
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._current: _File | None = None  # of the connection
        self._files: list[_File] = []
        self.member = self._read_member(makes=makes)
        if self.member:
            self._files = sorted(self._found(), key=lambda each: each.serial)

    def begin(self, store: int, epoch: int) -> int:
        """Begin the file of a connection, and return the last batch of the epoch; 0 if there is none."""
        with self._lock:
            self._end_file()
            self._begin_file(store, epoch)
            return self._last(store, epoch)

    def add(self, frame: LinkFrame, body: bytes) -> int:
        """Write a frame, durable on return; return the last batch. Drop the files that the object store has.

        Raise ``OSError`` and ``LinkBroken``; the connection has to end then.
        """
        with self._lock:
            current = self._current
            if current is None:
                raise LinkBroken("the log has a later epoch")
            if frame.batches:
                if self._file is None:
                    current = self._begin_file(current.store, current.epoch)
                self._append(body)
                current.last = frame.last
            self._drop(
                [each for each in self._files if each.epoch == current.epoch and each.last <= frame.stored], current
            )
            return self._last(current.store, current.epoch)

    def last(self, store: int, epoch: int) -> int:
        """Return the last batch of an epoch; 0 if there is none."""
        with self._lock:
            return self._last(store, epoch)

    def after(self, store: int, epoch: int, batch: int) -> list[ReceivedBatch]:
        """Return the batches of an epoch after ``batch``, in order, without those that the object store had already.

        Raise ``ReplicaDamaged`` if one is damaged.
        """
        with self._lock:
            files = [each for each in self._files if (each.store, each.epoch) == (store, epoch) and each.last > batch]
            frames = [frame for each in files for frame in _frames(each.path)]
        numbered = (
            (number, data, frame.time_ms) for frame in frames for number, data in enumerate(frame.batches, frame.first)
        )
        return [ReceivedBatch(*each) for each in numbered if each[0] > batch]

    def drop_before(self, store: int, epoch: int) -> None:
        """Remove the batches of earlier epochs, and of other stores."""
        with self._lock:
            earlier = [each for each in self._files if each.store != store or each.epoch < epoch]
            if self._current in earlier:
                self._end_file()
                self._current = None
            self._drop(earlier, None)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._end_file()

    def _read_member(self, *, makes: bool) -> str:
        path = self._folder / "member"
        if makes and (not path.exists() or path.stat().st_size != _MEMBER_BYTES):
            make_directory(self._folder, 0o700)
            with path.open("wb") as file:
                file.write(secrets.token_bytes(_MEMBER_BYTES))
            sync_file(path)
            sync_directory(self._folder)
        try:
            content, status = path.read_bytes(), path.stat()
        except FileNotFoundError:
            return ""
        place = f"{status.st_ino}-{status.st_ctime_ns}".encode()
        return hashlib.blake2b(content + place, digest_size=_MEMBER_BYTES).hexdigest()

    def _found(self) -> Iterator[_File]:
        for path in self._folder.iterdir():
            if (name := _NAME.fullmatch(path.name)) is not None:
                last = max((frame.last for frame in _frames(path)), default=0)
                yield _File(path, int(name[1], 16), int(name[2]), int(name[3]), last)

    def _last(self, store: int, epoch: int) -> int:
        return max((each.last for each in self._files if (each.store, each.epoch) == (store, epoch)), default=0)

    def _begin_file(self, store: int, epoch: int) -> _File:
        serial = self._files[-1].serial + 1 if self._files else 1
        path = self._folder / f"{store:016x}-{epoch:020d}-{serial:010d}"
        self._file = path.open("xb")
        sync_directory(self._folder)
        current = self._current = _File(path, store, epoch, serial, 0)
        self._files.append(current)
        return current

    def _append(self, body: bytes) -> None:
        file = self._file
        assert file is not None
        try:
            file.write(_HEAD.pack(len(body), zlib.crc32(body)) + body)
            file.flush()
            os.fdatasync(file.fileno())
        except OSError:  # the file may end with a part of the frame
            self._end_file()
            raise
        if file.tell() >= _FILE_BYTES_MAX:
            self._end_file()

    def _end_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _drop(self, files: list[_File], kept: _File | None) -> None:
        for each in files:
            if each is not kept:
                each.path.unlink(missing_ok=True)
                self._files.remove(each)


def following(received: Iterable[ReceivedBatch], batch: int) -> Iterator[ReceivedBatch]:
    """Yield the received batches after ``batch``, the last one that the log has.

    Raise ``ReplicaDamaged`` if one is missing. The log was read after the batches.
    """
    for each in received:
        if each.number > batch + 1:
            raise ReplicaDamaged(f"batches {batch + 1} to {each.number - 1} of the direct link are missing")
        if each.number == batch + 1:
            batch = each.number
            yield each


def _frames(path: Path) -> Iterator[LinkFrame]:
    """Yield the whole frames of a file. Raise ``ReplicaDamaged`` if one before the last is not whole."""
    with closing(path.open("rb")) as file:
        data = file.read()
    offset = 0
    while offset < len(data):
        begin = offset + _HEAD.size
        if begin > len(data):
            return
        size, checksum = _HEAD.unpack_from(data, offset)
        body = data[begin : begin + size]
        offset = begin + size
        if len(body) < size or zlib.crc32(body) != checksum:
            if offset < len(data):
                raise ReplicaDamaged(f"{path} is damaged: a frame at byte {begin} does not match its checksum")
            return
        try:
            yield decode(body, LinkFrame)
        except LinkBroken as error:
            raise ReplicaDamaged(f"{path} is damaged: {error}") from error
