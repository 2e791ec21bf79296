"""What the hook kept is sent later: by the table to the millisecond, through outages, around poison and sink faults."""

from __future__ import annotations

from collections import Counter

import pytest
from support.rigs.producer.hook import AWAY, EXACT, fill, make

from broker_adapter.runtime.clock import ManualClock
from retry import (
    SPOOL_STEPS_MS,
    BreakerState,
    DeadEntry,
    Death,
    Delivered,
    Permanent,
    Redelivery,
    Rejected,
    RetryPolicy,
    SinkUnavailable,
    Spooled,
    Table,
    Throttled,
    Unreadable,
)
from retry.testing import FakeProducer, MemorySink, advance, run_due

# --- the table ------------------------------------------------------------------------------------------------------


def test_the_table_to_the_millisecond_and_then_the_dead_set_and_the_callback() -> None:
    """The first attempt, one after each of the ten steps, not a millisecond early; the eleventh failure is the end."""
    told: list[DeadEntry] = []
    attempts_ms: list[int] = []

    def handler(payload: bytes) -> None:
        attempts_ms.append(clock.now_ms())
        raise AWAY

    hook, sink, clock = make(handler, on_exhausted=told.append)
    start_ms = clock.now_ms()
    hook.send("t", b"p")
    for step_ms in SPOOL_STEPS_MS:
        clock.advance(step_ms - 1)
        assert run_due(hook) == 0
        clock.advance(1)
        assert run_due(hook) == 1
    expected = [start_ms + sum(SPOOL_STEPS_MS[:number]) for number in range(len(SPOOL_STEPS_MS) + 1)]
    assert attempts_ms == expected
    assert attempts_ms[-1] - start_ms == 4_298_000
    (dead,) = hook.dead("t")
    assert (dead.death, dead.entry.attempts, dead.entry.payload) == (Death.EXHAUSTED, 11, b"p")
    assert [(one.death, one.entry.uid, one.entry.attempts) for one in told] == [(Death.EXHAUSTED, dead.entry.uid, 11)]
    assert sink.entries == []
    clock.advance(10**9)
    assert run_due(hook) == 0


def test_the_dead_can_be_sent_again() -> None:
    """Requeue lets it wait, due now, with no attempts behind it."""
    producer = FakeProducer([AWAY])
    hook, _, _ = make(producer.send, policy=RetryPolicy(backoff=Table((1,)), max_attempts=1))
    uids = fill(hook._sink, 1)  # type: ignore[arg-type]
    assert run_due(hook) == 1
    assert hook.requeue("t", uids) == 1
    assert run_due(hook) == 1
    assert producer.sent == [b"\x01"]
    assert list(hook.dead("t")) == []


def test_a_policy_with_a_maximum_age_ends_by_age() -> None:
    """Also when the attempts did not count, because the destination asked for a pause."""
    policy = RetryPolicy(backoff=Table((1_000,)), max_attempts=100, max_age_ms=5_000)
    hook, sink, clock = make(FakeProducer([Throttled(after_s=3)] * 9).send, policy=policy)
    fill(sink, 1)
    advance(hook, clock, 10_000)
    (dead,) = hook.dead("t")
    assert (dead.death, dead.entry.attempts) == (Death.TOO_OLD, 0)


@pytest.mark.parametrize(
    ("error", "death"), [(Permanent("no"), Death.PERMANENT), (Unreadable("version 9"), Death.UNREADABLE)]
)
def test_a_hopeless_entry_is_buried_at_once_with_its_bytes(error: Exception, death: Death) -> None:
    """No further attempt, and the callback hears of it."""
    told: list[DeadEntry] = []
    hook, sink, _ = make(FakeProducer([error]).send, on_exhausted=told.append)
    fill(sink, 1)
    assert run_due(hook) == 1
    (dead,) = hook.dead("t")
    assert (dead.death, dead.entry.payload) == (death, b"\x01")
    assert [one.death for one in told] == [death]


