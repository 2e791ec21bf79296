"""The process of the HTTP API.

    python -m dmq.http_api.process SETTINGS

The daemon starts it with its settings as JSON, and hands over the listening sockets. It ends with its parent.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from broker_adapter.runtime.clock import SystemClock
from dmq.config.contexts import ClientTls
from dmq.http_api.app import HttpApi
from dmq.http_api.daemon import DaemonChannel
from dmq.runtime.web_server import begin_child, serve
from dmq.runtime.web_settings import CertificateFiles

if TYPE_CHECKING:
    from starlette.applications import Starlette

_CONNECTIONS_MAX: Final = 1_000
_GRACE_S: Final = 10


def run(
    sockets: Sequence[socket.socket], daemon: str, *, client_tls: ClientTls | None, tls: CertificateFiles | None
) -> None:
    """Serve on listening sockets until SIGTERM or SIGINT, then answer the open requests."""

    @asynccontextmanager
    async def application() -> AsyncIterator[Starlette]:
        channel = DaemonChannel(daemon, client_tls)
        try:
            yield HttpApi(channel, SystemClock()).application()
        finally:
            await channel.close()

    serve(application, sockets, tls, connections_max=_CONNECTIONS_MAX, grace_s=_GRACE_S)


def main(text: str) -> None:
    """Serve as a child of the daemon."""
    settings, sockets = begin_child(text, "http-api")
    run(sockets, settings.daemon, client_tls=None, tls=settings.tls)


if __name__ == "__main__":
    main(sys.argv[1])
