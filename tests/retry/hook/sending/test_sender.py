"""One send of the hook: delivered, spooled or rejected, and never gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from random import Random

import pytest
from support.rigs.producer.hook import AWAY, EXACT, Rig

from broker_adapter.runtime.clock import ManualClock
from dmq import Spool
from retry import (
    Attempt,
    Delivered,
    HandlerExists,
    Permanent,
    Redelivery,
    Rejected,
    RetryPolicy,
    SinkFull,
    SinkUnavailable,
    Spooled,
    Table,
    Throttled,
    UnknownType,
)
from retry.hook.sending.uid import time_of
from retry.sink import Entry, Held
from retry.testing import FakeProducer, MemorySink, advance, run_due


def test_a_send_that_succeeds_is_delivered_and_touches_no_sink() -> None:
    """The receipt is the handler's; the sink is not even asked."""
    rig = Rig(["receipt"])
    outcome = rig.send()
    assert isinstance(outcome, Delivered)
    assert outcome.receipt == "receipt"
    assert time_of(outcome.uid) >= rig.clock.now_ms()
    assert rig.sink.calls == []


def test_a_send_that_fails_is_durable_with_the_first_step_before_it_returns() -> None:
    """The attempt counts, the uid is the one the handler would have seen."""
    rig = Rig([AWAY])
    outcome = rig.send(key="k")
    (entry,) = rig.sink.entries
    assert outcome == Spooled(
        uid=entry.uid, due_at_ms=rig.clock.now_ms() + 3_000, reason="ConnectionError: away", is_uncertain=False
    )
    assert (entry.attempts, entry.key, entry.payload, entry.error) == (1, "k", b"p", "ConnectionError: away")
    assert entry.created_at_ms == rig.clock.now_ms()


@pytest.mark.parametrize("error", [TimeoutError(), KeyError("what"), ConnectionResetError()])
def test_an_unknown_outcome_is_uncertain(error: Exception) -> None:
    """A timeout, a reset connection or an unknown error may have got through; the entry remembers it."""
    rig = Rig([error])
    outcome = rig.send()
    assert isinstance(outcome, Spooled)
    assert outcome.is_uncertain
    assert rig.sink.entries[0].is_uncertain


def test_a_message_that_can_never_succeed_is_returned_and_not_kept() -> None:
    """Permanent: the caller still has it."""
    rig = Rig([Permanent("too large")])
    outcome = rig.send()
    assert isinstance(outcome, Rejected)
    assert isinstance(outcome.error, Permanent)
    assert "too large" in outcome.reason
    assert rig.sink.entries == []


def test_a_throttled_send_waits_as_long_as_the_destination_asked() -> None:
    """No attempt is counted, and the next send is not attempted at all until then."""
    rig = Rig([Throttled(after_s=7)])
    first = rig.send(b"1")
    second = rig.send(b"2")
    assert isinstance(first, Spooled)
    assert first.due_at_ms == rig.clock.now_ms() + 7_000
    assert [entry.attempts for entry in rig.sink.entries] == [0, 0]
    assert isinstance(second, Spooled)
    assert rig.producer.calls == [b"1"]
    rig.clock.advance(7_000)
    assert isinstance(rig.send(b"3"), Delivered)


@pytest.mark.parametrize(
    "fault", [SinkFull("1 GiB waits", limit="bytes_max"), SinkUnavailable("disk gone"), RuntimeError("a bug")]
)
def test_a_message_neither_sent_nor_kept_is_rejected_with_both_reasons(fault: Exception) -> None:
    """The caller learns why it was not sent and why it was not kept."""
    rig = Rig([AWAY])
    rig.sink.fail("put", fault)
    outcome = rig.send()
    assert isinstance(outcome, Rejected)
    assert outcome.error is AWAY
    assert "away" in outcome.reason
    assert str(fault) in outcome.reason


