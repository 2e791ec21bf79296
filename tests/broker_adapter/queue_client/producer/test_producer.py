"""What a producer does when brokers fail: attempts, budgets, which answers are tried elsewhere, fault avoidance."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from broker_adapter.contracts.classic import MessageQueue, Outgoing, QueueReceipt, Route, SendStatus
from broker_adapter.contracts.errors import BrokerAway, BrokerError, BrokerUnavailable, Overloaded, Refused, Rule
from broker_adapter.contracts.message import Message
from broker_adapter.queue_client.membership import Membership
from broker_adapter.queue_client.producer import Producer, ProducerOptions
from broker_adapter.runtime.clock import ManualClock

QUEUES = tuple(MessageQueue("orders", broker, number) for broker in ("a", "b", "c") for number in range(2))

MESSAGE = Message("orders", b"x")

Answers = dict[str, list[BrokerError | SendStatus]]


class Failing:
    """A broker that answers as a test says, and takes the time that it says. Stands in for faults alone."""

    client_id = "client"

    def __init__(self, clock: ManualClock, answers: Answers, takes_ms: int = 0) -> None:
        self.sent: list[tuple[MessageQueue, str, int]] = []
        self.outgoing: list[Outgoing] = []
        self._clock, self._answers, self._takes_ms = clock, answers, takes_ms
        self.topics = {"orders": QUEUES}

    def attach(self, listener: object) -> None:
        """Nothing is said by itself."""

    async def heartbeat(self, *_: Any) -> None:  # noqa: ANN401
        """Take it."""

    async def leave(self, **_: Any) -> None:  # noqa: ANN401
        """Take it."""

    async def route(self, topic: str) -> Route:
        if topic not in self.topics:
            raise Refused(Rule.TOPIC_UNKNOWN, "there is none of this name", value=topic)
        return Route(topic, self.topics[topic], self.topics[topic])

    async def send(
        self, _group: str, queue: MessageQueue, messages: Sequence[Outgoing], *, timeout_ms: int, one_way: bool = False
    ) -> QueueReceipt:
        assert not one_way
        self.sent.append((queue, messages[0].message.message_id, timeout_ms))
        self.outgoing += messages
        self._clock.advance(min(self._takes_ms, timeout_ms))
        answers = self._answers.get(queue.broker) or self._answers.get("any") or [SendStatus.STORED]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, BrokerError):
            raise answer
        return QueueReceipt(answer, messages[0].message.message_id, queue, 7)


def play(
    answers: Answers,
    options: ProducerOptions | None = None,
    *,
    takes_ms: int = 0,
    sends: int = 1,
    message: Message = MESSAGE,
    **how: Any,  # noqa: ANN401
) -> tuple[Failing, list[QueueReceipt | BrokerError]]:
    """Send some messages; return what brokers got, and how each send ended."""

    async def run() -> tuple[Failing, list[QueueReceipt | BrokerError]]:
        clock = ManualClock()
        broker = Failing(clock, answers, takes_ms)
        membership = Membership(broker)  # type: ignore[arg-type]  # what a send needs
        producer = Producer(membership, "senders", options or ProducerOptions(), clock=clock, random=Random(1))
        ends: list[QueueReceipt | BrokerError] = []
        for number in range(sends):
            try:
                ends.append(await producer.send(replace(message, message_id=f"m-{number}", key=""), **how))
            except BrokerError as error:
                ends.append(error)
        await membership.close()
        return broker, ends

    return asyncio.run(run())


def brokers(broker: Failing) -> list[str]:
    return [queue.broker for queue, _, _ in broker.sent]


def with_code(error: BrokerError, code: int) -> BrokerError:
    error.code = code  # type: ignore[attr-defined]
    return error


def test_a_failed_send_goes_to_other_brokers_under_the_same_id() -> None:
    """Three attempts, none of them at the broker that just failed."""
    broker, ends = play({"any": [BrokerUnavailable("gone")]})
    assert isinstance(ends[0], BrokerUnavailable)
    tried = brokers(broker)
    assert len(tried) == 3
    assert all(before != later for before, later in zip(tried, tried[1:], strict=False))  # noqa: RUF007
    assert {message_id for _, message_id, _ in broker.sent} == {"m-0"}


def test_a_message_has_the_trace_context_of_its_sender() -> None:
    """Inside a span, unless the message has one of its own; nothing without a span."""
    own = f"00-{1:032x}-{1:016x}-01"
    span = SpanContext(2, 3, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    with use_span(NonRecordingSpan(span)):
        broker, _ = play({})
        other, _ = play({}, message=Message("orders", b"x", properties={"traceparent": own}))
    without, _ = play({})
    contexts = [dict(each.outgoing[0].message.properties) for each in (broker, other, without)]
    assert contexts == [{"traceparent": f"00-{2:032x}-{3:016x}-01"}, {"traceparent": own}, {}]


def test_all_attempts_have_one_budget_of_time() -> None:
    """Each has what is left of it, and none begins after it."""
    broker, _ = play({"any": [BrokerUnavailable("slow")]}, takes_ms=2_000)
    assert [timeout_ms for _, _, timeout_ms in broker.sent] == [3_000, 1_000]


@pytest.mark.parametrize("code", [1, 2, 14, 16, 17, 204, 205, 1500])
def test_an_error_that_another_broker_may_not_have_is_retried_there(code: int) -> None:
    """RocketMQ's list of codes."""
    broker, ends = play({"any": [Refused(Rule.FORBIDDEN, "no", code=code), SendStatus.STORED]})
    assert len(broker.sent) == 2
    assert isinstance(ends[0], QueueReceipt)


