"""TLS on the daemon's port: made by itself, configured, exchanged while it runs, refused clearly."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from structlog.testing import capture_logs
from support.clients.wire.client import WireClient, a_message
from support.rigs.daemon.certificates import Signed, signed
from support.rigs.daemon.process import Daemon, run_command, run_to_end

from broker_adapter.runtime.clock import ManualClock, SystemClock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.http2 import Http2Server
from dmq.rocketmq_server.transport import tls
from dmq.rocketmq_server.transport.tls import CertificateError, Certificates, self_signed

pytestmark = pytest.mark.integration


def serial_of(port: int) -> int:
    """Return the serial number of the certificate that the port shows, whoever signed it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), 5) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        assert secure.selected_alpn_protocol() == "h2"
        shown = secure.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


def test_one_port_serves_tls_and_plain_text(tmp_path: Path) -> None:
    """Without a setting a certificate is made, kept over restarts, and a client that trusts it is served."""
    with Daemon(tmp_path / "data") as daemon:
        trusted = (tmp_path / "data" / "tls" / "certificate.pem").read_bytes()
        assert (tmp_path / "data" / "tls" / "key.pem").stat().st_mode & 0o777 == 0o600
        with grpc.secure_channel(
            f"localhost:{daemon.port}", grpc.ssl_channel_credentials(root_certificates=trusted)
        ) as channel:
            method = wire.METHODS["SendMessage"]
            send: Any = channel.unary_unary(method.path, response_deserializer=method.response_class.FromString)
            request = wire.SendMessageRequest(messages=[a_message("orders", "m-1", b"body")])
            answer: Any = send(request.SerializeToString(), timeout=10, metadata=(("x-mq-client-id", "secure"),))
        assert answer.status.code == wire.OK
        with WireClient(daemon.address) as plain:
            assert [each.message_id for each in plain.receive("orders", "group", wait_s=5)] == ["m-1"]
        before = serial_of(daemon.port)
        daemon.stop()
        daemon.restart()
        assert serial_of(daemon.port) == before


def test_a_new_certificate_needs_no_restart(tmp_path: Path) -> None:
    """Files that change are read for the next connection; wrong ones leave the old certificate in use, with a word."""
    clock = ManualClock(SystemClock().now_ms())
    certificate, key = self_signed(tmp_path / "tls", clock.now_ms())
    found = Certificates(certificate, key, clock)
    first = found.context()
    clock.advance(2_000)
    assert found.context() is first
    other = self_signed(tmp_path / "other", clock.now_ms())
    other[1].replace(key)
    clock.advance(2_000)
    with capture_logs() as said:
        assert found.context() is first, "a key that does not fit"
    assert [each["event"] for each in said] == ["certificate_load_failed"]
    assert str(key) in found.problem
    other[0].replace(certificate)
    clock.advance(2_000)
    assert found.context() is not first
    assert not found.problem


