"""Bounds, failures and the end of a store, on both engines: nothing is half done, and nobody is left waiting."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Literal

import pytest
from support.rigs.store.rows import (
    PATIENCE_S,
    SCOPE,
    TOPIC,
    all_rows,
    append,
    counted,
    events,
    meta_u64,
    packed_id,
    recount,
    schedule,
)
from support.rigs.store.workbench import NOW_MS, Bench

from broker_adapter.runtime.clock import ManualClock
from dmq.errors import FormatUnsupported, StoreBusy, StoreClosed, StoreCorrupt, StoreError, StoreFailed
from dmq.store.engines.memory import MemoryEngine
from dmq.store.schema.keys import FORMAT_VERSION, META_DONE, META_FORMAT, META_SEQUENCE, Family, pack_u64
from dmq.store.schema.messages.index import Receipt
from dmq.store.store import Store, StoreOptions
from dmq.store.writer.operations import Appended, Delete, Done, Emit, Put
from dmq.store.writer.writer import OPS_PER_BATCH_MAX, LoopUnit, Unit
from dmq.trail.events import gap_event

pytestmark = pytest.mark.contract
WINDOW_MS = 15 * 60_000


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_beyond_the_bound_nothing_is_half_done(bench: Bench) -> None:
    """A unit that does not fit is refused whole; those before it are kept; urgent ones are taken; later all is well."""
    bench.restart(StoreOptions(pending_ops_max=10, gap_event=gap_event))
    bench.gate.hold()
    first = bench.submit(append(0))
    bench.gate.await_sync()
    waiting = [bench.submit(*(append(10 * n + each) for each in range(3))) for n in range(1, 4)]
    with pytest.raises(StoreBusy):
        bench.store.commit([append(900), append(901)])
    fits = bench.submit(append(41))
    with pytest.raises(StoreBusy):
        bench.store.commit([append(902)])
    urgent = bench.submit(append(51), append(52), is_urgent=True)
    bench.gate.let_go()
    for waiter in (first, *waiting, fits, urgent):
        assert waiter.ended().error is None
    stored = {bytes(value[23:40]) for _, value in all_rows(bench.store, Family.QUEUE)}
    assert stored == {packed_id(n) for n in (0, 10, 11, 12, 20, 21, 22, 30, 31, 32, 41, 51, 52)}
    assert len(events(bench.store)) == len(stored)
    assert not bench.store.commit([append(900), append(901)])[0].repeated, "room again, and nothing was known of it"
    assert bench.store.writer.pending_ops == 0


def test_bytes_are_bounded_too(bench: Bench) -> None:
    """By the records that wait; one unit alone is taken whatever its size."""
    bench.restart(StoreOptions(pending_bytes_max=1_000, gap_event=gap_event))
    big = append(1)._replace(record=bytes(5_000))
    bench.gate.hold()
    first = bench.submit(append(0))
    bench.gate.await_sync()
    alone = bench.submit(big)
    with pytest.raises(StoreBusy):
        bench.store.commit([append(2)])
    bench.gate.let_go()
    assert first.ended().error is alone.ended().error is None
    assert len(all_rows(bench.store, Family.QUEUE)) == 2


def test_gathered_messages_count_before_and_after_their_hand_over(bench: Bench) -> None:
    """Bytes that wait are the same for units of the loop, gathered in this turn or in one before."""
    bench.restart(StoreOptions(pending_bytes_max=1_000, gap_event=gap_event))
    large = append(1, payload=bytes(600))

    async def scenario() -> None:
        bench.store.attach(asyncio.get_running_loop(), lambda _: None)
        bench.gate.hold()
        first = bench.submit(append(0))
        await asyncio.to_thread(bench.gate.await_sync)
        told = asyncio.Event()
        bench.store.send(large, lambda *_: told.set())
        for _ in range(2):  # and then behind the hand-over, at the end of the turn
            with pytest.raises(StoreBusy):
                bench.store.send(append(2, payload=bytes(600)), lambda *_: None)
            await asyncio.sleep(0)
        bench.gate.let_go()
        await asyncio.wait_for(told.wait(), PATIENCE_S)
        assert first.ended().error is None

    asyncio.run(scenario())
    assert len(all_rows(bench.store, Family.QUEUE)) == 2
    assert bench.store.writer.pending_ops == 0


def test_a_failed_store_gives_the_reason_at_each_call(bench: Bench) -> None:
    """In the words of the first failure, which is its cause."""
    bench.gate.fails = "sync"
    with pytest.raises(StoreFailed) as first:
        bench.store.commit([append(0)])
    assert bench.store.failure is not None
    with pytest.raises(StoreFailed) as again:
        bench.store.commit([append(1)])
    assert str(again.value) == str(bench.store.failure)
    assert str(again.value) in str(first.value)
    assert again.value.__cause__ is bench.store.failure


def test_a_batch_is_bounded_and_units_stay_whole(bench: Bench) -> None:
    """What waits is committed in several batches, never with a unit in two of them."""
    bench.gate.hold()
    waiters = [bench.submit(append(0))]
    bench.gate.await_sync()
    half = OPS_PER_BATCH_MAX // 2
    waiters += [bench.submit(*(Emit(b"e") for _ in range(half + 1))) for _ in range(3)]
    writes = bench.gate.calls.count("write")
    bench.gate.let_go()
    for waiter in waiters:
        assert waiter.ended().error is None
    assert bench.gate.calls.count("write") == writes + 3
    assert len(events(bench.store)) == 1 + 3 * (half + 1)


# -- fail-stop ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["write", "sync"])
@pytest.mark.parametrize(
    "error", [StoreFailed("IO error"), OSError(5, "Input/output error"), StoreCorrupt("bad block")]
)
def test_a_failure_is_final(bench: Bench, where: Literal["write", "sync"], error: Exception) -> None:
    """Every waiter is told, nothing is accepted or synced after, ``on_failure`` hears it once, what was kept stays."""
    kept = bench.store.commit([append(1), schedule(2, NOW_MS + 1)])
    bench.gate.hold()
    held = bench.submit(append(3))
    bench.gate.await_sync()
    waiting = [bench.submit(append(4)), bench.submit(append(5), is_urgent=True)]
    bench.gate.error = error
    bench.gate.fails = where
    bench.gate.let_go()
    failing = waiting if where == "write" else [held, *waiting]
    for waiter in failing:
        assert isinstance(waiter.ended().error, StoreFailed)
    assert isinstance(bench.store.failure, type(error) if isinstance(error, StoreError) else StoreFailed)
    bench.store.writer._thread.join(PATIENCE_S)
    assert bench.failures == [bench.store.failure]
    assert error in {bench.failures[0], bench.failures[0].__cause__}, "what went wrong is told with it"

    calls = len(bench.gate.calls)
    bench.gate.fails = None
    for is_urgent in (False, True):
        with pytest.raises(StoreFailed):
            bench.store.commit([append(6)], is_urgent=is_urgent)
    bench.store.close()
    assert bench.gate.calls[calls:] == ["close"], "no write and no sync is tried again"
    assert len(bench.failures) == 1

    store = bench.open()
    assert store.recovery.was_closed is False
    assert store.commit([append(1), schedule(2, NOW_MS + 1)]) == [each._replace(repeated=True) for each in kept]
    assert store.find(SCOPE, packed_id(4)) is store.find(SCOPE, packed_id(6)) is None
    assert counted(store, [SCOPE]) == recount(store)


def test_after_a_power_loss_synced_rows_are_there() -> None:
    """In memory, where power can be lost: the unsynced batch is gone as a whole, the synced ones are there."""
    engine = MemoryEngine()
    store = Store(engine, ManualClock(NOW_MS), StoreOptions())
    store.commit([append(1), schedule(2, NOW_MS + 1)])
    engine.fail_next_sync = True
    with pytest.raises(StoreFailed):
        store.commit([append(3), schedule(4, NOW_MS + 1)])
    store.close()
    store = Store(engine.crashed(), ManualClock(NOW_MS), StoreOptions())
    found = [store.find(SCOPE, packed_id(number)) for number in (1, 2, 3, 4)]
    assert [each is not None for each in found] == [True, True, False, False]
    assert counted(store, [SCOPE]) == recount(store)
    assert store.commit([append(5)])[0][1:4] == (3, 0, 1), "sequence and offset go on from there"
    store.close()


def test_an_op_that_cannot_be_written_fails_the_store_loudly(bench: Bench) -> None:
    """What the parts above must never submit: not half a batch, not a thread that is gone while waiters wait."""
    with pytest.raises(StoreFailed):
        bench.store.commit([append(1), schedule(2, NOW_MS)._replace(deliver_at_ms=2**70)])
    assert bench.store.failure is not None
    bench.store.close()
    assert all_rows(bench.open(), Family.QUEUE) == []


# -- durability, asyncio, the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("durability", "made"), [("disk", "sync"), ("process", "flush")])
def test_durability_decides_about_the_sync(bench: Bench, durability: Literal["disk", "process"], made: str) -> None:
    """``disk``: one sync after each write; ``process``: one flush, no sync. SIGKILL loses nothing in both."""
    bench.restart(StoreOptions(durability=durability, gap_event=gap_event))
    calls = len(bench.gate.calls)
    for number in range(5):
        bench.store.commit([append(number)])
    assert bench.gate.calls[calls:] == ["write", made] * 5
    assert len(all_rows(bench.kill(), Family.QUEUE)) == 5


def ends(appended: Appended) -> dict[tuple[int, int], int]:
    """The ends of the queues that grew."""
    return {place: growth.end for place, growth in appended.items()}


def test_commit_async_settles_on_the_loop_with_one_wake_up_per_batch(bench: Bench) -> None:
    """A hundred futures of one batch cost the loop one call; ends of queues are told before the futures are."""
    told: list[tuple[str, object]] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        wake_ups = 0
        call_soon_threadsafe = loop.call_soon_threadsafe

        def counting(*args: object, **kwargs: object) -> object:
            nonlocal wake_ups
            wake_ups += 1
            return call_soon_threadsafe(*args, **kwargs)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = counting  # type: ignore[method-assign, assignment]
        loop_thread = threading.get_ident()
        bench.store.attach(
            loop,
            lambda appended: told.append(("ends", ends(appended) if threading.get_ident() == loop_thread else None)),
        )
        bench.gate.hold()
        first = bench.store.commit_async([append(0)])
        await asyncio.to_thread(bench.gate.await_sync)
        before = wake_ups
        futures = [bench.store.commit_async([append(number)]) for number in range(1, 101)]
        for future in futures:
            future.add_done_callback(lambda _: told.append(("future", None)))
        futures[50].cancel()
        assert not first.done()
        await asyncio.to_thread(bench.gate.let_go)
        await asyncio.wait_for(asyncio.gather(first, *futures, return_exceptions=True), PATIENCE_S)
        assert wake_ups - before <= 2 + 2, "one for each of two batches (and one per to_thread)"
        assert [future.result()[0].queue_offset for future in futures if not future.cancelled()] == [
            offset for offset in range(1, 101) if offset != 51
        ]

    asyncio.run(scenario())
    batches = [each for each in told if each[0] == "ends"]
    assert batches == [("ends", {(TOPIC, 0): 1}), ("ends", {(TOPIC, 0): 101})]
    assert told.index(batches[1]) < len(told) - 99, "ends first"
    assert bench.store.queue_end(TOPIC, 0) == 101, "cancelling does not undo the write"


def test_commit_async_fails_every_future(bench: Bench) -> None:
    """Those in the batch and those behind it, on the loop."""

    async def scenario() -> None:
        bench.store.attach(asyncio.get_running_loop(), lambda _: None)
        bench.gate.hold()
        futures = [bench.store.commit_async([append(0)])]
        await asyncio.to_thread(bench.gate.await_sync)
        futures += [bench.store.commit_async([append(number)]) for number in range(1, 5)]
        bench.gate.fails = "sync"
        bench.gate.let_go()
        done = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), PATIENCE_S)
        assert [type(each) for each in done] == [StoreFailed] * 5
        with pytest.raises(StoreFailed):
            await bench.store.commit_async([append(9)])

    asyncio.run(scenario())


@pytest.mark.parametrize("is_one", [False, True], ids=["units", "messages sent alone"])
def test_gathered_messages_are_reported_when_the_store_fails_before_the_hand_over(bench: Bench, is_one: bool) -> None:
    """In the turn in which it was: each caller hears of it, also behind one whose answer cannot be made."""
    told: list[str] = []
    both = asyncio.Event()

    def await_failure() -> None:
        patience_ends = time.monotonic() + PATIENCE_S
        while bench.store.failure is None:
            assert time.monotonic() < patience_ends, "the store has not failed"
            time.sleep(0.001)

    def settle(unit: Unit) -> None:
        hear(None, unit.error)

    def hear(receipt: Receipt | None, error: StoreError | None) -> None:
        assert receipt is None
        told.append(type(error).__name__)
        if len(told) == 1:
            raise RuntimeError("an answer")
        both.set()

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        bench.store.attach(loop, lambda _: None)
        bench.gate.hold()
        failing = bench.store.commit_async([append(0)])
        await asyncio.to_thread(bench.gate.await_sync)
        for number in (1, 2):
            if is_one:
                bench.store.send(append(number), hear)
            else:
                bench.store.submit(LoopUnit([append(number)], settle))
        bench.gate.fails = "sync"
        bench.gate.let_go()
        await_failure()  # the loop does not turn meanwhile, so nothing is handed over
        with pytest.raises(StoreFailed):
            await asyncio.wait_for(failing, PATIENCE_S)
        await asyncio.wait_for(both.wait(), PATIENCE_S)

    asyncio.run(scenario())
    assert told == ["StoreFailed"] * 2


def test_a_listener_that_raises_leaves_no_waiter_behind(bench: Bench) -> None:
    """Who listens for new ends may fail; futures are settled all the same, and the writer goes on."""
    heard: list[str] = []

    def listen(_: object) -> None:
        raise RuntimeError("a listener")

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: heard.append(str(context["exception"])))
        bench.store.attach(loop, listen)
        for number in range(3):
            (receipt,) = await asyncio.wait_for(bench.store.commit_async([append(number)]), PATIENCE_S)
            assert receipt.queue_offset == number

    asyncio.run(scenario())
    assert heard == ["a listener"] * 3


def test_a_waiter_that_raises_leaves_no_other_waiting(bench: Bench) -> None:
    """An answer that cannot be made is one caller's affair: those behind it are told, and so is the next batch."""
    heard: list[str] = []

    def settle(_: object) -> None:
        raise RuntimeError("an answer")

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: heard.append(str(context["exception"])))
        bench.store.attach(loop, lambda _: None)
        for number in range(3):
            bench.gate.hold()
            bench.store.submit(LoopUnit([append(2 * number)], settle))
            done = bench.store.commit_async([append(2 * number + 1)])
            bench.gate.let_go()
            (receipt,) = await asyncio.wait_for(done, PATIENCE_S)
            assert receipt.queue_offset == 2 * number + 1

    asyncio.run(scenario())
    assert heard == ["an answer"] * 3


