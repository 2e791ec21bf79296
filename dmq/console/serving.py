"""Process of the console: it listens on a loopback address until it is stopped, or until its daemon has ended."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from typing import NamedTuple

import uvicorn

from broker_adapter.wire.signature import Signer
from dmq.admin.client.client import AdminClient
from dmq.config.contexts import ClientTls
from dmq.config.units import Address, is_loopback
from dmq.console.app import Console, ConsoleSettings
from dmq.errors import AddressInUse, DmqError

_TIMEOUT_S = 5.0


class NotLoopback(DmqError):
    """The console listens on loopback addresses only."""


class ConsoleOptions(NamedTuple):
    """Options of the process. With ``ends_with_stdin`` it ends when its parent closes the pipe or ends."""

    daemon: str
    tls: ClientTls | None
    listen: Address
    is_read_only: bool = False
    ends_with_stdin: bool = False


def serve_console(options: ConsoleOptions, on_serving: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C, and call ``on_serving`` with the URL. Raise if the address cannot be used."""
    if not is_loopback(options.listen.host):
        raise NotLoopback(f"the console listens on loopback addresses only, got {options.listen}")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

    def connect(signer: Signer | None, why: str) -> AdminClient:
        return AdminClient(options.daemon, timeout_s=_TIMEOUT_S, signer=signer, tls=options.tls, why=why)

    with _listening(options.listen) as listener:
        port = listener.getsockname()[1]
        console = Console(ConsoleSettings(options.daemon, port, options.is_read_only), connect)
        config = uvicorn.Config(
            console.app(),
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            timeout_graceful_shutdown=1,  # an open stream of events has no end of its own
            limit_concurrency=256,
        )
        asyncio.run(_serve(uvicorn.Server(config), listener, options, url_of(options.listen.host, port), on_serving))


def url_of(host: str, port: int) -> str:
    """Return the URL of the overview."""
    return f"http://{Address(host, port)}/"


async def _serve(
    server: uvicorn.Server,
    listener: socket.socket,
    options: ConsoleOptions,
    url: str,
    on_serving: Callable[[str], None],
) -> None:
    watching = asyncio.create_task(_end_with_stdin(server)) if options.ends_with_stdin else None
    on_serving(url)
    await server.serve(sockets=[listener])
    if watching is not None:
        watching.cancel()


async def _end_with_stdin(server: uvicorn.Server) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
    server.should_exit = True


def _listening(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address.host, address.port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise AddressInUse(f"the console cannot listen on {address}: {error.strerror}") from error
    return listener
