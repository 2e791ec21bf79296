"""What moves entries of one directory into another: the two changes, each with its figures."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import pytest
from support.rigs.producer.spool import PATIENCE_S, an_entry, recount

from broker_adapter.runtime.clock import ManualClock
from dmq.producer_store.entries.entries import Entries
from dmq.producer_store.entries.plan import size_of
from dmq.store.engines.memory import MemoryEngine
from dmq.store.schema.keys import Family
from dmq.store.schema.spool import TypeTotals
from dmq.store.store import Store, StoreOptions
from dmq.store.writer.operations import Delete, Put
from dmq.store.writer.writer import Unit
from retry.sink import DeadEntry, Death

PROGRESS = Put(Family.GROUP, b"progress", b"1")


@pytest.fixture
def entries() -> Iterator[Entries]:
    made = Entries(Store(MemoryEngine(), ManualClock(), StoreOptions()))
    yield made
    made.store.close()


def adopt_dead(entries: Entries, dead: DeadEntry) -> None:
    done: Future[Unit] = Future()
    with entries.lock:
        entries.adopt_dead(dead, 3, done.set_result)
    assert done.result(PATIENCE_S).error is None


def test_a_dead_entry_that_is_moved_is_dead_there_once(entries: Entries) -> None:
    """With all that is known of it; the same one twice, after a kill in between, is one."""
    dead = DeadEntry(entry=an_entry(1, key="k"), death=Death.TOO_OLD, died_at_ms=7)
    adopt_dead(entries, dead)
    adopt_dead(entries, replace(dead, died_at_ms=8))
    adopt_dead(entries, replace(dead, entry=an_entry(2)))
    with entries.lock:
        found = entries.dead("orders", b"", 9)
        assert [(each.entry, each.death, each.died_at_ms) for each in found] == [
            (an_entry(1, key="k"), Death.TOO_OLD, 8),
            (an_entry(2), Death.TOO_OLD, 7),
        ]
        assert entries.total() == recount(entries).totals["orders"] == TypeTotals(dead=2)
        assert entries.dead("orders", an_entry(1).uid, 9) == found[1:]


def test_a_moved_entry_waits_there_and_its_progress_is_reported_with_it(entries: Entries) -> None:
    """In one unit."""
    done: Future[Unit] = Future()
    with entries.lock:
        entries.adopt(an_entry(1), 3, PROGRESS, done.set_result)
    assert done.result(PATIENCE_S).error is None
    assert entries.store.get_many(Family.GROUP, [PROGRESS.key]) == [PROGRESS.value]
    assert entries.total() == recount(entries).totals["orders"] == TypeTotals(1, size_of(an_entry(1)), 0)
    assert list(recount(entries).waiting.values()) == [an_entry(1)]


def test_a_moved_entry_is_forgotten(entries: Entries) -> None:
    """In the figures, now and in the next run; who moves it deletes its rows."""
    adopt_dead(entries, DeadEntry(entry=an_entry(1), death=Death.TOO_OLD, died_at_ms=7))
    done: Future[Unit] = Future()
    with entries.lock:
        entries.adopt(an_entry(2), 3, PROGRESS, done.set_result)
    done.result(PATIENCE_S)
    type_id = entries.type_id("orders")
    assert type_id is not None
    with entries.lock:
        ops = [*entries.forget_dead(type_id), *entries.forget(type_id, an_entry(2))]
    assert not [op for op in ops if isinstance(op, Delete)]
    entries.store.commit(ops)
    assert entries.total() == Entries(entries.store).total() == TypeTotals()
