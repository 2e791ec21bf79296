"""What the store promises, on both engines: idempotent, ordered, counted, and silent about nothing it could not write."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.effort import EFFORT
from support.stores import (
    PATIENCE_S,
    SCOPE,
    TOPIC,
    GatedEngine,
    all_rows,
    append,
    counted,
    events,
    hand_over,
    meta_u64,
    packed_id,
    recount,
    schedule,
)

from broker_adapter.clock import ManualClock
from dmq.audit.events import EventKind, cell_event, decode_event, gap_count, gap_event
from dmq.audit.outbox import read_outbox
from dmq.errors import FormatUnsupported, StoreBusy, StoreClosed, StoreCorrupt, StoreError, StoreFailed
from dmq.store.cell import FORMAT_VERSION
from dmq.store.commit import OPS_PER_BATCH_MAX, Unit
from dmq.store.engine import Engine
from dmq.store.keys import (
    META_DONE,
    META_FORMAT,
    META_SEQUENCE,
    pack_queue_key,
    pack_u64,
    timeline_key,
    unpack_timeline_key,
)
from dmq.store.marks import Lane
from dmq.store.memory import MemoryEngine
from dmq.store.ops import NO_RECEIPT, Delete, Done, Emit, EntryState, Family, Op, Put, Receipt
from dmq.store.rocks import RocksEngine
from dmq.store.store import Store, StoreOptions

NOW_MS = 1_700_000_000_000
WINDOW_MS = 15 * 60_000


class Disk(Protocol):
    """Where a store's rows are when nobody has it open."""

    def engine(self) -> Engine:
        """Open what is there."""
        ...

    def kill(self) -> None:
        """Make the next ``engine`` see what SIGKILL would have left."""
        ...


class RocksDisk:
    def __init__(self, path: Path) -> None:
        self.path = path

    def engine(self) -> Engine:
        return RocksEngine(self.path)

    def kill(self) -> None:
        """Copy the files as they are: the page cache is what SIGKILL leaves."""
        image = self.path.with_name(self.path.name + "+")
        image.mkdir()
        for file in self.path.iterdir():
            if file.name != "LOCK":
                (image / file.name).write_bytes(file.read_bytes())
        self.path = image


class MemoryDisk:
    def __init__(self) -> None:
        self.last = MemoryEngine()

    def engine(self) -> Engine:
        self.last = self.last.reopened()
        return self.last

    def kill(self) -> None:
        """``reopened`` sees what was written."""


