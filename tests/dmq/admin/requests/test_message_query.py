"""The query of messages: its terms, its errors with their positions, and its completion."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.admin import admin_v1 as wire
from dmq.admin.requests.message_query import QUERY_CHARS_MAX, QueryRefused, completions, resolve

pytestmark = pytest.mark.unit
NOW = 1_795_219_200_000


def fields(query: str, **given: Any) -> dict[str, Any]:  # noqa: ANN401 - fields of the request
    """Return the fields that a query means."""
    request = resolve(wire.ListMessagesRequest(query=query, **given), NOW)
    return {each.name: value for each, value in request.ListFields()}


@pytest.mark.parametrize(
    ("query", "meant"),
    [
        ("", {}),
        ("state:waiting", {"state": wire.WAITING}),
        ("  state:queued   tag:a:b ", {"state": wire.QUEUED, "tag": "a:b"}),
        ("state:held", {"state": wire.WAITING, "only_held": True}),
        ("due-after:-1h due-before:+5m", {"due_after_ms": NOW - 3_600_000, "due_before_ms": NOW + 300_000}),
        ("due-before:1970-01-01T00:00:00Z", {"due_before_ms": 1}),
        (f"due-after:{NOW}", {"due_after_ms": NOW}),
        (r'key:"order \"4711\" \\"', {"key": r'order "4711" \ '.strip()}),
        ("own-key:x id:7F00", {"own_key": "x", "message_id": "7F00"}),
        ("order:newest", {"newest_first": True}),
    ],
)
def test_terms_are_fields_of_the_request(query: str, meant: dict[str, Any]) -> None:
    """The same for the page, the command and the HTTP API."""
    assert fields(query) == meant


@pytest.mark.parametrize(
    ("query", "position", "why"),
    [
        ("4711", 1, "unknown word '4711'; expected a term NAME:VALUE, with a name of state, id, key"),
        (":x", 1, "unknown word ''"),
        ("state:waiting stat:x", 15, "unknown word 'stat'"),
        ("state:lost", 7, "unknown state 'lost'; expected waiting, queued or held"),
        ("state:", 7, "state has no value; expected waiting, queued or held"),
        ("tag:a state", 12, "a colon is expected after state"),
        ("due-after:soon", 11, "'soon' is not a time"),
        ('key:"a b', 5, "has no end"),
        ('key:"a"b', 5, "has no end"),
        ('key:a"b"', 6, "begin the value with it"),
        ("tag:a tag:b", 11, "tag is given twice"),
        ("state:held state:held", 18, "state is given twice"),
        ("x" * (QUERY_CHARS_MAX + 1), QUERY_CHARS_MAX + 1, "up to 2000 characters"),
    ],
)
def test_an_error_names_the_position_and_the_valid_words(query: str, position: int, why: str) -> None:
    """Counted from 1, as an editor does."""
    with pytest.raises(QueryRefused) as refused:
        fields(query)
    assert refused.value.position == position
    assert f"query, position {position}: " in str(refused.value)
    assert why in str(refused.value)


def test_a_term_and_its_field_are_not_given_together() -> None:
    """One of them would be ignored."""
    with pytest.raises(QueryRefused, match="tag is given twice"):
        fields("tag:a", tag="b")
    assert fields("state:waiting", tag="b") == {"state": wire.WAITING, "tag": "b"}


@given(st.text())
def test_any_text_is_a_query_or_an_error(text: str) -> None:
    """With a position inside of the text, or just after it."""
    position = 1
    try:
        fields(text)
    except QueryRefused as error:
        position = error.position
    assert 1 <= position <= len(text) + 1


def test_the_next_word_is_completed() -> None:
    """Names that are not used yet, and values that can be listed."""
    assert completions("")[:2] == ["state:", "id:"]
    assert completions("tag:a du") == ["tag:a due-after:", "tag:a due-before:"]
    assert completions("state:") == ["state:waiting", "state:queued", "state:held"]
    assert completions("state:held ") == [f"state:held {name}" for name in completions("") if name != "state:"]
    assert completions("tag:") == completions("state:held") == completions('key:"st') == []
