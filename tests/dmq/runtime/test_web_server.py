"""The server of a web process ends at a signal, also while it starts, and bounds slow and ambiguous requests."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.unit
_SIGNALLED = """
import os, signal, socket, sys
from contextlib import asynccontextmanager
from dmq.runtime.web_server import serve

@asynccontextmanager
async def application():
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    yield None

serve(application, [socket.create_server(("127.0.0.1", 0))], None, connections_max=1, grace_s=1)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_before_the_first_request_is_not_lost(name: str) -> None:
    """A daemon that is stopped just after its start would wait for the process until it kills it."""
    done = subprocess.run([sys.executable, "-c", _SIGNALLED, name], timeout=60, check=False)
    assert done.returncode == 0


_SERVING = """
import asyncio, socket
from contextlib import asynccontextmanager
from dmq.runtime import web_server

web_server._HEADER_S_MAX = 0.5

async def app(scope, receive, send):
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})

@asynccontextmanager
async def application():
    yield app

listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
web_server.serve(application, [listener], None, connections_max=100, grace_s=1)
"""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Port of a server that returns the body of each request, and waits half a second for a header."""
    with subprocess.Popen([sys.executable, "-c", _SERVING], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.terminate()


def exchanged(port: int, *parts: bytes) -> list[bytes]:
    """Send bytes and return the status of each answer, up to the end of the connection by the server."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        for part in parts:
            connection.sendall(part)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    return re.findall(rb"HTTP/1\.1 (\d{3}) ", received)


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ((), []),
        ((b"GET / HTTP/1.1\r\nHost: a",), []),
        ((b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"GET / HTTP/1.1\r\nHost"), [b"200"]),
        ((b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 3,), [b"200"] * 3),
    ],
)
def test_a_connection_without_a_whole_header_is_closed(port: int, parts: tuple[bytes, ...], found: list[bytes]) -> None:
    """Silent, slow, or slow after other requests: a bounded number of connections is served."""
    assert exchanged(port, *parts) == found


def test_a_request_under_way_is_not_cut(port: int) -> None:
    """The bound ends with the header; the application has its own one for the body."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\na")
        for _ in range(3):  # silent connections end, each after the bound
            assert exchanged(port) == []
        connection.sendall(b"b")
        assert connection.recv(65536).endswith(b"ab")


@pytest.mark.parametrize(
    "length", [b"Content-Length: 5\r\nTransfer-Encoding: chunked", b"Transfer-Encoding: chunked\r\nContent-Length: 5"]
)
def test_a_request_with_two_lengths_ends_the_connection(port: int, length: bytes) -> None:
    """A proxy that believes one of them, and this server the other one, would see different requests."""
    request = b"POST / HTTP/1.1\r\nHost: a\r\n" + length + b"\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n"
    assert exchanged(port, request) == [b"400"]