class Bench:
    """A clock, a disk, and the store that is open."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.clock = ManualClock(NOW_MS)
        self.options = StoreOptions(gap_event=gap_event)
        self.failures: list[StoreError] = []
        self._opened: list[Store] = []
        self.open()

    def open(self) -> Store:
        self.gate = GatedEngine(self.disk.engine())
        self.store = Store(self.gate, self.clock, self.options)
        self.store.on_failure = self.failures.append
        self._opened.append(self.store)
        return self.store

    def restart(self, options: StoreOptions | None = None) -> Store:
        """Close in order and open again."""
        self.store.close()
        self.options = options or self.options
        return self.open()

    def kill(self) -> Store:
        """End as SIGKILL does and open again; the store that was open goes on by itself, unseen."""
        self.disk.kill()
        self.gate.let_go()
        return self.open()

    def close(self) -> None:
        self.gate.let_go()
        for store in self._opened:
            with suppress(StoreError):
                store.close()

    def submit(self, *ops: Op, is_urgent: bool = False) -> Waiter:
        return Waiter(self.store, ops, is_urgent=is_urgent)

    def deliver(self) -> list[Receipt]:
        """What the scheduler does: hand over what is due now, in order."""
        now_ms = self.clock.now_ms()
        marks = self.store.marks
        claim = marks.claim(Lane.LIVE, now_ms)
        rows = self.store.scan(Family.TIMELINE, timeline_key(claim.start), timeline_key(claim.stop), limit=10_000).rows
        ops: list[Op] = [hand_over(key, value) for key, value in rows]
        return self.store.commit([*ops, Done(marks.low())])[:-1]


class Waiter:
    """A unit that was submitted, and what it was told in the end: ``Store.commit`` without blocking."""

    def __init__(self, store: Store, ops: tuple[Op, ...], *, is_urgent: bool) -> None:
        self.receipts: list[Receipt] | None = None
        self.error: StoreError | None = None
        self._told = threading.Event()
        store.writer.submit(Unit(ops, self._settle, is_direct=True), is_urgent=is_urgent)

    def _settle(self, unit: Unit) -> None:
        self.receipts, self.error = (unit.receipts, None) if unit.error is None else (None, unit.error)
        self._told.set()

    def ended(self) -> Waiter:
        assert self._told.wait(PATIENCE_S), "nobody told the waiter"
        return self


@pytest.fixture(params=["rocks", "memory"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(RocksDisk(tmp_path / "db") if request.param == "rocks" else MemoryDisk())
    yield made
    made.close()


# -- what each op does -------------------------------------------------------------------------------------------------


def test_schedule_puts_one_row_in_the_order_of_delivery(bench: Bench) -> None:
    """The writer assigns sequences in order of acceptance, and keys in order of delivery."""
    receipts = bench.store.commit(
        [schedule(1, NOW_MS + 2_000), schedule(2, NOW_MS + 1_000), schedule(3, NOW_MS + 1_000)]
    )
    assert [receipt[:5] for receipt in receipts] == [
        (EntryState.WAITING, 1, -1, -1, NOW_MS + 2_000),
        (EntryState.WAITING, 2, -1, -1, NOW_MS + 1_000),
        (EntryState.WAITING, 3, -1, -1, NOW_MS + 1_000),
    ]
    assert not any(receipt.repeated for receipt in receipts)
    keys = [unpack_timeline_key(key) for key, _ in all_rows(bench.store, Family.TIMELINE)]
    assert keys == [(NOW_MS + 1_000, 2), (NOW_MS + 1_000, 3), (NOW_MS + 2_000, 1)]
    assert bench.store.next_due_ms() == NOW_MS + 1_000


def test_append_gives_offsets_without_gaps_per_queue(bench: Bench) -> None:
    """Across batches and restarts, by one seek to the queue's last row."""
    first = bench.store.commit([append(1), append(2, queue_id=1), append(3)])
    second = bench.store.commit([append(4), append(5, queue_id=1)])
    bench.restart()
    third = bench.store.commit([append(6), append(7, queue_id=2)])
    assert [(each.queue_id, each.queue_offset) for each in first + second + third] == [
        (0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3), (2, 0),
    ]  # fmt: skip
    assert {each.state for each in first + second + third} == {EntryState.QUEUED}
    assert [bench.store.queue_end(TOPIC, queue_id) for queue_id in range(4)] == [4, 2, 1, 0]
    rows = dict(all_rows(bench.store, Family.QUEUE))
    assert set(rows) == {
        pack_queue_key(TOPIC, q, offset) for q, end in ((0, 4), (1, 2), (2, 1)) for offset in range(end)
    }


def test_hand_over_moves_a_row_to_its_queue(bench: Bench) -> None:
    """Timeline row gone, queue row there, index finished, counted down, event with sequence and offset: one batch."""
    bench.store.commit([schedule(1, NOW_MS + 1_000), append(2)])
    bench.clock.advance(1_000)
    writes = bench.gate.calls.count("write")
    (receipt,) = bench.deliver()
    assert bench.gate.calls.count("write") == writes + 1
    assert receipt == Receipt(EntryState.DELIVERED, 1, 0, 1, NOW_MS + 1_000, False)
    assert all_rows(bench.store, Family.TIMELINE) == []
    assert [value[-9:] for _, value in all_rows(bench.store, Family.QUEUE)] == [b"message 2", b"message 1"]
    assert bench.store.find(SCOPE, packed_id(1)) == receipt._replace(repeated=True)
    assert bench.store.pending() == {}
    event = events(bench.store)[-1]
    assert (event.event, event.entry_sequence, event.queue_offset) == (b"delivered", 1, 1)


def test_done_is_durable_and_never_above_what_was_read(bench: Bench) -> None:
    """``done`` is what a restart reads from; asked for too much, the writer holds it to the reader's cursor."""
    bench.store.commit([schedule(1, NOW_MS + 1_000), schedule(2, NOW_MS + 5_000)])
    bench.clock.advance(1_000)
    bench.deliver()
    low = bench.store.marks.low()
    assert low >> 64 == NOW_MS + 1_001
    bench.store.commit([Done(2**120)])
    assert int.from_bytes(bench.store.get_many(Family.META, [META_DONE])[0] or b"", "big") == low
    assert bench.kill().marks.low() == low


