"""A proxy in front of an object store that loses, delays and refuses requests as a test decides."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True, slots=True)
class LostRequest:
    """The connection breaks before the store has the request."""


@dataclass(frozen=True, slots=True)
class LostAnswer:
    """The store executes the request; the connection breaks before the answer."""


@dataclass(frozen=True, slots=True)
class Held:
    """The request waits for ``release``, and reaches the store even if the client has given up."""

    release: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Answer:
    """The proxy answers in place of the store."""

    status: int
    code: str = "InjectedFault"


Fault = LostRequest | LostAnswer | Held | Answer
Plan = Callable[[str, str], Fault | None]  # of method and path


def once(fault: Fault, method: str = "PUT") -> Plan:
    """Return a plan with one fault, for the first request of a method."""
    faults = [fault]

    def plan(of: str, path: str) -> Fault | None:
        return faults.pop() if of == method and faults else None

    return plan


def always(fault: Fault) -> Plan:
    """Return a plan with the same fault for all requests."""
    return lambda method, path: fault


class FaultProxy:
    """A listening proxy; ``plan`` may be changed at any time."""

    def __init__(self, upstream_port: int) -> None:
        self.plan: Plan | None = None
        self.requests: list[tuple[str, str]] = []
        self._upstream_port = upstream_port
        self._server = self._listen(0)
        self.port = int(self._server.server_address[1])

    def refuse(self) -> None:
        """Stop listening: connections are refused. Open ones end."""
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._server.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def accept(self) -> None:
        """Listen again, at the same port."""
        self._server = self._listen(self.port)

    def _listen(self, port: int) -> _Server:
        proxy = self

        class Handler(_Handler):
            def answer(self) -> None:
                proxy.handle(self)

            do_GET = do_PUT = do_POST = do_DELETE = answer  # noqa: N815 - names of http.server

        server = _Server(("127.0.0.1", port), Handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server

    def handle(self, request: _Handler) -> None:
        """Forward one request, or apply the fault."""
        body = request.rfile.read(int(request.headers.get("Content-Length", "0")))
        self.requests.append((request.command, request.path))
        fault = self.plan(request.command, request.path) if self.plan else None
        match fault:
            case LostRequest():
                request.close_connection = True
            case LostAnswer():
                self._forward(request, body)
                request.close_connection = True
            case Answer(status, code):
                request.reply(status, [], f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode())
            case Held(release, done):
                release.wait()
                answer = self._forward(request, body)
                done.set()
                request.reply(*answer)
            case None:
                request.reply(*self._forward(request, body))

    def _forward(self, request: _Handler, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._upstream_port, timeout=60)
        try:
            connection.putrequest(request.command, request.path, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        except OSError:
            return 502, [], b""
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], handler: type[_Handler]) -> None:
        super().__init__(address, handler)
        self.connections: set[socket.socket] = set()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that gave up."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        """Register the connection, so that the proxy can end it."""
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        """Forget the connection."""
        self.server.connections.discard(self.connection)
        super().finish()

    def reply(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        """Answer with the headers of the store, without those of its connection."""
        self.send_response_only(status)
        is_head = self.command == "HEAD"
        for name, value in headers:
            if name.lower() not in {"connection", "transfer-encoding"} and (
                is_head or name.lower() != "content-length"
            ):
                self.send_header(name, value)
        if not is_head:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not is_head:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the base class
        """Write nothing."""
