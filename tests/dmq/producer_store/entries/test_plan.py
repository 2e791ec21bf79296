"""A dead entry leaves the dead set only for the timeline."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest
from support.rigs.producer.spool import an_entry

from broker_adapter.runtime.clock import ManualClock
from dmq.errors import UnitRefused
from dmq.producer_store.entries.entries import Entries
from dmq.producer_store.entries.plan import Ticket
from dmq.store.engines.memory import MemoryEngine
from dmq.store.store import Store, StoreOptions
from dmq.store.writer.writer import Unit
from retry.sink import Death


@pytest.mark.parametrize("key", ["", "k"])
def test_a_dead_entry_stays_dead_while_another_one_has_its_place(tmp_path: Path, key: str) -> None:
    """Two entries were put under one uid: the dead one is refused, stays as it is, and can be put back later."""
    store = Store(MemoryEngine(), ManualClock(), StoreOptions())
    entries = Entries(store)
    first, second = an_entry(1, key=key, payload=b"first"), an_entry(1, payload=b"second")

    def told(done: Future[Unit], unit: Unit) -> None:
        done.set_exception(unit.error) if unit.error is not None else done.set_result(unit)

    def held(payload_of: object) -> Ticket:
        done: Future[Ticket | None] = Future()
        with entries.lock:
            entries.put(payload_of, lambda _, ticket: done.set_result(ticket), is_held=True)  # type: ignore[arg-type]
        ticket = done.result(60)
        assert ticket is not None
        return ticket

    def requeue() -> None:
        done: Future[Unit] = Future()
        with entries.lock:
            assert entries.requeue("orders", first.uid, lambda unit: told(done, unit))
        done.result(60)

    ticket, buried = held(first), Future[Unit]()
    with entries.lock:
        entries.bury(ticket, first, Death.EXHAUSTED, lambda unit: told(buried, unit))
    buried.result(60)
    again: Future[Unit] = Future()
    ticket = held(second)
    with entries.lock:
        entries.again(ticket, second, lambda unit: told(again, unit), is_counted=False)
    again.result(60)  # it waits under the turn that the dead one would get
    with pytest.raises(UnitRefused):
        requeue()
    store.commit([])
    with entries.lock:
        assert [each.entry.payload for each in entries.dead("orders", b"", 9)] == [b"first"]
        total = entries.total()
        assert (total.waiting, total.dead) == (1, 1)
        assert Entries(store).total() == total
        assert not entries.has_waiting("orders", "k")
    store.close()