def test_put_and_delete_are_absolute_and_the_last_one_wins(bench: Bench) -> None:
    """Within a unit and across the units of a batch."""
    bench.store.commit([Put(Family.GROUP, b"a", b"1"), Put(Family.GROUP, b"b", b"1")])
    unit: list[Op] = [Put(Family.GROUP, b"a", b"2"), Delete(Family.GROUP, b"b"), Put(Family.GROUP, b"c", b"1")]
    receipts = bench.store.commit(
        [*unit, Delete(Family.GROUP, b"c"), Delete(Family.GROUP, b"a"), Put(Family.GROUP, b"a", b"3")]
    )
    assert receipts == [NO_RECEIPT] * 6
    assert all_rows(bench.store, Family.GROUP) == [(b"a", b"3")]


def test_units_get_their_own_receipts(bench: Bench) -> None:
    """Units of many callers share a batch and a sync; each hears of its own ops, in order of acceptance."""
    bench.gate.hold()
    first = bench.submit(append(0))
    bench.gate.await_sync()
    others = [bench.submit(append(n), schedule(100 + n, NOW_MS + n)) for n in range(1, 6)]
    syncs = bench.gate.calls.count("sync")
    bench.gate.let_go()
    assert [waiter.ended().receipts is not None for waiter in (first, *others)] == [True] * 6
    assert bench.gate.calls.count("sync") == syncs + 1, "five units, one sync"
    for number, waiter in enumerate(others, start=1):
        assert waiter.receipts is not None
        assert [(each.queue_offset, each.sequence) for each in waiter.receipts] == [
            (number, 2 * number),
            (-1, 2 * number + 1),
        ]


# -- idempotency -------------------------------------------------------------------------------------------------------


def test_a_repeat_within_a_batch_gets_the_first_answer(bench: Bench) -> None:
    """Also when one of both is due at once and the other later: the first one counts."""
    receipts = bench.store.commit(
        [append(1), append(1), schedule(1, NOW_MS + 1), schedule(2, NOW_MS + 5), schedule(2, NOW_MS + 9), append(2)]
    )
    assert receipts[1] == receipts[2] == receipts[0]._replace(repeated=True)
    assert receipts[4] == receipts[5] == receipts[3]._replace(repeated=True)
    assert len(all_rows(bench.store, Family.QUEUE)) == len(all_rows(bench.store, Family.TIMELINE)) == 1
    assert [event.event for event in events(bench.store)] == [b"queued", b"scheduled"]
    assert bench.store.pending() == {SCOPE: 1}


def test_a_repeat_in_a_later_batch_gets_the_first_answer(bench: Bench) -> None:
    """Nothing is written for it: no row, no event, no sequence."""
    first = bench.store.commit([append(1), schedule(2, NOW_MS + 60_000)])
    before = [all_rows(bench.store, family) for family in Family]
    assert bench.store.commit([append(1), schedule(2, NOW_MS + 70_000)]) == [
        each._replace(repeated=True) for each in first
    ]
    assert [all_rows(bench.store, family) for family in Family] == before


@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_repeat_after_a_restart_gets_the_first_answer(bench: Bench, end: Literal["close", "kill"]) -> None:
    """However the process ended."""
    first = bench.store.commit([append(1), schedule(2, NOW_MS + 60_000)])
    store = bench.restart() if end == "close" else bench.kill()
    assert store.commit([append(1), schedule(2, NOW_MS + 60_000)]) == [each._replace(repeated=True) for each in first]
    assert store.commit([append(3)])[0].sequence == 3, "sequences go on"


def test_a_repeat_of_an_overdue_message_gets_the_first_answer(bench: Bench) -> None:
    """Its key is moved up to the reader's cursor; the answer is the same all the same."""
    bench.clock.advance(5_000)
    bench.deliver()
    (first,) = bench.store.commit([schedule(1, NOW_MS)])
    assert bench.store.commit([schedule(1, NOW_MS)]) == [first._replace(repeated=True)]
    assert bench.store.find(SCOPE, packed_id(1)) == first._replace(repeated=True)


def test_a_repeat_after_delivery_hears_of_it(bench: Bench) -> None:
    """A send repeated after its message was handed over is answered with where it went; no second message."""
    bench.store.commit([schedule(1, NOW_MS + 1_000)])
    bench.clock.advance(1_000)
    (delivered,) = bench.deliver()
    assert bench.store.commit([schedule(1, NOW_MS + 1_000)]) == [delivered._replace(repeated=True)]
    assert bench.kill().commit([append(1)]) == [delivered._replace(repeated=True)]
    assert len(all_rows(bench.store, Family.QUEUE)) == 1


