"""Notifications of a whole daemon: over kills, at its end, in its metrics, and in `dmq config check`."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path
from urllib.request import urlopen

import pytest
from support.clients.wire.client import WireClient, a_message
from support.rigs.daemon.process import START_S_MAX, Daemon, free_port
from support.rigs.replica.pair import Pair
from support.rigs.services.webhooks import answer, is_signed, receiving, secret_file

from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.config.settings import load
from dmq.daemon.checks import problems_of

pytestmark = pytest.mark.integration


def die(daemon: Daemon, message_id: str) -> None:
    """Send a message, and make it a dead letter of the group "billing"."""
    with WireClient(daemon.address) as client:
        client.send(a_message("orders", message_id))
        (got,) = client.receive("orders", "billing", wait_s=10)
        request = wire.ForwardMessageToDeadLetterQueueRequest(
            topic=wire.Resource(name="orders"),
            group=wire.Resource(name="billing"),
            receipt_handle=got.receipt_handle,
            message_id=got.message_id,
            delivery_attempt=1,
            max_delivery_attempts=1,
        )
        assert client.ask("ForwardMessageToDeadLetterQueue", request).status.code == wire.OK


def silence(connection: socket.socket) -> None:
    """Wait for the end of the connection."""
    connection.recv(1)


def test_a_daemon_notifies_over_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notification that failed before a kill comes after it, once; an unfinished one does not delay a stop."""
    metrics = free_port()
    with receiving() as receiver:
        monkeypatch.setenv("DMQ_ON_DEAD_LETTER", receiver.url)
        monkeypatch.setenv("DMQ_WEBHOOK_SECRET_FILE", str(secret_file(tmp_path)))
        monkeypatch.setenv("DMQ_WEBHOOK_PRIVATE_ADDRESSES", "true")
        monkeypatch.setenv("DMQ_NOTIFICATION_EVERY", "1s")
        receiver.answers.put(answer(503))
        with Daemon(tmp_path / "data", metrics=f"127.0.0.1:{metrics}") as daemon:
            die(daemon, "m-1")
            failed = daemon.wait_for("notification_failed", timeout_s=START_S_MAX)
            assert failed["error"].endswith("answered with status 503")
            with urlopen(f"http://127.0.0.1:{metrics}/healthz", timeout=START_S_MAX) as page:
                assert "notifications of kind dead_letter are not delivered" in page.read().decode()
            daemon.kill()
            daemon.restart()
            daemon.wait_for("notification_sent", timeout_s=START_S_MAX)
            first, second = receiver.next(), receiver.next()
            assert is_signed(second)
            assert first.headers["webhook-id"] == second.headers["webhook-id"]
            assert second.data["errors"][0]["message_ids"] == ["m-1"]
            with urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=START_S_MAX) as page:
                assert 'dmq_notifications_sent_total{kind="dead_letter"} 1.0' in page.read().decode()
            receiver.answers.put(silence)
            die(daemon, "m-2")
            receiver.next()
            daemon.stop()
            assert len(daemon.events("notification_failed")) == 1  # the stop did not wait for the deadline
        assert receiver.webhooks.empty()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"webhook_secret_file": "gone", "webhook_private_addresses": "true"},
            "webhook_secret_file: gone cannot be read",
        ),
        ({}, "127.0.0.1: an address of a private network or of this host is not allowed"),
        ({"webhook_private_addresses": "true"}, ""),
        ({"on_dead_letter": "https://no-such-host.invalid/"}, "the host name is not known"),
    ],
)
def test_the_check_finds_what_would_fail(tmp_path: Path, settings: dict[str, object], expected: str) -> None:
    """A secret that cannot be read, a private address, an unknown host."""
    usual = {
        "data": str(tmp_path / "data"),
        "metrics_listen": "off",
        "listen": f"127.0.0.1:{free_port()}",
        "on_dead_letter": "http://127.0.0.1:1/",
        "webhook_secret_file": str(secret_file(tmp_path)),
    }
    problems = problems_of(load({**usual, **settings}), SystemClock())
    assert [expected in each for each in problems] == [True] * bool(expected)


def test_a_standby_notifies_after_its_takeover(tmp_path: Path) -> None:
    """Not before; and a notification that the lost primary could not deliver comes with its id."""
    with receiving() as receiver:
        env = {
            "DMQ_ON_DEAD_LETTER": receiver.url,
            "DMQ_WEBHOOK_SECRET_FILE": str(secret_file(tmp_path)),
            "DMQ_WEBHOOK_PRIVATE_ADDRESSES": "true",
        }
        with closing(Pair(tmp_path, env=env)) as pair:
            receiver.answers.put(answer(503))
            die(pair.primary, "m-1")
            pair.primary.wait_for("notification_failed", timeout_s=START_S_MAX)
            assert not pair.standby.events("notification_failed")
            pair.primary.kill()
            pair.take_over()
            pair.primary.wait_for("notification_sent", timeout_s=START_S_MAX)
            first, second = receiver.next(), receiver.next()
        assert first.headers["webhook-id"] == second.headers["webhook-id"]
        assert first.data == second.data
        assert receiver.webhooks.empty()
