"""Entries that somebody moves while the reader may have them in its hand: each ends once, at the time set last."""

from __future__ import annotations

from itertools import permutations

import pytest
from support.rigs.store.rows import SCOPE, all_rows, counted, events, hand_over, packed_id, recount, schedule
from support.rigs.store.workbench import NOW_MS, Bench

from dmq.store.schema.keys import Family, timeline_key, unpack_timeline_key
from dmq.store.schema.messages.index import EntryState, Receipt
from dmq.store.schema.messages.record import (
    WAITING_HEADER_BYTES,
    body_facts,
    decode_queued,
    decode_waiting,
    encode_waiting,
)
from dmq.store.writer.marks import Cursor
from dmq.store.writer.operations import NO_RECEIPT, Done, Emit, IfKnown, Op, Reschedule, Withdraw

pytestmark = pytest.mark.contract
LATER_MS = 50
Row = tuple[bytes, bytes]


def moved(row: Row, at_ms: int) -> Reschedule:
    """What somebody asks for who read the row."""
    key, value = row
    entry, rest = decode_waiting(value), value[WAITING_HEADER_BYTES:]
    record = encode_waiting(entry.kind, 0, entry.topic_id, entry.scope, at_ms, 0, rest)
    ids = entry.scope, body_facts(rest)[0], entry.deliver_at_ms
    return Reschedule(key, *ids, at_ms, record, b"moved", if_gone=IfKnown.ANSWER, by_reader=False)


def cancelled(row: Row) -> Withdraw:
    key, value = row
    entry = decode_waiting(value)
    ids = entry.scope, body_facts(value[WAITING_HEADER_BYTES:])[0], entry.deliver_at_ms
    return Withdraw(key, *ids, len(value), event=b"cancelled", is_remembered=True, if_gone=IfKnown.ANSWER)


def read(bench: Bench) -> list[Row]:
    """The beginning of a turn of the reader: take what is due now."""
    marks, now_ms = bench.store.marks, bench.clock.now_ms()
    marks.split_backlog(now_ms)
    rows: list[Row] = []
    for which in Cursor:
        claim = marks.claim(which, now_ms)
        if claim.start < claim.stop:
            rows += bench.store.scan(
                Family.TIMELINE, timeline_key(claim.start), timeline_key(claim.stop), limit=100
            ).rows
    return rows


def turn_end(bench: Bench, rows: list[Row]) -> list[Op]:
    """Its end."""
    return [*(hand_over(*row) for row in rows), Done(bench.store.marks.low())]


def drain(bench: Bench) -> None:
    """Let all come that still waits."""
    bench.clock.advance(10 * LATER_MS)
    while rows := read(bench):
        bench.store.commit(turn_end(bench, rows), is_urgent=True)
    assert all_rows(bench.store, Family.TIMELINE) == []
    assert counted(bench.store, [SCOPE]) == recount(bench.store)


def row_of(bench: Bench, number: int) -> Row | None:
    """The row of a message as it lies now."""
    found = bench.store.find(SCOPE, packed_id(number))
    if found is None or found.state is not EntryState.WAITING:
        return None
    (value,) = bench.store.get_many(Family.TIMELINE, [found.key])
    return (found.key, value) if value is not None else None


def together(bench: Bench, units: list[list[Op]]) -> list[list[Receipt]]:
    """Commit units in one batch."""
    bench.gate.hold()
    before = bench.submit(Emit(b"before"))
    bench.gate.await_sync()
    waiters = [bench.submit(*unit, is_urgent=True) for unit in units]
    bench.gate.let_go()
    assert before.ended().error is None
    return [waiter.ended().receipts or [] for waiter in waiters]


