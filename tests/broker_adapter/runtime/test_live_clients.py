"""Who counts as alive, of clients that were heard of lately."""

from __future__ import annotations

from broker_adapter.runtime.clock import ManualClock
from broker_adapter.runtime.live_clients import CLIENT_ALIVE_S, STOOD_STILL_S, LiveClients

HOUR_MS = 3_600_000


def test_no_message_dies_without_a_listener() -> None:
    """A process that was stopped for an hour and goes on has its clients' heartbeats still to read."""
    clock = ManualClock()
    clients = LiveClients(clock)
    clients.seen("c-1")
    clock.advance(HOUR_MS)
    clients.look()
    assert clients.is_alive("c-1")


def test_a_client_that_is_silent_dies_in_its_time() -> None:
    """An hour in between in which the process was stopped adds nothing to it."""
    clock = ManualClock()
    clients = LiveClients(clock)
    clients.seen("c-1")
    silent_s = 0.0
    while clients.is_alive("c-1"):
        clock.advance(round(STOOD_STILL_S * 1000))
        silent_s += STOOD_STILL_S
        clients.look()
        if silent_s == STOOD_STILL_S:
            clock.advance(HOUR_MS)
            clients.look()
    assert silent_s == CLIENT_ALIVE_S
