"""The public protocol over a real connection, without an official client: quick, blocking, and it can misbehave."""

# ruff: noqa: ANN401 - one class of requests and answers per RPC

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from support import trusted

from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.signature import Signer

DEADLINE_S = 10.0
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A daemon that is away comes back within a second; the default would wait up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.use_local_subchannel_pool", 1),
    # Windows stay as they are: grown ones could take the whole of an answer that a test means to leave unread.
    ("grpc.http2.bdp_probe", 0),
)


class Received(NamedTuple):
    """One delivery, as a client sees it. ``answered_at_ms`` is when the server had handed it out, by its clock."""

    message_id: str
    body: bytes
    queue_id: int
    queue_offset: int
    receipt_handle: str
    attempt: int
    deliver_at_ms: int
    answered_at_ms: int


class WireClient:
    """One client with a channel of its own. Use it from any thread."""

    def __init__(
        self, address: str, client_id: str = "wire-1", signer: Signer | None = None, language: str = "JAVA"
    ) -> None:
        self.address = address
        self.channel = trusted.channel(address, _OPTIONS)
        self._signer = signer
        self._own_metadata = (
            ("x-mq-client-id", client_id),
            ("x-mq-language", language),
            ("x-mq-client-version", "5.2.0"),
            ("x-mq-protocol", "v2"),
        )
        self._calls: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.channel.close()

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (*self._own_metadata, *(self._signer.metadata() if self._signer is not None else ()))

    def ask(self, rpc: str, request: Any, *, deadline_s: float = DEADLINE_S) -> Any:
        """Return the answer of an RPC; ``request`` may be bytes that are no message at all."""
        return self._call(rpc)(request, timeout=deadline_s, metadata=self._metadata)

    def frames(self, rpc: str, request: Any, *, deadline_s: float = DEADLINE_S) -> list[Any]:
        """Return all answers of an RPC with a stream of them."""
        return list(self._call(rpc)(request, timeout=deadline_s, metadata=self._metadata))

    def begin(self, rpc: str, request: Any, *, deadline_s: float = 60.0) -> Iterator[Any]:
        """Return the open call of an RPC with a stream of answers, for the caller to read from."""
        call: Iterator[Any] = self._call(rpc)(request, timeout=deadline_s, metadata=self._metadata)
        return call

    def open(self, rpc: str, requests: Iterator[Any]) -> Any:
        """Return the open call of a stream in both directions."""
        return self._call(rpc)(requests, metadata=self._metadata)

    # -- the usual calls ----------------------------------------------------------------------------------------------

    def send(self, *messages: wire.Message, deadline_s: float = DEADLINE_S) -> wire.SendMessageResponse:
        """Send all messages in one call."""
        answer: wire.SendMessageResponse = self.ask(
            "SendMessage", wire.SendMessageRequest(messages=messages), deadline_s=deadline_s
        )
        return answer

    def receive(
        self, topic: str, group: str, *, batch: int = 32, invisible_s: int = 10, wait_s: float = 0, tags: str = "*"
    ) -> list[Received]:
        """Take messages, waiting up to ``wait_s`` for the first; an answer other than OK or "none" is an error."""
        request = a_receive(topic, group, batch=batch, invisible_s=invisible_s, wait_s=wait_s, tags=tags)
        return received_of(self.frames("ReceiveMessage", request, deadline_s=wait_s + 5))

    def ack(self, topic: str, group: str, deliveries: Sequence[Received]) -> wire.AckMessageResponse:
        """Acknowledge deliveries in one call."""
        request = wire.AckMessageRequest(topic=wire.Resource(name=topic), group=wire.Resource(name=group))
        for delivery in deliveries:
            request.entries.add(message_id=delivery.message_id, receipt_handle=delivery.receipt_handle)
        answer: wire.AckMessageResponse = self.ask("AckMessage", request)
        return answer

    def change_invisible(
        self, topic: str, group: str, delivery: Received, invisible_ms: int
    ) -> wire.ChangeInvisibleDurationResponse:
        """Hide a delivery anew."""
        seconds, ms = divmod(invisible_ms, 1000)
        request = wire.ChangeInvisibleDurationRequest(
            topic=wire.Resource(name=topic),
            group=wire.Resource(name=group),
            message_id=delivery.message_id,
            receipt_handle=delivery.receipt_handle,
            invisible_duration=wire.Duration(seconds=seconds, nanos=ms * 1_000_000),
        )
        answer: wire.ChangeInvisibleDurationResponse = self.ask("ChangeInvisibleDuration", request)
        return answer

    def drain(self, topic: str, group: str, count: int, *, within_s: float = 20.0) -> list[Received]:
        """Receive and acknowledge until ``count`` came or time is up."""
        found: list[Received] = []
        until_s = time.monotonic() + within_s
        while len(found) < count and time.monotonic() < until_s:
            deliveries = self.receive(topic, group, wait_s=1)
            if deliveries:
                assert self.ack(topic, group, deliveries).status.code == wire.OK
            found += deliveries
        return found

    def _call(self, rpc: str) -> Any:
        call = self._calls.get(rpc)
        if call is None:
            method = wire.METHODS[rpc]
            if method.client_streaming:
                make: Any = self.channel.stream_stream
            else:
                make = self.channel.unary_stream if method.server_streaming else self.channel.unary_unary
            call = self._calls[rpc] = make(
                method.path, request_serializer=_serialize, response_deserializer=method.response_class.FromString
            )
        return call


