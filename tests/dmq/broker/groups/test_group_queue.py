"""One group's progress on one queue: pure, so any history and any restart is a list of calls."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.forges.messages.group_rows import Rows, a_queue

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.runtime.clock import Moment
from dmq.broker.groups import group_queue
from dmq.broker.groups.group_queue import DeliveryLease, GroupQueue, Returned
from dmq.broker.handles.receipt_handle import ReceiptHandle
from dmq.store.schema.topics.group import CHUNK_OFFSETS
from dmq.store.writer.operations import Op

NOW_MS = 1_000_000


def a_receipt(offset: int, epoch: int = 1, attempt: int = 1) -> ReceiptHandle:
    return ReceiptHandle(7, 8, 9, offset, epoch, attempt)


def hand_out(queue: GroupQueue, limit: int = 1, epoch: int = 1) -> list[ReceiptHandle]:
    """Take and lease, as the broker does."""
    taken = queue.take(limit)
    for offset, returned in taken:
        lease = DeliveryLease(epoch, returned.attempt, NOW_MS, first_failed_at_ms=returned.first_failed_at_ms)
        queue.lease(offset, lease)
    return [a_receipt(offset, epoch, returned.attempt) for offset, returned in taken]


def attempts(taken: Sequence[tuple[int, Returned]]) -> list[tuple[int, int]]:
    """What was taken, and the attempt that it is."""
    return [(offset, returned.attempt) for offset, returned in taken]


def bring_back(queue: GroupQueue, offset: int, now_ms: int = NOW_MS) -> list[Op]:
    """End a lease."""
    lease = queue.leases[offset]
    attempt, ops = queue.plan_return(offset, lease, now_ms)
    assert queue.come_back(offset, lease, attempt)
    return ops


def hide(queue: GroupQueue, offset: int, *, is_suspended: bool = False) -> list[Op]:
    """Let a lease end later."""
    return queue.hide(offset, queue.leases[offset], Moment(NOW_MS, 0), 1, is_suspended=is_suspended)


def test_offsets_are_taken_in_order_and_once() -> None:
    """Up to the end, which moves."""
    assert not GroupQueue(7, 8, 9).has_available(), "nobody has told of a message yet"
    queue = a_queue(3)
    assert [each.queue_offset for each in hand_out(queue, 2)] == [0, 1]
    assert [each.queue_offset for each in hand_out(queue, 9)] == [2]
    assert not queue.has_available()
    queue.end = 4
    assert [each.queue_offset for each in hand_out(queue, 9)] == [3]


def test_an_undelivered_message_is_taken_next() -> None:
    """In its order, on the same attempt."""
    queue = a_queue()
    hand_out(queue, 4)
    for offset in (3, 1):
        queue.give_back(offset)
    assert attempts(queue.take(3)) == [(1, 1), (3, 1), (4, 1)]


def test_returned_messages_are_taken_first_and_once() -> None:
    """With the next attempt, also if it came back before the rest was ever taken."""
    queue = a_queue()
    hand_out(queue, 3)
    bring_back(queue, 2)
    bring_back(queue, 0)
    assert attempts(queue.take(4)) == [(0, 2), (2, 2), (3, 1), (4, 1)]


def test_a_lease_that_ended_twice_is_one_return() -> None:
    """The second end of the same lease finds it gone."""
    queue = a_queue()
    hand_out(queue)
    lease = queue.leases[0]
    first, _ = queue.plan_return(0, lease, NOW_MS)
    second, _ = queue.plan_return(0, lease, NOW_MS)
    assert queue.come_back(0, lease, first)
    assert not queue.come_back(0, lease, second)
    assert attempts(queue.take(9))[:2] == [(0, 2), (1, 1)]


def test_a_return_yields_to_concurrent_changes() -> None:
    """Finished, or hidden anew while the end of the lease was being written."""
    queue = a_queue()
    finished, hidden = hand_out(queue, 2)
    plans = [(each.queue_offset, queue.leases[each.queue_offset]) for each in (finished, hidden)]
    planned = [(*plan, queue.plan_return(*plan, NOW_MS)[0]) for plan in plans]
    queue.finish((finished.queue_offset,))
    hide(queue, hidden.queue_offset)
    assert [queue.come_back(*plan) for plan in planned] == [False, False]
    assert attempts(queue.take(9))[0] == (2, 1)


def test_the_bound_of_leases_stops_taking(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a finished one makes room."""
    monkeypatch.setattr(group_queue, "LEASES_MAX", 3)
    queue = a_queue()
    assert len(hand_out(queue, 9)) == 3
    assert not queue.has_available()
    assert queue.take(1) == []
    queue.finish((1,))
    assert attempts(queue.take(9)) == [(3, 1)]