@pytest.mark.parametrize(
    "error",
    [
        Refused(Rule.MESSAGE_CORRUPTED, "illegal", code=13),
        with_code(Overloaded("flow control", limit=1), 215),
        with_code(BrokerUnavailable("it is strange"), 99),
    ],
    ids=["refused", "flow control", "unknown code"],
)
def test_an_error_of_all_brokers_is_raised_at_once(error: BrokerError) -> None:
    """One attempt, and its error."""
    broker, ends = play({"any": [error]})
    assert len(broker.sent) == 1
    assert ends == [error]


def test_a_send_to_a_given_queue_is_never_repeated_elsewhere() -> None:
    """Where the caller chooses, or the message group does."""
    broker, ends = play({"any": [BrokerUnavailable("gone")]}, choose=lambda queues: queues[3])
    assert [queue for queue, _, _ in broker.sent] == [QUEUES[3]]
    assert isinstance(ends[0], BrokerUnavailable)


@pytest.mark.parametrize(("resend", "attempts"), [(False, 1), (True, 3)])
def test_a_less_safely_stored_message_is_an_answer(resend: bool, attempts: int) -> None:
    """It is sent again only if that is asked for, and then the first copy is the answer."""
    broker, ends = play({"any": [SendStatus.NO_REPLICA]}, ProducerOptions(resend_unsafe=resend))
    assert len(broker.sent) == attempts
    assert isinstance(ends[0], QueueReceipt)
    assert ends[0].queue == broker.sent[0][0]


def test_fault_avoidance_leaves_a_failing_broker_alone() -> None:
    """After its first failure nothing goes there; without it, every third message is tried there."""
    failing: Answers = {"b": [BrokerUnavailable("stopped")]}
    avoiding, _ = play(failing, ProducerOptions(fault_avoidance=True), sends=30)
    assert brokers(avoiding).count("b") == 1
    plain, ends = play(failing, sends=30)
    assert brokers(plain).count("b") >= 8
    assert all(isinstance(end, QueueReceipt) for end in ends)


def test_a_broker_that_had_no_time_left_is_not_left_alone() -> None:
    """What one that hangs used up of a send's time is not held against the next one, which is well."""

    async def run() -> None:
        clock = ManualClock()
        broker = Failing(clock, {"any": [BrokerUnavailable("no answer in time")]}, takes_ms=2_995)
        membership = Membership(broker)  # type: ignore[arg-type]
        options = ProducerOptions(fault_avoidance=True)
        producer = Producer(membership, "senders", options, clock=clock, random=Random(1))
        with pytest.raises(BrokerUnavailable):
            await producer.send(Message("orders", b"x"))
        assert [left_ms for _, _, left_ms in broker.sent] == [3_000, 5]
        assert producer.left_alone.keys() == {brokers(broker)[0]}
        await membership.close()

    asyncio.run(run())


