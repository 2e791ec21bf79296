"""Reading a log in order: reads overlap, and the end of the log is never taken for a missing segment."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from support.rigs.replica.objects import MemoryObjects

from dmq.errors import ReplicaDamaged
from dmq.replication.following import apply, follow
from dmq.replication.segment import SegmentHead, encode_batch, encode_segment, segment_name
from dmq.store.engines.engine import Batch
from dmq.store.engines.memory import MemoryEngine
from dmq.store.schema.cell.position import NO_CHECKSUM, decode_position
from dmq.store.schema.keys import META_POSITION, Family

pytestmark = pytest.mark.unit
_STORE = 7
_EMPTY = encode_batch(Batch())


def write(objects: MemoryObjects) -> Iterator[int]:
    """Write a segment for each step, and yield its number."""
    number, checksum = 1, NO_CHECKSUM
    while True:
        head = SegmentHead(_STORE, 1, number, number, 0, bytes(16), checksum)
        data, checksum = encode_segment(head, [_EMPTY])
        objects.rows[segment_name(number)] = data
        yield number
        number += 1


def numbers(objects: MemoryObjects, after: int = 0) -> list[int]:
    """Return the numbers of the segments that a reader gets."""
    return [segment.head.number for segment in follow(objects, _STORE, after, None)]


def log_of(count: int) -> tuple[MemoryObjects, Iterator[int]]:
    """Return objects with a log of so many segments, and its writer."""
    objects = MemoryObjects()
    writer = write(objects)
    for _ in range(count):
        next(writer)
    return objects, writer


def test_reads_of_a_long_log_overlap() -> None:
    """A reader that is behind does not wait for one segment at a time, and gets all of them in order."""
    objects, _ = log_of(40)
    together = threading.Barrier(4)

    def wait_for_others(method: str, name: str) -> None:
        if method == "read" and segment_name(20) <= name < segment_name(24):
            together.wait(60)  # breaks if the reads are one after the other

    objects.fault = wait_for_others
    assert numbers(objects) == list(range(1, 41))


def test_a_reader_at_the_end_asks_for_one_segment() -> None:
    """A standby that has everything reads no segment ahead: each read costs a request."""
    objects, _ = log_of(3)
    assert numbers(objects, 3) == []
    assert objects.calls == [("read", segment_name(4)), ("list", "log/")]


def test_segments_that_appear_at_the_end_are_not_a_hole() -> None:
    """Several segments that are written between the last read and the listing are read."""
    objects, writer = log_of(3)

    def write_more(method: str, name: str) -> None:
        if method == "list" and len(objects.rows) < 9:
            for _ in range(3):
                next(writer)

    objects.fault = write_more
    assert numbers(objects) == list(range(1, 10))


@pytest.mark.parametrize("missing", [1, 5, 20, 39])
def test_a_missing_segment_is_refused(missing: int) -> None:
    """A hole ends the reading with an error, at any distance."""
    objects, _ = log_of(40)
    del objects.rows[segment_name(missing)]
    read: list[int] = []
    with pytest.raises(ReplicaDamaged, match=f"{segment_name(missing)} is missing"):
        read.extend(segment.head.number for segment in follow(objects, _STORE, 0, None))


class KilledEngine(MemoryEngine):
    """Engine of a process that is killed after some batches."""

    writes_left = 2

    def write(self, batch: Batch) -> None:
        if not self.writes_left:
            raise KeyboardInterrupt
        self.writes_left -= 1
        super().write(batch)


def test_a_kill_within_a_segment_leaves_out_none_of_its_batches() -> None:
    """The position of a part of a segment is before the segment, so the next process applies the rest."""
    objects, engine = MemoryObjects(), KilledEngine()
    batches = []
    for number in range(5):
        batch = Batch()
        batch.puts.append((Family.META, b"~%d" % number, b"v"))
        batches.append(encode_batch(batch))
    head = SegmentHead(_STORE, 1, 1, 1, 0, bytes(16), NO_CHECKSUM)
    objects.rows[segment_name(1)], _ = encode_segment(head, batches)
    with pytest.raises(KeyboardInterrupt):
        apply(engine, next(follow(objects, _STORE, 0, NO_CHECKSUM)), 0)
    (row,) = engine.get_many(Family.META, [META_POSITION])
    assert row is not None
    position = decode_position(row)
    engine.writes_left = 10
    for segment in follow(objects, _STORE, position.number, position.checksum):
        assert apply(engine, segment, position.batch) == 5
    keys = [key for key, _ in engine.scan(Family.META, b"~", b"\xff", limit=10).rows]
    assert keys == [b"~%d" % number for number in range(5)]