@pytest.mark.parametrize("is_one_batch", [True, False], ids=["in one batch", "one after another"])
def test_every_order_of_events_on_an_entry(bench: Bench, *, is_one_batch: bool) -> None:
    """Cancelled, moved forth, moved back, left, and handed over by a reader that read it before, in every order.

    It is handed over or cancelled, once, and handed over with the time that was set last.
    """
    for number, order in enumerate(dict.fromkeys("".join(each)[:4] for each in permutations("clesh")), start=1):
        due_ms = bench.clock.now_ms() + 5
        times_ms = {"l": due_ms + LATER_MS, "e": due_ms - 4, "s": due_ms}
        bench.store.commit([schedule(number, due_ms)])
        bench.clock.advance(5)
        (held,) = read(bench)

        def units(row: Row | None, what: str) -> list[Op]:
            if what == "h":
                return turn_end(bench, [held])  # noqa: B023
            assert row is not None
            return [cancelled(row)] if what == "c" else [moved(row, times_ms[what])]  # noqa: B023

        told: list[Receipt] = []
        set_ms = due_ms
        if is_one_batch:
            told = [each[0] for each in together(bench, [units(held, what) for what in order])]
        for what in order if not is_one_batch else ():
            row = row_of(bench, number)
            told.append(bench.store.commit(units(row, what), is_urgent=True)[0] if row or what == "h" else NO_RECEIPT)
        if "h" not in order:
            bench.store.commit(turn_end(bench, [held]), is_urgent=True)
        drain(bench)
        for what, receipt in zip(order, told, strict=True):
            set_ms = times_ms[what] if receipt.state is EntryState.WAITING else set_ms
        found = bench.store.find(SCOPE, packed_id(number), with_withdrawn=True)
        assert found is not None
        own = [each.event for each in events(bench.store) if each.entry_sequence == found.sequence]
        ends = [each for each in own if each in {b"delivered", b"cancelled"}]
        assert len(ends) == 1, order
        assert own[-1:] == ends, f"{order}: something is told behind its end"
        is_cancelled = "c" in order and told[order.index("c")].state is EntryState.WITHDRAWN
        assert is_cancelled == (ends == [b"cancelled"]) == (found.state is EntryState.WITHDRAWN), order
        if ends == [b"delivered"]:
            lies = [
                row
                for row in all_rows(bench.store, Family.QUEUE)
                if decode_queued(row[1]).message_id == packed_id(number)
            ]
            assert [decode_queued(value).deliver_at_ms for _, value in lies] == [set_ms], order


def test_a_moved_entry_in_the_readers_hand_comes_at_its_new_time(bench: Bench) -> None:
    """Neither now nor twice; also if it comes back to where the reader read it, which is told apart."""
    bench.store.commit([schedule(1, NOW_MS + 5), schedule(2, NOW_MS + 5)])
    bench.clock.advance(5)
    first, second = read(bench)
    (away, _) = bench.store.commit([moved(first, NOW_MS + LATER_MS), moved(second, NOW_MS + LATER_MS)])
    assert (away.state, away.sequence, away.at_ms) == (EntryState.WAITING, 1, NOW_MS + LATER_MS)
    (_, row) = all_rows(bench.store, Family.TIMELINE)
    bench.clock.step_to(NOW_MS)  # or nothing could lie there again
    (back,) = bench.store.commit([moved(row, NOW_MS + 5)])
    assert back.at_ms == NOW_MS + 6
    told = bench.store.commit(turn_end(bench, [first, second]), is_urgent=True)
    assert told[:-1] == [NO_RECEIPT, NO_RECEIPT]
    bench.clock.step_to(NOW_MS + 6)
    rows = read(bench)
    assert [unpack_timeline_key(key) for key, _ in rows] == [(NOW_MS + 6, 2)]
    bench.store.commit(turn_end(bench, rows), is_urgent=True)
    drain(bench)
    assert len(all_rows(bench.store, Family.QUEUE)) == 2


def test_an_entry_without_a_holder_may_return_to_its_time(bench: Bench) -> None:
    """However often it is moved forth and back, it comes to the millisecond; one that stays has no event."""
    bench.store.commit([schedule(1, NOW_MS + LATER_MS)])
    for at_ms in (NOW_MS + 70, NOW_MS + LATER_MS, NOW_MS + 70, NOW_MS + LATER_MS, NOW_MS + LATER_MS):
        row = row_of(bench, 1)
        assert row is not None
        (told,) = bench.store.commit([moved(row, at_ms)])
        assert (told.state, told.at_ms) == (EntryState.WAITING, at_ms)
    assert [each.event for each in events(bench.store)].count(b"moved") == 4
    bench.clock.advance(LATER_MS)
    rows = read(bench)
    assert [unpack_timeline_key(key)[0] for key, _ in rows] == [NOW_MS + LATER_MS]
    (delivered, _) = bench.store.commit(turn_end(bench, rows), is_urgent=True)
    assert delivered.state is EntryState.DELIVERED
    drain(bench)


def test_a_restart_reads_the_moved_messages(bench: Bench) -> None:
    """A kill leaves the entry under one time, with counts that fit."""
    bench.store.commit([schedule(1, NOW_MS + LATER_MS), schedule(2, NOW_MS + LATER_MS)])
    first, second = all_rows(bench.store, Family.TIMELINE)
    bench.store.commit([moved(first, NOW_MS - 10)])
    bench.store.commit([moved(second, NOW_MS + 2 * LATER_MS)])
    bench.kill()
    assert counted(bench.store, [SCOPE]) == recount(bench.store)
    bench.clock.advance(2)
    rows = read(bench)
    assert len(rows) == 1
    bench.store.commit(turn_end(bench, rows), is_urgent=True)
    drain(bench)
    assert len(all_rows(bench.store, Family.QUEUE)) == 2
