"""The rows that say how many wait in each minute of an hour."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.errors import StoreCorrupt
from dmq.store.schema.accounting.counts import due_in, pack_hour, unpack_hour
from dmq.store.schema.keys import hour_key

pytestmark = pytest.mark.property


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 300) | st.integers(0, 70_000), min_size=60, max_size=60))
def test_an_hour_has_the_counts_of_its_minutes(minutes: list[int]) -> None:
    """However large, in no more bytes each than the largest needs, and by the end of each minute that has any."""
    packed = pack_hour(minutes)
    assert unpack_hour(packed) == tuple(minutes)
    assert len(packed) // 60 == next(width for width in (1, 2, 4, 8) if max(minutes) < 256**width)
    by_end = [(7 * 3_600_000 + (at + 1) * 60_000, count) for at, count in enumerate(minutes) if count]
    assert list(due_in(hour_key(1, 7), packed)) == by_end


@pytest.mark.parametrize(
    ("most", "width"),
    [(255, 1), (256, 2), (2**16 - 1, 2), (2**16, 4), (2**32 - 1, 4), (2**32, 8), (2**64 - 1, 8)],
)
def test_an_hour_is_as_wide_as_its_fullest_minute(most: int, width: int) -> None:
    """The largest count of each width, and the one behind it."""
    minutes = (*[0] * 59, most)
    packed = pack_hour(minutes)
    assert (len(packed), unpack_hour(packed)) == (60 * width, minutes)


@pytest.mark.parametrize("value", [b"", bytes(8), bytes(61), bytes(481)])
def test_another_length_is_no_hour(value: bytes) -> None:
    """It is damage."""
    with pytest.raises(StoreCorrupt, match=f"in {len(value)} bytes"):
        unpack_hour(value)


def test_no_minute_counts_less_than_nothing() -> None:
    """A row that says so is never written."""
    for most in (1, 2**8, 2**16, 2**32):
        with pytest.raises((ValueError, struct.error)):
            pack_hour([most, -1, *[0] * 58])
