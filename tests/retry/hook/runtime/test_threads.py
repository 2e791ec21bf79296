"""The threads of the hook, how they end, and the figures it shows."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
import structlog
from support.rigs.producer.hook import AWAY, Rig, fill, make, until

from broker_adapter.runtime.clock import ManualClock
from retry import (
    Permanent,
    Redelivery,
    RetryPolicy,
    SinkFull,
    SinkUnavailable,
    Spooled,
    Table,
)
from retry.hook.redelivery import UNCLAIMED_AFTER_S
from retry.sink import SinkStats
from retry.testing import FakeProducer, MemorySink, run_due

WAIT_S = 20.0


# --- threads --------------------------------------------------------------------------------------------------------


def test_threads_start_with_the_first_handler_with_pending_messages() -> None:
    """A restart with a backlog sends it without a send; types without a handler stay, and are counted."""
    sink = MemorySink()
    fill(sink, 3)
    fill(sink, 2, type_name="nobody")
    producer = FakeProducer()
    with Redelivery(sink) as hook:
        hook.add_handler("t", producer.send)
        until(lambda: len(producer.sent) == 3)
        until(lambda: sink.stats("t").held == 0)
        metrics = hook.metrics()
        assert (metrics.unclaimed, metrics.waiting) == (2, 2)
        assert any("without a handler" in reason for reason in hook.health().reasons)
    assert [entry.type_name for entry in sink.entries] == ["nobody"] * 2


def test_messages_are_unclaimed_once_no_handler_comes_any_more(caplog: pytest.LogCaptureFixture) -> None:
    """The first handler starts the threads; the next ones are registered after it, and are no reason to warn."""
    structlog.reset_defaults()  # as in an application that has not configured it
    clock = ManualClock(1_700_000_000_000)
    sink = MemorySink(clock)
    for name in ("a", "b"):
        fill(sink, 1, type_name=name)
    producer = FakeProducer()

    def warnings() -> list[str]:
        return [each.getMessage() for each in caplog.records if "messages_unclaimed" in each.getMessage()]

    with Redelivery(sink) as hook:
        hook.add_handler("a", producer.send)
        until(lambda: len(producer.sent) == 1)
        hook.add_handler("b", producer.send)
        until(lambda: len(producer.sent) == 2)
        assert not warnings()
        fill(sink, 1, type_name="gone")
        clock.advance(int(UNCLAIMED_AFTER_S * 1_000))
        until(lambda: bool(warnings()))
        assert len(warnings()) == 1
        assert "'a', 'b'" in warnings()[0]


def test_workers_outlive_everything_a_handler_and_a_sink_can_do() -> None:
    """sys.exit in a handler, a sink that fails at take: the next message is sent all the same."""
    sink = MemorySink()
    producer = FakeProducer([SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
    quick = RetryPolicy(backoff=Table((1,)), max_attempts=100)
    sink.fail("take", SinkUnavailable("gone"))
    with Redelivery(sink, policy=quick) as hook:
        hook.add_handler("t", producer.send, workers=1)
        fill(sink, 3)
        hook.start()
        until(lambda: len(producer.sent) == 3)
    assert hook.metrics().sink_errors == 1


def test_a_handler_that_hangs_holds_up_one_message_and_not_a_batch() -> None:
    """The other worker goes on with what was fetched in the same batch."""
    go, sink = threading.Event(), MemorySink()
    sent: list[bytes] = []

    def handler(payload: bytes) -> None:
        if payload == b"\x01":
            assert go.wait(WAIT_S)
        sent.append(payload)

    fill(sink, 8)
    with Redelivery(sink) as hook:
        hook.add_handler("t", handler)
        until(lambda: len(sent) == 7)
        go.set()
        until(lambda: len(sent) == 8)


def test_close_does_not_wait_for_a_handler_for_ever() -> None:
    """It returns when time is up, says that one still runs, and the message comes again in the next run."""
    go, running = threading.Event(), threading.Event()
    sink = MemorySink()

    def handler(payload: bytes) -> None:
        running.set()
        go.wait(WAIT_S)

    fill(sink, 5)
    hook = Redelivery(sink)
    hook.add_handler("t", handler, workers=1)
    assert running.wait(WAIT_S)
    closed = hook.close(0.05)
    go.set()
    assert (closed.running, closed.sent, closed.still_waiting) == (1, 0, 5)
    assert len(sink.crash().entries) == 5


def test_close_waits_for_running_messages_and_returns_the_others() -> None:
    """A handler that returns in time counts as sent; what was only fetched waits again in a sink that goes on."""
    go, running = threading.Event(), threading.Event()
    sink = MemorySink()

    def handler(payload: bytes) -> None:
        running.set()
        assert go.wait(WAIT_S)

    fill(sink, 5)
    hook = Redelivery(sink, owns_sink=False)
    hook.add_handler("t", handler, workers=1)
    assert running.wait(WAIT_S)
    closer: list[Any] = []
    closing = threading.Thread(target=lambda: closer.append(hook.close(WAIT_S)))
    closing.start()
    until(hook._drain._stop.is_set)
    go.set()
    closing.join(WAIT_S)
    (closed,) = closer
    assert (closed.running, closed.sent, closed.unsettled, closed.still_waiting) == (0, 1, 0, 4)
    assert not sink.is_closed
    until(lambda: sink.stats().held == 0)
    assert {entry.attempts for entry in sink.entries} == {0}


def test_async_handlers_are_repeated_on_one_loop() -> None:
    """All repetitions share the hook's own event loop; a failing one waits like any other."""
    sink = MemorySink()
    loops: list[object] = []
    script: list[Exception | None] = [AWAY, None, None]

    async def handler(payload: bytes) -> None:
        loops.append(asyncio.get_running_loop())
        if error := script.pop(0):
            raise error

    quick = RetryPolicy(backoff=Table((1,)), max_attempts=100)
    fill(sink, 2)
    with Redelivery(sink, policy=quick) as hook:
        hook.add_handler("t", handler)
        until(lambda: not sink.entries)
    assert len(loops) == 3
    assert len(set(loops)) == 1


