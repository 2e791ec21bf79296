"""The peer: a grpcio asyncio server on uvloop that stores nothing.

    raw      the request's bytes are the answer
    parsed   the request is parsed, and an answer built as for a send that went well

``python -m bench.echo raw|parsed`` prints its address and serves until its input ends.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import psutil
import uvloop

from broker_adapter.contracts.message import SendReceipt
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.rocketmq_server.codec.mapping import send_response
from dmq.rocketmq_server.transport.grpc_server import OPTIONS

_Context = grpc.aio.ServicerContext[Any, Any]


async def _raw(body: bytes, _: _Context) -> bytes:
    return body


async def _parsed(body: bytes, _: _Context) -> bytes:
    request = wire.SendMessageRequest.FromString(body)
    receipts = [SendReceipt(message.system_properties.message_id, 0, 0) for message in request.messages]
    return send_response(receipts).SerializeToString()


async def _serve(kind: str) -> None:
    handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(
        {"raw": _raw, "parsed": _parsed}[kind]
    )
    server = grpc.aio.server(options=list(OPTIONS))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, {"SendMessage": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(0)


class Echo:
    """A running echo server."""

    def __init__(self, kind: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.echo", kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        self._counted = psutil.Process(self._process.pid)

    @property
    def cpu_s(self) -> float:
        """CPU time so far, user and system."""
        times = self._counted.cpu_times()
        return float(times.user + times.system)

    def end(self) -> None:
        """End it."""
        self._process.communicate()


@contextmanager
def running(kind: str) -> Iterator[Echo]:
    """Run an echo server for a while."""
    echo = Echo(kind)
    try:
        yield echo
    finally:
        echo.end()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
