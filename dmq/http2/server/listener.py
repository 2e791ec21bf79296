"""The listening sockets of one port, and their accepted connections."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

_BACKLOG: Final = 1024  # connections that wait to be accepted
_ACCEPT_AGAIN_S: Final = 0.05
_NOT_HERE: Final = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})


async def open_sockets(host: str, port: int) -> list[socket.socket]:
    """Listen on one port of every address of a host name; the system chooses the port if it is 0. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    absent: OSError | None = None
    sockets: list[socket.socket] = []
    for family, address in dict.fromkeys((each[0], each[4]) for each in found):
        try:
            listening = socket.create_server((address[0], port, *address[2:]), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno in _NOT_HERE:  # for example an IPv6 address of a host without IPv6
                absent = error
                continue
            for each in sockets:
                each.close()
            raise
        sockets.append(listening)
        listening.setblocking(False)
        port = listening.getsockname()[1]
    if absent is not None and not sockets:
        raise absent
    return sockets


class SocketListener:
    """The listener on one port of every address of a host name. The event loop owns the object."""

    def __init__(
        self,
        host: str,
        port: int,
        take: Callable[[socket.socket, object], Awaitable[None]],
        sockets: Iterable[socket.socket] = (),
    ) -> None:
        """``take`` is called with each connection and its peer's address; it closes those that it refuses.

        ``sockets`` listen already, and are used instead of new ones; see ``release``.
        """
        self._address = (host, port)
        self._take = take
        self._sockets: list[socket.socket] = list(sockets)
        self._accepting: list[asyncio.Task[None]] = []

    async def start(self) -> int:
        """Listen, and return the port (chosen by the system if 0 was configured). Raises OSError."""
        self._loop = asyncio.get_running_loop()
        if not self._sockets:
            self._sockets = await open_sockets(*self._address)
        self._accepting = [self._loop.create_task(self._accept(listening)) for listening in self._sockets]
        return int(self._sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stop accepting connections. Idempotent."""
        await self._stop_accepting()
        self._close()

    async def release(self) -> Sequence[socket.socket]:
        """Stop accepting connections, and return the sockets, which still listen, for another listener."""
        await self._stop_accepting()
        released, self._sockets = self._sockets, []
        return released

    async def _stop_accepting(self) -> None:
        for accepting in self._accepting:
            accepting.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)

    async def _accept(self, listening: socket.socket) -> None:
        """Accept one connection per loop iteration: thousands at once would delay the existing ones."""
        while True:
            try:
                accepted, peer = await self._loop.sock_accept(listening)
            except OSError as error:
                # The client has already disconnected, or there is no file descriptor or memory for it.
                await asyncio.sleep(0.0 if error.errno == errno.ECONNABORTED else _ACCEPT_AGAIN_S)
                continue
            await self._take(accepted, peer)

    def _close(self) -> None:
        for listening in self._sockets:
            listening.close()
        self._sockets.clear()
