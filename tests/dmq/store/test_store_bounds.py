"""What a topic may have waiting, decided by the writer; and the bytes that wait, counted, on both engines."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from threading import Thread

import pytest
from support.rigs.store.rows import SCOPE, all_rows, append, counted, hand_over, recount, recount_bytes, schedule
from support.rigs.store.workbench import NOW_MS, Bench

from dmq.errors import OverBound
from dmq.store.schema.keys import META_BYTES_HEAD, Family, pack_pair
from dmq.store.schema.messages.index import Receipt
from dmq.store.schema.messages.record import (
    EntryKind,
    HalfMessageState,
    Terms,
    WaitingEntry,
    decode_half,
    encode_half,
    waiting_bytes,
    whole_half_bytes,
)
from dmq.store.writer.operations import Bound, IfKnown, Op, Put, Withdraw
from dmq.store.writer.writer import Unit

pytestmark = pytest.mark.contract
HALF = SCOPE + 1
LATER_MS = NOW_MS + 90_000
SIZE = waiting_bytes(schedule(1, LATER_MS).record)


def bound(entries: int | None = None, size: int | None = None, *, is_closed: bool = False) -> Bound:
    return Bound((SCOPE, HALF), entries, size, is_closed=is_closed)


def sends(*numbers: int, scope: int = SCOPE) -> list[Op]:
    """What a send asks for."""
    return [schedule(number, LATER_MS, scope=scope)._replace(if_known=IfKnown.ANSWER) for number in numbers]


def refused(bench: Bench, ops: list[Op]) -> OverBound:
    """A unit is refused, and there is no trace of it."""
    before = [all_rows(bench.store, family) for family in Family]
    with pytest.raises(OverBound) as caught:
        bench.store.commit(ops)
    assert [all_rows(bench.store, family) for family in Family] == before
    return caught.value


def test_no_more_calls_wait_than_the_bound(bench: Bench) -> None:
    """All of a unit or nothing; what is told says what waits, what was asked for, and when the next is due."""
    bench.store.commit([*sends(1, 2), bound(3)])
    error = refused(bench, [*sends(3, 4), bound(3)])
    assert (error.scope, error.what, error.waiting, error.more, error.limit) == (SCOPE, "entries", 2, 2, 3)
    assert error.next_due_ms == LATER_MS // 60_000 * 60_000 + 60_000
    bench.store.commit([*sends(3), bound(3)])
    assert refused(bench, [*sends(4), bound(3)]).waiting == 3


def test_a_message_queued_at_once_does_not_wait(bench: Bench) -> None:
    """So it is not refused by how much may wait, but it is where nothing new is accepted."""
    bench.store.commit([*sends(1), bound(1)])
    bench.store.commit([append(2), bound(1)])
    assert refused(bench, [append(3), bound(is_closed=True)]).what == "closed"


def test_a_repeat_is_answered_under_any_backlog(bench: Bench) -> None:
    """Alone, twice in a unit, and where nothing new is accepted; beside something new it is refused with it."""
    (told, _) = bench.store.commit([*sends(1), bound(1)])
    again = told._replace(repeated=True)
    assert bench.store.commit([*sends(1, 1), bound(1)])[:2] == [again, again]
    assert bench.store.commit([*sends(1), bound(is_closed=True)])[0] == again
    assert refused(bench, [*sends(1, 2), bound(1)]).more == 1
    assert bench.store.commit([*sends(2, 2), bound(2)])[1].repeated


def test_scopes_of_a_bound_count_together_and_no_other(bench: Bench) -> None:
    """Half messages count for their topic; what waits elsewhere does not."""
    bench.store.commit([*sends(1), *sends(2, scope=HALF), *sends(3, scope=HALF + 1)])
    assert refused(bench, [*sends(4), bound(2)]).waiting == 2
    assert refused(bench, [*sends(4, scope=HALF), bound(2)]).waiting == 2
    bench.store.commit([*sends(4, scope=HALF + 1), bound(2)])


def test_bytes_are_a_bound_of_their_own(bench: Bench) -> None:
    """To the byte."""
    bench.store.commit([*sends(1), bound(9, SIZE)])
    error = refused(bench, [*sends(2), bound(9, 2 * SIZE - 1)])
    assert (error.what, error.waiting, error.more, error.limit) == ("bytes", SIZE, SIZE, 2 * SIZE - 1)
    bench.store.commit([*sends(2), bound(2, 2 * SIZE)])


def test_units_of_one_batch_see_each_other(bench: Bench) -> None:
    """Of three that come at once two are let through, and what one takes away makes room for the next."""
    (told, _) = bench.store.commit([*sends(1), bound(2)])
    gone = Withdraw(told.key, SCOPE, schedule(1, 0).message_id, LATER_MS, SIZE)
    found: list[Future[list[Receipt]]] = [Future() for _ in range(4)]

    def settle(each: Future[list[Receipt]], unit: Unit) -> None:
        each.set_exception(unit.error) if unit.error is not None else each.set_result(unit.receipts)

    writer = bench.store.writer
    units: list[list[Op]] = [[*sends(2), bound(2)], [*sends(3), bound(2)], [gone], [*sends(4), bound(2)]]
    with writer._lock:  # the writer takes none before all are there
        for each, ops in zip(found, units, strict=True):
            writer._pending.append(Unit(ops, partial(settle, each)))
            writer._pending_ops += len(ops)
            writer._direct_pending += 1
        writer._wake.notify()
    errors = [each.exception(timeout=60) for each in found]
    assert [type(each) for each in errors] == [type(None), OverBound, type(None), type(None)]
    assert bench.store.pending() == {SCOPE: 2}
    assert counted(bench.store, [SCOPE]) == recount(bench.store)


def test_threads_that_race_for_room_get_exactly_the_room_there_is(bench: Bench) -> None:
    """However many units are on their way at a time."""
    let_through: list[int] = []

    def send(first: int) -> None:
        for number in range(first, first + 20):
            try:
                bench.store.commit([*sends(number), bound(50)])
            except OverBound:
                continue
            let_through.append(number)

    threads = [Thread(target=send, args=(100 * number,)) for number in range(1, 9)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(let_through) == bench.store.pending()[SCOPE] == 50
    assert refused(bench, [*sends(1), bound(50)]).waiting == 50


@pytest.mark.parametrize("is_killed", [False, True])
def test_bytes_are_exact_over_a_restart(bench: Bench, is_killed: bool) -> None:
    """After a clean end and after a kill, while messages come, are handed over, and are withdrawn."""
    bench.store.commit([*sends(1, 2, 3)])
    bench.kill() if is_killed else bench.restart()
    assert bench.store.pending_bytes() == recount_bytes(bench.store) == {SCOPE: 3 * SIZE}
    rows = all_rows(bench.store, Family.TIMELINE)
    bench.store.commit([hand_over(*rows[0])])
    bench.store.commit([Withdraw(rows[1][0], SCOPE, schedule(2, 0).message_id, LATER_MS, SIZE)])
    assert bench.store.pending_bytes() == recount_bytes(bench.store) == {SCOPE: SIZE}
    assert refused(bench, [*sends(5), bound(None, 2 * SIZE - 1)]).waiting == SIZE


def test_messages_from_before_bytes_were_counted_count_none(bench: Bench) -> None:
    """A run of an earlier build in between has the counting begin anew; leaving, it takes nothing from the others."""
    bench.store.commit([*sends(1, 2)])
    bench.store.commit([Put(Family.META, META_BYTES_HEAD, pack_pair(0, 0))])  # as if this run had not counted
    bench.restart()
    assert bench.store.bytes_since == 2
    assert bench.store.pending_bytes() == {}
    bench.store.commit([*sends(3)])
    bench.store.commit([hand_over(*all_rows(bench.store, Family.TIMELINE)[0])])
    assert bench.store.pending_bytes() == recount_bytes(bench.store) == {SCOPE: SIZE}
    assert bench.store.pending() == {SCOPE: 2}
    bench.restart()
    assert bench.store.bytes_since == 2
    assert bench.store.pending_bytes() == {SCOPE: SIZE}


def test_a_half_message_counts_its_separate_body() -> None:
    """Its row is small, and the same in each check; with its body in its row it counted that."""
    entry = WaitingEntry(EntryKind.TRANSACTION, 0, 3, HALF, LATER_MS, NOW_MS)
    row = encode_half(entry, HalfMessageState(Terms(0, 0), 5, 0, 1_000), b"\1" * 17)
    again = encode_half(entry._replace(retry_count=2), HalfMessageState(Terms(0, 0), 90, 3, 1_000), b"\1" * 17)
    assert waiting_bytes(row) == waiting_bytes(again) == decode_half(row).size == len(row) + 1_000
    assert whole_half_bytes(b"\1body") == 28 + 16 + 4
