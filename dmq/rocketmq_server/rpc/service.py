"""The RPCs of ``apache.rocketmq.v2.MessagingService``: validate, map, call the broker, map. Independent of the
transport.

Each method accepts a request and its ``Call`` and returns the answer, or the pieces of a streamed answer. Errors are
raised from ``broker_adapter.contracts.errors``; ``dispatch`` converts them to a status of the protocol.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import structlog

from broker_adapter.contracts.adapter import PullBroker
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.topics import check_group
from broker_adapter.contracts.transactions import TransactionalBroker
from broker_adapter.runtime.clock import Clock
from broker_adapter.wire import consumer_v1
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.acl.gate import holders_of
from dmq.acl.quotas import Quota, Quotas
from dmq.rocketmq_server.calls.call import Call
from dmq.rocketmq_server.calls.exchange import BrokerExchange, ServedBroker
from dmq.rocketmq_server.codec import mapping, validate
from dmq.rocketmq_server.codec.codes import OK_STATUS
from dmq.rocketmq_server.rpc.messages import ClientMessageCalls
from dmq.rocketmq_server.rpc.pulls import PullCalls
from dmq.rocketmq_server.rpc.recurring import AddSchedule, RecurringCalls
from dmq.rocketmq_server.rpc.telemetry import Streams
from dmq.rocketmq_server.rpc.transactions import TransactionCalls
from dmq.rocketmq_server.sessions.sessions import ClientSession, Sessions
from dmq.rocketmq_server.sessions.settings import CONSUMERS, SidecarConfig, client_type_of_heartbeat
from dmq.rocketmq_server.sessions.slots import PollSlots
from dmq.rocketmq_server.sessions.stream_reopening import route_endpoints
from retry.failure_reason import FailureReason

log = structlog.get_logger("dmq.rocketmq_server")

_NO_REASONS = (
    "failure reasons of this delivery are not kept: failure_reasons is off, or the cluster keeps the group's retries"
)
_NOTHING_TO_FORWARD = wire.ForwardMessageToDeadLetterQueueResponse(
    status=wire.Status(code=wire.OK, message="no effect: the message is no longer leased by this consumer")
)


class MessagingService:
    """The service for official clients on top of one broker. All code runs on one event loop."""

    def __init__(
        self,
        broker: ServedBroker,
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
        self._polls = PollSlots(
            in_all=config.receives_waiting_max, per_client=config.receives_per_client_max, quotas=quotas
        )
        self.exchange = BrokerExchange(broker, quotas, self._polls)
        self.messages = ClientMessageCalls(self.exchange, clock, config, self._send_other)
        self._pulls = PullCalls(
            pulls, self._polls, self._may_make, lambda: self.messages.store_host, self.messages.slices
        )
        self.streams = Streams(broker, sessions, self._transactions.producers, config, quotas, clock)
        self.telemetry = self.streams.serve
        self.group_changed = self.streams.group_changed
        # The RPCs that are served; the others of the protocol are answered 50100.
        self.unary: Mapping[str, Callable[[Any, Call], Awaitable[Any]]] = {
            "QueryRoute": self.query_route,
            "Heartbeat": self.heartbeat,
            "RecallMessage": self.recall_message,
            "EndTransaction": self._transactions.end,
            "QueryAssignment": self.query_assignment,
            "ForwardMessageToDeadLetterQueue": self.forward_message_to_dead_letter_queue,
            "NotifyClientTermination": self.notify_client_termination,
            "ReportFailure": self.report_failure,
            **self.messages.unary,
            **self._pulls.unary,
        }
        self.streaming: Mapping[str, Callable[[Any, Call], Awaitable[Iterator[Any]]]] = {
            **self.messages.streaming,
            **self._pulls.streaming,
        }

    def listening_at(self, host: str, port: int) -> None:
        """Set this server's address, for clients that do not report the address that they dialled."""
        self._endpoints = mapping.endpoints_of(host, port)
        self.messages.store_host = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def drain(self) -> None:
        """End telemetry streams and long polls now with regular answers; new ones do not wait. Idempotent."""
        self.streams.drain()
        self._polls.close()

    # -- session ------------------------------------------------------------------------------------------------------

    async def query_route(self, request: wire.QueryRouteRequest, call: Call) -> wire.QueryRouteResponse:
        """Return the queues of a topic; create the topic if the broker creates topics automatically."""
        topic, dialled = validate.topic_of(request.topic), self._endpoints_for(request.endpoints)
        self._quotas.about_to_make(Quota.TOPICS, holders_of(call.admission), topic)
        route = await self._broker.route(topic)
        session = self._sessions.get(call.client_id)
        endpoints = route_endpoints(session, dialled, self._clock.monotonic_s())
        resource = validate.resource_of(request.topic)
        queues = mapping.route_queues(route, resource, self._config.broker_name, endpoints)
        return wire.QueryRouteResponse(status=OK_STATUS, message_queues=queues)

    async def query_assignment(
        self,
        request: wire.QueryAssignmentRequest,
        call: Call,
    ) -> wire.QueryAssignmentResponse:
        """Assign any queue of the broker to every consumer: the broker hands out messages, not queues.

        Every consumer of a FIFO group gets every queue individually, as clients expect. Both forms work for a client,
        regardless of its settings, because the broker maintains the order.
        """
        topic, group = validate.topic_of(request.topic), validate.group_of(request.group)
        endpoints = self._endpoints_for(request.endpoints)
        self._may_make(topic, group, call)
        await self._broker.ensure_group(group)
        assignments = mapping.assignments(
            await self._broker.route(topic),
            validate.resource_of(request.topic),
            self._config.broker_name,
            endpoints,
            is_fifo=self._broker.group_settings(group, (topic,)).is_fifo,
        )
        return wire.QueryAssignmentResponse(status=OK_STATUS, assignments=assignments)

    async def heartbeat(self, request: wire.HeartbeatRequest, call: Call) -> wire.HeartbeatResponse:
        """Record activity of a client, which keeps its leases; create the group of a consumer, also after a restart.

        The telemetry stream determines the client type: Java 5.0.3 omits it from every heartbeat. A heartbeat without a
        type, from an unknown client, is answered OK and not recorded: Go sends it as a health probe. Only the group in
        the request is created, because access rules check the request.
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
        """Remove a client that disconnects: it gets no more commands, its long polls end, its leases can expire."""
        self._transactions.producers.gone(call.client_id)
        self._sessions.forget(call.client_id)
        self._polls.end(call.client_id)
        self._broker.client_gone(call.client_id)
        self._pulls.gone(call.client_id)
        return wire.NotifyClientTerminationResponse(status=OK_STATUS)

    # -- producing ----------------------------------------------------------------------------------------------------

    async def _send_other(self, request: wire.SendMessageRequest, call: Call) -> wire.SendMessageResponse:
        """Send half messages, or create the schedule of a recurring message, which is not stored."""
        messages = request.messages
        if self._quotas.limits_sends:
            self._quotas.spend(Quota.SENDS_PER_S, holders_of(call.admission), len(messages))
        if messages[0].system_properties.message_type == wire.TRANSACTION:
            return await self._transactions.send(messages, call, self._clock.now_ms())
        return await self._recurring.send(validate.check_send(messages), messages, call)

    async def recall_message(self, request: wire.RecallMessageRequest, call: Call) -> wire.RecallMessageResponse:
        """Recall a delayed message; OK only if the removal is durable.

        40401 means that the message is unknown, or its text contains the delivery time. A client repeats a call whose
        answer was lost. The second call is also OK, and its text has the time of the recall.
        """
        try:
            receipt = await self._broker.recall(validate.topic_of(request.topic), request.recall_handle)
        except Refused as refused:
            if refused.rule is not Rule.NOT_FOUND or call.language != "PYTHON":
                raise
            # The Python client, at least until 5.1.2, treats 40401 as success for every call.
            return wire.RecallMessageResponse(status=wire.Status(code=wire.NOT_FOUND, message=str(refused)))
        return mapping.recall_response(receipt)

    # -- consuming ----------------------------------------------------------------------------------------------------

    async def forward_message_to_dead_letter_queue(
        self, request: wire.ForwardMessageToDeadLetterQueueRequest, call: Call
    ) -> wire.ForwardMessageToDeadLetterQueueResponse:
        """Give up a delivery: dead-letter the message, or retry it if the client reports fewer attempts than the
        maximum.
        """
        topic, group = validate.topic_of(request.topic), validate.group_of(request.group)
        self._broker.note_failure(group, request.receipt_handle, _reason(call))
        attempts = request.delivery_attempt
        if call.language == "RUST":
            attempts -= 1  # it sends the number of the next attempt, which it never makes
        try:
            await self._broker.dead_letter(group, topic, request.receipt_handle, attempts=attempts)
        except Refused as error:
            # Push consumers repeat this call until it is OK, for ever, and it blocks the rest of their batch. The
            # handle is stale if the answer to the first call was lost, or if another consumer now holds the message. In
            # both cases the caller no longer holds it, and no message is lost.
            if error.rule is not Rule.RECEIPT_HANDLE or not _is_push(self._sessions.get(call.client_id)):
                raise
            log.info("forward_outdated", topic=topic, group=group, message_id=request.message_id)
            return _NOTHING_TO_FORWARD
        return wire.ForwardMessageToDeadLetterQueueResponse(status=OK_STATUS)

    async def report_failure(
        self, request: consumer_v1.ReportFailureRequest, call: Call
    ) -> consumer_v1.ReportFailureResponse:
        """Store the reason of a failure that the client reports next; see ``dmq.broker.failures.failure_reasons``."""
        reason = _reason(call)._replace(error_type=request.error_type, error_text=request.error_text, host=request.host)
        if not self._broker.note_failure(check_group(request.group), request.receipt_handle, reason):
            raise Refused(Rule.UNSUPPORTED, _NO_REASONS)
        return consumer_v1.ReportFailureResponse(status=OK_STATUS)

    def _may_make(self, topic: str, group: str, call: Call) -> None:
        holders = holders_of(call.admission)
        self._quotas.about_to_make(Quota.TOPICS, holders, topic)
        self._quotas.about_to_make(Quota.GROUPS, holders, group)

    def _endpoints_for(self, dialled: wire.Endpoints) -> wire.Endpoints:
        """Return the address that the client dialled, which works with any port mapping; else the server's own."""
        return validate.endpoints_of(dialled) if dialled.addresses else self._endpoints


def _reason(call: Call) -> FailureReason:
    return FailureReason(client_id=call.client_id, address=call.address)


def _is_push(session: ClientSession | None) -> bool:
    return session is not None and session.client_type == wire.PUSH_CONSUMER
