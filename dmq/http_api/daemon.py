"""The connection to the daemon, on the event loop."""

from __future__ import annotations

import os
import secrets
import socket
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from broker_adapter.contracts.limits import REQUEST_BYTES_MAX
from broker_adapter.wire.pool import Method, option
from dmq.admin import admin_v1 as wire
from dmq.admin.client import open_async_channel
from dmq.config.contexts import ClientTls
from dmq.http_api.callers import Metadata
from dmq.http_api.problems import of_call

TIMEOUT_S: Final = 10.0
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
    ("grpc.max_send_message_length", REQUEST_BYTES_MAX),
    ("grpc.enable_http_proxy", 0),
)


class DaemonChannel:
    """Calls to one daemon. Create and use it on one event loop."""

    def __init__(self, address: str, tls: ClientTls | None = None) -> None:
        """Raise ``ContextError`` if a file of ``tls`` cannot be used."""
        self.address = address
        self._channel = open_async_channel(address, tls, _OPTIONS)
        # The public protocol rejects calls without these.
        self._own: Metadata = (
            ("x-mq-client-id", f"{socket.gethostname()}@{os.getpid()}@http-{secrets.token_hex(4)}"),
            ("x-mq-language", "HTTP"),
            ("x-mq-protocol", "v2"),
            ("x-mq-client-version", "5.0.0"),
        )

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def call(self, method: Method, request: Message, caller: Metadata) -> Any:  # noqa: ANN401 - its response
        """Call as ``caller``. Raise ``Problem`` if the call fails."""
        call = self._channel.unary_unary(
            method.path,
            request_serializer=method.request_class.SerializeToString,
            response_deserializer=method.response_class.FromString,
        )
        try:
            return await call(request, timeout=_timeout_s(method, request), metadata=(*self._own, *caller))
        except grpc.aio.AioRpcError as error:
            text = error.details() or ""
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                text = f"the daemon at {self.address} does not answer: {text}"
            raise of_call(error.code(), text) from None


def _timeout_s(method: Method, request: Message) -> float:
    is_admin = method.path.startswith(f"/{wire.SERVICE}/")
    least_s: float = option(method, wire.timeout_s) if is_admin and getattr(request, "is_dry_run", True) else 0
    return max(TIMEOUT_S, least_s)