def test_a_kill_while_a_certificate_is_made_leaves_none_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody removed the key; the run that made a new one died before the certificate: the next one makes both."""
    clock = SystemClock()
    certificate, key = self_signed(tmp_path, clock.now_ms())
    key.unlink()

    def die_at_the_certificate(path: Path, content: bytes, _: int) -> None:
        if path == certificate:
            raise KeyboardInterrupt
        path.write_bytes(content)

    with monkeypatch.context() as patched:
        patched.setattr(tls, "_write", die_at_the_certificate)
        with pytest.raises(KeyboardInterrupt):
            self_signed(tmp_path, clock.now_ms())
    assert key.exists()
    Certificates(*self_signed(tmp_path, clock.now_ms()), clock).context()


def test_a_certificate_near_its_expiry_is_reported(tmp_path: Path) -> None:
    """A warning when it is read within its last month."""
    made_ms = round((datetime.now(UTC) - timedelta(days=3640)).timestamp() * 1000)
    certificate, key = self_signed(tmp_path, made_ms)
    with capture_logs() as said:
        Certificates(certificate, key, SystemClock()).context()
    assert (said[0]["event"], said[0]["days"]) == ("certificate_expires", 9)


def test_clients_must_show_a_certificate(tmp_path: Path) -> None:
    """One of the right authority is served, none and one of another are not; the command on this machine is."""
    ours, others = signed(tmp_path, "ours"), signed(tmp_path, "others")
    server, good, bad = (
        signed(tmp_path, name, by.pair) for name, by in (("server", ours), ("good", ours), ("bad", others))
    )
    env = {
        **os.environ,
        "DMQ_TLS_CERTIFICATE": str(server.certificate),
        "DMQ_TLS_KEY": str(server.key),
        "DMQ_TLS_CLIENT_CA": str(ours.certificate),
    }
    method = wire.METHODS["QueryRoute"]
    request = wire.QueryRouteRequest(topic=wire.Resource(name="orders"))

    def code_for(client: Signed | None) -> object:
        shown = (client.key.read_bytes(), client.certificate.read_bytes()) if client else (None, None)
        credentials = grpc.ssl_channel_credentials(ours.certificate.read_bytes(), *shown)
        with grpc.secure_channel(f"localhost:{daemon.port}", credentials) as channel:
            call: Any = channel.unary_unary(method.path, response_deserializer=method.response_class.FromString)
            try:
                answer = call(request.SerializeToString(), timeout=10, metadata=(("x-mq-client-id", "secure"),))
            except grpc.RpcError as error:
                return error.code()
            return answer.status.code

    with Daemon(tmp_path / "data", env=env) as daemon:
        assert code_for(good) == wire.OK
        assert (code_for(None), code_for(bad)) == (grpc.StatusCode.UNAVAILABLE,) * 2
        assert run_command("--address", daemon.address, "status").returncode == 0
        daemon.stop()


@pytest.mark.parametrize("more", [{"DMQ_TLS_CERTIFICATE": "off"}, {"DMQ_TRANSPORT": "grpcio"}])
def test_client_certificates_without_tls_are_refused(
    tmp_path: Path, more: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks for them must not be left without."""
    for name, value in {"DMQ_TLS_CLIENT_CA": str(tmp_path / "ca.pem"), **more}.items():
        monkeypatch.setenv(name, value)
    ended = run_to_end(tmp_path / "data", "127.0.0.1:0")
    assert ended.returncode == 2
    assert "tls_client_ca" in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize("form", [serialization.PrivateFormat.PKCS8, serialization.PrivateFormat.TraditionalOpenSSL])
