"""RPC of ``rockdmq.admin.v1.AdminService`` that processes messages of the inner topic again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Delivery
from broker_adapter.wire import rocketmq_v2 as public
from dmq.admin import admin_v1 as wire
from dmq.admin.operations.messages.messages import MessageCalls
from dmq.admin.requests import validate
from dmq.cluster import Fate, InnerTopic, TakenMessage
from dmq.states import MessageState

REPLAY_MAX: Final = 32  # messages of one call


class ReplayCalls:
    """RPC of replays. Raise ``Refused`` for invalid input; exceptions of the store pass through."""

    def __init__(self, inner: Callable[[], InnerTopic | None], messages: MessageCalls) -> None:
        """``inner`` returns the inner topic, or None if the daemon has none."""
        self._inner = inner
        self._messages = messages

    async def replay_messages(self, request: wire.ReplayMessagesRequest) -> wire.ReplayMessagesResponse:
        """Accept messages as if they had been fetched now; messages of a message group keep their order."""
        inner = self._inner()
        if inner is None:
            why = "this daemon has no inner topic; start it with --broker rocketmq and --inner-topic"
            raise Refused(Rule.REQUEST, why, value=request.inner_topic)
        if request.inner_topic != inner.topic:
            raise Refused(Rule.REQUEST, "it is not the inner topic", value=request.inner_topic, limit=inner.topic)
        if not 1 <= len(request.messages) <= REPLAY_MAX:
            raise Refused(Rule.REQUEST, "too many messages", value=len(request.messages), limit=f"1 to {REPLAY_MAX}")
        validate.check_times(request.due_after_ms, 0)
        deliveries = [_delivery(inner.topic, each) for each in request.messages]
        if request.is_dry_run:
            taken = [await self._look_at(inner, each, request.due_after_ms) for each in deliveries]
        else:
            taken = await asyncio.gather(*(inner.take(each, due_after_ms=request.due_after_ms) for each in deliveries))
        results = [wire.Replayed(fate=each.fate.name, due_at_ms=each.due_ms, why=each.why) for each in taken]
        return wire.ReplayMessagesResponse(results=results)

    async def _look_at(self, inner: InnerTopic, delivery: Delivery, due_after_ms: int) -> TakenMessage:
        try:
            envelope = inner.envelope_of(delivery)
        except Refused as refused:
            return TakenMessage(Fate.UNREADABLE, why=str(refused))
        due_ms = envelope.deliver_at_ms or delivery.stored_at_ms
        if due_ms < due_after_ms:
            return TakenMessage(Fate.DUE_BEFORE, due_ms)
        found = await self._messages.find(envelope.topic, envelope.message_id)
        return TakenMessage(Fate.ACCEPTED if found.state is MessageState.UNKNOWN else Fate.KNOWN, due_ms)


def _delivery(topic: str, message: wire.InnerMessage) -> Delivery:
    message_id = validate.check_message_id(message.message_id)
    validate.check_times(message.stored_at_ms, 0)
    try:
        public.Message.FromString(message.payload)
    except DecodeError:
        raise Refused(Rule.MESSAGE_CORRUPTED, "the payload is not a message", value=message_id) from None
    return Delivery(
        topic,
        message_id,
        message.payload,
        0,
        validate.check_offset(message.queue_offset),
        "",
        1,
        0,
        message.stored_at_ms,
        0,
    )


assert {fate.name: fate.value for fate in Fate}.items() <= dict(wire.Fate.items()).items()