def test_attempts_end_at_the_maximum_of_their_field() -> None:
    """The 65535th failure does not overflow."""
    queue = a_queue()
    hand_out(queue)
    queue.leases[0].attempt = 0xFFFF
    bring_back(queue, 0)
    assert attempts(queue.take(1)) == [(0, 0xFFFF)]


@pytest.mark.parametrize(
    ("receipt", "is_good"),
    [
        (a_receipt(0, epoch=5), True),
        (a_receipt(0, epoch=4), False),
        (a_receipt(0, epoch=6), False),
        (a_receipt(3, epoch=5), True),  # not leased: from before a restart
        (a_receipt(10, epoch=5), False),  # there is no such message
    ],
)
def test_a_handle_is_checked_against_the_lease(receipt: ReceiptHandle, *, is_good: bool) -> None:
    """The current one, or one of a message that nobody holds."""
    queue = a_queue()
    hand_out(queue, epoch=5)
    if is_good:
        assert queue.check(receipt)
        return
    with pytest.raises(Refused) as refused:
        queue.check(receipt)
    assert refused.value.rule is Rule.RECEIPT_HANDLE


def test_any_handle_of_a_finished_message_is_fine() -> None:
    """Acknowledging twice is."""
    queue = a_queue()
    (receipt,) = hand_out(queue)
    queue.finish((0,))
    assert not queue.check(receipt)
    assert not queue.check(receipt._replace(epoch=0))


def test_only_the_last_handle_outlives_its_lease() -> None:
    """By epoch; attempts do not tell suspended hand-outs apart."""
    queue = a_queue()
    (first,) = hand_out(queue, epoch=1)
    hide(queue, 0, is_suspended=True)
    bring_back(queue, 0)
    (second,) = hand_out(queue, epoch=2)
    assert second.attempt == first.attempt == 1
    bring_back(queue, 0)
    assert queue.check(second)
    with pytest.raises(Refused):
        queue.check(first)


def test_no_handle_outlives_a_move() -> None:
    """The message comes again as a copy: to finish its original would be an answer that means nothing."""
    rows, queue = Rows(), a_queue()
    (receipt,) = hand_out(queue)
    rows.apply(queue.leave(0))
    assert queue.is_finished(0)
    with pytest.raises(Refused):
        queue.check(receipt)
    assert attempts(rows.load(10).take(1)) == [(1, 1)]


