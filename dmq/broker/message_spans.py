"""Spans of a message on its way through the broker, for messages with a sampled trace context.

    send          from the call until the message is durable
    delay         from there, or from a failure, until the message is in its queue
    deliver       from the hand-out to a consumer until the delivery ends; a failure is an error
    ack, nack     the call that ends the delivery, a child of it; also reject, send_back
    dead_letter   the copy in the group's dead-letter queue
    redrive       the new message made from a dead letter

All are children of the producer's span, except calls that end a delivery. An attempt links to the one before it, a
delay and a dead letter to the failed attempt, a redrive to its dead letter, and the first attempt of a redriven message
to the redrive. The ids of linked spans follow from the message, the group and the attempt (``span_id_of``), so links
work over restarts without a stored row. Names and attributes: OpenTelemetry's semantic conventions for messaging.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any, Final, NamedTuple, Protocol

from broker_adapter.contracts.deferred import Deferred
from broker_adapter.contracts.message import Envelope, SendReceipt, unpack_id
from broker_adapter.contracts.topics import dead_letter_topic
from broker_adapter.runtime.clock import Clock
from dmq.broker.groups import DeliveryLease, Ended, SubscribedQueue
from dmq.broker.topics import Names
from dmq.store.schema.messages.record import (
    WAITING_HEADER_BYTES,
    EntryKind,
    WaitingEntry,
    body_facts,
    body_payload,
    decode_history,
    decode_waiting,
    history_bytes,
)
from dmq.tracing import (
    EmitSpan,
    MessageSpan,
    SpanKind,
    TracedDelivery,
    TracedMessage,
    span_id_of,
    traced,
)
from retry.failure_reason import FailureReason
from retry.flow import ComeBack, Failure, GivenUp, LeaseExpired, Nacked, Outcome, SentBack, Unwanted
from retry.policy import DeadLetter, RetryAt

_TYPES: Final = {
    "send": "send",
    "deliver": "receive",
    "ack": "settle",
    "nack": "settle",
    "reject": "settle",
    "send_back": "settle",
}
_CALLS: Final = {Nacked: "nack", SentBack: "send_back", GivenUp: "reject", Unwanted: "reject", LeaseExpired: ""}
_ERRORS: Final = {
    Nacked: "nacked",
    SentBack: "sent_back",
    GivenUp: "rejected",
    Unwanted: "refused",
    LeaseExpired: "lease_expired",
}
_OUTCOMES: Final = {ComeBack: "redelivery", RetryAt: "retry", DeadLetter: "dead_letter"}

ATTEMPT: Final = "rockdmq.delivery.attempt"
OUTCOME: Final = "rockdmq.delivery.outcome"
REASON: Final = "rockdmq.dead_letter.reason"


class SendCall(Protocol):
    """A send, as ``Sends.send``."""

    def __call__(
        self, envelopes: Sequence[Envelope], note: Callable[..., bytes] | None = None, *, is_spent: bool = False
    ) -> Deferred[Sequence[SendReceipt]]:
        """Send all messages or none."""
        ...


class DeliveryEnd(NamedTuple):
    """End of a traced delivery, not durable yet."""

    delivery: TracedDelivery
    topic: str
    group: str
    message_id: str
    attempt: int
    call_ms: int
    call: str = ""  # operation of the call that ends it; empty: there is none
    error: str = ""  # ``error.type``
    text: str = ""  # description of the error
    outcome: str = ""
    reason: str = ""  # of a dead letter
    is_counted: bool = True  # else the next delivery is the same attempt


class MessageSpans:
    """Creates the spans. ``handed_over`` belongs to the scheduler's thread, all else to the event loop."""

    def __init__(self, names: Names, clock: Clock, emit: EmitSpan) -> None:
        self._names = names
        self._clock = clock
        self._emit = emit
        self._rng = Random()  # ids of spans without links to them

    # -- sends --------------------------------------------------------------------------------------------------------

    def of_sends(self, send: SendCall) -> SendCall:
        """Return ``send`` with a span for each traced message."""

        def send_traced(
            envelopes: Sequence[Envelope], note: Callable[..., bytes] | None = None, *, is_spent: bool = False
        ) -> Deferred[Sequence[SendReceipt]]:
            found = [(each, message) for each in envelopes if (message := traced(each.payload)) is not None]
            if not found:
                return send(envelopes, note, is_spent=is_spent)
            start_ms = self._clock.now_ms()
            try:
                sending = send(envelopes, note, is_spent=is_spent)
            except Exception as error:
                self._sent(found, start_ms, error)
                raise
            return sending.convert(partial(self._answered, found, start_ms))

        return send_traced

    @contextmanager
    def of_halves(self, envelopes: Sequence[Envelope]) -> Iterator[None]:
        """Emit the span of each traced half message at the end of the send in this context."""
        found = [(each, message) for each in envelopes if (message := traced(each.payload)) is not None]
        start_ms = self._clock.now_ms()
        try:
            yield
        except Exception as error:
            self._sent(found, start_ms, error, "transaction")
            raise
        self._sent(found, start_ms, None, "transaction")

    def _answered(
        self,
        found: Sequence[tuple[Envelope, TracedMessage]],
        start_ms: int,
        sent: Deferred[Sequence[SendReceipt]],
    ) -> Sequence[SendReceipt]:
        self._sent(found, start_ms, sent.error)
        if sent.error is not None:
            raise sent.error
        return sent.value

    def _sent(
        self,
        found: Sequence[tuple[Envelope, TracedMessage]],
        start_ms: int,
        error: Exception | None,
        message_type: str = "",
    ) -> None:
        for envelope, message in found:
            about = _about("send", envelope.topic, envelope.message_id)
            about["messaging.rocketmq.message.type"] = message_type or envelope.message_type.name.lower()
            if envelope.deliver_at_ms:
                about["messaging.rocketmq.message.delivery_timestamp"] = envelope.deliver_at_ms
            if envelope.message_group:
                about["messaging.rocketmq.message.group"] = envelope.message_group
            if error is not None:
                about["error.type"] = type(error).__name__
            self._make(
                message,
                f"send {envelope.topic}",
                about,
                span_id=self._any_id(),
                times=(start_ms, self._clock.now_ms()),
                kind=SpanKind.SERVER,
                error=str(error) if error is not None else "",
            )

    # -- the timeline -------------------------------------------------------------------------------------------------

    def handed_over(self, rows: Sequence[tuple[bytes, bytes]], now_ms: int) -> None:
        """Emit the spans of the delays of timeline rows that are in their queues since ``now_ms``."""
        for _, value in rows:
            entry, at = decode_waiting(value), WAITING_HEADER_BYTES
            if entry.kind == EntryKind.RETRY:
                at += history_bytes(value, at)
            body = value[at:]
            if (message := traced(body_payload(body))) is not None:
                self._delayed(message, entry, value, body, now_ms)

    def _delayed(self, message: TracedMessage, entry: WaitingEntry, value: bytes, body: bytes, now_ms: int) -> None:
        topic_id, group = entry.topic_id, ""
        if entry.kind == EntryKind.RETRY:
            topic_id = decode_history(value, WAITING_HEADER_BYTES).topic_id
            group = self._group_name(entry.scope)
        topic = self._names.topics_by_id.get(topic_id)
        if topic is None:
            return
        message_id = unpack_id(body_facts(body)[0])
        about = _about("delay", topic.name, message_id, group, entry.attempts)
        about["messaging.rocketmq.message.delivery_timestamp"] = entry.deliver_at_ms
        failed = _deliver_id(message, message_id, group, entry.attempts)
        self._make(
            message,
            f"delay {topic.name}",
            about,
            span_id=span_id_of(message.trace_id, "delay", message_id, group, entry.attempts, entry.accepted_at_ms),
            times=(entry.accepted_at_ms, now_ms),
            links=(failed,) if group else (),
        )

    # -- deliveries ---------------------------------------------------------------------------------------------------

    def handed_out(self, payload: bytes) -> TracedDelivery | None:
        """Return the beginning of a delivery; None for a message that is not traced."""
        message = traced(payload)
        return TracedDelivery(message, self._clock.now_ms()) if message is not None else None

    def acked(self, finished: Mapping[SubscribedQueue, Iterable[int]]) -> list[DeliveryEnd]:
        """Return the ends of traced deliveries with acknowledged offsets. Call it before their leases are finished."""
        ends: list[DeliveryEnd] = []
        for queue, offsets in finished.items():
            for offset in offsets:
                lease = queue.leases.get(offset)
                if lease is not None and lease.traced is not None:
                    ends.append(self._end(queue, lease, lease.traced)._replace(call="ack"))
        return ends

    def returned(self, leases: Iterable[Ended], *, is_expired: bool) -> list[DeliveryEnd]:
        """Return the ends of traced deliveries that no call ends; their messages are available again at once."""
        error, outcome = _ERRORS[LeaseExpired] if is_expired else "", _OUTCOMES[ComeBack]
        return [
            self._end(queue, lease, lease.traced)._replace(
                error=error, text=error, outcome=outcome, is_counted=not lease.is_suspended
            )
            for queue, _, lease in leases
            if lease.traced is not None
        ]

    def failed(
        self,
        queue: SubscribedQueue,
        lease: DeliveryLease,
        payload: bytes,
        failure: Failure,
        outcome: Outcome,
        reason: FailureReason,
    ) -> DeliveryEnd | None:
        """Return the end of a failed delivery; None if its message is not traced."""
        delivery, lease.traced = lease.traced, None
        if delivery is None:
            message = traced(payload)
            if message is None:
                return None
            delivery = TracedDelivery(message, 0)
        error = _ERRORS[type(failure)]
        return self._end(queue, lease, delivery)._replace(
            call=_CALLS[type(failure)],
            error=reason.error_type or error,
            text=reason.error or error,
            outcome=_OUTCOMES[type(outcome)],
            reason=outcome.reason.name.lower() if isinstance(outcome, DeadLetter) else "",
        )

    def _end(self, queue: SubscribedQueue, lease: DeliveryLease, delivery: TracedDelivery) -> DeliveryEnd:
        topic, group = queue.subscription.topic.name, self._group_name(queue.group_id)
        return DeliveryEnd(delivery, topic, group, unpack_id(lease.message_id), lease.attempts, self._clock.now_ms())

    def ended_after(self, done: asyncio.Future[Any], ends: Sequence[DeliveryEnd]) -> None:
        """Emit the spans of ended deliveries once ``done``, the unit with their ends, is durable."""
        if ends:
            done.add_done_callback(partial(self._ended, ends))

    def _ended(self, ends: Sequence[DeliveryEnd], done: asyncio.Future[Any]) -> None:
        if not done.cancelled() and done.exception() is None:
            for each in ends:
                self._end_delivery(each)

    def _end_delivery(self, end: DeliveryEnd) -> None:
        message, start_ms = end.delivery
        now_ms = self._clock.now_ms()
        span_id = _deliver_id(message, end.message_id, end.group, end.attempt) if end.is_counted else self._any_id()
        facts = end.message_id, end.group, end.attempt
        if start_ms:
            about = _about("deliver", end.topic, *facts)
            about |= {key: value for key, value in (("error.type", end.error), (OUTCOME, end.outcome)) if value}
            self._make(
                message,
                f"deliver {end.topic}",
                about,
                span_id=span_id,
                times=(start_ms, now_ms),
                links=_before(message, *facts),
                kind=SpanKind.SERVER,
                error=end.text,
            )
        if end.call:
            self._make(
                message,
                f"{end.call} {end.topic}",
                _about(end.call, end.topic, *facts),
                span_id=span_id_of(message.trace_id, end.call, *facts),
                times=(end.call_ms, now_ms),
                links=() if start_ms else (span_id,),
                kind=SpanKind.SERVER,
                parent_id=span_id if start_ms else 0,
            )
        if end.reason:
            letters = dead_letter_topic(end.group)
            self._make(
                message,
                f"dead_letter {letters}",
                _about("dead_letter", letters, *facts) | {REASON: end.reason},
                span_id=_letter_id(message, end.message_id, end.group),
                times=(now_ms, now_ms),
                links=(span_id,),
                error=end.reason,
            )

    # -- redrives -----------------------------------------------------------------------------------------------------

    def redriven(self, payload: bytes, topic: str, group: str, message_id: str) -> Callable[[], None] | None:
        """Return the emitter of the span of a redrive, called once it is durable; None for a message not traced.

        ``payload`` and ``message_id`` are those of the new message, ``group`` is that of the dead letter.
        """
        message = traced(payload)
        if message is None:
            return None
        now_ms = self._clock.now_ms()

        def emit() -> None:
            self._make(
                message,
                f"redrive {topic}",
                _about("redrive", topic, message_id, group),
                span_id=_redrive_id(message, message_id),
                times=(now_ms, self._clock.now_ms()),
                links=(_letter_id(message, message.parent_message_id, group),),
            )

        return emit

    def _group_name(self, group_id: int) -> str:
        """Return the name of a group; empty if it was removed."""
        found = self._names.groups_by_id.get(group_id)
        return found.name if found is not None else ""

    def _any_id(self) -> int:
        return self._rng.getrandbits(64) or 1

    def _make(
        self,
        message: TracedMessage,
        name: str,
        about: dict[str, str | int],
        *,
        span_id: int,
        times: tuple[int, int],
        links: tuple[int, ...] = (),
        kind: SpanKind = SpanKind.INTERNAL,
        parent_id: int = 0,
        error: str = "",
    ) -> None:
        start_ms, end_ms = times
        parent_id = parent_id or message.span_id
        ends = start_ms, max(start_ms, end_ms)  # the wall clock may have been set back
        self._emit(MessageSpan(name, kind, message.trace_id, span_id, parent_id, *ends, about, links, error))


