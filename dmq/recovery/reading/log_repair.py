"""Removal of damaged records from the write-ahead logs of a *copy*, so that one bad byte costs one record.

RocksDB's own recovery after damage drops the rest of the block, without reporting it. This module checks every record
and rewrites a damaged log without the damaged records. The layout is in ``dmq.store.engines.wal``. A checksum is
CRC-32C of the type and the data, rotated by 15 bits, plus a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from dmq.store.engines.wal import BLOCK_BYTES, HEADER_BYTES

_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_MASK_DELTA = 0xA282EAD8
_U32 = 0xFFFF_FFFF

Tell = Callable[[str], None]


class Dropped(NamedTuple):
    """Unreadable part of a log. ``is_tail``: no readable record was written after it."""

    log: str
    at: int
    size_bytes: int
    is_tail: bool
    data: bytes | None  # of a record with its full length but a wrong checksum; untrusted

    def __str__(self) -> str:
        return f"{self.size_bytes} bytes at {self.at} of {self.log}"


class _Fragment(NamedTuple):
    at: int  # position in the file
    end: int
    kind: int  # 0: unknown
    data: bytes
    is_whole: bool


class _Record(NamedTuple):
    at: int
    end: int
    data: bytes | None
    is_whole: bool


def clean_logs(directory: Path, tell: Tell) -> list[Dropped]:
    """Remove the damaged records from the logs in ``directory``; return them in the order of writing."""
    dropped: list[Dropped] = []
    logs = sorted((path for path in directory.glob("*.log") if path.stem.isdigit()), key=lambda path: int(path.stem))
    for path in logs:
        tell(f"checking {path.name}")
        part = path.with_suffix(".part")
        has_damage = False
        with part.open("wb") as file:
            writer = _Writer(file.write)
            for record in _records(path.read_bytes()):
                if record.is_whole and record.data is not None:
                    dropped = [each._replace(is_tail=False) for each in dropped]
                    writer.write(record.data)
                else:
                    has_damage = True
                    size = record.end - record.at
                    dropped.append(Dropped(path.name, record.at, size, is_tail=True, data=record.data))
        if has_damage:
            part.replace(path)
        else:
            part.unlink()
    return dropped


def puts_of(batch: bytes) -> list[tuple[bytes, bytes]] | None:
    """Return the rows that a record would have set, of any family; ``None`` if it cannot be parsed.

    A record is ``sequence 8 | count 4 | operations``. An operation is a tag, for some tags the number of the family,
    then keys and values with their lengths.
    """
    at, count, puts = 12, 0, list[tuple[bytes, bytes]]()
    try:
        while at < len(batch):
            texts, has_family = _OPERATIONS[batch[at]]
            at += 1
            if has_family:
                _, at = _varint(batch, at)
            found = []
            for _ in range(texts):
                length, at = _varint(batch, at)
                if at + length > len(batch):
                    return None
                found.append(batch[at : at + length])
                at += length
            if texts == 2:
                puts.append((found[0], found[1]))
            count += 1
    except (KeyError, IndexError):
        return None
    return puts if count == int.from_bytes(batch[8:12], "little") else None


# By tag: number of texts, and whether a family number precedes them. A deleted range looks like a row: harmless.
_OPERATIONS = {0: (1, False), 1: (2, False), 4: (1, True), 5: (2, True), 14: (2, True), 15: (2, False)}


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at


def _records(content: bytes) -> Iterator[_Record]:
    """Yield the records of a log in their order, intact and damaged ones."""
    started: _Record | None = None
    for at, end, kind, data, is_whole in _fragments(content):
        if started is not None and kind not in {_MIDDLE, _LAST}:  # its last fragment is missing
            yield started._replace(data=None, is_whole=False)
            started = None
        if kind in {_MIDDLE, _LAST} and started is not None:
            joined = (started.data or b"") + data
            started = _Record(started.at, end, joined, started.is_whole and is_whole)
            if kind == _LAST:
                yield started
                started = None
        elif kind == _FIRST:
            started = _Record(at, end, data, is_whole)
        elif kind == _WHOLE:
            yield _Record(at, end, data, is_whole)
        else:  # unknown, or the rest of a record whose first fragment is damaged
            yield _Record(at, end, None, is_whole=False)
    if started is not None:
        yield started._replace(data=None, is_whole=False)


def _fragments(content: bytes) -> Iterator[_Fragment]:
    for block_at in range(0, len(content), BLOCK_BYTES):
        block = content[block_at : block_at + BLOCK_BYTES]
        at = 0
        while at < len(block) and any(block[at:]):  # otherwise the rest is padding
            end, kind, is_whole = _end_of(block, at), block[at + 6] if at + HEADER_BYTES <= len(block) else 0, True
            if not end:
                end, is_known = _end_of_damaged(block, at)
                kind, is_whole = kind if is_known and _WHOLE <= kind <= _LAST else 0, False
            yield _Fragment(block_at + at, block_at + end, kind, block[at + HEADER_BYTES : end], is_whole)
            at = end


def _end_of(block: bytes, at: int) -> int:
    """Return the end of the fragment at ``at``; 0 if there is none, or it is damaged."""
    end = _said_end(block, at)
    if end > len(block) or not _WHOLE <= block[at + 6] <= _LAST:
        return 0
    return end if masked_crc(block[at + 6 : end]) == int.from_bytes(block[at : at + 4], "little") else 0


def _said_end(block: bytes, at: int) -> int:
    if at + HEADER_BYTES > len(block):
        return len(block) + 1
    return at + HEADER_BYTES + int.from_bytes(block[at + 4 : at + 6], "little")


def _end_of_damaged(block: bytes, at: int) -> tuple[int, bool]:
    """Return the start of the next intact fragment, and whether the length of the damaged one confirms it."""
    said = _said_end(block, at)
    if said <= len(block) and (_end_of(block, said) or not any(block[said:])):
        return said, True
    places = range(at + 1, len(block) - HEADER_BYTES + 1)
    return next((place for place in places if _end_of(block, place)), len(block)), False


class _Writer:
    """Writes records in the layout of a log."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._at = 0  # position in the block

    def write(self, data: bytes) -> None:
        start, is_first = 0, True
        while is_first or start < len(data):
            room = BLOCK_BYTES - self._at
            if room < HEADER_BYTES:
                self._write(bytes(room))
                self._at, room = 0, BLOCK_BYTES
            piece = data[start : start + room - HEADER_BYTES]
            start += len(piece)
            is_last = start == len(data)
            kind = (_WHOLE if is_last else _FIRST) if is_first else (_LAST if is_last else _MIDDLE)
            tagged = bytes((kind,)) + piece
            self._write(masked_crc(tagged).to_bytes(4, "little") + len(piece).to_bytes(2, "little") + tagged)
            self._at = (self._at + HEADER_BYTES + len(piece)) % BLOCK_BYTES
            is_first = False


def masked_crc(data: bytes) -> int:
    """Return the checksum of a fragment: ``data`` is its type and its content."""
    crc = _U32
    table = _TABLE
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= _U32
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & _U32


def _table() -> list[int]:
    made = []
    for number in range(256):
        crc = number
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        made.append(crc)
    return made


_TABLE = _table()