def test_scopes_are_apart(bench: Bench) -> None:
    """One message can wait for two groups at once."""
    bench.store.commit([schedule(1, NOW_MS + 1, scope=1), schedule(1, NOW_MS + 2, scope=2), append(1, scope=3)])
    assert bench.store.pending() == {1: 1, 2: 1}
    assert [found.state if (found := bench.store.find(scope, packed_id(1))) else None for scope in (1, 2, 3, 4)] == [
        EntryState.WAITING, EntryState.WAITING, EntryState.QUEUED, None,
    ]  # fmt: skip


def test_a_finished_message_is_known_for_the_window_and_forgotten_after_two(bench: Bench) -> None:
    """Traffic every minute: known for at least one window, unknown after two; a waiting one is known as long as it waits."""
    bench.store.commit([append(1), schedule(2, NOW_MS + 10 * WINDOW_MS)])
    number = 100
    while bench.clock.now_ms() < NOW_MS + WINDOW_MS:
        assert bench.store.commit([append(1)])[0].repeated
        bench.clock.advance(60_000)
        number += 1
        bench.store.commit([append(number)])
    while bench.clock.now_ms() < NOW_MS + 2 * WINDOW_MS + 60_000:
        bench.clock.advance(60_000)
        number += 1
        bench.store.commit([append(number)])
    assert bench.store.find(SCOPE, packed_id(1)) is None
    assert bench.store.commit([schedule(2, NOW_MS)])[0].repeated
    assert not bench.store.commit([append(1)])[0].repeated


def test_old_generations_are_dropped_whole(bench: Bench) -> None:
    """One deletion of a range per window, whatever the number of messages; and they are gone from the disk's view."""
    for _ in range(6):
        bench.store.commit([append(number + bench.clock.now_ms()) for number in range(50)])
        bench.clock.advance(WINDOW_MS)
    bench.store.commit([append(1)])
    assert len(all_rows(bench.store, Family.INDEX)) <= 2 * 50
    ranges = [each for batch in bench.gate.batches for each in batch.ranges]
    deletes = [each for batch in bench.gate.batches for each in batch.deletes if each[0] == Family.INDEX]
    assert 4 <= len(ranges) <= 6
    assert {family for family, _, _ in ranges} == {Family.INDEX}
    assert deletes == []


