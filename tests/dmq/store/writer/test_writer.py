"""What the writer counts and tells, and whom it has wait, on both engines."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest
from support.rigs.store.rows import PATIENCE_S, append, hand_over, schedule
from support.rigs.store.workbench import NOW_MS, Bench

from dmq.errors import StoreError
from dmq.store.schema.messages.index import Receipt
from dmq.store.writer.operations import Emit, Op, Withdraw
from dmq.store.writer.writer import CommitStats, LoopUnit, Unit

pytestmark = pytest.mark.contract


def size_of(*ops: Op) -> int:
    return Unit(ops).size_bytes


def test_a_unit_is_as_large_as_the_messages_it_carries() -> None:
    """Those of every kind of op, the bodies of half messages, and what stands instead of another."""
    first, second, later = append(1), append(200_000), schedule(3, NOW_MS)
    delivered = hand_over(b"k" * 16, later.record)
    half = later._replace(half_body=b"half")
    withdrawn = Withdraw(b"k" * 16, 1, b"id", NOW_MS, 0, (first, Emit(b"event"), later))
    assert size_of() == size_of(Emit(b"event")) == 0
    assert size_of(first, second) == len(first.record) + len(second.record)
    assert size_of(later, delivered) == len(later.record) + len(delivered.record)
    assert size_of(half, first) == len(later.record) + 4 + len(first.record)
    assert size_of(withdrawn, second) == len(first.record) + len(later.record) + len(second.record)


def test_batches_are_counted_and_reported(bench: Bench) -> None:
    """Their ops, the size of their messages, how long they took, and how much of that was the sync."""
    told: list[tuple[int, int, float, float]] = []
    bench.store.writer.observe = lambda *figures: told.append(figures)
    assert bench.store.writer.stats == CommitStats(0, 0, 0, 0.0)
    ops = [append(number) for number in range(4)]
    bench.gate.hold()
    waiters = [bench.submit(ops[0])]
    bench.gate.await_sync()
    waiters += [bench.submit(ops[1]), bench.submit(ops[2], ops[3], Emit(b"event"))]
    bench.clock.advance(250)
    bench.gate.let_go()
    for waiter in waiters:
        assert waiter.ended().error is None
    assert told == [(1, size_of(ops[0]), 0.25, 0.25), (4, size_of(*ops[1:]), 0.0, 0.0)]
    assert bench.store.writer.stats == CommitStats(2, 5, size_of(*ops), 0.25)


def test_room_is_looked_for_as_much_as_a_batch_takes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages, and for each op what is written beside them."""
    asked: list[int] = []

    def has_room(size_bytes: int) -> bool:
        asked.append(size_bytes)
        return True

    monkeypatch.setattr(bench.store.writer, "_has_room", has_room)
    ops: list[Op] = [append(1), append(2), Emit(b"event")]
    bench.store.commit(ops)
    assert asked == [size_of(*ops) + 3 * 256]


def test_requests_of_the_loop_gather_while_it_is_busy(bench: Bench) -> None:
    """Until it has told everybody of the last batch; who waits in a thread of his own does not wait for the loop."""
    bench.submit(append(0)).ended()

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        is_asked = threading.Event()
        call_soon_threadsafe = loop.call_soon_threadsafe

        def asking(*args: object, **kwargs: object) -> object:
            is_asked.set()
            return call_soon_threadsafe(*args, **kwargs)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = asking  # type: ignore[method-assign, assignment]
        bench.store.attach(loop, lambda _: None)
        futures = [bench.store.commit_async([append(1)], is_urgent=True)]
        assert is_asked.wait(PATIENCE_S)  # and from here on the loop is busy
        bench.gate.hold()
        futures.append(bench.store.commit_async([append(2)], is_urgent=True))
        assert not bench.gate.is_syncing.wait(0.2), "it may want more in the same batch"
        direct = bench.submit(append(3))
        bench.gate.await_sync()
        bench.gate.let_go()
        direct.ended()
        bench.gate.hold()
        futures.append(bench.store.commit_async([append(4)], is_urgent=True))
        assert not bench.gate.is_syncing.wait(0.2), "the direct unit is done, the loop is busy as before"
        bench.gate.let_go()
        await asyncio.wait_for(asyncio.gather(*futures), PATIENCE_S)

    asyncio.run(scenario())
    offsets = [bench.store.commit([append(number)])[0].queue_offset for number in range(1, 5)]
    assert offsets == [1, 2, 3, 4], "all were written, in their order"


def test_messages_that_are_sent_alone_share_a_unit_in_their_order(bench: Bench) -> None:
    """Each has a receipt of its own, a repeated one the first; what comes between them stays between them."""
    told: list[tuple[str, int, bool]] = []
    heard: list[str] = []

    def hear(name: str, receipt: Receipt | None, error: StoreError | None) -> None:
        assert receipt is not None
        assert error is None
        told.append((name, receipt.queue_offset, receipt.repeated))
        if name == "one":
            raise RuntimeError("an answer that cannot be made")

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: heard.append(str(context["exception"])))
        bench.store.attach(loop, lambda _: None)
        before = bench.store.commit_stats.batches
        for number, name in enumerate(("one", "two")):
            bench.store.send(append(number), partial(hear, name))
        bench.store.send(append(1), partial(hear, "two again"))
        ops = [append(2), append(3)]
        bench.store.submit(LoopUnit(ops, lambda unit: told.append(("unit", unit.receipts[0].queue_offset, False))))
        bench.store.send(append(4), partial(hear, "last"))
        await bench.store.commit_async([])
        assert bench.store.commit_stats.batches - before <= 2

    asyncio.run(scenario())
    assert told == [
        ("one", 0, False),
        ("two", 1, False),
        ("two again", 1, True),
        ("unit", 2, False),
        ("last", 4, False),
    ]
    assert heard == ["an answer that cannot be made"]


def test_no_unit_of_messages_that_are_sent_alone_is_large(bench: Bench) -> None:
    """A batch is made of whole units, and has its bounds."""
    sizes: list[int] = []

    async def scenario() -> None:
        bench.store.attach(asyncio.get_running_loop(), lambda _: None)
        for number in range(600):
            bench.store.send(append(number), lambda *_: None)
        large = append(600)._replace(record=bytes(2 * 1024 * 1024))
        bench.store.send(large, lambda *_: None)
        bench.store.send(append(601), lambda *_: None)
        sizes.extend(len(unit.ops) for unit in bench.store.writer._gathered)
        await bench.store.commit_async([])

    asyncio.run(scenario())
    assert sizes == [256, 256, 89, 1]
