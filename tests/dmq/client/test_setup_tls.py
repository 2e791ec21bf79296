"""TLS in the command and the clients: who is trusted, who is shown, and what is said when it fails."""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

import pytest
from support.rigs.daemon.certificates import Signed, signed
from support.rigs.daemon.process import Daemon, run_command

from dmq.admin.client import AdminClient, DaemonUnavailable
from dmq.client import SidecarClient
from dmq.config.contexts import ClientTls, ContextError
from retry.sink import SinkUnavailable

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    """The authority that signs what is right here."""
    return signed(tmp_path_factory.mktemp("tls"), "ours")


def served(certificate: Signed, client_ca: Path | None = None) -> dict[str, str]:
    found = {"DMQ_TLS_CERTIFICATE": str(certificate.certificate), "DMQ_TLS_KEY": str(certificate.key)}
    return found | ({"DMQ_TLS_CLIENT_CA": str(client_ca)} if client_ca else {})


def failure(address: str, tls: ClientTls | None) -> str:
    """What the command's client says; the hook's says the same."""
    with AdminClient(address, tls=tls) as client, pytest.raises(DaemonUnavailable) as told:
        client.status()
    with SidecarClient(address, tls=tls) as sink, pytest.raises(SinkUnavailable) as told_hook:
        sink.stats()
    assert str(told.value) == str(told_hook.value)
    return str(told.value)


def test_the_command_and_the_hook_speak_tls(tmp_path: Path, ours: Signed, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the right authority, certificate and name; a context serves both; each thing that is wrong is named."""
    here, there = signed(tmp_path, "here", ours.pair), signed(tmp_path, "there")
    mine, foreign = signed(tmp_path, "mine", ours.pair), signed(tmp_path, "foreign", there.pair)
    stale = signed(tmp_path, "stale", ours.pair, days=-1)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    ca, who = ours.certificate, (mine.certificate, mine.key)
    with Daemon(tmp_path / "data", env=served(here, ca)) as daemon:
        by_name = f"localhost:{daemon.port}"
        options = ("--tls-ca", str(ca), "--tls-cert", str(who[0]), "--tls-key", str(who[1]))
        assert run_command("--address", by_name, *options, "status").returncode == 0
        kept = run_command(
            *("context", "add", "here", "--address", daemon.address, *options, "--tls-server-name", "localhost")
        )
        assert kept.returncode == 0, kept.stderr
        assert run_command("status", "--context", "here").returncode == 0
        with SidecarClient.from_context("here") as sink:
            assert sink.stats() is not None
        assert "wants a client certificate" in failure(by_name, ClientTls(ca=ca))
        for wrong in (foreign, stale):
            told = failure(by_name, ClientTls(ca=ca, certificate=wrong.certificate, key=wrong.key))
            assert f"refuses the client certificate {wrong.certificate}" in told
        trusting = ClientTls(ca=there.certificate, certificate=who[0], key=who[1])
        assert f"not signed by the authority {there.certificate}" in failure(by_name, trusting)
        nameless = ClientTls(ca=ca, certificate=who[0], key=who[1])
        assert "is not for '127.0.0.1'" in failure(daemon.address, nameless)
        shown = run_command("--address", by_name, "--tls-ca", str(there.certificate), "status")
        lines = [line for line in shown.stderr.splitlines() if not line.startswith("I")]  # of gRPC, if it is a fork
        assert (shown.returncode, len(lines)) == (6, 1), shown.stderr
        daemon.stop()


def test_an_expired_certificate_and_a_plain_port_are_named(tmp_path: Path, ours: Signed) -> None:
    """What the daemon's side has wrong is told as that."""
    with Daemon(tmp_path / "old", env=served(signed(tmp_path, "old", ours.pair, days=-1))) as daemon:
        assert "has expired" in failure(f"localhost:{daemon.port}", ClientTls(ca=ours.certificate))
        daemon.stop()
    with Daemon(tmp_path / "plain", env={"DMQ_TLS_CERTIFICATE": "off"}) as daemon:
        assert "speaks no TLS" in failure(f"localhost:{daemon.port}", ClientTls(ca=ours.certificate))
        daemon.stop()


def test_a_port_that_speaks_tls_only_is_named(tmp_path: Path, ours: Signed) -> None:
    """A client in plain text is told what to try."""
    here = signed(tmp_path, "here", ours.pair)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(here.certificate, here.key)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    try:
                        context.wrap_socket(connection, server_side=True)
                    except OSError:
                        continue

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert "--tls-ca" in failure(f"127.0.0.1:{listener.getsockname()[1]}", None)
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def test_files_that_cannot_be_used_are_named_before_a_call(tmp_path: Path, ours: Signed) -> None:
    """Missing, no certificate, and a key of another certificate."""
    mine, other = signed(tmp_path, "mine", ours.pair), signed(tmp_path, "other", ours.pair)
    for tls, said in (
        (ClientTls(ca=tmp_path / "no.pem"), "no.pem cannot be read"),
        (ClientTls(ca=mine.key), "mine.key cannot be used"),
        (ClientTls(ca=ours.certificate, certificate=mine.certificate, key=other.key), "cannot be used: KEY_VALUES"),
    ):
        with pytest.raises(ContextError, match=said):
            AdminClient("127.0.0.1:1", tls=tls)
