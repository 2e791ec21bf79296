"""Attacks on the HTTP API: pages of other sites, requests in requests, slow and large ones, hostile JSON and paths."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.effort import at_length
from support.rigs.daemon.acl import OPERATOR
from support.rigs.daemon.http_api import Api, problem_of

from dmq.http_api.app import BODY_BYTES_MAX, UNCHECKED_BYTES_MAX

pytestmark = pytest.mark.integration
_MESSAGES = "/v1/topics/orders/messages"
_JSON = {"content-type": "application/json"}
_PATIENCE_S = 120.0


def exchanged(api: Api, *parts: bytes) -> list[str]:
    """Send bytes on one connection and return the status of each answer, up to the end of the connection."""
    host, _, port = api.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=_PATIENCE_S) as connection:
        for part in parts:
            connection.sendall(part)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    return [each.decode() for each in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


def a_post(*lines: str, body: bytes = b"") -> bytes:
    """A send with these header lines."""
    head = (f"POST {_MESSAGES} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *lines, "", "")
    return "\r\n".join(head).encode("latin-1") + body


def a_get(host: str = "127.0.0.1", path: str = "/v1/status", *lines: str, version: str = "1.1") -> bytes:
    """A request whose answer is the last one of the connection."""
    head = (f"GET {path} HTTP/{version}", f"Host: {host}", "Connection: close", *lines, "", "")
    return "\r\n".join(head).encode("latin-1")


# -- pages of other sites ---------------------------------------------------------------------------------------------


def test_an_invented_key_does_not_open_another_host_name(api: Api) -> None:
    """A page under a name that leads here may send any header; without access keys in the daemon none counts."""
    for authorization in ("Bearer a:b", "MQv2-HMAC-SHA1 Credential=a, SignedHeaders=x-mq-date-time, Signature=00"):
        headers = {"host": "attacker.example", "authorization": authorization}
        problem_of(api.send("GET", "/v1/status", headers=headers), 421)
        problem_of(api.send("POST", _MESSAGES, b'{"body": "x"}', {**headers, **_JSON}), 421)


def test_a_daemon_with_keys_is_served_under_any_name(guarded: Api) -> None:
    """Behind a proxy, for example; a request without a key is refused as before."""
    assert guarded.ask("GET", "/v1/status", key=OPERATOR, headers={"host": "dmq.example"}).status == 200
    problem_of(guarded.send("GET", "/v1/status", headers={"host": "dmq.example"}), 421)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8083", "200"),
        ("[::1]:8083", "200"),
        ("LOCALHOST", "200"),
        ("api.localhost", "200"),
        ("attacker.example", "421"),
        ("127.0.0.1.attacker.example", "421"),
        ("localhost.attacker.example", "421"),
        ("0x7f000001", "421"),
        ("localhost:80@attacker.example", "400"),
        ("attacker.example@127.0.0.1", "400"),
        ("a b", "400"),
        ("[::1", "400"),
        ("127.0.0.1:port", "400"),
        ("127.0.0.1\xff", "400"),
        ("attacker.example/127.0.0.1", "400"),
    ],
)
def test_a_host_is_an_address_or_a_name_of_this_host(api: Api, host: str, status: str) -> None:
    """Anything else is another site, or no host at all."""
    assert exchanged(api, a_get(host)) == [status]


def test_a_page_of_another_site_is_refused(api: Api) -> None:
    """Even with the media type that a browser asks for first; the question itself gets no permission."""
    for origin in ("http://attacker.example", "null", "http://127.0.0.1:1", "http://[::1", ""):
        problem_of(api.send("POST", _MESSAGES, b'{"body": "x"}', {**_JSON, "origin": origin}), 403)
        problem_of(api.send("DELETE", "/v1/topics/orders", None, {"origin": origin}), 403)
        asked = {"origin": origin, "access-control-request-method": "POST"}
        answer = api.send("OPTIONS", _MESSAGES, None, asked)
        assert answer.status == 405
        assert not any(name.startswith("access-control") for name in answer.headers)
    assert api.send("POST", _MESSAGES, b'{"body": "x"}', {**_JSON, "origin": f"http://{api.address}"}).status == 201


def test_no_address_has_the_host_of_the_request(api: Api) -> None:
    """A slash too many is an unknown path, not a redirect to the host that the request names."""
    answer = api.send("GET", "/v1/topics/", headers={"host": "attacker.example"})
    assert (answer.status, "location" in answer.headers) == (404, False)


# -- the connection ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lines",
    [
        ("Content-Length: 4", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked", "Content-Length: 4"),
        ("Transfer-Encoding: chunked", "Transfer-Encoding: identity"),
        ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding : chunked",),
        ("Content-Length: 5", "Content-Length: 0"),
        ("Content-Length: +5",),
        ("Content-Length: -1",),
        ("X-A: a\0b",),
        ("Host: attacker.example",),
    ],
)
def test_a_request_with_two_meanings_ends_the_connection(api: Api, lines: tuple[str, ...]) -> None:
    """No part of its body is read as a request."""
    assert exchanged(api, a_post(*lines, body=b"0\r\n\r\n" + a_get())) == ["400"]


def test_bodies_are_no_requests(api: Api) -> None:
    """Neither that of a refused request, nor that of a GET; requests in one packet are answered in their order."""
    hidden = a_get()
    refused = a_post(f"Content-Length: {len(hidden)}").replace(b"application/json", b"text/plain")
    assert exchanged(api, refused + hidden, a_get(path="/v1/topics")) == ["415", "200"]
    with_body = a_get().replace(b"Connection: close", b"Content-Length: 5") + b"hello"
    assert exchanged(api, with_body * 3 + a_get()) == ["200"] * 4


def test_other_protocols_are_not_spoken(api: Api) -> None:
    """An upgrade is ignored, HTTP/1.0 is answered, and anything else is refused."""
    upgrade = ("Upgrade: websocket", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13")
    assert exchanged(api, a_get("127.0.0.1", "/v1/status", *upgrade)) == ["200"]
    assert exchanged(api, a_get(version="1.0")) == ["200"]
    assert exchanged(api, b"GET /v1/topics\r\n\r\n") == ["400"]
    assert exchanged(api, a_get(path="http://attacker.example/v1/status")) == ["404"]
    asked = a_post("Content-Length: 13", "Expect: 100-continue", "Connection: close")
    assert exchanged(api, asked, b'{"body": "x"}') == ["100", "201"]


@pytest.fixture(scope="module")
def slow(api: Api) -> Iterator[dict[str, list[str]]]:
    """Answers to slow clients that all begin at once, in the time that the slowest one needs."""
    parts = {
        "silent": (b"",),
        "half a header": (b"GET /v1/status HTTP/1.1\r\nHost: 127",),
        "half a second header": (a_get().replace(b"Connection: close", b"X-A: a") + b"GET /v1/st",),
        "half a body": (a_post("Content-Length: 100", body=b'{"body"'),),
    }
    with ThreadPoolExecutor(len(parts)) as pool:
        calls = {name: pool.submit(exchanged, api, *each) for name, each in parts.items()}
        yield {name: each.result() for name, each in calls.items()}


@at_length
@pytest.mark.timeout(300)
def test_a_slow_client_is_cut_off(slow: dict[str, list[str]]) -> None:
    """With the bounds of the product; ``tests/dmq/runtime/test_web_server.py`` has shorter ones."""
    assert slow == {
        "silent": [],
        "half a header": [],
        "half a second header": ["200"],
        "half a body": ["408"],
    }


def test_invalid_requests_leave_no_line_each_in_the_log(api: Api) -> None:
    """A client that sends them in a loop does not fill the disk."""
    before = api.daemon.log().count("\n")
    for _ in range(50):
        exchanged(api, b"\0\r\n\r\n")
    assert api.daemon.log().count("\n") - before < 25


# -- content ----------------------------------------------------------------------------------------------------------


def test_a_large_body_is_refused_by_its_header(api: Api) -> None:
    """Before any of it is received."""
    for length in (BODY_BYTES_MAX + 1, 10**19):
        host, _, port = api.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=_PATIENCE_S) as connection:
            connection.sendall(a_post(f"Content-Length: {length}"))
            assert connection.recv(65536).startswith(b"HTTP/1.1 413")


def test_a_large_body_of_a_stranger_is_not_read(guarded: Api) -> None:
    """Nor one without a length: memory and the work of parsing are for callers with a right key."""
    for line in (f"Content-Length: {UNCHECKED_BYTES_MAX + 1}", "Transfer-Encoding: chunked"):
        for more in ((), ("Authorization: Bearer shop:guess",)):
            host, _, port = guarded.address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=_PATIENCE_S) as connection:
                connection.sendall(a_post(line, *more))
                assert connection.recv(65536).startswith(b"HTTP/1.1 401"), (line, more)
    body = b'{"body": "' + b"x" * UNCHECKED_BYTES_MAX + b'"}'
    bearer = {"authorization": f"Bearer {OPERATOR.access_key}:{OPERATOR.secret_key}"}
    assert guarded.send("POST", _MESSAGES, body, {**_JSON, **bearer}).status == 201


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[" * 100_000, 400),
        (b'{"a":' * 100_000, 400),
        (b'{"body":"x","properties":' + b'{"a":' * 5_000 + b"1" + b"}" * 5_001, 400),
        (b'{"body":"x","delay_ms":' + b"9" * 5_000 + b"}", 400),
        (b'{"body":"x","delay_ms":9223372036854775808}', 422),
        (b'{"body":"x","delay_ms":1e400}', 422),
        (b'{"body":"x","delay_ms":NaN}', 422),
        (b'{"body":"x","delay_ms":true}', 422),
        (b'{"body":"x","delay_ms":"5"}', 422),
        (b'{"body":"\xff\xfe"}', 400),
        (b'{"body":"\\ud800"}', 400),
        (b'{"body":"x","properties":{"a":"\\ud800"}}', 400),
        (b'{"body":"x","tag":"a\\u0000b"}', 422),
        (b'{"body":"x","keys":["a\\u0000"]}', 422),
        (b'{"body":"x","message_id":"a\\u0000b"}', 422),
        (b'{"body":"x","message_id":"a\\r\\nSet-Cookie: x"}', 422),
        (b'{"body":"x","properties":{"a\\u0000":"b"}}', 422),
        (b'\xef\xbb\xbf{"body":"x"}', 400),
        ('{"body":"x"}'.encode("utf-16"), 400),
        (b'{"body":"x"} {"body":"y"}', 400),
        (b'{"__proto__":{},"body":"x"}', 422),
        (b"null", 422),
        (b"[null]", 422),
    ],
)
def test_hostile_json_is_an_error_of_the_caller(api: Api, body: bytes, status: int) -> None:
    """Deep, huge, ambiguous and invalid values: no internal error, and nothing is sent."""
    problem_of(api.send("POST", _MESSAGES, body, _JSON), status)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/topics/../status", "404"),
        ("/v1/topics/%2e%2e/status", "404"),
        ("/v1/topics/..%2f..%2fetc/messages", "404"),
        ("//v1/status", "404"),
        ("/v1//status", "404"),
        ("/V1/status", "404"),
        ("/v1/topics/a%00b", "422"),
        ("/v1/topics/%ff%fe", "422"),
        ("/v1/topics/%c0%ae%c0%ae/messages", "422"),
        ("/v1/topics/orders%3fa", "422"),
        ("/v1/topics/orders;x=y", "422"),
        ("/v1/topics/%zz", "404"),
        ("/v1/topics/" + "a" * 15_000, "422"),
        (f"{_MESSAGES}/%2e%2e%2f%2e%2e", "404"),
        (f"{_MESSAGES}/a%0d%0aSet-Cookie:x", "404"),
        ("/v1/topics?limit=1e3", "422"),
        ("/v1/topics?limit=99999999999999999999", "422"),
        ("/v1/topics?limit=%D9%A3", "422"),
        ("/v1/topics?limit=1;token=x", "422"),
        ("/v1/topics?%00=1", "422"),
        ("*", "404"),
    ],
)
def test_hostile_paths_lead_nowhere(api: Api, path: str, status: str) -> None:
    """Encodings, dots, signs and lengths: the path is one of the routes, literally, or none."""
    assert exchanged(api, a_get(path=path)) == [status]
