"""A client on grpcio that sends whatever bytes it is given."""

from __future__ import annotations

from typing import Any

import grpc
from support.clients.wire.protocol import a_receive

from broker_adapter.wire import rocketmq_v2 as wire

Metadata = tuple[tuple[str, str | bytes], ...]
METADATA: Metadata = (("x-mq-client-id", "client-1"), ("x-mq-language", "PYTHON"))
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class RawClient:
    """Asks in bytes, and waits for nothing else. ``channel`` is to be closed."""

    def __init__(self, port: int) -> None:
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS)

    async def ask(self, rpc: str, body: bytes, metadata: Metadata = METADATA, timeout: float = 10) -> Any:  # noqa: ANN401
        """Return the (first) answer to one request."""
        method = wire.METHODS[rpc]
        if method.client_streaming or method.server_streaming:
            call: Any = self._stream(rpc, [body] if method.client_streaming else body, metadata, timeout)
            return await call.read()
        multi: Any = self.channel.unary_unary(method.path, response_deserializer=method.response_class.FromString)
        return await multi(body, metadata=metadata, timeout=timeout)

    def receive(self, polling_s: int) -> Any:  # noqa: ANN401
        """Begin a receive."""
        return self._stream("ReceiveMessage", a_receive(polling_s=polling_s).SerializeToString())

    def telemetry(self) -> Any:  # noqa: ANN401
        """Open a stream."""
        return self._stream("Telemetry", None)

    def _stream(
        self, rpc: str, request: bytes | list[bytes] | None, metadata: Metadata = METADATA, timeout: float = 60
    ) -> Any:  # noqa: ANN401
        method = wire.METHODS[rpc]
        make = self.channel.stream_stream if method.client_streaming else self.channel.unary_stream
        multi: Any = make(method.path, response_deserializer=method.response_class.FromString)
        return multi(request, metadata=metadata, timeout=timeout)
