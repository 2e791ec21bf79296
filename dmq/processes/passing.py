"""Accepted connections on their way from the process that listens to a front, and what binds the two together."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
import structlog

_PEER_BYTES_MAX: Final = 1024
_SET_NAME: Final = 15  # of Linux's prctl
_NAME_BYTES_MAX: Final = 15  # the rest would be cut

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(tuple[Any, ...]).decode

log = structlog.get_logger("dmq.processes")


def pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of what connections are passed by: whole messages, in order."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.setblocking(False)
    return here, there


def pass_on(sockets: socket.socket, accepted: socket.socket, peer: object) -> None:
    """Pass a connection on with the address that it was accepted from; the caller's own copy stays open.

    Raises OSError, BlockingIOError among it if the other end takes none.
    """
    name = peer if isinstance(peer, tuple) else ()
    socket.send_fds(sockets, [_encode(name)], [accepted.fileno()])


def receive(
    sockets: socket.socket,
    take: Callable[[socket.socket, object], Awaitable[None]],
    lose: Callable[[object], None] = lambda _: None,
) -> Callable[[], None]:
    """Have ``take`` called with each connection that comes; return what ends that.

    ``lose`` hears of the address of one for which there was no descriptor here.
    """
    loop = asyncio.get_running_loop()
    taking: set[asyncio.Task[None]] = set()
    sockets.setblocking(False)

    def end() -> None:
        loop.remove_reader(sockets.fileno())

    def on_readable() -> None:
        try:
            name, descriptors, _, _ = socket.recv_fds(sockets, _PEER_BYTES_MAX, 1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            log.warning("connection_handover_failed", why=error.strerror or str(error))
            return
        if not name:
            end()  # the other end is gone
            return
        peer = _decode(name)
        if not descriptors:
            log.warning("connection_handover_failed", why="no descriptor is left")
            lose(peer)
            return
        accepted = socket.socket(fileno=descriptors[0])
        accepted.setblocking(False)
        task = asyncio.ensure_future(take(accepted, peer))
        taking.add(task)
        task.add_done_callback(taking.discard)

    loop.add_reader(sockets.fileno(), on_readable)
    return end


def name_process(name: str) -> None:
    """Have ``top`` and ``ps -o comm`` show this process under a name, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_NAME, name.encode()[:_NAME_BYTES_MAX], 0, 0, 0)
