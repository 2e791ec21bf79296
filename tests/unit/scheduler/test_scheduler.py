"""The scheduler's turns on a manual clock, and its thread, over the store in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_adapter.clock import Clock, ManualClock, SystemClock
from broker_adapter.message import Envelope, unpack_id
from dmq.embedded.names import Names
from dmq.embedded.place import Placement
from dmq.errors import StoreCorrupt, StoreError, StoreFailed
from dmq.scheduler import scheduler as scheduler_module
from dmq.scheduler.scheduler import Scheduler
from dmq.store.keys import pack_queue_key, timeline_key, timeline_mark
from dmq.store.memory import MemoryEngine
from dmq.store.ops import Family, Op, Put
from dmq.store.record import QueuedMessage, decode_queued
from dmq.store.store import Store, StoreOptions

PATIENCE_S = 10.0
LAG_MS = 1_000  # beyond it, what is overdue is a backlog


class Cell:
    """A store in memory with one topic, and its scheduler."""

    def __init__(self, engine: MemoryEngine | None = None, clock: Clock | None = None, *, queues: int = 1) -> None:
        self.engine = engine or MemoryEngine()
        self.clock = clock or ManualClock()
        self.store = Store(self.engine, self.clock, StoreOptions())
        names = Names(self.store)
        if "orders" not in names.topics:
            topic, ops = names.plan_topic("orders", queues, 0)
            self.store.commit(ops)
            names.add_topic(topic)
        self.topic = names.topics["orders"]
        self.placement = Placement(names)
        self.failures: list[StoreError] = []
        self.failed = threading.Event()
        self.late_ms: list[int] = []
        self.scheduled = 0
        self.delivered = threading.Event()
        self.scheduler = Scheduler(self.store, self.placement, on_failure=self._fail, observe=self._observe)

    def _fail(self, error: StoreError) -> None:
        self.failures.append(error)
        self.failed.set()

    def _observe(self, late_ms: object) -> None:
        assert isinstance(late_ms, list)
        self.late_ms += late_ms
        self.delivered.set()

    def schedule(self, *deliver_at_ms: int, payload: bytes = b"") -> None:
        """Accept one message for each time, named by it, in one batch."""
        ops: list[Op] = []
        for at_ms in deliver_at_ms:
            envelope = Envelope("orders", f"{at_ms}#{self.scheduled}", payload, deliver_at_ms=at_ms)
            ops.append(self.placement.accept(self.topic, envelope, 0))
            self.scheduled += 1
        self.store.commit(ops)

    def log(self) -> list[QueuedMessage]:
        """What is in the queue, in its order."""
        rows = self.store.scan(
            Family.QUEUE, pack_queue_key(self.topic.topic_id, 0, 0), b"\xff" * 14, limit=1_000_000
        ).rows
        return [decode_queued(value) for _, value in rows]

    def times(self) -> list[int]:
        """Delivery times in the order of the queue."""
        return [each.deliver_at_ms for each in self.log()]

    def drain(self) -> int:
        """Take turns until one hands nothing over; say how many did."""
        turns = 0
        while self.scheduler.turn().handed_over:
            turns += 1
        return turns

    def reopened(self, engine: MemoryEngine) -> Cell:
        """The next run on what is left."""
        return Cell(engine, self.clock)

    def close(self) -> None:
        """End; a store that failed, or whose engine crashed, stays so."""
        self.scheduler.close()
        with suppress(StoreError):
            self.store.close()


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


# -- turns ------------------------------------------------------------------------------------------------------------


@given(delays=st.lists(st.integers(1, 3_000), min_size=1, max_size=30), naps=st.lists(st.integers(1, 1_500), max_size=8))
def test_exactly_what_is_due_is_handed_over_and_nothing_early(delays: list[int], naps: list[int]) -> None:
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


def test_a_turn_says_when_the_next_one_is_due(cell: Cell, clock: ManualClock) -> None:
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


# -- lanes ------------------------------------------------------------------------------------------------------------


def test_a_backlog_does_not_delay_what_is_due_now(cell: Cell, clock: ManualClock) -> None:
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


# -- the host's clock -------------------------------------------------------------------------------------------------


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
def test_a_step_back_holds_messages_until_the_clock_says_their_time(
    cell: Cell, clock: ManualClock, back_ms: int
) -> None:
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


# -- crashes ----------------------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(scheduler_module, "ROWS_PER_LANE_MAX", 3)
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


# -- the thread -------------------------------------------------------------------------------------------------------


@pytest.fixture
def sleepy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naps that would outlast the test: whatever happens in time was not found by looking now and then."""
    monkeypatch.setattr(scheduler_module, "NAP_MS_MAX", 3_600_000)