def test_an_async_handler_that_hangs_ends_with_the_hook() -> None:
    """Close cancels it when time is up, and the worker thread ends too."""
    sink, cancelled, running = MemorySink(), threading.Event(), threading.Event()

    async def handler(payload: bytes) -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    fill(sink, 1)
    hook = Redelivery(sink)
    hook.add_handler("t", handler, workers=1)
    assert running.wait(WAIT_S)
    assert hook.close(0.01).running == 1
    assert cancelled.wait(WAIT_S)
    (thread,) = hook._drain._threads
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_backlog_is_sent_slowly_first() -> None:
    """With a backlog at the start the ramp begins at 50 a second."""
    sink = MemorySink(ManualClock())
    fill(sink, 1)
    with Redelivery(sink, autostart=False) as hook:
        hook.add_handler("t", FakeProducer().send)
        hook.start()
        assert hook._destinations["t"].rate_per_s == 50.0


# --- figures --------------------------------------------------------------------------------------------------------


def test_metrics_and_health_report_the_state() -> None:
    """Sends by outcome, attempts by result, age of the oldest; unwell when it is too old, then well again."""
    hook, sink, clock = make(FakeProducer([None, AWAY, KeyError(1), Permanent("no")]).send, oldest_max_s=60.0)
    for number in range(4):
        hook.send("t", bytes([number]))
    clock.advance(1_000)
    metrics = hook.metrics()
    assert metrics.sends == {("t", "delivered"): 1, ("t", "spooled"): 2, ("t", "rejected"): 1}
    assert metrics.attempts == {
        ("t", "retry"): 1,
        ("t", "unknown"): 1,
        ("t", "permanent"): 1,
        ("t", "success"): 1,
    }
    assert (metrics.waiting, metrics.oldest_age_s, metrics.rejects) == (2, 1.0, {("t", "permanent"): 1})
    assert hook.health().status == "healthy"
    clock.advance(60_000)
    health = hook.health()
    assert health.status == "degraded"
    assert any("oldest" in reason for reason in health.reasons)
    assert any("none was sent" in reason for reason in health.reasons)
    run_due(hook)
    assert hook.health().status == "healthy"
    assert sink.entries == []