def test_a_sink_that_does_not_answer_holds_no_sender_for_ever() -> None:
    """After the timeout the outcome says that it may have been kept."""

    class Silent(MemorySink):
        def put(self, entry: Entry, *, is_held: bool = False) -> Future[Held | None]:
            return Future()

    rig = Rig([AWAY], sink=Silent(ManualClock()), keep_timeout_s=0.01)
    outcome = rig.send()
    assert isinstance(outcome, Rejected)
    assert "no answer" in outcome.reason
    assert "may have been kept" in outcome.reason


def test_a_keyed_send_through_a_daemon_does_not_claim_that_others_wait() -> None:
    """Such a sink is given every keyed message, to keep the order, and does not say whether others of it wait."""
    rig = Rig(can_hold=False)
    rig.sink.has_waiting = lambda type_name, key: bool(key)  # type: ignore[method-assign]
    outcome = rig.send(key="k")
    assert isinstance(outcome, Spooled)
    assert outcome.reason == "handed over: its sink keeps the order of its key"


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), SystemExit(1)])
@pytest.mark.parametrize("mode", ["on_failure", "write_ahead"])
def test_an_interrupt_inside_the_handler_keeps_the_message(interrupt: BaseException, mode: str) -> None:
    """It is raised again, after the message is durable and marked as uncertain."""
    rig = Rig([interrupt], mode=mode)
    with pytest.raises(type(interrupt)):
        rig.send()
    (entry,) = rig.sink.entries
    assert entry.is_uncertain
    assert rig.sink.stats().held == 0


def test_a_buffer_is_copied() -> None:
    """The caller may write into it once send has returned."""
    rig = Rig([AWAY])
    buffer = bytearray(b"before")
    rig.send(buffer)
    buffer[:] = b"after!"
    assert rig.sink.entries[0].payload == b"before"


def test_write_ahead_is_durable_before_the_attempt_and_gone_after_it() -> None:
    """While the handler runs the entry is held in the sink, so a crash repeats it; success finishes it."""
    rig = Rig(mode="write_ahead")
    seen: list[int] = []
    rig.hook.add_handler("w", lambda payload: seen.append(rig.sink.stats("w").held))
    assert isinstance(rig.hook.send("w", b"1"), Delivered)
    assert seen == [1]
    assert rig.sink.entries == []


def test_write_ahead_that_fails_waits_with_its_attempt_counted() -> None:
    """Given back with the policy's first step."""
    rig = Rig([AWAY], mode="write_ahead")
    outcome = rig.send()
    assert isinstance(outcome, Spooled)
    (entry,) = rig.sink.entries
    assert (entry.attempts, entry.due_at_ms) == (1, rig.clock.now_ms() + 3_000)
    assert rig.sink.stats().waiting == 1


def test_write_ahead_without_a_durable_entry_attempts_nothing() -> None:
    """The promise is durable first; a sink that fails means a rejection."""
    rig = Rig(mode="write_ahead")
    rig.sink.fail("put", SinkUnavailable("gone"))
    assert isinstance(rig.send(), Rejected)
    assert rig.producer.calls == []


def test_write_ahead_behind_one_that_came_meanwhile_attempts_nothing() -> None:
    """Two threads send under one key: the later one's entry is parked, so its attempt would be out of order, and twice.

    A permanent error of such an attempt would be a rejection of what is sent all the same.
    """

    class Late(MemorySink):
        def has_waiting(self, type_name: str, key: str) -> bool:
            return False  # the other one's entry comes after the answer

    rig = Rig([AWAY, Permanent("never asked")], sink=Late(ManualClock()), mode="write_ahead")
    assert isinstance(rig.send(b"1", key="a"), Spooled)
    second = rig.send(b"2", key="a")
    assert isinstance(second, Spooled)
    assert second.reason == "earlier messages of its key wait"
    assert not second.is_uncertain
    assert rig.producer.calls == [b"1"]


@pytest.mark.parametrize("mode", ["on_failure", "write_ahead"])
@pytest.mark.parametrize("key", ["", "k"])
def test_a_message_that_is_sent_again_while_it_waits_is_kept_once(tmp_path: Path, key: str, mode: str) -> None:
    """By its uid, in every turn of its wait; ``write_ahead`` does not even attempt it."""
    clock = ManualClock()
    hook = Redelivery(Spool(tmp_path, clock=clock, is_driven=True), autostart=False, policy=EXACT, mode=mode)  # type: ignore[arg-type]
    hook.add_handler("t", FakeProducer([AWAY]).send)
    first = hook.send("t", b"1", key=key)
    again = hook.send("t", b"1", key=key, uid=first.uid)
    assert isinstance(again, Delivered if mode == "on_failure" and not key else Spooled)
    assert hook.metrics().waiting == 1
    hook.close()