def test_a_callback_that_raises_stops_nothing() -> None:
    """It is counted; the next entry is handled."""

    def on_exhausted(dead: DeadEntry) -> None:
        raise ZeroDivisionError

    hook, sink, _ = make(FakeProducer([Permanent("1"), Permanent("2")]).send, on_exhausted=on_exhausted)
    fill(sink, 2)
    assert run_due(hook) == 2
    assert len(hook.dead("t")) == 2
    assert hook.metrics().callback_errors == 2


# --- outage and poison ----------------------------------------------------------------------------------------------


def test_an_outage_costs_a_handful_of_attempts_and_no_message() -> None:
    """Five messages fail, then only probes run: a day of outage later nothing is dead, and all is sent in minutes."""
    clock = ManualClock()
    sink = MemorySink(clock)
    attempts: Counter[bytes] = Counter()
    is_away = True

    def handler(payload: bytes) -> None:
        attempts[payload] += 1
        if is_away:
            raise AWAY

    hook = Redelivery(sink, policy=EXACT, autostart=False)
    hook.add_handler("t", handler)
    outcomes = [hook.send("t", bytes([number])) for number in range(100)]
    assert all(isinstance(outcome, Spooled) for outcome in outcomes)
    assert sum(attempts.values()) == 5
    assert hook.metrics().breakers == {"t": BreakerState.OPEN}
    advance(hook, clock, 3_600_000, step_ms=1_000)
    assert max(entry.attempts for entry in sink.entries) <= 1
    assert sum(attempts.values()) <= 5 + 5 + 3_600 // 30
    is_away = False
    advance(hook, clock, 60_000)
    assert sink.entries == []
    assert list(hook.dead("t")) == []
    assert hook.metrics().breakers == {"t": BreakerState.CLOSED}


def test_a_few_poisonous_messages_stop_no_others() -> None:
    """Nineteen fail for reasons nobody knows and run out of attempts; the others are sent meanwhile."""
    policy = RetryPolicy(backoff=Table((1_000,)), max_attempts=3)

    def handler(payload: bytes) -> None:
        if payload[0] <= 19:
            raise KeyError(payload[0])

    hook, sink, clock = make(handler, policy=policy)
    fill(sink, 60)
    advance(hook, clock, 5_000)
    assert sink.entries == []
    assert [dead.entry.payload[0] for dead in hook.dead("t")] == list(range(1, 20))
    assert hook.metrics().breakers == {"t": BreakerState.CLOSED}


def test_the_same_error_for_many_messages_is_an_outage_and_not_poison() -> None:
    """From the twentieth on no attempt counts; one success, and the others follow."""
    is_away = True

    def handler(payload: bytes) -> None:
        if is_away:
            raise RuntimeError("500")

    policy = RetryPolicy(backoff=Table((1_000,)), max_attempts=2)
    hook, sink, clock = make(handler, policy=policy)
    fill(sink, 40)
    advance(hook, clock, 600_000)
    assert hook.metrics().breakers == {"t": BreakerState.OPEN}
    assert len(hook.dead("t")) == 0
    assert len(sink.entries) == 40
    is_away = False
    advance(hook, clock, 60_000)
    assert sink.entries == []


def test_one_poisonous_message_cannot_keep_a_breaker_open() -> None:
    """A failed probe goes behind the others, so the next probe is another message."""
    sent: list[bytes] = []
    is_away = True

    def handler(payload: bytes) -> None:
        if is_away or payload == b"\x01":
            raise AWAY
        sent.append(payload)

    hook, sink, clock = make(handler)
    fill(sink, 10)
    run_due(hook)
    assert hook.metrics().breakers == {"t": BreakerState.OPEN}
    assert advance(hook, clock, 1_000) == 1  # a probe: it comes again with the next one, two seconds later
    assert max(entry.due_at_ms for entry in sink.entries if not entry.attempts) == clock.now_ms() + 2_000
    is_away = False
    advance(hook, clock, 120_000)
    assert sorted(sent) == [bytes([number]) for number in range(2, 11)]


