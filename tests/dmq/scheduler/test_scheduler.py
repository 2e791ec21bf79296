"""The scheduler's turns on a manual clock, over the store in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models.store.outbox import read_outbox
from support.rigs.broker.scheduler_cell import LAG_MS, Cell
from support.rigs.store.rows import all_rows

from broker_adapter.contracts.message import Envelope, unpack_id
from broker_adapter.runtime.clock import ManualClock
from dmq.broker.topics.settings import FlowChange
from dmq.errors import StoreFailed, StoreNoDescriptors
from dmq.scheduler import scheduler as scheduler_module
from dmq.store.engines.engine import Rows
from dmq.store.schema.keys import Family, pack_queue_key, timeline_mark
from dmq.store.schema.messages.index import Receipt
from dmq.store.schema.messages.record import decode_queued
from dmq.store.writer.operations import Op
from dmq.trail.events import EventKind


@pytest.fixture
def cell() -> Iterator[Cell]:
    made = Cell()
    made.scheduler.turn()  # the clock is a lifetime away from where an empty timeline begins
    yield made
    made.close()


@pytest.fixture
def clock(cell: Cell) -> ManualClock:
    assert isinstance(cell.clock, ManualClock)
    return cell.clock


@given(
    delays=st.lists(st.integers(1, 3_000), min_size=1, max_size=30), naps=st.lists(st.integers(1, 1_500), max_size=8)
)
def test_exactly_the_due_messages_are_handed_over_and_none_early(delays: list[int], naps: list[int]) -> None:
    """After every nap the queue holds each message whose time has come, and no other."""
    clock = ManualClock()
    cell = Cell(clock=clock)
    start_ms = clock.now_ms()
    cell.schedule(*(start_ms + delay for delay in delays))
    for nap in [*naps, 3_000]:
        clock.advance(nap)
        cell.drain()
        assert sorted(cell.times()) == sorted(
            start_ms + delay for delay in delays if start_ms + delay <= clock.now_ms()
        )
        assert all(each.stored_at_ms >= each.deliver_at_ms for each in cell.log())
    assert min(cell.late_ms) >= 0
    assert len(cell.late_ms) == len(delays) == cell.scheduler.handed_over_total
    assert cell.store.pending() == {}
    cell.close()


def test_the_order_is_that_of_the_times_and_then_of_the_sends(cell: Cell, clock: ManualClock) -> None:
    """Within a millisecond, who was accepted first is handed over first."""
    now_ms = clock.now_ms()
    cell.schedule(now_ms + 30, now_ms + 10, now_ms + 20, now_ms + 10)
    cell.schedule(now_ms + 10)
    clock.advance(30)
    cell.drain()
    names = [unpack_id(each.message_id) for each in cell.log()]
    assert [each.split("#")[1] for each in names] == ["1", "3", "4", "2", "0"]


def test_a_turn_is_bounded_in_rows(cell: Cell, clock: ManualClock) -> None:
    """A burst takes several turns, so that other writers get their turn too; it ends by itself."""
    at_ms = clock.now_ms() + 10
    cell.schedule(*[at_ms] * 2_500)
    clock.advance(10)
    handed_over = [cell.scheduler.turn().handed_over for _ in range(4)]
    assert handed_over == [1_024, 1_024, 452, 0]
    assert [unpack_id(each.message_id) for each in cell.log()] == [f"{at_ms}#{number}" for number in range(2_500)]


def test_a_turn_is_bounded_in_bytes(cell: Cell, clock: ManualClock) -> None:
    """Large messages: a turn stops at the message that reaches the bound."""
    at_ms = clock.now_ms() + 10
    cell.schedule(*[at_ms] * 7, payload=bytes(3 * 1024 * 1024))
    clock.advance(10)
    assert [cell.scheduler.turn().handed_over for _ in range(4)] == [3, 3, 1, 0]


def test_a_turn_returns_the_time_of_the_next_one(cell: Cell, clock: ManualClock) -> None:
    """Nothing waits: nothing; something waits: its time; something was handed over: at once."""
    assert cell.scheduler.turn() == (0, None)
    at_ms = clock.now_ms() + 500
    cell.schedule(at_ms + 1, at_ms)
    assert cell.scheduler.turn() == (0, at_ms)
    clock.advance(500)
    assert cell.scheduler.turn() == (1, at_ms)
    assert cell.scheduler.turn() == (0, at_ms + 1)
    clock.advance(1)
    assert cell.scheduler.turn() == (1, at_ms + 1)
    assert cell.scheduler.turn() == (0, None)


def test_lateness_is_observed_when_the_message_is_durable(cell: Cell, clock: ManualClock) -> None:
    """In ms after the delivery time, one figure per message."""
    now_ms = clock.now_ms()
    cell.schedule(now_ms + 10, now_ms + 15)
    clock.advance(17)
    cell.scheduler.turn()
    assert cell.late_ms == [7, 2]


def test_a_message_not_on_disk_yet_is_not_handed_over(cell: Cell, clock: ManualClock) -> None:
    """From the first row on that is still being written: a power cut would take it, and its queue would have it."""
    first_ms = clock.now_ms() + 10
    cell.schedule(first_ms, first_ms + 1, first_ms + 2)
    clock.advance(20)
    keys = [int.from_bytes(key, "big") for key, _ in all_rows(cell.store, Family.TIMELINE)]
    with patch.object(cell.store.marks, "unsynced", lambda: keys[1]):
        cell.scheduler.turn()
    assert cell.times() == [first_ms]


def test_a_backlog_does_not_delay_due_messages(cell: Cell, clock: ManualClock) -> None:
    """After a long time away: overdue messages in their order, beside them each new one in the turn it is due in."""
    start_ms = clock.now_ms()
    overdue = [start_ms + 1 + number for number in range(5_000)]
    cell.schedule(*overdue)
    clock.advance(3_600_000)
    after = cell.reopened(cell.engine.reopened())
    live: list[int] = []
    for _ in range(4):
        live.append(clock.now_ms() + 5)
        after.schedule(live[-1])
        clock.advance(5)
        after.scheduler.turn()
        assert live[-1] in after.times()
    assert overdue[-1] not in after.times()
    after.drain()
    assert sorted(after.times()) == [*overdue, *live]
    assert [each for each in after.times() if each in set(overdue)] == overdue
    after.close()


def test_a_message_inside_a_flood_is_handed_over_once(cell: Cell, clock: ManualClock) -> None:
    """The backlog goes on over rows that the same turn took already."""
    began_ms, mails = clock.now_ms(), cell.topic_of("mails")
    cell.schedule(*(began_ms + at for at in range(1, 301)))
    among = Envelope("mails", "among", b"", deliver_at_ms=began_ms + 20)
    cell.store.commit([cell.placement.accept(mails, among, 0)])
    clock.advance(400)
    cell.drain()
    found = [each.message_id for each in cell.log()]
    assert len(found) == len(set(found)) == cell.scheduler.handed_over_total == 301
    assert cell.store.pending() == {}


def test_a_flood_of_many_reads_delays_no_later_due_message(
    cell: Cell, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What falls due goes with the next turn; what lies in the flood goes soon; each once, a message group in order."""
    monkeypatch.setattr(scheduler_module, "READS_PER_TURN_MAX", 2)
    monkeypatch.setattr(scheduler_module, "ROWS_PER_CURSOR_MAX", 200)
    began_ms, mails = clock.now_ms(), cell.topic_of("mails")

    def mail(name: str, at_ms: int, message_group: str = "") -> None:
        mailed = Envelope("mails", name, b"", deliver_at_ms=at_ms, message_group=message_group)
        cell.store.commit([cell.placement.accept(mails, mailed, 0)])

    def mailed() -> list[str]:
        rows = cell.store.scan(Family.QUEUE, pack_queue_key(mails.topic_id, 0, 0), b"\xff" * 14, limit=100).rows
        return [unpack_id(decode_queued(value).message_id) for _, value in rows]

    flood = [began_ms + 5] * 1_500
    cell.schedule(*flood)
    mail("first of a group", began_ms + 5, "g")
    mail("among", began_ms + 5)
    cell.schedule(*flood)
    mail("second of a group", began_ms + 11, "g")
    clock.advance(10)
    cell.scheduler.turn()
    mail("behind", began_ms + 11)
    clock.advance(1)
    cell.scheduler.turn()
    assert mailed() == ["behind"]
    for _ in range(2):
        cell.scheduler.turn()
    assert mailed() == ["behind", "among"]
    assert cell.scheduler.handed_over_total < len(flood)
    cell.drain()
    assert mailed() == ["behind", "among", "first of a group", "second of a group"]
    found = [each.message_id for each in cell.log()]
    assert len(found) == len(set(found)) == 2 * len(flood) + 4
    assert cell.scheduler.handed_over_total == 2 * len(flood) + 4
    assert cell.store.pending() == {}


