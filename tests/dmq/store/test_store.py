"""What the store promises, on both engines: each op, the counters, the outbox, what opening finds."""

from __future__ import annotations

import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.effort import EFFORT
from support.models.store.outbox import read_outbox
from support.rigs.store.rows import SCOPE, TOPIC, all_rows, append, counted, events, packed_id, recount, schedule
from support.rigs.store.workbench import NOW_MS, Bench

from dmq.errors import StoreCorrupt
from dmq.store.schema.keys import (
    FORMAT_VERSION,
    META_DONE,
    META_FORMAT,
    META_HOUR,
    META_TOTAL,
    Family,
    hour_range,
    meta_range,
    pack_queue_key,
    pack_u64,
    unpack_timeline_key,
)
from dmq.store.schema.messages.index import EntryState, Receipt
from dmq.store.schema.messages.record import decode_queued, encode_body, encode_queued
from dmq.store.store import StoreOptions
from dmq.store.writer import counts
from dmq.store.writer.operations import NO_RECEIPT, Delete, Done, Emit, Op, Put
from dmq.trail.events import EventKind, cell_event, decode_event, gap_count, gap_event

pytestmark = pytest.mark.contract
WINDOW_MS = 15 * 60_000


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


def test_done_is_durable_and_never_above_the_read_rows(bench: Bench) -> None:
    """``done`` is what a restart reads from; asked for too much, the writer holds it to the reader's cursor."""
    bench.store.commit([schedule(1, NOW_MS + 1_000), schedule(2, NOW_MS + 5_000)])
    bench.clock.advance(1_000)
    bench.deliver()
    low = bench.store.marks.low()
    assert low >> 64 == NOW_MS + 1_001
    bench.store.commit([Done(2**120)])
    assert int.from_bytes(bench.store.get_many(Family.META, [META_DONE])[0] or b"", "big") == low
    assert bench.kill().marks.low() == low


def test_a_row_below_done_after_a_clock_step_is_not_lost_by_a_kill(bench: Bench) -> None:
    """The clock steps back, a message is due before what was done already: the durable mark goes back with it."""
    bench.store.commit([schedule(1, NOW_MS + 1_000)])
    bench.clock.advance(1_000)
    bench.deliver()
    bench.clock.step_to(NOW_MS - 5_000)
    bench.store.commit([schedule(2, NOW_MS - 4_000)])
    bench.kill()
    bench.clock.advance(2_000)
    assert [receipt.sequence for receipt in bench.deliver()] == [2]


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
def test_counters_match_a_recount(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, histories: list[list[tuple[str, int, int]]]
) -> None:
    """After every history of sends, repeats, hand-overs, clock steps and restarts; so is the total of events."""
    monkeypatch.setattr(counts, "_CACHED_MAX", 2)
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


def test_a_count_of_zero_has_no_row(bench: Bench) -> None:
    """Of a scope and of an hour: a store does not grow by every hour in which something once was due."""
    bench.store.commit([schedule(n, NOW_MS + n * 3_600_000) for n in range(3)])
    assert len(bench.store.scan(Family.META, *hour_range(SCOPE, 0, 2**60), limit=9).rows) == 3
    bench.clock.advance(3 * 3_600_000)
    bench.deliver()
    assert bench.store.scan(Family.META, *hour_range(SCOPE, 0, 2**60), limit=9).rows == []
    assert bench.store.scan(Family.META, *meta_range(META_TOTAL), limit=9).rows == []


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
    next_hour = minute - minute % 3_600_000 + 3_600_000
    bench.store.commit([schedule(4, next_hour)])
    assert [each.until_ms for each in bench.store.due_counts(SCOPE, minute + 240_000, 2**48, limit=1)] == [
        next_hour + 60_000
    ], "the first hour has none behind that"


