"""The window of one queue: which offset may be committed, what comes next, and when pulling pauses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from broker_adapter.queue_client.balance.window import Window, WindowBounds, WindowPause, pause

BOUNDS = WindowBounds()
MINUTE_MS = 60_000


class Item(NamedTuple):
    """A message, as far as a window cares."""

    queue_offset: int
    size_bytes: int = 10


def a_window(*offsets: int, start: int = 0, next_offset: int = 0) -> Window[Item]:
    """A window that pulled these."""
    window = Window[Item](start, 0)
    window.put([Item(offset) for offset in offsets], next_offset, 0)
    return window


def offsets(items: Sequence[Item]) -> list[int]:
    return [item.queue_offset for item in items]


def test_the_head_is_consumed() -> None:
    """The offset goes on to the next one that is not."""
    window = a_window(0, 1, 2, 3)
    assert window.remove([0]) == 1


def test_the_middle_is_consumed() -> None:
    """The offset stays at the head; once that is consumed too, it goes on behind both."""
    window = a_window(0, 1, 2, 3)
    assert window.remove([1, 2]) == 0
    assert window.remove([0]) == 3
    assert window.remove([3]) == 4


def test_a_restart_before_the_commit_repeats_and_loses_nothing() -> None:
    """What was consumed behind the first unconsumed message comes again; what was not comes as well."""
    window = a_window(0, 1, 2, 3)
    committed = window.remove([0])
    window.remove([2])  # and the consumer dies before this is committed
    assert committed is not None
    again = a_window(*(offset for offset in range(4) if offset >= committed), start=committed)
    assert offsets(again.take(10, 0)) == [1, 2, 3]


def test_nothing_left_commits_where_the_next_pull_begins() -> None:
    """Also behind what a filter passed over; before any pull that is where the queue was begun."""
    assert a_window(start=7).commit_offset == 7
    window = a_window(7, 9, start=7, next_offset=20)
    assert window.next_offset == 20
    assert window.remove([7]) == 9
    assert window.remove([9]) == 20
    window.put([], 31, 0)
    assert window.commit_offset == 31


def test_earlier_messages_are_skipped() -> None:
    """A pull that comes twice brings nothing new, and takes no offset back."""
    window = a_window(0, 1, 2)
    window.remove([0, 1])
    window.put([Item(offset) for offset in (0, 1, 2, 3)], 2, 5)
    assert (window.count, window.commit_offset, window.next_offset, window.pulled_at_ms) == (2, 2, 4, 5)


def test_count_bytes_and_span_are_of_unconsumed_messages() -> None:
    """Taken or waiting."""
    window = Window[Item](0, 0)
    assert (window.count, window.bytes, window.span) == (0, 0, 0)
    window.put([Item(3, 5), Item(4, 7), Item(9, 11)], 10, 0)
    window.take(1, 0)
    assert (window.count, window.bytes, window.span) == (3, 23, 6)
    window.remove([3, 3, 8])
    assert (window.count, window.bytes, window.span) == (2, 18, 5)


def test_messages_are_taken_once_and_in_order() -> None:
    """As many as fit; not what was removed while it waited."""
    window = a_window(0, 1, 2, 3, 4)
    assert offsets(window.take(2, 0)) == [0, 1]
    window.remove([2])
    assert offsets(window.take(2, 0)) == [3, 4]
    assert offsets(window.take(2, 0)) == []


def test_an_orderly_batch_is_committed_whole() -> None:
    """Whatever waits stays."""
    window = a_window(0, 1, 2, 3)
    window.take(3, 0)
    assert window.commit() == 3
    assert offsets(window.take(9, 0)) == [3]


def test_rolled_back_frames_come_first_and_in_order() -> None:
    """All that is taken, or a part of it; what is not taken is passed over."""
    window = a_window(0, 1, 2, 3, 4)
    window.take(3, 0)
    window.rollback()
    assert window.commit() == 0
    assert offsets(window.take(4, 0)) == [0, 1, 2, 3]
    window.rollback([2, 0, 4, 77])
    assert window.commit() == 0
    assert offsets(window.take(9, 0)) == [0, 2, 4]


def test_a_message_that_is_consumed_for_too_long_is_expired() -> None:
    """Longer than 15 min (RocketMQ 5.5's consumeTimeout) since it was taken, the first 16; waiting does not count."""
    window = a_window(*range(40))
    window.take(20, 0)
    window.take(1, 1)
    window.rollback([0])
    assert window.expired(15 * MINUTE_MS) == []
    assert offsets(window.expired(15 * MINUTE_MS + 1)) == list(range(1, 17))
    window.remove(range(17))
    assert offsets(window.expired(15 * MINUTE_MS + 2)) == [17, 18, 19, 20]
    assert offsets(window.expired(6, consume_ms_max=5)) == [17, 18, 19]


def test_a_dropped_queue_commits_nothing_and_gives_nothing() -> None:
    """It is somebody else's, who may be behind."""
    window = a_window(0, 1, 2)
    window.take(1, 0)
    window.drop()
    assert window.is_dropped
    assert window.commit_offset is None
    assert window.remove([0]) is None
    assert window.commit() is None
    assert window.take(5, 0) == []


@pytest.mark.parametrize(
    ("count", "size_bytes", "span", "bounds", "expected"),
    [
        (1000, 100 * 1024 * 1024, 2000, BOUNDS, None),
        (1001, 0, 0, BOUNDS, WindowPause.COUNT),
        (1, 100 * 1024 * 1024 + 1, 0, BOUNDS, WindowPause.BYTES),
        (2, 0, 2001, BOUNDS, WindowPause.SPAN),
        (2, 0, 2001, BOUNDS._replace(span_max=None), None),
    ],
)
def test_pulling_pauses_above_each_bound(
    count: int, size_bytes: int, span: int, bounds: WindowBounds, expected: WindowPause | None
) -> None:
    """Source: pullThresholdForQueue, pullThresholdSizeForQueue, consumeConcurrentlyMaxSpan of RocketMQ 5.5.0."""
    assert pause(count, size_bytes, span, bounds) is expected
