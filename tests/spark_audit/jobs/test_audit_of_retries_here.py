"""The trail of a daemon in front of a cluster that keeps a group's retries: clean, and a copy that is lost is named."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.effort import at_length
from support.forges.trail.bend import Bent
from support.rigs.daemon.process import Daemon
from support.rigs.rocketmq.front import client, front_of, play
from support.rigs.rocketmq.real_time import PATIENCE_S, a_message

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.message import Delivery
from broker_adapter.wire.mapping import decode
from dmq.admin.client import AdminClient
from dmq.admin.requests.mapping import wire_policy
from retry.policy import Fixed, RetryPolicy
from spark_audit.engines.table import TableEngine
from spark_audit.jobs.audit import run_audit
from spark_audit.jobs.options import Options

pytestmark = [pytest.mark.spark, at_length]
_FINE, _DIES, _WAITS = 6, 2, 1


async def consume(front: Daemon) -> None:
    """Fail some messages once and others always, until all but those that wait have their end."""

    def settle(policy: RetryPolicy) -> None:
        with AdminClient(front.address) as admin:
            admin.set_group("readers", policy=wire_policy(policy), retries="here")

    await asyncio.to_thread(settle, RetryPolicy(backoff=Fixed(50), max_attempts=2))
    ended = 0
    async with client(front) as mine, asyncio.timeout(PATIENCE_S):
        bodies = [b"fine"] * _FINE + [b"dies"] * _DIES
        for body in bodies:
            await mine.send([a_message("orders", body)])
        while ended < len(bodies):
            for each in await mine.receive(
                "readers", Subscription("orders"), batch_max=8, invisible_ms=60_000, wait_ms=5_000, renew_for="push"
            ):
                is_last = each.delivery_attempt == 2
                if is_last and decode(each.payload).body == b"fine":
                    await mine.ack("readers", "orders", [each.receipt_handle])
                else:
                    await mine.change_invisible("readers", "orders", each.receipt_handle, 10)
                ended += is_last
        await asyncio.to_thread(settle, RetryPolicy(backoff=Fixed(3_600_000)))
        await mine.send([a_message("orders", b"waits")])
        found: list[Delivery] = []
        while not found:
            found = list(
                await mine.receive(
                    "readers", Subscription("orders"), batch_max=1, invisible_ms=60_000, wait_ms=5_000, renew_for="push"
                )
            )
        await mine.change_invisible("readers", "orders", found[0].receipt_handle, 10)


@pytest.fixture(scope="module")
def trail(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the daemon left."""
    folder = tmp_path_factory.mktemp("retries-here")
    with Daemon(folder / "cluster") as cluster, front_of(cluster, folder / "data") as front:

        async def scenario() -> None:
            async with client(cluster) as theirs:
                await theirs.ensure_group("readers")
            await consume(front)

        play(scenario())
        front.stop()
        return front.data / "trail"


def test_it_is_clean(engine: TableEngine, trail: Path) -> None:
    """Each failure at the cluster has its end here."""
    outcome = run_audit(engine, str(trail), Options())
    assert not outcome.findings
    (row,) = [row for row in outcome.report["fired"] if (row["topic"], row["group"]) == ("orders", "readers")]
    assert (row["fired"], row["acked"], row["dead"], row["in_retry"]) == (_FINE + _DIES + _WAITS, _FINE, _DIES, _WAITS)


def test_a_lost_retry_is_named(engine: TableEngine, trail: Path) -> None:
    """Without the event of a retry its message is lost, by its id."""
    (cell,) = [path.stem for path in (trail / "cells").glob("*.json")]
    bent = Bent(trail, cell)
    acked = {event.message_id for event in bent.events if event.kind == "ACKED"}
    victim = next(event for event in bent.events if event.kind == "RETRIED" and event.message_id in acked)
    later = [event for event in bent.events if event.message_id == victim.message_id and event.topic == "orders"]
    for event in [each for each in later if each.sequence >= victim.sequence]:
        bent.drop(event)
    bent.save()
    found = run_audit(engine, str(trail), Options()).findings
    assert [(each["kind"], each["group"]) for each in found] == [("LOST", "readers")]
