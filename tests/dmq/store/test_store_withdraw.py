"""Taking an entry off the timeline, on both engines: it is handed over or withdrawn, never both, never neither."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import pytest
from support.rigs.store.rows import (
    SCOPE,
    TOPIC,
    all_rows,
    append,
    counted,
    events,
    hand_over,
    packed_id,
    recount,
    schedule,
)
from support.rigs.store.workbench import NOW_MS, Bench

from broker_adapter.runtime.clock import ManualClock
from dmq.errors import StoreBusy, StoreError, StoreFailed
from dmq.store.engines.memory import MemoryEngine
from dmq.store.schema.keys import Family, pack_queue_key, pack_timeline_key, timeline_key
from dmq.store.schema.messages.index import EntryState, Receipt
from dmq.store.schema.messages.record import WAITING_HEADER_BYTES, body_facts, decode_waiting
from dmq.store.store import Store, StoreOptions
from dmq.store.writer import assemble
from dmq.store.writer.marks import Cursor
from dmq.store.writer.operations import NO_RECEIPT, Append, Done, Emit, HandOver, Put, Withdraw
from dmq.trail.events import gap_event

pytestmark = pytest.mark.contract
INSTEAD = 900  # the message that comes in place of a withdrawn one


class Row(NamedTuple):
    """A row of the timeline, as somebody read it."""

    key: bytes
    value: bytes

    def withdrawn(self, *instead: Append | Emit | Put) -> Withdraw:
        """The op that takes it away."""
        entry = decode_waiting(self.value)
        message_id, _ = body_facts(self.value[WAITING_HEADER_BYTES:])
        return Withdraw(self.key, entry.scope, message_id, entry.deliver_at_ms, len(self.value), instead)

    def handed_over(self) -> HandOver:
        """The op that hands it over."""
        return hand_over(self.key, self.value)


def rows(store: Store) -> list[Row]:
    """The timeline."""
    return [Row(*each) for each in all_rows(store, Family.TIMELINE)]


def waiting(bench: Bench, *numbers: int) -> list[Row]:
    """Let messages wait, each a second longer than the one before it."""
    bench.store.commit([schedule(number, NOW_MS + 1_000 * place) for place, number in enumerate(numbers, start=1)])
    return rows(bench.store)


def instead() -> tuple[Append | Emit | Put, ...]:
    """One op of each kind that may be done in place of an entry."""
    return append(INSTEAD, event=b"moved"), Emit(b"why"), Put(Family.GROUP, b"note", b"1")


def in_one_batch(bench: Bench, *units: tuple[Withdraw | HandOver | Done | Append, ...]) -> list[list[Receipt]]:
    """Commit units together."""
    bench.gate.hold()
    first = bench.submit(Emit(b"first"))
    bench.gate.await_sync()
    writes = bench.gate.calls.count("write")
    waiters = [bench.submit(*unit) for unit in units]
    bench.gate.let_go()
    assert first.ended().error is None
    told = [waiter.ended().receipts for waiter in waiters]
    assert bench.gate.calls.count("write") == writes + 1
    return [receipts for receipts in told if receipts is not None]


def read(bench: Bench) -> list[Row]:
    """What the reader does first: take what is due now."""
    claim = bench.store.marks.claim(Cursor.LIVE, bench.clock.now_ms())
    found = bench.store.scan(Family.TIMELINE, timeline_key(claim.start), timeline_key(claim.stop), limit=100).rows
    return [Row(*each) for each in found]


def hand_in(bench: Bench, taken: list[Row]) -> list[Receipt]:
    """What it does then: hand over what it took."""
    ops = [row.handed_over() for row in taken]
    return bench.store.commit([*ops, Done(bench.store.marks.low())], is_urgent=True)[:-1]


def queued(store: Store) -> list[int]:
    """The numbers of the messages in the queue."""
    found = store.scan(Family.QUEUE, pack_queue_key(TOPIC, 0, 0), pack_queue_key(TOPIC, 1, 0), limit=1_000).rows
    return [int(value.rpartition(b" ")[2]) for _, value in found]


def is_counted(store: Store) -> bool:
    """Whether the counters say what the rows say."""
    return counted(store, [SCOPE, SCOPE + 1]) == recount(store)


# -- withdrawn ---------------------------------------------------------------------------------------------------------


def test_withdrawn_once_and_gone(bench: Bench) -> None:
    """Row, index and count are gone, what comes instead is there: one batch, and the receipt says so."""
    first, second = waiting(bench, 1, 2)
    bench.clock.advance(7)
    writes = bench.gate.calls.count("write")
    assert bench.store.commit([first.withdrawn(*instead())]) == [
        Receipt(EntryState.WITHDRAWN, 1, -1, -1, NOW_MS + 7, False)
    ]
    assert bench.gate.calls.count("write") == writes + 1
    for _ in range(3):  # as it is, after an orderly end, after a kill
        assert rows(bench.store) == [second]
        assert bench.store.find(SCOPE, packed_id(1)) is None
        assert bench.store.pending() == {SCOPE: 1}
        assert is_counted(bench.store)
        assert queued(bench.store) == [INSTEAD]
        moved = bench.store.find(SCOPE, packed_id(INSTEAD))
        assert moved is not None
        assert (moved.state, moved.queue_offset) == (EntryState.QUEUED, 0)
        assert all_rows(bench.store, Family.GROUP) == [(b"note", b"1")]
        told = events(bench.store)
        assert [each.event for each in told] == [b"scheduled", b"scheduled", b"moved", b"why"]
        assert told[2].queue_offset == 0
        bench.restart() if bench.store.recovery.is_new else bench.kill()
    bench.clock.advance(5_000)
    assert [each.sequence for each in bench.deliver()] == [2]


def test_an_overdue_entry_can_be_withdrawn(bench: Bench) -> None:
    """Its count lies under its true time, not under that of its key."""
    bench.clock.advance(500_000)
    assert read(bench) == []
    bench.store.commit([schedule(1, NOW_MS)])
    (late,) = rows(bench.store)
    assert late.key[:8] != NOW_MS.to_bytes(8, "big")
    assert bench.store.commit([late.withdrawn()])[0].state is EntryState.WITHDRAWN
    assert bench.store.due_counts(SCOPE, 0, 2**48) == []
    assert bench.store.pending() == {}


def test_the_id_is_free_again(bench: Bench) -> None:
    """For a send in a later batch, and for one behind the withdrawal in the same; one in front of it is a repeat."""
    first, second, third = waiting(bench, 1, 2, 3)
    bench.store.commit([first.withdrawn()])
    assert not bench.store.commit([schedule(1, NOW_MS + 9_000)])[0].repeated
    before, gone, behind = bench.store.commit([schedule(2, NOW_MS), second.withdrawn(), schedule(2, NOW_MS + 8_000)])
    assert (before.repeated, gone.state, behind.repeated) == (True, EntryState.WITHDRAWN, False)
    gone, behind = bench.store.commit([third.withdrawn(), append(3)])
    assert (gone.state, behind.repeated) == (EntryState.WITHDRAWN, False)
    assert [row.key for row in rows(bench.store)] == [
        pack_timeline_key(NOW_MS + 8_000, behind.sequence - 1),
        pack_timeline_key(NOW_MS + 9_000, behind.sequence - 2),
    ]
    assert is_counted(bench.store)
    found = bench.store.find(SCOPE, packed_id(2))
    assert found is not None
    assert (found.state, found.sequence) == (EntryState.WAITING, behind.sequence - 1)


# -- left alone --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["handed over", "withdrawn"])
def test_a_message_no_longer_pending_stays_as_it_is(bench: Bench, how: str) -> None:
    """The receipt has no state, and nothing is done instead."""
    first, _ = waiting(bench, 1, 2)
    if how == "handed over":
        bench.clock.advance(1_000)
        bench.deliver()
    else:
        bench.store.commit([first.withdrawn()])
    for restarts in (False, True):
        if restarts:
            bench.restart()
        before = [all_rows(bench.store, family) for family in Family]
        assert bench.store.commit([first.withdrawn(*instead())]) == [NO_RECEIPT]
        assert [all_rows(bench.store, family) for family in Family] == before


def test_another_entry_is_not_mistaken_for_it(bench: Bench) -> None:
    """The same id sent anew, to the same time; another time, scope or id: the key must be the one it waits under."""
    (first,) = waiting(bench, 1)
    bench.store.commit([first.withdrawn()])
    (again,) = waiting(bench, 1)
    assert (again.key[:8], again.value) == (first.key[:8], first.value)
    bench.store.commit([schedule(2, NOW_MS + 1_000), schedule(1, NOW_MS + 1_000, scope=SCOPE + 1)])
    right = again.withdrawn(*instead())
    before = [all_rows(bench.store, family) for family in Family]
    for wrong in (
        first.withdrawn(*instead()),
        right._replace(key=pack_timeline_key(NOW_MS + 1_001, 2)),
        right._replace(scope=SCOPE + 1),
        right._replace(scope=SCOPE + 2),
        right._replace(message_id=packed_id(2)),
        right._replace(message_id=packed_id(3)),
    ):
        assert bench.store.commit([wrong]) == [NO_RECEIPT]
    assert [all_rows(bench.store, family) for family in Family] == before
    assert bench.store.commit([right])[0].state is EntryState.WITHDRAWN


# -- together with a hand-over -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_withdrawn_first", [True, False])
def test_one_batch_does_one_of_the_two(bench: Bench, *, is_withdrawn_first: bool) -> None:
    """Whichever comes first in the batch happens, the other one does not."""
    (row,) = waiting(bench, 1)
    bench.clock.advance(1_000)
    (taken,) = read(bench)
    units = [(row.withdrawn(*instead()),), (taken.handed_over(), Done(bench.store.marks.low()))]
    told = in_one_batch(bench, *(units if is_withdrawn_first else reversed(units)))
    states = [receipts[0].state for receipts in told]
    assert states == [EntryState.WITHDRAWN if is_withdrawn_first else EntryState.DELIVERED, None]
    assert queued(bench.store) == [INSTEAD if is_withdrawn_first else 1]
    assert (bench.store.find(SCOPE, packed_id(1)) is None) == is_withdrawn_first
    assert rows(bench.store) == []
    assert bench.store.pending() == {}
    assert is_counted(bench.store)


def test_one_batch_withdraws_once(bench: Bench) -> None:
    """Also when a turn of the reader ends between the two."""
    first, second = waiting(bench, 1, 2)
    done = Done(bench.store.marks.low())
    told = in_one_batch(
        bench,
        (first.withdrawn(append(11)), second.withdrawn()),
        (done,),
        (first.withdrawn(append(12)), second.withdrawn(append(13))),
    )
    assert [receipt.state for receipt in told[0] + told[2]] == [EntryState.WITHDRAWN] * 2 + [None] * 2
    assert queued(bench.store) == [11]
    assert bench.store.pending() == {}


@pytest.mark.parametrize("between", ["nothing", "other batches", "many withdrawals", "a step of the clock"])
def test_an_entry_in_the_readers_hand_is_not_delivered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    """It read the row before it was withdrawn, and hands it over after, whatever was written meanwhile."""
    monkeypatch.setattr(assemble, "_WITHDRAWN_KEPT", 3)
    bench.store.commit([schedule(number, NOW_MS + 60_000) for number in range(20, 40)])
    others = [row for row in waiting(bench, 1, 2, 3) if row.key > pack_timeline_key(NOW_MS + 3_000, 99)]
    bench.clock.advance(3_000)
    taken = read(bench)
    assert len(taken) == 3
    bench.store.commit([taken[1].withdrawn(*instead())])
    if between == "a step of the clock":
        bench.clock.step_to(NOW_MS - 60_000)
        bench.store.commit([schedule(4, NOW_MS - 50_000)])
    if between != "nothing":
        for number in range(50, 55):
            bench.store.commit([append(number, queue_id=1), schedule(number + 10, NOW_MS + 90_000)])
    if between in {"many withdrawals", "a step of the clock"}:
        for other in others:
            bench.store.commit([other.withdrawn()])
    assert [receipt.state for receipt in hand_in(bench, taken)] == [EntryState.DELIVERED, None, EntryState.DELIVERED]
    assert queued(bench.store) == [INSTEAD, 1, 3]
    assert bench.store.find(SCOPE, packed_id(2)) is None
    assert is_counted(bench.store)


def test_turns_before_the_row_is_taken_change_nothing(bench: Bench) -> None:
    """Empty ones and others: what is withdrawn between two turns is gone for the next, and stays gone."""
    waiting(bench, 1, 2, 3)
    assert hand_in(bench, read(bench)) == []
    first, second, third = rows(bench.store)
    bench.store.commit([second.withdrawn()])
    bench.clock.advance(1_000)
    assert [each.sequence for each in hand_in(bench, read(bench))] == [1]
    assert hand_in(bench, read(bench)) == []
    assert bench.store.commit([first.withdrawn(), second.withdrawn()]) == [NO_RECEIPT] * 2
    bench.clock.advance(2_000)
    assert read(bench) == [third]
    assert [each.sequence for each in hand_in(bench, [third])] == [3]
    assert queued(bench.store) == [1, 3]


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_memory_of_withdrawn_keys_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing is due, and so no turn ends; only keys the reader may have in its hand are kept until one does."""
    monkeypatch.setattr(assemble, "_WITHDRAWN_KEPT", 10)
    bench.store.commit([schedule(number, NOW_MS + 10) for number in range(20)])
    bench.store.commit([schedule(number, NOW_MS + 60_000) for number in range(100, 300)])
    bench.clock.advance(10)
    taken = read(bench)
    for row in rows(bench.store):
        bench.store.commit([row.withdrawn()])
        assert len(bench.store._assembler._withdrawn) <= 20 + 10 + 1
    assert bench.store._assembler._withdrawn >= {row.key for row in taken}
    assert hand_in(bench, taken) == [NO_RECEIPT] * 20
    assert not bench.store._assembler._withdrawn
    assert bench.store.pending() == {}


