"""A Python producer without a stream is told its address in another spelling, nobody else is."""

from __future__ import annotations

import asyncio

import pytest
from support.clients.wire.protocol import TOPIC, Sidecar, from_client

from broker_adapter.runtime.clock import ManualClock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.rocketmq_server.sessions.sessions import TelemetryOutbox
from dmq.rocketmq_server.sessions.stream_reopening import RESPELL_S_MIN, other_spelling


def one(scheme: wire.AddressScheme, host: str) -> wire.Endpoints:
    return wire.Endpoints(scheme=scheme, addresses=[wire.Address(host=host, port=8081)])


@pytest.mark.parametrize(
    ("endpoints", "other"),
    [
        (one(wire.IPv4, "10.0.0.1"), one(wire.DOMAIN_NAME, "10.0.0.1")),
        (one(wire.DOMAIN_NAME, "dmq.example"), one(wire.DOMAIN_NAME, "DMQ.EXAMPLE")),
        (one(wire.IPv6, "::1"), one(wire.IPv6, "::1")),
        (wire.Endpoints(scheme=wire.IPv4), wire.Endpoints(scheme=wire.IPv4)),
    ],
)
def test_the_other_spelling_reaches_the_same_server(endpoints: wire.Endpoints, other: wire.Endpoints) -> None:
    """The same host and port; what has no other spelling stays."""
    assert other_spelling(endpoints) == other


def test_several_addresses_stay_as_they_are() -> None:
    """A domain name may have only one."""
    two = wire.Endpoints(scheme=wire.IPv4, addresses=[wire.Address(host="10.0.0.1"), wire.Address(host="10.0.0.2")])
    assert other_spelling(two) == two


DIALLED, RESPELT = one(wire.IPv4, "10.0.0.1"), one(wire.DOMAIN_NAME, "10.0.0.1")
BEAT = wire.HeartbeatRequest(client_type=wire.PRODUCER)


async def route(sidecar: Sidecar, language: str) -> wire.Endpoints:
    """Ask for a route as one dialled, and return where it leads."""
    request = wire.QueryRouteRequest(topic=TOPIC, endpoints=DIALLED)
    answer = await sidecar.ask("QueryRoute", request, from_client(language=language))
    found: wire.Endpoints = answer.message_queues[0].broker.endpoints
    return found


def test_a_python_producer_without_a_stream_is_brought_to_open_one() -> None:
    """From its first sign of life on, in turns until its stream is there; then the spelling stays."""

    async def scenario() -> None:
        clock = ManualClock()
        sidecar = Sidecar(clock)
        assert await route(sidecar, "PYTHON") == DIALLED  # nobody knows it yet: it may just be starting
        await sidecar.ask("Heartbeat", BEAT, from_client(language="PYTHON"))
        for expected in (RESPELT, DIALLED, RESPELT):
            assert [await route(sidecar, "PYTHON") for _ in range(3)] == [expected] * 3  # of several topics
            clock.advance(int(RESPELL_S_MIN * 1000))

        session = sidecar.sessions.get("client-1")
        assert session is not None
        session.outbox = TelemetryOutbox()
        clock.advance(int(RESPELL_S_MIN * 1000))
        assert await route(sidecar, "PYTHON") == RESPELT
        session.outbox = None
        assert await route(sidecar, "PYTHON") == DIALLED

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("language", "client_type"), [("JAVA", wire.PRODUCER), ("HTTP", wire.PRODUCER), ("PYTHON", wire.SIMPLE_CONSUMER)]
)
def test_other_clients_get_the_address_they_dialled(language: str, client_type: wire.ClientType) -> None:
    """They open their streams again by themselves, or are asked nothing that could not wait."""

    async def scenario() -> None:
        sidecar = Sidecar(ManualClock())
        beat = wire.HeartbeatRequest(client_type=client_type, group=wire.Resource(name="g"))
        await sidecar.ask("Heartbeat", beat, from_client(language=language))
        assert await route(sidecar, language) == DIALLED

    asyncio.run(scenario())
