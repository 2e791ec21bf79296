"""The RPCs of ``apache.rocketmq.v2.MessagingService``: validate, map, call the broker, map. No transport here.

Each method takes a request and its ``Call`` and returns the answer, or the pieces of many. What is wrong is
raised from ``broker_adapter.contracts.errors``; ``dispatch`` turns it into the protocol's answer.
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
from dmq.rocketmq_server.rpc.messages import MessageCalls
from dmq.rocketmq_server.rpc.pulls import PullCalls
from dmq.rocketmq_server.rpc.recurring import AddSchedule, RecurringCalls
from dmq.rocketmq_server.rpc.telemetry import Streams
from dmq.rocketmq_server.rpc.transactions import TransactionCalls
from dmq.rocketmq_server.sessions.sessions import Session, Sessions
from dmq.rocketmq_server.sessions.settings import CONSUMERS, SidecarConfig, client_type_of_heartbeat
from dmq.rocketmq_server.sessions.slots import Polls
from dmq.rocketmq_server.sessions.stream_reopening import route_endpoints
from retry.failure_reason import FailureReason

log = structlog.get_logger("dmq.rocketmq_server")

_NO_REASONS = (
    "failure reasons of this delivery are not kept: failure_reasons is off, or the cluster keeps the group's retries"
)
_NOTHING_TO_FORWARD = wire.ForwardMessageToDeadLetterQueueResponse(
    status=wire.Status(code=wire.OK, message="nothing to do: the message is no longer this consumer's")
)


class MessagingService:
    """Serves official clients from one broker. Everything runs on one event loop."""

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
        self._polls = Polls(
            in_all=config.receives_waiting_max, per_client=config.receives_per_client_max, quotas=quotas
        )
        self.exchange = BrokerExchange(broker, quotas, self._polls)
        self.messages = MessageCalls(self.exchange, clock, config, self._send_other)
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
        """Say where this server can be reached; told to clients that do not say how they reached it."""
        self._endpoints = mapping.endpoints_of(host, port)
        self.messages.store_host = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def drain(self) -> None:
        """End telemetry streams and long polls now, with proper answers, and let no new ones wait. Idempotent."""
        self.streams.drain()
        self._polls.close()

    # -- session ------------------------------------------------------------------------------------------------------

    async def query_route(self, request: wire.QueryRouteRequest, call: Call) -> wire.QueryRouteResponse:
        """Tell the queues of a topic; creates the topic if the broker does so."""
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

        A consumer of a FIFO group gets every queue by itself, as clients expect; so do its colleagues. Either way works
        for a client, whatever its settings said: order is the broker's affair.
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

    async def _send_other(self, request: wire.SendMessageRequest, call: Call) -> wire.SendMessageResponse:
        """Take half messages; or a message that is to recur, which makes a schedule and is not stored."""
        messages = request.messages
        if self._quotas.limits_sends:
            self._quotas.spend(Quota.SENDS_PER_S, holders_of(call.admission), len(messages))
        if messages[0].system_properties.message_type == wire.TRANSACTION:
            return await self._transactions.send(messages, call, self._clock.now_ms())
        return await self._recurring.send(validate.check_send(messages), messages, call)

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

    # -- consuming ----------------------------------------------------------------------------------------------------

    async def forward_message_to_dead_letter_queue(
        self, request: wire.ForwardMessageToDeadLetterQueueRequest, call: Call
    ) -> wire.ForwardMessageToDeadLetterQueueResponse:
        """Give a delivery up: it goes to the dead-letter queue, or comes back if the broker knows better."""
        topic, group = validate.topic_of(request.topic), validate.group_of(request.group)
        self._broker.note_failure(group, request.receipt_handle, _reason(call))
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

    async def report_failure(
        self, request: consumer_v1.ReportFailureRequest, call: Call
    ) -> consumer_v1.ReportFailureResponse:
        """Keep the reason of a failure that follows; see ``dmq.broker.failures.failure_reasons``."""
        reason = _reason(call)._replace(error_type=request.error_type, error_text=request.error_text, host=request.host)
        if not self._broker.note_failure(check_group(request.group), request.receipt_handle, reason):
            raise Refused(Rule.UNSUPPORTED, _NO_REASONS)
        return consumer_v1.ReportFailureResponse(status=OK_STATUS)

    def _may_make(self, topic: str, group: str, call: Call) -> None:
        holders = holders_of(call.admission)
        self._quotas.about_to_make(Quota.TOPICS, holders, topic)
        self._quotas.about_to_make(Quota.GROUPS, holders, group)

    def _endpoints_for(self, dialled: wire.Endpoints) -> wire.Endpoints:
        """Return the address the client reached us by, which works behind any port mapping; else our own."""
        return validate.endpoints_of(dialled) if dialled.addresses else self._endpoints


def _reason(call: Call) -> FailureReason:
    return FailureReason(client_id=call.client_id, address=call.address)


def _is_push(session: Session | None) -> bool:
    return session is not None and session.client_type == wire.PUSH_CONSUMER
