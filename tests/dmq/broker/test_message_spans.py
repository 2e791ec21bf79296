"""Spans of the life of a message, through restarts; and that the context comes back to consumers unchanged."""

from __future__ import annotations

import pytest
from support.clients.embedded.failing import CLIENT, change, comes_after, pushed_one
from support.forges.messages.letters import DEAD, REDRIVE, UNDERTAKER, finish
from support.models.runs.span_tree import of_daemon, tree_of
from support.rigs.broker.rig import GROUP, TOPIC, EmbeddedRig, End, ack, every_durable_broker, receive

from broker_adapter.contracts.errors import Refused
from broker_adapter.contracts.message import Delivery, Envelope
from broker_adapter.contracts.transactions import Half
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import to_envelope
from dmq.tracing import MessageSpan, SpanKind
from retry.failure_reason import FailureReason

pytestmark = pytest.mark.contract

TRACE_ID, PRODUCER = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
CONTEXT = f"00-{TRACE_ID:032x}-{PRODUCER:016x}-01"

# The page docs/how-to/tracing.md shows it, below the span of the producer.
LIFE = """\
send orders
delay orders
deliver orders (workers, attempt 1)  ERROR card declined
└── nack orders (workers, attempt 1)
delay orders (workers, attempt 1)  -> deliver orders (workers, attempt 1)
deliver orders (workers, attempt 2)  ERROR nacked  -> deliver orders (workers, attempt 1)
└── nack orders (workers, attempt 2)
dead_letter %DLQ%workers (workers, attempt 2)  ERROR exhausted  -> deliver orders (workers, attempt 2)
redrive orders (workers)  -> dead_letter %DLQ%workers (workers, attempt 2)
deliver orders (workers, attempt 1)  -> redrive orders (workers)
└── ack orders (workers, attempt 1)"""


def traced_message(message_id: str = "m-1", context: str = CONTEXT, *, deliver_at_ms: int = 0) -> Envelope:
    """Return a message as a producer with tracing sends it."""
    message = wire.Message(topic=wire.Resource(name=TOPIC), body=b"body")
    message.system_properties.message_id = message_id
    message.system_properties.trace_context = context
    message.user_properties["traceparent"] = context
    return to_envelope(message, deliver_at_ms=deliver_at_ms or None)


def contexts(delivery: Delivery) -> tuple[str, str]:
    """Return the trace context of a delivery, in the protocol's field and in the property."""
    message = wire.Message.FromString(delivery.payload)
    return message.system_properties.trace_context, message.user_properties["traceparent"]


async def with_spans(rig: EmbeddedRig) -> list[MessageSpan]:
    """Restart the broker with tracing; return the list of emitted spans."""
    spans: list[MessageSpan] = []
    rig.emit_span = spans.append
    await rig.restart(End.CLOSE)
    return spans


@every_durable_broker(queues=1)
async def test_a_trace_is_the_life_of_a_message(rig: EmbeddedRig) -> None:
    """Delay, two failures, dead letter and redrive, with a kill between all of them, are one tree."""
    spans = await with_spans(rig)
    await rig.set_group(GROUP, max_attempts=2, delays_ms=(1_000,))
    await rig.broker.send([traced_message(deliver_at_ms=rig.clock.now_ms() + 2_000)])
    await rig.restart(End.KILL)
    first = await comes_after(rig, 2_000)
    rig.clock.advance(50)
    rig.broker.note_failure(GROUP, first.receipt_handle, FailureReason(error_text="card declined"))
    await change(rig, first)
    await rig.restart(End.KILL)
    second = await comes_after(rig, 1_000)
    rig.clock.advance(50)
    await change(rig, second)
    await rig.restart(End.KILL)
    (letter,) = await receive(rig, group=UNDERTAKER, topic=DEAD)
    rig.clock.advance(50)
    await finish(rig, REDRIVE)
    await rig.restart(End.KILL)
    rig.clock.advance(50)
    last = await pushed_one(rig)
    rig.clock.advance(50)
    assert await ack(rig, last) == [None]
    assert [contexts(each) for each in (first, second, letter, last)] == [(CONTEXT, CONTEXT)] * 4
    assert {span.trace_id for span in spans} == {TRACE_ID}
    assert tree_of([of_daemon(span) for span in spans]) == LIFE


