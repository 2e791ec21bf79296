"""The admin service about clients of the public protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message
from support.forges.wire.admin_clients import CLIENTS, FixedClients
from support.rigs.commands.live_cell import LiveCell

from broker_adapter.contracts.errors import Refused, Rule
from dmq.admin import admin_v1 as wire
from dmq.admin.api import AdminService, refusal_of
from dmq.admin.requests.validate import CLIENT_MS_MAX
from dmq.errors import StoreCorrupt


@pytest.fixture
def ask(live: LiveCell) -> Callable[..., Any]:
    """Return the answer to a request with these clients, or raise what it raises."""

    def answer(request: Message, clients: FixedClients | None = None) -> object:
        service = AdminService(live.cell)
        if clients is not None:
            service.clients.attach(clients)

        async def call() -> object:
            return await service.handler(type(request).__name__.removesuffix("Request"))(request)

        return live.do(call())

    return answer


def test_every_field_of_a_client_reaches_the_wire(ask: Callable[..., Any]) -> None:
    """Of all groups or of one; none before the public protocol is served."""
    (producer, consumer) = ask(wire.ListClientsRequest(), FixedClients()).clients
    assert (producer.client_id, producer.kind, producer.group, producer.streams) == ("p@1", "PRODUCER", "", 0)
    assert (consumer.language, consumer.version, consumer.last_seen_at_ms) == (
        "JAVA",
        "5.2.0",
        CLIENTS[1].last_seen_at_ms,
    )
    of_group = ask(wire.ListClientsRequest(group="billing"), FixedClients())
    assert [client.client_id for client in of_group.clients] == ["c@1"]
    assert not ask(wire.ListClientsRequest()).clients
    with pytest.raises(Refused):
        ask(wire.ListClientsRequest(group="a b"), FixedClients())


def test_a_stack_and_a_verdict_come_from_the_client(ask: Callable[..., Any]) -> None:
    """With the time that it is given; the code has its name beside it."""
    clients = FixedClients()
    stack = ask(wire.GetClientStackRequest(client_id="c@1", timeout_ms=1500), clients)
    assert stack.stack.startswith("main:")
    request = wire.VerifyClientMessageRequest(
        client_id="c@1", topic="orders", message_id="waiting", timeout_ms=CLIENT_MS_MAX
    )
    verdict = ask(request, clients)
    assert (verdict.code, verdict.code_name, verdict.text) == (60000, "FAILED_TO_CONSUME_MESSAGE", "no")
    assert clients.timeouts_s == [1.5, 60.0]


@pytest.mark.parametrize("timeout_ms", [0, -1, CLIENT_MS_MAX + 1])
def test_a_client_gets_a_time_within_bounds(ask: Callable[..., Any], timeout_ms: int) -> None:
    """A question that waits for ever would be one too many."""
    for request in (
        wire.GetClientStackRequest(client_id="c@1", timeout_ms=timeout_ms),
        wire.VerifyClientMessageRequest(client_id="c@1", timeout_ms=timeout_ms),
    ):
        with pytest.raises(Refused, match="1 to 60000 ms"):
            ask(request, FixedClients())


def test_a_missing_message_is_not_found(ask: Callable[..., Any]) -> None:
    """A client, a message, or both; silence is a status of its own."""
    stack = wire.GetClientStackRequest(client_id="gone", timeout_ms=1000)
    verify = wire.VerifyClientMessageRequest(client_id="c@1", topic="orders", message_id="unknown", timeout_ms=1000)
    for request, clients in (
        (stack, None),
        (stack, FixedClients()),
        (verify, FixedClients()),
    ):
        with pytest.raises(Refused) as refused:
            ask(request, clients)
        assert refused.value.rule is Rule.NOT_FOUND
    with pytest.raises(Exception, match="did not answer") as silent:
        ask(wire.GetClientStackRequest(client_id="p@1", timeout_ms=1000), FixedClients())
    assert refusal_of(silent.value)[::2] == (10, False)


def test_a_stored_message_that_cannot_be_read_is_our_fault(ask: Callable[..., Any]) -> None:
    """And said to be damage, as everywhere."""
    request = wire.VerifyClientMessageRequest(client_id="reads", topic="orders", message_id="waiting", timeout_ms=1000)
    with pytest.raises(StoreCorrupt):
        ask(request, FixedClients())
