"""The processes of the HTTP API and of the console: started, restarted when they end, and stopped before the daemon."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Final, NamedTuple

import msgspec
import structlog

from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.extras import ExtraMissing, require
from dmq.config.settings import CONSOLE_DEFAULT, DaemonConfig
from dmq.config.units import Address, is_loopback
from dmq.daemon.server.files import certificate_files
from dmq.errors import AddressInUse
from dmq.http2 import open_sockets
from dmq.processes.child import Child
from dmq.runtime.web_settings import CertificateFiles, WebSettings

_AGAIN_S: Final = (0.0, 0.1, 1.0, 5.0, 30.0)  # before a start, by the number of short lives in a row
_SHORT_LIFE_S: Final = 10.0
_EVERY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - to connect to, not to listen on

log = structlog.get_logger("dmq.web")


class _Kind(NamedTuple):
    """A web process: its setting, its title, its module, its extra, and its log events."""

    setting: str
    title: str
    module: str
    extra: str
    libraries: tuple[str, ...]
    on_serving: Callable[..., None]
    on_ended: Callable[..., None]

    def listen(self, config: DaemonConfig) -> Address | None:
        """Return its address, or None if it is off. An automatic console is off if it is not installed."""
        configured: Address | str | None = getattr(config, self.setting)
        if isinstance(configured, Address) or configured is None:
            return configured
        try:
            self.require()
        except ExtraMissing as missing:
            log.info("web_not_installed", setting=self.setting, reason=str(missing))
            return None
        return CONSOLE_DEFAULT

    def require(self) -> None:
        """Raise ``ExtraMissing`` if it is not installed."""
        require(self.title, self.extra, *self.libraries)


_KINDS: Final = (
    _Kind(
        *("http_api", "the HTTP API", "dmq.http_api.process", "http", ("starlette", "uvicorn")),
        on_serving=lambda **fields: log.info("http_api_serving", **fields),
        on_ended=lambda **fields: log.warning("http_api_ended", **fields),
    ),
    _Kind(
        *("console", "the console", "dmq.console.serving", "console", ("starlette", "uvicorn", "jinja2")),
        on_serving=lambda **fields: log.info("console_serving", **fields),
        on_ended=lambda **fields: log.warning("console_ended", **fields),
    ),
)


def require_web(config: DaemonConfig) -> None:
    """Raise ``ExtraMissing`` if the HTTP API or the console is configured and not installed."""
    for kind in _KINDS:
        if isinstance(getattr(config, kind.setting), Address):
            kind.require()


async def start_web(config: DaemonConfig, port: int, clock: Clock, stack: AsyncExitStack) -> Mapping[str, str]:
    """Start the HTTP API and the console for the daemon on ``port``, if they are configured. ``stack`` stops them.

    Return their URLs by setting.
    """
    daemon = Address(_EVERY.get(config.listen.host, config.listen.host), port)
    urls: dict[str, str] = {}
    for kind in _KINDS:
        listen = kind.listen(config)
        if listen is None:
            continue
        sockets = await _open(kind, listen, is_required=getattr(config, kind.setting) != "auto")
        files = None if is_loopback(listen.host) else certificate_files(config)
        settings = WebSettings(
            sockets=[each.fileno() for each in sockets],
            daemon=str(daemon),
            tls=CertificateFiles(*(str(each.absolute()) for each in files)) if files is not None else None,
            parent_pid=os.getpid(),
            log_level=config.log_level,
            log_format=config.log_format,
        )
        process = _WebProcess(kind, sockets, settings, clock)
        stack.push_async_callback(process.stop, config.shutdown_grace_s)
        process.start()
        urls[kind.setting] = process.url
    return urls


async def _open(kind: _Kind, listen: Address, *, is_required: bool) -> list[socket.socket]:
    try:
        return await open_sockets(listen.host, listen.port)
    except OSError as error:
        text = f"cannot listen on {listen} ({kind.title}): {error.strerror or error}"
        if is_required:
            raise AddressInUse(text) from error
        # The default port is not required: a second daemon on the host must not fail because of it.
        log.warning("web_port_in_use", setting=kind.setting, reason=text)
        return await _open(kind, Address(listen.host, 0), is_required=True)


class _WebProcess:
    """The process and its listening sockets. Connections wait in the sockets while it is started again."""

    def __init__(self, kind: _Kind, sockets: list[socket.socket], settings: WebSettings, clock: Clock) -> None:
        self._kind = kind
        self._clock = clock
        self._sockets = sockets
        host, port = sockets[0].getsockname()[:2]
        self.url = f"{'http' if settings.tls is None else 'https'}://{Address(host, port)}/"
        self._command = [sys.executable, "-m", kind.module, msgspec.json.encode(settings).decode()]
        self._child: Child | None = None
        self._keeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the process, and start it again whenever it ends."""
        self._keeping = asyncio.get_running_loop().create_task(self._keep(), name="dmq-web")

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
                self._kind.on_serving(url=self.url, pid=self._child.pid)
                ended = f"exit code {await self._child.wait()}"
            except OSError as error:
                ended = str(error)
            failures = failures + 1 if self._clock.monotonic_s() - since_s < _SHORT_LIFE_S else 0
            self._kind.on_ended(reason=ended)
