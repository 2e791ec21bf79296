"""Our own HTTP/2 server beside grpcio's: the same echo, the same load, server CPU per call.

    python -m bench.echo_http2 compare           both, and prints a table
    python -m bench.echo_http2 raw|parsed        serve: print the address, end with the input

``raw`` sends the request back; ``parsed`` parses it and builds the answer of a send that went well, as ``bench.echo``.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import uvloop

from bench import echo, load
from broker_adapter.contracts.message import SendReceipt
from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.http2 import Http2Server, RequestHeaders, Unary
from dmq.rocketmq_server.codec.mapping import send_response

_ROUNDS = 3
_SECONDS = 4


async def _raw(body: bytes, _: RequestHeaders) -> bytes:
    return body


async def _parsed(body: bytes, headers: RequestHeaders) -> bytes:
    assert headers.get("x-mq-client-id")
    request = wire.SendMessageRequest.FromString(body)
    receipts = [SendReceipt(message.system_properties.message_id, 0, 0) for message in request.messages]
    return send_response(receipts).SerializeToString()


async def _serve(kind: str) -> None:
    server = Http2Server(
        {wire.METHODS["SendMessage"].path: Unary({"raw": _raw, "parsed": _parsed}[kind])},
        host="127.0.0.1",
        port=0,
        monotonic_s=SystemClock().monotonic_s,
    )
    port = await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    gc.freeze()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(0)


class EchoHttp2(echo.Echo):
    """A running echo server of ours."""

    def __init__(self, kind: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.echo_http2", kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        self._counted = psutil.Process(self._process.pid)


@contextmanager
def running(kind: str) -> Iterator[EchoHttp2]:
    """Run an echo server of ours for a while."""
    made = EchoHttp2(kind)
    try:
        yield made
    finally:
        made.end()


def _measure(server: echo.Echo, *, in_flight: int, connections: int) -> tuple[float, float, float]:
    """Return calls per second, server CPU per call in us, and the p99 of the latency in ms."""
    before_s = server.cpu_s
    found = load.generator("go").run(
        "send",
        address=server.address,
        echo=True,
        in_flight=in_flight,
        connections=connections,
        seconds=_SECONDS,
        warm_up=1,
        body=256,
    )
    return found["messages_per_s"], (server.cpu_s - before_s) / found["calls_all"] * 1e6, found["latency_ms"]["p99"]


def _compare() -> None:
    for kind in ("raw", "parsed"):
        for in_flight, connections in ((64, 1), (256, 4)):
            for name, start in (("grpcio", echo.running), ("dmq.http2", running)):
                with start(kind) as server:
                    runs = [_measure(server, in_flight=in_flight, connections=connections) for _ in range(_ROUNDS)]
                per_s, cpu_us, p99_ms = sorted(runs)[_ROUNDS // 2]
                row = f"{kind:8}{name:12}{in_flight:5} in flight on {connections}"
                print(f"{row}{per_s:10.0f}/s{cpu_us:8.1f} us CPU{p99_ms:8.2f} ms p99", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "compare":
        _compare()
    else:
        uvloop.run(_serve(sys.argv[1]))
