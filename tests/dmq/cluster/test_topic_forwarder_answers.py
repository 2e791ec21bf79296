"""What a lane makes of the cluster's answers, and of what it read."""

from __future__ import annotations

import pytest

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Delivery, MessageType
from broker_adapter.rocketmq.codes import RULES, error_of
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.cluster.topic_forwarder import TOGETHER_BYTES_MAX, _loads, forwarded_type

NORMAL, FIFO, DELAY, TRANSACTION = MessageType


@pytest.mark.parametrize("code", sorted(RULES))
def test_only_errors_about_the_message_make_a_dead_letter(code: int) -> None:
    """Keys, permissions, topics and servers of another kind can be mended; what nobody can mend is given up."""
    error = error_of(wire.Status(code=code, message="why"), "there")  # type: ignore[arg-type]
    assert isinstance(error, Refused)
    expected = {
        *("ILLEGAL_TOPIC", "ILLEGAL_MESSAGE_TAG", "ILLEGAL_MESSAGE_KEY", "ILLEGAL_MESSAGE_GROUP", "BAD_REQUEST"),
        *("ILLEGAL_MESSAGE_PROPERTY_KEY", "ILLEGAL_MESSAGE_ID", "ILLEGAL_DELIVERY_TIME", "MESSAGE_CORRUPTED"),
        *("MESSAGE_PROPERTY_CONFLICT_WITH_TYPE", "MESSAGE_BODY_TOO_LARGE", "MESSAGE_BODY_EMPTY", "PAYLOAD_TOO_LARGE"),
        *("MESSAGE_PROPERTIES_TOO_LARGE", "ILLEGAL_LITE_TOPIC", "INVALID_CLIENT_PROPERTIES"),
        *("PRECONDITION_FAILED", "REQUEST_HEADER_FIELDS_TOO_LARGE", "FAILED_TO_CONSUME_MESSAGE"),
    }
    assert error.is_of_the_message is (wire.Code.Name(code) in expected)


def test_a_server_of_another_kind_gives_no_information_about_a_message() -> None:
    """A bad request by gRPC alone, without a code of the protocol."""
    assert not Refused(Rule.REQUEST, "no such method").is_of_the_message
    assert Refused(Rule.MESSAGE_CORRUPTED, "the payload is not a message").is_of_the_message


@pytest.mark.parametrize(
    ("types", "is_grouped", "expected"),
    [
        ((NORMAL,), False, NORMAL),
        ((NORMAL,), True, None),
        ((FIFO,), True, FIFO),
        ((FIFO,), False, None),
        ((DELAY,), False, DELAY),
        ((DELAY,), True, DELAY),
        ((TRANSACTION,), False, None),
        (tuple(MessageType), False, NORMAL),
        (tuple(MessageType), True, FIFO),
    ],
)
def test_a_due_message_is_sent_as_the_type_of_its_topic(
    types: tuple[MessageType, ...], *, is_grouped: bool, expected: MessageType | None
) -> None:
    """As a plain one where that can be, else as a delayed one whose time has come, else not at all."""
    assert forwarded_type(types, is_grouped=is_grouped) is expected


def read(number: int, message_group: str = "", size: int = 1) -> Delivery:
    return Delivery("t", str(number), b"x" * size, 0, number, "h", 1, 1, 0, 0, message_group=message_group)


def test_messages_sent_together() -> None:
    """Ungrouped messages up to a size in one call, those of each message group by themselves, in their order."""
    big = TOGETHER_BYTES_MAX * 2 // 3
    found = [read(0), read(1, "a"), read(2, size=big), read(3, "b"), read(4, size=big), read(5, "a")]
    loads = [[int(each.message_id) for each in load] for load in _loads(found)]
    assert loads == [[0, 2], [4], [1, 5], [3]]
