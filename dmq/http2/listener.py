"""The sockets that listen on one port, and the connections that come in by them."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from typing import Final

_BACKLOG: Final = 1024  # connections that wait to be accepted
_ACCEPT_AGAIN_S: Final = 0.05
_NOT_HERE: Final = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})


class Listener:
    """Listens on one port of every address that a host's name stands for. Belongs to the event loop."""

    def __init__(self, host: str, port: int, take: Callable[[socket.socket, object], Awaitable[None]]) -> None:
        """``take`` is given each connection with the address of its peer; it closes what it does not want."""
        self._address = (host, port)
        self._take = take
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []

    async def start(self) -> int:
        """Listen, and return the port (the system's choice if 0 was asked for). Raises OSError."""
        self._loop = asyncio.get_running_loop()
        host, port = self._address
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        absent: OSError | None = None
        for family, address in dict.fromkeys((each[0], each[4]) for each in found):
            try:
                listening = socket.create_server((address[0], port, *address[2:]), family=family, backlog=_BACKLOG)
            except OSError as error:
                if error.errno in _NOT_HERE:  # such as a host's name for IPv6 where there is none
                    absent = error
                    continue
                self._close()
                raise
            self._sockets.append(listening)
            listening.setblocking(False)
            port = listening.getsockname()[1]
        if absent is not None and not self._sockets:
            raise absent
        self._accepting = [self._loop.create_task(self._accept(listening)) for listening in self._sockets]
        return int(port)

    async def stop(self) -> None:
        """Take no new connections. Idempotent."""
        for accepting in self._accepting:
            accepting.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        self._close()

    async def _accept(self, listening: socket.socket) -> None:
        """Let clients in, one in a turn of the loop: thousands at once would hold up those that are here."""
        while True:
            try:
                accepted, peer = await self._loop.sock_accept(listening)
            except OSError as error:
                # The client is gone already; or there is no descriptor, nor memory, for it now.
                await asyncio.sleep(0.0 if error.errno == errno.ECONNABORTED else _ACCEPT_AGAIN_S)
                continue
            await self._take(accepted, peer)

    def _close(self) -> None:
        for listening in self._sockets:
            listening.close()
        self._sockets.clear()
