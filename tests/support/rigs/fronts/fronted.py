"""A front and the store process it speaks to, in one process: the real parts of both, and the real stream between."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from broker_adapter.runtime.clock import SystemClock
from dmq.config.settings import DaemonConfig
from dmq.daemon.server.fronts import front_settings
from dmq.http2.admission.bounds import Accounts
from dmq.http2.server.listener import SocketListener
from dmq.processes import frames
from dmq.processes.clocks import FrontClock
from dmq.processes.front import Front
from dmq.processes.host import Host
from dmq.processes.link import Link
from dmq.rocketmq_server.sessions.settings import SidecarConfig
from dmq.rocketmq_server.transport.http2_server import Port, said_plainly

_CONNECTIONS_MAX = 1000


class FrontedTransport:
    """Serves a port through a front: the face of ``Http2Transport``."""

    def __init__(self, served: Port, *, host: str, port_number: int) -> None:
        self._served = served
        self._host = host
        self.port = port_number
        self._is_stopped = False

    async def start(self) -> int:
        """Listen, serve, and return the port."""
        served, clock = self._served, SystemClock()
        self._listener = SocketListener(self._host, self.port, self._take)
        with said_plainly(self._host, self.port):
            self.port = await self._listener.start()
        here, there = socket.socketpair()
        self._are_lost = [asyncio.Event(), asyncio.Event()]
        takes_there: dict[type, Callable[[Any], None]] = {}
        self._link = await Link.over(here, frames.from_front, self._said, self._lost, reads_while_behind=False)
        self._front_link = await Link.over(there, frames.from_store, _taking(takes_there), self._are_lost[1].set)
        bounds = served.service.quotas.bounds
        accounts = Accounts(bounds.bytes_held, bounds.bytes_reserve)
        self._host_of_front = Host(self._link, served, accounts, clock, {frames.Left: lambda _: None})
        config = DaemonConfig(data=Path("data"), tls_certificate="off", processes=2)
        settings = front_settings(config, served, SidecarConfig(), clock, count=2, connections_max=_CONNECTIONS_MAX)
        self._front = front = Front(settings, self._front_link, FrontClock(settings.wall_less_boot_ms))
        takes_there |= front.takes()
        front.server.begin()
        served.service.listening_at(self._host, self.port)
        self._link.say(frames.Listening(self._host, self.port))
        await self.set_serving(is_serving=True)
        return self.port

    async def set_serving(self, *, is_serving: bool) -> None:
        """Tell the health service's clients."""
        self._served.health.set(is_serving=is_serving)

    async def stop(self, grace_s: float) -> None:
        """End as a daemon with fronts does."""
        if self._is_stopped:
            return
        self._is_stopped = True
        await self._listener.stop()
        self._served.drain()
        await self._front.server.stop(grace_s)
        self._front_link.close()
        for each in self._are_lost:
            await each.wait()

    async def _take(self, accepted: socket.socket, peer: object) -> None:
        await self._front.server.take(accepted, peer)

    def _said(self, batch: Sequence[Any]) -> None:
        self._host_of_front.on_frames(batch)

    def _lost(self) -> None:
        self._host_of_front.lose()
        self._are_lost[0].set()


def _taking(takes: dict[type, Callable[[Any], None]]) -> Callable[[Sequence[Any]], None]:
    def take(said: Sequence[Any]) -> None:
        for frame in said:
            takes[type(frame)](frame)

    return take
