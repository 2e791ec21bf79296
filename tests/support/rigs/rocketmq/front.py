"""A daemon in front of a cluster, its clients, and what it says of itself."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

from support.models.trail.read import read_trail
from support.rigs.daemon.process import Daemon
from support.rigs.rocketmq.real_time import INVISIBLE_MS, PATIENCE_S, REQUEST_MS

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.message import Delivery
from broker_adapter.rocketmq import ClusterOptions, RocketMQBroker
from broker_adapter.runtime.clock import SystemClock
from dmq.admin import admin_v1
from dmq.admin.client import AdminClient


@asynccontextmanager
async def client(daemon: Daemon) -> AsyncIterator[RocketMQBroker]:
    """A client of a daemon."""
    options = ClusterOptions(endpoints=(daemon.address,), request_timeout_ms=REQUEST_MS, sends_max=1)
    broker = RocketMQBroker(options, SystemClock())
    try:
        yield broker
    finally:
        await broker.close()


def front_of(
    cluster: Daemon, data: Path, *options: str, env: dict[str, str] | None = None, metrics: str = "off"
) -> Daemon:
    """A daemon in front of a cluster, not started."""
    return Daemon(data, "--broker", "rocketmq", "--endpoints", cluster.address, *options, env=env, metrics=metrics)


def play(scenario: Coroutine[object, object, None]) -> None:
    """Run a scenario on a loop of its own."""
    asyncio.run(scenario)


async def receive(broker: RocketMQBroker, topic: str, count: int, group: str = "readers") -> list[Delivery]:
    """Receive and acknowledge until ``count`` messages came."""
    found: list[Delivery] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(found) < count:
            some = await broker.receive(
                group, Subscription(topic), batch_max=32, invisible_ms=INVISIBLE_MS, wait_ms=5_000
            )
            await broker.ack(group, topic, [each.receipt_handle for each in some])
            found += some
    return found


def status(daemon: Daemon) -> admin_v1.Cluster:
    """What the daemon says of the cluster."""
    with AdminClient(daemon.address) as admin:
        return admin.status().cluster


async def until(daemon: Daemon, said: Callable[[admin_v1.Cluster], object]) -> admin_v1.Cluster:
    """Return what the daemon says of the cluster once it says that."""
    async with asyncio.timeout(PATIENCE_S):
        while not said(found := await asyncio.to_thread(status, daemon)):  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.05)
    return found


def kinds(daemon: Daemon) -> Counter[str]:
    """How many events of each kind the trail of a daemon has that ended."""
    trail = daemon.data / "trail"
    (cell,) = [path.stem for path in (trail / "cells").glob("*.json")]
    return Counter(event["kind"] for event in read_trail(trail, cell))
