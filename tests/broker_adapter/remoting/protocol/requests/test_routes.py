"""A name server's answer about a topic, and the signature of a request."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker_adapter.contracts.errors import BrokerUnavailable, Rule
from broker_adapter.remoting.client import Queue, queues_of
from broker_adapter.remoting.protocol.codes import error_of
from broker_adapter.remoting.protocol.frames import FrameBroken, RemotingFrame, decode_frame
from broker_adapter.remoting.protocol.signature import signed

ROUTE = decode_frame((Path(__file__).parents[4] / "golden" / "remoting" / "answer-route.bin").read_bytes()).body
BARE = b'{"brokerDatas":[{"brokerAddrs":{0:"a:1",1:"b:1"},"brokerName":"x"}],"queueDatas":[%s]}'
READABLE = b'{"brokerName":"x","perm":6,"readQueueNums":2,"writeQueueNums":4}'


def test_a_route_of_a_real_name_server_is_read() -> None:
    """Four queues at each of two brokers, in the order of their names."""
    found = queues_of("normal-0", ROUTE)
    assert [(each.broker, each.queue_id) for each in found] == [
        (broker, number) for broker in ("broker-a", "broker-b") for number in range(4)
    ]
    assert all(each.address.startswith("127.0.0.1:") for each in found)


def test_names_without_quotes_are_read() -> None:
    """As older name servers write them; the master's address is taken, and as many queues as can be read."""
    assert queues_of("t", BARE % READABLE) == [Queue("t", "x", 0, "a:1"), Queue("t", "x", 1, "a:1")]


def test_an_unreadable_topic_has_no_queues() -> None:
    """A topic that may only be written."""
    assert queues_of("t", BARE % READABLE.replace(b'"perm":6', b'"perm":2')) == []


def test_a_broker_without_a_master_is_unavailable() -> None:
    """A slave may lack what its master has: to read there would miss messages."""
    with pytest.raises(BrokerUnavailable, match="no master"):
        queues_of("t", BARE.replace(b'0:"a:1",', b"") % READABLE)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b"[1]", b'{"brokerDatas":[],"queueDatas":[7]}', b"\xff", b"[" * 9999]
)
def test_a_route_that_is_none_is_broken(body: bytes) -> None:
    """With its topic."""
    with pytest.raises(FrameBroken, match="the route of t cannot be read"):
        queues_of("t", body)


def test_a_request_is_signed_as_rocketmq_does() -> None:
    """Over the values by name, the access key's too, and the body."""
    frame = signed(RemotingFrame(code=1, fields={"b": "2", "a": "1"}, body=b"x"), "key", "secret")
    assert frame.fields["AccessKey"] == "key"
    # printf 'key12x' | openssl dgst -sha1 -hmac secret -binary | base64
    assert frame.fields["Signature"] == "UjKNECkTJ4tUoPKpH7BCgepozyA="
    assert "secret" not in repr(frame)


def test_an_error_names_its_server() -> None:
    """A refusal has its rule; what nobody knows is in doubt."""
    refused = error_of(RemotingFrame(code=17, remark="no\n such topic"), "a:1", 105)
    assert "no such topic (17, from a:1 for operation 105)" in str(refused)
    denied = error_of(RemotingFrame(code=1, remark="org.apache.rocketmq.acl.common.AclException: no"), "a:1", 11)
    assert getattr(denied, "rule", None) is Rule.UNAUTHORIZED
    assert isinstance(error_of(RemotingFrame(code=1), "a:1", 11), BrokerUnavailable)
