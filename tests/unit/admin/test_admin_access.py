"""The admin service behind access keys: what an operator may, and what somebody who looks after one group may."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.message import Message
from support.acl import HOOK, OPERATOR, SHOP, Key, write_acl

from broker_adapter.clock import ManualClock
from broker_adapter.errors import Refused
from dmq.acl.file import KeyFile
from dmq.acl.guard import Guard
from dmq.admin import admin_v1 as wire
from dmq.admin.access import NEEDS, OF_TOPIC, admitting
from dmq.admin.service import refusal_of

CLOCK = ManualClock()
OWN, OTHER = "redelivery", "billing"  # of HOOK, and not


@pytest.fixture
def guard(tmp_path: Path) -> Guard:
    return Guard(KeyFile(write_acl(tmp_path), CLOCK), CLOCK)


ADMITTED, FORBIDDEN, UNAUTHORIZED = 0, 7, 16  # statuses of gRPC


def status_of(guard: Guard, key: Key, rpc: str, request: Message) -> int:
    """Return the status with which a call ends, as far as the guard is concerned."""
    try:
        admitting(wire.METHODS[rpc].path, guard)(dict(key.signer(CLOCK).metadata()).get, request)
    except Refused as refused:
        return refusal_of(refused).code
    return ADMITTED


@pytest.mark.parametrize("rpc", wire.METHODS)
def test_an_operator_may_call_everything_and_others_nothing(rpc: str, guard: Guard) -> None:
    """Also what is not in the table, such as an RPC that was added."""
    request = wire.METHODS[rpc].request_class()
    assert status_of(guard, OPERATOR, rpc, request) == ADMITTED
    assert status_of(guard, SHOP, rpc, request) == FORBIDDEN
    assert status_of(guard, Key("operator", "guess"), rpc, request) == UNAUTHORIZED


@pytest.mark.parametrize("rpc", sorted(NEEDS.keys() - OF_TOPIC))
def test_a_group_has_its_own_administrators(rpc: str, guard: Guard) -> None:
    """They look after that group, and no other, and not all of them."""
    request_class = wire.METHODS[rpc].request_class
    assert status_of(guard, HOOK, rpc, request_class(group=OWN)) == ADMITTED
    assert status_of(guard, HOOK, rpc, request_class(group=OTHER)) == FORBIDDEN
    assert status_of(guard, HOOK, rpc, request_class()) == FORBIDDEN


@pytest.mark.parametrize("rpc", sorted(OF_TOPIC))
def test_a_topic_is_its_senders(rpc: str, guard: Guard) -> None:
    """Who may send to it may change what waits in it, and in no other one."""
    request_class = wire.METHODS[rpc].request_class
    assert status_of(guard, SHOP, rpc, request_class(topic="orders")) == ADMITTED
    assert status_of(guard, SHOP, rpc, request_class(topic="billing")) == FORBIDDEN
    assert status_of(guard, HOOK, rpc, request_class(topic="orders")) == FORBIDDEN


def test_a_redrive_to_another_topic_is_a_send(guard: Guard) -> None:
    """Who looks after a group does not send wherever he likes."""
    assert status_of(guard, HOOK, "StartJob", wire.StartJobRequest(group=OWN, to_topic="redelivery_orders")) == ADMITTED
    assert status_of(guard, HOOK, "StartJob", wire.StartJobRequest(group=OWN, to_topic="orders")) == FORBIDDEN
    assert status_of(guard, HOOK, "StartJob", wire.StartJobRequest(group=OWN, all_groups=True)) == FORBIDDEN


def test_without_a_guard_everybody_may() -> None:
    """Nothing is even looked at."""
    admitting(wire.METHODS["GetStatus"].path, None)(lambda _: None, wire.GetStatusRequest())
