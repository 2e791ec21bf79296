"""Segments of a replication log."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.errors import FormatUnsupported, ReplicaDamaged
from dmq.replication.segment import (
    Segment,
    SegmentHead,
    decode_segment,
    encode_batch,
    encode_segment,
    number_of,
    segment_name,
)
from dmq.store.engines.engine import Batch

HEAD = SegmentHead(store=7, epoch=3, number=12, first_batch=40, time_ms=1_000, nonce=b"n" * 16, previous=b"p" * 16)
_families, _bytes = st.integers(0, 5), st.binary(max_size=40)


def _batch(
    ranges: list[tuple[int, bytes, bytes]], deletes: list[tuple[int, bytes]], puts: list[tuple[int, bytes, bytes]]
) -> Batch:
    batch = Batch()
    batch.ranges, batch.deletes, batch.puts = ranges, deletes, puts
    return batch


def _plain(segment: Segment) -> list[tuple[object, object, object]]:
    return [(each.ranges, each.deletes, each.puts) for each in segment.batches]


_batches = st.lists(
    st.builds(
        _batch,
        st.lists(st.tuples(_families, _bytes, _bytes), max_size=3),
        st.lists(st.tuples(_families, _bytes), max_size=3),
        st.lists(st.tuples(_families, _bytes, _bytes), max_size=5),
    ),
    min_size=1,
    max_size=5,
)
ONE = _batch([(1, b"a", b"b")], [(2, b"c")], [(0, b"k", b"v" * 50)])


@given(_batches)
def test_a_segment_is_read_as_it_was_written(batches: list[Batch]) -> None:
    """Every field and row of a segment survives encoding, in the order of the rows."""
    data, checksum = encode_segment(HEAD, [encode_batch(each) for each in batches])
    segment = decode_segment(data, "log/12")
    assert (segment.head, segment.checksum, segment.last_batch) == (HEAD, checksum, HEAD.first_batch + len(batches) - 1)
    assert _plain(segment) == [(each.ranges, each.deletes, each.puts) for each in batches]


def test_every_cut_and_every_flipped_bit_is_refused() -> None:
    """A segment that lost its end, or has one bit flipped, is never read."""
    data, _ = encode_segment(HEAD, [encode_batch(ONE)] * 3)
    for size in range(len(data)):
        with pytest.raises(ReplicaDamaged, match="log/12"):
            decode_segment(data[:size], "log/12")
    for place in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises(ReplicaDamaged, match="log/12"):
            decode_segment(bytes(flipped), "log/12")
    with pytest.raises(ReplicaDamaged):
        decode_segment(data + b"\0", "log/12")


def test_a_newer_segment_is_named_as_one() -> None:
    """A whole segment of a later version is refused with both versions."""
    data, _ = encode_segment(HEAD, [encode_batch(ONE)])
    later = bytearray(data[:-16])
    later[5] = 2
    with pytest.raises(FormatUnsupported, match="version 2, this Rock-DMQ knows 1"):
        decode_segment(bytes(later) + hashlib.blake2b(later, digest_size=16).digest(), "log/12")


def test_names_sort_by_number() -> None:
    """The order of the names is the order of the numbers, and other names have no number."""
    numbers = [1, 9, 10, 99, 10**12, 2**63]
    assert sorted(map(segment_name, numbers)) == [segment_name(each) for each in numbers]
    assert [number_of(segment_name(each)) for each in numbers] == numbers
    assert [number_of(each) for each in ("log/", "log/12", "base/" + "0" * 20, "0" * 20)] == [None] * 4
