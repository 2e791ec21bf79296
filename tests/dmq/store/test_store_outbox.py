"""What leaves the outbox, and how: exported, cut at its bound, or skipped, on both engines; the figures stay right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import pytest
from support.rigs.store.rows import all_rows, events
from support.rigs.store.workbench import ENGINES, Bench, opened_bench

from dmq.store.schema.accounting.outbox import OutboxState
from dmq.store.schema.keys import Family
from dmq.store.store import StoreOptions
from dmq.store.writer.operations import DropOutbox, Emit, HoldOutbox, SkipOutbox
from dmq.trail.events import EventKind, gap_event

pytestmark = pytest.mark.contract
BOUND = 4_000
ROW_BYTES = 135  # of one event of 100 bytes
ROWS_CUT = 16  # at a time


@pytest.fixture(params=ENGINES)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    for made in opened_bench(request.param, tmp_path):
        made.restart(StoreOptions(outbox_bytes_max=BOUND, gap_event=gap_event))
        yield made


def emit(bench: Bench, count: int) -> None:
    """Commit events, each in a row of its own."""
    for _ in range(count):
        bench.store.commit([Emit(b"\7" * 100)])


def drop(first: int, last: int) -> DropOutbox:
    """The op that drops exported rows ``first`` to ``last``."""
    rows = range(first, last + 1)
    return DropOutbox(last + 1, list(rows), list(accumulate(ROW_BYTES for _ in rows)))


def sequences(bench: Bench) -> Sequence[int]:
    """The sequences that are there; the figures are those of the rows, also in the next run."""
    rows = all_rows(bench.store, Family.AUDIT)
    state = bench.store.outbox_state
    assert state.stored_bytes == sum(len(value) for _, value in rows)
    found = [record.sequence for record in events(bench.store)]
    assert found == list(range(state.first_sequence, state.next_sequence))
    bench.restart()
    assert bench.store.outbox_state == state
    return found


def gaps(bench: Bench) -> int:
    """How many events tell of a gap."""
    return sum(record.event[0] == EventKind.GAP for record in events(bench.store))


def test_exported_rows_are_removed(bench: Bench) -> None:
    """All of the rows that are said, and nothing else; nothing at all the second time."""
    emit(bench, 5)
    assert sequences(bench) == [1, 2, 3, 4, 5]
    bench.store.commit([drop(1, 3)])
    assert sequences(bench) == [4, 5]
    bench.store.commit([drop(1, 3)])
    assert sequences(bench) == [4, 5]
    bench.store.commit([drop(4, 5)])
    assert sequences(bench) == []
    assert bench.store.outbox_state == OutboxState(6, 6, 0)


@pytest.mark.parametrize("exported", [ROWS_CUT - 1, ROWS_CUT, ROWS_CUT + 1, ROWS_CUT + 5])
def test_rows_cut_during_their_export_are_counted_once(bench: Bench, exported: int) -> None:
    """Before the export could say that it is done."""
    emit(bench, BOUND // ROW_BYTES + 2)
    assert gaps(bench) == 1
    bench.store.commit([drop(1, exported)])
    assert sequences(bench)[0] == max(exported, ROWS_CUT) + 1


def test_a_batch_being_exported_is_not_cut(bench: Bench) -> None:
    """Not before it is half as much again as the bound: an export may hang."""
    emit(bench, 10)
    bench.store.commit([HoldOutbox(11)])
    emit(bench, 3 * BOUND // 2 // ROW_BYTES - 10)
    assert (gaps(bench), bench.store.outbox_state.first_sequence) == (0, 1)
    emit(bench, 2)
    assert (gaps(bench), bench.store.outbox_state.first_sequence) == (1, ROWS_CUT + 1)


@pytest.mark.parametrize("let_go", [drop(1, 1), HoldOutbox(0), HoldOutbox(1)])
def test_a_released_row_can_be_cut(bench: Bench, let_go: DropOutbox | HoldOutbox) -> None:
    """By the end of an export, and by an export that failed."""
    bench.store.commit([HoldOutbox(11)])
    emit(bench, BOUND // ROW_BYTES + 3)
    assert gaps(bench) == 0
    bench.store.commit([let_go])
    emit(bench, 1)
    assert gaps(bench) == 1
    sequences(bench)


def test_numbers_continue_from_a_given_one(bench: Bench) -> None:
    """What lies below is forgotten, the batch's own event has the first number."""
    emit(bench, 3)
    bench.store.commit([SkipOutbox(100), Emit(b"first")])
    assert sequences(bench) == [100]


@pytest.mark.parametrize("to", [1, 3, 4])
def test_numbers_never_go_back(bench: Bench, to: int) -> None:
    """Where the numbers are behind that anyway nothing is forgotten."""
    emit(bench, 3)
    bench.store.commit([SkipOutbox(to), Emit(b"next")])
    assert sequences(bench) == [1, 2, 3, 4]
