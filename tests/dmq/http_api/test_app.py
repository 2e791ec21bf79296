"""Limits, routing and errors of the HTTP API."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest
from support.rigs.daemon.http_api import Api, api_of, problem_of, serving

from broker_adapter.contracts.limits import BODY_BYTES_MAX
from dmq.http_api.app import BODY_BYTES_MAX as REQUEST_BYTES_MAX

pytestmark = pytest.mark.integration
_MESSAGES = "/v1/topics/orders/messages"
_JSON = {"content-type": "application/json"}


def test_a_request_over_the_limit_is_413(api: Api) -> None:
    """With its length in a header, and without."""
    problem_of(api.send("POST", _MESSAGES, b" " * (REQUEST_BYTES_MAX + 1), _JSON), 413)


def test_a_message_over_the_limit_is_413(api: Api) -> None:
    """The limit of the daemon, by its rule; a byte less is sent."""
    problem = api.refused(413, "POST", _MESSAGES, {"body": "x" * (BODY_BYTES_MAX + 1)})
    assert problem["type"] == "urn:rock-dmq:rule:body-size"
    api.done("POST", _MESSAGES, {"body": "x" * BODY_BYTES_MAX})


@pytest.mark.parametrize("body", [b"", b"{", b'{"body": "\xff"}', b'"\\ud800"', b"[" * 100_000])
def test_a_body_that_is_no_json_is_an_error_of_the_caller(api: Api, body: bytes) -> None:
    """No body ends in an internal error."""
    answer = api.send("POST", _MESSAGES, body, _JSON)
    problem_of(answer, 422 if not body else 400)


def test_a_form_of_another_site_is_refused(api: Api) -> None:
    """A browser sends these media types without a question to this host."""
    for media_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        problem_of(api.send("POST", _MESSAGES, b'{"body": "x"}', {"content-type": media_type}), 415)
    problem_of(api.send("POST", "/v1/schedules/daily/pause"), 415)


def test_a_host_name_of_another_site_is_refused(api: Api) -> None:
    """A page of a site whose name was changed to lead here has no access key."""
    problem_of(api.send("GET", "/v1/status", headers={"host": "attacker.example"}), 421)
    assert api.send("GET", "/v1/status", headers={"host": "localhost:8083"}).status == 200


def test_unknown_paths_and_methods_are_problems(api: Api) -> None:
    """404 and 405, each with the next step."""
    assert "openapi.json" in api.refused(404, "GET", "/v1/nothing")["detail"]
    answer = api.ask("DELETE", "/v1/topics")
    problem_of(answer, 405)
    assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}


@pytest.mark.parametrize(
    ("query", "parameter"),
    [
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("limi=1", "limi"),
        ("limit=1&limit=2", "limit"),
        ("state=NO", "state"),
    ],
)
def test_an_invalid_parameter_is_named(api: Api, query: str, parameter: str) -> None:
    """422, with its name."""
    problem = api.refused(422, "GET", f"{_MESSAGES}?{query}")
    assert problem["errors"][0]["parameter"] == parameter


def test_a_refusal_of_the_daemon_has_its_rule(api: Api) -> None:
    """The type of the problem is the rule that was violated."""
    assert api.refused(422, "POST", "/v1/topics/a%20b/messages", {"body": "x"})["type"] == "urn:rock-dmq:rule:topic"
    found = api.refused(404, "GET", "/v1/topics/missing")
    assert (found["type"], found["title"]) == ("urn:rock-dmq:rule:topic-unknown", "topic not found")


def test_a_half_request_holds_up_no_other(api: Api) -> None:
    """A client that sends slowly waits alone."""
    host, _, port = api.address.rpartition(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(f"POST {_MESSAGES} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n".encode())
        slow.sendall(b'Content-Length: 100\r\n\r\n{"body"')
        api.done("GET", "/v1/status")


def test_a_send_in_doubt_names_the_ids_to_repeat_it_with(tmp_path: Path) -> None:
    """The daemon does not answer in time; the repetition with the same id is stored once."""
    with api_of(tmp_path / "data") as api:
        message = {"body": "hello", "delay_ms": 3_600_000}
        api.done("POST", _MESSAGES, message)
        api.daemon.signal(signal.SIGSTOP)
        problem = api.refused(504, "POST", _MESSAGES, message)
        api.daemon.signal(signal.SIGCONT)
        (message_id,) = problem["message_ids"]
        api.done("POST", _MESSAGES, {**message, "message_id": message_id})
        listed = api.done("GET", f"{_MESSAGES}?state=WAITING")["messages"]
        assert [each["message_id"] for each in listed].count(message_id) == 1
        assert len(listed) == 2


def test_a_daemon_that_is_gone_is_503(tmp_path: Path) -> None:
    """The answer says when to try again."""
    with api_of(tmp_path / "other") as other, serving(other.daemon.address) as api:
        api.done("GET", "/v1/status")
        other.daemon.stop()
        answer = api.ask("GET", "/v1/status")
        assert "does not answer" in problem_of(answer, 503)["detail"]
        assert answer.headers["retry-after"] == "1"
