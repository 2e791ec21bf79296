"""The process of the HTTP API.

    python -m dmq.http_api.process SETTINGS

The daemon starts it with its settings as JSON, and hands over the listening sockets. It ends with its parent.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog
import uvicorn
import uvloop

from broker_adapter.runtime.clock import SystemClock
from dmq.config.contexts import ClientTls
from dmq.http_api.app import HttpApi
from dmq.http_api.daemon import DaemonChannel
from dmq.http_api.settings import CertificateFiles, HttpApiSettings
from dmq.runtime.background import die_with_parent
from dmq.runtime.log import configure

_CONNECTIONS_MAX: Final = 1_000
_HEADER_BYTES_MAX: Final = 16 * 1024
_KEEP_ALIVE_S: Final = 30
_GRACE_S: Final = 10
_LOOK_S: Final = 1.0

log = structlog.get_logger("dmq.http_api")


def run(
    sockets: Sequence[socket.socket], daemon: str, *, client_tls: ClientTls | None, tls: CertificateFiles | None
) -> None:
    """Serve on listening sockets until SIGTERM or SIGINT, then answer the open requests."""
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn stops at them, and raises them again at its end
        signal.signal(number, lambda *_: None)
    log.info(
        "http_api_started", listen=":".join(map(str, sockets[0].getsockname()[:2])), daemon=daemon, pid=os.getpid()
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(sockets, daemon, client_tls, tls))


async def _serve(
    sockets: Sequence[socket.socket], daemon: str, client_tls: ClientTls | None, tls: CertificateFiles | None
) -> None:
    channel = DaemonChannel(daemon, client_tls)
    config = uvicorn.Config(
        HttpApi(channel, SystemClock()).application(),
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        http="h11",
        proxy_headers=False,
        server_header=False,
        limit_concurrency=_CONNECTIONS_MAX,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
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
        await channel.close()


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
                    log.warning("certificate_not_read", error=str(error))
                known = now


def _times(tls: CertificateFiles) -> list[int]:
    return [Path(each).stat().st_mtime_ns for each in (tls.certificate, tls.key)]


def main(text: str) -> None:
    """Serve as a child of the daemon."""
    die_with_parent()
    settings = msgspec.json.decode(text, type=HttpApiSettings)
    configure(settings.log_level, settings.log_format, SystemClock(), process="http-api")
    sockets = [socket.socket(fileno=number) for number in settings.sockets]
    run(sockets, settings.daemon, client_tls=None, tls=settings.tls)


if __name__ == "__main__":
    main(sys.argv[1])