def test_the_last_minute_in_which_something_is_due_is_found(bench: Bench) -> None:
    """The one that begins then included, in that hour or any before it; no other scope's."""
    hour = NOW_MS - NOW_MS % 3_600_000 + 48 * 3_600_000
    bench.store.commit([schedule(n, hour + at) for n, at in enumerate((5_000, 120_000, 50 * 60_000))])
    bench.store.commit([schedule(9, hour + 180_000, scope=SCOPE + 1)])
    for from_ms, found_ms in (
        (hour - 1, 0),
        (hour, hour + 60_000),
        (hour + 119_999, hour + 60_000),
        (hour + 120_000, hour + 180_000),
        (hour + 49 * 60_000, hour + 180_000),
        (hour + 30 * 3_600_000, hour + 51 * 60_000),
    ):
        assert bench.store.last_due_ms(SCOPE, from_ms) == found_ms
    bench.store.commit([schedule(10, hour + 5 * 3_600_000 + 59 * 60_000)])
    assert bench.store.last_due_ms(SCOPE, hour + 5 * 3_600_000) == hour + 51 * 60_000
    bench.store.commit([schedule(11, hour + 4 * 3_600_000)])
    assert bench.store.last_due_ms(SCOPE, hour + 5 * 3_600_000) == hour + 4 * 3_600_000 + 60_000, "in the hour before"


def test_counts_of_format_1_are_taken_over(bench: Bench) -> None:
    """It had a row per minute; opening rewrites them, once, and they go on from there."""
    minute = NOW_MS - NOW_MS % 60_000 + 3_600_000
    bench.store.commit([schedule(n, minute + n * 20_000) for n in range(300)])
    bench.store.commit([schedule(n, minute, scope=SCOPE + 1) for n in range(300, 303)])
    scopes = (SCOPE, SCOPE + 1)
    hours = [Delete(Family.META, key) for key, _ in all_rows(bench.store, Family.META) if key[:1] == META_HOUR]
    _, by_minute = recount(bench.store)
    old = [
        Put(Family.META, struct.pack(">cIQ", b"c", scope, until_ms // 60_000 - 1), pack_u64(count))
        for (scope, until_ms), count in by_minute.items()
    ]
    bench.store.commit([*hours, *old, Put(Family.META, META_FORMAT, pack_u64(1))])
    assert counted(bench.store, scopes) != recount(bench.store), "nothing reads the old rows"
    bench.restart()
    bench.store.commit([schedule(n, minute + n * 20_000) for n in range(303, 400)])
    assert counted(bench.store, scopes) == recount(bench.store)
    bench.restart()
    assert counted(bench.store, scopes) == recount(bench.store)
    assert not [key for key, _ in all_rows(bench.store, Family.META) if key[:1] == b"c"]


def test_a_store_of_format_2_is_taken_over(bench: Bench) -> None:
    """Its rows are read as they are; from then on it says 3, so that no older daemon reads a long tag wrongly."""
    short = encode_queued(1, NOW_MS, 0, encode_body(b"\0old", b"t" * 255, b"g", b"payload"))
    key = pack_queue_key(TOPIC, 0, 0)
    bench.store.commit([append(1), Put(Family.QUEUE, key, short), Put(Family.META, META_FORMAT, pack_u64(2))])
    bench.restart()
    ((_, value),) = all_rows(bench.store, Family.QUEUE)
    message = decode_queued(value)
    assert (message.message_id, message.tag, message.message_group) == (b"\0old", "t" * 255, "g")
    ((_, version),) = [row for row in all_rows(bench.store, Family.META) if row[0] == META_FORMAT]
    assert version == pack_u64(FORMAT_VERSION)


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


def test_the_outbox_is_bounded_and_reports_the_cut(bench: Bench) -> None:
    """Beyond the bound the oldest rows go; the gap events together name every missing sequence exactly once."""
    bound = 4_000
    bench.restart(StoreOptions(outbox_bytes_max=bound, gap_event=gap_event))
    cut: dict[int, int] = {}
    state = bench.store.outbox_state
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
