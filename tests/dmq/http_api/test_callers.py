"""Access keys in HTTP headers: the daemon decides, with the key of the caller and no other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import pytest
from support.rigs.daemon.acl import HOOK, OPERATOR, READER, SHOP, Key
from support.rigs.daemon.http_api import Answer, Api, problem_of, serving

from dmq.runtime.guess_limit import CALLS

pytestmark = pytest.mark.integration
_MESSAGES = "/v1/topics/orders/messages"


def test_a_bearer_token_is_an_access_key(guarded: Api) -> None:
    """The same key may send to the same topics as by gRPC."""
    (sent,) = guarded.done("POST", _MESSAGES, {"body": "hello", "delay_ms": 3_600_000}, key=SHOP)["messages"]
    assert guarded.done("GET", f"{_MESSAGES}/{sent['message_id']}", key=SHOP)["state"] == "WAITING"


def test_the_signature_of_official_clients_is_passed_on(guarded: Api) -> None:
    """No secret crosses the network."""
    answer = _signed(guarded, SHOP)
    assert answer.status == 201, answer


def test_a_call_without_a_key_is_unauthorized(guarded: Api) -> None:
    """The API has no key of its own."""
    answer = guarded.ask("POST", _MESSAGES, {"body": "hello"})
    assert problem_of(answer, 401)["type"] == "urn:rock-dmq:rule:unauthorized"
    assert answer.headers["www-authenticate"].startswith("Bearer")
    guarded.refused(401, "GET", "/v1/status")


@pytest.mark.parametrize("secret", ["wrong", "", "grüß"])
def test_a_wrong_secret_is_unauthorized(guarded: Api, secret: str) -> None:
    """By either form of it."""
    key = Key(SHOP.access_key, secret)
    guarded.refused(401, "POST", _MESSAGES, {"body": "hello"}, key=key)
    problem_of(_signed(guarded, key), 401)


def test_guesses_are_bounded_and_stop_no_known_token(guarded: Api) -> None:
    """Parallel ones too: above the limit the daemon is not asked. Run in a process of its own, which forgets it."""
    with serving(guarded.daemon.address) as other:
        other.done("GET", "/v1/topics", key=SHOP)

        def guess(number: int) -> Answer:
            return other.ask("GET", "/v1/topics", key=Key(SHOP.access_key, f"guess-{number}"))

        with ThreadPoolExecutor(16) as pool:
            found = [each.status for each in pool.map(guess, range(CALLS.per_address + 20))]
        assert 20 - 5 <= found.count(429) <= 20  # a few more are allowed in the time that passed
        refused = guess(0)
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        other.done("GET", "/v1/topics", key=SHOP)


@pytest.mark.parametrize("authorization", ["Basic c2hvcDp4", "Bearer", "Bearer shop", "Bearer :x", "Bearer sh\x7fop:x"])
def test_another_authorization_is_unauthorized(guarded: Api, authorization: str) -> None:
    """The answer names the forms that are accepted."""
    problem_of(guarded.ask("GET", "/v1/status", headers={"authorization": authorization}), 401)


@pytest.mark.parametrize(
    ("key", "method", "path", "body"),
    [
        (READER, "POST", _MESSAGES, {"body": "hello"}),
        (SHOP, "POST", "/v1/topics/refunds/messages", {"body": "hello"}),
        (READER, "POST", f"{_MESSAGES}/cancel", {"message_ids": ["x"]}),
        (SHOP, "GET", "/v1/status", None),
        (SHOP, "DELETE", "/v1/topics/orders", None),
        (HOOK, "GET", "/v1/groups/billing/dead-letters", None),
        (SHOP, "POST", "/v1/groups/billing/dead-letters/redrive", {}),
    ],
)
def test_a_key_without_the_permission_is_forbidden(
    guarded: Api, key: Key, method: str, path: str, body: object
) -> None:
    """Roles and rules are those of gRPC callers: no call is made with more than the caller's own key."""
    assert guarded.refused(403, method, path, body, key=key)["type"] == "urn:rock-dmq:rule:forbidden"


def test_a_key_sees_the_topics_that_it_may_read(guarded: Api) -> None:
    """As by gRPC."""
    for name in ("orders-seen", "hidden"):
        guarded.done("POST", "/v1/topics", {"topic": name}, key=OPERATOR)
    seen = {each["name"] for each in guarded.done("GET", "/v1/topics?limit=1000", key=SHOP)["topics"]}
    assert "orders-seen" in seen
    assert "hidden" not in seen


def test_a_change_is_recorded_with_the_key_and_the_reason(guarded: Api) -> None:
    """The activity log names the operator, not the process that passed the call on."""
    answer = guarded.ask(
        "POST", "/v1/topics", {"topic": "reasons"}, key=OPERATOR, headers={"x-dmq-why": quote("für später")}
    )
    assert answer.status == 200, answer
    (newest,) = guarded.done("GET", "/v1/activity?limit=1", key=OPERATOR)["activities"]
    assert (newest["rpc"], newest["key"], newest["why"]) == ("CreateTopic", OPERATOR.access_key, "für später")


def test_a_reason_that_is_no_ascii_is_refused(guarded: Api) -> None:
    """It cannot be passed on as metadata."""
    problem_of(guarded.ask("POST", "/v1/topics", {"topic": "reasons"}, key=OPERATOR, headers={"x-dmq-why": "für"}), 400)


def _signed(api: Api, key: Key) -> Answer:
    return api.ask("POST", _MESSAGES, {"body": "hello"}, headers=dict(key.signer().metadata()))
