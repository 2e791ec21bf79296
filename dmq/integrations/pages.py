"""Metrics and health of a process without a web server: two pages over HTTP, one request at a time."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from dmq.config.units import parse_address

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUEST_S_MAX = 5.0  # longest delay that a slow client causes for the next one


class ProbePage(NamedTuple):
    """HTTP response."""

    status: int
    kind: str
    text: str


class _Handler(BaseHTTPRequestHandler):
    pages: ClassVar[Mapping[str, Callable[[], ProbePage]]] = {}

    def do_GET(self) -> None:
        """Answer with the page of this path."""
        make = self.pages.get(self.path.partition("?")[0])
        page = make() if make is not None else ProbePage(404, "text/plain", f"there are {', '.join(self.pages)}\n")
        body = page.text.encode()
        self.send_response(page.status)
        self.send_header("Content-Type", page.kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as it is called there
        """Discard the log of probes."""


class _Server(TCPServer):  # HTTPServer queries the name service at its start
    allow_reuse_address = True

    def finish_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as it is declared there
        """Answer a request, and cut it off if it takes too long."""

        def cut() -> None:
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

        late = threading.Timer(REQUEST_S_MAX, cut)
        late.daemon = True
        late.start()
        try:
            super().finish_request(request, client_address)
        finally:
            late.cancel()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the error of a client that disconnected or was cut off."""


class _Server6(_Server):
    address_family = socket.AF_INET6


@contextmanager
def served(address: str, pages: Mapping[str, Callable[[], ProbePage]]) -> Iterator[int]:
    """Serve ``pages`` at ``address`` (host:port; port 0: any) during the block; yield the port."""
    where = parse_address(address)
    handler = type("Handler", (_Handler,), {"pages": pages})
    with (_Server6 if ":" in where.host else _Server)((where.host, where.port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="dmq-pages", daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
