"""Connections of the direct link: certificates, sizes, slow and silent peers."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from queue import Queue

import pytest
from support.rigs.daemon.certificates import Signed, signed

from dmq.errors import AddressInUse
from dmq.http2 import make_context
from dmq.replication.link import LinkBroken, LinkChannel, LinkListener, dial
from dmq.replication.link.sockets import CONNECTIONS_MAX, SocketChannel

pytestmark = pytest.mark.integration
WAIT_S = 30.0


class Server:
    """Port that puts each message, or the reason of the end, into ``seen``."""

    def __init__(self, context: Callable[[], ssl.SSLContext | None] = lambda: None) -> None:
        self.seen: Queue[bytes | str] = Queue()
        self._listener = LinkListener("127.0.0.1", 0, context)
        self.port = self._listener.start(self._serve)

    def close(self) -> None:
        self._listener.close()

    def _serve(self, channel: LinkChannel) -> None:
        try:
            while True:
                body = channel.receive(100, WAIT_S)
                channel.send(body, WAIT_S)
                self.seen.put(body)
        except LinkBroken as error:
            self.seen.put(str(error))
            raise


@pytest.fixture
def server() -> Iterator[Server]:
    """Return a port without TLS."""
    found = Server()
    yield found
    found.close()


def client_context(authority: Signed, own: Signed | None) -> ssl.SSLContext:
    """Return the TLS context of a client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority.certificate)
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    return context


def exchange(port: int, context: ssl.SSLContext) -> None:
    """Send a message and read the answer."""
    with closing(dial("localhost", port, context)) as channel:
        channel.send(b"a", WAIT_S)
        channel.receive(100, WAIT_S)


def test_messages_arrive_whole(server: Server) -> None:
    """Also an empty one, and one that is sent byte by byte."""
    channel = dial("127.0.0.1", server.port, None)
    for body in (b"a", b"", b"b" * 100):
        channel.send(body, WAIT_S)
        assert channel.receive(100, WAIT_S) == body
    channel.close()
    assert [server.seen.get(timeout=WAIT_S) for _ in range(3)] == [b"a", b"", b"b" * 100]
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        for each in struct.pack(">I", 3) + b"abc":
            slow.send(bytes([each]))
        assert slow.recv(100)
        seen = {server.seen.get(timeout=WAIT_S) for _ in range(2)}  # with the end of the first connection
    assert b"abc" in seen


def test_a_large_message_ends_the_connection_before_it_is_read(server: Server) -> None:
    """Four bytes are enough for the refusal, so a peer cannot fill the memory."""
    with socket.create_connection(("127.0.0.1", server.port)) as peer:
        peer.sendall(b"\xff\xff\xff\xff")
        assert "4294967295 bytes, the limit is 100" in str(server.seen.get(timeout=WAIT_S))
        assert peer.recv(1) == b""


def test_a_slow_peer_times_out() -> None:
    """The time limit covers the whole message, not each byte."""
    left, right = socket.socketpair()
    channel = SocketChannel(left)
    stop = threading.Event()

    def trickle() -> None:
        right.sendall(struct.pack(">I", 100_000))
        while not stop.wait(0.01):
            right.send(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(LinkBroken, match="did not answer in time"):
        channel.receive(200_000, 0.3)
    stop.set()
    thread.join()
    channel.close()
    right.close()


def test_connections_are_bounded(server: Server) -> None:
    """Beyond the limit a connection is closed at once, and a free place is used again."""
    with ExitStack() as stack:
        channels = [dial("127.0.0.1", server.port, None) for _ in range(CONNECTIONS_MAX)]
        for each in channels:
            stack.callback(each.close)
            each.send(b"a", WAIT_S)
            assert each.receive(100, WAIT_S) == b"a"
        with socket.create_connection(("127.0.0.1", server.port)) as peer:
            assert peer.recv(1) == b""
        for each in channels:
            each.close()
    ends = 0
    while ends < CONNECTIONS_MAX:
        ends += isinstance(server.seen.get(timeout=WAIT_S), str)
    for _ in range(1_000):
        channel = dial("127.0.0.1", server.port, None)
        try:
            channel.send(b"b", WAIT_S)
            assert channel.receive(100, WAIT_S) == b"b"
        except LinkBroken:  # the threads of the closed connections still end
            threading.Event().wait(0.01)
        else:
            break
        finally:
            channel.close()
    else:
        pytest.fail("no place is free again")


def test_a_closed_port_ends_its_connections(server: Server) -> None:
    """The other side notices, and no new connection is accepted."""
    channel = dial("127.0.0.1", server.port, None)
    channel.send(b"a", WAIT_S)
    assert channel.receive(100, WAIT_S) == b"a"
    server.close()
    with pytest.raises(LinkBroken):
        channel.receive(100, WAIT_S)
    channel.close()
    with pytest.raises(LinkBroken):
        dial("127.0.0.1", server.port, None)


def test_a_port_in_use_is_refused(server: Server) -> None:
    """The error names the address and the setting."""
    with pytest.raises(AddressInUse, match=f"127.0.0.1:{server.port} .*replica_link"):
        LinkListener("127.0.0.1", server.port, lambda: None).start(lambda _: None)


def test_both_sides_need_a_certificate_of_the_authority(tmp_path: Path) -> None:
    """A client without one, with one of another authority, or that expects another host gets no connection."""
    ours, theirs = signed(tmp_path, "ours"), signed(tmp_path, "theirs")
    host = signed(tmp_path, "host", ours.pair)
    stranger = signed(tmp_path, "stranger", theirs.pair)
    context = make_context(str(host.certificate), str(host.key), str(ours.certificate))
    server = Server(lambda: context)
    try:
        channel = dial("localhost", server.port, client_context(ours, host))
        channel.send(b"a", WAIT_S)
        assert channel.receive(100, WAIT_S) == b"a"
        channel.close()
        assert server.seen.get(timeout=WAIT_S) == b"a"
        assert "closed the connection" in str(server.seen.get(timeout=WAIT_S))
        for own in (None, stranger):
            with pytest.raises(LinkBroken):
                exchange(server.port, client_context(ours, own))
        with pytest.raises(LinkBroken, match="certificate of the other side is not accepted"):
            dial("localhost", server.port, client_context(theirs, host))
        with pytest.raises(LinkBroken, match="certificate of the other side is not accepted"):
            dial("127.0.0.1", server.port, client_context(ours, host))
        with socket.create_connection(("127.0.0.1", server.port)) as plain:
            plain.sendall(b"\x00\x00\x00\x01a" * 10)
            with suppress(ConnectionError):
                assert b"a" not in plain.recv(100)
        assert server.seen.empty()
    finally:
        server.close()
