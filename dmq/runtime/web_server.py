"""Server of a web process: sockets that listen already, and a certificate that may be renewed."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
import uvicorn
import uvloop
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from broker_adapter.runtime.clock import SystemClock
from dmq.config.units import Address
from dmq.runtime.background import die_with_parent
from dmq.runtime.log import configure
from dmq.runtime.web_settings import CertificateFiles, WebSettings

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_HEADER_BYTES_MAX: Final = 16 * 1024
_KEEP_ALIVE_S: Final = 30
_HEADER_S_MAX: Final = 40.0  # from the begin of a connection, or the end of the last answer, to the end of a header
_LOOK_S: Final = 1.0

log = structlog.get_logger("dmq.web")

Application = Callable[[], "AbstractAsyncContextManager[ASGIApp]"]


def begin_child(text: str, process: str) -> tuple[WebSettings, list[socket.socket]]:
    """Bind this process to the daemon that started it; return its settings and the sockets that it inherited."""
    settings = msgspec.json.decode(text, type=WebSettings)
    die_with_parent(settings.parent_pid)
    configure(settings.log_level, settings.log_format, SystemClock(), process=process)
    return settings, [socket.socket(fileno=number) for number in settings.sockets]


def url_of(sockets: Sequence[socket.socket], tls: CertificateFiles | None) -> str:
    """Return the URL of the first socket."""
    host, port = sockets[0].getsockname()[:2]
    return f"{'http' if tls is None else 'https'}://{Address(host, port)}/"


def serve(
    application: Application,
    sockets: Sequence[socket.socket],
    tls: CertificateFiles | None,
    *,
    connections_max: int,
    grace_s: int,
) -> None:
    """Serve until SIGTERM or SIGINT, then answer the open requests for ``grace_s`` at most."""
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
    ):  # before uvicorn, and when it raises them again
        signal.signal(number, lambda *_: sys.exit(0))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(application, sockets, tls, connections_max, grace_s))


async def _serve(
    application: Application,
    sockets: Sequence[socket.socket],
    tls: CertificateFiles | None,
    connections_max: int,
    grace_s: int,
) -> None:
    async with application() as app:
        config = uvicorn.Config(
            _one_length(app),
            log_config=None,
            log_level="error",  # a warning for each invalid request would let every client fill the log
            access_log=False,
            lifespan="off",
            ws="none",
            http=_Connection,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=connections_max,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=grace_s,
            h11_max_incomplete_event_size=_HEADER_BYTES_MAX,
            ssl_certfile=tls.certificate if tls is not None else None,
            ssl_keyfile=tls.key if tls is not None else None,
        )
        config.load()
        following = asyncio.get_running_loop().create_task(_follow(config, tls)) if tls is not None else None
        try:
            await uvicorn.Server(config).serve(list(sockets))
        finally:
            if following is not None:
                following.cancel()


class _Connection(H11Protocol):
    """HTTP/1.1 with a bound on the time without a whole header: slow and silent clients leave room for others."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unwatch()

    def _watch(self) -> None:
        """Start the bound while there is no request, and end it with the header of the next one."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._unwatch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(_HEADER_S_MAX, self.transport.close)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _one_length(app: ASGIApp) -> ASGIApp:
    """Refuse requests with two lengths of their body (RFC 9112, 6.1).

    A proxy that believes the other one would take a part of the body for a request.
    """

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        names = [name for name, _ in scope.get("headers", ())]
        if b"transfer-encoding" not in names or b"content-length" not in names:
            await app(scope, receive, send)
            return
        headers = [(b"connection", b"close"), (b"content-type", b"text/plain; charset=utf-8")]
        await send({"type": "http.response.start", "status": 400, "headers": headers})
        text = b"a request has Content-Length or Transfer-Encoding, not both"
        await send({"type": "http.response.body", "body": text})

    return checked


async def _follow(config: uvicorn.Config, tls: CertificateFiles) -> None:
    """Use a renewed certificate for new connections."""
    known = _times(tls)
    while True:
        await asyncio.sleep(_LOOK_S)
        with suppress(OSError):
            if (now := _times(tls)) != known:
                assert config.ssl is not None
                try:
                    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.certificate, tls.key)  # do they match?
                    config.ssl.load_cert_chain(tls.certificate, tls.key)
                except OSError as error:  # of ssl as well: the certificate before it counts
                    log.warning("certificate_load_failed", error=str(error))
                known = now


def _times(tls: CertificateFiles) -> list[int]:
    return [Path(each).stat().st_mtime_ns for each in (tls.certificate, tls.key)]