def test_a_closed_loop_does_not_stop_the_writer(bench: Bench) -> None:
    """Nobody waits any more; what was written stays written and the store goes on."""
    forgotten: list[object] = []

    async def scenario() -> None:
        bench.store.attach(asyncio.get_running_loop(), lambda _: None)
        bench.gate.hold()
        forgotten.append(bench.store.commit_async([append(0)]))

    asyncio.run(scenario())
    bench.gate.let_go()
    bench.store.commit([append(1)])
    assert bench.store.queue_end(TOPIC, 0) == 2
    assert bench.store.failure is None


def test_close_commits_accepted_operations(bench: Bench) -> None:
    """Units that wait are committed and answered before the end; later ones are refused; closing twice is allowed."""
    bench.gate.hold()
    waiters = [bench.submit(append(0))]
    bench.gate.await_sync()
    waiters += [bench.submit(append(number)) for number in range(1, 4)]
    closing = threading.Thread(target=bench.store.close)
    closing.start()
    bench.gate.let_go()
    closing.join(PATIENCE_S)
    for waiter in waiters:
        assert waiter.ended().error is None
    bench.store.close()
    for use in (lambda: bench.store.commit([append(9)]), lambda: bench.store.scan(Family.QUEUE, b"", b"\xff", limit=1)):
        with pytest.raises(StoreClosed):
            use()
    store = bench.open()
    assert store.recovery.was_closed
    assert store.queue_end(TOPIC, 0) == 4


