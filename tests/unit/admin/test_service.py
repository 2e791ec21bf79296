"""The admin service: every value of the source reaches the wire, and every error becomes a status."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from support.admin_source import MESSAGE, MESSAGE_ID, FixedSource, service_over
from support.admin_status import NOW, STATUS, TOPICS

from broker_adapter.contracts.errors import BrokerUnavailable, Overloaded, Refused, Rule
from dmq.admin import admin_v1 as wire
from dmq.admin.api.service import handlers, refusal_of
from dmq.admin.requests import status as source
from dmq.errors import StoreBusy, StoreCorrupt, StoreFailed
from dmq.states import MessageState
from retry.dead_letter import JobKind, JobState
from retry.policy import Reason

ROOT = Path(__file__).resolve().parents[3]
ADMIN = ROOT / "dmq" / "admin"


def get(
    topic: str, message_id: str, *, with_body: bool = False, of: FixedSource | None = None
) -> wire.GetMessageResponse:
    request = wire.GetMessageRequest(topic=topic, message_id=message_id, with_body=with_body)
    return asyncio.run(service_over(of or FixedSource()).get_message(request))


def plain(message: Message) -> dict[str, object]:
    """A wire message with the field names and values of a dataclass."""
    fields: Iterable[Any] = message.DESCRIPTOR.fields
    values = {field.name: getattr(message, field.name) for field in fields}
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: object) -> object:
    if isinstance(value, Message):
        return plain(value)
    return tuple(map(_plain, value)) if isinstance(value, Sequence) and not isinstance(value, str) else value


def test_every_field_of_a_status_reaches_the_wire() -> None:
    """Nothing is dropped, renamed or left at zero on the way."""
    response = asyncio.run(service_over(FixedSource()).get_status(wire.GetStatusRequest()))
    assert plain(response) == dataclasses.asdict(STATUS)


def test_topics_keep_their_order_and_their_buckets() -> None:
    """By name, as the source gave them."""
    response = asyncio.run(service_over(FixedSource()).list_topics(wire.ListTopicsRequest()))
    assert [topic.name for topic in response.topics] == [topic.name for topic in TOPICS]
    assert (response.topics[0].pending, response.topics[0].due[0].until_ms, response.topics[0].due[0].count) == (
        *(1_000_000, NOW, 2),
    )


def test_a_message_is_shown_without_its_body_unless_asked() -> None:
    """Bodies are the application's; an operator has to want one."""
    found = get("orders", MESSAGE_ID)
    assert (found.state, found.deliver_at_ms, found.stored_at_ms) == (wire.WAITING, NOW + 60_000, NOW)
    assert (found.queue_id, found.queue_offset) == (-1, -1)
    content = found.content
    assert (content.tag, list(content.keys), dict(content.properties)) == ("new", ["k1", "k2"], {"a": "1", "b": "2"})
    assert (content.message_group, content.born_at_ms, content.born_host) == ("g", NOW - 1, "here")
    assert (content.body_encoding, content.body_bytes) == ("IDENTITY", len(MESSAGE.body))
    assert not content.HasField("body")
    assert get("orders", MESSAGE_ID, with_body=True).content.body == MESSAGE.body


@pytest.mark.parametrize(
    ("topic", "message_id"), [("orders", "01" + "CD" * 16), ("other", MESSAGE_ID), ("orders", "x")]
)
def test_an_unknown_message_is_an_answer(topic: str, message_id: str) -> None:
    """Neither an unknown topic nor an unknown id is an error."""
    found = get(topic, message_id)
    assert found.state == wire.UNKNOWN
    assert not found.HasField("content")


def test_a_message_in_a_queue_says_where() -> None:
    """Queue and offset, also when the message itself is gone."""
    queued = source.MessageStatus(state=MessageState.QUEUED, queue_id=3, queue_offset=4, stored_at_ms=NOW)
    found = get("orders", "x", of=FixedSource(found={("orders", "x"): queued}))
    assert (found.state, found.queue_id, found.queue_offset) == (wire.QUEUED, 3, 4)
    assert not found.HasField("content")


