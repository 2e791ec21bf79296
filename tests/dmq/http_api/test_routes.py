"""The routes of ``rockdmq.admin.v1``: each does what its call does, with the same values."""

from __future__ import annotations

import base64
import json
import time

import pytest
from support.clients.wire.client import Received, WireClient
from support.rigs.daemon.http_api import Api
from support.rigs.daemon.process import run_command

from broker_adapter.wire import rocketmq_v2 as public
from dmq.admin import admin_v1 as wire
from dmq.http_api.routes import ROUTES

pytestmark = pytest.mark.integration
_HOUR_MS = 3_600_000


@pytest.fixture(scope="module")
def dead(api: Api) -> list[str]:
    """Ids of three dead letters of the group ``billing``."""
    sent = api.done(
        "POST", "/v1/topics/letters/messages", [{"body": f"{each}", "keys": [f"k{each}"]} for each in range(3)]
    )
    with WireClient(api.daemon.address) as client:
        received: list[Received] = []
        while len(received) < 3:
            received += client.receive("letters", "billing", wait_s=5)
        for each in received:
            request = public.ForwardMessageToDeadLetterQueueRequest(
                receipt_handle=each.receipt_handle, message_id=each.message_id, delivery_attempt=1
            )
            request.group.name, request.topic.name = "billing", "letters"
            assert client.ask("ForwardMessageToDeadLetterQueue", request).status.code == public.OK
    return [each["message_id"] for each in sent["messages"]]


def test_no_two_routes_have_the_same_name() -> None:
    """Names of models are components of the OpenAPI document."""
    names = [each.path_model.__name__ for each in ROUTES]
    assert len(set(names)) == len(names) == len({(each.method, each.path) for each in ROUTES})


def test_messages_are_cancelled_rescheduled_and_fired(api: Api) -> None:
    """By id, own key and recall handle; each message has its own outcome."""
    path = "/v1/topics/changes/messages"
    given = [{"message_id": each, "body": each, "delay_ms": _HOUR_MS, "own_key": f"key-{each}"} for each in "abc"]
    handles = [each["recall_handle"] for each in api.done("POST", path, given)["messages"]]
    cancelled = api.done("POST", f"{path}/cancel", {"message_ids": ["a", "never"]})["messages"]
    assert [each["outcome"] for each in cancelled] == ["DONE", "UNKNOWN"]
    later_ms = int(time.time() * 1000) + 2 * _HOUR_MS
    moved = api.done("POST", f"{path}/reschedule", {"own_keys": ["key-b"], "deliver_at_ms": later_ms})["messages"]
    assert (moved[0]["message_id"], moved[0]["at_ms"]) == ("b", later_ms)
    assert api.done("POST", f"{path}/fire", {"recall_handles": handles[2:]})["messages"][0]["outcome"] == "DONE"
    with WireClient(api.daemon.address) as client:
        assert [each.message_id for each in client.drain("changes", "readers", 1)] == ["c"]
    states = [api.done("GET", f"{path}/{each}")["state"] for each in "abc"]
    assert states == ["RECALLED", "WAITING", "QUEUED"]
    assert (
        api.refused(422, "POST", f"{path}/reschedule", {"own_keys": ["key-b"]})["errors"][0]["pointer"]
        == "/deliver_at_ms"
    )


def test_an_id_with_a_slash_is_one_parameter(api: Api) -> None:
    """Ids of other producers have any characters."""
    api.done("POST", "/v1/topics/slashes/messages", {"message_id": "2026/11/28 #1", "body": "x"})
    assert api.done("GET", "/v1/topics/slashes/messages/2026%2F11%2F28%20%231")["message_id"] == "2026/11/28 #1"


def test_pages_follow_their_token_to_the_end(api: Api) -> None:
    """Each message is on one page."""
    path = "/v1/topics/pages/messages"
    api.done("POST", path, [{"message_id": f"m{each}", "body": "x", "delay_ms": _HOUR_MS} for each in range(7)])
    found: list[str] = []
    token = ""
    while True:
        page = api.done("GET", f"{path}?limit=3&token={token}")
        found += [each["message_id"] for each in page["messages"]]
        token = page["next_token"]
        if not token:
            break
    assert sorted(found) == [f"m{each}" for each in range(7)]
    queried = api.done("GET", f"{path}?query=id:m3%20state:waiting")["messages"]
    assert [each["message_id"] for each in queried] == ["m3"]
    refused = api.refused(422, "GET", f"{path}?query=%20%20%20stat:x")
    assert "query, position 4: unknown word 'stat'" in refused["detail"]


