"""What the command line calls a daemon with: synchronous, one deadline per call, errors as sentences."""

from __future__ import annotations

import os
import secrets
import socket
from types import TracebackType
from typing import Self, TypeVar

import grpc
from google.protobuf.message import Message

from broker_adapter.limits import REQUEST_BYTES_MAX
from broker_adapter.wire import rocketmq_v2 as public
from broker_adapter.wire.pool import Method
from dmq.admin import admin_v1 as wire
from dmq.errors import DmqError

_Response = TypeVar("_Response", bound=Message)

_OPTIONS = (
    ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
    # A proxy for the web has no way to a daemon on this host or in this cluster.
    ("grpc.enable_http_proxy", 0),
)


class DaemonUnavailable(DmqError):
    """No daemon answered; whether the call took effect is not known."""

    retriable = True


class CallRefused(DmqError):
    """The daemon refused the call as wrong; nothing was done."""


class CallFailed(DmqError):
    """The daemon failed at the call."""


class AdminClient:
    """A connection to one daemon; opened by the first call, closed by ``close`` or at the end of a ``with``."""

    def __init__(self, address: str, *, timeout_s: float = 5.0) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._channel.close()

    def status(self) -> wire.GetStatusResponse:
        """Ask how the daemon is."""
        return self._call(wire.METHODS["GetStatus"], wire.GetStatusRequest(), wire.GetStatusResponse)

    def topics(self) -> wire.ListTopicsResponse:
        """Ask for the topics."""
        return self._call(wire.METHODS["ListTopics"], wire.ListTopicsRequest(), wire.ListTopicsResponse)

    def message(self, topic: str, message_id: str, *, with_body: bool = False) -> wire.GetMessageResponse:
        """Ask where a message is."""
        request = wire.GetMessageRequest(topic=topic, message_id=message_id, with_body=with_body)
        return self._call(wire.METHODS["GetMessage"], request, wire.GetMessageResponse)

    def send(self, message: public.Message) -> public.SendMessageResponse:
        """Send through the public protocol, as any client does. A refusal is in the response's status."""
        request = public.SendMessageRequest(messages=[message])
        return self._call(public.METHODS["SendMessage"], request, public.SendMessageResponse)

    def _call(self, method: Method, request: Message, response_class: type[_Response]) -> _Response:
        assert issubclass(method.response_class, response_class)
        call = self._channel.unary_unary(
            method.path,
            request_serializer=method.request_class.SerializeToString,
            response_deserializer=method.response_class.FromString,
        )
        try:
            return call(request, timeout=self._timeout_s, metadata=_metadata())
        except grpc.RpcError as error:
            raise self._told(error) from None  # its text is ten lines of debug output

    def _told(self, error: grpc.RpcError) -> DmqError:
        code = error.code()
        details = " ".join((error.details() or "").split())
        match code:
            case grpc.StatusCode.UNAVAILABLE if "onnection refused" in details or not details:
                return DaemonUnavailable(f"no daemon answers at {self._address}; is `dmq serve` running?")
            case grpc.StatusCode.UNAVAILABLE:
                return DaemonUnavailable(f"the daemon at {self._address} is unavailable: {details}")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return DaemonUnavailable(f"no answer from {self._address} within {self._timeout_s:g} s")
            case grpc.StatusCode.UNIMPLEMENTED:
                return CallFailed(f"what answers at {self._address} is no Rock-DMQ daemon, or one of another version")
            case grpc.StatusCode.INVALID_ARGUMENT:
                return CallRefused(details)
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return DaemonUnavailable(details)
            case _:
                return CallFailed(f"{details or 'the call failed'} ({code.name.lower()})")


def _metadata() -> tuple[tuple[str, str], ...]:
    # The public protocol refuses calls without these.
    client_id = f"{socket.gethostname()}@{os.getpid()}@dmq-{secrets.token_hex(4)}"
    return (
        ("x-mq-client-id", client_id),
        ("x-mq-language", "PYTHON"),
        ("x-mq-protocol", "v2"),
        ("x-mq-client-version", "5.0.0"),
    )
