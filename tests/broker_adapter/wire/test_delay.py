"""Messages for an inner topic: what producers write is read back, and what cannot be meant is refused by name."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.limits import DELIVER_AT_MS_MAX
from broker_adapter.contracts.message import Message
from broker_adapter.wire.delay import DELAY_LEVEL, DELAY_MS, DELIVER_AT_MS, TOPIC, unwrap, wrap
from broker_adapter.wire.mapping import decode, encode

ID = "01" + "A" * 32
HALF = "\ud800"
words = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=10)


@given(
    st.binary(min_size=1, max_size=100),
    st.integers(0, DELIVER_AT_MS_MAX),
    st.dictionaries(words.filter(lambda name: not name.startswith("DMQ_")), words, max_size=3),
    st.sampled_from(("", "group-1")),
)
def test_a_wrapped_value_comes_out_unchanged(
    body: bytes, due_ms: int, properties: dict[str, str], message_group: str
) -> None:
    """Everything but the topic and the two properties travels untouched."""
    message = Message(
        topic="orders", message_id=ID, body=body, properties=properties, message_group=message_group, keys=("k",)
    )
    sent = wrap(message, due_ms)
    assert (sent.topic, sent.message_id) == ("dmq_inner_topic", ID)
    wrapped = unwrap(encode(sent).payload)
    assert (wrapped.topic, wrapped.deliver_at_ms) == ("orders", due_ms)
    assert decode(wrapped.message.SerializeToString()) == message


def of(body: bytes = b"body", properties: dict[str, str] | None = None) -> bytes:
    """A message of the inner topic, as it comes from there."""
    message = Message(topic="dmq_inner_topic", message_id=ID, body=body, properties=properties or {})
    return encode(message).payload


def meant(**properties: str) -> bytes:
    """One with properties."""
    return of(properties=properties)


def as_json(**fields: object) -> bytes:
    """One with a JSON body."""
    return of(json.dumps(fields).encode())


def test_times_of_every_kind() -> None:
    """A time, a delay, a level, or none."""
    assert unwrap(meant(**{TOPIC: "orders"}))[2:] == (0, 0, 0)
    assert unwrap(meant(**{TOPIC: "orders", DELIVER_AT_MS: "1700000000000"}))[2:] == (1_700_000_000_000, 0, 0)
    assert unwrap(meant(**{TOPIC: "orders", DELAY_MS: "250"}))[2:] == (0, 250, 0)
    assert unwrap(meant(**{TOPIC: "orders", DELAY_LEVEL: "3"}))[2:] == (0, 0, 3)


def test_a_body_in_json() -> None:
    """For producers that cannot set properties."""
    wrapped = unwrap(
        as_json(
            topic="orders", delay_ms=5, body="aGVsbG8=", tag="a", keys=["k"], properties={"x": "y"}, message_group="g"
        )
    )
    message = decode(wrapped.message.SerializeToString())
    assert (wrapped.topic, wrapped.delay_ms, message.body) == ("orders", 5, b"hello")
    assert (message.tag, message.keys, message.properties, message.message_group) == ("a", ("k",), {"x": "y"}, "g")
    assert unwrap(as_json(topic="orders", text="grüße")).message.body == "grüße".encode()


@pytest.mark.parametrize(
    ("payload", "rule", "why"),
    [
        (of(), Rule.MESSAGE_CORRUPTED, "no property DMQ_TOPIC"),
        (meant(**{TOPIC: "dmq_inner_topic"}), Rule.TOPIC, "the target cannot be"),
        (meant(**{TOPIC: "%DLQ%orders"}), Rule.TOPIC, "the target cannot be"),
        (meant(**{TOPIC: "a b"}), Rule.TOPIC, "illegal characters"),
        (meant(**{TOPIC: "rmq_sys_x"}), Rule.TOPIC, "system"),
        (meant(**{TOPIC: "orders", DELAY_MS: "-1"}), Rule.DELIVERY_TIME, "DMQ_DELAY_MS is not a whole number"),
        (meant(**{TOPIC: "orders", DELAY_MS: "1e3"}), Rule.DELIVERY_TIME, "whole number"),
        (meant(**{TOPIC: "orders", DELIVER_AT_MS: "9" * 30}), Rule.DELIVERY_TIME, "whole number"),
        (meant(**{TOPIC: "orders", DELAY_MS: "1", DELAY_LEVEL: "1"}), Rule.DELIVERY_TIME, "more than one"),
        (of(b"{"), Rule.MESSAGE_CORRUPTED, "not readable JSON"),
        (of(b"[" * 100_000), Rule.MESSAGE_CORRUPTED, "no property"),
        (of(b'{"a":' + b"[" * 100_000), Rule.MESSAGE_CORRUPTED, "not readable JSON"),
        (of(b'{"topic": "a", "topic": "b"}'), Rule.MESSAGE_CORRUPTED, "duplicate name"),
        # a lone surrogate, half of a character: no message can hold it
        (as_json(topic="orders", text=HALF), Rule.MESSAGE_CORRUPTED, "surrogates"),
        (as_json(topic=HALF, text="x"), Rule.MESSAGE_CORRUPTED, "surrogates"),
        (as_json(topic="orders", text="x", tag=HALF), Rule.MESSAGE_CORRUPTED, "surrogates"),
        (as_json(topic="orders", text="x", keys=[HALF]), Rule.MESSAGE_CORRUPTED, "surrogates"),
        (as_json(topic="orders", text="x", properties={HALF: "x"}), Rule.MESSAGE_CORRUPTED, "surrogates"),
        (of(b'{"topic": "orders", "text": "\xed\xa0\x80"}'), Rule.MESSAGE_CORRUPTED, "surrogates"),
        (as_json(topic="orders", text="x", when=5), Rule.MESSAGE_CORRUPTED, "unknown field"),
        (as_json(topic="orders"), Rule.MESSAGE_CORRUPTED, "either body"),
        (as_json(topic="orders", text="x", body="eA=="), Rule.MESSAGE_CORRUPTED, "either body"),
        (as_json(topic="orders", body="%%"), Rule.MESSAGE_CORRUPTED, "not base64"),
        (as_json(topic="orders", text=""), Rule.BODY_SIZE, "1 to"),
        (as_json(topic=5, text="x"), Rule.MESSAGE_CORRUPTED, "topic is not a string"),
        (as_json(topic="orders", text="x", keys="k"), Rule.MESSAGE_CORRUPTED, "keys"),
        (as_json(topic="orders", text="x", properties={"a": 1}), Rule.MESSAGE_CORRUPTED, "properties"),
        (as_json(topic="orders", text="x", delay_ms=True), Rule.DELIVERY_TIME, "whole number"),
        (as_json(topic="orders", text="x", delay_ms=1.5), Rule.DELIVERY_TIME, "whole number"),
    ],
)
def test_unreadable_input_is_refused(payload: bytes, rule: Rule, why: str) -> None:
    """By its rule, with what was given, in a few words however much was sent."""
    with pytest.raises(Refused, match=why) as refused:
        unwrap(payload)
    assert refused.value.rule is rule
    assert len(str(refused.value)) < 400


def test_unwrappable_objects() -> None:
    """A producer hears it before it sends."""
    message = Message(topic="dmq_inner_topic", message_id=ID, body=b"x")
    with pytest.raises(Refused):
        wrap(message, 0)
    with pytest.raises(Refused):
        wrap(Message(topic="orders", message_id=ID, body=b"x"), DELIVER_AT_MS_MAX + 1)
