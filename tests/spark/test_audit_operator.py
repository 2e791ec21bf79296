"""What an operator removes and resets is an exit of its own: the audit of a real daemon's trail stays clean."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from support.daemon import Daemon
from support.wire_client import WireClient, a_message

from broker_adapter.wire import rocketmq_v2 as public
from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient, CallRefused
from spark_audit.explain import explained
from spark_audit.jobs.audit import run_audit
from spark_audit.jobs.options import Options

TOPIC, GROUP, OTHER = "orders", "workers", "readers"
_LATER_MS = 3_600_000


def send(client: WireClient, first: int, count: int, *, delay_ms: int = 0) -> None:
    due_ms = int(time.time() * 1000) + delay_ms if delay_ms else 0
    messages = [a_message(TOPIC, f"{number:034X}", deliver_at_ms=due_ms) for number in range(first, first + count)]
    assert client.send(*messages).status.code == public.OK


def reset(admin: AdminClient, group: str, **to: bool) -> None:
    admin.reset_group(wire.ResetGroupRequest(group=group, topic=TOPIC, **to))


@pytest.mark.timeout(240)
def test_what_operators_do_leaves_a_clean_trail(spark: SparkSession, tmp_path: Path) -> None:
    """A group set to the end and back to the beginning, removed and made anew; its topic the same, with a kill."""
    with (
        Daemon(tmp_path / "data", env=os.environ | {"DMQ_TRAIL_EVERY": "1s"}) as daemon,
        WireClient(daemon.address) as client,
        AdminClient(daemon.address) as admin,
    ):
        send(client, 0, 30)
        assert len(client.drain(TOPIC, GROUP, 10)) >= 10
        assert len(client.drain(TOPIC, OTHER, 30)) == 30
        reset(admin, GROUP, end=True)
        send(client, 100, 20)
        assert len(client.drain(TOPIC, GROUP, 20)) == 20
        reset(admin, GROUP, begin=True)
        assert len(client.drain(TOPIC, GROUP, 50)) == 50
        admin.remove_group(OTHER, force=True)
        assert len(client.drain(TOPIC, OTHER, 50)) == 50
        send(client, 200, 20)
        send(client, 300, 5, delay_ms=_LATER_MS)
        with pytest.raises(CallRefused, match="5 wait for their time"):
            admin.remove_topic(TOPIC)
        admin.remove_topic(TOPIC, force=True)
        send(client, 400, 20)
        assert len(client.drain(TOPIC, GROUP, 20)) == 20
        daemon.kill()
        daemon.restart()
        send(client, 500, 5)
        admin.take_snapshot()
        daemon.stop()
    outcome = run_audit(spark, str(tmp_path / "data" / "trail"), Options())
    assert (outcome.findings, outcome.exit_code) == ([], 0)
    ledger = {row["group"]: row for row in outcome.report["fired"] if row["topic"] == TOPIC}
    assert (ledger[GROUP]["expired"], ledger[OTHER]["expired"], ledger[GROUP]["unread"]) == (20, 20, 5)
    assert sum(row["cancelled"] for row in outcome.report["scheduled"]) == 5


@pytest.mark.timeout(240)
def test_retention_leaves_a_clean_trail(spark: SparkSession, tmp_path: Path) -> None:
    """Read by all, unread by one, unread by everybody, with a kill in between and a group that comes later."""
    with (
        Daemon(tmp_path / "data", env=os.environ | {"DMQ_TRAIL_EVERY": "1s", "DMQ_KEEP_TIME": "1s"}) as daemon,
        WireClient(daemon.address) as client,
        AdminClient(daemon.address) as admin,
    ):

        def gone() -> None:
            until_s = time.monotonic() + 20
            while admin.topic(TOPIC).stored:
                assert time.monotonic() < until_s
                time.sleep(0.1)

        send(client, 0, 20)
        gone()  # nobody was there
        send(client, 100, 20)
        assert len(client.drain(TOPIC, GROUP, 20)) == 20
        gone()
        daemon.kill()
        daemon.restart()
        assert client.receive(TOPIC, OTHER) == []
        send(client, 200, 20)
        assert len(client.drain(TOPIC, GROUP, 20)) == 20
        assert len(client.drain(TOPIC, OTHER, 5)) >= 5
        read = 20 - admin.topic(TOPIC).readers[0].unread
        admin.set_topic(TOPIC, keep=wire.KeepChange(unread="no"))
        gone()
        admin.set_topic(TOPIC, keep=wire.KeepChange(time_ms=0))  # what is sent now stays, however slow the rest is
        send(client, 300, 5)
        admin.take_snapshot()
        daemon.stop()
    outcome = run_audit(spark, str(tmp_path / "data" / "trail"), Options())
    assert (outcome.findings, outcome.exit_code) == ([], 0)
    ledger = {row["group"]: row for row in outcome.report["fired"] if row["topic"] == TOPIC}
    assert (ledger[GROUP]["acked"], ledger[GROUP]["expired"], ledger[GROUP]["unread"]) == (40, 0, 5)
    assert (ledger[OTHER]["acked"], ledger[OTHER]["expired"], ledger[OTHER]["unread"]) == (read, 20 - read, 5)


def dmq(daemon: Daemon, *arguments: str) -> str:
    """Run the command against a daemon; it must succeed."""
    command = [sys.executable, "-m", "dmq", *arguments, "--address", daemon.address]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def forward(client: WireClient, count: int) -> None:
    """Let the group give up everything that is there for it."""
    given_up = 0
    while given_up < count:
        for found in client.receive(TOPIC, GROUP):
            request = public.ForwardMessageToDeadLetterQueueRequest(
                group=public.Resource(name=GROUP),
                topic=public.Resource(name=TOPIC),
                receipt_handle=found.receipt_handle,
                message_id=found.message_id,
                delivery_attempt=1,
                max_delivery_attempts=1,
            )
            assert client.ask("ForwardMessageToDeadLetterQueue", request).status.code == public.OK
            given_up += 1


@pytest.mark.timeout(240)
def test_dead_letters_of_a_group_that_goes_are_told_by_name(spark: SparkSession, tmp_path: Path) -> None:
    """Redriven to the group alone, to everybody once it is gone, purged: each is attributed, and the audit is clean."""
    with (
        Daemon(tmp_path / "data", env=os.environ | {"DMQ_TRAIL_EVERY": "1s"}) as daemon,
        WireClient(daemon.address) as client,
        AdminClient(daemon.address) as admin,
    ):
        send(client, 0, 16)
        assert len(client.drain(TOPIC, OTHER, 16)) == 16
        forward(client, 16)
        assert "redriven 4, passed over 12" in dmq(daemon, "dead", "redrive", GROUP, *ids_of(0, 4))
        assert client.receive(TOPIC, OTHER) == []
        assert len(client.drain(TOPIC, GROUP, 3)) >= 3
        daemon.kill()
        daemon.restart()
        dmq(daemon, "group", "rm", GROUP, "--force", "--yes")
        assert json.loads(dmq(daemon, "dead", "groups", "-o", "json")) == [
            {"group": GROUP, "dead": 12, "removed": True}
        ]
        assert "redriven 4" in dmq(daemon, "dead", "redrive", GROUP, "--all-groups", *ids_of(4, 4))
        dmq(daemon, "dead", "purge", GROUP, "--why", "old", *ids_of(8, 6))
        shown = json.loads(dmq(daemon, "dead", "show", GROUP, f"{0:034X}", "-o", "json"))
        child = shown[0]["outcome_note"].split()[1]
        assert shown[0]["outcome_note"] == f"{TOPIC} {child} for group {GROUP}"
        assert len(client.drain(TOPIC, OTHER, 4)) == 4
        send(client, 100, 1)
        admin.take_snapshot()
        daemon.stop()
    trail = tmp_path / "data" / "trail"
    outcome = run_audit(spark, str(trail), Options())
    assert (outcome.findings, outcome.exit_code) == ([], 0)
    (dead,) = outcome.report["dead"]
    assert (dead["group"], dead["count"], dead["redriven"], dead["purged"]) == (GROUP, 16, 8, 6)
    ledger = {row["group"]: row for row in outcome.report["fired"] if row["topic"] == TOPIC}
    assert ledger[OTHER]["fired"] == 21
    assert ledger[GROUP]["fired"] == 20
    told = explained(child, trail, io.StringIO())
    assert [each["group"] for each in told["outcomes"]] == [GROUP]
    assert f"%DLQ%{GROUP} at offset {shown[0]['offset']}, for group {GROUP} alone" in told["events"][0]["words"]
    (letter, *_) = [each for each in explained(f"{8:034X}", trail, io.StringIO())["outcomes"] if each["group"] == GROUP]
    assert letter["words"] == "had its dead letter thrown away"


def ids_of(first: int, count: int) -> list[str]:
    """Name messages to a command."""
    return [word for number in range(first, first + count) for word in ("--id", f"{number:034X}")]