def test_a_key_is_text_or_none() -> None:
    """Said at once, and not by the outage in which it would be kept."""
    rig = Rig()
    assert isinstance(rig.send(key=None), Delivered)
    for key in (0, 7, b"k"):
        with pytest.raises(TypeError, match="a key is text, not"):
            rig.send(key=key)


def test_write_ahead_of_a_sink_that_cannot_hold_hands_over() -> None:
    """Due at once, for the drain."""
    rig = Rig(mode="write_ahead", can_hold=False)
    outcome = rig.send()
    assert isinstance(outcome, Spooled)
    assert outcome.reason == "handed over"
    assert run_due(rig.hook) == 1
    assert rig.producer.sent == [b"p"]


def test_a_permanent_error_in_write_ahead_leaves_nothing_behind() -> None:
    """Rejected means that the caller has it, and nobody else."""
    rig = Rig([Permanent("no")], mode="write_ahead")
    assert isinstance(rig.send(), Rejected)
    assert rig.sink.entries == []


def test_later_messages_of_a_key_go_behind_the_one_that_waits() -> None:
    """No attempt while an earlier one waits; other keys are not held up; the drain keeps the order."""
    rig = Rig([AWAY])
    assert isinstance(rig.send(b"1", key="a"), Spooled)
    second = rig.send(b"2", key="a")
    assert isinstance(second, Spooled)
    assert "earlier" in second.reason
    assert isinstance(rig.send(b"3", key="b"), Delivered)
    assert run_due(rig.hook) == 0  # the second is due, and must wait for the first
    assert advance(rig.hook, rig.clock, 3_000) == 2
    assert rig.producer.sent == [b"3", b"1", b"2"]
    assert isinstance(rig.send(b"4", key="a"), Delivered)


def test_without_an_answer_about_its_key_nothing_overtakes() -> None:
    """If the sink cannot say what waits, the send is rejected and not attempted."""
    rig = Rig()
    rig.sink.fail("has_waiting", SinkUnavailable("gone"))
    assert isinstance(rig.send(key="a"), Rejected)
    assert rig.producer.calls == []