@pytest.mark.parametrize(("as_4", "still_avoided_ms"), [(False, 9_000), (True, 590_000)])
def test_a_broker_that_was_left_alone_is_tried_again(as_4: bool, still_avoided_ms: int) -> None:
    """After 10 s by the tables of 5.x, after 10 minutes by those of 4.x."""

    async def run() -> None:
        clock = ManualClock()
        answers: Answers = {}
        broker = Failing(clock, answers)
        membership = Membership(broker)  # type: ignore[arg-type]
        options = ProducerOptions(fault_avoidance=True, as_4=as_4)
        producer = Producer(membership, "senders", options, clock=clock, random=Random(1))
        for _ in range(12):
            await producer.send(Message("orders", b"x"))
        answers["b"] = [BrokerUnavailable("stopped")]
        for _ in range(12):
            await producer.send(Message("orders", b"x"))
        assert producer.left_alone == {"b": still_avoided_ms + 1_000 if not as_4 else still_avoided_ms + 10_000}
        for elapsed_ms, is_back in ((still_avoided_ms, False), (20_000, True)):
            clock.advance(elapsed_ms)
            before = len(broker.sent)
            for _ in range(12):
                await producer.send(Message("orders", b"x"))
            assert ("b" in brokers(broker)[before:]) is is_back
        assert producer.left_alone.keys() == {"b"}, "it failed again"
        await membership.close()

    asyncio.run(run())


def test_an_unknown_topic_goes_where_brokers_make_topics() -> None:
    """To the queues that it will have, as RocketMQ's producers do; refused where no broker makes any."""

    async def run() -> None:
        clock = ManualClock()
        broker = Failing(clock, {})
        membership = Membership(broker)  # type: ignore[arg-type]
        producer = Producer(membership, "senders", clock=clock, random=Random(1))
        with pytest.raises(Refused, match="topic not found"):
            await producer.send(Message("new", b"x"))
        broker.topics["TBW102"] = tuple(MessageQueue("TBW102", "a", number) for number in range(8))
        receipts = [await producer.send(Message("new", b"x")) for _ in range(8)]
        assert {receipt.queue for receipt in receipts} == {MessageQueue("new", "a", number) for number in range(4)}
        await membership.close()

    asyncio.run(run())


def send_again(answers: Answers, left_ms: int) -> list[tuple[int, int]]:
    """Send a message again whose level 5 (1 minute) ends in ``left_ms``; return with which times and levels."""

    async def run() -> list[tuple[int, int]]:
        clock = ManualClock()
        broker = Failing(clock, answers)
        membership = Membership(broker)  # type: ignore[arg-type]
        producer = Producer(membership, "senders", clock=clock, random=Random(1))
        since_ms = clock.now_ms() + left_ms - 60_000
        await producer.send(Message("orders", b"x"), delay_level=5, since_ms=since_ms)
        await membership.close()
        return [
            (each.message.deliver_at_ms and each.message.deliver_at_ms - since_ms, each.delay_level)
            for each in broker.outgoing
        ]

    return asyncio.run(run())


def test_a_level_of_a_message_that_is_sent_again_counts_from_its_first_send() -> None:
    """As a time; where the broker knows none, as the least level that is not too early; not at all once it is over."""
    old: Answers = {"any": [Refused(Rule.UNSUPPORTED, "older than RocketMQ 5.0.0"), SendStatus.STORED]}
    assert send_again({}, left_ms=29_000) == [(60_000, 0)]
    assert send_again(old, left_ms=29_000) == [(60_000, 0), (60_000, 4)]
    assert send_again({}, left_ms=0) == [(0, 0)]


def test_a_clock_that_was_set_back_delays_nothing_for_longer_than_its_level() -> None:
    """The first send was kept while the clock was a year ahead."""
    year_ms = 365 * 24 * 3_600_000
    old: Answers = {"any": [Refused(Rule.UNSUPPORTED, "older than RocketMQ 5.0.0"), SendStatus.STORED]}
    assert send_again({}, left_ms=year_ms) == [(60_000 - (year_ms - 60_000), 0)]
    assert send_again(old, left_ms=year_ms)[-1][1] == 5


def test_the_error_of_a_send_names_an_earlier_attempt_in_doubt() -> None:
    """As its cause: the message may be stored though the last attempt certainly failed."""
    doubt, away = BrokerUnavailable("no answer"), BrokerAway("no connection")
    for answers, cause in (([doubt, away], doubt), ([away, away, away], None), ([away, doubt, away], doubt)):
        _, (error,) = play({"any": list(answers)})
        assert isinstance(error, BrokerAway)
        assert error.__cause__ is cause
