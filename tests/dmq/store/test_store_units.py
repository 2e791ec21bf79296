"""A unit is whole: if an op of it is passed over, nothing beside it finishes, sets or tells anything."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import pytest
from support.rigs.store.rows import SCOPE, all_rows, append, counted, events, packed_id, recount, schedule
from support.rigs.store.workbench import NOW_MS, Bench

from dmq.errors import UnitRefused
from dmq.store.schema.keys import Family, pack_timeline_key
from dmq.store.schema.messages.index import Receipt
from dmq.store.writer.operations import Append, Delete, Emit, IfKnown, Op, Put, Schedule, Withdraw
from dmq.store.writer.writer import Unit

pytestmark = pytest.mark.contract
FINISHED = Put(Family.GROUP, b"finished", b"yes")
LATER_MS = NOW_MS + 60_000


def together(bench: Bench, *units: Sequence[Op]) -> list[list[Receipt] | Exception]:
    """Commit units in one batch, and return the receipts or the error of each."""
    done: list[Future[list[Receipt]]] = [Future() for _ in units]

    def settle(each: Future[list[Receipt]], unit: Unit) -> None:
        each.set_exception(unit.error) if unit.error is not None else each.set_result(unit.receipts)

    writer = bench.store.writer
    with writer._lock:  # the writer takes none before all are there
        for each, ops in zip(done, units, strict=True):
            unit = Unit(ops, partial(settle, each))
            writer._pending.append(unit)
            writer._pending_ops += len(unit.ops)
            writer._pending_bytes += unit.size_bytes
            writer._direct_pending += 1
        writer._wake.notify()
    found: list[list[Receipt] | Exception] = []
    for each in done:
        error = each.exception(timeout=60)
        found.append(error if isinstance(error, Exception) else each.result())
    return found


def withdraw(told: Receipt, number: int, *instead: Append | Schedule | Put | Emit) -> Withdraw:
    """Take message ``number`` off the timeline."""
    key = pack_timeline_key(told.at_ms, told.sequence)
    return Withdraw(
        key, SCOPE, packed_id(number), LATER_MS, len(schedule(number, LATER_MS).record), instead, b"withdrawn"
    )


@pytest.mark.parametrize(
    "beside", [FINISHED, Delete(Family.GROUP, b"kept"), Emit(b"told")], ids=lambda op: type(op).__name__
)
@pytest.mark.parametrize("accepting", [append(1), schedule(1, LATER_MS)], ids=["append", "schedule"])
def test_an_operation_known_already_finishes_nothing(bench: Bench, accepting: Op, beside: Op) -> None:
    """The unit is refused, and there is no trace of it: no row, no event, no sequence, no count."""
    bench.store.commit([append(1), Put(Family.GROUP, b"kept", b"yes")])
    before = [all_rows(bench.store, family) for family in Family]
    for unit in ([accepting, beside], [beside, append(9), accepting]):
        with pytest.raises(UnitRefused):
            bench.store.commit(unit)
        assert [all_rows(bench.store, family) for family in Family] == before
    assert bench.store.failure is None
    assert bench.store.commit([append(2), beside])[0].sequence == 2


def test_of_a_batch_only_the_unit_that_is_not_whole_is_refused(bench: Bench) -> None:
    """Also if another unit of the same batch, or the unit itself, made the id known; the others know nothing of it."""
    first, refused, last = together(
        bench, [append(1)], [append(3), append(1), FINISHED], [append(3), schedule(2, LATER_MS)]
    )
    assert isinstance(refused, UnitRefused)
    assert isinstance(first, list)
    assert isinstance(last, list)
    assert [each.sequence for each in [*first, *last]] == [1, 2, 3]
    assert [each.queue_offset for each in [*first, *last]] == [0, 1, -1]
    with pytest.raises(UnitRefused):
        bench.store.commit([append(4), append(4), FINISHED])
    assert all_rows(bench.store, Family.GROUP) == []
    assert [event.event for event in events(bench.store)] == [b"queued", b"queued", b"scheduled"]
    assert counted(bench.store, [SCOPE]) == recount(bench.store)


def test_a_call_marked_harmless_is_answered(bench: Bench) -> None:
    """A repeated send that carries a row of its own."""
    (first,) = bench.store.commit([append(1)])
    (again, other, _) = bench.store.commit([append(1)._replace(if_known=IfKnown.ANSWER), append(2), FINISHED])
    assert (again, other.repeated) == (first._replace(repeated=True), False)
    assert all_rows(bench.store, Family.GROUP) == [(b"finished", b"yes")]


@pytest.mark.parametrize("accepting", [append(1), schedule(1, LATER_MS)], ids=["append", "schedule"])
def test_a_copy_is_written_even_if_its_id_is_known(bench: Bench, accepting: Append | Schedule) -> None:
    """In a later batch, and in the same."""
    copy = accepting._replace(if_known=IfKnown.WRITE)
    bench.store.commit([append(1)])
    (told, _) = bench.store.commit([copy, FINISHED])
    assert not told.repeated
    together(bench, [append(2)], [append(2)._replace(if_known=IfKnown.WRITE), FINISHED])
    rows = len(all_rows(bench.store, Family.QUEUE)) + len(all_rows(bench.store, Family.TIMELINE))
    assert rows == 4


def test_a_gone_lease_finishes_nothing(bench: Bench) -> None:
    """An entry that no longer waits takes the unit of its withdrawal with it; what was put instead is there once."""
    (told,) = bench.store.commit([schedule(1, LATER_MS)])
    done, refused, nothing = together(
        bench,
        [withdraw(told, 1, append(7))],
        [withdraw(told, 1), FINISHED],
        [withdraw(told, 1, append(8), FINISHED)],
    )
    assert isinstance(done, list)
    assert isinstance(refused, UnitRefused)
    assert isinstance(nothing, list)
    assert nothing[0].state is None
    assert all_rows(bench.store, Family.GROUP) == all_rows(bench.store, Family.TIMELINE) == []
    assert len(all_rows(bench.store, Family.QUEUE)) == 1
    assert counted(bench.store, [SCOPE]) == recount(bench.store)


def test_a_replacement_is_never_skipped(bench: Bench) -> None:
    """An entry goes on under an id that became known in the same batch: neither is lost."""
    (told,) = bench.store.commit([schedule(1, LATER_MS)])
    first, moved = together(bench, [append(7)], [withdraw(told, 1, append(7))])
    assert isinstance(first, list)
    assert isinstance(moved, list)
    assert len(all_rows(bench.store, Family.QUEUE)) == 2
