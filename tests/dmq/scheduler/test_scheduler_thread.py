"""The scheduler's thread: what wakes it, what ends it, and that it never ends without a word."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from support.rigs.broker.scheduler_cell import PATIENCE_S, Cell

from broker_adapter.runtime.clock import Clock, ManualClock, SystemClock
from dmq.errors import StoreCorrupt, StoreFailed
from dmq.scheduler import scheduler as scheduler_module
from dmq.store.schema.keys import Family, timeline_key, timeline_mark
from dmq.store.writer.operations import Put


@pytest.fixture
def sleepy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naps that would outlast the test: whatever happens in time was not found by looking now and then."""
    monkeypatch.setattr(scheduler_module, "NAP_MS_MAX", 3_600_000)


class Started(NamedTuple):
    """A running scheduler on the real clock."""

    cell: Cell
    clock: Clock


@pytest.fixture
def started() -> Iterator[Started]:
    clock = SystemClock()
    cell = Cell(clock=clock)
    cell.scheduler.start()
    yield Started(cell, clock)
    cell.close()


@pytest.mark.usefixtures("sleepy")
def test_an_earlier_message_wakes_the_thread(started: Started) -> None:
    """It sleeps towards the far one and delivers the near one in time."""
    cell, clock = started
    cell.schedule(clock.now_ms() + 3_000_000)
    assert not cell.delivered.wait(0.05)
    cell.schedule(clock.now_ms() + 30)
    assert cell.delivered.wait(PATIENCE_S)
    assert cell.late_ms[0] >= 0
    assert len(cell.times()) == 1


@pytest.mark.usefixtures("sleepy")
def test_a_message_on_an_idle_timeline_wakes_the_thread(started: Started) -> None:
    """There was nothing to sleep towards."""
    cell, clock = started
    assert not cell.delivered.wait(0.05)
    cell.schedule(clock.now_ms() + 1)
    assert cell.delivered.wait(PATIENCE_S)


@pytest.mark.usefixtures("sleepy")
def test_close_ends_a_nap(started: Started) -> None:
    """However long it was to be; and closing twice, or before the start, is fine."""
    cell, clock = started
    cell.schedule(clock.now_ms() + 3_000_000)
    assert not cell.delivered.wait(0.05)
    cell.scheduler.close()
    cell.scheduler.close()
    assert not cell.failures
    never = Cell()
    never.close()


def test_a_step_of_the_clock_is_noticed_within_a_nap() -> None:
    """Nobody wakes the thread; the cap of its naps bounds how long the step hurts."""
    clock = ManualClock()
    cell = Cell(clock=clock)
    cell.scheduler.start()
    cell.schedule(clock.now_ms() + 3_600_000)
    assert not cell.delivered.wait(0.05)
    clock.step_to(clock.now_ms() + 3_600_000)
    assert cell.delivered.wait(PATIENCE_S)
    cell.close()


@pytest.mark.parametrize("at_sync", [False, True])
def test_a_failing_store_ends_the_thread_and_is_reported(started: Started, *, at_sync: bool) -> None:
    """Once; nothing is handed over after it."""
    cell, clock = started
    cell.schedule(clock.now_ms() + 50)
    cell.engine.fail_next_write, cell.engine.fail_next_sync = not at_sync, at_sync
    assert cell.failed.wait(PATIENCE_S)
    assert [type(each) for each in cell.failures] == [StoreFailed]
    cell.scheduler.close()
    assert not cell.late_ms


@pytest.mark.parametrize("value", [b"", b"\xff" * 40, b"\x01" + bytes(20), None])
def test_an_entry_that_cannot_be_read_ends_the_thread_and_is_reported(started: Started, value: bytes | None) -> None:
    """Damage is loud: a scheduler that stopped without a word would look like an idle one."""
    cell, clock = started
    if value is None:  # a whole header, and a body cut short
        cell.schedule(clock.now_ms() + 3_600_000)
        rows = cell.store.scan(Family.TIMELINE, b"", b"\xff" * 17, limit=1).rows
        value = rows[0][1][:29]
    cell.store.commit([Put(Family.TIMELINE, timeline_key(timeline_mark(clock.now_ms() + 1, 10**6)), value)])
    assert cell.failed.wait(PATIENCE_S)
    assert [type(each) for each in cell.failures] == [StoreCorrupt]
    cell.store.close()


def test_a_bug_ends_the_thread_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only what the store raises."""
    cell = Cell(clock=SystemClock())
    monkeypatch.setattr(cell.placement, "hand_over", lambda rows, now_ms: 1 // 0)
    cell.scheduler.start()
    cell.schedule(cell.clock.now_ms() + 1)
    assert cell.failed.wait(PATIENCE_S)
    assert [type(each) for each in cell.failures] == [StoreFailed]
    assert "ZeroDivisionError" in str(cell.failures[0])
    cell.close()


def test_closing_the_store_under_the_thread_is_no_failure(started: Started) -> None:
    """The order of closing is the daemon's business; a late turn just ends."""
    cell, _ = started
    cell.store.close()
    cell.scheduler.close()
    assert not cell.failures
