"""TLS as the official clients speak it by themselves or when told to, and what they think of a certificate.

That of the daemon's own making is what Go and Java meet in all other modules that drive them.
"""

from __future__ import annotations

import os
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.clients.official.client import LANGUAGES, NODE, PYTHON, ClientError, Language, OfficialClient, require
from support.rigs.daemon.process import Daemon

from dmq.rocketmq_server.transport.tls import self_signed

pytestmark = pytest.mark.integration

TLS_BYTE, PLAIN_BYTE = b"\x16", b"P"  # of a handshake, and of HTTP/2's preface
TLS_LANGUAGES = tuple(language for language in LANGUAGES if language.tls)
_ELEVEN_YEARS_MS = 11 * 366 * 86_400_000


class Wiretap(socketserver.ThreadingTCPServer):
    """Passes connections on to the daemon and keeps the first byte of each; the route it answers leads back here."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.port = port
        self.first_bytes: set[bytes] = set()

    @property
    def address(self) -> str:
        """Where clients go."""
        return f"127.0.0.1:{self.socket.getsockname()[1]}"


class _Connection(socketserver.BaseRequestHandler):
    server: Wiretap

    def handle(self) -> None:
        first = self.request.recv(1, socket.MSG_PEEK)
        self.server.first_bytes.add(first)
        with socket.create_connection(("127.0.0.1", self.server.port)) as upstream:
            back = threading.Thread(target=_pass_on, args=(upstream, self.request), daemon=True)
            back.start()
            _pass_on(self.request, upstream)
            back.join()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while said := source.recv(65536):
            sink.sendall(said)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@contextmanager
def tapped(daemon: Daemon) -> Iterator[Wiretap]:
    """Listen in on the clients of a daemon."""
    with Wiretap(daemon.port) as tap:
        thread = threading.Thread(target=tap.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield tap
        finally:
            tap.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def expired(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon whose certificate signs itself and expired a year ago."""
    made_ms = time.time_ns() // 1_000_000 - _ELEVEN_YEARS_MS
    certificate, key = self_signed(tmp_path_factory.mktemp("tls"), made_ms)
    env = {**os.environ, "DMQ_TLS_CERTIFICATE": str(certificate), "DMQ_TLS_KEY": str(key)}
    with Daemon(tmp_path_factory.mktemp("daemon") / "data", env=env) as daemon:
        yield daemon
        daemon.stop()


def go_round(language: Language, home: Path, address: str, tls: str) -> None:
    """Send a message and receive it."""
    require(language)
    topic = f"tls-{language.name}-{tls}"
    with OfficialClient(language, home, address, tls=tls) as process:
        process.start("p", "producer", topic)
        process.start("c", "simple", topic, group=topic)
        message_id = process.send("p", topic)
        (found,) = process.receive_until("c", 1)
        assert found["message_id"] == message_id


@pytest.mark.parametrize("language", TLS_LANGUAGES, ids=lambda language: language.name)
def test_go_and_java_speak_tls_and_accept_any_certificate(language: Language, tmp_path: Path, expired: Daemon) -> None:
    """Nobody tells them to; the certificate is not even valid any more."""
    with tapped(expired) as tap:
        go_round(language, tmp_path, tap.address, "")
    assert tap.first_bytes == {TLS_BYTE}


@pytest.mark.parametrize(
    "language", [each for each in TLS_LANGUAGES if "plain" not in each.lacks], ids=lambda language: language.name
)
def test_tls_can_be_turned_off(language: Language, tmp_path: Path, expired: Daemon) -> None:
    """As docs/reference/clients.md says; the same port then serves plain text."""
    with tapped(expired) as tap:
        go_round(language, tmp_path, tap.address, "off")
    assert tap.first_bytes == {PLAIN_BYTE}


@pytest.mark.parametrize("language", [PYTHON, NODE], ids=lambda language: language.name)
def test_a_client_that_checks_refuses_a_certificate_that_signs_itself(
    language: Language, tmp_path: Path, daemon: Daemon
) -> None:
    """Python and Node trust the authorities of the system only; told to speak TLS, they do not start."""
    with tapped(daemon) as tap, pytest.raises(ClientError):
        go_round(language, tmp_path, tap.address, "on")
    assert tap.first_bytes == {TLS_BYTE}
