"""Sends of the hook on an event loop: awaited, cancelled, thrown away."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from concurrent.futures import Future

import pytest
from support.hook_rig import AWAY, Rig

from broker_adapter.clock import ManualClock
from retry import (
    Delivered,
    Permanent,
    Redelivery,
    Rejected,
    SinkError,
    Spooled,
)
from retry.sink import Entry, Held
from retry.testing import FakeProducer, MemorySink


def test_an_async_handler_is_awaited_on_the_callers_loop() -> None:
    """Delivered, spooled and rejected as for a sync one."""
    rig = Rig()
    loops: list[object] = []
    script: list[Exception | None] = [None, AWAY, Permanent("no")]

    @rig.hook.handler("a")
    async def handler(payload: bytes) -> str:
        loops.append(asyncio.get_running_loop())
        if error := script.pop(0):
            raise error
        return "receipt"

    async def main() -> list[object]:
        outcomes = [await rig.hook.send_async("a", b"1") for _ in range(3)]
        assert set(loops) == {asyncio.get_running_loop()}
        return list(outcomes)

    delivered, spooled, rejected = asyncio.run(main())
    assert isinstance(delivered, Delivered)
    assert delivered.receipt == "receipt"
    assert isinstance(spooled, Spooled)
    assert isinstance(rejected, Rejected)
    with pytest.raises(TypeError, match="send_async"):
        rig.hook.send("a", b"1")
    rig.hook.close()


def test_a_sync_handler_does_not_hold_up_the_loop() -> None:
    """It runs in a thread: the loop can set what the handler waits for."""
    rig = Rig()
    go = threading.Event()
    rig.hook.add_handler("s", lambda payload: go.wait(10))

    async def main() -> object:
        sending = asyncio.ensure_future(rig.hook.send_async("s", b"1"))
        await asyncio.sleep(0)
        go.set()
        return await sending

    outcome = asyncio.run(main())
    assert isinstance(outcome, Delivered)
    assert outcome.receipt is True


def test_a_cancelled_send_is_kept_first() -> None:
    """The task is cancelled, and the message is durable and uncertain; two cancellations change nothing."""

    class Slow(MemorySink):
        def put(self, entry: Entry, *, is_held: bool = False) -> Future[Held | None]:
            putting.set()
            assert go_on.wait(10)
            return super().put(entry, is_held=is_held)

    putting, go_on = threading.Event(), threading.Event()
    rig = Rig(sink=Slow(ManualClock()))
    started = asyncio.Event()

    @rig.hook.handler("a")
    async def handler(payload: bytes) -> None:
        started.set()
        await asyncio.Event().wait()

    async def main() -> None:
        sending = asyncio.ensure_future(rig.hook.send_async("a", b"1"))
        await started.wait()
        sending.cancel()
        await asyncio.to_thread(putting.wait, 10)
        sending.cancel()
        await asyncio.sleep(0)
        assert not sending.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await sending

    asyncio.run(main())
    (entry,) = rig.sink.entries
    assert entry.is_uncertain
    assert rig.hook.metrics().sends["a", "spooled"] == 1
    rig.hook.close()


def test_a_cancellation_while_the_sink_works_is_not_lost() -> None:
    """The caller is cancelled after the entry is durable, not before."""
    rig = Rig()
    script = [AWAY]
    rig.hook.add_handler("s", FakeProducer(script).send_async)
    rig.sink.fail("put", SinkError("refused"))

    async def main() -> None:
        sending = asyncio.ensure_future(rig.hook.send_async("s", b"1"))
        await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending

    asyncio.run(main())
    assert rig.hook.metrics().sends["s", "rejected"] == 1
    rig.hook.close()


def test_the_hook_is_a_context_manager_on_both_sides() -> None:
    """Leaving it closes it and its sink."""

    async def main() -> MemorySink:
        sink = MemorySink(ManualClock())
        async with Redelivery(sink) as hook:
            hook.add_handler("t", FakeProducer().send_async)
            assert isinstance(await hook.send_async("t", b"1"), Delivered)
        return sink

    assert asyncio.run(main()).is_closed


def test_a_loop_that_goes_away_under_a_send_leaves_the_message_in_the_sink() -> None:
    """Nobody can await any more when a coroutine is thrown away; what it was sending is kept all the same."""
    rig = Rig()

    class Pause:
        def __await__(self) -> Generator[None, None, None]:
            yield

    @rig.hook.handler("a")
    async def handler(payload: bytes) -> None:
        await Pause()

    sending = rig.hook.send_async("a", b"1")
    sending.send(None)
    sending.close()
    (entry,) = rig.sink.entries
    assert entry.is_uncertain