def test_a_full_sink_does_not_keep_the_breaker_open() -> None:
    """Nothing was kept, so nothing would probe: the send that is refused is the probe, once a step."""
    clock = ManualClock()
    sink = MemorySink(clock, entries_max=0)
    producer = FakeProducer([AWAY] * 5)
    hook = Redelivery(sink, autostart=False)
    hook.add_handler("t", producer.send)
    assert all(isinstance(hook.send("t", bytes([number])), Rejected) for number in range(5))
    assert isinstance(hook.send("t", b"x"), Rejected)
    assert len(producer.calls) == 5
    clock.advance(1_000)
    assert isinstance(hook.send("t", b"y"), Delivered)
    assert isinstance(hook.send("t", b"z"), Delivered)
    assert hook.metrics().sends["t", "rejected"] == 6


def test_types_that_share_a_destination_share_its_breaker() -> None:
    """What one of them learns, the other need not find out."""
    producer = FakeProducer([AWAY] * 5)
    hook, _, _ = make(lambda payload: None)
    hook.add_handler("a", producer.send, destination="broker")
    hook.add_handler("b", producer.send, destination="broker")
    for number in range(5):
        hook.send("a", bytes([number]))
    assert isinstance(hook.send("b", b"x"), Spooled)
    assert len(producer.calls) == 5
    assert hook.metrics().breakers == {"t": BreakerState.CLOSED, "broker": BreakerState.OPEN}


def test_a_throttled_destination_is_left_alone_until_its_time() -> None:
    """No attempt is counted, and none is made."""
    producer = FakeProducer([Throttled(after_s=30)])
    hook, sink, clock = make(producer.send)
    fill(sink, 3)
    assert advance(hook, clock, 29_000) == 1
    assert {entry.attempts for entry in sink.entries} == {0}
    assert advance(hook, clock, 1_000) == 3


# --- a sink that fails ----------------------------------------------------------------------------------------------


def test_a_message_that_was_sent_is_forgotten_once_the_sink_is_back() -> None:
    """Finish fails: it is repeated, and the message is not sent again."""
    producer = FakeProducer()
    hook, sink, clock = make(producer.send)
    fill(sink, 1)
    sink.fail("finish", SinkUnavailable("gone"), times=2)
    run_due(hook)
    assert hook.metrics().unsettled == 1
    assert hook.health().status == "degraded"
    advance(hook, clock, 10_000)
    assert producer.sent == [b"\x01"]
    assert sink.entries == []
    assert (hook.metrics().unsettled, hook.metrics().in_doubt) == (0, 2)


def test_a_failure_that_could_not_be_noted_is_noted_later() -> None:
    """Again fails: the entry is not lost in our hands, and its attempt counts once."""
    producer = FakeProducer([AWAY])
    hook, sink, clock = make(producer.send)
    fill(sink, 1)
    sink.fail("again", SinkUnavailable("gone"))
    run_due(hook)
    assert sink.stats().held == 1
    clock.advance(1_000)
    run_due(hook)
    assert [entry.attempts for entry in sink.entries] == [1]
    advance(hook, clock, 3_000)
    assert producer.sent == [b"\x01"]


def test_the_callback_waits_until_the_death_is_durable() -> None:
    """Bury fails once: nobody hears of a death that a crash could undo."""
    told: list[DeadEntry] = []
    hook, sink, clock = make(FakeProducer([Permanent("no")]).send, on_exhausted=told.append)
    fill(sink, 1)
    sink.fail("bury", SinkUnavailable("gone"))
    run_due(hook)
    assert (told, list(hook.dead("t"))) == ([], [])
    clock.advance(1_000)
    run_due(hook)
    assert len(told) == len(hook.dead("t")) == 1


def test_after_a_crash_held_entries_come_again() -> None:
    """A run that ends inside a handler repeats the message in the next run, with the attempts that were durable."""
    hook, sink, clock = make(FakeProducer([AWAY]).send)
    hook.send("t", b"p")
    clock.advance(3_000)
    assert len(sink.take("t", 10, 0.0)) == 1  # in hand when the process died
    heir = sink.crash()
    producer = FakeProducer()
    hook = Redelivery(heir, autostart=False)
    hook.add_handler("t", producer.send)
    assert [entry.attempts for entry in heir.entries] == [1]
    assert run_due(hook) == 1
    assert producer.sent == [b"p"]
