"""Reading a replication log in order, and applying its batches to an engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from dmq.errors import FormatUnsupported, ReplicaDamaged, ReplicaForeign
from dmq.replication.objects import ObjectStore
from dmq.replication.segment import PREFIX, Segment, decode_segment, number_of, segment_name
from dmq.store.engines.engine import Batch, Engine
from dmq.store.schema.cell.position import NO_CHECKSUM, Position, encode_position
from dmq.store.schema.keys import FORMAT_VERSION, META_FORMAT, META_IDENTITY, META_POSITION, Family, unpack_u64

_READS_MAX = 16  # at once


class SegmentMissing(ReplicaDamaged):
    """The log has no segment ``number``, and has later ones."""

    def __init__(self, number: int, later: str) -> None:
        super().__init__(f"{segment_name(number)} is missing, and the log has {later}")
        self.number = number


def read_segment(objects: ObjectStore, number: int) -> Segment | None:
    """Return a segment of the log; None if there is none with this number."""
    return _decode(objects.read(segment_name(number)), number)


def _decode(found: tuple[bytes, str] | None, number: int) -> Segment | None:
    if found is None:
        return None
    name = segment_name(number)
    segment = decode_segment(found[0], name)
    if segment.head.number != number:
        raise ReplicaDamaged(f"{name} has the content of segment {segment.head.number}")
    return segment


def follow(
    objects: ObjectStore, store: int, number: int, checksum: bytes | None, *, has_listing: bool = True
) -> Iterator[Segment]:
    """Yield the segments after ``number``, in order, until the end of the log.

    ``checksum`` is that of segment ``number``; None if it is unknown. Raise ``ReplicaForeign`` if a segment belongs to
    another store, and ``ReplicaDamaged`` if one is missing, exchanged or damaged. Without ``has_listing`` a missing one
    is taken for the end of the log: a listing costs more than a read.
    """
    while True:
        for segment in _read_ahead(objects, number + 1):
            number += 1
            head = segment.head
            if head.store != store:
                raise ReplicaForeign(f"the log at {objects.url} is that of store {head.store:016x}, not {store:016x}")
            if checksum is not None and head.previous != checksum:
                raise ReplicaDamaged(f"{segment_name(number)} does not follow the segment before it")
            checksum = segment.checksum
            yield segment
        later = objects.list(PREFIX, segment_name(number)) if has_listing else ()
        if not later:
            return
        if read_segment(objects, number + 1) is None:  # a later one is only written after this one
            raise SegmentMissing(number + 1, later[0])


def _read_ahead(objects: ObjectStore, number: int) -> Iterator[Segment]:
    """Yield the segments from ``number`` until one is missing.

    Reads overlap, since each takes a round trip to the object store. The first one is alone: it usually finds nothing.
    """
    pool: ThreadPoolExecutor | None = None
    reads: deque[Future[tuple[bytes, str] | None]] = deque()
    segment = read_segment(objects, number)
    try:
        while segment is not None:
            pool = pool or ThreadPoolExecutor(_READS_MAX, "dmq-replica-read")
            reads_max = min(len(reads) + 2, _READS_MAX)
            while len(reads) < reads_max:
                reads.append(pool.submit(objects.read, segment_name(number + len(reads) + 1)))
            yield segment
            number += 1
            segment = _decode(reads.popleft().result(), number)
    finally:
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


def last_segment(objects: ObjectStore, after: int = 0) -> Segment | None:
    """Return the newest segment after number ``after``; None if there is none."""
    listed = objects.list(PREFIX, segment_name(after))
    numbers = [number for each in listed if (number := number_of(each)) is not None]
    return read_segment(objects, numbers[-1]) if numbers else None


def apply(engine: Engine, segment: Segment, after_batch: int, *, keeps_identity: bool = False) -> int:
    """Write the batches of a segment after ``after_batch`` to the engine, each with its position row.

    With ``keeps_identity`` the identity row stays, since it names the directory. Return the number of the last batch.
    Raise ``FormatUnsupported`` if a newer Rock-DMQ opened the store with one of them.
    """
    head = segment.head
    for batch_number, batch in enumerate(segment.batches, head.first_batch):
        if batch_number <= after_batch:
            continue
        for family, key, value in batch.puts:
            if key == META_FORMAT and family == Family.META and unpack_u64(value) > FORMAT_VERSION:
                why = f"of format version {unpack_u64(value)}, this Rock-DMQ knows {FORMAT_VERSION}: upgrade this host"
                raise FormatUnsupported(f"{segment_name(head.number)} is {why}")
        if keeps_identity:
            batch.puts = [each for each in batch.puts if each[1] != META_IDENTITY or each[0] != Family.META]
        is_last = batch_number == segment.last_batch  # a kill before it must not leave the rest of the segment out
        place = (head.number, segment.checksum) if is_last else (head.number - 1, head.previous)
        put_position(batch, Position(head.store, head.epoch, place[0], batch_number, place[1]))
        engine.write(batch)
    return max(after_batch, segment.last_batch)


def put_position(batch: Batch, position: Position) -> None:
    """Put the position row into a batch."""
    batch.puts.append((Family.META, META_POSITION, encode_position(position)))


def begins_log(segment: Segment) -> bool:
    """Return True if a log with this segment needs no base: it begins with the first batch of its store."""
    return segment.head.number == 1 and segment.head.first_batch == 1 and segment.head.previous == NO_CHECKSUM
