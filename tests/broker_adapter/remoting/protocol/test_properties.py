"""Properties as text, and what of the message model stands in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Message
from broker_adapter.remoting.protocol.properties import (
    PROPERTIES_BYTES_MAX,
    SYSTEM_PROPERTIES,
    decode_properties,
    encode_properties,
    of_message,
    to_message,
)

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02"), max_size=20)
names = texts.filter(bool)
words = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=9)


@given(st.dictionaries(names, texts, max_size=5))
def test_properties_come_back_as_they_were(properties: dict[str, str]) -> None:
    """Empty values too, though RocketMQ's own clients drop those."""
    assert decode_properties(encode_properties(properties)) == properties


@pytest.mark.parametrize("properties", [{"a\x01": "1"}, {"a": "\x02"}, {"": "1"}, {"a": "\ud800"}])
def test_an_ambiguous_value_is_refused(properties: dict[str, str]) -> None:
    """Separators, a name that is none, half a character."""
    with pytest.raises(Refused) as refused:
        encode_properties(properties)
    assert refused.value.rule is Rule.PROPERTY_KEY


def test_properties_are_as_long_as_their_length_field_allows() -> None:
    """Not one more."""
    fits = PROPERTIES_BYTES_MAX - len("a\x01\x02")
    assert len(encode_properties({"a": "x" * fits})) == PROPERTIES_BYTES_MAX
    with pytest.raises(Refused) as refused:
        encode_properties({"a": "x" * (fits + 1)})
    assert refused.value.rule is Rule.PROPERTIES_SIZE


@given(words, st.lists(words, max_size=3), st.dictionaries(names.filter(lambda n: n not in SYSTEM_PROPERTIES), texts))
def test_a_message_comes_back_as_it_was(tag: str, keys: list[str], properties: dict[str, str]) -> None:
    """With its tag, its keys and its sender's own properties."""
    message = Message("t", b"x", message_id="M", tag=tag, keys=tuple(keys), properties=properties, message_group=tag)
    found = decode_properties(encode_properties(of_message(message, "M")))
    assert to_message("t", b"x", found, message_id="M", born_at_ms=0, born_host="") == message


def test_a_name_of_rocketmqs_own_is_refused() -> None:
    """It would delay the message, or give it another id."""
    with pytest.raises(Refused, match="this name is reserved"):
        of_message(Message("t", b"x", properties={"DELAY": "3"}), "M")