def test_a_clock_stepping_back_forgets_nothing(bench: Bench) -> None:
    """A step back by a day: what was known stays known for a whole window from there."""
    bench.store.commit([append(1)])
    bench.clock.advance(WINDOW_MS // 2)
    bench.clock.step_to(NOW_MS - 86_400_000)
    for _ in range(14):
        assert bench.store.commit([append(1)])[0].repeated
        bench.clock.advance(60_000)


def test_a_clock_stepping_forward_forgets_nothing_at_once(bench: Bench) -> None:
    """A step forward by a day, or a quiet day: the repeat that comes first after it is still known."""
    bench.store.commit([append(1)])
    bench.clock.step_to(NOW_MS + 86_400_000)
    assert bench.store.commit([append(1)])[0].repeated


# -- counters ----------------------------------------------------------------------------------------------------------


_STEP = st.one_of(
    st.tuples(st.just("schedule"), st.integers(0, 8), st.integers(-90_000, 240_000)),
    st.tuples(st.just("append"), st.integers(0, 8), st.just(0)),
    st.tuples(st.just("deliver"), st.just(0), st.just(0)),
    st.tuples(st.just("advance"), st.just(0), st.integers(0, 120_000)),
    st.tuples(st.just("step"), st.just(0), st.integers(-200_000, 200_000)),
    st.tuples(st.just("restart"), st.just(0), st.just(0)),
)


@settings(max_examples=10 * EFFORT, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(histories=st.lists(st.lists(_STEP, max_size=12), min_size=1, max_size=4))
def test_counters_are_what_a_recount_says(bench: Bench, histories: list[list[tuple[str, int, int]]]) -> None:
    """After every history of sends, repeats, hand-overs, clock steps and restarts; so is the total of events."""
    for steps in histories:
        for kind, number, by in steps:
            now_ms = bench.clock.now_ms()
            if kind == "schedule":
                bench.store.commit(
                    [schedule(number, now_ms + by, scope=number % 3), schedule(number + 1, now_ms, scope=1)]
                )
            elif kind == "append":
                bench.store.commit([append(number, scope=number % 3)])
            elif kind == "deliver":
                bench.deliver()
            elif kind == "advance":
                bench.clock.advance(by)
            elif kind == "step":
                bench.clock.step_to(now_ms + by)
            else:
                bench.restart()
        assert counted(bench.store, range(3)) == recount(bench.store)
        assert bench.store.outbox_state.next_sequence - 1 == len(events(bench.store))


def test_due_counts_give_the_buckets_asked_for(bench: Bench) -> None:
    """Buckets of a minute that touch the range, empty ones left out, no more than ``limit``, no other scope's."""
    minute = NOW_MS - NOW_MS % 60_000
    bench.store.commit([schedule(n, minute + at) for n, at in enumerate((0, 59_999, 60_000, 180_000))])
    bench.store.commit([schedule(9, minute, scope=SCOPE + 1)])
    every = [(minute + 60_000, 2), (minute + 120_000, 1), (minute + 240_000, 1)]  # the ends of the buckets
    assert [tuple(each) for each in bench.store.due_counts(SCOPE, minute, minute + 180_001)] == every
    assert [tuple(each) for each in bench.store.due_counts(SCOPE, minute, minute + 180_000)] == every[:2]
    assert [tuple(each) for each in bench.store.due_counts(SCOPE, minute + 60_000, minute + 60_001)] == every[1:2]
    assert [tuple(each) for each in bench.store.due_counts(SCOPE, 0, 2**48, limit=1)] == every[:1]


# -- the outbox --------------------------------------------------------------------------------------------------------


def test_events_leave_in_order_without_a_gap(bench: Bench) -> None:
    """One row per batch, sequences from 1, whatever restarts come between; the block says run and time."""
    bench.store.commit([append(1), Emit(b"extra"), schedule(2, NOW_MS + 1_000)])
    bench.clock.advance(1_000)
    bench.deliver()
    bench.kill()
    bench.store.commit([append(3), append(1)])
    found = events(bench.store)
    assert [event.sequence for event in found] == [1, 2, 3, 4, 5]
    assert [event.event for event in found] == [b"queued", b"extra", b"scheduled", b"delivered", b"queued"]
    assert [event.boot for event in found] == [1, 1, 1, 1, 2]
    assert [event.committed_at_ms - NOW_MS for event in found] == [0, 0, 0, 1_000, 1_000]
    state = bench.store.outbox_state
    assert (state.first_sequence, state.next_sequence) == (1, 6)
    assert state.stored_bytes == sum(len(value) for _, value in all_rows(bench.store, Family.AUDIT))


def test_the_outbox_is_bounded_and_says_what_it_cut(bench: Bench) -> None:
    """Beyond the bound the oldest rows go; the gap events together name every missing sequence exactly once."""
    bound = 4_000
    bench.restart(StoreOptions(outbox_bytes_max=bound, gap_event=gap_event))
    cut: dict[int, int] = {}
    for number in range(300):
        bench.store.commit([Emit(b"\7" * 100), Emit(b"\7" * 30)])
        if number % 100 == 50:
            bench.kill()
        for record in events(bench.store):
            if record.event[0] == EventKind.GAP:
                event = decode_event(record.event)
                cut[event.time_ms] = gap_count(event)
        state = bench.store.outbox_state
        assert state.stored_bytes == sum(len(value) for _, value in all_rows(bench.store, Family.AUDIT))
        assert state.stored_bytes <= bound + 500
    missing = [sequence for first, count in sorted(cut.items()) for sequence in range(first, first + count)]
    assert missing == list(range(1, state.first_sequence)), "every missing event, once"
    left = events(bench.store)
    assert [record.sequence for record in left] == list(range(state.first_sequence, state.next_sequence))


def test_the_trail_is_read_in_order_and_a_hole_is_loud(bench: Bench) -> None:
    """Reading yields every event; a row that is missing in the middle raises instead of being passed over."""
    kinds = [EventKind.OPENED, EventKind.CLOSED]
    for number in range(1_000):
        bench.store.commit([Emit(cell_event(kinds[number % 2]))])
    trail = list(read_outbox(bench.store))
    assert [each.record.sequence for each in trail] == list(range(1, 1_001))
    assert [each.event.kind for each in trail] == kinds * 500
    bench.store.commit([Delete(Family.AUDIT, pack_u64(700))])
    with pytest.raises(StoreCorrupt, match="700"):
        list(read_outbox(bench.store))


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_beyond_the_bound_nothing_is_half_done(bench: Bench) -> None:
    """A unit that does not fit is refused whole; those before it are kept; urgent ones are taken; later all is well."""
    bench.restart(StoreOptions(pending_ops_max=10, gap_event=gap_event))
    bench.gate.hold()
    first = bench.submit(append(0))
    bench.gate.await_sync()
    waiting = [bench.submit(*(append(10 * n + each) for each in range(3))) for n in range(1, 4)]
    with pytest.raises(StoreBusy):
        bench.store.commit([append(900), append(901)])
    fits = bench.submit(append(41))
    with pytest.raises(StoreBusy):
        bench.store.commit([append(902)])
    urgent = bench.submit(append(51), append(52), is_urgent=True)
    bench.gate.let_go()
    for waiter in (first, *waiting, fits, urgent):
        assert waiter.ended().error is None
    stored = {bytes(value[23:40]) for _, value in all_rows(bench.store, Family.QUEUE)}
    assert stored == {packed_id(n) for n in (0, 10, 11, 12, 20, 21, 22, 30, 31, 32, 41, 51, 52)}
    assert len(events(bench.store)) == len(stored)
    assert not bench.store.commit([append(900), append(901)])[0].repeated, "room again, and nothing was known of it"
    assert bench.store.writer.pending_ops == 0


def test_bytes_are_bounded_too(bench: Bench) -> None:
    """By the records that wait; one unit alone is taken whatever its size."""
    bench.restart(StoreOptions(pending_bytes_max=1_000, gap_event=gap_event))
    big = append(1)._replace(record=bytes(5_000))
    bench.gate.hold()
    first = bench.submit(append(0))
    bench.gate.await_sync()
    alone = bench.submit(big)
    with pytest.raises(StoreBusy):
        bench.store.commit([append(2)])
    bench.gate.let_go()
    assert first.ended().error is alone.ended().error is None
    assert len(all_rows(bench.store, Family.QUEUE)) == 2


def test_a_batch_is_bounded_and_units_stay_whole(bench: Bench) -> None:
    """What waits is committed in several batches, never with a unit in two of them."""
    bench.gate.hold()
    waiters = [bench.submit(append(0))]
    bench.gate.await_sync()
    half = OPS_PER_BATCH_MAX // 2
    waiters += [bench.submit(*(Emit(b"e") for _ in range(half + 1))) for _ in range(3)]
    writes = bench.gate.calls.count("write")
    bench.gate.let_go()
    for waiter in waiters:
        assert waiter.ended().error is None
    assert bench.gate.calls.count("write") == writes + 3
    assert len(events(bench.store)) == 1 + 3 * (half + 1)


# -- fail-stop ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["write", "sync"])
@pytest.mark.parametrize(
    "error", [StoreFailed("IO error"), OSError(5, "Input/output error"), StoreCorrupt("bad block")]
)
def test_a_failure_is_final(bench: Bench, where: Literal["write", "sync"], error: Exception) -> None:
    """Every waiter is told, nothing is accepted or synced after, ``on_failure`` hears it once, nothing acknowledged is lost."""
    kept = bench.store.commit([append(1), schedule(2, NOW_MS + 1)])
    bench.gate.hold()
    held = bench.submit(append(3))
    bench.gate.await_sync()
    waiting = [bench.submit(append(4)), bench.submit(append(5), is_urgent=True)]
    bench.gate.error = error
    bench.gate.fails = where
    bench.gate.let_go()
    failing = waiting if where == "write" else [held, *waiting]
    for waiter in failing:
        assert isinstance(waiter.ended().error, StoreFailed)
    assert isinstance(bench.store.failure, type(error) if isinstance(error, StoreError) else StoreFailed)
    bench.store.writer._thread.join(PATIENCE_S)
    assert bench.failures == [bench.store.failure]

    calls = len(bench.gate.calls)
    bench.gate.fails = None
    for is_urgent in (False, True):
        with pytest.raises(StoreFailed):
            bench.store.commit([append(6)], is_urgent=is_urgent)
    bench.store.close()
    assert bench.gate.calls[calls:] == ["close"], "no write and no sync is tried again"
    assert len(bench.failures) == 1

    store = bench.open()
    assert store.recovery.was_closed is False
    assert store.commit([append(1), schedule(2, NOW_MS + 1)]) == [each._replace(repeated=True) for each in kept]
    assert store.find(SCOPE, packed_id(4)) is store.find(SCOPE, packed_id(6)) is None
    assert counted(store, [SCOPE]) == recount(store)


def test_after_a_power_loss_what_was_synced_is_there() -> None:
    """In memory, where power can be lost: the unsynced batch is gone as a whole, the synced ones are there."""
    engine = MemoryEngine()
    store = Store(engine, ManualClock(NOW_MS), StoreOptions())
    store.commit([append(1), schedule(2, NOW_MS + 1)])
    engine.fail_next_sync = True
    with pytest.raises(StoreFailed):
        store.commit([append(3), schedule(4, NOW_MS + 1)])
    store.close()
    store = Store(engine.crashed(), ManualClock(NOW_MS), StoreOptions())
    found = [store.find(SCOPE, packed_id(number)) for number in (1, 2, 3, 4)]
    assert [each is not None for each in found] == [True, True, False, False]
    assert counted(store, [SCOPE]) == recount(store)
    assert store.commit([append(5)])[0][1:4] == (3, 0, 1), "sequence and offset go on from there"
    store.close()


def test_an_op_that_cannot_be_written_fails_the_store_loudly(bench: Bench) -> None:
    """What the parts above must never submit: not half a batch, not a thread that is gone while waiters wait."""
    with pytest.raises(StoreFailed):
        bench.store.commit([append(1), schedule(2, NOW_MS)._replace(deliver_at_ms=2**70)])
    assert bench.store.failure is not None
    bench.store.close()
    assert all_rows(bench.open(), Family.QUEUE) == []


# -- durability, asyncio, the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("durability", "syncs"), [("disk", 5), ("process", 0)])
def test_durability_decides_about_the_sync(bench: Bench, durability: Literal["disk", "process"], syncs: int) -> None:
    """``disk``: one sync after each write; ``process``: none until the close. SIGKILL loses nothing in both."""
    bench.restart(StoreOptions(durability=durability, gap_event=gap_event))
    calls = len(bench.gate.calls)
    for number in range(5):
        bench.store.commit([append(number)])
    assert bench.gate.calls[calls:] == (["write", "sync"] * 5 if syncs else ["write"] * 5)
    assert len(all_rows(bench.kill(), Family.QUEUE)) == 5


def test_commit_async_settles_on_the_loop_with_one_wake_up_per_batch(bench: Bench) -> None:
    """A hundred futures of one batch cost the loop one call; ends of queues are told before the futures are."""
    told: list[tuple[str, object]] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        wake_ups = 0
        call_soon_threadsafe = loop.call_soon_threadsafe

        def counting(*args: object, **kwargs: object) -> object:
            nonlocal wake_ups
            wake_ups += 1
            return call_soon_threadsafe(*args, **kwargs)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = counting  # type: ignore[method-assign, assignment]
        loop_thread = threading.get_ident()
        bench.store.attach(
            loop, lambda ends: told.append(("ends", ends if threading.get_ident() == loop_thread else None))
        )
        bench.gate.hold()
        first = bench.store.commit_async([append(0)])
        await asyncio.to_thread(bench.gate.await_sync)
        before = wake_ups
        futures = [bench.store.commit_async([append(number)]) for number in range(1, 101)]
        for future in futures:
            future.add_done_callback(lambda _: told.append(("future", None)))
        futures[50].cancel()
        assert not first.done()
        await asyncio.to_thread(bench.gate.let_go)
        await asyncio.wait_for(asyncio.gather(first, *futures, return_exceptions=True), PATIENCE_S)
        assert wake_ups - before <= 2 + 2, "one for each of two batches (and one per to_thread)"
        assert [future.result()[0].queue_offset for future in futures if not future.cancelled()] == [
            offset for offset in range(1, 101) if offset != 51
        ]

    asyncio.run(scenario())
    batches = [each for each in told if each[0] == "ends"]
    assert batches == [("ends", {(TOPIC, 0): 1}), ("ends", {(TOPIC, 0): 101})]
    assert told.index(batches[1]) < len(told) - 99, "ends first"
    assert bench.store.queue_end(TOPIC, 0) == 101, "cancelling does not undo the write"


def test_commit_async_fails_every_future(bench: Bench) -> None:
    """Those in the batch and those behind it, on the loop."""

    async def scenario() -> None:
        bench.store.attach(asyncio.get_running_loop(), lambda _: None)
        bench.gate.hold()
        futures = [bench.store.commit_async([append(0)])]
        await asyncio.to_thread(bench.gate.await_sync)
        futures += [bench.store.commit_async([append(number)]) for number in range(1, 5)]
        bench.gate.fails = "sync"
        bench.gate.let_go()
        done = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), PATIENCE_S)
        assert [type(each) for each in done] == [StoreFailed] * 5
        with pytest.raises(StoreFailed):
            bench.store.commit_async([append(9)])

    asyncio.run(scenario())


