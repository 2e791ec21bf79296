"""Process of the console.

    python -m dmq.console.serving SETTINGS

The daemon starts it with its settings as JSON, and hands over the listening sockets. It ends with its parent.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from broker_adapter.wire.signature import Signer
from dmq.admin.client import AdminClient
from dmq.config.contexts import ClientTls
from dmq.config.units import is_loopback
from dmq.console.app import Console, ConsoleSettings
from dmq.runtime.web_server import begin_child, serve
from dmq.runtime.web_settings import CertificateFiles

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_TIMEOUT_S: Final = 5.0
_CONNECTIONS_MAX: Final = 256
_GRACE_S: Final = 1  # an open stream of events has no end of its own
_NICENESS: Final = 5  # pages wait for deliveries, not the other way round


def run(
    sockets: Sequence[socket.socket],
    daemon: str,
    *,
    client_tls: ClientTls | None,
    tls: CertificateFiles | None,
    is_read_only: bool = False,
) -> None:
    """Serve on listening sockets until SIGTERM or SIGINT. Beyond this host each person signs in."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    settings = ConsoleSettings(
        daemon,
        port=sockets[0].getsockname()[1],
        is_read_only=is_read_only,
        is_encrypted=tls is not None,
        requires_sign_in=not all(is_loopback(each.getsockname()[0]) for each in sockets),
    )

    def connect(signer: Signer | None, why: str) -> AdminClient:
        return AdminClient(daemon, timeout_s=_TIMEOUT_S, signer=signer, tls=client_tls, why=why)

    @asynccontextmanager
    async def application() -> AsyncIterator[ASGIApp]:
        yield Console(settings, connect).app()

    serve(application, sockets, tls, connections_max=_CONNECTIONS_MAX, grace_s=_GRACE_S)


def main(text: str) -> None:
    """Serve as a child of the daemon."""
    os.nice(_NICENESS)
    settings, sockets = begin_child(text, "console")
    run(sockets, settings.daemon, client_tls=None, tls=settings.tls)


if __name__ == "__main__":
    main(sys.argv[1])