def test_recovery_reports_its_findings(bench: Bench) -> None:
    """New, closed in order or not, the last sequence; the run is counted up each time."""
    first = bench.store
    assert (first.recovery.is_new, first.recovery.was_closed, first.recovery.sequence, first.boot) == (
        True,
        False,
        0,
        1,
    )
    first.commit([append(1), append(2)])
    second = bench.restart()
    assert (second.recovery.is_new, second.recovery.was_closed, second.recovery.sequence, second.boot) == (
        False,
        True,
        2,
        2,
    )
    third = bench.kill()
    assert (third.recovery.is_new, third.recovery.was_closed, third.recovery.sequence, third.boot) == (
        False,
        False,
        2,
        3,
    )
    assert third.recovery.cut_bytes == 0


def test_opening_writes_no_message_and_reads_none(bench: Bench) -> None:
    """A reopened store answers at once from its figures; the sequence row is there although nothing was accepted."""
    bench.store.commit([append(1)])
    store = bench.restart()
    assert meta_u64(store, META_SEQUENCE) == 1
    assert meta_u64(store, META_FORMAT) == FORMAT_VERSION
    assert bench.gate.calls == ["write", "sync"]


def test_a_newer_format_is_refused(bench: Bench) -> None:
    """By the row in the database, which says so even when the marker file was replaced."""
    bench.store.commit([Put(Family.META, META_FORMAT, pack_u64(FORMAT_VERSION + 1))])
    bench.store.close()
    engine = bench.disk.engine()
    with pytest.raises(FormatUnsupported, match=str(FORMAT_VERSION + 1)):
        Store(engine, bench.clock, bench.options)
    engine.close()


def test_rows_without_a_format_are_damage(bench: Bench) -> None:
    """A database that lost its meta rows must not look like a new one."""
    bench.store.commit([append(1), Delete(Family.META, META_FORMAT)])
    bench.store.close()
    engine = bench.disk.engine()
    with pytest.raises(StoreCorrupt, match="format"):
        Store(engine, bench.clock, bench.options)
    engine.close()


@pytest.mark.parametrize("key", [META_FORMAT, b"B", META_SEQUENCE, META_DONE, b"O", b"G"])
def test_a_damaged_figure_is_damage(bench: Bench, key: bytes) -> None:
    """A meta row of the wrong length raises our error, which names damage, and nothing else."""
    bench.store.commit([append(1), Done(1)])
    bench.store.commit([Put(Family.META, key, b"\0\1\2")])
    bench.store.close()
    engine = bench.disk.engine()
    with pytest.raises(StoreCorrupt):
        Store(engine, bench.clock, bench.options)
    engine.close()
