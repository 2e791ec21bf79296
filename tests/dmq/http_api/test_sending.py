"""The route that sends messages."""

from __future__ import annotations

import base64
import time

import pytest
from support.clients.wire.client import WireClient
from support.rigs.daemon.http_api import Api, problem_of

pytestmark = pytest.mark.integration
_HOUR_MS = 3_600_000


def _send(api: Api, topic: str, body: object) -> list[dict[str, str]]:
    sent: list[dict[str, str]] = api.done("POST", f"/v1/topics/{topic}/messages", body)["messages"]
    return sent


def test_each_kind_of_body_arrives_as_bytes(api: Api) -> None:
    """Text is UTF-8, base64 is decoded, JSON is compact."""
    given = [{"body": "grüß"}, {"body_base64": base64.b64encode(b"\x00\xff").decode()}, {"body_json": {"a": [1, "ü"]}}]
    _send(api, "bodies", given)
    with WireClient(api.daemon.address) as client:
        bodies = {each.body for each in client.drain("bodies", "readers", 3)}
    assert bodies == {"grüß".encode(), b"\x00\xff", '{"a":[1,"ü"]}'.encode()}


def test_all_fields_are_those_of_the_message(api: Api) -> None:
    """Tag, keys, properties, delivery time, own key and expiry are as a client would have sent them."""
    due_ms = int(time.time() * 1000) + _HOUR_MS
    message = {
        "message_id": "whole",
        "body": "hello",
        "tag": "red",
        "keys": ["order-1", "order-2"],
        "properties": {"colour": "red"},
        "deliver_at_ms": due_ms,
        "not_after_ms": due_ms + _HOUR_MS,
        "own_key": "order-1",
    }
    (sent,) = _send(api, "fields", message)
    assert sent["recall_handle"]
    found = api.done("GET", "/v1/topics/fields/own-keys/order-1?with_body=true")
    assert (found["message_id"], found["state"], found["deliver_at_ms"]) == ("whole", "WAITING", due_ms)
    content = found["content"]
    assert (content["tag"], content["keys"]) == ("red", ["order-1", "order-2"])
    assert content["properties"]["colour"] == "red"
    assert base64.b64decode(content["body"]) == b"hello"


def test_the_trace_context_of_the_request_is_that_of_its_messages(api: Api) -> None:
    """The header becomes a property. A property wins; an invalid header is ignored, as the W3C asks."""
    context, other = (f"00-{number:032x}-{number:016x}-01" for number in (1, 2))
    path = "/v1/topics/traces/messages"
    bodies: list[dict[str, object]] = [{"body": "a"}, {"body": "b", "properties": {"traceparent": other}}]
    sent = [
        each["message_id"]
        for header, body in ((context, bodies), ("00-1-1-01", bodies[0]))
        for each in api.ask("POST", path, body, headers={"traceparent": header}).json["messages"]
    ]
    found = [api.done("GET", f"{path}/{each}?with_body=true")["content"]["properties"] for each in sent]
    assert [each.get("traceparent") for each in found] == [context, other, None]


def test_a_delay_counts_from_the_time_of_the_daemon(api: Api) -> None:
    """``delay_ms`` needs no clock of the caller."""
    before_ms = int(time.time() * 1000)
    (sent,) = _send(api, "delays", {"body": "later", "delay_ms": _HOUR_MS})
    found = api.done("GET", f"/v1/topics/delays/messages/{sent['message_id']}")
    assert before_ms + _HOUR_MS <= found["deliver_at_ms"] <= int(time.time() * 1000) + _HOUR_MS


def test_a_repeated_send_with_the_same_id_is_stored_once(api: Api) -> None:
    """The id is what makes a repetition safe after an answer that was lost."""
    for _ in range(2):
        assert _send(api, "repeats", {"message_id": "once", "body": "hello", "delay_ms": _HOUR_MS})
    assert len(api.done("GET", "/v1/topics/repeats/messages?state=WAITING")["messages"]) == 1


def test_the_message_kept_under_an_own_key_is_named(api: Api) -> None:
    """``on_same_key: keep`` answers with the id of the pending message."""
    first = {"message_id": "first", "body": "1", "delay_ms": _HOUR_MS, "own_key": "order-7"}
    _send(api, "kept", first)
    (sent,) = _send(api, "kept", {**first, "message_id": "second", "on_same_key": "keep"})
    assert sent["message_id"] == "first"


def test_a_batch_is_stored_as_a_whole_or_not_at_all(api: Api) -> None:
    """The problem points at the message that is refused."""
    _send(api, "batches", [{"message_id": "good", "body": "1", "delay_ms": _HOUR_MS}])
    batch = [{"message_id": "new", "body": "1", "delay_ms": _HOUR_MS}, {"body": ""}]
    problem = api.refused(422, "POST", "/v1/topics/batches/messages", batch)
    assert problem["type"] == "urn:rock-dmq:rule:body-empty"
    assert [each["pointer"] for each in problem["errors"]] == ["/1"]
    api.refused(404, "GET", "/v1/topics/batches/messages/new")


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"body": "x", "delay": 5}, "/delay"),
        ({"body": "x", "keys": ["a", 1]}, "/keys/1"),
        ([{"body": "x"}, {"body": "x", "a/b~c": 1}], "/1/a~1b~0c"),
        ({"body": "x", "delay_ms": "5"}, "/delay_ms"),
        ({"body": "x", "delay_ms": 1, "deliver_at_ms": 1}, ""),
        ({"body": "x", "body_json": 1}, ""),
        ({}, ""),
        ([], ""),
        ({"body_base64": "no base64!"}, "/body_base64"),
        ({"body": "x", "on_same_key": "keep"}, ""),
    ],
)
def test_an_invalid_field_is_answered_with_its_pointer(api: Api, body: object, pointer: str) -> None:
    """Nothing is sent, and the caller learns which field it was."""
    problem = api.refused(422, "POST", "/v1/topics/invalid/messages", body)
    assert problem["errors"][0]["pointer"] == pointer
    assert problem["title"] == "bad request"


def test_a_number_without_a_json_form_is_refused(api: Api) -> None:
    """A float that overflows is no JSON, and no internal error either."""
    headers = {"content-type": "application/json"}
    problem_of(api.send("POST", "/v1/topics/invalid/messages", b'{"body_json": 1e999}', headers), 422)
