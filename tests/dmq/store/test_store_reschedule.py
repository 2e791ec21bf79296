"""An entry that waits again under another time: the same entry, never lost and never there twice."""

from __future__ import annotations

import pytest
from support.rigs.store.rows import SCOPE, all_rows, counted, events, packed_id, recount, schedule
from support.rigs.store.workbench import NOW_MS, Bench

from dmq.store.schema.keys import Family, timeline_key, unpack_timeline_key
from dmq.store.schema.messages.index import EntryState, Receipt
from dmq.store.schema.messages.record import WAITING_HEADER_BYTES, EntryKind, body_facts, decode_waiting, encode_waiting
from dmq.store.writer.marks import Cursor
from dmq.store.writer.operations import NO_RECEIPT, Append, Done, Op, Reschedule, Schedule, Withdraw

pytestmark = pytest.mark.contract
AGAIN_MS = 30_000
Rows = list[tuple[bytes, bytes]]


def again(row: tuple[bytes, bytes], at_ms: int, *, event: bytes = b"again") -> Reschedule:
    """The op that lets a row wait until ``at_ms``."""
    key, value = row
    entry, rest = decode_waiting(value), value[WAITING_HEADER_BYTES:]
    record = encode_waiting(EntryKind.DELAYED, entry.retry_count + 1, entry.topic_id, entry.scope, at_ms, 0, rest)
    return Reschedule(key, entry.scope, body_facts(rest)[0], entry.deliver_at_ms, at_ms, record, event)


def withdrawn(row: tuple[bytes, bytes], *instead: Append | Schedule) -> Withdraw:
    """The op that takes a row away."""
    key, value = row
    entry = decode_waiting(value)
    message_id = body_facts(value[WAITING_HEADER_BYTES:])[0]
    return Withdraw(key, entry.scope, message_id, entry.deliver_at_ms, len(value), instead)


def read(bench: Bench) -> Rows:
    """What the reader does first: take what is due now."""
    claim = bench.store.marks.claim(Cursor.LIVE, bench.clock.now_ms())
    return bench.store.scan(Family.TIMELINE, timeline_key(claim.start), timeline_key(claim.stop), limit=100).rows


def hand_in(bench: Bench, ops: list[Op]) -> list[Receipt]:
    """What it does then."""
    return bench.store.commit([*ops, Done(bench.store.marks.low())], is_urgent=True)[:-1]


def is_whole(bench: Bench) -> bool:
    """Whether rows, counts and index agree: every row is found by its id, under its key."""
    for key, value in all_rows(bench.store, Family.TIMELINE):
        entry = decode_waiting(value)
        found = bench.store.find(entry.scope, body_facts(value[WAITING_HEADER_BYTES:])[0])
        at_ms, sequence = unpack_timeline_key(key)
        assert found == Receipt(EntryState.WAITING, sequence, -1, -1, at_ms, True)
    return counted(bench.store, [SCOPE]) == recount(bench.store)


def test_it_stays_the_same_entry(bench: Bench) -> None:
    """One row, under the new time and the old sequence, with its event; a repeated send finds it."""
    bench.store.commit([schedule(1, NOW_MS + 5)])
    bench.clock.advance(5)
    (row,) = read(bench)
    (told,) = hand_in(bench, [again(row, NOW_MS + AGAIN_MS)])
    assert told == Receipt(EntryState.WAITING, 1, -1, -1, NOW_MS + AGAIN_MS, False)
    ((key, value),) = all_rows(bench.store, Family.TIMELINE)
    assert (unpack_timeline_key(key), decode_waiting(value).retry_count) == ((NOW_MS + AGAIN_MS, 1), 1)
    assert is_whole(bench)
    assert [(each.event, each.entry_sequence) for each in events(bench.store)][-1] == (b"again", 1)
    (repeated,) = bench.store.commit([schedule(1, NOW_MS)])
    assert (repeated.sequence, repeated.repeated) == (1, True)
    assert read(bench) == []
    bench.clock.advance(AGAIN_MS)
    assert read(bench) == [(key, value)]


def test_it_comes_even_if_its_new_time_is_over(bench: Bench) -> None:
    """Its old sequence never puts it behind the cursor, also not within the cursor's own millisecond."""
    bench.store.commit([schedule(number, NOW_MS + 5) for number in range(1, 5)])
    bench.clock.advance(5)
    taken = read(bench)
    for at_ms in (0, NOW_MS, NOW_MS + 5, NOW_MS + 6):
        bench.store.marks.retreat(Cursor.LIVE, int.from_bytes(taken[-1][0], "big") + 1)
        first, *others = taken
        hand_in(bench, [again(first, at_ms, event=b""), *(again(each, at_ms) for each in others)])
        assert is_whole(bench)
        bench.clock.advance(5)
        taken = read(bench)
        assert len(taken) == 4
        bench.clock.advance(5)


