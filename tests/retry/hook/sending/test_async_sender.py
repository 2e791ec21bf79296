"""Sends of the hook on an event loop: awaited, cancelled, thrown away."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Generator
from concurrent.futures import CancelledError, Future

import pytest
from support.rigs.producer.hook import AWAY, Rig, until

from broker_adapter.runtime.clock import ManualClock, SystemClock
from retry import (
    Delivered,
    Permanent,
    Redelivery,
    Rejected,
    RetryPolicy,
    SinkError,
    Spooled,
    Table,
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


@pytest.mark.parametrize("is_async", [True, False], ids=["async handler", "sync handler"])
def test_awaits_of_a_handler_are_cancelled_and_its_caller_is_not(is_async: bool) -> None:
    """An attempt that failed, of which nobody knows more: the message is kept, and the caller's task goes on.

    The official RocketMQ client's futures raise that of an attempt whose connection is closed.
    """
    rig = Rig()

    def given_up() -> None:
        raise asyncio.CancelledError

    @rig.hook.handler("a")
    async def handler(payload: bytes) -> None:
        gone: Future[None] = Future()
        gone.set_exception(CancelledError())
        await asyncio.wrap_future(gone)

    rig.hook.add_handler("s", lambda payload: given_up())

    async def main() -> object:
        return await rig.hook.send_async("a" if is_async else "s", b"1")

    outcome = asyncio.run(main())
    assert isinstance(outcome, Spooled)
    assert (outcome.is_uncertain, outcome.reason) == (True, "CancelledError")
    (entry,) = rig.sink.entries
    assert entry.is_uncertain
    rig.hook.close()


def test_a_classifier_sees_such_a_failure_alike_at_each_attempt() -> None:
    """As the error of a future, whether the send made the attempt or the drain."""
    seen: list[type[BaseException]] = []

    def classify(error: BaseException) -> None:
        seen.append(type(error))

    rig = Rig()

    @rig.hook.handler("a", classify=classify)
    async def handler(payload: bytes) -> None:
        raise asyncio.CancelledError

    asyncio.run(rig.hook.send_async("a", b"1"))
    rig.clock.advance(3_600_000)
    assert rig.hook.run_due() == 1
    assert seen == [CancelledError, CancelledError]
    rig.hook.close()


def test_a_send_that_outlives_a_timeout_of_its_caller_is_kept() -> None:
    """``asyncio.timeout`` cancels the task and takes that back: the caller gets its TimeoutError."""
    rig = Rig()

    @rig.hook.handler("a")
    async def handler(payload: bytes) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await rig.hook.send_async("a", b"1")

    asyncio.run(main())
    (entry,) = rig.sink.entries
    assert entry.is_uncertain
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


@pytest.mark.parametrize("mode", ["on_failure", "write_ahead"])
@pytest.mark.parametrize("key", ["", "k"])
def test_the_end_of_main_keeps_messages_in_flight(mode: str, key: str) -> None:
    """``asyncio.run`` cancels every task as it ends, those that keep a message included: each is kept first."""
    rig = Rig(mode=mode)

    pending: list[asyncio.Future[None]] = []
    are_all_there = asyncio.Event()

    @rig.hook.handler("a")
    async def handler(payload: bytes) -> None:
        pending.append(asyncio.get_running_loop().create_future())
        if len(pending) == 5:
            are_all_there.set()
        await pending[-1]

    async def main() -> None:
        tasks = [asyncio.ensure_future(rig.hook.send_async("a", b"%d" % n, key=key and f"{key}{n}")) for n in range(5)]
        await are_all_there.wait()
        tasks[0].cancel()  # as the program ends
        for each in pending[1:4]:
            each.set_exception(ConnectionResetError("the client was closed"))

    asyncio.run(main())
    assert sorted(entry.payload for entry in rig.sink.entries) == [b"0", b"1", b"2", b"3", b"4"]
    rig.hook.close()


def test_a_send_that_is_cancelled_before_its_turn_is_kept() -> None:
    """The sink still says what waits under its key: the message is kept as one that fails is, and goes behind those."""

    class Slow(MemorySink):
        def has_waiting(self, type_name: str, key: str) -> bool:
            asked.set()
            assert answer.wait(10)
            return super().has_waiting(type_name, key)

    asked, answer = threading.Event(), threading.Event()
    rig = Rig(sink=Slow(ManualClock()))
    rig.hook.add_handler("a", FakeProducer().send_async)

    async def main() -> None:
        sending = asyncio.ensure_future(rig.hook.send_async("a", b"1", key="k"))
        await asyncio.to_thread(asked.wait, 10)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending

    asyncio.run(main())
    answer.set()
    (entry,) = rig.sink.entries
    assert (entry.payload, entry.key, entry.attempts, entry.is_uncertain) == (b"1", "k", 0, False)
    rig.hook.close()


@pytest.mark.parametrize("error", [StopIteration("by a sync handler"), GeneratorExit()])
def test_any_exception_of_a_sync_handler_ends_the_send(error: BaseException) -> None:
    """A future of asyncio cannot carry ``StopIteration``, nor a generator ``GeneratorExit``."""
    rig = Rig()

    def handler(payload: bytes) -> None:
        raise error

    rig.hook.add_handler("s", handler)
    outcome = asyncio.run(asyncio.wait_for(rig.hook.send_async("s", b"1"), 20))
    assert isinstance(outcome, Spooled)
    assert type(error).__name__ in outcome.reason
    rig.hook.close()


def test_a_repetition_runs_on_the_loop_of_the_application() -> None:
    """An async client belongs to the loop that it was made on: elsewhere it fails, and the message would end dead."""
    policy = RetryPolicy(backoff=Table((1,) * 3), max_attempts=4)
    hook = Redelivery(MemorySink(SystemClock()), policy=policy)
    loops: list[asyncio.AbstractEventLoop] = []

    @hook.handler("a")
    async def handler(payload: bytes) -> None:
        loops.append(asyncio.get_running_loop())
        if len(loops) == 1:
            raise AWAY

    async def main() -> None:
        assert isinstance(await hook.send_async("a", b"1"), Spooled)
        await asyncio.to_thread(until, lambda: hook.metrics().redelivered["a"] == 1)
        assert loops == [asyncio.get_running_loop()] * 2

    asyncio.run(main())
    hook.close()


def test_a_loop_that_ends_under_a_repetition_costs_no_attempt() -> None:
    """The program's first loop ends while a message is repeated on it; the next attempt runs where there is a loop."""
    policy = RetryPolicy(backoff=Table((1,) * 3), max_attempts=2)
    hook = Redelivery(MemorySink(SystemClock()), policy=policy)
    attempts: list[asyncio.AbstractEventLoop] = []

    @hook.handler("a")
    async def handler(payload: bytes) -> None:
        attempts.append(asyncio.get_running_loop())
        if len(attempts) == 1:
            raise AWAY
        if len(attempts) == 2:
            await asyncio.Event().wait()

    async def main() -> None:
        assert isinstance(await hook.send_async("a", b"1"), Spooled)
        await asyncio.to_thread(until, lambda: len(attempts) == 2)

    asyncio.run(main())
    until(lambda: hook.metrics().redelivered["a"] == 1)
    assert attempts[2] is not attempts[1]
    hook.close()


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_loop_that_is_closed_under_a_repetition_leaves_no_traceback(
    is_begun: bool, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    """The loop ends in the very turn in which the repetition was given to it, or in its middle; it runs elsewhere."""
    policy = RetryPolicy(backoff=Table((1,) * 3), max_attempts=2)
    hook = Redelivery(MemorySink(SystemClock()), policy=policy, autostart=False)
    attempts: list[asyncio.AbstractEventLoop] = []

    @hook.handler("a")
    async def handler(payload: bytes) -> None:
        attempts.append(asyncio.get_running_loop())
        if len(attempts) == 1:
            raise AWAY
        if attempts[-1] is loop:
            loop.stop()
            await asyncio.Event().wait()

    def start() -> None:
        hook.start()
        if not is_begun:
            until(lambda: bool(hook._loops._running))
            loop.stop()

    loop = asyncio.new_event_loop()
    assert isinstance(loop.run_until_complete(hook.send_async("a", b"1")), Spooled)
    loop.call_soon(start)
    loop.run_forever()
    assert len(attempts) == 1 + is_begun
    loop.close()
    until(lambda: hook.metrics().redelivered["a"] == 1)
    gc.collect()
    assert not [each for each in caplog.records if each.name == "concurrent.futures"]
    assert not [str(each.message) for each in recwarn.list]
    hook.close()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_an_exit_in_a_repetition_is_an_attempt_that_failed(error: BaseException) -> None:
    """It ends neither the loop on which all types are repeated nor the program's."""
    policy = RetryPolicy(backoff=Table((1,) * 3), max_attempts=4)
    hook = Redelivery(MemorySink(SystemClock()), policy=policy)
    script: dict[str, list[BaseException | None]] = {"bad": [AWAY, error, None], "good": [AWAY, None]}

    async def handler(payload: bytes) -> None:
        if (raised := script[payload.decode()].pop(0)) is not None:
            raise raised

    hook.add_handler("bad", handler)
    hook.add_handler("good", handler)
    asyncio.run(hook.send_async("bad", b"bad"))
    until(lambda: hook.metrics().redelivered["bad"] == 1)
    asyncio.run(hook.send_async("good", b"good"))
    until(lambda: hook.metrics().redelivered["good"] == 1)
    assert hook.close().still_waiting == 0
