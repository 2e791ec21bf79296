"""The process of the HTTP API: started, restarted when it ends, and stopped before the daemon."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.extras import require
from dmq.config.settings import DaemonConfig
from dmq.config.units import Address, is_loopback
from dmq.daemon.files import certificate_files
from dmq.errors import AddressInUse
from dmq.http2.listener import open_sockets
from dmq.processes.child import Child

if TYPE_CHECKING:
    from dmq.http_api import HttpApiSettings

_AGAIN_S: Final = (0.0, 0.1, 1.0, 5.0)  # before a start, by the number of short lives in a row
_SHORT_LIFE_S: Final = 10.0
_EVERY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - to connect to, not to listen on

log = structlog.get_logger("dmq.http_api")


async def start_http_api(config: DaemonConfig, port: int, clock: Clock, stack: AsyncExitStack) -> None:
    """Start the HTTP API for the daemon on ``port`` if it is configured. ``stack`` stops it."""
    if config.http_api is None:
        return
    require_http_api()
    try:
        sockets = await open_sockets(config.http_api.host, config.http_api.port)
    except OSError as error:
        raise AddressInUse(f"cannot listen on {config.http_api} (HTTP API): {error.strerror or error}") from error
    daemon = Address(_EVERY.get(config.listen.host, config.listen.host), port)
    process = _HttpApiProcess(sockets, _settings(config, sockets, daemon), clock)
    stack.push_async_callback(process.stop, config.shutdown_grace_s)
    process.start()
    log.info("http_api_serving", listen=str(Address(config.http_api.host, sockets[0].getsockname()[1])))


def require_http_api() -> None:
    """Raise ``ExtraMissing`` if the HTTP API is not installed."""
    require("http_api", "http", "starlette", "uvicorn")


def _settings(config: DaemonConfig, sockets: list[socket.socket], daemon: Address) -> HttpApiSettings:
    from dmq.http_api import CertificateFiles, HttpApiSettings

    assert config.http_api is not None
    files = None if is_loopback(config.http_api.host) else certificate_files(config)
    return HttpApiSettings(
        sockets=[each.fileno() for each in sockets],
        daemon=str(daemon),
        tls=CertificateFiles(*(str(each.absolute()) for each in files)) if files is not None else None,
        log_level=config.log_level,
        log_format=config.log_format,
    )


class _HttpApiProcess:
    """The process and its listening sockets. Connections wait in the sockets while it is started again."""

    def __init__(self, sockets: list[socket.socket], settings: HttpApiSettings, clock: Clock) -> None:
        self._clock = clock
        self._sockets = sockets
        self._command = [sys.executable, "-m", "dmq.http_api.process", msgspec.json.encode(settings).decode()]
        self._child: Child | None = None
        self._keeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the process, and start it again whenever it ends."""
        self._keeping = asyncio.get_running_loop().create_task(self._keep(), name="dmq-http-api")

    async def stop(self, grace_s: float) -> None:
        """Stop the process, which answers the open requests first, for ``grace_s`` at most."""
        assert self._keeping is not None
        self._keeping.cancel()
        if self._child is not None:
            self._child.terminate()
            try:
                await asyncio.wait_for(self._child.wait(), grace_s)
            except TimeoutError:
                self._child.kill()
        for each in self._sockets:
            each.close()

    async def _keep(self) -> None:
        failures = 0
        while True:
            await asyncio.sleep(_AGAIN_S[min(failures, len(_AGAIN_S) - 1)])
            since_s = self._clock.monotonic_s()
            try:
                self._child = Child(
                    self._command, descriptors=[each.fileno() for each in self._sockets], environment=os.environ
                )
                ended = f"exit code {await self._child.wait()}"
            except OSError as error:
                ended = str(error)
            failures = failures + 1 if self._clock.monotonic_s() - since_s < _SHORT_LIFE_S else 0
            log.warning("http_api_ended", why=ended)
