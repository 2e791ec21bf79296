"""The processes of the HTTP API and of the console: started, restarted when they end, and stopped before the daemon."""

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
from dmq.config.settings import ENV_PREFIX, DaemonConfig
from dmq.config.units import Address, is_loopback
from dmq.daemon.files import certificate_files
from dmq.errors import AddressInUse
from dmq.http2.listener import open_sockets
from dmq.processes.child import Child

if TYPE_CHECKING:
    from dmq.http_api import HttpApiSettings

_AGAIN_S: Final = (0.0, 0.1, 1.0, 5.0)  # before a start, by the number of short lives in a row
_SHORT_LIFE_S: Final = 10.0
_RESTART_S_MIN: Final = 1.0
_RESTART_S_MAX: Final = 60.0  # of a console that never serves: its port is taken
_ERROR_BYTES_MAX: Final = 4096
_EVERY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - to connect to, not to listen on

log = structlog.get_logger("dmq.web")


async def start_web(config: DaemonConfig, port: int, clock: Clock, stack: AsyncExitStack) -> None:
    """Start the HTTP API and the console for the daemon on ``port``, if they are configured. ``stack`` stops them."""
    daemon = Address(_EVERY.get(config.listen.host, config.listen.host), port)
    await _start_http_api(config, daemon, clock, stack)
    if config.console is not None:
        running = _keep_console(config.console, daemon)
        stack.callback(asyncio.get_running_loop().create_task(running, name="dmq-console").cancel)


async def _start_http_api(config: DaemonConfig, daemon: Address, clock: Clock, stack: AsyncExitStack) -> None:
    if config.http_api is None:
        return
    try:
        sockets = await open_sockets(config.http_api.host, config.http_api.port)
    except OSError as error:
        raise AddressInUse(f"cannot listen on {config.http_api} (HTTP API): {error.strerror or error}") from error
    process = _HttpApiProcess(sockets, _settings(config, sockets, daemon), clock)
    stack.push_async_callback(process.stop, config.shutdown_grace_s)
    process.start()
    log.info("http_api_serving", listen=str(Address(config.http_api.host, sockets[0].getsockname()[1])))


def require_web(config: DaemonConfig) -> None:
    """Raise ``ExtraMissing`` if the HTTP API or the console is configured and not installed."""
    if config.http_api is not None:
        require("http_api", "http", "starlette", "uvicorn")
    if config.console is not None:
        require("the console", "console", "starlette", "uvicorn", "jinja2")


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


async def _keep_console(listen: Address, daemon: Address) -> None:
    """Run the console of the daemon at ``daemon``, and start it again after each end, until cancelled."""
    pause_s = _RESTART_S_MIN
    while True:
        has_served, reason = await _run_console(listen, daemon)
        log.warning("console_ended", reason=reason)
        pause_s = _RESTART_S_MIN if has_served else min(_RESTART_S_MAX, 2 * pause_s)
        await asyncio.sleep(pause_s)


async def _run_console(listen: Address, daemon: Address) -> tuple[bool, str]:
    """Run it once; return whether it served, and why it ended."""
    options = ("console", "--address", str(daemon), "--listen", str(listen), "--ends-with-stdin")
    # A context or certificates of this user are for other daemons.
    env = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    pipe = asyncio.subprocess.PIPE  # an end of this process, for any reason, closes the console's stdin
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dmq", *options), stdin=pipe, stdout=pipe, stderr=pipe, env=env
    )
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.ensure_future(_tail(process.stderr))
    try:
        url = (await process.stdout.readline()).decode().removeprefix("console ").strip()
        if url:
            log.info("console_serving", url=url)
        reason = await errors
        return bool(url), f"exit code {await process.wait()}" + (f": {reason}" if reason else "")
    finally:
        errors.cancel()
        if process.returncode is None:
            process.kill()  # it has nothing to lose


async def _tail(errors: asyncio.StreamReader) -> str:
    """Return the last line, when the stream has ended."""
    kept = b""
    while part := await errors.read(_ERROR_BYTES_MAX):
        kept = (kept + part)[-_ERROR_BYTES_MAX:]
    lines = kept.decode(errors="replace").splitlines()
    return lines[-1] if lines else ""