@every_durable_broker(queues=1)
async def test_spans_have_the_names_and_attributes_of_the_conventions(rig: EmbeddedRig) -> None:
    """A send, a delivery and an acknowledgement, with their times, kinds and parents."""
    spans = await with_spans(rig)
    start_ms = rig.clock.now_ms()
    await rig.broker.send([traced_message()])
    delivery = await pushed_one(rig)
    rig.clock.advance(70)
    await ack(rig, delivery)
    sent, delivered, acked = sorted(spans, key=lambda span: ("send", "deliver", "ack").index(span.name.split()[0]))
    about = {
        "messaging.system": "rocketmq",
        "messaging.destination.name": TOPIC,
        "messaging.message.id": "m-1",
    }
    mine = {"messaging.consumer.group.name": GROUP, "rockdmq.delivery.attempt": 1}
    operation = {"messaging.operation.name": "send", "messaging.operation.type": "send"}
    assert sent.attributes == {**about, **operation, "messaging.rocketmq.message.type": "normal"}
    operation = {"messaging.operation.name": "deliver", "messaging.operation.type": "receive"}
    assert delivered.attributes == {**about, **operation, **mine}
    operation = {"messaging.operation.name": "ack", "messaging.operation.type": "settle"}
    assert acked.attributes == {**about, **operation, **mine}
    assert (delivered.start_ms, delivered.end_ms) == (start_ms, start_ms + 70)
    assert [sent.parent_span_id, delivered.parent_span_id, acked.parent_span_id] == [
        PRODUCER,
        PRODUCER,
        delivered.span_id,
    ]
    assert {span.kind for span in spans} == {SpanKind.SERVER}


@every_durable_broker(queues=1)
async def test_an_expired_lease_and_a_delivery_of_an_earlier_run(rig: EmbeddedRig) -> None:
    """An expired lease is an error without a call. After a restart the end of a delivery has only its call."""
    spans = await with_spans(rig)
    await rig.broker.send([traced_message()])
    await receive(rig, invisible_ms=10_000)
    await rig.pass_ms(10_000)
    assert tree_of([of_daemon(span) for span in spans]).splitlines()[1:] == [
        "deliver orders (workers, attempt 1)  ERROR lease_expired"
    ]
    spans.clear()
    (second,) = await receive(rig, renew_for=CLIENT)
    await rig.restart(End.KILL)
    await change(rig, second)
    (nack,) = spans
    assert (nack.name, nack.parent_span_id) == ("nack orders", PRODUCER)
    assert nack.attributes["rockdmq.delivery.attempt"] == 2


@every_durable_broker(queues=1)
async def test_a_delivery_that_does_not_count_has_an_id_of_its_own(rig: EmbeddedRig) -> None:
    """The message is delivered again as the same attempt; no error is shown."""
    spans = await with_spans(rig)
    await rig.broker.send([traced_message()])
    await change(rig, await pushed_one(rig), suspend=True)
    await ack(rig, await pushed_one(rig))
    assert tree_of([of_daemon(span) for span in spans]).splitlines()[1:] == [
        "deliver orders (workers, attempt 1)",
        "deliver orders (workers, attempt 1)",
        "└── ack orders (workers, attempt 1)",
    ]


@every_durable_broker(queues=1)
async def test_a_refused_send_is_an_error(rig: EmbeddedRig) -> None:
    """The producer gets the refusal, and the trace shows it."""
    spans = await with_spans(rig)
    envelope = traced_message()
    with pytest.raises(Refused):
        await rig.broker.send([envelope._replace(topic="no topic")])
    (span,) = spans
    assert (span.attributes["error.type"], bool(span.error)) == ("Refused", True)


@every_durable_broker(queues=1)
async def test_a_half_message_is_sent_once_and_delivered_after_its_commit(rig: EmbeddedRig) -> None:
    """The send has the type of a transaction; the delay counts from the commit."""
    spans = await with_spans(rig)
    (receipt,) = await rig.broker.transactions.prepare([Half(traced_message(), delay_ms=1_000)])
    rig.clock.advance(500)
    await rig.broker.transactions.commit(TOPIC, receipt.transaction_id)
    await ack(rig, await comes_after(rig, 1_000))
    assert [span.name.split()[0] for span in spans] == ["send", "delay", "deliver", "ack"]
    assert spans[0].attributes["messaging.rocketmq.message.type"] == "transaction"
    assert spans[1].start_ms == spans[0].end_ms + 500
    spans.clear()
    with pytest.raises(Refused):
        await rig.broker.transactions.prepare([Half(traced_message("m-2")._replace(topic="no topic"))])
    assert [span.attributes["error.type"] for span in spans] == ["Refused"]


@every_durable_broker(queues=1)
async def test_messages_that_are_not_sampled_have_no_spans(rig: EmbeddedRig) -> None:
    """Their context comes back to the consumer all the same."""
    spans = await with_spans(rig)
    unsampled = CONTEXT.removesuffix("01") + "00"
    await rig.broker.send([traced_message("m-1", unsampled, deliver_at_ms=rig.clock.now_ms() + 1_000)])
    first = await comes_after(rig, 1_000)
    await change(rig, first)
    await rig.pass_ms(60_000)
    second = await pushed_one(rig)
    await ack(rig, second)
    assert [contexts(each) for each in (first, second)] == [(unsampled, unsampled)] * 2
    assert spans == []