def _about(operation: str, topic: str, message_id: str, group: str = "", attempt: int = 0) -> dict[str, str | int]:
    about: dict[str, str | int] = {
        "messaging.system": "rocketmq",
        "messaging.operation.name": operation,
        "messaging.destination.name": topic,
        "messaging.message.id": message_id,
    }
    if operation in _TYPES:
        about["messaging.operation.type"] = _TYPES[operation]
    if group:
        about["messaging.consumer.group.name"] = group
    if attempt:
        about[ATTEMPT] = attempt
    return about


def _deliver_id(message: TracedMessage, message_id: str, group: str, attempt: int) -> int:
    return span_id_of(message.trace_id, "deliver", message_id, group, attempt)


def _letter_id(message: TracedMessage, message_id: str, group: str) -> int:
    return span_id_of(message.trace_id, "dead_letter", message_id, group)


def _redrive_id(message: TracedMessage, message_id: str) -> int:
    return span_id_of(message.trace_id, "redrive", message_id)


def _before(message: TracedMessage, message_id: str, group: str, attempt: int) -> tuple[int, ...]:
    """Return the link of a delivery to the attempt before it, or to the redrive of its message; none otherwise."""
    if attempt > 1:
        return (_deliver_id(message, message_id, group, attempt - 1),)
    return (_redrive_id(message, message_id),) if message.parent_message_id else ()