def a_message(
    topic: str,
    message_id: str,
    body: bytes = b"body",
    *,
    deliver_at_ms: int = 0,
    tag: str = "",
    message_group: str = "",
    properties: dict[str, str] | None = None,
) -> wire.Message:
    """A message as clients send it; ``deliver_at_ms`` 0: not delayed."""
    message = wire.Message(topic=wire.Resource(name=topic), body=body, user_properties=properties)
    system = message.system_properties
    system.message_id = message_id
    system.message_type = wire.NORMAL
    system.born_host = "wire"
    system.body_encoding = wire.IDENTITY
    if tag:
        system.tag = tag
    if message_group:
        system.message_group = message_group
        system.message_type = wire.FIFO
    if deliver_at_ms:
        system.message_type = wire.DELAY
        system.delivery_timestamp.seconds = deliver_at_ms // 1000
        system.delivery_timestamp.nanos = deliver_at_ms % 1000 * 1_000_000
    return message


def a_receive(
    topic: str, group: str, *, batch: int = 32, invisible_s: int = 10, wait_s: float = 0, tags: str = "*"
) -> wire.ReceiveMessageRequest:
    """A receive as a simple consumer asks."""
    request = wire.ReceiveMessageRequest(group=wire.Resource(name=group), batch_size=batch)
    request.message_queue.topic.name = topic
    request.filter_expression.type = wire.TAG
    request.filter_expression.expression = tags
    request.invisible_duration.seconds = invisible_s
    request.long_polling_timeout.seconds = int(wait_s)
    request.long_polling_timeout.nanos = int(wait_s * 1000) % 1000 * 1_000_000
    return request


def received_of(frames: Sequence[wire.ReceiveMessageResponse]) -> list[Received]:
    """Return the deliveries of a whole answer; it must have its status first and its time last."""
    assert frames[0].HasField("status"), frames[0]
    code = frames[0].status.code
    assert code in {wire.OK, wire.MESSAGE_NOT_FOUND}, frames[0].status
    assert frames[-1].HasField("delivery_timestamp"), frames[-1]
    answered_at_ms = _ms(frames[-1].delivery_timestamp)
    return [
        Received(
            frame.message.system_properties.message_id,
            frame.message.body,
            frame.message.system_properties.queue_id,
            frame.message.system_properties.queue_offset,
            frame.message.system_properties.receipt_handle,
            frame.message.system_properties.delivery_attempt,
            _ms(frame.message.system_properties.delivery_timestamp),
            answered_at_ms,
        )
        for frame in frames[1:-1]
    ]


def _ms(timestamp: wire.Timestamp) -> int:
    return timestamp.seconds * 1000 + timestamp.nanos // 1_000_000


def _serialize(request: Any) -> bytes:
    return request if isinstance(request, bytes) else bytes(request.SerializeToString())
