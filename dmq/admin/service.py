"""``rockdmq.admin.v1.AdminService`` without a transport: a request in, a response or an exception out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import NamedTuple

from google.protobuf.message import DecodeError, Message

from broker_adapter.errors import Overloaded, Refused, Rule
from broker_adapter.limits import MESSAGE_ID_BYTES_MAX
from broker_adapter.topics import check_topic
from broker_adapter.wire import mapping
from dmq.admin import admin_v1 as wire
from dmq.admin.source import AdminSource, MessageState
from dmq.errors import DmqError, StoreCorrupt


class Handler(NamedTuple):
    """How one RPC is served: read the request as ``request_class``, await ``call(request)``."""

    request_class: type[Message]
    call: Callable[..., Awaitable[Message]]


class AdminService:
    """The RPCs. Raises ``Refused`` for input that breaks a rule; what ``source`` raises passes through."""

    def __init__(self, source: AdminSource) -> None:
        self._source = source

    async def get_status(self, _request: wire.GetStatusRequest) -> wire.GetStatusResponse:
        """Say how the daemon is."""
        return wire.GetStatusResponse(**asdict(await self._source.status()))

    async def list_topics(self, _request: wire.ListTopicsRequest) -> wire.ListTopicsResponse:
        """List the topics by name."""
        return wire.ListTopicsResponse(topics=[wire.Topic(**asdict(topic)) for topic in await self._source.topics()])

    async def get_message(self, request: wire.GetMessageRequest) -> wire.GetMessageResponse:
        """Say where a message is, and what it is if it is at hand."""
        topic = check_topic(request.topic)
        message_id = request.message_id
        if not message_id.strip() or len(message_id.encode()) > MESSAGE_ID_BYTES_MAX:
            limit = f"1 to {MESSAGE_ID_BYTES_MAX} bytes"
            raise Refused(Rule.MESSAGE_ID, "the message id is blank or too long", value=message_id, limit=limit)
        status = await self._source.message(topic, message_id)
        return wire.GetMessageResponse(
            topic=topic,
            message_id=message_id,
            state=status.state.name,
            deliver_at_ms=status.deliver_at_ms,
            stored_at_ms=status.stored_at_ms,
            queue_id=status.queue_id,
            queue_offset=status.queue_offset,
            content=_content(status.payload, with_body=request.with_body),
        )


def handlers(service: AdminService) -> Mapping[str, Handler]:
    """Return the handler of each RPC by its HTTP/2 path (``/rockdmq.admin.v1.AdminService/GetStatus``)."""
    calls: Mapping[str, Callable[..., Awaitable[Message]]] = {
        "GetStatus": service.get_status,
        "ListTopics": service.list_topics,
        "GetMessage": service.get_message,
    }
    return MappingProxyType(
        {method.path: Handler(method.request_class, calls[name]) for name, method in wire.METHODS.items()}
    )


class Refusal(NamedTuple):
    """A gRPC status: its number, a text for the caller, and whether the log should have the details."""

    code: int
    text: str
    is_ours: bool


def refusal_of(error: Exception) -> Refusal:
    """Return the gRPC status that answers ``error``."""
    if isinstance(error, Refused):
        return Refusal(3, str(error), is_ours=False)  # INVALID_ARGUMENT
    if isinstance(error, DecodeError):
        return Refusal(3, "the request cannot be read", is_ours=False)
    if isinstance(error, Overloaded):
        return Refusal(8, str(error), is_ours=False)  # RESOURCE_EXHAUSTED
    if getattr(error, "retriable", False):
        return Refusal(14, str(error), is_ours=False)  # UNAVAILABLE
    if isinstance(error, DmqError):
        return Refusal(13, str(error), is_ours=True)  # INTERNAL; the text is one of ours
    return Refusal(13, "internal error; the daemon's log has the details", is_ours=True)


def _content(payload: bytes | None, *, with_body: bool) -> wire.Content | None:
    if payload is None:
        return None
    try:
        message = mapping.decode(payload)
    except DecodeError as error:
        raise StoreCorrupt("the stored message cannot be read") from error
    return wire.Content(
        tag=message.tag,
        keys=message.keys,
        properties=message.properties,
        message_group=message.message_group,
        born_at_ms=message.born_at_ms,
        born_host=message.born_host,
        body_encoding=message.body_encoding.name,
        body_bytes=len(message.body),
        body=message.body if with_body else None,
    )


assert {state.name: state.value for state in MessageState}.items() <= dict(wire.MessageState.items()).items()
