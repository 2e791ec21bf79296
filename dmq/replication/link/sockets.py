"""Connections of the direct link: TCP, with TLS of both sides beyond this host.

message   size 4 | body      the size is checked before the body is read
"""

from __future__ import annotations

import errno
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

from broker_adapter.runtime.clock import SystemClock
from broker_adapter.runtime.log import LibraryLog
from dmq.errors import AddressInUse, DmqError
from dmq.replication.link.frames import LinkBroken, LinkChannel

log = LibraryLog("dmq.replication")

_CLOCK = SystemClock()  # of time limits

CONNECTIONS_MAX = 4  # at once; others are closed
HANDSHAKE_S = 5.0
_CONNECT_S = 3.0
_ACCEPT_AGAIN_S = 0.1
_PIECE_BYTES = 1024 * 1024
_SIZE = struct.Struct(">I")


class SocketChannel:
    """Messages on one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, body: bytes, timeout_s: float) -> None:
        """Send a message."""
        try:
            self._connection.settimeout(timeout_s)
            self._connection.sendall(_SIZE.pack(len(body)) + body)
        except OSError as error:
            raise _broken(error) from error

    def receive(self, size_max: int, timeout_s: float) -> bytes:
        """Return the next message; ``timeout_s`` bounds all of it."""
        until_s = _CLOCK.monotonic_s() + timeout_s
        (size,) = _SIZE.unpack(self._read(_SIZE.size, until_s))
        if size > size_max:
            raise LinkBroken(f"the other side sent a message of {size} bytes, the limit is {size_max}")
        return self._read(size, until_s)

    def close(self) -> None:
        """End the connection, and the calls that wait for it."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            self._connection.close()

    def _read(self, size: int, until_s: float) -> bytes:
        data = bytearray()
        try:
            while len(data) < size:
                left_s = until_s - _CLOCK.monotonic_s()
                if left_s <= 0:
                    raise TimeoutError("timed out")
                self._connection.settimeout(left_s)
                piece = self._connection.recv(min(size - len(data), _PIECE_BYTES))
                if not piece:
                    raise LinkBroken("the other side closed the connection")
                data += piece
        except OSError as error:
            raise _broken(error) from error
        return bytes(data)


def dial(host: str, port: int, context: ssl.SSLContext | None) -> LinkChannel:
    """Connect to a standby; raise ``LinkBroken``. The certificate must name ``host``."""
    try:
        connection = socket.create_connection((host, port), _CONNECT_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context is not None:
                connection = context.wrap_socket(connection, server_hostname=host)
        except BaseException:
            connection.close()
            raise
    except (OSError, ValueError) as error:
        raise _broken(error) from error
    return SocketChannel(connection)


class LinkListener:
    """Port of the direct link of a standby."""

    def __init__(self, host: str, port: int, context: Callable[[], ssl.SSLContext | None]) -> None:
        """``context`` returns the TLS context for the next connection, None for plain TCP."""
        self._host, self._port = host, port
        self._context = context
        self._listening: socket.socket | None = None
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._count = 0  # of connections
        self._closed = threading.Event()

    def start(self, serve: Callable[[LinkChannel], None]) -> int:
        """Listen, and serve each connection in a thread of its own; return the port. Raise ``AddressInUse``."""
        try:
            is_ipv6 = ":" in self._host
            family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
            listening = self._listening = socket.create_server((self._host, self._port), family=family)
        except OSError as error:
            kind = AddressInUse if error.errno == errno.EADDRINUSE else DmqError
            raise kind(
                f"cannot listen on {self._host}:{self._port} (direct link): {error.strerror or error}: "
                "set replica_link to a free address of this host"
            ) from error
        threading.Thread(target=self._accept, args=(listening, serve), name="dmq-link-port", daemon=True).start()
        return int(listening.getsockname()[1])

    def close(self) -> None:
        """Close the port and all connections."""
        with self._lock:
            self._closed.set()
            connections = list(self._open)
        if self._listening is not None:
            with suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)  # ends the accept
            self._listening.close()
        for each in connections:
            SocketChannel(each).close()

    def _accept(self, listening: socket.socket, serve: Callable[[LinkChannel], None]) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = listening.accept()
            except OSError:  # closed, or no descriptor is left
                self._closed.wait(_ACCEPT_AGAIN_S)
                continue
            with self._lock:
                is_refused = self._closed.is_set() or self._count >= CONNECTIONS_MAX
                if not is_refused:
                    self._count += 1
                    self._open.add(connection)
            if is_refused:
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection, serve), name="dmq-link-standby", daemon=True).start()

    def _serve(self, connection: socket.socket, serve: Callable[[LinkChannel], None]) -> None:
        peer = connection
        try:
            connection.settimeout(HANDSHAKE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            context = self._context()
            if context is not None:
                peer = context.wrap_socket(connection, server_side=True)
                with self._lock:
                    self._open.add(peer)
            serve(SocketChannel(peer))
        except (OSError, DmqError) as error:
            log.warning("link_refused", why=str(_broken(error)) if isinstance(error, OSError) else str(error))
        finally:
            peer.close()
            with self._lock:
                self._count -= 1
                self._open -= {connection, peer}


def _broken(error: Exception) -> LinkBroken:
    if isinstance(error, ssl.SSLCertVerificationError):
        return LinkBroken(f"the certificate of the other side is not accepted: {error.verify_message}")
    if isinstance(error, TimeoutError):
        return LinkBroken("the other side did not answer in time")
    return LinkBroken(str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error))
