"""Heartbeats, locks and members as JSON, RocketMQ's own kind of it too."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from broker_adapter.contracts.classic import Filter, Presence, Route, Start
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.remoting.protocol.frames import FrameBroken
from broker_adapter.remoting.protocol.loose_json import decode_object
from broker_adapter.remoting.protocol.requests.bodies import decode_locked, decode_members, heartbeat_body, lock_body
from broker_adapter.remoting.protocol.requests.routes import decode_cluster, decode_route, route_of

QUEUE = MessageQueue("t", "a", 1)


def test_a_heartbeat_names_the_groups_of_a_client() -> None:
    """A tag filter has the hash codes that Java gives its tags."""
    filters = {"t": Filter("b || a||"), "u": Filter("n > 1", is_sql=True), "v": Filter()}
    consumers = [Presence("g", filters), Presence("h", {}, is_broadcast=True, start=Start.FIRST_OFFSET)]
    found = json.loads(heartbeat_body("me", ["p"], consumers, lambda group, topic, _: len(group + topic)))
    assert (found["clientID"], found["producerDataSet"]) == ("me", [{"groupName": "p"}])
    first, second = found["consumerDataSet"]
    assert [each["topic"] for each in first["subscriptionDataSet"]] == ["t", "u", "v"]
    tags, sql, everything = first["subscriptionDataSet"]
    assert (tags["tagsSet"], tags["codeSet"], tags["subVersion"]) == (["a", "b"], [97, 98], 2)
    assert (sql["subString"], sql["expressionType"], sql["tagsSet"]) == ("n > 1", "SQL92", [])
    assert (everything["subString"], everything["expressionType"]) == ("*", "TAG")
    assert (second["messageModel"], second["consumeFromWhere"]) == ("BROADCASTING", "CONSUME_FROM_FIRST_OFFSET")


def test_locks_are_asked_for_and_read() -> None:
    """Both are lists of queues; none is one too."""
    found = json.loads(lock_body("g", "me", [QUEUE]))
    assert found["mqSet"] == [{"topic": "t", "brokerName": "a", "queueId": 1}]
    assert decode_locked(json.dumps({"lockOKMQSet": found["mqSet"]}).encode()) == {QUEUE}
    assert decode_locked(b'{"lockOKMQSet":null}') == frozenset()
    assert decode_members(b'{"consumerIdList":["b","a"]}') == ("a", "b")


@pytest.mark.parametrize("decode", [decode_locked, decode_members, decode_cluster])
@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"lockOKMQSet":7,"consumerIdList":7,"brokerAddrTable":7}', b"\xff"]
)
def test_an_answer_that_is_none_is_broken(decode: Callable[[bytes], object], body: bytes) -> None:
    """And says of what it is the answer."""
    with pytest.raises(FrameBroken, match="the list of"):
        decode(body)


def test_names_that_are_objects_or_numbers_are_read() -> None:
    """As RocketMQ writes tables of queues, and lists of brokers."""
    found = decode_object(b'{"t":{{"queueId":0,"topic":"a"}:{"x":1},{"queueId":1}:{"x":2}}}', "it")
    assert found == {"t": {'{"queueId":0,"topic":"a"}': {"x": 1}, '{"queueId":1}': {"x": 2}}}
    addresses = b'{"brokerAddrTable":{"a":{"brokerAddrs":{0:"h:1",2:"h:2"}}},"clusterAddrTable":{"c":["b","a"]}}'
    assert decode_cluster(addresses) == ({"a": {0: "h:1", 2: "h:2"}}, {"c": ("a", "b")})


def test_queues_without_a_master_can_be_read_and_not_written() -> None:
    """And those of a broker that is not there neither."""
    queues = {"readQueueNums": 1, "writeQueueNums": 2, "perm": 6}
    body = {
        "queueDatas": [{**queues, "brokerName": name} for name in "cba"],
        "brokerDatas": [
            {"brokerName": "a", "brokerAddrs": {"0": "h:1"}},
            {"brokerName": "b", "brokerAddrs": {"1": "h:2"}},
        ],
    }
    route = route_of("t", decode_route("t", json.dumps(body).encode()))
    a, b = MessageQueue("t", "a", 0), MessageQueue("t", "b", 0)
    assert route == Route("t", (a, b), (a, a._replace(queue_id=1)))
