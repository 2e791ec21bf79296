"""What a member of a group says of itself, as our clients write it and as Java's do."""

from __future__ import annotations

import json

import pytest

from broker_adapter.contracts.classic import Filter, HeldQueue, MemberState
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.remoting.protocol.frames import FrameBroken
from broker_adapter.remoting.protocol.requests.running import decode_running, running_body
from broker_adapter.remoting.survey import version_text

MIB = 1024 * 1024
HELD = HeldQueue(MessageQueue("orders", "a", 0), 7, 3, 4, 2 * MIB, 99, 98, is_locked=True)
STATE = MemberState({"orders": Filter("a || b"), "t": Filter("n > 1", is_sql=True)}, [HELD], True, 42)
JAVA = (
    b'{"jstack":"","mqTable":{'
    b'{"brokerName":"a","queueId":0,"topic":"orders"}:{"cachedMsgCount":2,"cachedMsgMaxOffset":11,'
    b'"cachedMsgMinOffset":8,"cachedMsgSizeInMiB":1,"commitOffset":8,"droped":false,"lastConsumeTimestamp":98,'
    b'"lastPullTimestamp":99,'
    b'"locked":false,"tryUnlockTimes":0},'
    b'{"brokerName":"a","queueId":1,"topic":"orders"}:{"commitOffset":3,"droped":true}},'
    b'"properties":{"PROP_CONSUMEORDERLY":"false","PROP_CONSUMER_START_TIMESTAMP":"42"},'
    b'"statusTable":{"orders":{"consumeRT":0.0}},'
    b'"subscriptionSet":[{"expressionType":"TAG","subString":"*","topic":"orders","subVersion":1}]}'
)


def test_written_rows_are_read() -> None:
    """Filters, queues and what is held of them; RocketMQ has queues for names, without quotes around them."""
    body = running_body(STATE, ["h:1", "h:2"])
    assert decode_running(body) == STATE
    assert b'"mqTable":{{"brokerName": "a", "queueId": 0, "topic": "orders"}:{"commitOffset": 7' in body
    assert b'"PROP_NAMESERVER_ADDR": "h:1;h:2"' in body
    assert decode_running(running_body(STATE._replace(queues=[]), [])) == STATE._replace(queues=[])


def test_the_answer_of_a_java_client_is_read() -> None:
    """A queue that it is giving up is none of its own."""
    held = HeldQueue(MessageQueue("orders", "a", 0), 8, 2, 3, MIB, 99, 98)
    assert decode_running(JAVA) == ({"orders": Filter()}, [held], False, 42)


@pytest.mark.parametrize("found", [{"mqTable": 7}, {"subscriptionSet": [{}]}, {"mqTable": {"no queue": {}}}, []])
def test_an_answer_that_is_none_is_broken(found: object) -> None:
    """And says of what it is the answer."""
    with pytest.raises(FrameBroken, match="what a member says of itself"):
        decode_running(json.dumps(found).encode())


def test_versions_are_distinguished_by_their_names() -> None:
    """As RocketMQ counts them."""
    known = {213: "4.0.0", 407: "4.9.7", 411: "4.9.9", 413: "5.0.0", 433: "5.1.0", 513: "5.5.0"}
    assert {number: version_text(number) for number in known} == known
    assert version_text(193) == "before 4.0 (193)"