@pytest.mark.parametrize("flood_ms", [1, 30], ids=["one millisecond", "thirty milliseconds"])
@pytest.mark.parametrize("rate", [None, 1_000], ids=["free", "slowed"])
def test_messages_due_before_a_flood_do_not_wait_for_its_end(
    cell: Cell, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, flood_ms: int, rate: int | None
) -> None:
    """What lies as far behind it as it is long comes within some turns, in order, though all of it is overdue."""
    monkeypatch.setattr(scheduler_module, "READS_PER_TURN_MAX", 2)
    monkeypatch.setattr(scheduler_module, "ROWS_PER_CURSOR_MAX", 200)
    began_ms, mails = clock.now_ms(), cell.topic_of("mails")
    if rate is not None:
        slowed = FlowChange(deliver_rate=rate).applied_to(mails, 0)
        cell.store.commit(cell.names.plan_change(slowed))
        cell.names.add_topic(slowed)
    cell.schedule(*(began_ms + 5 + number % flood_ms for number in range(6_000)))
    for number in range(20):
        mail = Envelope("mails", f"mail {number}", b"", deliver_at_ms=began_ms + 4 + 2 * flood_ms + number)
        cell.store.commit([cell.placement.accept(cell.names.topics["mails"], mail, 0)])
    clock.advance(100)
    for _ in range(7):
        cell.scheduler.turn()
    rows = cell.store.scan(Family.QUEUE, pack_queue_key(mails.topic_id, 0, 0), b"\xff" * 14, limit=100).rows
    assert [unpack_id(decode_queued(value).message_id) for _, value in rows] == [f"mail {n}" for n in range(20)]
    assert cell.store.pending()[cell.topic.topic_id] > 3_000
    cell.drain()
    assert cell.store.pending() == {}


