"""Pulls as fields of the protocol, and what they find in the message model."""

from __future__ import annotations

import pytest
from support.forges.messages.stored import a_stored

from broker_adapter.contracts.classic import Filter, ReceivedMessage
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.remoting.protocol.frames import FrameBroken, RemotingFrame
from broker_adapter.remoting.protocol.requests.pulling import pull_fields, pulled, received
from broker_adapter.remoting.protocol.stored import decode_messages

QUEUE = MessageQueue("orders", "a", 3)


@pytest.mark.parametrize(
    ("wait_ms", "brought", "bits", "expression", "kind"),
    [
        (0, None, "0", "", "TAG"),
        (9, None, "2", "", "TAG"),
        (0, Filter("a || b"), "4", "a || b", "TAG"),
        (9, Filter("n > 1", is_sql=True), "6", "n > 1", "SQL92"),
    ],
)
def test_a_pull_states_its_purpose(wait_ms: int, brought: Filter | None, bits: str, expression: str, kind: str) -> None:
    """Whether it may wait, and whether it brings its filter."""
    fields = pull_fields("g", QUEUE, 5, batch_max=32, wait_ms=wait_ms, brought=brought)
    assert (fields["sysFlag"], fields["suspendTimeoutMillis"]) == (bits, str(wait_ms))
    assert (fields["subscription"], fields["expressionType"]) == (expression, kind)


def found(queue: MessageQueue, **more: str) -> ReceivedMessage:
    (stored,) = decode_messages(a_stored(topic=queue.topic, properties=more))
    return received(stored, queue)


def test_a_retry_comes_under_the_topic_it_was_sent_to() -> None:
    """What anybody wrote into that property of another message means nothing."""
    retry = found(MessageQueue("%RETRY%g", "a", 0), RETRY_TOPIC="orders")
    assert (retry.message.topic, retry.queue.topic) == ("orders", "%RETRY%g")
    assert found(MessageQueue("%RETRY%g", "a", 0)).message.topic == "%RETRY%g"
    assert found(QUEUE, RETRY_TOPIC="payments").message.topic == "orders"


def test_rocketmqs_own_properties_are_distinguished() -> None:
    """Those of the sender are the message's."""
    message = found(QUEUE, DELAY="3", colour="red")
    assert (message.message.properties, message.system) == ({"colour": "red"}, {"UNIQ_KEY": "M1", "DELAY": "3"})
    assert (message.attempts_failed, message.offset_id) == (2, "7F00000100002A9F0000000000002328")
    assert message.size_bytes == len(a_stored(properties={"DELAY": "3", "colour": "red"}))


def test_a_pull_that_does_not_go_on_is_broken() -> None:
    """Whoever believes it would pull the same for ever."""
    assert pulled(RemotingFrame(code=19, fields={"nextBeginOffset": "5"}), 5, "a:1") == ((), 5)
    with pytest.raises(FrameBroken, match="with 5 as the next"):
        pulled(RemotingFrame(code=0, fields={"nextBeginOffset": "5"}), 5, "a:1")
