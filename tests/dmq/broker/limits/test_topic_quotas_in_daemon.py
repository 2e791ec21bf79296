"""A topic with a quota, as an official client meets it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.clients.official.client import PYTHON, ClientError, OfficialClient
from support.rigs.daemon.process import Daemon

from broker_adapter.wire import rocketmq_v2 as wire
from dmq.admin.client import AdminClient

pytestmark = pytest.mark.integration

TOPIC, GROUP, OTHER = "orders", "billing", "other"


def refused(client: OfficialClient, due_ms: int) -> None:
    """A delayed message is refused, and the client says why."""
    with pytest.raises(ClientError, match=r"quota max_pending of topic orders: 2 pending, 1 more asked for") as caught:
        client.send("p", TOPIC, body="one too many", deliver_at_ms=due_ms)
    assert str(int(wire.TOO_MANY_REQUESTS)) in f"{caught.value} {caught.value.code}"


def test_a_client_gets_the_reason_and_succeeds_once_there_is_room(tmp_path: Path) -> None:
    """42900 with the quota, before and after a kill; what is due at once and other topics are served all the same."""
    due_ms = time.time_ns() // 1_000_000 + 3_600_000
    with Daemon(tmp_path / "data") as daemon, AdminClient(daemon.address) as admin:
        admin.create_topic(TOPIC)
        admin.set_topic(TOPIC, max_pending=2)
        with OfficialClient(PYTHON, tmp_path, daemon.address) as client:
            client.start("p", "producer", TOPIC)
            for number in range(2):
                client.send("p", TOPIC, body=f"b-{number}", deliver_at_ms=due_ms)
            refused(client, due_ms)
        daemon.kill()
        daemon.restart()
        with OfficialClient(PYTHON, tmp_path, daemon.address) as client:
            for name, topic in (("p", TOPIC), ("o", OTHER)):
                client.start(name, "producer", topic)
            client.start("c", "simple", TOPIC, group=GROUP)
            refused(client, due_ms)
            client.send("o", OTHER, body="b", deliver_at_ms=due_ms)
            now = client.send("p", TOPIC, body="b-3")
            assert [each["message_id"] for each in client.receive_until("c", 1)] == [now]
            (quota,) = admin.topic(TOPIC).quotas
            assert (quota.name, quota.quota, quota.used, quota.limit) == (TOPIC, "max_pending", 2, 2)
            admin.set_topic(TOPIC, max_pending=3)
            client.send("p", TOPIC, body="b-4", deliver_at_ms=due_ms)
