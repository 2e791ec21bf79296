"""The RPCs of ``apache.rocketmq.v2.MessagingService``: validate, map, call the broker, map. No transport here.

Each method takes a request and its ``Call`` and returns the answer, or the pieces of many. What is wrong is
raised from ``broker_adapter.errors``; ``dispatch`` turns it into the protocol's answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import structlog

from broker_adapter.adapter import PopBroker, PullBroker, Subscription
from broker_adapter.clock import Clock
from broker_adapter.deferred import Deferred
from broker_adapter.errors import BrokerError, Overloaded, Refused, Rule
from broker_adapter.limits import AUTO_RENEW_INVISIBLE_MS
from broker_adapter.message import Delivery, Envelope
from broker_adapter.transactions import TransactionalBroker
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import to_envelope
from dmq.acl.gate import holders_of
from dmq.acl.quotas import Quota, Quotas
from dmq.embedded.recurring import makes_schedule
from dmq.sidecar import mapping, validate
from dmq.sidecar.answers import received
from dmq.sidecar.call import Call
from dmq.sidecar.codes import OK_STATUS, common_status, status_of
from dmq.sidecar.delay import DELAY_PROPERTIES, check_not_after, deliver_at_ms, is_relative, timestamp_ms
from dmq.sidecar.pulls import PullCalls
from dmq.sidecar.recurring import AddSchedule, RecurringCalls
from dmq.sidecar.sessions import Session, Sessions
from dmq.sidecar.settings import CONSUMERS, SidecarConfig, client_type_of_heartbeat
from dmq.sidecar.slots import Polls
from dmq.sidecar.stream_reopening import route_endpoints
from dmq.sidecar.telemetry import Streams
from dmq.sidecar.transactions import TransactionCalls

log = structlog.get_logger("dmq.sidecar")

_Sent = TypeVar("_Sent")

_NOTHING_TO_FORWARD = wire.ForwardMessageToDeadLetterQueueResponse(
    status=wire.Status(code=wire.OK, message="nothing to do: the message is no longer this consumer's")
)


class MessagingService:
    """Serves official clients from one broker. Everything runs on one event loop."""

    def __init__(
        self,
        broker: PopBroker,
        clock: Clock,
        sessions: Sessions,
        config: SidecarConfig,
        transactions: TransactionalBroker | None = None,
        pulls: PullBroker | None = None,
        *,
        quotas: Quotas | None = None,
        add_schedule: AddSchedule | None = None,
    ) -> None:
        self.quotas = self._quotas = quotas = quotas or Quotas(clock)
        self._broker = broker
        self._recurring = RecurringCalls(add_schedule, quotas)
        self._transactions = TransactionCalls(transactions, config, sessions, quotas)
        self._clock = clock
        self._sessions = sessions
        self._config = config
        self._endpoints = mapping.endpoints_of("127.0.0.1", 8081)
        self._store_host = "127.0.0.1:8081"
        self._sends_in_flight = 0
        self._room_at = config.sends_busy // 2
        self.on_room: Callable[[], None] = lambda: None  # the transport may read on
        self._polls = Polls(
            in_all=config.receives_waiting_max, per_client=config.receives_per_client_max, quotas=quotas
        )
        self._pulls = PullCalls(pulls, self._polls, self._may_make, lambda: self._store_host)
        self.streams = Streams(broker, sessions, self._transactions.producers, config, quotas, clock)
        self.telemetry = self.streams.serve
        self.group_changed = self.streams.group_changed
        # The RPCs that are served; the others of the protocol are answered 50100.
        self.unary: Mapping[str, Callable[[Any, Call], Awaitable[Any]]] = {
            "QueryRoute": self.query_route,
            "Heartbeat": self.heartbeat,
            "SendMessage": self.send_message,
            "RecallMessage": self.recall_message,
            "EndTransaction": self._transactions.end,
            "QueryAssignment": self.query_assignment,
            "AckMessage": self.ack_message,
            "ChangeInvisibleDuration": self.change_invisible_duration,
            "ForwardMessageToDeadLetterQueue": self.forward_message_to_dead_letter_queue,
            "NotifyClientTermination": self.notify_client_termination,
            **self._pulls.unary,
        }
        self.streaming: Mapping[str, Callable[[Any, Call], Awaitable[Iterator[Any]]]] = {
            "ReceiveMessage": self.receive_message,
            **self._pulls.streaming,
        }

    def listening_at(self, host: str, port: int) -> None:
        """Say where this server can be reached; told to clients that do not say how they reached it."""
        self._endpoints = mapping.endpoints_of(host, port)
        self._store_host = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def drain(self) -> None:
        """End telemetry streams and long polls now, with proper answers, and let no new ones wait. Idempotent."""
        self.streams.drain()
        self._polls.close()

    def is_busy(self) -> bool:
        """Say whether so many sends are in flight that clients had better wait before they send more."""
        return self._sends_in_flight >= self._config.sends_busy

    # -- session ------------------------------------------------------------------------------------------------------

    async def query_route(self, request: wire.QueryRouteRequest, call: Call) -> wire.QueryRouteResponse:
        """Tell the queues of a topic; creates the topic if the broker does so."""
        topic = validate.topic_of(request.topic)
        self._quotas.about_to_make(Quota.TOPICS, holders_of(call.admission), topic)
        route = await self._broker.route(topic)
        session = self._sessions.get(call.client_id)
        endpoints = route_endpoints(session, self._endpoints_for(request.endpoints), self._clock.monotonic_s())
        queues = mapping.route_queues(route, request.topic, self._config.broker_name, endpoints)
        return wire.QueryRouteResponse(status=OK_STATUS, message_queues=queues)

    async def query_assignment(
        self,
        request: wire.QueryAssignmentRequest,
        call: Call,
    ) -> wire.QueryAssignmentResponse:
        """Assign any queue of the broker to every consumer: the broker hands out messages, not queues.

        A consumer of a FIFO group gets every queue by itself, as clients expect; so do its colleagues. Either way works
        for a client, whatever its settings said: order is the broker's affair.
        """
        topic, group = validate.topic_of(request.topic), validate.group_of(request.group)
        self._may_make(topic, group, call)
        await self._broker.ensure_group(group)
        assignments = mapping.assignments(
            await self._broker.route(topic),
            request.topic,
            self._config.broker_name,
            self._endpoints_for(request.endpoints),
            is_fifo=self._broker.group_settings(group, (topic,)).is_fifo,
        )
        return wire.QueryAssignmentResponse(status=OK_STATUS, assignments=assignments)

    async def heartbeat(self, request: wire.HeartbeatRequest, call: Call) -> wire.HeartbeatResponse:
        """Note a sign of life, which keeps leases; makes the group of a consumer known, also after a restart.

        What the client is, its telemetry stream said: Java 5.0.3 leaves its type out of every heartbeat. One that tells
        nothing, of a client that nothing is known of, is answered OK and kept nowhere: Go sends such to find out
        whether a server is healthy. Groups are made only of what was asked for, since access rules look at the request.
        """
        session = self._sessions.get(call.client_id)
        client_type = client_type_of_heartbeat(request.client_type, session)
        if client_type is not None:
            group = ""
            if client_type in CONSUMERS and request.client_type != wire.PRODUCER and request.group.name:
                group = validate.group_of(request.group)
                self._quotas.about_to_make(Quota.GROUPS, holders_of(call.admission), group)
                await self._broker.ensure_group(group)
            session = self._sessions.seen(call.client_id, client_type, group, call.language, call.version)
            self._pulls.seen(client_type, session.group, call.client_id)
        if call.client_id:
            self._broker.client_seen(call.client_id)
        return wire.HeartbeatResponse(status=OK_STATUS)

    async def notify_client_termination(
        self,
        request: wire.NotifyClientTerminationRequest,  # noqa: ARG002
        call: Call,
    ) -> wire.NotifyClientTerminationResponse:
        """Let go of a client that leaves: nobody asks it anything, its long polls end, its leases are not renewed."""
        self._transactions.producers.gone(call.client_id)
        self._sessions.forget(call.client_id)
        self._polls.end(call.client_id)
        self._broker.client_gone(call.client_id)
        self._pulls.gone(call.client_id)
        return wire.NotifyClientTerminationResponse(status=OK_STATUS)

    # -- producing ----------------------------------------------------------------------------------------------------

    def send_message(self, request: wire.SendMessageRequest, call: Call) -> Deferred[wire.SendMessageResponse]:
        """Accept all messages of the request or none; the answer leaves once they are durable.

        A message that is delayed may be one of several, which the real server refuses. One that is to recur makes a
        schedule and stores no message.
        """
        if self._sends_in_flight >= self._config.sends_in_flight_max:
            raise Overloaded("sends in flight", limit=self._config.sends_in_flight_max)
        messages = request.messages
        if self._quotas.limits_sends:
            self._quotas.spend(Quota.SENDS_PER_S, holders_of(call.admission), len(messages))
        now_ms = self._clock.now_ms()
        if messages and messages[0].system_properties.message_type == wire.TRANSACTION:
            return self._counted(self._transactions.send(messages, call, now_ms), lambda answer: answer)
        envelopes: list[Envelope] = []
        try:
            topic = validate.check_send(messages)
            for message in messages:
                validate.check_message(message)
                if makes_schedule(message.user_properties):
                    return self._counted(self._recurring.send(topic, messages, call), lambda answer: answer)
                envelopes.append(self._envelope(topic, message, now_ms))
            if not self._quotas.is_known(Quota.TOPICS, topic):
                self._quotas.make(Quota.TOPICS, holders_of(call.admission), topic)
        except Refused as error:
            return Deferred.given(mapping.send_refusal(messages, len(envelopes), status_of(error, call.language)))
        return self._counted(self._broker.send(envelopes), mapping.send_response)

    def _counted(
        self, sending: Awaitable[_Sent], answer: Callable[[_Sent], wire.SendMessageResponse]
    ) -> Deferred[wire.SendMessageResponse]:
        self._sends_in_flight += 1

        def answered(sent: Deferred[_Sent]) -> wire.SendMessageResponse:
            self._sends_in_flight -= 1
            if self._sends_in_flight == self._room_at:
                self.on_room()
            if sent.error is not None:
                raise sent.error
            return answer(sent.value)

        return Deferred.of(sending).convert(answered)

    async def recall_message(self, request: wire.RecallMessageRequest, call: Call) -> wire.RecallMessageResponse:
        """Take a delayed message back; OK only if it is gone, durably. 40401 says when it was delivered, or: unknown.

        A client repeats a call whose answer was lost: the second one is OK too, and its text says since when.
        """
        try:
            receipt = await self._broker.recall(validate.topic_of(request.topic), request.recall_handle)
        except Refused as refused:
            if refused.rule is not Rule.NOT_FOUND or call.language != "PYTHON":
                raise
            # The Python client, at least until 5.1.2, takes 40401 for success, whatever it asked for.
            return wire.RecallMessageResponse(status=wire.Status(code=wire.NOT_FOUND, message=str(refused)))
        return mapping.recall_response(receipt)

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
        consumed = DELAY_PROPERTIES if properties else ()
        is_delay = bool(due_ms and properties) and is_relative(properties)  # before they are consumed
        envelope = to_envelope(message, deliver_at_ms=due_ms, consumed=consumed, topic=topic)
        return envelope._replace(is_relative=True) if is_delay else envelope

    # -- consuming ----------------------------------------------------------------------------------------------------

    async def receive_message(
        self, request: wire.ReceiveMessageRequest, call: Call
    ) -> Iterator[list[wire.ReceiveMessageResponse]]:
        """Hand out messages: the status first, each message, the time of delivery last. Waits for the first message.

        What it gives at once may go out in one piece; a piece is not much larger than its largest message.
        """
        group = validate.group_of(request.group)
        subscription = validate.subscription_of(request)
        renews = request.auto_renew
        invisible_ms = AUTO_RENEW_INVISIBLE_MS if renews else validate.receive_invisible_ms(request)
        wait_ms = validate.wait_ms(request, call.deadline_s)
        self._may_make(subscription.topic, group, call)
        await self._broker.ensure_group(group)
        if renews:
            self._broker.client_seen(call.client_id)
        deliveries = await self._receive(
            call,
            group,
            subscription,
            batch_max=validate.batch_of(request),
            invisible_ms=invisible_ms,
            wait_ms=wait_ms,
            is_renewed=renews,
        )
        return received(deliveries, request.message_queue.topic, self._store_host, self._clock.now_ms, call.account)

    async def _receive(
        self,
        call: Call,
        group: str,
        subscription: Subscription,
        *,
        batch_max: int,
        invisible_ms: int,
        wait_ms: int,
        is_renewed: bool,
    ) -> Sequence[Delivery]:
        """Receive from the broker, in a wait that ``drain`` and the client's goodbye can end."""

        def receive(left_ms: int) -> Awaitable[Sequence[Delivery]]:
            return self._broker.receive(
                group,
                subscription,
                batch_max=batch_max,
                invisible_ms=invisible_ms,
                wait_ms=left_ms,
                renew_for=call.client_id if is_renewed else "",
            )

        return await self._polls.run(call, receive, wait_ms, nothing=())

    async def ack_message(self, request: wire.AckMessageRequest, call: Call) -> wire.AckMessageResponse:
        """Finish deliveries, each with a result of its own."""
        topic, group = validate.topic_of(request.topic), validate.group_of(request.group)
        entries = request.entries
        validate.check_entries(entries)
        results = await self._broker.ack(group, topic, [entry.receipt_handle for entry in entries])
        if not any(results):
            return mapping.ack_response(entries)
        statuses = [OK_STATUS if result is None else status_of(result, call.language) for result in results]
        for result in results:
            if result is not None and not isinstance(result, BrokerError):
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
        call: Call,  # noqa: ARG002
    ) -> wire.ChangeInvisibleDurationResponse:
        """Hide a delivery anew, or give it back. The handle that comes back is the one to use from here on.

        A push consumer means by it that consuming failed. The broker knows whose delivery it is, and does not believe
        the duration: Node asks for 0 s, or for milliseconds instead of seconds.
        """
        topic, group = validate.topic_of(request.topic), validate.group_of(request.group)
        handle = await self._broker.change_invisible(
            group, topic, request.receipt_handle, validate.change_invisible_ms(request), suspend=request.suspend
        )
        return wire.ChangeInvisibleDurationResponse(status=OK_STATUS, receipt_handle=handle)

    async def forward_message_to_dead_letter_queue(
        self, request: wire.ForwardMessageToDeadLetterQueueRequest, call: Call
    ) -> wire.ForwardMessageToDeadLetterQueueResponse:
        """Give a delivery up: it goes to the dead-letter queue, or comes back if the broker knows better."""
        topic, group = validate.topic_of(request.topic), validate.group_of(request.group)
        attempts = request.delivery_attempt
        if call.language == "RUST":
            attempts -= 1  # it counts the next attempt, which it then does not make
        try:
            await self._broker.dead_letter(group, topic, request.receipt_handle, attempts=attempts)
        except Refused as error:
            # Push consumers repeat this call until it is OK, for ever, and the rest of their batch waits behind it. The
            # handle is stale when the answer to their first call was lost, or when somebody else has the message by
            # now: either way it is not theirs any more, and nothing is lost.
            if error.rule is not Rule.RECEIPT_HANDLE or not _is_push(self._sessions.get(call.client_id)):
                raise
            log.info("forward_outdated", topic=topic, group=group, message_id=request.message_id)
            return _NOTHING_TO_FORWARD
        return wire.ForwardMessageToDeadLetterQueueResponse(status=OK_STATUS)

    def _may_make(self, topic: str, group: str, call: Call) -> None:
        holders = holders_of(call.admission)
        self._quotas.about_to_make(Quota.TOPICS, holders, topic)
        self._quotas.about_to_make(Quota.GROUPS, holders, group)

    def _endpoints_for(self, dialled: wire.Endpoints) -> wire.Endpoints:
        """Return the address the client reached us by, which works behind any port mapping; else our own."""
        return dialled if dialled.addresses else self._endpoints


def _is_push(session: Session | None) -> bool:
    return session is not None and session.client_type == wire.PUSH_CONSUMER
