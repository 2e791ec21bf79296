"""Requests of the public protocol as clients make them, and the sidecar without a transport."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from support.rigs.broker.memory_broker import MemoryBroker

from broker_adapter.contracts.adapter import PullBroker
from broker_adapter.runtime.clock import Clock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.acl.guard import Authenticator
from dmq.rocketmq_server.calls.access import Guarded
from dmq.rocketmq_server.calls.call import Call
from dmq.rocketmq_server.calls.dispatch import Dispatcher
from dmq.rocketmq_server.rpc.service import MessagingService
from dmq.rocketmq_server.sessions.sessions import Sessions
from dmq.rocketmq_server.sessions.settings import SidecarConfig

TOPIC, GROUP = wire.Resource(name="orders"), wire.Resource(name="billing")


@dataclass(frozen=True, slots=True)
class Calls:
    """Counts what the dispatcher reports."""

    done: list[tuple[str, int]]

    def call_done(self, rpc: str, code: int, seconds: float) -> None:
        assert seconds >= 0
        self.done.append((rpc, int(code)))


class Sidecar:
    """A service over a ``MemoryBroker``, asked in wire messages and answering in them."""

    def __init__(
        self,
        clock: Clock,
        config: SidecarConfig | None = None,
        guard: Authenticator | None = None,
        pulls: PullBroker | None = None,
    ) -> None:
        self.broker = MemoryBroker(clock)
        self.sessions = Sessions(clock)
        self.service = MessagingService(self.broker, clock, self.sessions, config or SidecarConfig(), pulls=pulls)
        self.calls = Calls([])
        served = self.service if guard is None else Guarded(self.service, guard)
        self.dispatcher = Dispatcher(served, clock=clock, observer=self.calls)

    async def ask(self, rpc: str, request: Message, call: Call | None = None) -> Any:  # noqa: ANN401 - one class per RPC
        """Return the answer of an RPC with one answer."""
        answer = await self.dispatcher.unary(rpc)(request.SerializeToString(), call or from_client())
        return wire.METHODS[rpc].response_class.FromString(answer)

    async def stream(self, rpc: str, request: Message, call: Call | None = None) -> list[Any]:
        """Return all frames of an RPC with a stream of answers."""
        answers = self.dispatcher.streaming(rpc)(request.SerializeToString(), call or from_client())
        return [wire.METHODS[rpc].response_class.FromString(answer) async for piece in answers for answer in piece]

    async def telemetry(self, *frames: wire.TelemetryCommand, call: Call | None = None) -> list[wire.TelemetryCommand]:
        """Send frames, hang up, and return what came back."""

        async def bodies() -> AsyncIterator[bytes]:
            for frame in frames:
                yield frame.SerializeToString()

        answers = self.dispatcher.telemetry()(bodies(), call or from_client())
        return [wire.TelemetryCommand.FromString(answer) async for answer in answers]


def from_client(
    client_id: str = "client-1",
    language: str = "JAVA",
    deadline_s: float | None = 30.0,
    signed: tuple[tuple[str, str], ...] = (),
) -> Call:
    """A call with the headers that matter."""
    headers = (("x-mq-language", language), ("x-mq-client-id", client_id), *signed)
    return Call(client_id=client_id, headers=headers, deadline_s=deadline_s)


def a_message(
    message_id: str = "01A", body: bytes = b"body", topic: str = "orders", properties: Mapping[str, str] | None = None
) -> wire.Message:
    """A message with user properties."""
    message = wire.Message(topic=wire.Resource(name=topic), body=body, user_properties=properties or {})
    message.system_properties.message_id = message_id
    return message


def a_send(*messages: wire.Message) -> wire.SendMessageRequest:
    """A send of these messages."""
    return wire.SendMessageRequest(messages=messages)


def a_receive(
    *, auto_renew: bool = False, invisible_s: int = 15, polling_s: int = 0, tags: str = "*"
) -> wire.ReceiveMessageRequest:
    """A receive that does not wait, as a simple consumer asks."""
    request = wire.ReceiveMessageRequest(group=GROUP, batch_size=32, auto_renew=auto_renew)
    request.message_queue.topic.CopyFrom(TOPIC)
    request.filter_expression.type = wire.TAG
    request.filter_expression.expression = tags
    request.long_polling_timeout.seconds = polling_s
    if not auto_renew:
        request.invisible_duration.seconds = invisible_s
    return request


def consumer_settings(client_type: wire.ClientType = wire.PUSH_CONSUMER) -> wire.TelemetryCommand:
    """The first telemetry frame of a consumer."""
    return wire.TelemetryCommand(
        settings=wire.Settings(client_type=client_type, subscription=wire.Subscription(group=GROUP))
    )


def producer_settings() -> wire.TelemetryCommand:
    """The first telemetry frame of a producer."""
    return wire.TelemetryCommand(
        settings=wire.Settings(client_type=wire.PRODUCER, publishing=wire.Publishing(topics=[TOPIC]))
    )