def test_a_flood_without_end_is_skipped_by_bounded_steps(
    cell: Cell, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Danger: a step that doubles in each turn is a number of megabytes in the end."""
    monkeypatch.setattr(scheduler_module, "READS_PER_TURN_MAX", 1)
    monkeypatch.setattr(scheduler_module, "ROWS_PER_CURSOR_MAX", 200)
    steps: list[int] = []
    monkeypatch.setattr(cell.store.marks, "skip", lambda _, by_ms: steps.append(by_ms))
    cell.schedule(*[clock.now_ms() + 1] * 8_000)
    clock.advance(1)  # no clock that goes on: all of it is due in this very millisecond
    for _ in range(30):
        cell.scheduler.turn()
    assert len(steps) == 30
    assert max(steps) == scheduler_module.SKIP_MS_MAX


def test_a_flood_holds_up_no_topic_with_a_rate(cell: Cell, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """What falls due for one that is within its rate goes with its turn, whatever the backlog has of others."""
    monkeypatch.setattr(scheduler_module, "READS_PER_TURN_MAX", 2)
    monkeypatch.setattr(scheduler_module, "ROWS_PER_CURSOR_MAX", 200)
    began_ms, mails = clock.now_ms(), cell.topic_of("mails")
    for topic in (cell.topic, mails):
        slowed = FlowChange(deliver_rate=300).applied_to(topic, 0)
        cell.store.commit(cell.names.plan_change(slowed))
        cell.names.add_topic(slowed)
    cell.schedule(*[began_ms + 5] * 3_000)
    clock.advance(10)
    cell.scheduler.turn()
    for number in range(20):
        due_ms = clock.now_ms() + 1
        mail = Envelope("mails", f"mail {number}", b"", deliver_at_ms=due_ms)
        cell.store.commit([cell.placement.accept(cell.names.topics["mails"], mail, 0)])
        clock.advance(20)
        cell.scheduler.turn()
        start = pack_queue_key(mails.topic_id, 0, 0)
        came = cell.store.scan(Family.QUEUE, start, b"\xff" * 14, limit=100).rows
        assert len(came) == number + 1
    assert cell.store.pending()[cell.topic.topic_id] > 1_000
    assert len(cell.times()) < 600


@pytest.mark.parametrize("rate", [300, 1], ids=["within its rate", "beyond its rate"])
def test_a_topic_with_a_rate_keeps_its_order_where_the_backlog_ends(cell: Cell, clock: ManualClock, rate: int) -> None:
    """Danger: a turn that reads the last of the backlog has what fell due now in its hand already."""
    slowed = FlowChange(deliver_rate=rate).applied_to(cell.topic, 0)
    cell.store.commit(cell.names.plan_change(slowed))
    cell.names.add_topic(slowed)
    began_ms = clock.now_ms()
    cell.schedule(*(began_ms + LAG_MS * number for number in (1, 2, 3, 4)))
    clock.advance(4 * LAG_MS)
    for _ in range(20):
        cell.scheduler.turn()
        clock.advance(LAG_MS)
        assert cell.times() == sorted(cell.times())
    assert len(cell.times()) == 4


def test_a_file_unreadable_without_descriptors_is_read_soon_after(
    cell: Cell, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is wrong with it, and the moment is short."""
    waits: list[tuple[int, float]] = []
    scan, failures = cell.store.scan, [StoreNoDescriptors("too many open files")]

    def fails_once(family: Family, start: bytes, stop: bytes, **bounds: int) -> Rows:
        if failures:
            raise failures.pop()
        return scan(family, start, stop, **bounds)

    monkeypatch.setattr(cell.store, "scan", fails_once)
    monkeypatch.setattr(cell.store.marks, "wait", lambda *args: waits.append(args))
    cell.schedule(clock.now_ms() + 10)
    clock.advance(10)
    assert cell.scheduler.turn().handed_over == 0
    assert waits == [(0, 0.2)]
    assert cell.scheduler.turn().handed_over == 1


def test_turns_that_take_long_have_a_larger_share_for_the_backlog(
    cell: Cell, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine under load: what falls due in one turn goes with the next, and the backlog does not grow for ever."""
    start_ms = clock.now_ms()
    commit, turn_ms = cell.store.commit, 40

    def slow(*ops: Any, **more: Any) -> Any:  # noqa: ANN401 - as it is
        clock.advance(turn_ms)
        return commit(*ops, **more)

    monkeypatch.setattr(cell.store, "commit", slow)
    # in each turn a little more than one read takes: a flood, and a rest that is none
    per_ms = scheduler_module.ROWS_PER_CURSOR_MAX // turn_ms + 1
    cell.schedule(*(start_ms + 1 + number // per_ms for number in range(20 * turn_ms * per_ms)))
    while clock.now_ms() < start_ms + 20 * turn_ms:
        cell.scheduler.turn()
    assert max(cell.late_ms) < 4 * turn_ms


def test_a_backlog_is_handed_over_exactly_once_through_kills(cell: Cell, clock: ManualClock) -> None:
    """A kill after every turn: the next run goes on where the last one was durable."""
    start_ms = clock.now_ms()
    cell.schedule(*(start_ms + 1 + number for number in range(3_000)))
    clock.advance(3_600_000)
    run = cell
    for _ in range(4):
        run.scheduler.turn()
        run = run.reopened(run.engine.reopened())
    run.drain()
    assert run.times() == [start_ms + 1 + number for number in range(3_000)]
    run.close()


def test_a_run_begins_where_the_last_one_ended(cell: Cell, clock: ManualClock) -> None:
    """What was finished lies below the durable mark, so its tombstones are never walked again."""
    now_ms = clock.now_ms()
    cell.schedule(*(now_ms + 1 + number for number in range(100)))
    clock.advance(100)
    cell.drain()
    after = cell.reopened(cell.engine.reopened())
    assert after.store.marks.low() > timeline_mark(now_ms + 100, 0)
    after.close()


def test_a_step_forward_makes_everything_before_it_due(cell: Cell, clock: ManualClock) -> None:
    """In order, each once; what lies behind the step still waits."""
    now_ms = clock.now_ms()
    cell.schedule(now_ms + 7_200_001, now_ms + 60_000, now_ms + 3_600_000)
    clock.step_to(now_ms + 7_200_000)
    cell.drain()
    assert cell.times() == [now_ms + 60_000, now_ms + 3_600_000]
    clock.advance(1)
    cell.drain()
    assert cell.times()[2:] == [now_ms + 7_200_001]


@pytest.mark.parametrize("back_ms", [1, 2, LAG_MS, 3_600_000])
def test_a_step_back_holds_messages_until_their_time(cell: Cell, clock: ManualClock, back_ms: int) -> None:
    """New ones are due by the clock as it is now, the ones that were delivered are not delivered again."""
    now_ms = clock.now_ms()
    cell.schedule(now_ms + 10)
    clock.advance(10)
    cell.drain()
    clock.step_to(now_ms + 10 - back_ms)
    at_ms = clock.now_ms() + 1
    cell.schedule(at_ms, at_ms + 5)
    cell.drain()
    assert cell.times() == [now_ms + 10]
    clock.advance(1)
    cell.drain()
    assert cell.times() == [now_ms + 10, at_ms]
    clock.advance(5)
    cell.drain()
    assert cell.times() == [now_ms + 10, at_ms, at_ms + 5]


def test_a_step_back_behind_a_decision_calls_nothing_early(
    cell: Cell, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trail says when the scheduler decided: the writer may be late, as on a full disk, and the clock set back."""
    now_ms = clock.now_ms()
    cell.schedule(now_ms + 10)
    clock.advance(10)
    commit = cell.store.commit

    def late(ops: Sequence[Op], *, is_urgent: bool = False) -> list[Receipt]:
        clock.step_to(now_ms - 3_600_000)
        return commit(ops, is_urgent=is_urgent)

    monkeypatch.setattr(cell.store, "commit", late)
    cell.drain()
    (delivered,) = [each for each in read_outbox(cell.store) if each.event.kind is EventKind.DELIVERED]
    assert delivered.record.committed_at_ms == now_ms + 10
    monkeypatch.undo()
    cell.schedule(now_ms)
    assert [each.record.committed_at_ms for each in read_outbox(cell.store)][-1] == now_ms - 3_600_000


def test_a_step_back_outlives_a_kill(cell: Cell, clock: ManualClock) -> None:
    """The durable mark was lowered with the message that lies below it."""
    now_ms = clock.now_ms()
    cell.schedule(now_ms + 10)
    clock.advance(10)
    cell.drain()
    clock.step_to(now_ms - 3_600_000)
    cell.schedule(now_ms - 3_000_000)
    after = cell.reopened(cell.engine.crashed())
    clock.advance(600_000)
    after.drain()
    assert after.times() == [now_ms + 10, now_ms - 3_000_000]
    after.close()


@pytest.mark.parametrize("is_power_loss", [False, True])
@pytest.mark.parametrize("at_sync", [False, True])
@pytest.mark.parametrize("turns_before", range(5))
def test_a_crash_in_any_turn_neither_loses_nor_repeats(
    cell: Cell,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    turns_before: int,
    *,
    at_sync: bool,
    is_power_loss: bool,
) -> None:
    """At its write, or between its write and its sync."""
    monkeypatch.setattr(scheduler_module, "ROWS_PER_CURSOR_MAX", 3)
    now_ms = clock.now_ms()
    wanted = [now_ms + 1 + number for number in range(15)]
    cell.schedule(*wanted)
    clock.advance(20)
    for _ in range(turns_before):
        cell.scheduler.turn()
    cell.engine.fail_next_write, cell.engine.fail_next_sync = not at_sync, at_sync
    with pytest.raises(StoreFailed):
        cell.scheduler.turn()
    after = cell.reopened(cell.engine.crashed() if is_power_loss else cell.engine.reopened())
    after.drain()
    assert after.times() == wanted
    assert after.store.pending() == {}
    after.close()
