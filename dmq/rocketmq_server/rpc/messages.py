"""The per-message RPCs: SendMessage, ReceiveMessage, AckMessage, ChangeInvisibleDuration.

They depend on an exchange only, so that a front process serves them like the store process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import structlog

from broker_adapter.contracts.deferred import Deferred
from broker_adapter.contracts.errors import BrokerError, Overloaded, Refused, Rule
from broker_adapter.contracts.limits import AUTO_RENEW_INVISIBLE_MS
from broker_adapter.contracts.message import Envelope
from broker_adapter.contracts.schedules import makes_schedule
from broker_adapter.runtime.clock import Clock
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import to_envelope
from dmq.acl.gate import holders_of
from dmq.rocketmq_server.calls.call import Call
from dmq.rocketmq_server.calls.dispatch import Logged
from dmq.rocketmq_server.calls.exchange import Caller, MessagePort, Receive
from dmq.rocketmq_server.codec import mapping, validate
from dmq.rocketmq_server.codec.codes import OK_STATUS, common_status, status_of
from dmq.rocketmq_server.codec.delay import check_not_after, deliver_at_ms, is_relative, timestamp_ms
from dmq.rocketmq_server.rpc.answers import check_room, received
from dmq.rocketmq_server.sessions.settings import SidecarConfig
from dmq.runtime.slices import Slices

_ENTRIES_LIKE_ONE = 32  # this many acknowledged entries cost about as much as one send

log = structlog.get_logger("dmq.rocketmq_server")

_Sent = TypeVar("_Sent")
SendOther = Callable[[wire.SendMessageRequest, Call], Awaitable[wire.SendMessageResponse]]


class ClientMessageCalls:
    """The four per-message RPCs. The event loop owns the object."""

    def __init__(self, exchange: MessagePort, clock: Clock, config: SidecarConfig, send_other: SendOther) -> None:
        """``send_other`` handles sends that do not store a message directly: half messages and schedule requests."""
        self._exchange = exchange
        self._clock = clock
        self._config = config
        self._send_other = send_other
        self.slices = Slices(clock)
        self.store_host = "127.0.0.1:8081"  # the address in delivered messages
        self._sends_in_flight = 0
        self._in_flight = 0  # sends, and acknowledgements by their entries
        self._room_at = config.sends_busy // 2
        self.on_room: Callable[[], None] = lambda: None  # makes the transport resume reading
        self.unary: Mapping[str, Callable[[Any, Call], Awaitable[Any]]] = {
            "SendMessage": self.send_message,
            "AckMessage": self.ack_message,
            "ChangeInvisibleDuration": self.change_invisible_duration,
        }
        self.streaming: Mapping[str, Callable[[Any, Call], Awaitable[Iterator[Any]]]] = {
            "ReceiveMessage": self.receive_message
        }

    def is_busy(self) -> bool:
        """Return True if so many calls are in flight that clients should wait before they send more."""
        return self._in_flight >= self._config.sends_busy

    def send_message(self, request: wire.SendMessageRequest, call: Call) -> Deferred[wire.SendMessageResponse]:
        """Accept all messages of the request or none; the answer is sent once they are durable.

        A batch may contain delayed messages, which the real server refuses. A message with schedule properties creates
        a schedule and is not stored.
        """
        if self._sends_in_flight >= self._config.sends_in_flight_max:
            raise Overloaded("sends in flight", limit=self._config.sends_in_flight_max)
        messages = request.messages
        if messages and messages[0].system_properties.message_type == wire.TRANSACTION:
            return self._counted(self._send_other(request, call), lambda answer: answer)
        now_ms = self._clock.now_ms()
        envelopes: list[Envelope] = []
        try:
            topic = validate.check_send(messages)
            for message in messages:
                validate.check_message(message)
                if makes_schedule(message.user_properties):
                    return self._counted(self._send_other(request, call), lambda answer: answer)
                envelopes.append(self._envelope(topic, message, now_ms))
            sending = self._exchange.send(envelopes, holders_of(call.admission))
        except Refused as error:
            return Deferred.given(mapping.send_refusal(messages, len(envelopes), status_of(error, call.language)))
        return self._counted(sending, mapping.send_response)

    def _counted(
        self, sending: Awaitable[_Sent], answer: Callable[[_Sent], wire.SendMessageResponse]
    ) -> Deferred[wire.SendMessageResponse]:
        self._sends_in_flight += 1
        self._in_flight += 1

        def answered(sent: Deferred[_Sent]) -> wire.SendMessageResponse:
            self._sends_in_flight -= 1
            self._ended(1)
            if sent.error is not None:
                raise sent.error
            return answer(sent.value)

        return Deferred.of(sending).convert(answered)

    def _ended(self, count: int) -> None:
        before, self._in_flight = self._in_flight, self._in_flight - count
        if before > self._room_at >= self._in_flight:
            self.on_room()

    def _envelope(self, topic: str, message: wire.Message, now_ms: int) -> Envelope:
        system, properties = message.system_properties, message.user_properties
        has_timestamp = system.HasField("delivery_timestamp")
        due_ms: int | None = None
        if has_timestamp or properties:
            timestamp = system.delivery_timestamp
            due_ms = deliver_at_ms(
                timestamp_ms(timestamp.seconds, timestamp.nanos) if has_timestamp else None,
                properties,
                now_ms=now_ms,
                levels_ms=self._config.delay_levels_ms,
                delay_max_ms=self._config.delay_max_ms,
            )
            check_not_after(properties, due_ms, now_ms)
        if due_ms is None:
            validate.check_undelayed(message)
        if system.message_type == wire.TRANSACTION:
            raise Refused(Rule.MESSAGE_TYPE, "half messages and others cannot be in one request", value="TRANSACTION")
        consumed = validate.STRIPPED_PROPERTIES if properties else ()
        is_delay = bool(due_ms and properties) and is_relative(properties)  # before they are consumed
        envelope = to_envelope(message, deliver_at_ms=due_ms, consumed=consumed, topic=topic)
        return envelope._replace(is_relative=True) if is_delay else envelope

    async def receive_message(
        self, request: wire.ReceiveMessageRequest, call: Call
    ) -> Iterator[list[wire.ReceiveMessageResponse]]:
        """Yield the status, then each message, then the delivery time. Waits for the first message.

        Each list that it yields may be sent as one piece; a piece is not much larger than its largest message.
        """
        group = validate.group_of(request.group)
        subscribe = partial(validate.subscription_of, request)
        is_sql = request.filter_expression.type == wire.SQL  # slow to parse
        subscription = await self.slices.do(subscribe) if is_sql else subscribe()
        is_renewed = request.auto_renew
        wanted = Receive(
            group,
            subscription,
            validate.batch_of(request),
            AUTO_RENEW_INVISIBLE_MS if is_renewed else validate.receive_invisible_ms(request),
            validate.wait_ms(request, call.deadline_s),
            is_renewed,
        )
        got = await self._exchange.receive(wanted, call.client_id, holders_of(call.admission))
        deliveries, over, give_back = got
        try:
            check_room(deliveries, call.account)
        except Overloaded:
            give_back()
            raise
        topic, now_ms = validate.resource_of(request.message_queue.topic), self._clock.now_ms
        return received(deliveries, topic, self.store_host, now_ms, call.account, over)

    async def ack_message(self, request: wire.AckMessageRequest, call: Call) -> wire.AckMessageResponse:
        """Finish deliveries, each with a result of its own."""
        topic, group = validate.topic_of(request.topic), validate.group_of(request.group)
        entries = request.entries
        validate.check_entries(entries)
        count = 1 + len(entries) // _ENTRIES_LIKE_ONE
        self._in_flight += count
        try:
            results = await self._exchange.ack(group, topic, [entry.receipt_handle for entry in entries])
        finally:
            self._ended(count)
        if not any(results):
            return mapping.ack_response(entries)
        statuses = [OK_STATUS if result is None else status_of(result, call.language) for result in results]
        for result in results:
            if result is not None and not isinstance(result, BrokerError | Logged):
                log.error("ack_failed", topic=topic, group=group, exc_info=result)
        return wire.AckMessageResponse(
            status=common_status(statuses),
            entries=[
                wire.AckMessageResultEntry(
                    status=status, message_id=entry.message_id, receipt_handle=entry.receipt_handle
                )
                for entry, status in zip(entries, statuses, strict=True)
            ],
        )

    async def change_invisible_duration(
        self,
        request: wire.ChangeInvisibleDurationRequest,
        call: Call,
    ) -> wire.ChangeInvisibleDurationResponse:
        """Extend a lease, or release the message. The receipt handle in the answer replaces the old one.

        From a push consumer the call means that consuming failed. The broker finds the client type of the delivery and
        ignores the duration: Node sends 0 s, or milliseconds instead of seconds.
        """
        topic, group = validate.topic_of(request.topic), validate.group_of(request.group)
        handle = await self._exchange.change_invisible(
            group,
            topic,
            request.receipt_handle,
            validate.change_invisible_ms(request),
            suspend=request.suspend,
            caller=Caller(call.client_id, call.address),
        )
        return wire.ChangeInvisibleDurationResponse(status=OK_STATUS, receipt_handle=handle)
