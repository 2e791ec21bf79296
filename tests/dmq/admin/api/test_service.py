"""The admin service: what it answers, and every error becomes a status."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from support.rigs.broker.rig import TOPIC, an_envelope
from support.rigs.commands.live_cell import LiveCell

from broker_adapter.contracts.errors import BrokerUnavailable, Overloaded, Refused, Rule
from dmq.admin import admin_v1 as wire
from dmq.admin.api.dispatch import AdminDispatcher
from dmq.admin.api.service import refusal_of
from dmq.errors import StoreBusy, StoreCorrupt, StoreFailed
from dmq.states import MessageState
from retry.dead_letter import JobKind, JobState
from retry.policy import Reason

ROOT = Path(__file__).resolve().parents[4]
ADMIN = ROOT / "dmq" / "admin"


def get(live: LiveCell, topic: str, message_id: str, *, with_body: bool = False) -> wire.GetMessageResponse:
    found: wire.GetMessageResponse = live.ask(
        wire.GetMessageRequest(topic=topic, message_id=message_id, with_body=with_body)
    )
    return found


def test_a_message_is_shown_without_its_body_unless_asked(live: LiveCell) -> None:
    """Bodies are the application's; an operator has to want one."""
    found = get(live, TOPIC, "waiting")
    assert (found.state, found.queue_id, found.queue_offset) == (wire.WAITING, -1, -1)
    content = found.content
    assert (dict(content.properties), content.body_encoding, content.body_bytes) == ({"color": "red"}, "IDENTITY", 4)
    assert not content.HasField("body")
    assert get(live, TOPIC, "waiting", with_body=True).content.body == b"body"


@pytest.mark.parametrize(("topic", "message_id"), [(TOPIC, "01" + "CD" * 16), ("other", "waiting"), (TOPIC, "x")])
def test_an_unknown_message_is_an_answer(live: LiveCell, topic: str, message_id: str) -> None:
    """Neither an unknown topic nor an unknown id is an error."""
    found = get(live, topic, message_id)
    assert (found.state, found.queue_id, found.HasField("content")) == (wire.UNKNOWN, -1, False)


@pytest.mark.parametrize(
    ("topic", "message_id", "rule"),
    [
        ("", "x", Rule.TOPIC),
        ("a b", "x", Rule.TOPIC),
        ("t" * 128, "x", Rule.TOPIC),
        (TOPIC, "", Rule.MESSAGE_ID),
        (TOPIC, "  ", Rule.MESSAGE_ID),
        (TOPIC, "é" * 128, Rule.MESSAGE_ID),
    ],
)
def test_names_that_cannot_be_are_refused(live: LiveCell, topic: str, message_id: str, rule: Rule) -> None:
    """By the same rules as a send."""
    with pytest.raises(Refused) as caught:
        get(live, topic, message_id)
    assert caught.value.rule is rule


async def send_payload(live: LiveCell, payload: bytes) -> None:
    await live.rig.broker.send([an_envelope("damaged", payload=payload)])


def test_a_stored_message_that_cannot_be_read_is_corruption(live: LiveCell) -> None:
    """It is not shown as an empty one, and a client that cannot read it is not the one at fault."""
    live.do(send_payload(live, b"\xff\xff"))
    with pytest.raises(StoreCorrupt):
        get(live, TOPIC, "damaged")


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


def test_each_call_has_its_method(live: LiveCell) -> None:
    """One method of one part has the name of a call; a transport finds them by path."""
    paths = AdminDispatcher(live.admin).paths
    assert list(paths) == [f"/rockdmq.admin.v1.AdminService/{name}" for name in wire.METHODS]


def test_states_have_the_numbers_of_the_wire() -> None:
    """The two lists are one."""
    for ours, theirs in ((MessageState, wire.MessageState), (Reason, wire.Reason)):
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