def test_dead_letters_are_listed_and_redriven(api: Api, dead: list[str]) -> None:
    """By a filter: a dry run counts them, a redrive sends them to their group again."""
    path = "/v1/groups/billing/dead-letters"
    listed = api.done("GET", f"{path}?reasons=FORWARDED&with_body=true&keys=k0&keys=k1")["letters"]
    assert {base64.b64decode(each["content"]["body"]) for each in listed} == {b"0", b"1"}
    assert {each["message_id"] for each in api.done("GET", path)["letters"]} == set(dead)
    chosen = {"filter": {"message_ids": dead[:1]}}
    tried = api.done("POST", f"{path}/redrive", {**chosen, "is_dry_run": True})["job"]
    assert (tried["done"], tried["job_id"]) == (1, 0)
    job = api.done("POST", f"{path}/redrive", chosen)["job"]
    with WireClient(api.daemon.address) as client:
        assert [each.body for each in client.drain("letters", "billing", 1)] == [b"0"]
    assert job["job_id"] in {each["job_id"] for each in api.done("GET", "/v1/dead-letter-jobs")["jobs"]}
    for change in ("stop", "resume"):
        api.done("POST", f"/v1/dead-letter-jobs/{job['job_id']}/{change}", {})
    purged = api.done("POST", f"{path}/purge", {"filter": {"message_ids": dead[1:2]}, "why": "a test"})["job"]
    assert purged["kind"] == "PURGE"
    assert api.refused(422, "POST", f"{path}/purge", {})["errors"][0]["pointer"] == "/why"


def test_topics_are_created_changed_and_removed(api: Api) -> None:
    """An absent field stays as it is."""
    assert (
        api.done("POST", "/v1/topics", {"topic": "made", "queues": 2, "keep": {"time_ms": _HOUR_MS}})["topic"]["queues"]
        == 2
    )
    paused = api.done("PATCH", "/v1/topics/made", {"is_paused": True})["topic"]
    assert (bool(paused["paused_since_ms"]), paused["keep_time_ms"]) == (True, _HOUR_MS)
    assert "made" in {each["name"] for each in api.done("GET", "/v1/topics?limit=1000")["topics"]}
    assert api.done("DELETE", "/v1/topics/made?force=true") == {}
    api.refused(404, "GET", "/v1/topics/made")


def test_groups_are_created_changed_and_removed(api: Api) -> None:
    """A policy has one backoff."""
    api.done("POST", "/v1/groups", {"group": "made"})
    policy = {"fixed": {"delay_ms": 1000}, "max_attempts": 3, "jitter": 0.5}
    assert api.done("PATCH", "/v1/groups/made", {"policy": policy})["group"]["policy"]["max_attempts"] == 3
    two = {**policy, "exponential": {"initial_ms": 1, "max_ms": 2, "multiplier": 2}}
    problem = api.refused(422, "PATCH", "/v1/groups/made", {"policy": two})
    assert problem["errors"][0]["pointer"] == "/policy"
    assert api.done("GET", "/v1/groups/made/retries")["retries"] == []
    assert api.done("DELETE", "/v1/groups/made") == {}


def test_schedules_are_added_paused_and_removed(api: Api) -> None:
    """The message has its body in base64; fields that the daemon sets are unknown in a request."""
    content = {"body": base64.b64encode(b"hello").decode(), "tag": "daily"}
    schedule = {"name": "daily", "topic": "reports", "cron": "0 3 * * *", "content": content}
    assert api.done("POST", "/v1/schedules", {"schedule": schedule})["is_new"]
    assert api.done("POST", "/v1/schedules/daily/pause", {})["schedule"]["state"] == "paused"
    found = api.done("GET", "/v1/schedules/daily?with_body=true")["schedule"]
    assert base64.b64decode(found["content"]["body"]) == b"hello"
    problem = api.refused(422, "POST", "/v1/schedules", {"schedule": {**schedule, "state": "paused"}})
    assert problem["errors"] == [{"pointer": "/schedule/state", "detail": "unknown field"}]
    api.done("DELETE", "/v1/schedules/daily")
    api.refused(404, "GET", "/v1/schedules/daily")


def test_answers_are_those_of_the_command(api: Api) -> None:
    """The ledger and the status have the fields of ``dmq --json``."""
    api.done("POST", "/v1/topics/counted/messages", {"body": "x", "delay_ms": _HOUR_MS})
    topics = api.done("GET", "/v1/ledger?topic=counted&with_groups=true")["topics"]
    assert (topics[0]["scheduled"], topics[0]["pending"]) == (1, 1)
    by_command = run_command("ledger", "counted", "--groups", "--json", "-a", api.daemon.address)
    assert json.loads(by_command.stdout)["topics"] == topics
    status = api.done("GET", "/v1/status")
    assert set(status) == {each.name for each in wire.GetStatusResponse.DESCRIPTOR.fields}