class Started(NamedTuple):
    """A running scheduler on the real clock."""

    cell: Cell
    clock: Clock


@pytest.fixture
def started() -> Iterator[Started]:
    clock = SystemClock()
    cell = Cell(clock=clock)
    cell.scheduler.start()
    yield Started(cell, clock)
    cell.close()


@pytest.mark.usefixtures("sleepy")
def test_an_earlier_message_wakes_the_thread(started: Started) -> None:
    """It sleeps towards the far one and delivers the near one in time."""
    cell, clock = started
    cell.schedule(clock.now_ms() + 3_000_000)
    assert not cell.delivered.wait(0.05)
    cell.schedule(clock.now_ms() + 30)
    assert cell.delivered.wait(PATIENCE_S)
    assert cell.late_ms[0] >= 0
    assert len(cell.times()) == 1


@pytest.mark.usefixtures("sleepy")
def test_a_message_on_an_idle_timeline_wakes_the_thread(started: Started) -> None:
    """There was nothing to sleep towards."""
    cell, clock = started
    assert not cell.delivered.wait(0.05)
    cell.schedule(clock.now_ms() + 1)
    assert cell.delivered.wait(PATIENCE_S)


@pytest.mark.usefixtures("sleepy")
def test_close_ends_a_nap(started: Started) -> None:
    """However long it was to be; and closing twice, or before the start, is fine."""
    cell, clock = started
    cell.schedule(clock.now_ms() + 3_000_000)
    assert not cell.delivered.wait(0.05)
    cell.scheduler.close()
    cell.scheduler.close()
    assert not cell.failures
    never = Cell()
    never.close()


def test_a_step_of_the_clock_is_noticed_within_a_nap() -> None:
    """Nobody wakes the thread; the cap of its naps bounds how long the step hurts."""
    clock = ManualClock()
    cell = Cell(clock=clock)
    cell.scheduler.start()
    cell.schedule(clock.now_ms() + 3_600_000)
    assert not cell.delivered.wait(0.05)
    clock.step_to(clock.now_ms() + 3_600_000)
    assert cell.delivered.wait(PATIENCE_S)
    cell.close()


@pytest.mark.parametrize("at_sync", [False, True])
def test_a_failing_store_ends_the_thread_and_is_reported(started: Started, *, at_sync: bool) -> None:
    """Once; nothing is handed over after it."""
    cell, clock = started
    cell.schedule(clock.now_ms() + 50)
    cell.engine.fail_next_write, cell.engine.fail_next_sync = not at_sync, at_sync
    assert cell.failed.wait(PATIENCE_S)
    assert [type(each) for each in cell.failures] == [StoreFailed]
    cell.scheduler.close()
    assert not cell.late_ms


@pytest.mark.parametrize("value", [b"", b"\xff" * 40, b"\x01" + bytes(20), None])
def test_an_entry_that_cannot_be_read_ends_the_thread_and_is_reported(started: Started, value: bytes | None) -> None:
    """Damage is loud: a scheduler that stopped without a word would look like an idle one."""
    cell, clock = started
    if value is None:  # a whole header, and a body cut short
        cell.schedule(clock.now_ms() + 3_600_000)
        rows = cell.store.scan(Family.TIMELINE, b"", b"\xff" * 17, limit=1).rows
        value = rows[0][1][:29]
    cell.store.commit([Put(Family.TIMELINE, timeline_key(timeline_mark(clock.now_ms() + 1, 10**6)), value)])
    assert cell.failed.wait(PATIENCE_S)
    assert [type(each) for each in cell.failures] == [StoreCorrupt]
    cell.store.close()


def test_a_bug_ends_the_thread_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only what the store raises."""
    cell = Cell(clock=SystemClock())
    monkeypatch.setattr(cell.placement, "hand_over", lambda rows, now_ms: 1 // 0)
    cell.scheduler.start()
    cell.schedule(cell.clock.now_ms() + 1)
    assert cell.failed.wait(PATIENCE_S)
    assert [type(each) for each in cell.failures] == [StoreFailed]
    assert "ZeroDivisionError" in str(cell.failures[0])
    cell.close()


def test_closing_the_store_under_the_thread_is_no_failure(started: Started) -> None:
    """The order of closing is the daemon's business; a late turn just ends."""
    cell, _ = started
    cell.store.close()
    cell.scheduler.close()
    assert not cell.failures