def test_a_key_with_a_passphrase_is_refused_without_a_prompt(
    tmp_path: Path, form: serialization.PrivateFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever typed it at the start would not be there when the files are read again."""
    made = signed(tmp_path, "server")
    locked = serialization.BestAvailableEncryption(b"secret")
    made.key.write_bytes(made.pair[1].private_bytes(serialization.Encoding.PEM, form, locked))
    asked: list[object] = []
    load = ssl.SSLContext.load_cert_chain

    def noting(self: ssl.SSLContext, *args: Any, **more: Any) -> None:  # noqa: ANN401
        asked.append(more.get("password"))
        load(self, *args, **{"password": "", **more})

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", noting)
    with pytest.raises(CertificateError, match="passphrase"):
        Certificates(made.certificate, made.key, SystemClock()).context()
    assert asked == [""]


@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"])
def test_a_certificate_that_cannot_be_used_keeps_the_daemon_from_starting(
    tmp_path: Path, content: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that names the file, and exit code 1."""
    path = tmp_path / "mine.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CertificateError, match=str(path)):
        Certificates(path, path, SystemClock()).context()
    monkeypatch.setenv("DMQ_TLS_CERTIFICATE", str(path))
    ended = run_to_end(tmp_path / "data", "127.0.0.1:0")
    assert ended.returncode == 1
    assert str(path) in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def opened(port: int, server_ca: Signed, client: Signed) -> ssl.SSLSocket:
    """A connection of a client with its certificate, on which HTTP/2 has begun."""
    context = ssl.create_default_context(cafile=str(server_ca.certificate))
    context.load_cert_chain(client.certificate, client.key)
    context.set_alpn_protocols(["h2"])
    with ExitStack() as closing:  # in TLS 1.3 a refused certificate is found out by the first read
        plain = closing.enter_context(socket.create_connection(("localhost", port), 30))
        found = closing.enter_context(context.wrap_socket(plain, server_hostname="localhost"))
        found.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
        if not found.recv(1):
            raise ConnectionResetError
        closing.pop_all()
    return found


def wait_for_end(connection: ssl.SSLSocket) -> None:
    """Read until the other side has ended the connection."""
    with suppress(ConnectionError, ssl.SSLError):
        while connection.recv(4096):
            pass


def test_a_connection_ends_with_its_client_certificate(tmp_path: Path) -> None:
    """While it is open the certificate expires; a connection of one that is valid for longer goes on."""
    clock = ManualClock(SystemClock().now_ms())
    authority = signed(tmp_path, "authority", days=90)
    server, short, long = (
        signed(tmp_path, name, authority.pair, days=days) for name, days in (("server", 90), ("short", 1), ("long", 90))
    )
    certificates = Certificates(server.certificate, server.key, clock, authority.certificate)

    async def scenario() -> None:
        http2 = Http2Server(
            {},
            host="127.0.0.1",
            port=0,
            monotonic_s=SystemClock().monotonic_s,
            tls=certificates.context,
            certificate_fault=certificates.fault,
        )
        port = await http2.start()
        first, second = [await asyncio.to_thread(opened, port, authority, each) for each in (short, long)]
        with capture_logs() as said:
            clock.advance(2 * 24 * 3_600_000)
            await asyncio.to_thread(wait_for_end, first)
        assert [each["reason"] for each in said if each["log_level"] == "warning"] == ["expired"]
        assert http2.figures().connections == 1
        for each in (first, second):
            each.close()
        await http2.stop(0)

    asyncio.run(scenario())


@pytest.mark.parametrize("processes", ["1", "2"])
def test_connections_end_when_an_authority_is_removed(tmp_path: Path, processes: str) -> None:
    """An authority that is added ends none; one that is removed does, and its clients cannot come back."""
    ours, others = signed(tmp_path, "ours"), signed(tmp_path, "others")
    server, ending, lasting = (
        signed(tmp_path, name, by.pair) for name, by in (("server", ours), ("ending", others), ("lasting", ours))
    )
    trusted = tmp_path / "trusted.pem"

    def trust(*authorities: Signed) -> None:
        part = tmp_path / "trusted.part"
        part.write_bytes(b"".join(each.certificate.read_bytes() for each in authorities))
        part.replace(trusted)

    trust(others)
    env = {
        "DMQ_TLS_CERTIFICATE": str(server.certificate),
        "DMQ_TLS_KEY": str(server.key),
        "DMQ_TLS_CLIENT_CA": str(trusted),
        "DMQ_PROCESSES": processes,
    }
    with Daemon(tmp_path / "data", env=env) as daemon:
        connection = opened(daemon.port, ours, ending)
        trust(others, ours)
        later: ssl.SSLSocket | None = None
        while later is None:  # until the files are read again
            with suppress(ConnectionError, ssl.SSLError):
                later = opened(daemon.port, ours, lasting)
        connection.sendall(bytes((0, 0, 8, 6, 0, 0, 0, 0, 0)) + b"answer..")
        assert connection.recv(4096), "an authority more ends no connection"
        trust(ours)
        wait_for_end(connection)
        with pytest.raises((ConnectionError, ssl.SSLError)):
            opened(daemon.port, ours, ending)
        with opened(daemon.port, ours, lasting) as again:
            assert again.version()
        for each in (connection, later):
            each.close()
        daemon.stop()
        assert "authority_removed" in daemon.log()
