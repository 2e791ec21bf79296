"""Retries of a group that are kept in the daemon, in front of a real cluster: by its policy, through a kill, once."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from support.rigs.daemon.process import Daemon
from support.rigs.rocketmq.cluster import cluster
from support.rigs.rocketmq.front import client, kinds, play
from support.rigs.rocketmq.real_time import a_message

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.message import Delivery
from dmq.admin import admin_v1
from dmq.admin.client import AdminClient
from dmq.admin.requests.mapping import wire_policy
from retry.policy import Fixed, RetryPolicy

pytestmark = pytest.mark.cluster
PATIENCE_S = 180.0
MESSAGES, ATTEMPTS = 12, 3


@pytest.fixture(scope="module", autouse=True)
def _running() -> None:
    cluster()


def test_a_failed_message_is_retried_here_and_nowhere_else(tmp_path: Path) -> None:
    """Each attempt comes once, the first from the cluster, the others from the daemon; a kill in between loses none."""
    topic, group = cluster().topic(), cluster().group()
    came: Counter[tuple[str, int]] = Counter()

    def settle() -> None:
        with AdminClient(front.address) as admin:
            policy = RetryPolicy(backoff=Fixed(1_000), max_attempts=ATTEMPTS)
            admin.set_group(group, policy=wire_policy(policy), retries="here")

    def ask() -> admin_v1.Group:
        with AdminClient(front.address) as admin:
            return admin.group(group)

    async def fail(count: int, renew_for: str) -> None:
        async with client(front) as mine:
            await mine.ensure_group(group)
            while sum(came.values()) < count:
                found: list[Delivery] = list(
                    await mine.receive(
                        group, Subscription(topic), batch_max=8, invisible_ms=60_000, wait_ms=5_000, renew_for=renew_for
                    )
                )
                for each in found:
                    came[each.message_id, each.delivery_attempt] += 1
                    await mine.change_invisible(group, topic, each.receipt_handle, 0)

    async def scenario() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.to_thread(settle)
            async with client(front) as mine:
                for _ in range(MESSAGES):
                    await mine.send([a_message(topic)])
            await fail(MESSAGES, "push-consumer")
            front.kill()
            front.restart()
            await fail(MESSAGES * ATTEMPTS, "")
            while (await asyncio.to_thread(ask)).dead < MESSAGES:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.1)

    with Daemon(tmp_path / "data", "--broker", "rocketmq", "--endpoints", ";".join(cluster().endpoints)) as front:
        play(scenario())
        front.stop()
        found = kinds(front)
    assert set(came.values()) == {1}
    assert Counter(attempt for _, attempt in came) == dict.fromkeys(range(1, ATTEMPTS + 1), MESSAGES)
    # A simple consumer gives back in place, so the second copy never moves.
    assert [found[kind] for kind in ("TAKEN_OVER", "RETRIED", "GIVEN_BACK", "DEAD_EXHAUSTED")] == [
        MESSAGES,
        MESSAGES,
    ] * 2