def test_a_closed_loop_does_not_stop_the_writer(bench: Bench) -> None:
    """Nobody waits any more; what was written stays written and the store goes on."""

    async def scenario() -> None:
        bench.store.attach(asyncio.get_running_loop(), lambda _: None)
        bench.gate.hold()
        bench.store.commit_async([append(0)])

    asyncio.run(scenario())
    bench.gate.let_go()
    bench.store.commit([append(1)])
    assert bench.store.queue_end(TOPIC, 0) == 2
    assert bench.store.failure is None


def test_close_commits_what_was_accepted(bench: Bench) -> None:
    """Units that wait are committed and answered before the end; later ones are refused; closing twice is allowed."""
    bench.gate.hold()
    waiters = [bench.submit(append(0))]
    bench.gate.await_sync()
    waiters += [bench.submit(append(number)) for number in range(1, 4)]
    closing = threading.Thread(target=bench.store.close)
    closing.start()
    bench.gate.let_go()
    closing.join(PATIENCE_S)
    for waiter in waiters:
        assert waiter.ended().error is None
    bench.store.close()
    for use in (lambda: bench.store.commit([append(9)]), lambda: bench.store.scan(Family.QUEUE, b"", b"\xff", limit=1)):
        with pytest.raises(StoreClosed):
            use()
    store = bench.open()
    assert store.recovery.was_closed
    assert store.queue_end(TOPIC, 0) == 4


