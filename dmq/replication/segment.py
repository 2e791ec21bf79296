"""Segments of a replication log: consecutive batches of one store, in one immutable object.

segment   magic 4 | version 2 | store 8 | epoch 8 | number 8 | first batch 8 | batches 4 | time_ms 8 | nonce 16 |
          previous checksum 16 | body bytes 4 | body | checksum 16

The body is msgpack, compressed by zstd: of each batch the deleted ranges, deleted rows and rows, in the order in which
the engine applies them. The checksum (BLAKE2b) covers everything before it. A segment names the checksum of the segment
before it, so a log with a missing, exchanged or foreign segment is detected.

Segments are numbered from 1, batches likewise. If the first batch does not follow the last batch of the segment before,
the batches in between are only in a base.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import zstandard

from dmq.errors import FormatUnsupported, ReplicaDamaged
from dmq.store.engines.engine import Batch
from dmq.store.schema.cell.position import CHECKSUM_BYTES

PREFIX = "log/"
NONCE_BYTES = 16
VERSION = 1
_MAGIC = b"DMQL"
_VERSIONED = struct.Struct(">4sH")
_HEAD = struct.Struct(f">4sHQQQQIQ{NONCE_BYTES}s{CHECKSUM_BYTES}sI")
_DIGITS = 20
_BODY_BYTES_MAX = 1024 * 1024 * 1024  # of a decompressed body; far above the writer's bounds
_ZSTD_LEVEL = 1

_Rows = tuple[list[tuple[int, bytes, bytes]], list[tuple[int, bytes]], list[tuple[int, bytes, bytes]]]
_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(list[_Rows])
_batch_decoder = msgspec.msgpack.Decoder(_Rows)


class SegmentHead(NamedTuple):
    """Fields of a segment in addition to its batches."""

    store: int  # number of the store's identity
    epoch: int  # boot number of the run that wrote it
    number: int
    first_batch: int
    time_ms: int  # of its last batch; never before that of the previous segment
    nonce: bytes  # drawn by the writer, to recognize its own segment after a lost answer
    previous: bytes  # checksum of the segment before; zeros for segment 1


class Segment(NamedTuple):
    """Decoded segment."""

    head: SegmentHead
    batches: Sequence[Batch]
    checksum: bytes

    @property
    def last_batch(self) -> int:
        """Number of its last batch."""
        return self.head.first_batch + len(self.batches) - 1


def segment_name(number: int) -> str:
    """Return the name of the object of a segment."""
    return f"{PREFIX}{number:0{_DIGITS}d}"


def number_of(name: str) -> int | None:
    """Return the number of the segment with this name; None if no segment has it."""
    digits = name.removeprefix(PREFIX)
    return int(digits) if len(digits) == _DIGITS and digits.isdigit() and name != digits else None


def encode_batch(batch: Batch) -> bytes:
    """Return the msgpack of a batch."""
    return _encode((batch.ranges, batch.deletes, batch.puts))


def decode_batch(data: bytes) -> Batch:
    """Undo ``encode_batch``."""
    return _batch(*_batch_decoder.decode(data))


def encode_segment(head: SegmentHead, batches: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Return the bytes of a segment with these encoded batches, and its checksum."""
    compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)  # one per call: it must not be shared by threads
    body = compressor.compress(b"".join((_array_head(len(batches)), *batches)))
    store, epoch, number, first_batch, time_ms, nonce, previous = head
    packed = _HEAD.pack(
        *(_MAGIC, VERSION, store, epoch, number, first_batch, len(batches), time_ms, nonce, previous, len(body))
    )
    checksum = _checksum((packed, body))
    return b"".join((packed, body, checksum)), checksum


def decode_segment(data: bytes, name: str) -> Segment:
    """Decode the object ``name``.

    Raise ``FormatUnsupported`` if a newer Rock-DMQ wrote it, and ``ReplicaDamaged`` if it does not have the bytes with
    which it was written.
    """
    if len(data) < _VERSIONED.size or not data.startswith(_MAGIC):
        raise ReplicaDamaged(f"{name} is not a segment of a replication log: {len(data)} bytes")
    version = _VERSIONED.unpack_from(data)[1]
    whole = len(data) - CHECKSUM_BYTES
    checksum = data[whole:]
    is_whole = whole >= _HEAD.size and _checksum((memoryview(data)[:whole],)) == checksum
    if version > VERSION and is_whole:
        raise FormatUnsupported(f"{name} has segment version {version}, this Rock-DMQ knows {VERSION}")
    if not is_whole or version != VERSION:
        raise ReplicaDamaged(f"{name} is damaged: the checksum of its {len(data)} bytes does not match")
    _, _, store, epoch, number, first_batch, count, time_ms, nonce, previous, size = _HEAD.unpack_from(data)
    try:
        if size != whole - _HEAD.size:
            raise ValueError(f"a body of {whole - _HEAD.size} bytes instead of {size}")
        body = zstandard.ZstdDecompressor().decompress(data[_HEAD.size : whole], max_output_size=_BODY_BYTES_MAX)
        rows = _decoder.decode(body)
        if len(rows) != count or not count:
            raise ValueError(f"{len(rows)} batches instead of {count}")
    except (ValueError, zstandard.ZstdError, msgspec.DecodeError) as error:
        raise ReplicaDamaged(f"{name} cannot be decoded: {error}") from error
    head = SegmentHead(store, epoch, number, first_batch, time_ms, nonce, previous)
    return Segment(head, [_batch(*each) for each in rows], checksum)


def _batch(
    ranges: list[tuple[int, bytes, bytes]], deletes: list[tuple[int, bytes]], puts: list[tuple[int, bytes, bytes]]
) -> Batch:
    batch = Batch()
    batch.ranges, batch.deletes, batch.puts = ranges, deletes, puts
    return batch


def _array_head(count: int) -> bytes:
    """Return the head of a msgpack array of ``count`` elements, which follow it."""
    return b"\xdd" + count.to_bytes(4, "big")


def _checksum(parts: Iterable[bytes | memoryview]) -> bytes:
    digest = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()
