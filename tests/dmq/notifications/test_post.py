"""One POST to a real server that answers well, badly, slowly, endlessly or not at all."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from pathlib import Path

import pytest
from support.rigs.services.webhooks import Receiver, answer, receiving

from broker_adapter.runtime.clock import SystemClock
from dmq.config.destinations import WebhookUrl, parse_destination
from dmq.notifications.post import NotDelivered, is_public, post
from dmq.rocketmq_server.transport.tls import self_signed

DEADLINE_S = 30.0
SHORT_S = 0.5


def send(url: str, *, allows_private: bool = True, deadline_s: float = DEADLINE_S) -> None:
    parsed = parse_destination(url)
    assert isinstance(parsed, WebhookUrl)
    headers = {"Content-Type": "application/json"}
    post(parsed, headers, b"{}", clock=SystemClock(), allows_private=allows_private, deadline_s=deadline_s)


def test_the_request_is_plain_http() -> None:
    """Path and query of the URL, the host with its port, a length."""
    with receiving() as receiver:
        send(receiver.url + "?token=1")
        webhook = receiver.next()
    assert webhook.line == "POST /hooks?token=1 HTTP/1.1"
    assert webhook.headers["host"] == f"127.0.0.1:{receiver.port}"
    assert (webhook.headers["content-length"], webhook.body) == ("2", b"{}")


@pytest.mark.parametrize("status", [200, 201, 204, 299])
def test_a_success_is_a_success(status: int) -> None:
    """Any status of 200 to 299."""
    with receiving() as receiver:
        receiver.answers.put(answer(status))
        send(receiver.url)


@pytest.mark.parametrize("status", [400, 401, 404, 410, 429, 500, 503])
def test_an_error_is_a_failure(status: int) -> None:
    """The status is in the text, and the path of the URL is not."""
    with receiving() as receiver:
        receiver.answers.put(answer(status))
        with pytest.raises(NotDelivered, match=f"answered with status {status}$") as caught:
            send(receiver.url)
    assert "hooks" not in str(caught.value)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status: int) -> None:
    """Its target gets no connection."""
    with receiving() as receiver, receiving() as target:
        receiver.answers.put(answer(status, f"Location: {target.url}"))
        with pytest.raises(NotDelivered, match="a redirect is not followed"):
            send(receiver.url)
        assert target.connections == 0


def test_a_huge_answer_is_not_read() -> None:
    """A success with 1 GB of body is a success, and no more of it arrives than sockets hold."""
    sent: list[int] = []

    def endless(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        with suppress(OSError):
            sent.extend(connection.send(b"x" * 1_000_000) for _ in range(1000))

    with receiving() as receiver:
        receiver.answers.put(endless)
        send(receiver.url)
    assert sum(sent) < 1_000_000_000


def _dribble(connection: socket.socket) -> None:
    """Send a header that never ends, one byte at a time."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nx: ")
    connection.settimeout(0.02)
    while True:
        with suppress(TimeoutError):
            if not connection.recv(1):
                return
        connection.sendall(b"y")


def _keep_continuing(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")


def _say_nothing(connection: socket.socket) -> None:
    connection.recv(1)


@pytest.mark.parametrize("behaviour", [_dribble, _keep_continuing, _say_nothing])
def test_a_slow_answer_ends_at_the_deadline(behaviour: object) -> None:
    """Also if each single read is fast."""
    assert callable(behaviour)
    with receiving() as receiver:
        receiver.answers.put(behaviour)
        with pytest.raises(NotDelivered, match=r"no answer within 0\.5 s"):
            send(receiver.url, deadline_s=SHORT_S)


def test_a_handshake_that_never_ends_is_cut_at_the_deadline() -> None:
    """A server that accepts and speaks no TLS."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/"
        with pytest.raises(NotDelivered, match=r"no answer within 0\.5 s"):
            send(url, deadline_s=SHORT_S)


def test_a_certificate_must_be_valid(tmp_path: Path) -> None:
    """A self-signed one is refused before a byte of the request is sent."""
    certificate, key = self_signed(tmp_path, SystemClock().now_ms())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with receiving(context) as receiver:
        with pytest.raises(NotDelivered, match="the certificate is not valid"):
            send(receiver.url)
        assert receiver.webhooks.empty()


def test_an_answer_that_is_no_http_is_a_failure() -> None:
    """Nor is a connection that closes without an answer a success."""
    with receiving() as receiver:
        for wrong in (b"", b"220 mail.example ESMTP\r\n", b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n"):
            receiver.answers.put(wrong)
            with pytest.raises(NotDelivered):
                send(receiver.url)


def test_an_unused_port_and_an_unknown_name_are_failures() -> None:
    """With their reasons."""
    with receiving() as receiver:
        pass
    with pytest.raises(NotDelivered, match="refused"):
        send(receiver.url)
    with pytest.raises(NotDelivered, match="the host name is not known"):
        send("http://no-such-host.invalid/")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "10.1.2.3", "192.168.0.1", "169.254.169.254"])
def test_private_addresses_get_no_connection(host: str) -> None:
    """Unless the configuration allows them; the server here is one."""
    with receiving() as receiver:
        with pytest.raises(NotDelivered, match="a private network or of this host is not allowed"):
            send(f"http://{host}:{receiver.port}/", allows_private=False)
        assert receiver.connections == 0


def test_a_name_that_changes_after_the_check_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection goes to the address that was checked: the name is resolved once for each POST."""
    asked: list[object] = []

    def rebinding(*arguments: object, **_: object) -> list[object]:
        asked.append(arguments[0])
        address = "192.0.2.1" if len(asked) == 1 else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, receiver.port))]

    with receiving() as receiver:
        monkeypatch.setattr(socket, "getaddrinfo", rebinding)
        monkeypatch.setattr("dmq.notifications.post.is_public", lambda address: address == "192.0.2.1")
        with pytest.raises(NotDelivered):
            send(f"http://rebinding.example:{receiver.port}/", allows_private=False, deadline_s=SHORT_S)
        assert (asked, receiver.connections) == (["rebinding.example"], 0)


@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0", "10.0.0.1", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.16.0.1", "192.168.1.1"),
        *("192.0.0.1", "224.0.0.1", "255.255.255.255", "::", "::1", "fe80::1%eth0", "fc00::1", "ff02::1"),
        *(
            "::127.0.0.1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "64:ff9b::10.0.0.1",
            "2002:7f00:1::",
            "2002:0a00:0001::1",
        ),
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    """Of private networks, of this host, of a group, and each of them within an IPv6 address."""
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::1.1.1.1"]
)
def test_addresses_that_are_public(address: str) -> None:
    """Those of the Internet."""
    assert is_public(address)


def test_a_receiver_gets_no_second_request_of_one_post() -> None:
    """A connection that ends without an answer is not repeated here: the notifier decides that."""
    with receiving() as receiver:
        receiver.answers.put(b"")
        with pytest.raises(NotDelivered):
            send(receiver.url)
        assert _count(receiver) == 1


def _count(receiver: Receiver) -> int:
    receiver.next()
    return receiver.connections