def test_threads_that_send_one_key_keep_their_order() -> None:
    """Eight threads, a destination that fails now and then, real drain threads: no thread's messages change places."""
    sink = MemorySink()
    arrived: list[tuple[int, int]] = []
    lock = threading.Lock()
    random = Random(5)

    def handler(payload: bytes) -> None:
        with lock:
            if random.random() < 0.3:
                raise RuntimeError("now and then")
            arrived.append((payload[0], payload[1]))

    quick = RetryPolicy(backoff=Table((1,)), max_attempts=1000)
    with Redelivery(sink, policy=quick, close_timeout_s=30) as hook:
        hook.add_handler("t", handler)

        def send_all(thread: int) -> None:
            for number in range(30):
                assert not isinstance(hook.send("t", bytes([thread, number]), key="k"), Rejected)

        threads = [threading.Thread(target=send_all, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for _ in range(3_000):  # until the last is sent: the ramp decides when
            if not sink.entries:
                break
            threading.Event().wait(0.01)
    assert len(arrived) == 240
    for number in range(8):
        of_thread = [index for thread, index in arrived if thread == number]
        assert of_thread == sorted(of_thread)


def test_a_handler_may_ask_for_the_attempt() -> None:
    """uid, key and the attempts before this one; the uid is the same every time."""
    rig = Rig()
    seen: list[Attempt] = []

    @rig.hook.handler("a")
    def handler(payload: bytes, attempt: Attempt) -> None:
        seen.append(attempt)
        if len(seen) < 3:
            raise TimeoutError

    uid = bytes(range(16))
    rig.hook.send("a", b"1", key="k", uid=uid)
    advance(rig.hook, rig.clock, 10_000)
    assert [one.attempts for one in seen] == [0, 1, 2]
    assert [one.is_uncertain for one in seen] == [False, True, True]
    assert {(one.uid, one.key, one.created_at_ms) for one in seen} == {(uid, "k", seen[0].created_at_ms)}


def test_errors_of_the_program_raise_at_once() -> None:
    """A type nobody registered, a second handler, a name, a payload, a key, a uid that cannot be."""
    rig = Rig()
    with pytest.raises(UnknownType, match=r"'nobody'.*there are: t"):
        rig.hook.send("nobody", b"")
    with pytest.raises(HandlerExists, match="'t'"):
        rig.hook.add_handler("t", print)
    with pytest.raises(ValueError, match="cannot name"):
        rig.hook.add_handler("with space", print)
    with pytest.raises(TypeError, match="a payload is bytes, not str"):
        rig.hook.send("t", "text")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="255"):
        rig.send(key="k" * 256)
    with pytest.raises(ValueError, match="16"):
        rig.send(uid=b"short")
    assert rig.producer.calls == []


def _three(one: int, two: int, three: int) -> None: ...
def _none() -> None: ...
def _unfilled(payload: bytes, *, must: int) -> None: ...


@pytest.mark.parametrize("function", [_three, _none, _unfilled])
def test_a_function_that_cannot_be_called_as_a_handler_is_refused(function: Callable[..., None]) -> None:
    """When it is registered, and not in the first outage."""
    with pytest.raises(TypeError, match="a handler accepts"):
        Rig().hook.add_handler("x", function)


def test_a_second_argument_with_a_default_is_not_the_attempt() -> None:
    """Only a second argument that is needed, or named so, is filled."""
    rig = Rig()
    seen: list[object] = []
    rig.hook.add_handler("d", lambda payload, retries=3: seen.append(retries))
    rig.hook.send("d", b"")
    assert seen == [3]


def test_a_coroutine_from_a_sync_handler_is_no_success() -> None:
    """`lambda p: coroutine(p)` would send nothing: the message is kept, and the reason says so."""
    rig = Rig()

    async def send(payload: bytes) -> None: ...

    rig.hook.add_handler("c", lambda payload: send(b"" + payload))
    outcome = rig.hook.send("c", b"")
    assert isinstance(outcome, Spooled)
    assert "async def" in outcome.reason


def test_a_future_from_a_handler_is_waited_for() -> None:
    """What the future holds is what counts."""
    rig = Rig()
    failed: Future[None] = Future()
    failed.set_exception(ConnectionError("later"))
    rig.hook.add_handler("f", lambda payload: failed)
    assert isinstance(rig.hook.send("f", b""), Spooled)


def test_a_broken_classifier_loses_nothing() -> None:
    """Its error is counted, the message is kept as after an unknown one."""

    def classify(error: BaseException) -> None:
        raise ZeroDivisionError

    rig = Rig([AWAY], classify=classify)
    outcome = rig.send()
    assert isinstance(outcome, Spooled)
    assert outcome.is_uncertain
    assert rig.hook.metrics().classifier_errors == 1


def test_a_broken_callback_loses_nothing() -> None:
    """on_spooled may raise: the outcome stands."""

    def on_spooled(type_name: str, spooled: Spooled) -> None:
        raise ZeroDivisionError

    rig = Rig([AWAY], on_spooled=on_spooled)
    assert isinstance(rig.send(), Spooled)
    assert rig.hook.metrics().callback_errors == 1


def test_after_close_a_send_is_rejected() -> None:
    """Neither attempted nor kept, and closing again says the same."""
    rig = Rig()
    rig.send()
    closed = rig.hook.close()
    assert (closed.sent, closed.spooled, closed.running) == (1, 0, 0)
    outcome = rig.send()
    assert isinstance(outcome, Rejected)
    assert "closed" in outcome.reason
    assert rig.producer.calls == [b"p"]
    assert rig.hook.close() is closed
    assert rig.sink.is_closed
