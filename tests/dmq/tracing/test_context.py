"""The trace context of a wire message: where it is found, and that nothing else is taken for one."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

import pytest

from broker_adapter.contracts.schedules import SCHEDULE
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.tracing import TracedMessage, may_be_traced, traced
from retry.dead_letter import PARENT_MESSAGE_ID

pytestmark = pytest.mark.unit

TRACE_ID, SPAN_ID = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
NO_PROPERTIES: Mapping[str, str] = {}
SAMPLED = f"00-{TRACE_ID:032x}-{SPAN_ID:016x}-01"


def payload(field: str = "", *, body: bytes = b"body", properties: Mapping[str, str] = NO_PROPERTIES) -> bytes:
    """Return a wire message with a trace context in the protocol's field, in properties, or nowhere."""
    message = wire.Message(
        topic=wire.Resource(name="orders"), body=body, user_properties={"color": "red", **properties}
    )
    message.system_properties.message_id = "m-1"
    message.system_properties.tag = "blue"
    if field:
        message.system_properties.trace_context = field
    return message.SerializeToString()


def in_property(text: str) -> bytes:
    """Return a wire message with a trace context in its property."""
    return payload(properties={"traceparent": text})


@pytest.mark.parametrize(
    "found", [payload(SAMPLED), in_property(SAMPLED), payload(SAMPLED, properties={"traceparent": "x"})]
)
def test_a_sampled_context_is_found_in_the_field_and_in_the_property(found: bytes) -> None:
    """The field of the protocol wins; other flags do not matter, nor do the sizes of the other fields."""
    assert traced(found) == TracedMessage(TRACE_ID, SPAN_ID)
    assert traced(payload(SAMPLED.removesuffix("01") + "03")) == TracedMessage(TRACE_ID, SPAN_ID)
    assert traced(payload(SAMPLED, body=bytes(70_000), properties={"x": "y" * 20_000})) is not None


@pytest.mark.parametrize(
    "value",
    [
        payload(),
        payload(SAMPLED.removesuffix("01") + "00"),
        in_property(SAMPLED.removesuffix("01") + "fe"),
        payload("trace"),
        in_property(""),
        b"",
        b"\x92\x01\x3700-",
        b"\x1a\x7f\x92\x01\x3700-",
        payload(SAMPLED)[:60],
        b"\n" + b"\xff" * 100_000,
        payload(body=payload(SAMPLED)),
        payload(body=b"\n\x0btraceparent\x12\x37" + SAMPLED.encode()),
        payload(properties={"note": "\n\x0btraceparent\x12\x37" + SAMPLED}),
    ],
    ids=count(),  # the bytes differ between processes: a map has no order
)
def test_an_unsampled_message_costs_no_parse(value: bytes) -> None:
    """No context, none that its producer samples, a context in the body or in another property, and damage."""
    assert not may_be_traced(value)
    assert traced(value) is None


@pytest.mark.parametrize(
    "value",
    [
        payload(f"00-{0:032x}-{SPAN_ID:016x}-01"),
        payload(f"00-{TRACE_ID:032x}-{0:016x}-01"),
        payload(SAMPLED.upper()),
        payload(SAMPLED, properties={SCHEDULE: "nightly"}),
        payload(SAMPLED)[:-3],
    ],
)
def test_bytes_like_a_context_are_none(value: bytes) -> None:
    """Zeros and capitals, an occurrence of a schedule, and a message that is cut."""
    assert may_be_traced(value)
    assert traced(value) is None


def test_a_redriven_message_names_its_dead_letter() -> None:
    """The redrive is linked to it."""
    found = traced(payload(SAMPLED, properties={PARENT_MESSAGE_ID: "m-0"}))
    assert found == TracedMessage(TRACE_ID, SPAN_ID, "m-0")
