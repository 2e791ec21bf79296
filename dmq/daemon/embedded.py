"""Embedded broker in an application's own process, for clients that divide its queues: no port, no protocol.

A second open of the same directory on the same event loop returns another client of the same broker. The last client to
close also closes the store. A daemon and an application cannot open one directory at the same time.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from contextlib import AsyncExitStack
from pathlib import Path

import structlog

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.runtime.clock import SystemClock
from dmq.broker import EmbeddedBroker, EmbeddedClassic
from dmq.config.settings import DaemonConfig
from dmq.daemon.opening import open_all, open_broker, start_periodic
from dmq.errors import StoreError
from dmq.scheduler import Scheduler

log = structlog.get_logger("dmq.daemon")


class _Cell:
    """Open broker of this process, with the number of its clients."""

    def __init__(self, path: Path) -> None:
        self.loop = asyncio.get_running_loop()
        self.closed = asyncio.Event()
        self.clients = 0
        self.is_closing = False
        self._path = path
        self._stack = AsyncExitStack()
        self._opening = self.loop.create_task(self._open(), name="dmq-open")

    async def client(self, client_id: str) -> EmbeddedClassic:
        """Return another client, once the broker is open."""
        self.clients += 1
        try:
            broker = await asyncio.shield(self._opening)
        except BaseException:
            await self._leave()
            raise
        return EmbeddedClassic(broker, client_id, on_close=self._leave)

    async def _open(self) -> EmbeddedBroker:
        config, clock, stack = DaemonConfig(data=self._path), SystemClock(), self._stack
        try:
            opened = await open_all(config, clock, stack, _on_failure)
            broker = await open_broker(config, opened, stack)
            scheduler = Scheduler(opened.store, broker.placement, broker.checks, on_failure=_on_failure)
            stack.callback(scheduler.close)
            scheduler.start()
            start_periodic(broker)
        except BaseException:
            await stack.aclose()
            raise
        return broker

    async def _leave(self) -> None:
        self.clients -= 1
        if not self.clients:
            self.is_closing = True
            await asyncio.wait((self._opening,))  # the last client may have been cancelled while waiting
            try:
                await self._stack.aclose()
            finally:
                del _open_here[self._path]
                self.closed.set()


_open_here: dict[Path, _Cell] = {}


async def open_embedded(path: str | Path, client_id: str = "") -> EmbeddedClassic:
    """Open the broker whose store is in ``path``, created if missing, as a client with its own id.

    It has the default configuration of a daemon. Raise ``dmq.errors.StoreError`` like the start of a daemon,
    ``StoreLocked`` if another process uses the directory, ``Refused(REQUEST)`` if another event loop of this process
    does.
    """
    found = _absolute(path)
    while (cell := _open_here.get(found)) is not None:
        if cell.loop is not asyncio.get_running_loop():
            raise Refused(Rule.REQUEST, "the directory is open on another event loop of this process", value=str(found))
        if not cell.is_closing:
            break
        await cell.closed.wait()
    else:
        cell = _open_here[found] = _Cell(found)
    return await cell.client(client_id or f"embedded@{os.getpid()}#{secrets.token_hex(6)}")


def _absolute(path: str | Path) -> Path:
    return Path(path).expanduser().absolute()


def _on_failure(error: StoreError) -> None:
    log.critical("storage_failed", error=str(error))