def test_health_distinguishes_starting_from_failing() -> None:
    """What was there before the start is not sent yet, which is no failure; it is one once there was time enough."""
    clock = ManualClock()
    sink = MemorySink(clock)
    fill(sink, 2)
    clock.advance(7_200_000)  # nobody ran for two hours
    hook = Redelivery(sink, autostart=False, oldest_max_s=60.0)
    hook.add_handler("t", FakeProducer([AWAY]).send)
    clock.advance(1_000)
    health = hook.health()
    assert (health.status, health.last_success_age_s) == ("starting", None)
    assert health.reasons == (
        "the oldest message is pending for 7201 s, more than 60 s",
        "messages wait, and none was sent yet, 1 s after the start",
    )
    clock.advance(60_000)
    health = hook.health()
    assert health.status == "degraded"
    assert "messages wait, and none was sent for 61 s" in health.reasons
    run_due(hook)
    assert hook.health().last_success_age_s == 0.0


def test_faults_at_the_start_are_reported_at_the_start() -> None:
    """A sink that fails is no matter of patience."""
    hook, sink, _ = make(FakeProducer([AWAY]).send)
    hook.send("t", b"1")
    assert hook.health().status == "starting"
    sink.fail("stats", SinkUnavailable("gone"))
    assert hook.health().status == "degraded"


@pytest.mark.parametrize("is_oldest_known", [True, False])
def test_after_a_quiet_hour_one_failure_is_no_outage(is_oldest_known: bool) -> None:
    """None was sent for an hour, as there was none to send: what waits has not waited for long."""

    class Silent(MemorySink):  # as the daemon, which does not say when the oldest was made
        def stats(self, type_name: str = "") -> SinkStats:
            return replace(super().stats(type_name), oldest_at_ms=None)

    clock = ManualClock()
    sink = MemorySink(clock) if is_oldest_known else Silent(clock)
    rig = Rig([None, AWAY, AWAY], sink=sink)
    rig.send()
    clock.advance(3_600_000)
    rig.send()
    assert rig.hook.health().status == "healthy"
    clock.advance(301_000)
    assert "messages wait, and none was sent for 301 s" in rig.hook.health().reasons


def test_the_text_for_prometheus_has_a_type_for_each_line() -> None:
    """Each sample follows its TYPE line, and names of types are escaped."""
    hook, _, _ = make(lambda payload: None)
    hook.send("t", b"")
    lines = hook.render_prometheus().splitlines()
    types = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    samples = [line for line in lines if not line.startswith("#")]
    assert {line.partition("{")[0].partition(" ")[0] for line in samples} <= types
    assert 'retry_hook_sends_total{type="t",outcome="delivered"} 1' in samples
    assert "retry_hook_waiting 0" in samples


def test_check_writes_and_takes_away() -> None:
    """A sink that would take a send leaves no trace of the check; one that would not says why."""
    hook, sink, _ = make(lambda payload: None)
    checked = hook.check()
    assert checked.is_ok
    assert "write: ok" in str(checked)
    assert "handler t" in checked.settings
    assert sink.entries == []
    sink.fail("put", SinkFull("disk", limit="free_bytes_min"))
    checked = hook.check()
    assert not checked.is_ok
    assert "SinkFull: disk" in checked.error


def test_an_outage_of_thousands_of_messages_is_a_few_lines_of_log(caplog: pytest.LogCaptureFixture) -> None:
    """One line a kind and interval, with how many were left out; never a payload, and nothing on stdout."""
    structlog.reset_defaults()  # as in an application that has not configured it
    hook, _, clock = make(FakeProducer([AWAY] * 3 + [Permanent("no")] * 500).send)
    for number in range(503):
        hook.send("t", b"secret" + bytes([number % 256]))
    clock.advance(10_000)
    hook.send("t", b"secret")
    rejected = [record.getMessage() for record in caplog.records if "send_rejected" in record.getMessage()]
    assert len(rejected) == 1
    assert len(caplog.records) <= 4
    assert not any("secret" in record.getMessage() for record in caplog.records)


def test_a_log_that_fails_loses_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk under the log file must not become a lost message."""

    def fail(*args: object, **fields: object) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr("structlog.stdlib.BoundLogger.log", fail)
    hook, sink, _ = make(FakeProducer([AWAY]).send)
    assert isinstance(hook.send("t", b"1"), Spooled)
    assert len(sink.entries) == 1
