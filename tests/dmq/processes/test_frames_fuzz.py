"""Frames of any content, and bytes that are none."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.forges.wire.frame_examples import DECODERS

from dmq.processes import frames

pytestmark = pytest.mark.property
_PLAIN = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=40),
    bool: st.booleans(),
    type(None): st.none(),
}


def strategy(kind: Any) -> st.SearchStrategy[Any]:  # noqa: ANN401 - a type, or an alias of one
    """Values of a type of the frames' fields."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if origin in (Union, types.UnionType):
        return st.one_of([strategy(each) for each in arguments])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(strategy(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(*map(strategy, arguments), max_size=3)
    if origin is tuple and arguments[-1] is ...:
        return st.lists(strategy(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(strategy, arguments))
    hints = get_type_hints(kind)
    return st.builds(kind, **{name: strategy(hints[name]) for name in getattr(kind, "_fields", hints)})


_SAID = st.one_of(
    *(
        st.tuples(st.just(decode), st.lists(st.one_of([strategy(type(each)) for each in said]), max_size=4))
        for decode, said in DECODERS
    )
)


@given(_SAID)
def test_any_batch_is_read_as_it_was_written(case: tuple[Any, list[frames.Frame]]) -> None:
    """Of any kinds, with any content that their fields can have."""
    decode, said = case
    batch = frames.encode(said)
    assert frames.length_at(batch, 0) == len(batch) - frames.LENGTH_BYTES
    assert decode(memoryview(batch)[frames.LENGTH_BYTES :]) == said


@given(_SAID, st.integers(0, 2**20), st.integers(0, 255))
def test_bytes_that_are_no_batch_are_distinguished(case: tuple[Any, list[frames.Frame]], at: int, byte: int) -> None:
    """A byte is another one, or what follows it is missing: frames, or the errors that a link expects."""
    decode, said = case
    body = frames.encode(said)[frames.LENGTH_BYTES :]
    at %= len(body)
    for wrong in (body[:at] + bytes((byte,)) + body[at + 1 :], body[:at]):
        try:
            found = decode(memoryview(wrong))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        assert all(isinstance(each, frames.Frame) for each in found)