def test_recovery_says_what_it_found(bench: Bench) -> None:
    """New, closed in order or not, the last sequence; the run is counted up each time."""
    first = bench.store
    assert (first.recovery.is_new, first.recovery.was_closed, first.recovery.sequence, first.boot) == (
        True,
        False,
        0,
        1,
    )
    first.commit([append(1), append(2)])
    second = bench.restart()
    assert (second.recovery.is_new, second.recovery.was_closed, second.recovery.sequence, second.boot) == (
        False,
        True,
        2,
        2,
    )
    third = bench.kill()
    assert (third.recovery.is_new, third.recovery.was_closed, third.recovery.sequence, third.boot) == (
        False,
        False,
        2,
        3,
    )
    assert third.recovery.cut_bytes == 0


def test_opening_writes_no_message_and_reads_none(bench: Bench) -> None:
    """A reopened store answers at once from its figures; the sequence row is there although nothing was accepted."""
    bench.store.commit([append(1)])
    store = bench.restart()
    assert meta_u64(store, META_SEQUENCE) == 1
    assert meta_u64(store, META_FORMAT) == FORMAT_VERSION
    assert bench.gate.calls == ["write", "sync"]


def test_a_newer_format_is_refused(bench: Bench) -> None:
    """By the row in the database, which says so even when the marker file was replaced."""
    bench.store.commit([Put(Family.META, META_FORMAT, pack_u64(FORMAT_VERSION + 1))])
    bench.store.close()
    engine = bench.disk.engine()
    with pytest.raises(FormatUnsupported, match=str(FORMAT_VERSION + 1)):
        Store(engine, bench.clock, bench.options)
    engine.close()


def test_rows_without_a_format_are_damage(bench: Bench) -> None:
    """A database that lost its meta rows must not look like a new one."""
    bench.store.commit([append(1), Delete(Family.META, META_FORMAT)])
    bench.store.close()
    engine = bench.disk.engine()
    with pytest.raises(StoreCorrupt, match="format"):
        Store(engine, bench.clock, bench.options)
    engine.close()


@pytest.mark.parametrize("key", [META_FORMAT, b"B", META_SEQUENCE, META_DONE, b"O", b"G"])
def test_a_damaged_figure_is_damage(bench: Bench, key: bytes) -> None:
    """A meta row of the wrong length raises our error, which names damage, and nothing else."""
    bench.store.commit([append(1), Done(1)])
    bench.store.commit([Put(Family.META, key, b"\0\1\2")])
    bench.store.close()
    engine = bench.disk.engine()
    with pytest.raises(StoreCorrupt):
        Store(engine, bench.clock, bench.options)
    engine.close()
