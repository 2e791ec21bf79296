"""Message groups within one queue: in order, blocking each other and nobody else."""

from __future__ import annotations

import pytest
from support.forges.messages.line import ALL, Line, Reading

from dmq.broker.groups import group_queue
from dmq.broker.groups.message_groups import RUN_MAX, MessageOrder
from dmq.broker.handles.receipt_handle import ReceiptHandle


def test_a_run_is_delivered_together_and_blocks_later_messages() -> None:
    """Also if that is sent later; every one of the run must be finished first."""
    line = Line("aa-b")
    assert line.receive() == [0, 1, 2, 3]
    line.send("ab-")
    assert line.receive() == [6]
    line.ack(0)
    assert line.receive() == []
    line.ack(1)
    assert line.receive() == [4]
    line.ack(3)
    assert line.receive() == [5]


def test_a_run_has_its_bound() -> None:
    """A push consumer gets one at a time; what is behind is offered as soon as that one is finished."""
    line = Line("aaab-")
    assert line.receive(run_max=1) == [0, 3, 4]
    line.ack(0)
    assert line.receive(run_max=1) == [1]
    line.ack(1)
    assert line.receive(run_max=2) == [2]


def test_a_long_line_is_offered_in_parts() -> None:
    """What waits behind a failed message is not all read again each time one of them is finished."""
    line = Line("a" * (3 * RUN_MAX))
    assert line.receive(run_max=1) == [0]
    line.ack(0)
    assert line.receive(run_max=ALL) == [1]  # the last receive was a push consumer's
    line.ack(1)
    assert line.receive(run_max=ALL) == list(range(2, 2 + RUN_MAX))


def test_returned_messages_go_before_later_ones() -> None:
    """Alone while the rest of its run is out, and first of the line when nothing is."""
    line = Line("aaa")
    assert line.receive(limit=2) == [0, 1]
    assert line.receive() == []
    line.come_back(0)
    assert line.receive() == [0]
    line.come_back(1)
    assert line.receive() == []
    line.come_back(0)
    assert line.receive() == [0, 1, 2]


def test_filtered_messages_release_the_next_one() -> None:
    """Finished without having gone out; whether it was looked at before or not."""
    line = Line("aaa")
    reading = line.begin()
    line.ack(0)
    assert line.end(Reading(reading.first_epoch, 1, [1, 2])) == [1]
    line.come_back(1)
    reading = line.begin(run_max=1)
    line.ack(1)
    assert line.receive(run_max=1) == [2]


def test_a_cancelled_receive_leaves_no_gap() -> None:
    """Another one, begun after it, does not pass it; what it took goes out next."""
    line = Line("aab")
    cancelled, other = line.begin(limit=1), line.begin()
    assert line.end(other) == []
    line.cancel(cancelled)
    assert line.receive() == [0, 1, 2]


def test_two_receives_at_once_keep_the_order() -> None:
    """The second one gets nothing of a group of which the first got something."""
    line = Line("aaab")
    first, second = line.begin(limit=2), line.begin(limit=2)
    assert line.end(first) == [0, 1]
    assert line.end(second) == [3]
    line.ack(0, 1)
    assert line.receive() == [2]


def test_a_lease_of_an_earlier_run_blocks_later_messages() -> None:
    """And only that: what was before it in its group is handed out again."""
    line = Line("aaab")
    assert line.receive(limit=3) == [0, 1, 2]
    line.hide(1)
    line.restart()
    assert line.receive() == [0, 3]
    line.ack(1)
    assert line.receive() == []
    line.ack(0)
    assert line.receive() == [2]


def test_a_lease_from_before_that_ends_comes_in_its_turn() -> None:
    """Those before it were handed out in the last run and are free again: they go first."""
    for is_held_by_a_row in (True, False):
        line = Line("aaa")
        assert line.receive() == [0, 1, 2]
        lease = line.queue.leases[2]
        if is_held_by_a_row:
            line.hide(2)
        line.restart()
        if not is_held_by_a_row:
            line.queue.leased(ReceiptHandle(7, 8, 9, 2, lease.epoch, 1), "a")
        line.come_back(2)
        assert line.receive(limit=1) == [0]
        assert line.receive() == []
        line.ack(0)
        assert line.receive() == [1, 2]


def test_parked_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the bound nothing new is looked at; what is finished makes room."""
    monkeypatch.setattr(group_queue, "PARKED_MAX", 3)
    line = Line("aaaaaa--")
    assert line.receive(limit=1) == [0]
    assert line.receive(limit=2) == []
    assert line.receive(limit=2) == []
    assert line.queue.order.parked_count == 4
    assert not line.queue.has_available()
    line.ack(0)
    assert line.receive(limit=2) == [1, 2]
    line.ack(1, 2)
    assert line.receive() == [3, 4, 5, 6, 7]


def test_a_message_out_in_a_lane_blocks_its_message_group_in_the_queue() -> None:
    """And the other way round: it is parked there, and offered when nothing of it is out beside."""
    queue, lane = Line("aab-"), Line("a")
    queue.queue.beside, lane.queue.beside = (lane.queue,), (queue.queue,)
    assert lane.receive() == [0]
    assert queue.receive() == [2, 3]
    assert queue.queue.order.parked_count == 2
    lane.ack(0)
    assert queue.receive() == [0, 1]
    assert queue.queue.order.parked_count == 0
    lane.send("ba")
    queue.ack(0)
    assert lane.receive() == []
    queue.ack(1)
    assert lane.receive() == [2]
    queue.ack(2)
    assert lane.receive() == [1]


def test_a_late_handle_that_is_used_holds_up_its_own_message_group_alone() -> None:
    """A cancelled receive left its message unread; once it has a lease again, others need not wait for it."""
    line = Line("aba")
    line.cancel(line.begin(limit=1))
    line.queue.leased(ReceiptHandle(7, 8, 9, 0, 1, 1), "a")
    assert line.receive() == [1]
    line.ack(0)
    assert line.receive() == [2]


def test_nothing_is_kept_of_finished_messages() -> None:
    """A message group costs memory while something of it is unfinished, and no longer."""
    line = Line("abab-")
    line.ack(*line.receive())
    assert line.queue.order.group_of(0) == ""
    assert line.queue.order.everywhere.total == 0
    fresh = MessageOrder(line.queue.order.everywhere)
    assert vars(line.queue.order) == vars(fresh)
