"""What is kept of the end of the queues: never a gap, never another message, never more than the bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dmq.broker.io.tail_cache import Recent
from dmq.store.writer.operations import AppendedRange


def test_an_appended_message_is_found_at_its_offset() -> None:
    """Also when it came in two batches; before and behind it there is nothing."""
    fresh = Recent()
    fresh.keep((1, 0), AppendedRange(7, [b"a", b"b"]))
    fresh.keep((1, 0), AppendedRange(9, [b"c"]))
    assert [fresh.find(1, 0, offset) for offset in range(6, 11)] == [None, b"a", b"b", b"c", None]
    assert fresh.find(1, 1, 7) is None


def test_a_gap_ends_the_cached_range() -> None:
    """An older run may be of offsets that are used again."""
    fresh = Recent()
    fresh.keep((1, 0), AppendedRange(7, [b"old"]))
    fresh.keep((1, 0), AppendedRange(0, [b"new"]))
    assert (fresh.find(1, 0, 7), fresh.find(1, 0, 0), fresh.size_bytes) == (None, b"new", 3)
    fresh.forget((1, 0))
    assert (fresh.find(1, 0, 0), fresh.size_bytes) == (None, 0)


def test_a_queue_that_grows_for_ever_keeps_its_end() -> None:
    """Half of the bound at least, and never more than the bound."""
    fresh = Recent(bytes_max=1_000, queue_bytes_max=100)
    for offset in range(1_000):
        fresh.keep((1, 0), AppendedRange(offset, [b"%03d" % offset + b"." * 7]))
        assert fresh.size_bytes <= 100
        for back in range(min(offset + 1, 5)):
            assert fresh.find(1, 0, offset - back) == b"%03d" % (offset - back) + b"." * 7


def test_the_queue_that_grew_last_is_the_last_to_go() -> None:
    """All queues together have one bound."""
    fresh = Recent(bytes_max=100, queue_bytes_max=60)
    for queue_id in (0, 1, 0, 2):
        fresh.keep((1, queue_id), AppendedRange(10 if queue_id == 0 and fresh.find(1, 0, 0) else 0, [b"x" * 40]))
    assert [fresh.find(1, queue_id, offset) is not None for queue_id, offset in ((0, 10), (1, 0), (2, 0))] == [
        True,
        False,
        True,
    ]


def test_a_message_larger_than_the_bound_is_not_kept() -> None:
    """It is read from the store like any other."""
    fresh = Recent(bytes_max=100, queue_bytes_max=50)
    fresh.keep((1, 0), AppendedRange(3, [b"x" * 200]))
    assert (fresh.find(1, 0, 3), fresh.size_bytes) == (None, 0)


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(1, 40), min_size=1, max_size=5), st.booleans())))
def test_any_found_message_is_the_last_one_appended_there(steps: list[tuple[int, list[int], bool]]) -> None:
    """Against a plain dict of everything: nothing else is ever found, and the sizes add up."""
    fresh = Recent(bytes_max=150, queue_bytes_max=80)
    ends = [0, 0, 0]
    everything: dict[tuple[int, int], bytes] = {}
    for number, (queue_id, sizes, is_kept) in enumerate(steps):
        records = [bytes([number % 256]) * size for size in sizes]
        growth = AppendedRange(ends[queue_id], records)
        for record in records:
            everything[queue_id, ends[queue_id]] = record
            ends[queue_id] += 1
        assert growth.end == ends[queue_id]
        if is_kept:
            fresh.keep((1, queue_id), growth)
        else:
            fresh.forget((1, queue_id))
        found = {place: fresh.find(1, *place) for place in everything}
        kept = {place: value for place, value in found.items() if value is not None}
        assert kept == {place: everything[place] for place in kept}
        assert fresh.size_bytes == sum(map(len, kept.values())) <= 150