def test_a_replacement_counts_as_waiting_bytes(bench: Bench) -> None:
    """A withdrawal that brings a large message is bounded as the message would be."""
    bench.restart(StoreOptions(pending_bytes_max=1_000, gap_event=gap_event))
    (row,) = waiting(bench, 1)
    bench.gate.hold()
    first = bench.submit(append(2))
    bench.gate.await_sync()
    second = bench.submit(append(3))
    with pytest.raises(StoreBusy):
        bench.store.commit([row.withdrawn(append(4)._replace(record=bytes(5_000)))])
    bench.gate.let_go()
    assert first.ended().error is second.ended().error is None
    assert rows(bench.store) == [row]


# -- crashes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_power_loss", [False, True])
@pytest.mark.parametrize("where", ["before", "write", "sync", "after"])
def test_a_crash_leaves_all_of_it_or_nothing(where: str, *, is_power_loss: bool) -> None:
    """At its write, between write and sync, or after it; what the reader had in its hand is gone with it."""
    engine, clock = MemoryEngine(), ManualClock(NOW_MS)
    store = Store(engine, clock, StoreOptions())
    store.commit([schedule(1, NOW_MS + 1), schedule(2, NOW_MS + 1)])
    first, second = rows(store)
    engine.fail_next_write, engine.fail_next_sync = where == "write", where == "sync"
    if where == "after":
        store.commit([first.withdrawn(*instead())])
    elif where != "before":
        with pytest.raises(StoreFailed):
            store.commit([first.withdrawn(*instead())])
    after = Store(engine.crashed() if is_power_loss else engine.reopened(), clock, StoreOptions())
    is_withdrawn = where == "after" or (where == "sync" and not is_power_loss)
    assert rows(after) == ([second] if is_withdrawn else [first, second])
    assert (after.find(SCOPE, packed_id(1)) is None) == is_withdrawn
    assert queued(after) == [INSTEAD] * is_withdrawn
    assert len(all_rows(after, Family.GROUP)) == is_withdrawn
    assert [each.event for each in events(after)] == [b"scheduled"] * 2 + [b"moved", b"why"] * is_withdrawn
    assert is_counted(after)
    (receipt,) = after.commit([first.withdrawn(*instead())])
    assert receipt.state is (None if is_withdrawn else EntryState.WITHDRAWN)
    assert queued(after) == [INSTEAD]
    after.close()
    with suppress(StoreError):
        store.close()
