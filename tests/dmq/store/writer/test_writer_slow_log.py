"""Batches of the writer while a replication log is slow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from support.rigs.store.rows import PATIENCE_S, append
from support.rigs.store.workbench import Waiter

from broker_adapter.runtime.clock import ManualClock
from dmq.errors import StoreError
from dmq.store.engines.engine import Batch, Engine
from dmq.store.engines.memory import MemoryEngine
from dmq.store.schema.keys import Family
from dmq.store.store import Store, StoreOptions
from dmq.store.writer.batch_log import LogStart

pytestmark = pytest.mark.integration
_LONG_S = 1_000 * PATIENCE_S


class SlowLog:
    """Log that holds each batch until ``release``, and takes ``put_s`` for it by the clock of the test."""

    def __init__(self, clock: ManualClock) -> None:
        self.put_s = _LONG_S
        self.is_slow = False
        self.sizes: list[int] = []  # messages of each batch
        self._clock = clock
        self._released = threading.Semaphore(0)
        self._entered = threading.Semaphore(0)

    def append(self, batch: Batch, *, opens: int = 0) -> None:
        if self.is_slow:
            self.sizes.append(sum(family == Family.QUEUE for family, _, _ in batch.puts))
            self._entered.release()
            assert self._released.acquire(timeout=PATIENCE_S)
            self._clock.advance(round(1_000 * self.put_s))

    def await_batch(self) -> None:
        """Wait until the next batch is held."""
        assert self._entered.acquire(timeout=PATIENCE_S)

    def release(self) -> None:
        """Release one batch."""
        self._released.release()

    def begin(self, engine: Engine, start: LogStart) -> None:
        """Begin with nothing to apply."""

    def obstacle(self) -> str:
        return ""

    def watch(self, on_failure: Callable[[StoreError], None]) -> None:
        """Report no failure."""

    def end_soon(self) -> None:
        """Hold no batch any more."""
        self.is_slow = False
        self._released.release(100)

    def close(self) -> None:
        """Release nothing."""


class SlowStore:
    """Store whose writer waits for its callers by a clock that moves with the log only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = ManualClock()
        monkeypatch.setattr("dmq.store.writer.writer._DISK_CLOCK", clock)
        monkeypatch.setattr("dmq.store.writer.writer._RETURN_S_MAX", _LONG_S)
        self.log = SlowLog(clock)
        self.store = Store(MemoryEngine(), clock, StoreOptions(), batch_log=self.log)
        self.log.is_slow = True

    def submit(self, number: int) -> Waiter:
        return Waiter(self.store, (append(number),), is_urgent=False)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowStore]:
    made = SlowStore(monkeypatch)
    yield made
    made.log.end_soon()
    made.store.close()


def test_callers_of_the_last_batch_share_the_next_one(slow: SlowStore) -> None:
    """The next batch begins once they have sent again, together with the callers that came during the put."""
    first = slow.submit(1)
    slow.log.await_batch()
    slow.submit(2)
    slow.log.release()
    first.ended()
    slow.submit(3)
    slow.log.await_batch()
    assert slow.log.sizes == [1, 2]


def test_a_batch_does_not_wait_for_callers_that_do_not_return(slow: SlowStore) -> None:
    """The wait ends with a step in which few operations arrive, long before its limit."""
    slow.log.put_s = 0.16
    slow.submit(1)
    slow.log.await_batch()
    slow.submit(2)
    slow.log.release()
    slow.log.await_batch()
    assert slow.log.sizes == [1, 1]


def test_a_single_caller_does_not_wait(slow: SlowStore) -> None:
    """Once as many operations are pending as there were callers, the batch begins."""
    for number in range(3):
        waiter = slow.submit(number)
        slow.log.await_batch()
        slow.log.release()
        waiter.ended()
    assert slow.log.sizes == [1, 1, 1]


def test_closing_ends_the_wait(slow: SlowStore) -> None:
    """A store that closes writes the accepted operations at once."""
    first = slow.submit(1)
    slow.log.await_batch()
    second = slow.submit(2)
    slow.log.release()
    first.ended()
    slow.log.end_soon()
    slow.store.close()
    assert second.ended().error is None
