"""A daemon whose topic and group are paused and resumed, as an official client sees it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.clients.official.client import LANGUAGES, OfficialClient
from support.rigs.daemon.process import Daemon

from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient

pytestmark = pytest.mark.integration

TOPIC, GROUP, COUNT = "orders", "billing", 5
PATIENCE_S = 30.0


def shown_once(admin: AdminClient, holds: Callable[[wire.Topic], bool]) -> wire.Topic:
    """The topic, once something holds of it: what happens by itself has no other sign."""
    until_s = time.monotonic() + PATIENCE_S
    while not holds(found := admin.topic(TOPIC)) and time.monotonic() < until_s:
        time.sleep(0.05)
    return found


def test_a_client_gets_nothing_until_it_is_resumed(tmp_path: Path) -> None:
    """Delayed messages fall due in a pause, over a kill; then they come, first to the topic and then to the group."""
    python = next(each for each in LANGUAGES if each.name == "python")
    with Daemon(tmp_path / "data") as daemon, AdminClient(daemon.address) as admin:
        admin.create_topic(TOPIC)
        admin.create_group(GROUP)
        admin.set_topic(TOPIC, is_paused=True)
        admin.set_group(GROUP, is_paused=True)
        with OfficialClient(python, tmp_path, daemon.address) as client:
            client.start("p", "producer", TOPIC)
            client.start("c", "simple", TOPIC, group=GROUP)
            due_ms = time.time_ns() // 1_000_000 + 1_500
            sent = {client.send("p", TOPIC, body=f"b-{number}", deliver_at_ms=due_ms) for number in range(COUNT)}
            assert shown_once(admin, lambda topic: topic.held == COUNT).held == COUNT
            daemon.kill()
            daemon.restart()
            shown = admin.topic(TOPIC)
            assert (shown.held, shown.pending, shown.stored) == (COUNT, COUNT, 0)
            admin.set_topic(TOPIC, is_paused=False)
            assert shown_once(admin, lambda topic: topic.stored == COUNT).stored == COUNT
            assert admin.status().timeline.held == 0
            receiving = client.begin("receive", name="c", invisible_s=30)
            admin.group(GROUP)  # the receive waits by now, or comes later: either way it gets nothing yet
            assert not receiving.done()
            admin.set_group(GROUP, is_paused=False)
            found = receiving.result(PATIENCE_S)
            found += client.receive_until("c", COUNT - len(found)) if len(found) < COUNT else []
            assert {each["message_id"] for each in found} == sent
