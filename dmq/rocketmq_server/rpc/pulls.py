"""Reads by offset: PullMessage, GetOffset, UpdateOffset, QueryOffset.

Apache's proxy serves none of these, and no official client of the current protocol calls them. The answers conform to
the protocol's definition. A pull answers its status, each message, and last the offset of the next pull. It does so
also when it found no message (40401), because that offset is past the messages that the filter skipped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any

from broker_adapter.contracts.adapter import PullBroker, Pulled
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.acl.gate import holders_of
from dmq.rocketmq_server.calls.call import Call
from dmq.rocketmq_server.codec import validate
from dmq.rocketmq_server.codec.codes import OK_STATUS
from dmq.rocketmq_server.rpc.answers import check_room, pulled
from dmq.rocketmq_server.sessions.slots import PollSlots
from dmq.runtime.slices import Slices


class PullCalls:
    """The four RPCs; none is served unless the broker supports pulls. All code runs on one event loop."""

    def __init__(
        self,
        broker: PullBroker | None,
        polls: PollSlots,
        may_make: Callable[[str, str, Call], None],
        store_host: Callable[[], str],
        slices: Slices,
    ) -> None:
        self._broker = broker
        self._slices = slices
        self._polls = polls
        self._may_make = may_make  # a topic and a group that the call uses
        self._store_host = store_host
        self.unary: Mapping[str, Callable[[Any, Call], Awaitable[Any]]] = {}
        self.streaming: Mapping[str, Callable[[Any, Call], Awaitable[Iterator[Any]]]] = {}
        if broker is not None:
            self.unary = {
                "GetOffset": self.get_offset,
                "UpdateOffset": self.update_offset,
                "QueryOffset": self.query_offset,
            }
            self.streaming = {"PullMessage": self.pull_message}

    def seen(self, client_type: wire.ClientType, group: str, client_id: str) -> None:
        """Record activity of a client; a pull consumer is a member of its group."""
        if self._broker is not None and client_type == wire.PULL_CONSUMER and group:
            self._broker.member_seen(group, client_id)

    def gone(self, client_id: str) -> None:
        """Remove a client that disconnects."""
        if self._broker is not None:
            self._broker.member_gone(client_id)

    async def pull_message(
        self, request: wire.PullMessageRequest, call: Call
    ) -> Iterator[list[wire.PullMessageResponse]]:
        """Read messages from an offset on. Waits for the first message if the request has a timeout; by default it does
        not.
        """
        broker = self._served()
        group, subscribe = validate.group_of(request.group), partial(validate.pulled_queue_of, request)
        is_sql = request.filter_expression.type == wire.SQL  # slow to parse
        wanted = await self._slices.do(subscribe) if is_sql else subscribe()
        offset, batch_max = request.offset, validate.batch_of(request)
        wait_ms = validate.wait_ms(request, call.deadline_s) if request.HasField("long_polling_timeout") else 0
        self.seen(wire.PULL_CONSUMER, group, call.client_id)
        self._may_make(wanted.topic, group, call)
        found = await self._polls.run(
            call.client_id,
            holders_of(call.admission),
            lambda left_ms: broker.pull(wanted, offset, batch_max=batch_max, wait_ms=left_ms),
            wait_ms,
            nothing=Pulled((), offset),
        )
        check_room(found.messages, call.account)
        return pulled(found, validate.resource_of(request.message_queue.topic), self._store_host(), call.account)

    async def get_offset(self, request: wire.GetOffsetRequest, call: Call) -> wire.GetOffsetResponse:  # noqa: ARG002
        """Return the committed offset of a group on a queue; 40404 if it never committed one."""
        group, queue = validate.group_of(request.group), request.message_queue
        topic = validate.topic_of(queue.topic)
        offset = await self._served().committed_offset(group, topic, queue.id)
        if offset is None:
            why = f"group {group!r} has no committed offset"
            raise Refused(Rule.OFFSET_UNKNOWN, why, value=f"{topic}, queue {queue.id}")
        return wire.GetOffsetResponse(status=OK_STATUS, offset=offset)

    async def update_offset(
        self,
        request: wire.UpdateOffsetRequest,
        call: Call,
    ) -> wire.UpdateOffsetResponse:
        """Commit the offset of a group on a queue; the answer is sent once it is durable."""
        group, queue = validate.group_of(request.group), request.message_queue
        topic = validate.topic_of(queue.topic)
        self._may_make(topic, group, call)
        await self._served().commit_offset(group, topic, queue.id, request.offset)
        return wire.UpdateOffsetResponse(status=OK_STATUS)

    async def query_offset(
        self,
        request: wire.QueryOffsetRequest,
        call: Call,  # noqa: ARG002
    ) -> wire.QueryOffsetResponse:
        """Return the first offset of a queue, its end, or the offset of the first message stored since a time."""
        broker, queue = self._served(), request.message_queue
        topic = validate.topic_of(queue.topic)
        match request.query_offset_policy:
            case wire.BEGINNING:
                offset = (await broker.queue_range(topic, queue.id)).begin
            case wire.END:
                offset = (await broker.queue_range(topic, queue.id)).end
            case wire.TIMESTAMP:
                offset = await broker.offset_at(topic, queue.id, validate.stored_at_ms(request))
            case unknown:
                raise Refused(Rule.REQUEST, "the query offset policy is unknown", value=int(unknown))
        return wire.QueryOffsetResponse(status=OK_STATUS, offset=offset)

    def _served(self) -> PullBroker:
        assert self._broker is not None, "no RPC of these is served without"
        return self._broker
