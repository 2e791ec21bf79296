"""A disk that stands still under the hook: every call of the file system waits until it goes on.

Nothing here sleeps: what returns while the disk stands has shown that it does not wait for it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.rigs.producer.hook import AWAY, EXACT, until
from support.rigs.producer.spool import QUIET

from broker_adapter.runtime.clock import ManualClock
from dmq.producer_store.spool import Spool
from dmq.store.engines.rocks import RocksEngine
from dmq.store.files import disk
from retry import Delivered, Redelivery, Rejected, Spooled
from retry.hook.sending.sink_calls import CallPatience
from retry.sink import Entry, Held, SinkStats
from retry.testing import FakeProducer, run_due

pytestmark = pytest.mark.fault
SOON_S = 0.05  # how long a send waits for a disk that stands still
THREADS = 4  # that may wait for it
WAIT_S = 20.0  # and for one that does not: a machine may be slow


class Disk:
    """Lets calls of the file system through, or has them wait."""

    def __init__(self) -> None:
        self._goes = threading.Event()
        self._goes.set()
        self.waiting = 0

    @property
    def is_stalled(self) -> bool:
        return not self._goes.is_set()

    def stall(self) -> None:
        self._goes.clear()

    def go_on(self) -> None:
        self._goes.set()

    def wait(self) -> None:
        if not self._goes.is_set():
            self.waiting += 1
            assert self._goes.wait(WAIT_S)


class CountingSpool(Spool):
    """Counts the calls that threads of the hook have come to."""

    begun = 0

    def put(self, entry: Entry, *, is_held: bool = False) -> Future[Held | None]:
        self.begun += 1
        return super().put(entry, is_held=is_held)

    def has_waiting(self, type_name: str, key: str) -> bool:
        self.begun += 1
        return super().has_waiting(type_name, key)

    def stats(self, type_name: str = "") -> SinkStats:
        self.begun += 1
        return super().stats(type_name)


class StalledPatience(CallPatience):
    """Begins to run out once a thread has come to the call, if one is left: a machine may be slow."""

    def __init__(self, spool: CountingSpool) -> None:
        super().__init__(SOON_S)
        self._spool, self._before = spool, spool.begun

    def __enter__(self) -> float:
        until(lambda: self._spool.begun > self._before or self._spool.begun == THREADS)
        return super().__enter__()


class Rig:
    """A spool whose disk can stand still, and a hook with one handler that is driven by hand."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self.root, self.disk, self.clock = root, disk, ManualClock()
        self.producer = FakeProducer()
        self._patience = CallPatience(WAIT_S)  # of the last send
        self.hook = self._open()

    def _open(self) -> Redelivery:
        self.spool = CountingSpool(self.root, options=QUIET, clock=self.clock, is_driven=True)
        hook = Redelivery(self.spool, policy=EXACT, autostart=False)
        hook._sender.calls.threads._limit = THREADS
        hook._sender.patience = self._begin_waiting  # type: ignore[method-assign]
        hook.add_handler("t", self.producer.send)
        hook.add_handler("w", self.producer.send, mode="write_ahead", destination="t")
        self.spool.begun = 0
        return hook

    def fail_next(self, *script: Any) -> None:  # noqa: ANN401 - as FakeProducer takes
        self.producer._script.extend(script)

    def stall(self) -> None:
        """Let the disk stand still, and see to it that the next call looks at it."""
        self.disk.stall()
        self.clock.advance(100)
        self._patience.left_s = SOON_S

    def _begin_waiting(self) -> CallPatience:
        is_stalled = self.disk.is_stalled
        self._patience = StalledPatience(self.spool) if is_stalled else CallPatience(WAIT_S)
        return self._patience

    def sent_later(self, count: int) -> list[bytes]:
        """Let the disk go on, and return what is sent from then on until nothing waits: ``count``, or more."""
        before = len(self.producer.sent)
        self.disk.go_on()

        def is_over() -> bool:
            self.clock.advance(4_000)
            self.spool.turn()
            run_due(self.hook)
            stats = self.spool.stats()
            left = stats.waiting + stats.held + self.hook._settler.pending
            return len(self.producer.sent) - before >= count and left == 0

        until(is_over)
        assert is_over()
        return sorted(self.producer.sent[before:])

    def restart(self) -> None:
        self.hook.close(WAIT_S)
        self.hook = self._open()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    stalling = Disk()

    def statvfs(path: Any) -> os.statvfs_result:  # noqa: ANN401 - as os.statvfs takes
        stalling.wait()
        return os.statvfs(path)

    class Os:
        """``os`` as the watch over the free space has it."""

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever there is
            return statvfs if name == "statvfs" else getattr(os, name)

    write = RocksEngine.write

    def stalled_write(engine: RocksEngine, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - those of write
        stalling.wait()
        return write(engine, *args, **kwargs)

    monkeypatch.setattr(disk, "os", Os())
    monkeypatch.setattr(RocksEngine, "write", stalled_write)
    made = Rig(tmp_path / "spool", stalling)
    yield made
    stalling.go_on()
    made.hook.close(WAIT_S)


def test_a_send_that_failed_returns_though_it_cannot_be_kept_and_is_sent_once(rig: Rig) -> None:
    """The outcome is in doubt and says so; the entry that is written after all is sent, once, with the uid it named."""
    rig.fail_next(AWAY)
    rig.stall()
    outcome = rig.hook.send("t", b"1")
    assert isinstance(outcome, Rejected)
    assert outcome.is_uncertain
    assert "no answer within 0.05 s (it may have been kept all the same)" in outcome.reason
    assert rig.sent_later(1) == [b"1"]


def test_a_send_to_a_destination_that_is_away_stays_in_doubt_though_its_attempt_failed(rig: Rig) -> None:
    """It was to be kept, which is in doubt, and was then attempted: the outcome is in doubt, and it is sent once."""
    rig.hook._sender.calls.threads._limit = 1  # so that the second put is not asked: the first one has the thread
    rig.fail_next(*[AWAY] * 100)
    kept = 1
    while rig.hook.send("t", b"before").reason != "its destination is away":  # type: ignore[union-attr]
        kept += 1
    rig.clock.advance(60_000)  # an attempt is due, if nothing can be kept
    rig.stall()
    outcome = rig.hook.send("t", b"in doubt")
    assert isinstance(outcome, Rejected)
    assert outcome.is_uncertain
    rig.producer._script.clear()
    assert rig.sent_later(kept + 1).count(b"in doubt") == 1


def test_a_send_that_is_repeated_with_its_uid_is_kept_once(rig: Rig) -> None:
    """Who was left in doubt and sends again gives the uid of the outcome, and the spool knows it."""
    rig.fail_next(AWAY, AWAY)
    rig.stall()
    first = rig.hook.send("t", b"1")
    rig.disk.go_on()
    assert isinstance(rig.hook.send("t", b"1", uid=first.uid), Spooled)
    assert rig.sent_later(1) == [b"1"]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_send_ahead_returns_and_a_late_entry_is_in_no_hands(rig: Rig, is_restarted: bool) -> None:
    """It was not attempted; kept after all it is sent by the drain of this run, or of the next."""
    rig.stall()
    outcome = rig.hook.send("w", b"1")
    assert isinstance(outcome, Rejected)
    assert outcome.is_uncertain
    assert rig.producer.calls == []
    if is_restarted:
        rig.disk.go_on()
        rig.restart()
    assert rig.sent_later(1) == [b"1"]


def test_a_sent_message_is_not_sent_again_when_the_disk_recovers(rig: Rig) -> None:
    """The disk stops while the handler runs: ``Delivered`` does not wait, and the entry is forgotten later."""
    rig.fail_next(lambda payload: rig.stall())
    assert isinstance(rig.hook.send("w", b"1"), Delivered)
    assert rig.sent_later(0) == []


def test_a_message_that_was_kept_before_the_disk_stopped_waits_its_time(rig: Rig) -> None:
    """The attempt fails while the disk stands: it is ``Spooled``, as it was durable before."""

    def fail(payload: bytes) -> None:
        rig.stall()
        raise AWAY

    rig.fail_next(fail)
    assert isinstance(rig.hook.send("w", b"1"), Spooled)
    assert rig.sent_later(1) == [b"1"]


def test_a_send_with_an_unknown_key_state_is_not_attempted_and_not_in_doubt(rig: Rig) -> None:
    """Another thread holds the spool's lock over a call of the disk; nothing was asked to keep this message."""
    rig.fail_next(AWAY)
    rig.stall()
    assert isinstance(rig.hook.send("t", b"1"), Rejected)  # its thread waits for the disk, with the lock
    outcome = rig.hook.send("t", b"2", key="k")
    assert isinstance(outcome, Rejected)
    assert not outcome.is_uncertain
    assert "whether earlier messages of its key wait is not known" in outcome.reason
    assert rig.producer.calls == [b"1"]
    assert rig.sent_later(1) == [b"1"]


def test_beyond_a_few_that_are_in_doubt_nothing_is_even_begun(rig: Rig) -> None:
    """However many are sent, a few calls wait for the disk; the others are withdrawn, and are surely not kept."""
    rig.fail_next(*[AWAY] * (THREADS + 2))
    rig.stall()
    outcomes = [rig.hook.send("t", bytes([number])) for number in range(THREADS + 2)]
    assert all(isinstance(each, Rejected) for each in outcomes)
    doubts = [each.is_uncertain for each in outcomes if isinstance(each, Rejected)]
    assert doubts == [True] * THREADS + [False] * 2
    assert rig.sent_later(THREADS) == [bytes([number]) for number in range(THREADS)]


def test_an_event_loop_is_not_held_up_either(rig: Rig) -> None:
    """On an event loop the outcome is the same, and a cancelled send does not wait for the disk."""

    async def main() -> Rejected:
        outcome = await rig.hook.send_async("t", b"1")
        assert isinstance(outcome, Rejected)
        sending = asyncio.create_task(rig.hook.send_async("w", b"2"))
        await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        return outcome

    rig.fail_next(AWAY)
    rig.stall()
    assert asyncio.run(main()).is_uncertain
    assert rig.sent_later(2) == [b"1", b"2"]


def test_a_check_reports_an_unwritable_directory_and_leaves_nothing(rig: Rig) -> None:
    """It does not wait for the disk either; what it began is taken away once that goes on."""
    rig.stall()
    checked = rig.hook.check()
    assert not checked.is_ok
    assert "no answer within" in checked.error
    assert rig.sent_later(0) == []


def test_figures_and_the_end_do_not_wait_for_the_disk(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A readiness page says that the sink does not answer, and ``close`` ends; what it began goes on by itself, and
    what is found in the next run is what was said to be in doubt.
    """
    is_closed = threading.Event()
    close = rig.spool.close

    def close_slowly() -> None:
        close()
        is_closed.set()

    monkeypatch.setattr(rig.spool, "close", close_slowly)
    rig.fail_next(AWAY)
    rig.stall()
    rig.hook.send("t", b"1")
    health = rig.hook.health()
    assert health.status == "degraded"
    assert any("no answer within" in reason for reason in health.reasons)
    with ThreadPoolExecutor(1) as pool:  # so that a failure is a failure, and hangs nobody
        closed = pool.submit(rig.hook.close, SOON_S).result(WAIT_S / 2)
    assert closed.still_waiting is None
    rig.disk.go_on()
    assert is_closed.wait(WAIT_S)
    path = rig.spool.path
    rig.hook = rig._open()
    assert rig.spool.path == path
    assert rig.sent_later(0) in ([], [b"1"])