@pytest.mark.parametrize(
    ("topic", "message_id", "rule"),
    [
        ("", "x", Rule.TOPIC),
        ("a b", "x", Rule.TOPIC),
        ("t" * 128, "x", Rule.TOPIC),
        ("orders", "", Rule.MESSAGE_ID),
        ("orders", "  ", Rule.MESSAGE_ID),
        ("orders", "é" * 128, Rule.MESSAGE_ID),
    ],
)
def test_names_that_cannot_be_are_refused(topic: str, message_id: str, rule: Rule) -> None:
    """By the same rules as a send."""
    with pytest.raises(Refused) as caught:
        get(topic, message_id)
    assert caught.value.rule is rule


def test_a_stored_message_that_cannot_be_read_is_corruption() -> None:
    """It is not shown as an empty one."""
    broken = replace(FixedSource().found["orders", MESSAGE_ID], payload=b"\xff\xff")
    with pytest.raises(StoreCorrupt):
        get("orders", MESSAGE_ID, of=FixedSource(found={("orders", MESSAGE_ID): broken}))


@pytest.mark.parametrize(
    ("error", "code", "is_ours"),
    [
        (Refused(Rule.TOPIC, "no"), 3, False),
        (Refused(Rule.NOT_FOUND, "no"), 5, False),
        (Overloaded("much", limit=1), 8, False),
        (BrokerUnavailable("gone"), 14, False),
        (StoreFailed("gone"), 14, False),
        (StoreBusy("busy"), 14, False),
        (StoreCorrupt("damage at 7"), 13, True),
        (KeyError("secret"), 13, True),
    ],
)
def test_every_error_has_a_status(error: Exception, code: int, is_ours: bool) -> None:
    """Errors of our trees say what they are; others say nothing of the inside."""
    refusal = refusal_of(error)
    assert (refusal.code, refusal.is_ours) == (code, is_ours)
    assert "secret" not in refusal.text


def test_the_handler_table_is_the_whole_service() -> None:
    """A transport needs the paths, the request classes and the functions, nothing else."""
    table = handlers(service_over(FixedSource()))
    assert list(table) == [f"/rockdmq.admin.v1.AdminService/{name}" for name in wire.METHODS]
    assert list(wire.METHODS)[:3] == ["GetStatus", "ListTopics", "GetMessage"]
    handler = table["/rockdmq.admin.v1.AdminService/GetStatus"]

    async def call() -> Message:
        return await handler.call(handler.request_class())

    assert isinstance(asyncio.run(call()), wire.GetStatusResponse)


def test_states_have_the_numbers_of_the_wire() -> None:
    """The two lists are one."""
    lists = (
        (source.CellState, wire.CellState),
        (MessageState, wire.MessageState),
        (Reason, wire.Reason),
    )
    for ours, theirs in lists:
        assert {state.name: state.value for state in ours} == {
            name: number for name, number in theirs.items() if number
        }


def test_kinds_and_states_of_jobs_have_the_names_of_the_wire() -> None:
    """They are text in the daemon and numbers on the wire; what one side lacks could not be told."""
    for ours, theirs in ((JobKind, wire.JobKind), (JobState, wire.JobState)):
        assert {member.name for member in ours} == {name for name, number in theirs.items() if number}


@pytest.mark.skipif(
    importlib.util.find_spec("grpc_tools") is None, reason="the compiler (grpcio-tools) is not installed"
)
def test_generated_files_are_fresh(tmp_path: Path) -> None:
    """The committed descriptor set and stub are what tools/generate_wire.py makes of the .proto file."""
    subprocess.run(
        [sys.executable, str(ROOT / "tools" / "generate_wire.py"), "--out", str(tmp_path)], check=True, timeout=60
    )
    for name in ("admin_v1.desc", "admin_v1.pyi"):
        assert (tmp_path / name).read_bytes() == (ADMIN / name).read_bytes(), f"{name} is stale"
