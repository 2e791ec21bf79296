"""Between wire messages and the model: nothing is lost, and only what must change changes."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from broker_adapter.contracts.limits import DELIVER_AT_MS_MAX
from broker_adapter.contracts.message import BodyEncoding, Message, MessageType
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import decode, encode, full_name, to_envelope

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
TIMES = st.integers(0, DELIVER_AT_MS_MAX)
MESSAGES = st.builds(
    Message,
    topic=TEXT,
    message_id=TEXT,
    body=st.binary(max_size=50),
    tag=TEXT,
    keys=st.lists(TEXT, max_size=3).map(tuple),
    properties=st.dictionaries(TEXT, TEXT, max_size=3),
    message_group=TEXT,
    deliver_at_ms=TIMES,
    body_encoding=st.sampled_from(BodyEncoding),
    born_at_ms=TIMES,
    born_host=TEXT,
)


@given(MESSAGES)
def test_a_message_survives_the_round_trip(message: Message) -> None:
    """Every field, at any length of any text; the envelope repeats what brokers decide by."""
    envelope = encode(message)
    assert decode(envelope.payload) == message
    assert envelope[:2] == (message.topic, message.message_id)
    assert envelope[3:6] == (message.tag, message.message_group, message.deliver_at_ms)
    stored = wire.Message.FromString(envelope.payload).system_properties
    assert stored.message_type == int(message.message_type)


def from_client() -> wire.Message:
    message = wire.Message(topic=wire.Resource(name="t"), body=b"b")
    message.system_properties.message_id = "01"
    message.system_properties.trace_context = "trace"
    message.system_properties.body_digest.checksum = "ABCD"
    return message


def test_a_plain_message_is_stored_as_it_came() -> None:
    """The payload is byte for byte what the client sent."""
    message = from_client()
    message.system_properties.message_type = wire.NORMAL
    sent = message.SerializeToString()
    assert to_envelope(message).payload == sent


@pytest.mark.parametrize(
    ("message_group", "deliver_at_ms", "expected"),
    [
        ("", None, MessageType.NORMAL),
        ("g", None, MessageType.FIFO),
        ("", 1500, MessageType.DELAY),
        ("g", 1500, MessageType.DELAY),
    ],
)
def test_the_type_follows_from_the_message(
    message_group: str, deliver_at_ms: int | None, expected: MessageType
) -> None:
    """Whatever the client called it; a delayed message with a group counts as DELAY, as in RocketMQ."""
    message = from_client()
    message.system_properties.message_type = wire.TRANSACTION
    if message_group:
        message.system_properties.message_group = message_group
    envelope = to_envelope(message, deliver_at_ms=deliver_at_ms)
    stored = wire.Message.FromString(envelope.payload).system_properties
    assert stored.message_type == int(expected)
    assert stored.HasField("delivery_timestamp") == (deliver_at_ms is not None)
    assert (stored.trace_context, envelope.deliver_at_ms) == ("trace", deliver_at_ms or 0)


def test_a_delay_is_written_to_the_millisecond_and_its_properties_are_consumed() -> None:
    """The user's own properties stay."""
    message = from_client()
    message.user_properties.update({"DELAY": "3", "mine": "x"})
    envelope = to_envelope(message, deliver_at_ms=61_007, consumed=("DELAY", "TIMER_DELAY_MS"))
    stored = wire.Message.FromString(envelope.payload)
    due = stored.system_properties.delivery_timestamp
    assert (due.seconds, due.nanos) == (61, 7_000_000)
    assert dict(stored.user_properties) == {"mine": "x"}


def test_delivery_at_1970_is_kept_as_asked() -> None:
    """Time 0 is due at once: no delay for the broker, and still the client's timestamp and type on delivery."""
    message = from_client()
    envelope = to_envelope(message, deliver_at_ms=0)
    stored = wire.Message.FromString(envelope.payload).system_properties
    assert envelope.deliver_at_ms == 0
    assert stored.HasField("delivery_timestamp")
    assert stored.message_type == wire.DELAY


def test_a_namespace_becomes_a_prefix() -> None:
    """Two namespaces never share a topic."""
    resource = wire.Resource(resource_namespace="ns", name="t")
    assert full_name(resource) == "ns%t"
    assert full_name(wire.Resource(name="t")) == "t"


def test_damaged_bytes_are_an_error() -> None:
    """Not an empty message."""
    with pytest.raises(DecodeError):
        decode(b"\xff\xff\xff")