def test_only_so_many_moves_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten, and its handle is then that of a finished message."""
    monkeypatch.setattr(group_queue, "_MOVED_KEPT", 2)
    queue = a_queue()
    receipts = hand_out(queue, 3)
    for offset in range(3):
        queue.leave(offset)
    assert not queue.check(receipts[0])
    for receipt in receipts[1:]:
        with pytest.raises(Refused):
            queue.check(receipt)


def test_a_good_handle_has_a_lease_again_when_it_is_used() -> None:
    """Of what expired, with what is known of its failures; of what is from before a restart, as the handle says."""
    queue = a_queue()
    (expired,) = hand_out(queue, epoch=3)
    bring_back(queue, 0, NOW_MS + 7)
    lease = queue.leased(expired, "")
    assert (lease.epoch, lease.attempt, lease.first_failed_at_ms) == (3, 1, NOW_MS + 7)
    assert queue.leased(expired, "") is lease
    assert attempts(queue.take(1)) == [(1, 1)]
    before = queue.leased(a_receipt(5, epoch=2, attempt=4)._replace(is_push=True), "")
    assert (before.epoch, before.attempt, before.first_failed_at_ms, before.is_push) == (2, 4, 0, True)


def test_the_first_failure_is_remembered() -> None:
    """Not the later ones, and not what was suspended; through hand-outs, hiding, and the end of the run."""
    rows, queue = Rows(), a_queue(1)
    hand_out(queue)
    rows.apply(hide(queue, 0, is_suspended=True))
    rows.apply(bring_back(queue, 0, NOW_MS + 1))
    assert hand_out(queue)
    rows.apply(bring_back(queue, 0, NOW_MS + 2))
    queue = rows.load(1)
    assert hand_out(queue)
    rows.apply(hide(queue, 0))
    queue = rows.load(1)
    rows.apply(bring_back(queue, 0, NOW_MS + 3))
    ((_, returned),) = rows.load(1).take(1)
    assert returned == (3, 1, NOW_MS + 2)


@pytest.mark.parametrize(
    ("passed_ms", "left_ms"),
    [(0, 900), (400, 500), (900, 0), (2_000, 0), (-5_000, 900)],
    ids=["at once", "in between", "at its end", "behind its end", "after a step back"],
)
def test_a_hidden_message_stays_hidden_for_its_remaining_time(passed_ms: int, left_ms: int) -> None:
    """By the clock of the run that set it and of the run that loads it, and never longer than it was to be."""
    rows, queue = Rows(), a_queue(1)
    hand_out(queue)
    rows.apply(queue.hide(0, queue.leases[0], Moment(NOW_MS, 70), 900))
    assert queue.leases[0].ends_ms == 970
    assert rows.load(1, Moment(NOW_MS + passed_ms, 30)).leases[0].ends_ms == 30 + left_ms


def test_full_chunks_become_a_floor() -> None:
    """What is kept stays small however much is finished: one row for the floor, one for the chunk it is in."""
    rows, queue = Rows(), a_queue(3 * CHUNK_OFFSETS)
    rows.apply(queue.start_at(0))
    for offset in range(2 * CHUNK_OFFSETS + 5):
        rows.apply(queue.finish((offset,)))
    assert queue.floor == 2 * CHUNK_OFFSETS + 5
    assert len(rows.rows) == 2
    assert attempts(rows.load(3 * CHUNK_OFFSETS).take(1)) == [(2 * CHUNK_OFFSETS + 5, 1)]


def test_offsets_that_are_finished_together_share_their_rows() -> None:
    """One row per chunk that changed, however many offsets; none for a chunk that is complete."""
    rows, queue = Rows(), a_queue(3 * CHUNK_OFFSETS)
    rows.apply(queue.start_at(0))
    ops = queue.finish(range(5, 2 * CHUNK_OFFSETS + 5))
    assert len(ops) == 3
    rows.apply(ops)
    rows.apply(queue.finish(range(5)))
    assert queue.floor == 2 * CHUNK_OFFSETS + 5
    assert rows.load(3 * CHUNK_OFFSETS).floor == 2 * CHUNK_OFFSETS + 5
    assert len(rows.rows) == 2


def test_a_floor_in_the_middle_of_a_chunk_moves_too() -> None:
    """A group that started at the end has no bits for what lay before it."""
    rows, queue = Rows(), a_queue(2 * CHUNK_OFFSETS)
    rows.apply(queue.start_at(CHUNK_OFFSETS - 2))
    for offset in (CHUNK_OFFSETS - 1, CHUNK_OFFSETS - 2, CHUNK_OFFSETS):
        rows.apply(queue.finish((offset,)))
    assert queue.floor == CHUNK_OFFSETS + 1
    loaded = rows.load(2 * CHUNK_OFFSETS)
    assert loaded.floor == CHUNK_OFFSETS + 1
    assert not [each for each in range(CHUNK_OFFSETS + 1) if not loaded.is_finished(each)]


def test_a_removed_message_is_finished_and_leaves_no_rows() -> None:
    """Leases, returns and bits of it go, what is above it stays, and what is finished is counted right."""
    rows, queue = Rows(), a_queue(3 * CHUNK_OFFSETS)
    rows.apply(queue.start_at(0))
    hand_out(queue, 3)
    rows.apply(hide(queue, 0))
    rows.apply(bring_back(queue, 1))
    for offset in (5, CHUNK_OFFSETS + 9, CHUNK_OFFSETS + 10, CHUNK_OFFSETS + 12):
        rows.apply(queue.finish((offset,)))
    rows.apply(queue.skip_to(CHUNK_OFFSETS + 9))
    assert queue.skip_to(CHUNK_OFFSETS) == []
    for each in (queue, rows.load(3 * CHUNK_OFFSETS)):
        assert (each.floor, each.finished_count) == (CHUNK_OFFSETS + 11, CHUNK_OFFSETS + 12)
        assert each.leases == {}
        assert attempts(each.take(2)) == [(CHUNK_OFFSETS + 11, 1), (CHUNK_OFFSETS + 13, 1)]
    assert len(rows.rows) == 2


def test_a_group_that_began_in_the_middle_has_finished_earlier_messages() -> None:
    """The bits below the first offset were never set, and are not missed."""
    queue = a_queue(2 * CHUNK_OFFSETS)
    queue.start_at(CHUNK_OFFSETS + 500)
    queue.finish((CHUNK_OFFSETS + 600,))
    assert queue.finished_count == CHUNK_OFFSETS + 501


offsets = st.integers(0, 2 * CHUNK_OFFSETS + 9)


@given(
    start=st.sampled_from((0, 1, CHUNK_OFFSETS - 1, CHUNK_OFFSETS, 1_500)),
    runs=st.lists(st.lists(offsets, max_size=40), min_size=1, max_size=4),
    block=st.tuples(offsets, st.integers(0, 1_200)),
)
def test_exactly_the_finished_messages_stay_finished(start: int, runs: list[list[int]], block: tuple[int, int]) -> None:
    """In any order, any number of runs, with whole chunks among them."""
    end = 2 * CHUNK_OFFSETS + 10
    rows, queue, finished = Rows(), a_queue(end), set(range(start))
    rows.apply(queue.start_at(start))
    runs[0] += range(block[0], min(end, sum(block)))
    for run in runs:
        for offset in run:
            if not queue.is_finished(offset):
                rows.apply(queue.finish((offset,)))
            finished.add(offset)
        assert {each for each in range(end) if queue.is_finished(each)} == finished
        queue = rows.load(end)
    assert {each for each in range(end) if queue.is_finished(each)} == finished
    assert [offset for offset, _ in queue.take(end)] == [each for each in range(end) if each not in finished]


steps = st.lists(
    st.tuples(st.sampled_from(("hand out", "finish", "hide", "suspend", "return", "restart")), st.integers(0, 7)),
    max_size=60,
)


@given(steps=steps)
def test_attempts_and_leases_survive_restarts(steps: list[tuple[str, int]]) -> None:
    """Against a dictionary: hidden leases stay, plain ones end with the run, attempts only grow as they should."""
    rows, queue, epoch = Rows(), a_queue(8), 0
    rows.apply(queue.start_at(0))
    due, done = dict.fromkeys(range(8), 1), set[int]()
    hidden: dict[int, bool] = {}  # by a row; whether it is suspended
    for what, offset in steps:
        lease = queue.leases.get(offset)
        if what == "restart":
            queue = rows.load(8)
            assert queue.leases.keys() == hidden.keys()
            assert {each: lease.is_suspended for each, lease in queue.leases.items()} == hidden
        elif what == "hand out":
            epoch += 1
            for receipt in hand_out(queue, 2, epoch):
                assert receipt.queue_offset not in done
                assert receipt.attempt == due[receipt.queue_offset]
        elif lease is None:
            continue
        elif what == "finish":
            rows.apply(queue.finish((offset,)))
            done.add(offset)
            hidden.pop(offset, None)
        elif what == "return":
            due[offset] = lease.attempt + (not lease.is_suspended)
            rows.apply(bring_back(queue, offset))
            hidden.pop(offset, None)
        else:
            is_suspended = what == "suspend"
            rows.apply(hide(queue, offset, is_suspended=is_suspended))
            hidden[offset] = is_suspended
    left = {offset: attempt for offset, attempt in due.items() if offset not in done and offset not in hidden}
    assert dict(attempts(rows.load(8).take(8))) == left