def test_the_reader_waits_for_a_batch_that_moves_an_entry(bench: Bench) -> None:
    """Until it is synced the new row is not there to be read, and behind that it is not passed."""
    bench.store.commit([schedule(1, NOW_MS + 5), schedule(2, NOW_MS + 5)])
    bench.clock.advance(5)
    first, second = read(bench)
    hand_in(bench, [withdrawn(second)])
    bench.gate.hold()
    waiter = bench.submit(again(first, NOW_MS + 10), Done(bench.store.marks.low()), is_urgent=True)
    bench.gate.await_sync()
    bench.clock.advance(20)
    assert read(bench) == []
    bench.gate.let_go()
    assert waiter.ended().error is None
    ((key, _),) = read(bench)
    assert unpack_timeline_key(key) == (NOW_MS + 10, 1)


@pytest.mark.parametrize("is_together", [True, False])
def test_the_first_withdrawal_wins(bench: Bench, *, is_together: bool) -> None:
    """What was withdrawn while the reader had it in its hand does not wait again."""
    bench.store.commit([schedule(1, NOW_MS + 5)])
    bench.clock.advance(5)
    (row,) = read(bench)
    if is_together:
        bench.gate.hold()
        before = bench.submit()
        bench.gate.await_sync()
        units = [bench.submit(withdrawn(row)), bench.submit(again(row, NOW_MS + AGAIN_MS))]
        bench.gate.let_go()
        assert before.ended().error is None
        told = [(unit.ended().receipts or [NO_RECEIPT])[0] for unit in units]
    else:
        told = [*bench.store.commit([withdrawn(row)]), *hand_in(bench, [again(row, NOW_MS + AGAIN_MS)])]
    assert [each.state for each in told] == [EntryState.WITHDRAWN, None]
    assert all_rows(bench.store, Family.TIMELINE) == []
    assert is_whole(bench)


def test_it_is_withdrawn_under_its_new_key_only(bench: Bench) -> None:
    """Who read it before it moved does nothing, in the same batch too, and looks again."""
    bench.store.commit([schedule(1, NOW_MS + 5)])
    bench.clock.advance(5)
    (row,) = read(bench)
    told = bench.store.commit([again(row, NOW_MS + AGAIN_MS), withdrawn(row)])
    assert [each.state for each in told] == [EntryState.WAITING, None]
    assert bench.store.commit([withdrawn(row)]) == [NO_RECEIPT]
    (moved,) = all_rows(bench.store, Family.TIMELINE)
    later = schedule(1, NOW_MS + 40)
    (told_now,) = bench.store.commit([withdrawn(moved, later)])
    assert told_now.state is EntryState.WITHDRAWN
    ((key, value),) = all_rows(bench.store, Family.TIMELINE)
    assert (unpack_timeline_key(key)[0], value) == (NOW_MS + 40, later.record)
    assert is_whole(bench)
    found = bench.store.find(SCOPE, packed_id(1))
    assert found is not None
    assert found.sequence != 1


def test_a_successor_is_not_reported_missing(bench: Bench) -> None:
    """An entry that is scheduled in place of another one is read, also if its time is over."""
    bench.store.commit([schedule(1, NOW_MS + AGAIN_MS)])
    assert read(bench) == []
    (row,) = all_rows(bench.store, Family.TIMELINE)
    bench.store.commit([withdrawn(row, schedule(2, NOW_MS - 5))])
    bench.clock.advance(1)
    ((_, value),) = read(bench)
    assert body_facts(value[WAITING_HEADER_BYTES:])[0] == packed_id(2)
    assert is_whole(bench)


def test_a_restart_reads_from_a_mark_that_is_not_above_it(bench: Bench) -> None:
    """The clock stepped back: what is moved to a time below the mark lowers it, durably."""
    bench.store.commit([schedule(1, NOW_MS + 5)])
    bench.clock.advance(3_600_000)
    (row,) = read(bench)
    bench.clock.step_to(NOW_MS)
    hand_in(bench, [again(row, NOW_MS + AGAIN_MS)])
    bench.kill()
    bench.clock.step_to(NOW_MS + AGAIN_MS)
    assert len(read(bench)) == 1
