"""What fronts and the store process say to each other, as bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from support.forges.wire.frame_examples import DECODERS, FROM_FRONT, FROM_STORE, frame_bytes

from broker_adapter.contracts.errors import (
    BrokerAway,
    BrokerError,
    BrokerUnavailable,
    CallGivenUp,
    Overloaded,
    Refused,
    Rule,
)
from dmq.processes import frames

GOLDEN = Path(__file__).parents[2] / "golden" / "processes" / "frames.json"


def test_the_bytes_of_each_kind_are_known() -> None:
    """A number, a field or an order that changes is seen; one that is meant is written anew by the examples' module."""
    assert frame_bytes() == json.loads(GOLDEN.read_text())


def test_there_is_an_example_of_each_kind() -> None:
    """Of both directions; no two kinds have one number."""
    assert {type(each) for each in FROM_FRONT} == set(get_args(frames.FromFront))
    assert {type(each) for each in FROM_STORE} == set(get_args(frames.FromStore))
    tags = [each.__struct_config__.tag for each in (*FROM_FRONT, *FROM_STORE)]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize(("decode", "said"), DECODERS, ids=["front", "store"])
def test_a_batch_is_read_as_it_was_written(decode: Any, said: tuple[frames.Frame, ...]) -> None:  # noqa: ANN401
    """Whole, in order, and one after the other where several lie together."""
    batch = frames.encode(said)
    assert frames.length_at(batch, 0) == len(batch) - frames.LENGTH_BYTES
    assert tuple(decode(memoryview(batch)[frames.LENGTH_BYTES :])) == said
    both = batch + frames.encode(said[:2])
    assert frames.length_at(both, len(batch)) == len(both) - len(batch) - frames.LENGTH_BYTES


@pytest.mark.parametrize(
    "error",
    [
        *(Refused(rule, "why", value="a name", limit=12) for rule in Rule),
        *(Refused(Rule.REQUEST, "why", value=value) for value in (None, 0, -1, 2**63 - 1, 1.5, "ä", "")),
        *(Refused(Rule.REQUEST, "why", limit=limit) for limit in (0, "4 MiB", 2.5)),
        Refused(Rule.REQUEST, "another broker said so", code=17),
        Overloaded("sends in flight", limit=1_000),
        Overloaded("of another broker", limit="", code=17),
        BrokerUnavailable("the disk is full"),
        BrokerUnavailable("of another broker", code=17),
        BrokerAway("it is away"),
        CallGivenUp("the call was given up before its end"),
    ],
    ids=str,
)
def test_an_error_keeps_its_type(error: BrokerError) -> None:
    """Its type, its rule, its fields and its text, so that clients are told the same by every process."""
    (failed,) = frames.from_store(frames.encode([frames.Failed(1, frames.failure_of(error))])[frames.LENGTH_BYTES :])
    assert isinstance(failed, frames.Failed)
    found = frames.error_of(failed.failure)
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)


def test_a_limit_of_any_kind_is_shown_as_it_was() -> None:
    """What has no bytes of its own goes as its text."""
    for limit in ([1, 2], 2**70, Rule.TOPIC):
        failure = frames.failure_of(Overloaded("much", limit=limit))
        assert str(frames.error_of(failure)) == str(Overloaded("much", limit=limit))


def test_a_fault_of_ours_keeps_its_text_for_itself() -> None:
    """The other process hears that there is one."""
    failure = frames.failure_of(ValueError("a secret"))
    assert isinstance(frames.error_of(failure), frames.Unexpected)
    assert "secret" not in repr(failure)
